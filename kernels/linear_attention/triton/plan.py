"""Block sizes, warps and production shapes of the kernels here, for the launches and the compile gate alike. No kernels, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kernels.implementations import interpreted
from kernels.tiles import Build

NONE, HEAD, CHANNEL = range(3)  # decay: none, one for each head, one for each channel


# Launch options: the pass over the chunks loads ahead; the others have little to load in turn.
STATES = {"num_warps": 4, "num_stages": 3}
OTHERS = {"num_warps": 4, "num_stages": 2}


class Plan(NamedTuple):
    """How a call is cut: small in the interpreter, so that small tests have several chunks and blocks.

    wide: float32, whose exact products run outside the tensor cores and hold more registers. Each channel's decay takes chunks of 32: the
    gradients of a pair's weights, of both its tokens and of the decays between them are held at once.
    """

    key_width: int
    value_width: int
    decay: int
    normalise: bool
    wide: bool

    @property
    def chunk(self) -> int:
        """Tokens whose pairs are weighed at once; a power of 2."""
        return 16 if interpreted() else 32 if self.wide or self.decay == CHANNEL else 64

    @property
    def keys(self) -> int:
        """Channels of q and k that a program holds at once."""
        return _block(self.key_width, self.wide)

    @property
    def values(self) -> int:
        """Channels of v that a program holds at once."""
        return _block(self.value_width, self.wide)

    @property
    def gradient_keys(self) -> int:
        """As ``keys``, of a program that also adds up the gradients of a head's decays."""
        return min(self.keys, 32) if self.decay == HEAD else self.keys

    @property
    def gradient_options(self) -> dict[str, int]:
        """Warps and stages of the program that makes the gradients of q, k and the decays."""
        return {"num_warps": 8 if self.decay == CHANNEL and not self.wide else 4, "num_stages": 2}

    def constants(self, keys: int | None = None) -> dict[str, int | bool]:
        """The kernels' common constants."""
        return {
            "DK": self.key_width,
            "DV": self.value_width,
            "BK": self.keys if keys is None else keys,
            "BV": self.values,
            "C": self.chunk,
            "DECAY": self.decay,
            "NORMALISE": self.normalise,
        }

    def cumulating(self) -> dict[str, int]:
        """The constants of the kernel that cumulates decays: their width, how many of it a program takes, a chunk's tokens."""
        width, block = (self.key_width, self.keys) if self.decay == CHANNEL else (1, 1)
        return {"W": width, "BW": block, "C": self.chunk}

    def pairing(self) -> dict[str, int]:
        """The constants of the kernel that weighs pairs where each channel has its decay."""
        return {"DK": self.key_width, "BK": self.keys, "C": self.chunk, "LEVELS": self.levels}

    @property
    def levels(self) -> int:
        """Of a chunk's binary splitting: chunk = 2^levels."""
        return self.chunk.bit_length() - 1


def _block(width: int, wide: bool) -> int:
    most = 16 if interpreted() else 32 if wide else 64
    return max(16, min(most, 1 << (width - 1).bit_length()))  # a product's operands are 16 wide at least


PRODUCTION: dict[str, Plan] = {
    "d_k 64, d_v 64, a decay a head": Plan(64, 64, HEAD, True, False),
    "d_k 64, d_v 64, a decay a channel": Plan(64, 64, CHANNEL, True, False),
    "d_k 128, d_v 128, no decay": Plan(128, 128, NONE, True, False),
    "d_k 128, d_v 128, a decay a head": Plan(128, 128, HEAD, True, False),
    "d_k 128, d_v 128, a decay a channel": Plan(128, 128, CHANNEL, True, False),
    "d_k 128, d_v 64, a decay a head, plain": Plan(128, 64, HEAD, False, False),
    "float32, d_k 64, d_v 64, no decay": Plan(64, 64, NONE, True, True),
    "float32, d_k 128, d_v 128, a decay a head": Plan(128, 128, HEAD, True, True),
    "float32, d_k 64, d_v 64, a decay a channel": Plan(64, 64, CHANNEL, True, True),
}
BOTH_WAYS = tuple(
    (f"{label}{', backward in time' if reverse else ''}", plan, reverse)
    for label, plan in PRODUCTION.items()
    for reverse in ((False, True) if plan.key_width == 128 else (False,))
)


def build(
    label: str,
    kernel: Any,
    plan: Plan,
    constants: Mapping[str, Any],
    *,
    data: str,
    floats: str = "",
    strides: str,
    options: Mapping[str, int],
    matrix: bool = True,
) -> Build:
    """A kernel as a call of ``plan`` launches it.

    data: names of the arguments in the call's type, floats: of those in float32, strides: of those whose three strides are passed, all
    besides high and low. What neither the decay nor the normaliser needs is None. matrix: it has products.
    """
    kinds = dict.fromkeys(data.split(), "*fp32" if plan.wide else "*bf16")
    kinds |= dict.fromkeys(floats.split(), "*fp32") | {"high": "*fp32", "low": "*fp16"}
    places = [f"{name}_{axis}" for name in strides.split() for axis in "bht"]
    kinds |= dict.fromkeys((*places, "T", "N", "H"), "i32")
    absent = (() if plan.decay else ("high", "low", "da")) + (() if plan.normalise else ("share", "weight", "masses", "d_masses"))
    absent += () if plan.decay == CHANNEL else ("pairs",)
    known = set(kernel.arg_names)
    constants = {**constants, **dict.fromkeys(known.intersection(absent))}
    return Build(
        label,
        kernel,
        {name: kind for name, kind in kinds.items() if name in known and name not in constants},
        constants,
        options["num_warps"],
        options["num_stages"],
        # wgmma multiplies 64 rows at least; float32 is multiplied exactly, outside the tensor cores.
        matrix=matrix and plan.chunk >= 64,
        aligned=tuple(places),
    )
