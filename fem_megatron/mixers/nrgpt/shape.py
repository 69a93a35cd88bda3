"""Shape of NRGPT: configuration keys, weights and costs. The module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fem_common.settings import setting
from fem_megatron.context_parallel.shape import Crossing, SplitKinds, SplitWidths
from fem_megatron.mup import width_ratio
from fem_megatron.rope import Rope
from fem_megatron.shape import Shape, Training, Weight, Weights, keys_seen

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig


@dataclass(frozen=True)
class NrgptConfig:
    """Switches and sizes of NRGPT; read only if ``model.mixer`` is nrgpt.

    The number of steps of a block is ``model.recurrence``.
    """

    feed_forward: str = setting(
        "ff2w",
        "The feed-forward's energy. ff2w: -g . (W2 gelu(W1 g + b1) + b2); ff1: -|gelu(W1 g + "
        "b1)|^2; ff2: -|gelu(W2 gelu(W1 g + b1) + b2)|^2.",
        ("ff2w", "ff1", "ff2"),
    )
    multiplier: int = setting(4, "Inner width of the feed-forward divided by hidden_size.", least=1)


@dataclass(frozen=True)
class NrgptShape(Shape):
    """Shape of one step of NRGPT. A head's keys and values are as wide as the stream."""

    layer_class = "fem_megatron.mixers.nrgpt.layer:Nrgpt"

    hidden: int
    heads: int
    inner: int
    norm_eps: float
    rope: Rope | None
    causal: bool
    switches: NrgptConfig
    scale: float = 1.0  # factor on the scores

    @classmethod
    def of(cls, model: ModelConfig) -> NrgptShape:
        """Return the shape for the configuration ``model``.

        Under muP the scores have the factor 1 / m: they are products over the model's width. The
        number of heads, whose steps are summed, should not change with the width.
        """
        return cls(
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            inner=model.nrgpt.multiplier * model.hidden_size,
            norm_eps=model.norm_eps,
            rope=Rope.of(model),
            causal=model.causal,
            switches=model.nrgpt,
            scale=1.0 / width_ratio(model) if model.parametrization == "mup" else 1.0,
        )

    def weights(self) -> Weights:
        """Return name -> weight.

        norm.bias; interaction.weight, the matrices H_h of all heads; up and down, W1, b1 and W2,
        b2 of the feed-forward; scale, its factor c; rate.weight, the inference rate.
        """
        hidden, inner, kind = self.hidden, self.inner, self.switches.feed_forward
        weights = {
            "norm.bias": Weight((hidden,), init=0.0, per_token=True),
            "interaction.weight": Weight((self.heads * hidden, hidden), split=0, maps=(hidden,)),
            "rate.weight": Weight((hidden, hidden), per_token=True),
            "scale": Weight((1,), init=1.0),
        }
        if kind == "ff2":
            return weights | {
                "up.weight": Weight((hidden, hidden), bare=True),
                "up.bias": Weight((hidden,), init=0.0),
                "down.weight": Weight((inner, hidden), split=0, bare=True),
                "down.bias": Weight((inner,), split=0, init=0.0),
            }
        weights |= {
            "up.weight": Weight((inner, hidden), split=0, bare=True),
            "up.bias": Weight((inner,), split=0, init=0.0),
        }
        if kind == "ff2w":
            weights |= {
                "down.weight": Weight((hidden, inner), split=1, bare=True),
                "down.bias": Weight((hidden,), init=0.0),
            }
        return weights

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs by part. Each matrix of the feed-forward is applied in both directions.

        The projections are the heads' keys and the inference rate.
        """
        hidden, keys = self.hidden, keys_seen(length, whole_square or not self.causal)
        maps = {"ff1": self.inner, "ff2w": 2 * self.inner, "ff2": self.inner + hidden}
        return {
            "mixer projections": 2.0 * hidden**2 * (self.heads + 1),
            "attention": 4.0 * self.heads * hidden * keys,
            "MLP": 4.0 * hidden * maps[self.switches.feed_forward],
        }

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of one sequence's decoding state: every head's key, also its value."""
        return length * self.heads * self.hidden * element

    def activation_bytes(self, training: Training) -> dict[str, float]:
        """Return the estimated bytes per token that autograd keeps.

        They include each head's query, key and output, and the inner channels.
        """
        inner = 3 * self.heads * self.hidden + 4 * self.inner
        return training.estimate(self.hidden, self.kept, training.element * inner)

    def summary(self) -> str:
        return f"{self.heads} heads of {self.hidden}, feed-forward {self.inner}"

    def reads(self) -> set[str]:
        return {"nrgpt"}

    def rotary_size(self) -> int:
        """Return the width of a head with ``model.rope``, else 0."""
        return self.hidden if self.rope else 0

    def split_widths(self) -> dict[str, int]:
        """Return the widths that tensor-parallel ranks split: heads and feed-forward width."""
        return {
            "model.num_attention_heads": self.heads,
            "the feed-forward's width, model.nrgpt.multiplier * hidden_size": self.inner,
        }

    def cut_widths(self) -> SplitWidths:
        return SplitWidths(keyed={"model.num_attention_heads": self.heads})

    def exchanged_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the bytes that ranks sharing a sequence exchange.

        They gather keys, or exchange q, k and the output.
        """
        e = training.element * self.heads * self.hidden / training.tensor_parallel
        return Crossing(keys=e) if kinds.gathers else Crossing(3 * e)
