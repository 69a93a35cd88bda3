"""AFT's prior (LRNN-softmax), p_t(i) ~ exp(k_i) for each channel (mathematics 1.3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fem_megatron.layers.priors.base import Parts, Prior
from fem_megatron.layers.update import Context, rms_norm
from fem_megatron.shapes.priors.aft import AftShape
from kernels.aft_read import aft_read


class AftPrior(Prior):
    """Its decoding state is a running maximum and sums relative to it for each channel, fp32."""

    def forward(self, parts: Parts, v: Tensor, beta: Tensor | None, lam: Tensor | None, gate: Tensor | None, context: Context) -> Tensor:
        """o as `Prior.forward` says, from the slices q and k; with ``after``, times sigmoid(q)."""
        shape = self.shape.prior
        assert isinstance(shape, AftShape)
        q, k = (parts[name].permute(1, 2, 0, 3) for name in ("q", "k"))
        query = None
        if shape.query == "inside":
            query = self._positive(q)
        else:
            gate = q.sigmoid() if gate is None else q.sigmoid() * gate
        valid = context.valid_now(v.shape[2])
        o, sums = aft_read(
            k,
            v,
            beta,
            lam,
            gate,
            query=query,
            valid=None if valid is None else valid.T,
            state=context.recall("sums"),
            causal=context.causal,
        )
        if sums is not None:
            context.keep("sums", sums)
        return o

    def _positive(self, q: Tensor) -> Tensor:
        """softplus(q), RMS-normalised over a head; never 0, whose logarithm the free energy would be."""
        wide = torch.promote_types(q.dtype, torch.float32)
        return rms_norm(softplus(q.to(wide)), None, self.shape.norm_eps).clamp_min(torch.finfo(wide).tiny)
