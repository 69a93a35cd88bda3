"""Sizes of second-order attention (MHA2nd1st, MHA2nd) and energy-based linear attention.

See mathematics 3. Torch-free.
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
# Elements of the systems that the exact step solves at a time on a GPU.
BLOCK = 2**26


@dataclass(frozen=True)
class SecondOrderConfig:
    """Switches of second-order attention.

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
    """Common base of both shapes: D -> H heads of q and k -> D.

    Without values it has three quarters of standard attention's matrices.
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
        """Return norm, in_proj (head-major: a head's W_Q, then its W_K), out_proj."""
        return {
            "norm.weight": Weight((self.hidden,), init=1.0, per_token=True),
            "in_proj.weight": Weight(
                (2 * self.hidden, self.hidden), split=0, bare=True, maps=(self.head,)
            ),
            "out_proj.weight": Weight((self.hidden, self.hidden), split=1),
        }

    def packing(self) -> dict[str, Packing]:
        """Return the packing of q and k.

        Values are keys, so out_proj does not correspond to attention's.
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
    """A Newton step per head.

    exact: True for MHA2nd, a solve per token; False for MHA2nd1st, the inverse's
        first-order term.
    sharpness: divisor of T and T', the square of yarn's factor.
    """

    layer_class = "fem_megatron.mixers.second_order.layer:SecondOrderAttention"
    once = frozenset({"gram"})
    kept = Kept(35.0, 34.0, 31.2, 10.5)

    exact: bool = False
    sharpness: float = 1.0

    @classmethod
    def of(cls, model: ModelConfig, *, exact: bool) -> SecondOrderShape:
        """Return the shape for the configuration. Raise ValueError if heads do not fit."""
        return cls(*_sizes(model), exact=exact, sharpness=model.rope_scaling.attention() ** 2)

    def weights(self) -> Weights:
        """Return the weights of `_Heads`, and each head's T and T'.

        T is the temperature of the weights, T' that of the Newton step. These are temperatures or
        their logarithms; both temperatures start at d_h.
        """
        start = math.log(self.head) if self.switches.temperature == "log" else float(self.head)
        names = ("temperature", "newton_temperature")
        return super().weights() | {
            name: Weight((self.heads,), split=0, init=start) for name in names
        }

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs by part.

        "gram": u = G r, and G per sequence, divided by its tokens. "solves": triangular, and d_h x
        d_h if exact; torch's counter does not count them.
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
        """Return the reason: the solver libraries may allocate and wait.

        torch selects cuSOLVER or MAGMA by size.
        """
        return "its systems are solved by a library that may wait for the device"

    def reads(self) -> set[str]:
        names = {"jitter", "temperature"} | ({"exact_max_length"} if self.exact else set())
        return {f"second_order.{name}" for name in names}

    def state_bytes(self, length: int, element: int) -> int:
        """Return the bytes of the keys: half of standard attention's cache."""
        return length * self.hidden * element

    def cut_widths(self) -> SplitWidths:
        return SplitWidths(keyed=self.split_widths())

    def split_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the traffic of keys, or of q, k, the output and RoPE's angles.

        The angles are sent once per micro-batch.
        """
        e, tensor = training.element * self.hidden, training.tensor_parallel
        turn = training.wide * self.head / training.micro_batch if self.rope else 0.0
        return Crossing(keys=e / tensor) if kinds.gathers else Crossing(3 * e / tensor, angles=turn)

    def moment_bytes(self, training: Training) -> float:
        """Return the temporary bytes of mha2nd, 0 for mha2nd1st.

        They are k k^T of every token, and six times a block of queries' systems; on a CPU blocks
        are small.
        """
        tokens = training.micro_batch * training.length / training.ranks
        numbers = tokens * self.hidden * self.head / training.tensor_parallel
        return WIDE * (numbers + 6 * min(numbers, BLOCK) * training.cuda) * self.exact

    def max_length(self) -> int | None:
        """Return the longest sequence of mha2nd; None for mha2nd1st, which has no limit."""
        return self.switches.exact_max_length if self.exact else None

    def summary(self) -> str:
        """Return the heads and the kind of Newton step."""
        return (
            f"{self.heads} heads of {self.head}, {'exact' if self.exact else 'first-order'} "
            "Newton step"
        )


@dataclass(frozen=True)
class EnergyLinearShape(_Heads):
    """A gradient step per head on F = -1/2 sum_i (q.k_i)^2.

    This is linear attention whose values are its keys.
    """

    layer_class = "fem_megatron.mixers.second_order.layer:EnergyLinearAttention"
    kept = Kept(32.0, 28.0, 32.2, 12.3)

    @classmethod
    def of(cls, model: ModelConfig) -> EnergyLinearShape:
        """Return the shape for the configuration. Raise ValueError if heads do not fit."""
        return cls(*_sizes(model))

    def flops(self, length: int, *, whole_square: bool = False) -> dict[str, float]:
        """Return the FLOPs of projections, comparisons within a chunk, and sums.

        The sums are over earlier tokens.
        """
        inside = 4.0 * keys_seen(min(length, LINEAR_CHUNK), whole_square) if self.causal else 0.0
        return {
            "mixer projections": self.linear_flops(),
            "attention": self.hidden * (inside + 4.0 * self.head),
        }

    def split_bytes(self, training: Training, kinds: SplitKinds) -> Crossing:
        """Return the traffic of q, k and the output, in fp32; or of the sums of k k^T."""
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
        """Return the bytes of each head's d_h x d_h sum of k k^T, for any length."""
        return self.hidden * self.head * max(4, element)

    def summary(self) -> str:
        """Return the heads and the state's size."""
        return f"{self.heads} heads of {self.head}, state {self.head} x {self.head}"
