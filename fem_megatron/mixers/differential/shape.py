"""Shape of differential attention (Differential Transformer, arXiv 2410.05258), without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fem_megatron.context_parallel.shape import Crossing, SplitKinds, SplitWidths
from fem_megatron.mup import score_scale
from fem_megatron.rope import Rope
from fem_megatron.shape import (
    FIXED,
    Kept,
    Normal,
    Packing,
    Shape,
    Training,
    Weight,
    Weights,
    keys_seen,
    qk_norms,
    qk_norms_keep,
)

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig

LAMBDA_STD = 0.1


@dataclass(frozen=True)
class DifferentialShape(Shape):
    """Shape of differential attention: H heads, each with two queries, two keys and one value.

    A query or key has D/2H channels, a value D/H. The layer has 4 D^2 parameters, like standard
    attention. In the paper a model has half as many heads as the Transformer with which it is
    compared, so that queries and keys keep their width.
    """

    layer_class = "fem_megatron.mixers.differential.layer:DifferentialAttention"
    kept = Kept(49.0, 32.0, 24.2, 22.1)
    sliced = True

    hidden: int
    heads: int
    head: int
    lambda_init: float
    rope: Rope | None
    norm_eps: float
    scale: float | None = None  # factor on the scores; None: 1 / sqrt(head)
    qk_norm: bool = False

    @classmethod
    def of(cls, model: ModelConfig, layer: int) -> DifferentialShape:
        """Return the sizes of layer ``layer`` (from 0).

        Raises ValueError if twice the number of heads does not divide the width.
        """
        heads, hidden = model.num_attention_heads, model.hidden_size
        if hidden % (2 * heads):
            raise ValueError(
                f"model.num_attention_heads={heads}: differential heads have two queries, and "
                f"{2 * heads} does not divide {hidden}"
            )
        head = hidden // (2 * heads)
        sizes = (hidden, heads, head, lambda_init(layer), Rope.of(model), model.norm_eps)
        return cls(*sizes, score_scale(model, head), model.qk_norm)

    @property
    def head_width(self) -> int:
        """Rows of a head in the packed projection: q1, q2, k1, k2, v."""
        return 6 * self.head

    def weights(self) -> Weights:
        """Return name -> weight.

        The names are norm, in_proj (head-major), lam, the norms of q and k if configured, head_norm
        and out_proj. The rows of lam are lambda_q1, lambda_k1, lambda_q2, lambda_k2.
        """
        return {
            "norm.weight": Weight((self.hidden,), init=1.0, per_token=True),
            "in_proj.weight": Weight(
                (self.heads * self.head_width, self.hidden),
                split=0,
                maps=(*[self.head] * 4, 2 * self.head),
            ),
            "lam": Weight((4, self.head), init=Normal(LAMBDA_STD), mup=FIXED, vectors=True),
            **qk_norms(self.head, self.qk_norm),
            "head_norm.weight": Weight((2 * self.head,), init=1.0),
            "out_proj.weight": Weight((self.hidden, 2 * self.heads * self.head), split=1),
        }

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs of projections, the scores of both softmax maps, and their two reads.

        The value that they read is twice as wide as a query.
        """
        attention = (
            2.0 * keys_seen(length, whole_square) * self.heads * 2 * (self.head + 2 * self.head)
        )
        return {"mixer projections": self.linear_flops(), "attention": attention}

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of one sequence's KV-cache: both keys and the value of every head."""
        return length * self.heads * 4 * self.head * element

    def activation_bytes(self, training: Training) -> dict[str, float]:
        """Return the estimated bytes per token that autograd keeps.

        They include the bytes of the norms of q and k, if used.
        """
        norms = qk_norms_keep(training, self.head, 4 * self.heads) if self.qk_norm else 0.0
        return training.estimate(self.hidden, self.kept, norms, sliced=self.sliced)

    def split_widths(self) -> dict[str, int]:
        return {"model.num_attention_heads": self.heads}

    def cut_widths(self) -> SplitWidths:
        return SplitWidths(keyed=self.split_widths(), rings=True)

    def exchanged_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the bytes that ranks sharing a sequence send.

        If keys are gathered or pass around a ring, ranks send both keys and the value. If heads are
        exchanged, both queries and both outputs are added.
        """
        e = training.element * self.heads * 2 * self.head / training.tensor_parallel
        if kinds.ring:  # keys as wide as the values
            return Crossing(ring=3 * self.heads * 2 * self.head / training.tensor_parallel)
        return Crossing(keys=2 * e) if kinds.gathers else Crossing(5 * e)

    def rotary_size(self) -> int:
        return self.head if self.rope else 0

    def reads(self) -> set[str]:
        return {"qk_norm"}

    def product_scores(self) -> bool:
        return True

    def packing(self) -> dict[str, Packing]:
        """Return the packing of in_proj. Two attention heads form one differential head."""
        return {
            "in_proj.weight": Packing(self.heads, dict.fromkeys("qkv", 2 * self.head), queries=2)
        }

    def summary(self) -> str:
        return f"d_k 2 x {self.head}, d_v {2 * self.head}, lambda_init {self.lambda_init:.3f}"


def lambda_init(layer: int) -> float:
    """Return 0.8 - 0.6 exp(-0.3 (l - 1)) for layer l = ``layer`` + 1."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)
