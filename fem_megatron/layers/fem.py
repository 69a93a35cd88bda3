"""The Free Energy Mixer over a softmax prior, as a Megatron-core self-attention module (mathematics 1).

With every switch off it is standard attention: the Transformer baseline runs through this very code. The mathematics of the read is in
``kernels.fem_attention``; parallelism is in the linear layers that the spec gives.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig, build_module
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch.nn.functional import softplus

from fem_megatron.config import MixerShape
from kernels.fem_attention import fem_attention

BETA_OFFSET = 1.8


@dataclass
class FemTransformerConfig(TransformerConfig):
    """Megatron's configuration with what a FEM layer needs besides."""

    mixer_shape: MixerShape | None = None
    attention_backend_name: str = "auto"
    causal: bool = True


@dataclass
class FemMixerSubmodules:
    """The packed input projection (column parallel, no collectives), the conditioner or None, the output projection (row parallel)."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type
    conditioner: ModuleSpec | None = None


class FemMixer(MegatronModule):
    """o = g * ((1 - lambda) mu + lambda F), y = o W_O, with mu and F read under a softmax prior.

    ``in_proj`` packs, head after head, that head's rows of q, k, v, the lambda-logit and the g-logit: a rank's slice is whole heads at any
    tensor-parallel size. The sequence is gathered once (sequence parallelism) and shared by the projection and the conditioner.
    """

    def __init__(
        self,
        config: FemTransformerConfig,
        submodules: FemMixerSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert config.mixer_shape is not None and pg_collection is not None
        self.shape = shape = config.mixer_shape
        self.layer_number = layer_number
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        tp_size = self.tp_group.size()
        self.local_heads = shape.heads // tp_size
        # The input is gathered by forward(), once for all: these projections must not gather or reduce again.
        local = copy.copy(config)
        local.sequence_parallel = False
        packed = shape.heads * shape.head_width
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            packed,
            config=local,
            init_method=config.init_method,
            bias=False,
            disable_grad_reduce=True,
            tp_group=self.tp_group,
        )
        self.tdc = None
        if submodules.conditioner is not None:
            self.tdc = build_module(
                submodules.conditioner,
                config=local,
                size=shape.conditioner,
                output_size=packed,
                eps=config.layernorm_epsilon,
                pg_collection=pg_collection,
            )
        self.beta = None
        if shape.free_energy and shape.temperature:
            self.beta = torch.nn.Parameter(torch.zeros(shape.value_size // tp_size, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.beta, True, 0, 1)
        self.out_proj = build_module(
            submodules.out_proj,
            shape.value_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, *, rotary_pos_emb: Any = None, **unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [s (/tp under SP), b, hidden] -> (same shape, no bias). Causality is the configuration's, not a mask's.

        Raises:
            NotImplementedError: Megatron passes an inference context, packed sequences or an attention bias.
        """
        for name in ("inference_context", "packed_seq_params", "attention_bias"):
            if unused.get(name) is not None:
                raise NotImplementedError(f"FemMixer does not take {name}")
        if self.config.sequence_parallel:
            h = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            h = copy_to_tensor_model_parallel_region(hidden_states, self.tp_group)
        z, _ = self.in_proj(h)
        if self.tdc is not None:
            z = z * (1 + self.tdc(h))
        q, k, v, lam, gate = self._split_heads(z)
        if rotary_pos_emb is not None:
            q_angles, k_angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            q = apply_rotary_pos_emb(q, q_angles, config=self.config, cp_group=self.pg_collection.cp)
            k = apply_rotary_pos_emb(k, k_angles, config=self.config, cp_group=self.pg_collection.cp)
        o = fem_attention(
            _heads_first(q),
            _heads_first(k),
            _heads_first(v),
            self.inverse_temperature(),
            _heads_first(torch.sigmoid(lam)) if self.shape.temperature else None,
            _heads_first(outer_gate(gate, self.config.layernorm_epsilon)) if self.shape.gate else None,
            causal=self.config.causal,
            implementation=self.config.attention_backend_name,
        )
        return self.out_proj(o.permute(2, 0, 1, 3).flatten(2))

    def inverse_temperature(self) -> torch.Tensor | None:
        """beta [local heads, d_v], fp32 or wider: softplus(b + 1.8), ones where T is off, None where L is off."""
        if not self.shape.free_energy:
            return None
        if self.beta is None:
            size = (self.local_heads, self.shape.value_head)
            dtype = torch.promote_types(self.config.params_dtype, torch.float32)
            return torch.ones(size, dtype=dtype, device=self.in_proj.weight.device)
        b = self.beta.to(torch.promote_types(self.beta.dtype, torch.float32))
        return softplus(b + BETA_OFFSET).view(self.local_heads, self.shape.value_head)

    def _split_heads(self, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """z [s, b, packed / tp] -> q, k, v, lambda-logit, g-logit, each [s, b, local heads, width]; of width 0 where a switch is off."""
        return z.unflatten(-1, (self.local_heads, self.shape.head_width)).split(self.shape.head_widths, dim=-1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None) -> Any:
        """Megatron's default, with beta split over the tensor-parallel ranks."""
        sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.beta is not None:
            key = f"{prefix}beta"
            sharded[key] = make_tp_sharded_tensor_for_checkpoint(
                self.beta, key, tp_axis=0, prepend_offsets=sharded_offsets, tp_group=self.tp_group, dp_cp_group=self.pg_collection.dp_cp
            )
        return sharded


def outer_gate(logit: torch.Tensor, eps: float) -> torch.Tensor:
    """g = softplus(logit), RMS-normalised over the last dimension, no weight (mathematics 1.1)."""
    return torch.nn.functional.rms_norm(softplus(logit), logit.shape[-1:], None, eps)


def _heads_first(t: torch.Tensor) -> torch.Tensor:
    return t.permute(1, 2, 0, 3)
