"""The rule from a width, or from a number of parameters, to a model's whole shape. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fem_common.errors import ConfigError
from fem_megatron.config import ModelConfig
from pretrain.plan import count_by_component

from .study import ShapeRule, Size

WIDEST = 1 << 17
OUTSIDE = ("embedding", "output layer")


@dataclass(frozen=True)
class Sizes:
    """Width, layers, heads and the MLP's inner width of a model."""

    width: int
    layers: int
    heads: int
    ffn: int

    @property
    def words(self) -> tuple[str, ...]:
        """As settings of a run."""
        return (
            f"model.hidden_size={self.width}",
            f"model.num_layers={self.layers}",
            f"model.num_attention_heads={self.heads}",
            f"model.ffn_hidden_size={self.ffn}",
        )

    def of(self, model: ModelConfig) -> ModelConfig:
        """The model at these sizes."""
        return replace(model, hidden_size=self.width, num_layers=self.layers, num_attention_heads=self.heads, ffn_hidden_size=self.ffn)


def rule_words(shape: ShapeRule) -> str:
    """The rule in words."""
    return (
        f"layers = max({shape.min_layers}, round(width / {shape.aspect_ratio:g})), heads = width / {shape.head_size}, "
        f"MLP = {shape.ffn_ratio:.4g} x width, up to a multiple of {shape.ffn_multiple}"
    )


def shaped(shape: ShapeRule, width: int, size: Size | None = None) -> Sizes:
    """The shape of a width by the rule, but for what ``size`` states itself.

    Raises:
        ConfigError: the rule's heads do not divide the width.
    """
    size = size or Size()
    if size.heads is None and width % shape.head_size:
        near = max(1, round(width / shape.head_size)) * shape.head_size
        raise ConfigError(f"width {width} is no multiple of shape.head_size = {shape.head_size}; the nearest: {near}")
    return Sizes(
        width=width,
        layers=size.layers or max(shape.min_layers, math.floor(width / shape.aspect_ratio + 0.5)),
        heads=size.heads or width // shape.head_size,
        ffn=size.ffn or math.ceil(round(width * shape.ffn_ratio, 6) / shape.ffn_multiple) * shape.ffn_multiple,
    )


def total_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, tied weights once."""
    return sum(count_by_component(model).values())


def non_embedding_parameters(model: ModelConfig) -> int:
    """Parameters without the embedding and the output layer."""
    return sum(count for name, count in count_by_component(model).items() if name not in OUTSIDE)


def nearest_sizes(
    shape: ShapeRule, model: ModelConfig, target: float, count: Callable[[ModelConfig], int] = non_embedding_parameters
) -> Sizes:
    """The rule's shape whose parameters are nearest to ``target``, by their ratio.

    Raises:
        ConfigError: no width of the rule reaches the target.
    """
    best: tuple[float, Sizes] | None = None
    low, high = 1, WIDEST // shape.head_size

    def parameters(heads: int) -> tuple[int, Sizes]:
        sizes = shaped(shape, heads * shape.head_size)
        return count(sizes.of(model)), sizes

    while low < high:  # the narrowest that has at least the target: parameters grow with the width
        middle = (low + high) // 2
        low, high = (low, middle) if parameters(middle)[0] >= target else (middle + 1, high)
    for heads in (low - 1, low):
        if heads < 1:
            continue
        found, sizes = parameters(heads)
        distance = abs(math.log(found / target))
        if best is None or distance < best[0]:
            best = distance, sizes
    if best is None or (low * shape.head_size >= WIDEST and best[0] > 1):
        raise ConfigError(f"no width up to {WIDEST} has {target:g} parameters by the shape rule")
    return best[1]
