"""The one registry of mixers: name -> Megatron-core layer spec. A new mixer is a file in ``layers`` and a line here."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from fem_megatron.layers.fem import FemMixer, FemMixerSubmodules, FemTransformerConfig
from fem_megatron.layers.norms import RMSNorm
from fem_megatron.layers.time_decay import TimeDecayConditioner, TimeDecaySubmodules


def fem_softmax(config: FemTransformerConfig) -> ModuleSpec:
    """FEM over a softmax prior; with every switch off, standard attention."""
    assert config.mixer_shape is not None
    conditioner = None
    if config.mixer_shape.conditioner:
        projections = TimeDecaySubmodules(in_proj=ColumnParallelLinear, out_proj=ColumnParallelLinear)
        conditioner = ModuleSpec(module=TimeDecayConditioner, submodules=projections)
    return ModuleSpec(
        module=FemMixer,
        submodules=FemMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear, conditioner=conditioner),
    )


# The names are fem_megatron.config.MIXERS; a test holds the two equal.
MIXER_SPECS: dict[str, Callable[[FemTransformerConfig], ModuleSpec]] = {"fem_softmax": fem_softmax, "transformer": fem_softmax}


def layer_spec(mixer: str, config: FemTransformerConfig) -> ModuleSpec:
    """A pre-norm block: mixer and SwiGLU MLP, each behind an RMSNorm and added to the residual."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=MIXER_SPECS[mixer](config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(mixer: str, config: FemTransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers that this rank's model chunk holds, with our final norm."""
    layers = [layer_spec(mixer, config)] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
