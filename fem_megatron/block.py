"""A block: the layer's mixer, then its MLP, the pair applied once or several times with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fem_megatron.mixers.attention.layer import Attention
from fem_megatron.mixers.attention.shape import AttentionShape
from fem_megatron.mixers.cem.layer import CemAttention, CemMlp
from fem_megatron.mixers.cem.shape import CemAttentionShape, CemMlpShape
from fem_megatron.mixers.delta.layer import DeltaNet
from fem_megatron.mixers.delta.shape import DeltaShape
from fem_megatron.mixers.differential.layer import DifferentialAttention
from fem_megatron.mixers.differential.shape import DifferentialShape
from fem_megatron.mixers.fem.layer import FemMixer
from fem_megatron.mixers.fem.shape import FemShape
from fem_megatron.mixers.fla.layer import FlaLayer
from fem_megatron.mixers.fla.shape import FlaShape
from fem_megatron.mixers.hyperset.layer import HyperSet
from fem_megatron.mixers.hyperset.shape import HyperSetShape
from fem_megatron.mixers.mamba2.layer import Mamba2
from fem_megatron.mixers.mamba2.shape import Mamba2Shape
from fem_megatron.mixers.second_order.layer import EnergyLinearAttention, SecondOrderAttention
from fem_megatron.mixers.second_order.shape import EnergyLinearShape, SecondOrderShape
from fem_megatron.parallel import Parallel
from fem_megatron.shape import BlockShape, Shape, SwiGluShape
from fem_megatron.state import Context
from fem_megatron.update import Update, rms_norm


class Block(nn.Module):
    """x <- mlp(mixer(x)), ``recurrence`` times (the loop Transformer; Hyper-SET's depth).

    Every iteration reads the tokens anew, so each has a decoding state of its own. More iterations than in training may be asked of a model
    by setting ``recurrence`` on its blocks.
    """

    def __init__(self, shape: BlockShape, parallel: Parallel) -> None:
        super().__init__()
        self.recurrence = shape.recurrence
        self.mixer = UPDATES[type(shape.mixer)](shape.mixer, parallel)
        self.mlp = None if shape.mlp is None else UPDATES[type(shape.mlp)](shape.mlp, parallel)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [s (/ tensor-parallel size under sequence parallelism), b, D] -> same shape and type."""
        context = replace(context, origin=x, memory={})
        for iteration in range(self.recurrence):
            here = replace(context if self.recurrence == 1 else context.within(str(iteration)), iteration=iteration)
            x = self.mixer(x, here.within("mixer"))
            if self.mlp is not None:
                x = self.mlp(x, here.within("mlp"))
        return x


class SwiGlu(Update):
    """x + down(silu(gate(h)) * up(h)), h = RMSNorm(x). Tensor parallel: the inner channels are split over the ranks."""

    def __init__(self, shape: SwiGluShape, parallel: Parallel) -> None:
        self.eps = shape.norm_eps
        super().__init__(shape, parallel)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        h = rms_norm(x, self.norm.weight, self.eps)
        packed = self.parallel.project(h, self.gate_up.flatten(0, 1))
        return x + self.parallel.leave(self.down(self.parallel.swiglu(packed)))


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
