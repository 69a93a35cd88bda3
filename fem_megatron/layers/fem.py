"""The Free Energy Mixer over any prior (mathematics 1). The read's numerics are in ``kernels``, the priors in ``priors``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fem_megatron.layers.parallel import Parallel
from fem_megatron.layers.priors.aft import AftPrior
from fem_megatron.layers.priors.base import Prior
from fem_megatron.layers.priors.linear import LinearPrior
from fem_megatron.layers.priors.lrnn_decay import DecayPrior
from fem_megatron.layers.priors.mamba import MambaPrior
from fem_megatron.layers.priors.softmax import SoftmaxPrior
from fem_megatron.layers.time_decay import TimeDecayConditioner
from fem_megatron.layers.update import Context, Update, rms_norm
from fem_megatron.shapes.fem import FemShape
from fem_megatron.shapes.priors.aft import AftShape
from fem_megatron.shapes.priors.base import PriorShape, SoftmaxShape
from fem_megatron.shapes.priors.linear import LinearShape
from fem_megatron.shapes.priors.lrnn_decay import DecayShape
from fem_megatron.shapes.priors.mamba import MambaShape

BETA_OFFSET = 1.8

PRIORS: dict[type[PriorShape], type[Prior]] = {
    AftShape: AftPrior,
    DecayShape: DecayPrior,
    LinearShape: LinearPrior,
    MambaShape: MambaPrior,
    SoftmaxShape: SoftmaxPrior,
}


class FemMixer(Update):
    """x + o W_O, o = g * ((1 - lambda) mu + lambda F), with mu and F read under the prior.

    ``in_proj`` packs, head after head, that head's rows of the prior's slices, v, the lambda-logit and the g-logit: a rank's slice is whole
    heads at any tensor-parallel size. The sequence is gathered once (sequence parallelism), for the projection and the conditioner.
    """

    def __init__(self, shape: FemShape, parallel: Parallel) -> None:
        self.shape = shape
        super().__init__(shape, parallel)
        self.local_heads = shape.heads // parallel.size

    def build(self) -> None:
        self.prior = PRIORS[type(self.shape.prior)](self.shape, self.parallel)
        for name in self.shape.conditioners():
            self.add_module(name, TimeDecayConditioner(self.shape.norm_eps, self.parallel, backward=name == "tdc_backward"))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return x + self.step(rms_norm(x, self.norm.weight, self.shape.norm_eps), context)

    def step(self, h: Tensor, context: Context) -> Tensor:
        """o W_O from the normalised residual stream, both in the stream's slicing."""
        h = self.parallel.enter(h)
        z = self.in_proj(h)
        if self.shape.conditioner:
            phi = [self.get_submodule(name)(h, context.within(name)) for name in self.shape.conditioners()]
            z = z * (1 + sum(phi))
        parts = self._split_heads(z)
        v, lam, gate = (parts.pop(name) for name in ("v", "lam", "gate"))
        o = self.prior(
            parts,
            _heads_first(v),
            self.inverse_temperature(),
            _heads_first(torch.sigmoid(lam)) if self.shape.temperature else None,
            _heads_first(outer_gate(gate, self.shape.norm_eps)) if self.shape.gate else None,
            context,
        )
        return self.parallel.leave(self.out_proj(o.permute(2, 0, 1, 3).flatten(2)))

    def inverse_temperature(self) -> Tensor | None:
        """beta [local heads, d_v], fp32 or wider: softplus(b + 1.8), ones where T is off, None where L is off."""
        if not self.shape.free_energy:
            return None
        size, weight = (self.local_heads, self.shape.value_head), self.in_proj.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        if not self.shape.temperature:
            return torch.ones(size, dtype=wide, device=weight.device)
        return softplus(self.beta.to(wide) + BETA_OFFSET).view(size)

    def _split_heads(self, z: Tensor) -> dict[str, Tensor]:
        """z [s, b, packed / tp] -> each slice [s, b, local heads, width]; of width 0 where a switch is off."""
        slices = self.shape.slices
        heads = z.unflatten(-1, (self.local_heads, self.shape.head_width))
        return dict(zip(slices, heads.split(list(slices.values()), dim=-1), strict=True))


def outer_gate(logit: Tensor, eps: float) -> Tensor:
    """g = softplus(logit), RMS-normalised over the last dimension, no weight (mathematics 1.1)."""
    return rms_norm(softplus(logit), None, eps)


def _heads_first(t: Tensor) -> Tensor:
    return t.permute(1, 2, 0, 3)
