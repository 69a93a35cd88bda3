"""Sizes of standard attention, grouped-query where asked. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fem_megatron.shapes.base import Shape, Weight, Weights, keys_seen

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig


@dataclass(frozen=True)
class AttentionShape(Shape):
    """D -> H heads of queries over ``groups`` heads of keys and values -> D."""

    hidden: int
    heads: int
    groups: int
    head: int
    rope: bool
    rope_base: float
    norm_eps: float

    @classmethod
    def of(cls, model: ModelConfig) -> AttentionShape:
        """The sizes that ``model`` asks for. Raises ValueError where heads, groups or RoPE's pairs do not fit."""
        heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
        if model.hidden_size % heads:
            raise ValueError(f"model.num_attention_heads={heads} does not divide the mixer's query/key width {model.hidden_size}")
        if model.rope and model.hidden_size // heads % 2:
            raise ValueError(
                f"model.rope turns pairs of channels, but a head has {model.hidden_size // heads}; change model.num_attention_heads"
            )
        if heads % groups:
            raise ValueError(f"model.num_query_groups={groups} does not divide model.num_attention_heads={heads}")
        return cls(model.hidden_size, heads, groups, model.hidden_size // heads, model.rope, model.rope_base, model.norm_eps)

    @property
    def group_width(self) -> int:
        """Rows that a group owns in the packed projection: its queries, its key, its value."""
        return (self.heads // self.groups + 2) * self.head

    def weights(self) -> Weights:
        """norm, in_proj (group-major: the group's queries, k, v), out_proj."""
        return {
            "norm.weight": Weight((self.hidden,), init=1.0, per_token=True),
            "in_proj.weight": Weight((self.groups * self.group_width, self.hidden), split=0),
            "out_proj.weight": Weight((self.hidden, self.heads * self.head), split=1),
        }

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Projections, scores and reads."""
        attention = 4.0 * keys_seen(length, whole_square) * self.heads * self.head
        return {"mixer projections": self.linear_flops(), "attention": attention}

    def state_bytes(self, length: int, element: int) -> int:
        """Keys and values of the groups."""
        return 2 * length * self.groups * self.head * element

    def split_widths(self) -> dict[str, int]:
        return {"model.num_attention_heads": self.heads, "model.num_query_groups": self.groups}

    def rotary_size(self) -> int:
        return self.head if self.rope else 0

    def summary(self) -> str:
        return f"d_k {self.head}, d_v {self.head}" + (f", {self.groups} groups" if self.groups < self.heads else "")
