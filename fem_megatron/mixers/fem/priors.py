"""Layers of the Free Energy Mixer's priors: the weights p_t(i) and the read under them.

A new prior is a class in this module and a class in ``prior_shapes`` whose ``layer_class`` names
it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fem_megatron.context_parallel.ring import softmax_read
from fem_megatron.context_parallel.scans import linear_scan
from fem_megatron.context_parallel.split import SequenceSplit
from fem_megatron.mixers.fem.prior_shapes import AftShape, LinearShape, MambaShape, SoftmaxShape
from fem_megatron.mixers.fem.shape import FemShape
from fem_megatron.state import Context
from fem_megatron.update import Layer, product_type, rms_norm
from kernels.aft_read import aft_read
from kernels.free_energy import ValueWindow, free_energy_read
from kernels.free_energy.linear import linear_read
from kernels.free_energy.op import value_window
from kernels.free_energy.ranges import Decision, Ranges
from kernels.linear_attention import linear_attention
from kernels.linear_attention.op import features
from kernels.ssm_read import ssm_read

Parts = dict[str, Tensor]
"""Slices of the projection, by the names in the prior's shape.

Each is [s, b, local heads, width] and scaled by the conditioner; q and k are rotated.
"""


class Values(NamedTuple):
    """Values of a read and the parameters that combine mu and F.

    v, lam, gate [b, h, s, d_v]; beta [h, d_v]. beta None: o = mu. lam None: o = F. gate None: no
    gate.
    """

    v: Tensor
    beta: Tensor | None = None
    lam: Tensor | None = None
    gate: Tensor | None = None


class Prior(Layer):
    """A prior p_t(i) and the free-energy read under it.

    The mixer adds its parameters (``shape.prior.weights()``).
    """

    def __init__(self, shape: FemShape) -> None:
        super().__init__()
        self.shape = shape
        self.ranges: dict[tuple[int, bool], Ranges] = {}

    def decision(self, v: Tensor, context: Context, *, agreed: bool = False) -> Decision | None:
        """Return the choice between the fast and the exact form for this call's reads, or None.

        The choice is based on earlier calls of the same iteration. Under torch.compile the result
        is None, so that each read decides separately.

        agreed: True if all ranks that share a sequence use the same range, so that they decide
        alike.
        """
        if torch.compiler.is_compiling():
            return None
        return self.ranges.setdefault((context.iteration, agreed), Ranges()).decide(v)

    def forward(self, parts: Parts, values: Values, context: Context) -> Tensor:
        """Return o = gate * ((1 - lam) mu + lam F), [b, h, s, d_v] in the values' dtype."""
        raise NotImplementedError


class ScanPrior(Prior):
    """p_t(i) ~ (q_t * exp(c_t - c_i)) . k_i with q, k >= 0: one scan over [v, U, 1].

    c is the cumulative log-decay, U the free energy's second stream (`kernels.free_energy`). The
    channel of ones gives the normaliser. The decoding state is the scan's state and the range of
    the values: fp32, of constant size. Padding has zero keys and no decay, so it does not change
    the state. A token with no readable keys reads itself.
    """

    eps: float | None = None

    def features(self, parts: Parts) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return q, k and the log-decay; each may be None.

        q and k: [s, b, h, d_k], in the products' dtype; with ``eps``, they are before the feature
        map relu(x) + eps, else not negative. log-decay: [s, b, h, 1 or d_k], at most 0, wide.
        Without q and k the weights are those of the decay alone.
        """
        raise NotImplementedError

    def forward(self, parts: Parts, values: Values, context: Context) -> Tensor:
        q, k, decay = (None if t is None else t.permute(1, 2, 0, 3) for t in self.features(parts))
        v, beta, lam, gate = values
        split = context.passing if context.causal and self.shape.backend != "reference" else None
        decision = span = None
        if beta is not None and context.state is None:
            decision = self.decision(v, context, agreed=split is not None)
        if beta is not None and split is not None:
            span = self._span(v, beta, split, decision or Decision())
        passes = split is not None and (beta is None or span is not None)

        def read(
            valid: Tensor | None,
            q: Tensor | None,
            k: Tensor | None,
            decay: Tensor | None,
            v: Tensor,
            lam: Tensor | None,
            gate: Tensor | None,
            beta: Tensor | None,
        ) -> Tensor:
            if q is None or k is None:
                assert decay is not None
                q = k = torch.ones_like(decay)
            eps = self.eps
            if valid is not None or context.state is not None:
                q, k, eps = features(q, eps), features(k, eps), None
            if valid is not None:
                valid = valid[:, None, -v.shape[2] :, None]
                k, v, decay = k * valid, v * valid, None if decay is None else decay * valid
            if decay is not None and decay.shape[-1] == 1:
                decay = decay.squeeze(-1)
            values = Values(v, beta, lam, gate)
            if context.state is not None:
                return self._decode(q, k, decay, values, context)
            if passes:
                return self._pass(q, k, decay, values, span, eps, context)
            return self._read(q, k, decay, values, decision, eps=eps, causal=context.causal)

        return context.per_document(read, q, k, decay, v, lam, gate, each=(beta,), passes=passes)

    def _span(
        self, v: Tensor, beta: Tensor, split: SequenceSplit, decision: Decision
    ) -> Tensor | None:
        """Return the range of each value channel over the sequence, [b, h, 2, d_v], or None.

        None means that the read needs the exact form; all ranks decide alike. Raises ValueError if
        the exact form is impossible, since it reads all tokens of a head.
        """
        span = split.span(v, time=2)
        if not decision.exact(value_window(span, beta).largest):
            return span
        if v.shape[1] % split.ranks.size:
            raise ValueError(
                f"beta * (max v - min v) is over {decision.limit:g}: the exact form reads "
                f"complete heads, and the {split.ranks.size} ranks of "
                f"parallel.context_parallel_size do not divide a rank's {v.shape[1]} heads "
                "(model.num_attention_heads); use fewer ranks"
            )
        return None

    def _pass(
        self,
        q: Tensor,
        k: Tensor,
        decay: Tensor | None,
        values: Values,
        span: Tensor | None,
        eps: float | None,
        context: Context,
    ) -> Tensor:
        """Return the read of this rank's two chunks; the scan's state passes between chunks.

        span: the values' range, which all chunks share.
        """
        q, k = (t.to(product_type(values.v)) for t in (q, k))

        def read(streams: Tensor) -> Tensor:
            given = (q, k, streams.to(q.dtype), decay, None, context)
            o, _ = linear_scan(*given, normalise=True, eps=eps)
            return o.to(streams.dtype)

        def weights(start: int, stop: int) -> Tensor:
            raise AssertionError("the exact form needs the tokens of all ranks")

        both = None if span is None else torch.cat((span, span))
        return free_energy_read(*values, read, weights, exact=False, span=both, products=q.dtype)

    def _read(
        self,
        q: Tensor,
        k: Tensor,
        decay: Tensor | None,
        values: Values,
        decision: Decision | None,
        *,
        eps: float | None,
        causal: bool,
    ) -> Tensor:
        """Return the read o of full sequences (`Prior.forward`), without a decoding state."""
        v, beta, lam, gate = values
        q, k = (t.to(product_type(v)) for t in (q, k))
        exact = True if self.shape.backend == "reference" else None
        return linear_read(
            q, k, v, decay, beta, lam, gate, eps=eps, causal=causal, exact=exact, decision=decision
        )

    def _decode(
        self, q: Tensor, k: Tensor, decay: Tensor | None, values: Values, context: Context
    ) -> Tensor:
        """Return the read o of further tokens (`Prior.forward`), and update the decoding state."""
        narrow, beta, lam, gate = values
        wide = torch.promote_types(narrow.dtype, torch.float32)
        q, k, v = (t.to(wide) for t in (q, k, narrow))
        sums, width = context.recall("sums"), v.shape[-1]
        if beta is None:
            out, sums = linear_attention(q, k, v, decay, sums, normalise=True)
        else:
            window = ValueWindow(v, beta.to(q.dtype), context.recall("window"))
            if sums is not None:
                sums = torch.cat(
                    (sums[..., :width], sums[..., width:-1] * window.rescale, sums[..., -1:]),
                    dim=-1,
                )
            read, sums = linear_attention(
                q, k, torch.cat((v, window.stream()), dim=-1), decay, sums, normalise=True
            )
            out, z = read.chunk(2, dim=-1)
            gap = window.gap(out, z)
            out = out + (gap if lam is None else lam * gap)
            context.keep("window", window.state)
        context.keep("sums", sums)
        return (out if gate is None else gate * out).to(narrow.dtype)


class SoftmaxPrior(Prior):
    """Prior of softmax attention.

    The decoding state is a KV-cache of k after RoPE and of v. Under budget (i) v is half as wide as
    in standard attention.
    """

    def forward(self, parts: Parts, values: Values, context: Context) -> Tensor:
        assert isinstance(self.shape.prior, SoftmaxShape)
        q, k = (parts[name].permute(1, 2, 0, 3) for name in ("q", "k"))
        k = context.extend("k", k, dim=2)
        values = values._replace(v=context.extend("v", values.v, dim=2))
        backend = self.shape.backend
        if context.state is not None and backend == "fused":
            backend = "auto"
        decision = None
        if context.split is not None and values.beta is not None:
            decision = self.decision(values.v, context, agreed=True)
        return softmax_read(
            context,
            q,
            k,
            *values,
            scale=self.shape.prior.scale,
            decision=decision,
            implementation=backend,
        )


class LinearPrior(ScanPrior):
    """Prior of linear attention: phi(q_t) . phi(k_i), phi(x) = relu(x) + eps after RoPE.

    Gated linear attention (GLA) adds a log-decay -(relu(a) + eps).
    """

    def __init__(self, shape: FemShape) -> None:
        super().__init__(shape)
        assert isinstance(shape.prior, LinearShape)
        self.eps = shape.prior.eps

    def features(self, parts: Parts) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        wide = torch.promote_types(parts["q"].dtype, torch.float32)
        q, k = (parts[name].to(product_type(parts[name])) for name in ("q", "k"))
        return q, k, -features(parts["decay"].to(wide), self.eps) if "decay" in parts else None


class DecayPrior(ScanPrior):
    """Prior of a running mean with decay: p_t(i) ~ exp(-sum over (i, t] of softplus(a)).

    Every token starts with weight one, which decays.
    """

    def features(self, parts: Parts) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        logit = parts["decay"]
        return None, None, -softplus(logit.to(torch.promote_types(logit.dtype, torch.float32)))


class AftPrior(Prior):
    """Prior of AFT.

    The decoding state is a running maximum and sums relative to it for each channel, fp32.
    """

    def forward(self, parts: Parts, values: Values, context: Context) -> Tensor:
        """Return o (`Prior.forward`) from the slices q and k.

        With query "after", o is multiplied by sigmoid(q).
        """
        shape = self.shape.prior
        assert isinstance(shape, AftShape)
        q, k = (parts[name].permute(1, 2, 0, 3) for name in ("q", "k"))
        v, beta, lam, gate = values
        query = None
        if shape.query == "inside":
            query = self._positive(q)
        else:
            gate = q.sigmoid() if gate is None else q.sigmoid() * gate
        call = partial(aft_read, state=context.recall("sums"), causal=context.causal)

        def read(
            valid: Tensor | None,
            k: Tensor,
            v: Tensor,
            lam: Tensor | None,
            gate: Tensor | None,
            query: Tensor | None,
            beta: Tensor | None,
        ) -> Tensor:
            valid = None if valid is None else valid[:, -v.shape[2] :]
            o, sums = call(k, v, beta=beta, lam=lam, gate=gate, query=query, valid=valid)
            if sums is not None:
                context.keep("sums", sums)
            return o

        return context.per_document(read, k, v, lam, gate, query, each=(beta,))

    def _positive(self, q: Tensor) -> Tensor:
        """Return softplus(q), RMS-normalised over a head.

        It is never 0, because the free energy takes its log.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        return rms_norm(softplus(q.to(wide)), None, self.shape.norm_eps).clamp_min(
            torch.finfo(wide).tiny
        )


EPS = 1e-6
SLOWEST_STEP, FASTEST_STEP = 1e-3, 1e-1


class MambaPrior(Prior):
    """Prior of a selective state space (formula: ``MambaShape``).

    delta = softplus(. + bias), B and C = softplus(.) + 1e-6, A = -rate. Initially the rates of a
    channel are 1, 2, ... states, and the steps of a head's channels are spaced evenly in the
    logarithm over [0.001, 0.1], as in Mamba. The decoding state is ``states`` sums for each channel
    and stream, fp32.
    """

    def forward(self, parts: Parts, values: Values, context: Context) -> Tensor:
        """Return o (`Prior.forward`) from the slices delta, b and c, before their softplus."""
        shape = self.shape.prior
        assert isinstance(shape, MambaShape)
        v, beta, lam, gate = values
        wide = torch.promote_types(v.dtype, torch.float32)
        delta, b_in, c_out = (
            parts[name].permute(1, 2, 0, 3).to(wide) for name in ("delta", "b", "c")
        )
        call = partial(
            ssm_read, normalise=shape.normalise, state=context.recall("sums"), causal=context.causal
        )

        def read(
            valid: Tensor | None,
            delta: Tensor,
            b_in: Tensor,
            c_out: Tensor,
            v: Tensor,
            lam: Tensor | None,
            gate: Tensor | None,
            rate: Tensor,
            beta: Tensor | None,
        ) -> Tensor:
            valid = None if valid is None else valid[:, -v.shape[2] :]
            o, sums = call(delta, rate, b_in, c_out, v, beta, lam, gate, valid=valid)
            if sums is not None:
                context.keep("sums", sums)
            return o

        delta = softplus(delta + self._step_logit(wide))
        b_in = softplus(b_in) + EPS
        c_out = softplus(c_out) + EPS
        v = v.sigmoid() if shape.squash else v
        return context.per_document(
            read, delta, b_in, c_out, v, lam, gate, each=(self._rate(wide), beta)
        )

    def _step_logit(self, wide: torch.dtype) -> Tensor:
        """Return the logits of the initial steps plus the learned bias, [local heads, 1, d_v]."""
        bias = self.delta_bias.to(wide).view(-1, 1, self.shape.value_head)
        ends = math.log(SLOWEST_STEP), math.log(FASTEST_STEP)
        steps = torch.linspace(*ends, self.shape.value_head, dtype=wide, device=bias.device).exp()
        return bias + steps.expm1().log()

    def _rate(self, wide: torch.dtype) -> Tensor:
        """Return the positive rates, [local heads, d_v, states]: softplus of the learned logits.

        At zero logits they are 1, 2, ...
        """
        logits = self.rate.to(wide).view(-1, self.shape.value_head, self.shape.prior.slices()["b"])
        start = torch.arange(1, logits.shape[-1] + 1, dtype=wide, device=logits.device)
        return softplus(logits + start + (-(-start).exp()).log1p())
