"""Shape of standard attention: configuration keys, weights and costs, without torch.

It supports grouped queries, biases and a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fem_common.settings import setting
from fem_megatron.context_parallel.shape import Crossing, SplitKinds, SplitWidths
from fem_megatron.mup import score_scale
from fem_megatron.rope import Rope
from fem_megatron.shape import (
    WIDE,
    Shape,
    Training,
    Weight,
    Weights,
    head_width,
    keys_seen,
    qk_norms,
    qk_norms_keep,
)

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig


@dataclass(frozen=True)
class AttentionConfig:
    """Configuration keys of standard attention (transformer and yuriiformer).

    They cover the variants in the open models of Llama's family.
    """

    head_dim: int | None = setting(
        None, "Width of a head; null: hidden_size / num_attention_heads.", least=1
    )
    qkv_bias: bool = setting(
        False, "Biases on the projections to queries, keys and values (Qwen2)."
    )
    sliding_window: int | None = setting(
        None,
        "Number of tokens that a token sees, itself and those before it (Mistral); null: all.",
        least=1,
    )


@dataclass(frozen=True)
class AttentionShape(Shape):
    """Shape of standard attention: D -> H query heads over ``groups`` key and value heads -> D."""

    layer_class = "fem_megatron.mixers.attention.layer:Attention"

    hidden: int
    heads: int
    groups: int
    head: int
    rope: Rope | None
    norm_eps: float
    bias: bool = False
    window: int | None = None
    scale: float | None = None  # factor on the scores; None: 1 / sqrt(head)
    qk_norm: bool = False

    @classmethod
    def of(cls, model: ModelConfig) -> AttentionShape:
        """Return the shape for the configuration ``model``.

        Raises ValueError if heads do not divide hidden_size or groups do not divide heads, or for a
        window in a model that is not causal.
        """
        heads = model.num_attention_heads
        groups = model.num_query_groups or model.num_attention_heads
        switches = model.attention
        head = switches.head_dim or head_width(model)
        if heads % groups:
            raise ValueError(
                f"model.num_query_groups={groups} does not divide model.num_attention_heads={heads}"
            )
        if switches.sliding_window is not None and not model.causal:
            raise ValueError(
                "model.attention.sliding_window limits earlier tokens, but with "
                "model.causal=false a token sees all; set it to null"
            )
        sizes = (model.hidden_size, heads, groups, head, Rope.of(model), model.norm_eps)
        return cls(
            *sizes,
            switches.qkv_bias,
            switches.sliding_window,
            score_scale(model, head),
            model.qk_norm,
        )

    @property
    def group_width(self) -> int:
        """Rows of a group in the packed projection: its queries, its key, its value."""
        return (self.heads // self.groups + 2) * self.head

    def weights(self) -> Weights:
        """Return name -> weight.

        The names are norm, in_proj (group-major: a group's queries, k, v), its bias and the norms
        of q and k if configured, and out_proj.
        """
        rows = self.groups * self.group_width
        return {
            "norm.weight": Weight((self.hidden,), init=1.0, per_token=True),
            "in_proj.weight": Weight((rows, self.hidden), split=0, maps=(self.head,)),
            **({"in_proj.bias": Weight((rows,), split=0, init=0.0)} if self.bias else {}),
            **qk_norms(self.head, self.qk_norm),
            "out_proj.weight": Weight((self.hidden, self.heads * self.head), split=1),
        }

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs of one token's forward pass: projections, and attention."""
        attention = 4.0 * self.keys_seen(length, whole_square) * self.heads * self.head
        return {"mixer projections": self.linear_flops(), "attention": attention}

    def keys_seen(self, length: int, whole_square: bool) -> float:
        """Return the average number of keys that a token sees.

        whole_square: also count masked keys whose scores are computed.
        """
        window = self.window
        if window is None or length <= window:
            return keys_seen(length, whole_square)
        if not whole_square:
            return window * (length - (window - 1) / 2) / length
        block, blocks = window_blocks(length - window, window)
        return (window * window + blocks * block * (block + window)) / length

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of the cached keys and values of all groups.

        With a window, only the tokens that the next token can see are cached.
        """
        kept = length if self.window is None else min(length, self.window - 1)
        return 2 * kept * self.groups * self.head * element

    def counts_padding(self) -> bool:
        return self.window is not None

    def split_widths(self) -> dict[str, int]:
        return {"model.num_attention_heads": self.heads, "model.num_query_groups": self.groups}

    def cut_widths(self) -> SplitWidths:
        heads, groups = ({name: width} for name, width in self.split_widths().items())
        return SplitWidths(keyed=heads, shared=groups, rings=self.window is None)

    def exchanged_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the bytes that ranks sharing a sequence send.

        If keys are gathered or pass around a ring, ranks send keys and values. Otherwise they
        exchange queries, the output, and keys and values, which are repeated to at least one head
        per rank.
        """
        e, tensor = training.element * self.head, training.tensor_parallel
        if kinds.ring:
            return Crossing(ring=2 * self.groups * self.head / tensor)
        if kinds.gathers:
            return Crossing(keys=e * 2 * self.groups / tensor)
        return Crossing(
            e * (2 * self.heads / tensor + 2 * max(self.groups // tensor, training.ranks))
        )

    def reads(self) -> set[str]:
        return {"num_query_groups", "attention", "qk_norm"}

    def rotary_size(self) -> int:
        return self.head if self.rope else 0

    @property
    def splits_at_once(self) -> bool:
        """True if one operation splits the projection into q, k and v and rotates q and k."""
        return self.rope is not None and self.groups == self.heads and not self.qk_norm

    def product_scores(self) -> bool:
        return True

    def activation_bytes(self, training: Training) -> dict[str, float]:
        """Return the exact bytes per token that autograd keeps, by term.

        k is kept after rotation. v is kept alone where one operation splits and rotates
        (``splits_at_once``), else as a view of the packed projection. With a window, the blocks of
        keys and values are copied for every query head of a group.
        """
        e, t, length = training.element, training.tensor_parallel, training.length
        query, keys = self.heads * self.head / t, self.groups * self.head / t
        blockwise, read = 0.0, query
        if self.window is not None and self.window < length:
            block, blocks = window_blocks(length - self.window, self.window)
            near, far = self.window / length, block * blocks / length
            # copies: each block's q, its window's k and v
            blockwise = far * query + 2 * query * blocks * (block + self.window) / length
            read = (near + far) * query
        normed = (
            {"qk_norm": qk_norms_keep(training, self.head, self.heads + self.groups) / t}
            if self.qk_norm
            else {}
        )
        packed = e * (keys if self.splits_at_once else self.groups * self.group_width / t)
        angles = (WIDE if self.splits_at_once else e) * self.head / training.micro_batch
        # q is copied
        if self.qk_norm and self.groups < self.heads and (e == WIDE or training.cuda):
            normed["qk_norm"] += e * query
        if training.again:
            return normed | {
                "projection": self.hidden * (training.operand if self.bias else training.entered),
                "rope": angles if self.rope else 0.0,
                "attention": e * (query + keys),
                "packed": packed,
                "out_proj": training.operand * query,
            }
        return normed | {
            "projection": self.hidden * (training.operand if self.bias else training.entered),
            "rope": angles if self.rope else 0.0,
            "attention": e * (query + read + keys + blockwise) + WIDE * self.heads / t,
            "packed": packed,
            "out_proj": training.operand * query
            if training.operand < (e if training.cuda else WIDE) or blockwise
            else 0.0,
        }

    def summary(self) -> str:
        groups = f", {self.groups} groups" if self.groups < self.heads else ""
        return f"d_k {self.head}, d_v {self.head}{groups}" + (
            f", window {self.window}" if self.window else ""
        )


def window_blocks(queries: int, window: int) -> tuple[int, int]:
    """Return (queries per block, blocks) of queries that each see a full window.

    The products of a block cover window + block keys.
    """
    block = min(window, queries)
    return block, -(-queries // block)
