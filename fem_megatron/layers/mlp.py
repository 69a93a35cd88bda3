"""The SwiGLU MLP, x + down(silu(gate(h)) * up(h))."""

from __future__ import annotations

from torch import Tensor

from fem_megatron.layers.parallel import Parallel
from fem_megatron.layers.update import Context, Update, rms_norm
from fem_megatron.shapes.mlp import SwiGluShape


class SwiGlu(Update):
    """x + down(silu(gate(h)) * up(h)), h = RMSNorm(x). Tensor parallel: the inner channels are split over the ranks."""

    def __init__(self, shape: SwiGluShape, parallel: Parallel) -> None:
        self.eps = shape.norm_eps
        super().__init__(shape, parallel)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        h = rms_norm(x, self.norm.weight, self.eps)
        packed = self.parallel.project(h, self.gate_up.flatten(0, 1))
        return x + self.parallel.leave(self.down(self.parallel.swiglu(packed)))
