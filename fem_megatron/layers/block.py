"""A block: the layer's mixer, then its MLP, the pair applied once or several times with the same weights."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from fem_megatron.layers.parallel import Parallel
from fem_megatron.layers.registry import UPDATES
from fem_megatron.layers.update import Context
from fem_megatron.shapes.block import BlockShape


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
