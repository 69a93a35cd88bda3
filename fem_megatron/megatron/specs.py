"""Megatron-core layer specs of every mixer.

``layer_spec("fem_softmax", model)`` is the spec of a layer for any Megatron-core transformer block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)

from fem_megatron import catalogue
from fem_megatron.block import Block
from fem_megatron.config import ModelConfig
from fem_megatron.context_parallel.shape import split_kinds
from fem_megatron.context_parallel.split import SequenceSplit
from fem_megatron.megatron.context_parallel import ContextParallel
from fem_megatron.megatron.tensor_parallel import TensorParallel
from fem_megatron.shape import BlockShape
from fem_megatron.state import Context


class MegatronBlock(Block):
    """A block with Megatron-core's interface of a transformer layer."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        shape: BlockShape,
        causal: bool,
        split: str | None = None,
        fp8: bool = False,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        assert pg_collection is not None
        self.pg_collection = pg_collection
        sequence, dtype = config.sequence_parallel, config.params_dtype
        super().__init__(
            shape,
            TensorParallel(
                pg_collection.tp, sequence_parallel=sequence, dtype=dtype, eight_bit=fp8
            ),
        )
        self.config, self.causal = config, causal
        self.split = None
        if pg_collection.cp.size() > 1:
            context, tensor = pg_collection.cp, pg_collection.tp.size()
            kinds = split_kinds(
                shape.mixer, tensor=tensor, context=context.size(), requested=split, causal=causal
            )
            self.split = SequenceSplit(ContextParallel(context), *kinds)
        self.layer_number = layer_number + get_transformer_layer_offset(
            config, vp_stage, pg_collection.pp.rank()
        )

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: Context | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """Map hidden_states [s (/tp under SP), b, hidden] -> (same shape, None).

        The configuration, not a mask, determines causality.

        packed_seq_params: the layer's `Context`. Megatron has this argument for its own packed
            sequences and passes it to the layers unread.

        Raises:
            NotImplementedError: if Megatron passes an inference context, an attention bias or
            rotary angles.
        """
        for name, value in unused.items():
            if value is not None and name in (
                "inference_context",
                "attention_bias",
                "rotary_pos_emb",
                "context",
            ):
                raise NotImplementedError(f"this layer does not support the argument {name}")
        again = self.config.recompute_granularity == "selective" and self.training
        context = replace(
            packed_seq_params or Context(), causal=self.causal, recompute=again, split=self.split
        )
        if self.split is not None and context.positions is None:
            length = hidden_states.shape[0] * (
                self.pg_collection.tp.size() if self.config.sequence_parallel else 1
            )
            context = replace(context, positions=self.split.positions(length, hidden_states.device))
        return super().forward(hidden_states, context), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the layer's parameters for a sharded checkpoint, see `sharded_parameters`."""
        return sharded_parameters(self, self.pg_collection, prefix, sharded_offsets)


def sharded_parameters(
    module: torch.nn.Module,
    groups: ProcessGroupCollection,
    prefix: str = "",
    offsets: tuple[Any, ...] = (),
) -> dict[str, Any]:
    """Return a module's parameters for a sharded checkpoint: prefixed name -> sharded tensor.

    A parameter is split along its weight's dimension ``split``, or replicated if that is None.
    """
    common: dict[str, Any] = {
        "prepend_offsets": offsets,
        "tp_group": groups.tp,
        "dp_cp_group": groups.dp_cp,
    }
    sharded: dict[str, Any] = {}
    for name, weight in module.named_parameters():
        key, split = prefix + name, weight.spec.split  # type: ignore[attr-defined]
        sharded[key] = (
            make_sharded_tensor_for_checkpoint(weight, key, **common)
            if split is None
            else make_tp_sharded_tensor_for_checkpoint(weight, key, tp_axis=split, **common)
        )
    return sharded


def layer_spec(mixer: str, model: ModelConfig, layer: int = 0) -> ModuleSpec:
    """Return the spec of layer ``layer`` (from 0) with this mixer and the sizes of ``model``.

    Raises:
        ValueError: if a size does not fit; the message names the key.
        KeyError: if no mixer has this name.
    """
    return _spec(catalogue.block(model, mixer, layer), model)


def block_spec(
    model: ModelConfig,
    config: TransformerConfig,
    vp_stage: int | None,
    split: str | None = None,
    *,
    fp8: bool = False,
) -> TransformerBlockSubmodules:
    """Return the layers of this rank's model chunk, and the final norm.

    split: requested method of `split_kinds` for split sequences. fp8: linear maps multiply 8-bit
    floats.
    """
    first = get_transformer_layer_offset(config, vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [
        _spec(shape, model, split, fp8=fp8) for shape in model.blocks()[first : first + count]
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _spec(
    shape: BlockShape, model: ModelConfig, split: str | None = None, *, fp8: bool = False
) -> ModuleSpec:
    return ModuleSpec(
        module=MegatronBlock,
        params={"shape": shape, "causal": model.causal, "split": split, "fp8": fp8},
    )


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension, with Megatron-core's norm interface.

    Under sequence parallelism each rank has a slice of the tokens, so the weight is marked for
    Megatron's gradient all-reduce over the tensor-parallel group (``finalize_model_grads``).
    Megatron's own ``WrappedTorchNorm`` does not support sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., hidden_size] -> same shape and dtype.

        Channels past hidden_size are dropped.
        """
        return torch.nn.functional.rms_norm(
            x[..., : len(self.weight)], self.weight.shape, self.weight, self.eps
        )
