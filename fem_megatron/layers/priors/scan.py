"""The read under the priors that are one scan of linear attention, in training and in decoding. Which q, k and decay, the priors say."""

from __future__ import annotations

import torch
from torch import Tensor

from fem_megatron.layers.priors.base import Parts, Prior
from fem_megatron.layers.update import Context, product_type
from kernels.free_energy import ValueWindow, free_energy_read
from kernels.linear_attention import linear_attention, log_weights


class ScanPrior(Prior):
    """p_t(i) ~ (q_t * exp(c_t - c_i)) . k_i with q, k >= 0: one scan over [v, U, 1], the ones being the normaliser.

    Its decoding state is that scan's, and a window of the values seen: fp32, the same at any length. Padding has a key of zeros and no
    decay, so it adds nothing and moves nothing; a token that reads nothing reads itself.
    """

    def features(self, parts: Parts, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        """q and k [s, b, h, d_k], not negative, and the log-decay [s, b, h, 1 or d_k], at most 0, or None; float32 or float64."""
        raise NotImplementedError

    def forward(self, parts: Parts, v: Tensor, beta: Tensor | None, lam: Tensor | None, gate: Tensor | None, context: Context) -> Tensor:
        q, k, decay = self.features(parts, context)
        valid = context.valid_now(v.shape[2])
        if valid is not None:
            k = k * valid[..., None, None]
            decay = None if decay is None else decay * valid[..., None, None]
            v = v * valid.T[:, None, :, None]
        q, k = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3)
        decay = None if decay is None else decay.permute(1, 2, 0, 3)
        if decay is not None and decay.shape[-1] == 1:
            decay = decay[..., 0]
        if context.state is not None:
            return self._decode(q, k, decay, v, beta, lam, gate, context)
        narrow = product_type(v)
        near, far = q.to(narrow), k.to(narrow)

        def read(streams: Tensor) -> Tensor:
            made, _ = linear_attention(near, far, streams.to(narrow), decay, causal=context.causal, normalise=True)
            return made.to(streams.dtype)

        return free_energy_read(
            v,
            beta,
            lam,
            gate,
            read,
            lambda start, stop: log_weights(q, k, decay, start, stop, causal=context.causal),
            terms=q.shape[-1] if decay is not None and decay.dim() == 4 else 1,
            exact=self.shape.backend == "reference",
        )

    def _decode(
        self,
        q: Tensor,
        k: Tensor,
        decay: Tensor | None,
        v: Tensor,
        beta: Tensor | None,
        lam: Tensor | None,
        gate: Tensor | None,
        context: Context,
    ) -> Tensor:
        """The read of some more tokens, with the state of those before them."""
        values, sums, width = v.to(q.dtype), context.recall("sums"), v.shape[-1]
        if beta is None:
            out, sums = linear_attention(q, k, values, decay, sums, normalise=True)
        else:
            window = ValueWindow(values, beta.to(q.dtype), context.recall("window"))
            if sums is not None:
                sums = torch.cat((sums[..., :width], sums[..., width:-1] * window.rescale, sums[..., -1:]), dim=-1)
            read, sums = linear_attention(q, k, torch.cat((values, window.stream()), dim=-1), decay, sums, normalise=True)
            out, z = read.chunk(2, dim=-1)
            gap = window.gap(out, z)
            out = out + (gap if lam is None else lam * gap)
            context.keep("window", window.state)
        context.keep("sums", sums)
        return (out if gate is None else gate * out).to(v.dtype)
