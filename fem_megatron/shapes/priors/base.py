"""What the FEM asks of a prior's sizes; and the softmax prior's. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from fem_megatron.shapes.base import Weights, keys_seen


class PriorShape(ABC):
    """Sizes of a prior p_t(i): which slices of the packed projection a head reads it from, and what a read costs."""

    @abstractmethod
    def slices(self) -> dict[str, int]:
        """Channels a head owns in the packed projection besides v, lambda and g, by name, in order."""

    @abstractmethod
    def flops(self, length: int, streams: int, *, whole_square: bool) -> float:
        """FLOPs of one token and head for the matrix products of reading ``streams`` channels of values."""

    @abstractmethod
    def state_bytes(self, length: int, element: int, *, value: int, free_energy: bool) -> int:
        """Bytes of one head's decoding state after ``length`` tokens; ``value`` channels of v, with or without the free-energy stream."""

    def weights(self, heads: int) -> Weights:
        """Parameters besides the packed projection."""
        return {}

    def reads(self) -> set[str]:
        """The keys of the model that this prior alone reads."""
        return set()

    def rotary_size(self) -> int:
        """Channels of q and k that RoPE turns."""
        return 0


@dataclass(frozen=True)
class SoftmaxShape(PriorShape):
    """p_t(i) ~ exp(q_t k_i / sqrt(d_k)), with RoPE where ``rope``; ``scale``, where there is one, stands for 1 / sqrt(d_k)."""

    qk_head: int
    rope: bool
    scale: float | None = None

    def slices(self) -> dict[str, int]:
        return {"q": self.qk_head, "k": self.qk_head}

    def flops(self, length: int, streams: int, *, whole_square: bool) -> float:
        return 2.0 * keys_seen(length, whole_square) * (self.qk_head + streams)

    def state_bytes(self, length: int, element: int, *, value: int, free_energy: bool) -> int:
        return length * (self.qk_head + value) * element

    def rotary_size(self) -> int:
        return self.qk_head if self.rope else 0
