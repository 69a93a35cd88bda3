"""The SwiGLU MLP's sizes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fem_megatron.shapes.base import Shape, Weight, Weights

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig


@dataclass(frozen=True)
class SwiGluShape(Shape):
    """D -> 2F -> D."""

    hidden: int
    inner: int
    norm_eps: float

    @classmethod
    def of(cls, model: ModelConfig) -> SwiGluShape:
        """The sizes that ``model`` asks for."""
        return cls(model.hidden_size, model.ffn_size, model.norm_eps)

    def weights(self) -> Weights:
        """norm; gate_up [2, F, D], the gate's and the up projection in one product; down."""
        return {
            "norm.weight": Weight((self.hidden,), init=1.0, per_token=True),
            "gate_up": Weight((2, self.inner, self.hidden), split=1),
            "down.weight": Weight((self.hidden, self.inner), split=1),
        }

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Three products."""
        return {"MLP": 6.0 * self.hidden * self.inner}

    def state_bytes(self, length: int, element: int) -> int:
        """None: a token's MLP knows that token alone."""
        return 0

    def summary(self) -> str:
        return f"MLP {self.inner}"

    def split_widths(self) -> dict[str, int]:
        return {"the MLP's width, model.ffn_hidden_size": self.inner}
