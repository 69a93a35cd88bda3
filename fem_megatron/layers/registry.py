"""Which class computes a shape: one import and one line each. A name for every mixer is in ``fem_megatron.catalogue``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fem_megatron.layers.attention import Attention
from fem_megatron.layers.cem import CemAttention, CemMlp
from fem_megatron.layers.delta import DeltaNet
from fem_megatron.layers.differential import DifferentialAttention
from fem_megatron.layers.fem import FemMixer
from fem_megatron.layers.fla import FlaLayer
from fem_megatron.layers.hyperset import HyperSet
from fem_megatron.layers.mamba2 import Mamba2
from fem_megatron.layers.mlp import SwiGlu
from fem_megatron.layers.parallel import Parallel
from fem_megatron.layers.second_order import EnergyLinearAttention, SecondOrderAttention
from fem_megatron.layers.update import Update
from fem_megatron.shapes.attention import AttentionShape
from fem_megatron.shapes.base import Shape
from fem_megatron.shapes.cem import CemAttentionShape, CemMlpShape
from fem_megatron.shapes.delta import DeltaShape
from fem_megatron.shapes.differential import DifferentialShape
from fem_megatron.shapes.fem import FemShape
from fem_megatron.shapes.fla import FlaShape
from fem_megatron.shapes.hyperset import HyperSetShape
from fem_megatron.shapes.mamba2 import Mamba2Shape
from fem_megatron.shapes.mlp import SwiGluShape
from fem_megatron.shapes.second_order import EnergyLinearShape, SecondOrderShape

UPDATES: dict[type[Shape], Callable[[Any, Parallel], Update]] = {
    AttentionShape: Attention,
    FemShape: FemMixer,
    HyperSetShape: HyperSet,
    SwiGluShape: SwiGlu,
    CemAttentionShape: CemAttention,
    CemMlpShape: CemMlp,
    SecondOrderShape: SecondOrderAttention,
    EnergyLinearShape: EnergyLinearAttention,
    DifferentialShape: DifferentialAttention,
    DeltaShape: DeltaNet,
    Mamba2Shape: Mamba2,
    FlaShape: FlaLayer,
}
