"""Shapes of second-order attention (MHA2nd1st, MHA2nd) and energy-based linear attention.

A shape gives a mixer's weights, FLOPs and memory without torch. The equations are in `layer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fem_common.settings import setting
from fem_megatron.context_parallel.shape import Crossing, SplitKinds, SplitWidths
from fem_megatron.rope import Rope
from fem_megatron.shape import (
    WIDE,
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

LINEAR_CHUNK = 64  # tokens per chunk of linear attention; earlier tokens are summed
# Largest number of elements of the d_h x d_h systems that MHA2nd solves at a time on a GPU.
BLOCK = 2**26


@dataclass(frozen=True)
class SecondOrderConfig:
    """Configuration keys of second-order attention and energy-based linear attention.

    They are read only if ``model.mixer`` is mha2nd1st, mha2nd or energy_linear.
    """

    exact_max_length: int = setting(
        512,
        "mha2nd: longest sequence; the mixer stores and solves a d x d system for every token "
        "and head.",
        least=1,
    )
    jitter: float = setting(
        1e-6,
        "Fraction of the mean diagonal of G = W_Q W_Q^T that is added to its diagonal before the "
        "Cholesky factorisation; 0: none.",
        least=0,
    )
    temperature: str = setting(
        "raw",
        "Learned quantity. raw: T and T', as in the paper (a head gives NaN if one of them falls "
        "to 0); log: their logarithms.",
        ("raw", "log"),
    )
    linear_read: str = setting(
        "sum",
        "energy_linear: sum over the tokens seen, as in the paper, or their mean, whose size "
        "does not grow with the length.",
        ("sum", "mean"),
    )


@dataclass(frozen=True)
class _Heads(Shape):
    """Base of both shapes: projections D -> H heads of q and k, and back to D.

    Keys are also the values, so the layer has three instead of four D x D matrices.
    """

    sliced = True

    hidden: int
    heads: int
    rope: Rope | None
    norm_eps: float
    causal: bool
    switches: SecondOrderConfig

    @property
    def head(self) -> int:
        """d_h: channels of a head."""
        return self.hidden // self.heads

    def weights(self) -> Weights:
        """Return the norm, in_proj (for each head W_Q, then W_K) and out_proj."""
        return {
            "norm.weight": Weight((self.hidden,), init=1.0, per_token=True),
            "in_proj.weight": Weight(
                (2 * self.hidden, self.hidden), split=0, bare=True, maps=(self.head,)
            ),
            "out_proj.weight": Weight((self.hidden, self.hidden), split=1),
        }

    def packing(self) -> dict[str, Packing]:
        """Return the rows of in_proj that a Transformer's W_Q and W_K can initialise.

        out_proj cannot be copied from a Transformer, because it is applied to keys instead of
        values.
        """
        return {
            "in_proj.weight": Packing(
                self.heads, dict.fromkeys("qk", self.head), {"q": "q", "k": "k"}
            )
        }

    def split_widths(self) -> dict[str, int]:
        return {"model.num_attention_heads": self.heads}

    def rotary_size(self) -> int:
        return self.head if self.rope else 0


def _sizes(model: ModelConfig) -> tuple[int, int, Rope | None, float, bool, SecondOrderConfig]:
    heads = model.hidden_size // head_width(model)
    return (
        model.hidden_size,
        heads,
        Rope.rotation(model),
        model.norm_eps,
        model.causal,
        model.second_order,
    )


@dataclass(frozen=True)
class SecondOrderShape(_Heads):
    """Shape of MHA2nd1st and MHA2nd: a Newton step on the free energy of each head.

    exact: True for MHA2nd, which solves a linear system for every token; False for MHA2nd1st,
        which uses the first-order term of the inverse.
    sharpness: divisor of the temperatures T and T', the square of yarn's factor.
    """

    layer_class = "fem_megatron.mixers.second_order.layer:SecondOrderAttention"
    once = frozenset({"gram"})
    kept = Kept(35.0, 34.0, 28.0, 10.5)

    exact: bool = False
    sharpness: float = 1.0

    @classmethod
    def of(cls, model: ModelConfig, *, exact: bool) -> SecondOrderShape:
        """Return the shape of a configuration. Raise ValueError if heads do not divide D."""
        return cls(*_sizes(model), exact=exact, sharpness=model.rope_scaling.attention() ** 2)

    def weights(self) -> Weights:
        """Return the weights of `_Heads`, and two temperatures of each head.

        ``temperature`` is T of the softmax, ``newton_temperature`` is T' of the Newton step; the
        parameters are their logarithms if second_order.temperature is "log". Both temperatures
        start at d_h.
        """
        start = math.log(self.head) if self.switches.temperature == "log" else float(self.head)
        names = ("temperature", "newton_temperature")
        return super().weights() | {
            name: Weight((self.heads,), split=0, init=start) for name in names
        }

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs of one token's forward pass by part.

        "gram" is the product u = G r, plus G = W_Q W_Q^T, which is computed once per sequence and
        divided by its tokens. "solves" contains triangular solves, and for MHA2nd a d_h x d_h
        system per token and head; torch's FLOP counter does not count them.
        """
        seen, d = keys_seen(length, whole_square or not self.causal), self.head
        products = 2.0 * seen * self.hidden * (2 + d if self.exact else 4)
        gram = 2.0 * self.hidden * d + 2.0 * self.hidden * self.hidden * d / length
        solves = 2.0 * self.hidden * d + (
            self.hidden * (2.0 / 3.0 * d * d + 2.0 * d) if self.exact else 0.0
        )
        return {
            "mixer projections": self.linear_flops(),
            "attention": products,
            "gram": gram,
            "solves": solves,
        }

    def uncapturable(self) -> str | None:
        """Return why CUDA graphs cannot capture this mixer.

        Its solvers may allocate memory and wait: torch selects cuSOLVER or MAGMA by the systems'
        size.
        """
        return "its systems are solved by a library that may wait for the device"

    def reads(self) -> set[str]:
        names = {"jitter", "temperature"} | ({"exact_max_length"} if self.exact else set())
        return {f"second_order.{name}" for name in names}

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of the cached keys: half of standard attention's cache."""
        return length * self.hidden * element

    def cut_widths(self) -> SplitWidths:
        return SplitWidths(keyed=self.split_widths())

    def exchanged_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the bytes that ranks sharing a sequence exchange.

        If keys are gathered, these are the keys. Otherwise ranks exchange q, k, the output and
        RoPE's angles; the angles are sent once per micro-batch.
        """
        e, tensor = training.element * self.hidden, training.tensor_parallel
        turn = training.wide * self.head / training.micro_batch if self.rope else 0.0
        return Crossing(keys=e / tensor) if kinds.gathers else Crossing(3 * e / tensor, angles=turn)

    def workspace_bytes(self, training: Training) -> float:
        """Return the peak of temporary bytes in the backward pass of MHA2nd; 0 for MHA2nd1st.

        It consists of a d_h x d_h matrix k k^T for every token and head and, on a GPU, six times
        the systems that are solved at a time (at most `BLOCK` elements). On a CPU the systems are
        small enough to neglect.
        """
        tokens = training.micro_batch * training.length / training.ranks
        numbers = tokens * self.hidden * self.head / training.tensor_parallel
        return WIDE * (numbers + 6 * min(numbers, BLOCK) * training.cuda) * self.exact

    def max_length(self) -> int | None:
        """Return the longest sequence of mha2nd; None for mha2nd1st, which has no limit."""
        return self.switches.exact_max_length if self.exact else None

    def summary(self) -> str:
        """Describe the heads and the kind of Newton step."""
        return (
            f"{self.heads} heads of {self.head}, {'exact' if self.exact else 'first-order'} "
            "Newton step"
        )


@dataclass(frozen=True)
class EnergyLinearShape(_Heads):
    """Shape of energy-based linear attention: linear attention whose values are its keys.

    Each head takes a gradient step on F = -1/2 sum_i (q.k_i)^2.
    """

    layer_class = "fem_megatron.mixers.second_order.layer:EnergyLinearAttention"
    kept = Kept(32.0, 28.0, 32.2, 12.3)

    @classmethod
    def of(cls, model: ModelConfig) -> EnergyLinearShape:
        """Return the shape of a configuration. Raise ValueError if heads do not divide D."""
        return cls(*_sizes(model))

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs of one token's forward pass by part.

        "attention" consists of the products with the keys of the token's own chunk (causal models
        only), and of updating and reading the sum of k k^T.
        """
        inside = 4.0 * keys_seen(min(length, LINEAR_CHUNK), whole_square) if self.causal else 0.0
        return {
            "mixer projections": self.linear_flops(),
            "attention": self.hidden * (inside + 4.0 * self.head),
        }

    def exchanged_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the bytes that ranks sharing a sequence exchange.

        These are the sums of k k^T if the ranks pass states (causal models only), otherwise q, k
        and the output in fp32.
        """
        own = training.wide * self.hidden / training.tensor_parallel
        return (
            Crossing(states=own * self.head) if kinds.states and self.causal else Crossing(3 * own)
        )

    def reads(self) -> set[str]:
        return {"second_order.linear_read"}

    def cut_widths(self) -> SplitWidths:
        return (
            SplitWidths(scanned=self.split_widths())
            if self.causal
            else SplitWidths(always=self.split_widths())
        )

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of the sums of k k^T, d_h x d_h per head, for any length."""
        return self.hidden * self.head * max(4, element)

    def summary(self) -> str:
        """Describe the heads and the size of their state."""
        return f"{self.heads} heads of {self.head}, state {self.head} x {self.head}"
