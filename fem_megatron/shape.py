"""What every mixer's and MLP's shape tells: its layer, the weights it owns, what a token costs of the whole layer. Torch-free.

Long, because all that a mixer may be asked is a method of one class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fem_megatron.cut_shape import Crossing, CutKinds, CutWidths

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
    vectors: its rows are vectors of their own, stored together, so that none of them is decayed. maps: rows of each linear map of one
    vector that lies packed in a matrix, in order, and again from the first (a head's slices); (): it is one, or each of its leading indices
    is; None: it holds none (an embedding's rows, filters, one number a head, low-rank factors). Muon makes each orthogonal by itself.
    precise: its product is never one of 8-bit floats, since what follows sums its error up over the sequence.
    """

    shape: tuple[int, ...]
    split: int | None = None
    init: str | float | Normal = "normal"
    per_token: bool = False
    bare: bool = False
    mup: Scaling | None = None
    vectors: bool = False
    maps: tuple[int, ...] | None = ()
    precise: bool = False

    @property
    def eight_bit(self) -> bool:
        """Whether its product may be one of 8-bit floats (train.fp8): linear maps that ranks share, used in that product alone."""
        return self.orthogonal and self.split is not None and not (self.bare or self.precise)

    @property
    def orthogonal(self) -> bool:
        """Whether it consists of linear maps, which Muon updates where it is the optimizer."""
        return len(self.shape) > 1 and not self.vectors and self.maps is not None

    def linear_maps(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of each linear map, of the weight as a matrix of shape[-1] columns.

        Raises ValueError: ``maps`` do not fill it.
        """
        rows, sizes = self.shape[-2], self.maps or self.shape[-2:-1]
        if rows % sum(sizes):
            raise ValueError(f"maps of {sizes} rows do not fill {self.shape}")
        starts = list(accumulate(sizes, initial=0))
        for first in range(0, self.size // self.shape[-1], starts.pop()):
            yield from ((first + start, size) for start, size in zip(starts, sizes, strict=True))

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
WIDE = 4  # bytes of fp32


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as the memory of its activations depends on it.

    element: bytes of the training precision. tensor_parallel: ranks that share a layer; sequence_split: that share the sequence outside it.
    micro_batch: sequences, of ``length`` tokens. cuda: whether a GPU's fused kernels run. again: reads are computed again, and keep what
    they are given alone (train.recompute = selective). ranks: that share a sequence. fp8: linear maps multiply 8-bit floats.
    """

    element: int
    tensor_parallel: int
    sequence_split: int
    micro_batch: int
    length: int
    cuda: bool
    again: bool = False
    ranks: int = 1
    fp8: bool = False

    @property
    def operand(self) -> int:
        """Bytes of what a linear map keeps of its input, where nothing else keeps that."""
        return 1 if self.fp8 else self.element

    @property
    def entered(self) -> float:
        """Bytes a channel of what a linear map that gathers its input keeps of it (`Parallel.project`); 8-bit floats are gathered."""
        return 1.0 if self.fp8 else self.element / self.sequence_split

    def tokens_before(self, count: int) -> int:
        """Of the ``count`` tokens before a chunk, those that the chunk before it has, and hands on."""
        return min(count, self.length // (2 * self.ranks))

    @property
    def wide(self) -> int:
        """Bytes of what is computed in fp32 or wider."""
        return max(WIDE, self.element)

    @property
    def product(self) -> int:
        """Bytes of a linear attention's operands (`update.product_type`)."""
        return self.element if self.cuda else self.wide

    def estimate(
        self, hidden: int, kept: Kept, more: float = 0.0, *, sliced: bool = False
    ) -> dict[str, float]:
        """Bytes a token from those seen a channel of ``hidden``, and ``more``; every rank keeps the input whole, or its slice."""
        on_a_gpu = (kept.again if self.again else kept.gpu) if self.cuda else None
        seen = (kept.fp32 if self.element == WIDE else on_a_gpu or kept.bf16) * hidden + more
        whole = self.element * hidden
        return {
            ESTIMATE: whole / (self.sequence_split if sliced else 1)
            + max(0.0, seen - whole) / self.tensor_parallel
        }


class Kept(NamedTuple):
    """Bytes a token and channel that autograd keeps of one application, its norm aside, at the default switches.

    fp32, bf16: on a CPU, at widths of 256 and 512 and lengths of 64 and 256, within 25% of each other. gpu: in bf16 by a GPU's kernels
    (`pretrain.rehearsal`), at widths of 256 and 1024; again: there, where reads are computed again. None: as on a CPU.
    """

    fp32: float
    bf16: float
    gpu: float | None = None
    again: float | None = None


ESTIMATE = "estimate"
KEPT = Kept(90.0, 70.0)


@dataclass(frozen=True)
class Packing:
    """How the rows of a matrix lie, head after head, for another mixer's weights to be put there (``tools.hf.graft``).

    widths: rows of each slice of a head, in order. roles: the slices that mean in attention q, k or v, in an MLP gate or up.
    queries: heads of attention that one head's q and k hold side by side.
    """

    heads: int
    widths: dict[str, int]
    roles: dict[str, str] = field(default_factory=lambda: {part: part for part in "qkv"})
    queries: int = 1


class Shape(ABC):
    """Sizes of one update of the residual stream: a mixer or an MLP, its norm included.

    layer_class: "module:class" of the ``Update`` that computes it. external: another package does, and knows its parameters alone.
    kept: of an estimate (``kept_bytes``). sliced: its input goes to `Parallel.project` or ``project_beside`` alone.
    once: the parts of ``flops`` with work that is done once a sequence, and not again for each document that it holds.
    """

    layer_class: ClassVar[str]
    external: ClassVar[bool] = False
    kept: ClassVar[Kept] = KEPT
    sliced: ClassVar[bool] = False
    once: ClassVar[frozenset[str]] = frozenset()
    hidden: int

    @property
    def stream(self) -> int:
        """Channels of what it updates: those of the tokens, ``hidden``, first, and what it carries beside them."""
        return self.hidden

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

    def cut_widths(self) -> CutWidths:
        """What tensor- and context-parallel ranks together must divide where reads of a sequence that is cut exchange heads (`cut`)."""
        return CutWidths(always=self.split_widths())

    def cut_bytes(self, training: Training, kinds: CutKinds) -> Crossing:
        """What the ranks of a cut sequence give each other, on one tensor-parallel rank; kinds: `cut_kinds`' answer.

        Of a shape that does not tell, an estimate: q, k, v and what was read, as wide as the stream.
        """
        return Crossing(4 * training.element * self.hidden / training.tensor_parallel)

    def rotary_size(self) -> int:
        """Channels of a head that RoPE turns; 0: none."""
        return 0

    def max_length(self) -> int | None:
        """The longest sequence that the mixer takes, None: any. Longer ones raise ValueError when they come."""
        return None

    def counts_padding(self) -> bool:
        """Whether padding between two tokens changes the result: by distances, filters or windows that count places, not tokens."""
        return self.external

    def uncapturable(self) -> str | None:
        """Why no CUDA graph may hold its passes (train.cuda_graphs): the host decides something anew in each. None: nothing."""
        return "another package computes it, which nobody captured yet" if self.external else None

    def product_scores(self) -> bool:
        """Whether its scores are products over a head's width, which model.mup.base_head_size scales."""
        return False

    def kept_bytes(self, training: Training) -> dict[str, float]:
        """Bytes a token that autograd keeps on one rank, by term, its norm aside: an estimate, or the table's (`pretrain.plan.memory`)."""
        return training.estimate(self.hidden, self.kept, sliced=self.sliced)

    def moment_bytes(self, training: Training) -> float:
        """Bytes that the backward pass of one application holds for a moment on one rank, beyond gradients as wide as what was kept."""
        return 0.0

    def packing(self) -> dict[str, Packing]:
        """Which matrices may start from a Transformer's, by name; {}: none."""
        return {}

    def linear_flops(self) -> float:
        """2 FLOPs for each number of each linear map: a matrix applied once to each token."""
        return sum(self.map_flops.values())

    @cached_property
    def map_flops(self) -> dict[str, float]:
        """2 FLOPs for each number of a linear map, by its weight's name."""
        return {
            name: 2.0 * weight.size
            for name, weight in self.weights().items()
            if name.endswith(".weight") and len(weight.shape) == 2
        }


def located(place: str) -> Any:
    """What "module:name" names. An exported folder's modules are one flat package (`tools.hf.bundle`), and there it is of that package."""
    module, name = place.split(":")
    if __name__ != "fem_megatron.shape":
        module = f"{__package__}.{module.replace('.', '_')}"
    return getattr(import_module(module), name)


def head_width(model: ModelConfig) -> int:
    """Channels of a head that the model's width is shared out to. Raises ValueError where the heads do not divide it."""
    if model.hidden_size % model.num_attention_heads:
        raise ValueError(
            f"model.num_attention_heads={model.num_attention_heads} does not divide model.hidden_size={model.hidden_size}"
        )
    return model.hidden_size // model.num_attention_heads


def keys_seen(length: int, whole_square: bool) -> float:
    """Keys that a causal token sees on average, or all of them."""
    return float(length) if whole_square else (length + 1) / 2


def qk_norms(head: int, wanted: bool) -> Weights:
    """The weights of model.qk_norm, which all heads share; {} where it is off."""
    return {f"{part}_norm.weight": Weight((head,), init=1.0) for part in "qk"} if wanted else {}


def qk_norms_keep(training: Training, head: int, heads: int) -> float:
    """Bytes a token that norms of ``heads`` heads keep besides their inputs: a number a head; on a CPU x / rms, and x in fp32."""
    copies = 0 if training.cuda else 1 if training.element == WIDE else 2
    return WIDE * heads * (copies * head + 1)


@dataclass(frozen=True)
class BlockShape:
    """A layer: its mixer, its MLP (None where the mixer has its own) and how often the pair is applied."""

    mixer: Shape
    mlp: Shape | None
    recurrence: int

    def weights(self) -> Weights:
        """The names of the block's state dict: ``mixer.*`` and ``mlp.*``."""
        return {**self._weights}

    @cached_property
    def _weights(self) -> Weights:
        parts = {"mixer": self.mixer} | ({} if self.mlp is None else {"mlp": self.mlp})
        return {
            f"{part}.{name}": weight
            for part, shape in parts.items()
            for name, weight in shape.weights().items()
        }

    def flops(
        self, length: int, *, whole_square: bool = False, document: int | None = None
    ) -> dict[str, float]:
        """FLOPs of one token's forward pass by part, over all iterations; ``document``: of one that is read apart, of so many tokens."""
        flops: dict[str, float] = {}
        for shape in filter(None, (self.mixer, self.mlp)):
            parts = shape.flops(length if document is None else document, whole_square=whole_square)
            if document is not None and shape.once:
                parts |= {
                    name: value
                    for name, value in shape.flops(length, whole_square=whole_square).items()
                    if name in shape.once
                }
            for name, value in parts.items():
                flops[name] = flops.get(name, 0.0) + self.recurrence * value
        return flops

    def state_bytes(self, length: int, element: int) -> int:
        """Bytes of one sequence's decoding state after ``length`` tokens; every iteration has its own."""
        return self.recurrence * sum(
            shape.state_bytes(length, element)
            for shape in (self.mixer, self.mlp)
            if shape is not None
        )

    def reads(self) -> set[str]:
        """The keys of the model that one of the two reads, besides those that every part of a model has."""
        return self.mixer.reads() | (set() if self.mlp is None else self.mlp.reads())

    def counts_padding(self) -> bool:
        """Whether one of the two does (`Shape.counts_padding`)."""
        return any(shape.counts_padding() for shape in (self.mixer, self.mlp) if shape is not None)

    def split_widths(self) -> dict[str, int]:
        """What the tensor-parallel size must divide."""
        return self.mixer.split_widths() | ({} if self.mlp is None else self.mlp.split_widths())


@dataclass(frozen=True)
class SwiGluShape(Shape):
    """D -> 2F -> D."""

    layer_class = "fem_megatron.block:SwiGlu"

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

    def kept_bytes(self, training: Training) -> dict[str, float]:
        """Its input, the packed product and the inner product; on a CPU silu(gate) beside them."""
        inner = (2 if training.cuda else 3) * training.element + training.operand
        return {
            "MLP": training.entered * self.hidden + inner * self.inner / training.tensor_parallel
        }

    def summary(self) -> str:
        return f"MLP {self.inner}"

    def split_widths(self) -> dict[str, int]:
        return {"the MLP's width, model.ffn_hidden_size": self.inner}
