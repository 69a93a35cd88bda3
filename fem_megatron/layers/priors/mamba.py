"""The selective state-space prior (Mamba), non-negative and normalised (mathematics 1.3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fem_megatron.layers.priors.base import Parts, Prior
from fem_megatron.layers.update import Context
from fem_megatron.shapes.priors.mamba import MambaShape
from kernels.ssm_read import ssm_read

EPS = 1e-6
SLOWEST_STEP, FASTEST_STEP = 1e-3, 1e-1


class MambaPrior(Prior):
    """delta = softplus(. + bias), B and C = softplus(.) + 1e-6, A = -rate.

    At the start the rates of a channel are 1, 2, ... states and the steps of a head's channels spread evenly in the logarithm over
    [0.001, 0.1], Mamba's own. Its decoding state is ``states`` sums for each channel and stream, fp32.
    """

    def forward(self, parts: Parts, v: Tensor, beta: Tensor | None, lam: Tensor | None, gate: Tensor | None, context: Context) -> Tensor:
        """o as `Prior.forward` says, from the slices delta, b and c, before their softplus."""
        shape = self.shape.prior
        assert isinstance(shape, MambaShape)
        wide = torch.promote_types(v.dtype, torch.float32)
        delta, b_in, c_out = (parts[name].permute(1, 2, 0, 3).to(wide) for name in ("delta", "b", "c"))
        valid = context.valid_now(v.shape[2])
        o, sums = ssm_read(
            softplus(delta + self._step_logit(wide)),
            self._rate(wide),
            softplus(b_in) + EPS,
            softplus(c_out) + EPS,
            v.sigmoid() if shape.squash else v,
            beta,
            lam,
            gate,
            normalise=shape.normalise,
            valid=None if valid is None else valid.T,
            state=context.recall("sums"),
            causal=context.causal,
        )
        if sums is not None:
            context.keep("sums", sums)
        return o

    def _step_logit(self, wide: torch.dtype) -> Tensor:
        """[local heads, 1, d_v]: what softplus turns into the starting steps, and the learned bias."""
        bias = self.delta_bias.to(wide).view(-1, 1, self.shape.value_head)
        ends = math.log(SLOWEST_STEP), math.log(FASTEST_STEP)
        steps = torch.linspace(*ends, self.shape.value_head, dtype=wide, device=bias.device).exp()
        return bias + steps.expm1().log()

    def _rate(self, wide: torch.dtype) -> Tensor:
        """[local heads, d_v, states], positive: softplus of the learned logits, 1, 2, ... where these are 0."""
        logits = self.rate.to(wide).view(-1, self.shape.value_head, self.shape.prior.slices()["b"])
        start = torch.arange(1, logits.shape[-1] + 1, dtype=wide, device=logits.device)
        return softplus(logits + start + (-(-start).exp()).log1p())
