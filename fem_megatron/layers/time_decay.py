"""C, the time-decay conditioner: a first-order scan over the past that scales a mixer's projections (mathematics 1.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_tensor_model_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig, build_module
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import softplus

from fem_megatron.layers.norms import layer_norm
from kernels.time_decay_scan import time_decay_scan


@dataclass
class TimeDecaySubmodules:
    """The two column-parallel projections, built without collectives of their own."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class TimeDecayConditioner(MegatronModule):
    """phi = (r * LayerNorm(s)) W_out with s_t = exp(a_t) s_{t-1} + f_t, the factor every projection is multiplied by as 1 + phi.

    Tensor parallel: the H_c channels of a, f, r and their scans are split over the ranks; the norms over H_c see all of them (a gather of
    2 H_c numbers a token); W_out's rows are split as the mixer's packed projection is. Gradients of the two norms' weights are whole on
    every rank: the first weight's by an all-reduce of its gradient, the second's because what follows it sums over the ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TimeDecaySubmodules,
        *,
        size: int,
        output_size: int,
        eps: float,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.size, self.eps = size, eps
        dtype = config.params_dtype
        self.norm = _Scale(config.hidden_size, dtype)
        self.state_norm = _Scale(size, dtype)
        shared = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "disable_grad_reduce": True,
            "tp_group": self.tp_group,
        }
        self.in_proj = build_module(submodules.in_proj, config.hidden_size, 3 * size, **shared)
        self.out_proj = build_module(submodules.out_proj, size, output_size, **shared)
        self.out_proj.weight.init_zero = True

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """h [s, b, hidden], the whole sequence on every rank -> phi [s, b, output_size / tp]."""
        u = layer_norm(h, copy_to_tensor_model_parallel_region(self.norm.weight, self.tp_group), self.eps)
        packed, _ = self.in_proj(u)
        a, f, r = packed.unflatten(-1, (-1, 3)).to(torch.promote_types(packed.dtype, torch.float32)).unbind(-1)
        state = time_decay_scan(-softplus(a), f)
        both = torch.stack((softplus(r), state), dim=-1).flatten(-2)
        r, state = gather_from_tensor_model_parallel_region(both, self.tp_group).unflatten(-1, (self.size, 2)).unbind(-1)
        r = r * (self.size**0.5 / r.norm(dim=-1, keepdim=True).clamp_min(self.eps))
        features = (r * layer_norm(state, self.state_norm.weight.to(state.dtype), self.eps)).to(h.dtype)
        phi, _ = self.out_proj(copy_to_tensor_model_parallel_region(features, self.tp_group))
        return phi


class _Scale(torch.nn.Module):
    """A norm's weight, whole on every rank."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
