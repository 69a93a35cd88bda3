"""Linear attention's weights as a prior, and gated linear attention's (GLA); linear time (mathematics 1.3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import relu

from fem_megatron.layers.priors.base import Parts
from fem_megatron.layers.priors.scan import ScanPrior
from fem_megatron.layers.update import Context, rotate
from fem_megatron.shapes.priors.linear import LinearShape


class LinearPrior(ScanPrior):
    """phi(q_t) . phi(k_i), phi(x) = relu(x) + eps after RoPE; with a log-decay -(relu(a) + eps) where the shape has one (GLA)."""

    def features(self, parts: Parts, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        shape = self.shape.prior
        assert isinstance(shape, LinearShape)
        wide = torch.promote_types(parts["q"].dtype, torch.float32)
        q, k = parts["q"].to(wide), parts["k"].to(wide)
        if shape.rope:
            q, k = (rotate(t, context, self.shape.rope_base) for t in (q, k))
        decay = -(relu(parts["decay"].to(wide)) + shape.eps) if shape.decays else None
        return relu(q) + shape.eps, relu(k) + shape.eps, decay
