"""What every mixer's and MLP's shape tells: the weights it owns and what a token costs, of the whole layer, not a rank's part."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig


@dataclass(frozen=True)
class Normal:
    """A weight drawn from normal(0, std)."""

    std: float


@dataclass(frozen=True)
class Scaling:
    """How a weight follows the model's width under muP: exponents of m, of its initial spread and of its learning rate (see ``mup``)."""

    std: float
    lr: float


# Adam's, of Yang et al. 2022, table 3. HIDDEN: sums over the width, into the width. FIXED: into the width, from what does not grow with
# it, and vectors that scale channels one by one. OUTPUT: sums over the width, into what does not grow with it.
HIDDEN, FIXED, OUTPUT = Scaling(-0.5, -1.0), Scaling(0.0, 0.0), Scaling(-1.0, -1.0)


@dataclass(frozen=True)
class Weight:
    """One parameter.

    shape: of the whole weight. split: the dimension that the tensor-parallel ranks share out, None where every rank holds it whole.
    init: "normal" (the model's init_std), a Normal of its own, or the constant it starts from. per_token: a whole weight that is applied
    to a rank's slice of the sequence (norms), so that under sequence parallelism its gradient is summed over the ranks. bare: a matrix
    that is used in another way than in one product with a token (read forth and back, squared), so that it is no linear module, which
    adapters or quantisation might replace by something else. mup: how it follows the width, where that is not its shape's (``scaling``).
    vectors: its rows are vectors of their own, stored together, so that none of them is decayed.
    """

    shape: tuple[int, ...]
    split: int | None = None
    init: str | float | Normal = "normal"
    per_token: bool = False
    bare: bool = False
    mup: Scaling | None = None
    vectors: bool = False

    @property
    def decayed(self) -> bool:
        """Whether weight decay pulls at it: at matrices, filters of convolutions among them, and not at vectors."""
        return len(self.shape) > 1 and not self.vectors

    @property
    def scaling(self) -> Scaling:
        """What muP does with it: a matrix is HIDDEN and a vector FIXED unless ``mup`` says otherwise."""
        return self.mup or (HIDDEN if len(self.shape) > 1 else FIXED)

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


Weights = dict[str, Weight]


class Shape(ABC):
    """Sizes of one update of the residual stream: a mixer or an MLP, its norm included.

    external: another package computes it, and knows its parameters alone.
    """

    external: ClassVar[bool] = False

    @abstractmethod
    def weights(self) -> Weights:
        """Name -> weight, as the layer's state dict has them. ``x.weight`` with two dimensions is a linear map [out, in]."""

    @abstractmethod
    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """FLOPs of one token's forward pass by part, matrix products alone, a multiply-add counted as two.

        Causal attention sees (length + 1) / 2 keys on average; ``whole_square``: all of them, as torch's counter counts.
        """

    @abstractmethod
    def state_bytes(self, length: int, element: int) -> int:
        """Bytes of one sequence's decoding state after ``length`` tokens, in activations of ``element`` bytes (kept sums are fp32)."""

    def reads(self) -> set[str]:
        """The keys of the model that it reads, sections whole or by key (``fem.gate``), besides those that every part of a model has.

        One that no layer reads is refused where it is set (``catalogue.unread``).
        """
        return set()

    def summary(self) -> str:
        """The widths that a reader of the plan wants to see, in a few words."""
        return type(self).__name__.removesuffix("Shape")

    def split_widths(self) -> dict[str, int]:
        """What the tensor-parallel size must divide: a name that a user knows -> number."""
        return {}

    def rotary_size(self) -> int:
        """Channels of a head that RoPE turns; 0: none."""
        return 0

    def max_length(self) -> int | None:
        """The longest sequence that the mixer takes, None: any. Longer ones raise ValueError when they come."""
        return None

    def linear_flops(self) -> float:
        """2 FLOPs for each number of each linear map: a matrix applied once to each token."""
        return sum(2.0 * weight.size for name, weight in self.weights().items() if name.endswith(".weight") and len(weight.shape) == 2)


def keys_seen(length: int, whole_square: bool) -> float:
    """Keys that a causal token sees on average, or all of them."""
    return float(length) if whole_square else (length + 1) / 2


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
