"""Shape of the Energy Transformer: configuration keys, weights and costs.

The module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fem_common.settings import setting
from fem_megatron.context_parallel.shape import Crossing, SplitKinds, SplitWidths
from fem_megatron.mup import score_scale
from fem_megatron.rope import Rope
from fem_megatron.shape import (
    Kept,
    Packing,
    Shape,
    Training,
    Weight,
    Weights,
    head_width,
    keys_seen,
)

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig


@dataclass(frozen=True)
class EnergyTransformerConfig:
    """Switches and sizes of the Energy Transformer.

    They are read only if ``model.mixer`` is energy_transformer. The number of steps of a block is
    ``model.recurrence``.
    """

    alpha: float = setting(0.1, "Step size, the same for both energies.")
    multiplier: int = setting(
        4, "Memories of the Hopfield network divided by hidden_size.", least=1
    )


@dataclass(frozen=True)
class EnergyTransformerShape(Shape):
    """Shape of one step of the Energy Transformer."""

    layer_class = "fem_megatron.mixers.energy_transformer.layer:EnergyTransformer"
    kept = Kept(37.5, 12.8, 20.0, 20.0, gpu_fp32=40.0)

    hidden: int
    heads: int
    memories: int
    norm_eps: float
    rope: Rope | None
    causal: bool
    switches: EnergyTransformerConfig
    mup_scale: float | None = None  # muP's factor on the scores, if any

    @classmethod
    def of(cls, model: ModelConfig) -> EnergyTransformerShape:
        """Return the shape for the configuration ``model``.

        Raises ValueError if heads do not divide hidden_size.
        """
        head = head_width(model)
        return cls(
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            memories=model.energy_transformer.multiplier * model.hidden_size,
            norm_eps=model.norm_eps,
            rope=Rope.of(model),
            causal=model.causal,
            switches=model.energy_transformer,
            mup_scale=score_scale(model, head),
        )

    @property
    def head(self) -> int:
        """Y: channels of a head."""
        return self.hidden // self.heads

    @property
    def beta(self) -> float:
        """beta: the inverse temperature of attention, 1 / sqrt(Y)."""
        return float(self.head**-0.5) if self.mup_scale is None else self.mup_scale

    def weights(self) -> Weights:
        """Return name -> weight: norm, query, key and memories.

        norm.weight is gamma, one number, and norm.bias is delta. query, key and memories are W^Q,
        W^K and xi; each is applied in both directions.
        """
        hidden = self.hidden
        return {
            "norm.weight": Weight((1,), init=1.0, per_token=True),
            "norm.bias": Weight((hidden,), init=0.0, per_token=True),
            "query.weight": Weight((hidden, hidden), split=0, bare=True, maps=(self.head,)),
            "key.weight": Weight((hidden, hidden), split=0, bare=True, maps=(self.head,)),
            "memories.weight": Weight((self.memories, hidden), split=0, bare=True),
        }

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs by part.

        A causal token reads keys only. Otherwise it is also read as a key, which adds a product
        with the scores and a projection.
        """
        both = not self.causal
        keys = keys_seen(length, whole_square or both)
        return {
            "mixer projections": 2.0 * self.hidden**2 * (3 + both),
            "attention": 2.0 * self.hidden * keys * (2 + both),
            "MLP": 4.0 * self.memories * self.hidden,
        }

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of one sequence's decoding state: k, which is also the value."""
        return length * self.hidden * element

    def product_scores(self) -> bool:
        return True

    def packing(self) -> dict[str, Packing]:
        """Return the packing of q and k. Values and output use the same two matrices."""
        return {
            name: Packing(self.heads, {part: self.head}, {part: part})
            for name, part in (("query.weight", "q"), ("key.weight", "k"))
        }

    def summary(self) -> str:
        return f"{self.heads} heads of {self.head}, {self.memories} memories"

    def reads(self) -> set[str]:
        return {"energy_transformer"}

    def rotary_size(self) -> int:
        """Return the width of a head with ``model.rope``, else 0."""
        return self.head if self.rope else 0

    def split_widths(self) -> dict[str, int]:
        """Return the widths that tensor-parallel ranks split: heads and memories."""
        return {
            "model.num_attention_heads": self.heads,
            "the memories, model.energy_transformer.multiplier * hidden_size": self.memories,
        }

    def cut_widths(self) -> SplitWidths:
        heads = {"model.num_attention_heads": self.heads}
        return SplitWidths(keyed=heads) if self.causal else SplitWidths(always=heads)

    def exchanged_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the bytes that ranks sharing a sequence exchange.

        They gather keys, or exchange q, k and the output (if not causal, two outputs).
        """
        e = training.element * self.hidden / training.tensor_parallel
        return Crossing(keys=e) if kinds.gathers else Crossing((3 + (not self.causal)) * e)
