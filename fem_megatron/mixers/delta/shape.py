"""Shape of DeltaNet (arXiv 2406.06484) and Gated DeltaNet (arXiv 2412.06464), without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fem_common.settings import setting
from fem_megatron.context_parallel.shape import Crossing, SplitKinds
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
)

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig

CHUNK = 64  # tokens per chunk of the delta rule


@dataclass(frozen=True)
class DeltaConfig:
    """Sizes of the delta-rule mixers; read if ``model.mixer`` is deltanet or gated_deltanet."""

    heads: int | None = setting(None, "Heads; null: model.num_attention_heads.", least=1)
    key_size: int | None = setting(
        None,
        "Width of queries and of keys over all heads; null: hidden_size (deltanet) or half of it "
        "(gated), which gives 4 hidden_size^2 parameters.",
        least=1,
    )
    value_size: int | None = setting(
        None,
        "Width of the values over all heads; null: key_size (deltanet) or twice that (gated).",
        least=1,
    )
    conv_size: int = setting(4, "Taps of the short causal convolution.", least=1)
    negative_eigenvalues: bool = setting(
        False,
        "beta in (0, 2) instead of (0, 1): transitions may flip a direction (arXiv 2411.12537).",
    )


@dataclass(frozen=True)
class DeltaShape(Shape):
    """Shape of the delta rule: S_t = e^g (I - beta k k^T) S_(t-1) + beta k v^T.

    Without ``gated``, g = 0 and the layer has no output gate. DeltaNet's widths are its paper's, q
    = k = v = o = D. Gated DeltaNet's paper has keys of 3/4 D and values of 3/2 D, 6 D^2 parameters.
    The default keeps this ratio at 4 D^2 (keys D/2, values D); key_size = 3/4 D gives the paper's
    widths.
    """

    layer_class = "fem_megatron.mixers.delta.layer:DeltaNet"
    kept = Kept(101.0, 78.0, 32.4, 30.4)
    sliced = True

    hidden: int
    heads: int
    key_head: int
    value_head: int
    conv: int
    gated: bool
    negative_eigenvalues: bool
    norm_eps: float

    @classmethod
    def of(cls, model: ModelConfig, layer: int, *, gated: bool) -> DeltaShape:
        """Return the shape for ``model``, equal in all layers.

        Raises ValueError if heads do not fit or the model is not causal.
        """
        delta, hidden = model.delta, model.hidden_size
        heads = delta.heads or model.num_attention_heads
        if not model.causal:
            raise ValueError(
                "model.causal: the delta rule reads from left to right only; use another mixer, "
                "or set true"
            )
        key = delta.key_size or (hidden // 2 if gated else hidden)
        value = delta.value_size or (2 * key if gated else key)
        for name, width in (("key_size", key), ("value_size", value)):
            if width % heads:
                raise ValueError(
                    f"model.delta.{name}={width} is not a multiple of the {heads} heads; change "
                    "it, or model.delta.heads"
                )
        return cls(
            hidden,
            heads,
            key // heads,
            value // heads,
            delta.conv_size,
            gated,
            delta.negative_eigenvalues,
            model.norm_eps,
        )

    @property
    def slices(self) -> dict[str, int]:
        """Rows of one head in the packed projection: slice name -> number of rows, in order."""
        gate = {"gate": self.value_head} if self.gated else {}
        return {"q": self.key_head, "k": self.key_head, "v": self.value_head, **gate}

    @property
    def mixed_width(self) -> int:
        """Channels of a head that the convolution mixes: q, k, v."""
        return 2 * self.key_head + self.value_head

    @property
    def head_width(self) -> int:
        """Rows of a head in the packed projection: q, k, v and the output gate."""
        return self.mixed_width + self.value_head * self.gated

    def weights(self) -> Weights:
        """Return name -> weight.

        The names are norm, in_proj and rates (both head-major), conv, the offsets of decay rate and
        step size (if gated), head_norm and out_proj. rates has one row
        per head for beta and, if gated, one for the step.
        """
        weights = {
            "norm.weight": Weight((self.hidden,), init=1.0, per_token=True),
            "in_proj.weight": Weight(
                (self.heads * self.head_width, self.hidden),
                split=0,
                maps=tuple(self.slices.values()),
            ),
            "rates.weight": Weight(
                (self.heads * (1 + self.gated), self.hidden), split=0, maps=None
            ),
            "conv": Weight(
                (self.heads * self.mixed_width, self.conv),
                split=0,
                init=conv_init(self.conv),
                mup=FIXED,
                maps=None,
            ),
        }
        if self.gated:
            weights |= {
                name: Weight((self.heads,), split=0, init=0.0) for name in ("log_rate", "step_bias")
            }
        return weights | {
            "head_norm.weight": Weight((self.value_head,), init=1.0),
            "out_proj.weight": Weight((self.hidden, self.heads * self.value_head), split=1),
        }

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs of one token's forward pass by part.

        The delta rule is counted in its chunked form: scores, the triangular solve, three products
        with the state, and the read within the chunk.
        """
        seen, (dk, dv) = (
            keys_seen(min(length, CHUNK), whole_square),
            (self.key_head, self.value_head),
        )
        return {
            "mixer projections": self.linear_flops(),
            "delta rule": self.heads * (2.0 * seen * (2 * dk + dv) + 6.0 * dk * dv),
            "solves": float(self.heads * (min(length, CHUNK) - 1) * (dk + dv)),
        }

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of one sequence's decoding state.

        The state consists of every head's matrix (fp32) and the last inputs of the convolution.
        """
        matrix = self.key_head * self.value_head * max(4, element)
        return self.heads * (matrix + (self.conv - 1) * self.mixed_width * element)

    def reads(self) -> set[str]:
        return {"delta"}

    def counts_padding(self) -> bool:
        return self.conv > 1

    def split_widths(self) -> dict[str, int]:
        return {"the delta rule's heads, model.delta.heads": self.heads}

    def exchanged_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the bytes that ranks sharing a sequence exchange.

        If ``kinds.states`` is set, the convolution passes a chunk's last tokens. Otherwise it
        exchanges its input and output. The delta rule always exchanges q, k, v, the rates in fp32,
        and the output.
        """
        e, mixed, heads = training.element, self.mixed_width, self.heads / training.tensor_parallel
        head = e * (mixed + self.value_head) + training.wide * (1 + self.gated)
        if kinds.states:
            return Crossing(
                heads * head, states=heads * training.tokens_before(self.conv - 1) * e * mixed
            )
        return Crossing(heads * (head + 2 * e * mixed))

    def packing(self) -> dict[str, Packing]:
        return {"in_proj.weight": Packing(self.heads, self.slices)}

    def summary(self) -> str:
        return f"d_k {self.key_head}, d_v {self.value_head}"


def conv_init(taps: int) -> Normal:
    """Return the initial distribution of a convolution's filter with ``taps`` taps.

    It has the same variance as torch's initialisation, uniform in +-1 / sqrt(taps).
    """
    return Normal((3 * taps) ** -0.5)
