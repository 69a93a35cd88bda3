"""Shape of a flash-linear-attention layer: the properties available without the package.

The module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fem_common.settings import setting
from fem_megatron.shape import Shape, Weight, Weights

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig


@dataclass(frozen=True)
class FlaConfig:
    """Arguments of flash-linear-attention's layers.

    They are read only if ``model.mixer`` is fla.<LayerName>.
    """

    options: dict[str, Any] = setting(
        dict,
        "Arguments of the layer's class in addition to hidden_size, num_heads and layer_idx, "
        "e.g. {expand_v: 1}.",
    )


@dataclass(frozen=True)
class FlaShape(Shape):
    """Shape of the layer ``fla.layers.<name>``.

    Its parameters and FLOPs depend on the package and are not available (``external`` is True).
    """

    layer_class = "fem_megatron.mixers.fla.layer:FlaLayer"
    external = True

    name: str
    hidden: int
    heads: int
    layer: int
    options: tuple[tuple[str, Any], ...]
    norm_eps: float

    @classmethod
    def of(cls, model: ModelConfig, layer: int, *, name: str) -> FlaShape:
        """Return the shape for the configuration ``model``.

        Raises ValueError if the name is invalid, the model is not causal, or an option is set by
        the model.
        """
        if not name.isidentifier():
            raise ValueError(
                f"model.mixer=fla.{name}: write a class of fla.layers, e.g. "
                "fla.GatedLinearAttention"
            )
        if not model.causal:
            raise ValueError(
                "model.causal: flash-linear-attention's layers read from left to right only; use "
                "another mixer, or set true"
            )
        for key in ("hidden_size", "num_heads", "layer_idx"):
            if key in model.fla.options:
                raise ValueError(f"model.fla.options.{key} is set by the model; leave it out")
        return cls(
            name,
            model.hidden_size,
            model.num_attention_heads,
            layer,
            tuple(model.fla.options.items()),
            model.norm_eps,
        )

    def weights(self) -> Weights:
        """Return the norm; the layer's own weights (``layer.*``) are unknown until it is built."""
        return {"norm.weight": Weight((self.hidden,), init=1.0, per_token=True)}

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return an empty dictionary: the FLOPs are unknown."""
        return {}

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of all tokens' normalised inputs.

        Decoding reads them again at every step.
        """
        return length * self.hidden * element

    def reads(self) -> set[str]:
        return {"fla"}

    def split_widths(self) -> dict[str, int]:
        return {"flash-linear-attention's layers, which are not split": 1}

    def summary(self) -> str:
        return f"fla.{self.name}, its parameters and FLOPs not counted"
