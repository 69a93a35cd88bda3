"""Shapes of mixers and MLPs: layer class, weights, and costs per token.

A shape describes a layer without torch, so that models can be planned and checked before they are
built. "Costs" are FLOPs, memory for the backward pass, decoding state and traffic between ranks.

Long, because every property of a mixer is a method of one class.
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

from fem_megatron.context_parallel.shape import Crossing, SplitKinds, SplitWidths

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig


@dataclass(frozen=True)
class Normal:
    """Initialisation of a weight from a normal distribution with mean 0."""

    std: float


@dataclass(frozen=True)
class Scaling:
    """Scaling of a weight with the model's width under muP.

    m is the width divided by the base model's (see ``mup``).

    std: exponent of m in the initial standard deviation.
    lr: exponent of m in the learning rate.
    """

    std: float
    lr: float


# Adam's exponents, Yang et al. 2022, table 3. HIDDEN: maps the width to the width. FIXED: maps a
# fixed size to the width; also vectors that scale single channels. OUTPUT: maps the width to a
# fixed size.
HIDDEN, FIXED, OUTPUT = Scaling(-0.5, -1.0), Scaling(0.0, 0.0), Scaling(-1.0, -1.0)


@dataclass(frozen=True)
class Weight:
    """Description of one parameter.

    shape: shape of the complete weight, before tensor parallelism.
    split: dimension that is split over the tensor-parallel ranks; None if every rank has a
        full copy.
    init: "normal" (the model's init_std), a Normal with a separate std, or a constant start
        value.
    per_token: True for an unsplit weight that is applied to a rank's slice of the sequence
        (norms). Under sequence parallelism its gradient is summed over the ranks.
    bare: True for a matrix that is used in other ways than in one product with a token
        (applied in both directions, squared). It is not a linear module, which adapters or
        quantisation might replace.
    mup: scaling with the width, if it does not follow from the shape (``scaling``).
    vectors: True if the rows are independent vectors that are stored together. No weight decay
        applies to them.
    maps: number of rows of each linear map that is packed in the matrix, in order. The list
        repeats until the matrix is full (for example once per head). Empty: the matrix, or each
        of its leading indices, is one map. None: the weight contains no linear map (embedding
        rows, filters, one number per head, low-rank factors). Muon orthogonalises each map
        separately.
    precise: True if the product never uses 8-bit floats, because later steps accumulate its
        error over the sequence.
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
        """True if the weight's product may use 8-bit floats (train.fp8).

        This holds for linear maps that are split over ranks and are used in that product only.
        """
        return self.orthogonal and self.split is not None and not (self.bare or self.precise)

    @property
    def orthogonal(self) -> bool:
        """True if the weight consists of linear maps, which Muon updates if it is the optimizer."""
        return len(self.shape) > 1 and not self.vectors and self.maps is not None

    def linear_maps(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, rows) of each linear map.

        The weight is treated as a matrix of shape[-1] columns.

        Raises ValueError if ``maps`` do not fill the matrix.
        """
        rows, sizes = self.shape[-2], self.maps or self.shape[-2:-1]
        if rows % sum(sizes):
            raise ValueError(f"maps of {sizes} rows do not fill {self.shape}")
        starts = list(accumulate(sizes, initial=0))
        for first in range(0, self.size // self.shape[-1], starts.pop()):
            yield from ((first + start, size) for start, size in zip(starts, sizes, strict=True))

    @property
    def decayed(self) -> bool:
        """True if weight decay applies: to matrices and convolution filters, but not to vectors."""
        return len(self.shape) > 1 and not self.vectors

    @property
    def scaling(self) -> Scaling:
        """Scaling under muP: ``mup`` if set, else HIDDEN for a matrix and FIXED for a vector."""
        return self.mup or (HIDDEN if len(self.shape) > 1 else FIXED)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Weights = dict[str, Weight]
WIDE = 4  # bytes of fp32


@dataclass(frozen=True)
class Training:
    """Training settings that determine the memory of the activations.

    element: bytes per element in the training precision.
    tensor_parallel: tensor-parallel ranks that share a layer.
    sequence_split: ranks over which the residual stream between layers is split (sequence
        parallelism); 1 without sequence parallelism.
    micro_batch: number of sequences in a micro-batch.
    length: tokens per sequence.
    cuda: True if the fused GPU kernels run.
    again: True if reads are recomputed and keep only their inputs (train.recompute =
        selective).
    ranks: context-parallel ranks that share a sequence.
    fp8: True if linear maps multiply 8-bit floats.
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
        """Bytes per element of the input that a linear map keeps for its backward pass.

        This applies if no other operation keeps the same input.
        """
        return 1 if self.fp8 else self.element

    @property
    def entered(self) -> float:
        """Bytes per channel kept by a linear map that gathers its input (`Parallel.project`).

        With fp8 the map keeps the gathered input in 8-bit floats.
        """
        return 1.0 if self.fp8 else self.element / self.sequence_split

    def tokens_before(self, count: int) -> int:
        """Return the number of tokens that the previous chunk provides of ``count`` earlier tokens.

        A chunk has length / (2 ranks) tokens, so this is at most its length.
        """
        return min(count, self.length // (2 * self.ranks))

    @property
    def wide(self) -> int:
        """Bytes per element of values computed in fp32 or wider."""
        return max(WIDE, self.element)

    @property
    def product(self) -> int:
        """Bytes per element of a linear attention's operands (`update.product_type`)."""
        return self.element if self.cuda else self.wide

    def estimate(
        self, hidden: int, kept: Kept, more: float = 0.0, *, sliced: bool = False
    ) -> dict[str, float]:
        """Return the estimated bytes per token on one rank, as a dictionary with one entry.

        The total is the measured bytes per channel (``kept``) times ``hidden``, plus ``more``. The
        input is complete on every rank, or split over the sequence if ``sliced``. All other bytes
        are split over the tensor-parallel ranks.
        """
        if self.element == WIDE:
            channel = (kept.gpu_fp32 if self.cuda else None) or kept.fp32
        else:
            on_a_gpu = kept.again if self.again else kept.gpu
            channel = (on_a_gpu if self.cuda else None) or kept.bf16
        seen = channel * hidden + more
        full = self.element * hidden
        return {
            ESTIMATE: full / (self.sequence_split if sliced else 1)
            + max(0.0, seen - full) / self.tensor_parallel
        }


class Kept(NamedTuple):
    """Bytes per token and channel that autograd keeps of one layer application, without its norm.

    The values apply to the default configuration of the mixer.

    fp32, bf16: measured on a CPU, at widths 256 and 512 and lengths 64 and 256; they agree
        within 25%.
    gpu: in bf16 with GPU kernels (`pretrain.rehearsal`), at widths 256 and 1024. None: the
        value of a CPU applies.
    again: like gpu, but with recomputed reads. None: the value of a CPU applies.
    gpu_fp32: like gpu, but in fp32. None: the value of a CPU applies.
    """

    fp32: float
    bf16: float
    gpu: float | None = None
    again: float | None = None
    gpu_fp32: float | None = None


ESTIMATE = "estimate"
KEPT = Kept(90.0, 70.0)


@dataclass(frozen=True)
class Packing:
    """Layout of the rows of a matrix that packs several projections head by head.

    It is used to copy another mixer's weights (``tools.hf.graft``).

    heads: number of heads.
    widths: rows of each slice of a head, in order.
    roles: slices that correspond to q, k or v of attention, or to gate or up of an MLP.
    queries: number of attention heads whose q and k are next to each other in one head.
    """

    heads: int
    widths: dict[str, int]
    roles: dict[str, str] = field(default_factory=lambda: {part: part for part in "qkv"})
    queries: int = 1


class Shape(ABC):
    """Sizes of one update of the residual stream: a mixer or an MLP, including its norm.

    layer_class: "module:class" of the ``Update`` that computes it.
    external: True if another package computes it and only its parameters are available.
    kept: measured constants of the memory estimate (``activation_bytes``).
    fused_maps: linear maps whose product is part of a pointwise kernel in a GPU's forward pass.
    sliced: True if only the gathering projections of `Parallel` (``project`` and its variant)
        use the input.
    once: parts of ``flops`` that are computed once per sequence instead of once per document in it.
    hidden: channels of a token.
    """

    layer_class: ClassVar[str]
    external: ClassVar[bool] = False
    kept: ClassVar[Kept] = KEPT
    fused_maps: ClassVar[frozenset[str]] = frozenset()
    sliced: ClassVar[bool] = False
    once: ClassVar[frozenset[str]] = frozenset()
    hidden: int

    @property
    def stream(self) -> int:
        """Channels that the update reads and writes.

        The ``hidden`` token channels are first. Channels of other carried values (velocities)
        follow.
        """
        return self.hidden

    @abstractmethod
    def weights(self) -> Weights:
        """Return name -> weight, with the names of the layer's state dict.

        ``x.weight`` with two dimensions is a linear map [out, in].
        """

    @abstractmethod
    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs of one token's forward pass by part.

        Only matrix products count, and a multiply-add counts as two. Causal attention sees (length
        + 1) / 2 keys on average. With the keyword set, it counts all keys, as torch's counter does.
        """

    @abstractmethod
    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of one sequence's decoding state after ``length`` tokens.

        element: bytes per element of activations. Stored sums are fp32.
        """

    def reads(self) -> set[str]:
        """Return the model keys that this shape reads, in addition to those common to all models.

        Each entry is a section, or one key of it (``fem.gate``). A key that is set but that no
        layer reads is an error (``catalogue.unread``).
        """
        return set()

    def summary(self) -> str:
        """Return a short description of the widths, for the printed plan."""
        return type(self).__name__.removesuffix("Shape")

    def split_widths(self) -> dict[str, int]:
        """Return the widths that the tensor-parallel size must divide.

        The result maps user-readable names to numbers.
        """
        return {}

    def cut_widths(self) -> SplitWidths:
        """Return the widths that must be divisible by tensor- times context-parallel ranks.

        This applies if the reads of a split sequence exchange heads (`context_parallel.split`).
        """
        return SplitWidths(always=self.split_widths())

    def exchanged_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the bytes that one tensor-parallel rank sends to ranks that share its sequence.

        kinds: the result of `split_kinds`. This default is an estimate: q, k, v and the output,
            each as wide as the stream.
        """
        return Crossing(4 * training.element * self.hidden / training.tensor_parallel)

    def rotary_size(self) -> int:
        """Return the channels of a head that RoPE rotates, or 0."""
        return 0

    def max_length(self) -> int | None:
        """Return the longest sequence that the mixer accepts, or None for no limit.

        The layer raises ValueError for longer sequences.
        """
        return None

    def counts_padding(self) -> bool:
        """Return True if padding between two tokens changes the result.

        This is the case if distances, filters or windows count positions instead of tokens.
        """
        return self.external

    def uncapturable(self) -> str | None:
        """Return the reason why CUDA graphs (train.cuda_graphs) cannot capture the layer, or None.

        A typical reason is a decision that the host makes in every pass.
        """
        return "another package computes it, and its capture is untested" if self.external else None

    def product_scores(self) -> bool:
        """Return True if scores are products over a head's width.

        model.mup.base_head_size scales these scores.
        """
        return False

    def activation_bytes(self, training: Training) -> dict[str, float]:
        """Return the bytes per token that autograd keeps on one rank, by term, without the norm.

        This default is the estimate from ``kept``. Mixers with known terms override it.
        """
        return training.estimate(self.hidden, self.kept, sliced=self.sliced)

    def workspace_bytes(self, training: Training) -> float:
        """Return the peak of temporary bytes in the backward pass of one application on one rank.

        Gradients of the kept tensors are not included.
        """
        return 0.0

    def packing(self) -> dict[str, Packing]:
        """Return name -> packing of each matrix that a Transformer's weights can initialise."""
        return {}

    def linear_flops(self) -> float:
        """Return 2 FLOPs per element of each linear map (a matrix applied once to each token)."""
        return sum(self.map_flops.values())

    @cached_property
    def map_flops(self) -> dict[str, float]:
        """2 FLOPs per element of each linear map, by the name of its weight."""
        return {
            name: 2.0 * weight.size
            for name, weight in self.weights().items()
            if name.endswith(".weight") and len(weight.shape) == 2
        }


def located(place: str) -> Any:
    """Return the object that ``place``, written as "module:name", refers to.

    In an exported folder all modules form one flat package (`tools.hf.bundle`), and the object is
    imported from that package.
    """
    module, name = place.split(":")
    if __name__ != "fem_megatron.shape":
        module = f"{__package__}.{module.replace('.', '_')}"
    return getattr(import_module(module), name)


def head_width(model: ModelConfig) -> int:
    """Return the channels per head: the model's width divided by the number of heads.

    Raises ValueError if the number of heads does not divide the width.
    """
    if model.hidden_size % model.num_attention_heads:
        raise ValueError(
            f"model.num_attention_heads={model.num_attention_heads} does not divide "
            f"model.hidden_size={model.hidden_size}"
        )
    return model.hidden_size // model.num_attention_heads


def keys_seen(length: int, whole_square: bool) -> float:
    """Return the average number of keys that a causal token sees: (length + 1) / 2.

    With the flag, return ``length`` instead.
    """
    return float(length) if whole_square else (length + 1) / 2


def qk_norms(head: int, wanted: bool) -> Weights:
    """Return the weights of the norms of q and k (model.qk_norm), which all heads share.

    Return an empty dictionary if ``wanted`` is False.
    """
    return {f"{part}_norm.weight": Weight((head,), init=1.0) for part in "qk"} if wanted else {}


def qk_norms_keep(training: Training, head: int, heads: int) -> float:
    """Return the bytes per token that norms of ``heads`` heads keep in addition to their inputs.

    They keep one number per head. On a CPU they also keep x / rms, and x in fp32 for narrower
    types.
    """
    copies = 1 if training.element == WIDE else 2
    if training.cuda:
        copies = 0
    return WIDE * heads * (copies * head + 1)


@dataclass(frozen=True)
class BlockShape:
    """A layer: its mixer, its MLP (None if the mixer includes one) and its repetitions.

    repeated: the part that ``recurrence`` repeats, "block", "mixer" or "mlp".
    """

    mixer: Shape
    mlp: Shape | None
    recurrence: int
    repeated: str = "block"

    def times(self, part: str) -> int:
        """Return the number of times that a part is applied; part: "mixer" or "mlp"."""
        return self.recurrence if self.repeated in ("block", part) else 1

    @property
    def parts(self) -> dict[str, Shape]:
        """The mixer and, if it is separate, the MLP, by their names in the state dict."""
        return {"mixer": self.mixer} if self.mlp is None else {"mixer": self.mixer, "mlp": self.mlp}

    def weights(self) -> Weights:
        """Return the weights with the block's state dict names: ``mixer.*`` and ``mlp.*``."""
        return {**self._weights}

    @cached_property
    def _weights(self) -> Weights:
        found: Weights = {}
        for part, shape in self.parts.items():
            found |= {f"{part}.{name}": weight for name, weight in shape.weights().items()}
        return found

    def flops(
        self, length: int, *, whole_square: bool = False, document: int | None = None
    ) -> dict[str, float]:
        """Return the FLOPs of one token's forward pass by part, over all iterations.

        document: length in tokens of each document, if documents are read separately.
        """
        flops: dict[str, float] = {}
        for part, shape in self.parts.items():
            parts = shape.flops(length if document is None else document, whole_square=whole_square)
            if document is not None and shape.once:
                parts |= {
                    name: value
                    for name, value in shape.flops(length, whole_square=whole_square).items()
                    if name in shape.once
                }
            for name, value in parts.items():
                flops[name] = flops.get(name, 0.0) + self.times(part) * value
        return flops

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of one sequence's decoding state after ``length`` tokens.

        All iterations are included.
        """
        return sum(
            self.times(part) * shape.state_bytes(length, element)
            for part, shape in self.parts.items()
        )

    def reads(self) -> set[str]:
        """Return the model keys that the mixer or the MLP reads, in addition to the common keys."""
        return set[str]().union(*(shape.reads() for shape in self.parts.values()))

    def counts_padding(self) -> bool:
        """Return True if the mixer or the MLP counts padding (`Shape.counts_padding`)."""
        return any(shape.counts_padding() for shape in self.parts.values())

    def split_widths(self) -> dict[str, int]:
        """Return the widths that the tensor-parallel size must divide."""
        return self.mixer.split_widths() | ({} if self.mlp is None else self.mlp.split_widths())


@dataclass(frozen=True)
class SwiGluShape(Shape):
    """Shape of the SwiGLU MLP: D -> 2F (gate and up projection) -> D."""

    layer_class = "fem_megatron.block:SwiGlu"

    hidden: int
    inner: int
    norm_eps: float

    @classmethod
    def of(cls, model: ModelConfig) -> SwiGluShape:
        """Return the shape for the configuration ``model``."""
        return cls(model.hidden_size, model.ffn_size, model.norm_eps)

    def weights(self) -> Weights:
        """Return the weights: norm, gate_up [2, F, D] (both projections in one product), down."""
        return {
            "norm.weight": Weight((self.hidden,), init=1.0, per_token=True),
            "gate_up": Weight((2, self.inner, self.hidden), split=1),
            "down.weight": Weight((self.hidden, self.inner), split=1),
        }

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs of the three products."""
        return {"MLP": 6.0 * self.hidden * self.inner}

    def state_bytes(self, length: int, element: int) -> int:
        """Return 0: the MLP reads only the current token."""
        return 0

    def activation_bytes(self, training: Training) -> dict[str, float]:
        """Return the bytes per token that autograd keeps: input, packed product and inner product.

        On a CPU, silu(gate) is also kept.
        """
        inner = (2 if training.cuda else 3) * training.element + training.operand
        return {
            "MLP": training.entered * self.hidden + inner * self.inner / training.tensor_parallel
        }

    def summary(self) -> str:
        return f"MLP {self.inner}"

    def split_widths(self) -> dict[str, int]:
        return {"the MLP's width, model.ffn_hidden_size": self.inner}
