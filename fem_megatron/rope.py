"""RoPE's frequencies, and their scaling for texts longer than in training (docs/long_context.md).

The module does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from fem_common.settings import setting

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig

KINDS = {
    "linear": ("factor",),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "attention_factor"),
    "abf": ("factor",),
}
"""Kind -> the fields of `RopeScaling` that it reads."""

MOVED = {
    "attention.rope_scaling": "rope_scaling.kind",
    "attention.rope_factor": "rope_scaling.factor",
    "attention.rope_low_freq_factor": "rope_scaling.low_freq_factor",
    "attention.rope_high_freq_factor": "rope_scaling.high_freq_factor",
    "attention.rope_original_length": "rope_scaling.original_length",
}
"""Former keys of the model, which only the transformer had -> current keys."""


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of RoPE's frequencies for longer texts, for every mixer that uses RoPE."""

    kind: str | None = setting(
        None,
        "Rotary frequencies for longer texts. linear: all divided by factor; llama3, yarn: only "
        "the slow ones divided, with a smooth transition to the fast ones, yarn with sharper "
        "attention; abf: rope_base times factor; null: unchanged.",
        tuple(KINDS),
    )
    factor: float = setting(
        8.0,
        "Factor by which texts become longer: it divides frequencies; abf: it multiplies "
        "rope_base.",
        above=0,
    )
    original_length: int = setting(
        8192, "llama3, yarn: the context length before the scaling, in tokens.", least=1
    )
    low_freq_factor: float = setting(
        1.0, "llama3: frequencies with fewer turns than this in original_length are slow.", above=0
    )
    high_freq_factor: float = setting(
        4.0, "llama3: frequencies with more turns than this in original_length are unchanged."
    )
    beta_fast: float = setting(
        32.0,
        "yarn: frequencies with more turns than this in original_length are unchanged.",
        above=0,
    )
    beta_slow: float = setting(
        1.0, "yarn: frequencies with fewer turns than this in original_length are slow.", above=0
    )
    attention_factor: float | None = setting(
        None,
        "yarn: factor on queries and on keys, so that scores are multiplied by its square; null: "
        "0.1 ln(factor) + 1.",
        above=0,
    )

    def changed(self) -> list[str]:
        """Return the names of the fields that differ from their defaults."""
        return [item.name for item in fields(self) if getattr(self, item.name) != item.default]

    def attention(self) -> float:
        """Return the factor on queries and on keys: 1 except for yarn."""
        if self.kind != "yarn":
            return 1.0
        return (
            max(1.0, 0.1 * math.log(self.factor) + 1.0)
            if self.attention_factor is None
            else self.attention_factor
        )


@dataclass(frozen=True)
class Rope:
    """Parameters of the rotation of queries and keys by their positions.

    base: base of the frequencies.
    scaling: scaling of the frequencies.
    factor: number by which rotated vectors are multiplied.
    """

    base: float
    scaling: RopeScaling = field(default_factory=RopeScaling)
    factor: float = 1.0

    @classmethod
    def of(cls, model: ModelConfig) -> Rope | None:
        """Return RoPE as configured in ``model``, or None without model.rope.

        Use it for scores that are products of two rotated vectors.
        """
        return (
            cls(model.rope_base, model.rope_scaling, model.rope_scaling.attention())
            if model.rope
            else None
        )

    @classmethod
    def rotation(cls, model: ModelConfig) -> Rope | None:
        """Return RoPE as configured in ``model`` but with factor 1, or None without model.rope.

        Use it for rotations that are inverted later, or whose result is not a product under a
        softmax.
        """
        rope = cls.of(model)
        return None if rope is None else replace(rope, factor=1.0)

    def first_base(self) -> float:
        """Return the base whose powers are the frequencies.

        Individual frequencies may be scaled afterwards.
        """
        return self.base * self.scaling.factor if self.scaling.kind == "abf" else self.base

    def ramp(self, size: int) -> tuple[float, float]:
        """Return the first and last channel pair of yarn's transition over ``size`` channels.

        Pairs are numbered from the fastest rotation, and both numbers may be fractions. Pairs up to
        the first number are unchanged. Pairs from the last number on have their frequencies
        divided.
        """

        def pair(turns: float) -> float:
            return (
                size
                * math.log(self.scaling.original_length / (turns * 2 * math.pi))
                / (2 * math.log(self.base))
            )

        low = max(math.floor(pair(self.scaling.beta_fast)), 0)
        high = min(math.ceil(pair(self.scaling.beta_slow)), size - 1)
        return low, high if high != low else high + 0.001


def check(model: ModelConfig) -> None:
    """Raise ValueError, naming the key, for conflicting or unused fields of model.rope_scaling."""
    given = model.rope_scaling
    where, changed = "model.rope_scaling", [name for name in given.changed() if name != "kind"]
    if given.kind is None:
        if changed:
            raise ValueError(
                f"{where}.{changed[0]} is set, but {where}.kind is null: set both or neither"
            )
        return
    if not model.rope:
        raise ValueError(f"{where}.kind={given.kind} scales rotary angles, but model.rope is false")
    if vain := [name for name in changed if name not in KINDS[given.kind]]:
        raise ValueError(
            f"{where}.{vain[0]} is set, but {where}.kind={given.kind} does not read it; leave it "
            "out"
        )
    low, high = given.low_freq_factor, given.high_freq_factor
    if low >= high:
        raise ValueError(f"{where}.low_freq_factor={low} must be less than high_freq_factor={high}")
    if given.beta_slow >= given.beta_fast:
        raise ValueError(
            f"{where}.beta_slow={given.beta_slow} must be less than beta_fast={given.beta_fast}"
        )
    if given.kind == "yarn" and model.rope_base == 1:
        raise ValueError(
            f"{where}.kind=yarn separates slow frequencies from fast ones, but with "
            "model.rope_base=1 all are equal; raise it"
        )
