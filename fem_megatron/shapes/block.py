"""A block's and a model's shape: which updates each layer has. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from fem_megatron.shapes.base import Shape, Weights


@dataclass(frozen=True)
class BlockShape:
    """A layer: its mixer, its MLP (None where the mixer has its own) and how often the pair is applied."""

    mixer: Shape
    mlp: Shape | None
    recurrence: int

    def weights(self) -> Weights:
        """The names of the block's state dict: ``mixer.*`` and ``mlp.*``."""
        parts = {"mixer": self.mixer} | ({} if self.mlp is None else {"mlp": self.mlp})
        return {f"{part}.{name}": weight for part, shape in parts.items() for name, weight in shape.weights().items()}

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """FLOPs of one token's forward pass by part, over all iterations."""
        flops: dict[str, float] = {}
        for shape in filter(None, (self.mixer, self.mlp)):
            for name, value in shape.flops(length, whole_square=whole_square).items():
                flops[name] = flops.get(name, 0.0) + self.recurrence * value
        return flops

    def state_bytes(self, length: int, element: int) -> int:
        """Bytes of one sequence's decoding state after ``length`` tokens; every iteration has its own."""
        return self.recurrence * sum(shape.state_bytes(length, element) for shape in (self.mixer, self.mlp) if shape is not None)

    def reads(self) -> set[str]:
        """The keys of the model that one of the two reads, besides those that every part of a model has."""
        return self.mixer.reads() | (set() if self.mlp is None else self.mlp.reads())

    def split_widths(self) -> dict[str, int]:
        """What the tensor-parallel size must divide."""
        return self.mixer.split_widths() | ({} if self.mlp is None else self.mlp.split_widths())
