"""Block sizes, warps and production shapes of linear attention's kernels, for the launches and the
compile gate. No kernels, no tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.implementations import interpreted

NONE, HEAD, CHANNEL = range(3)  # decay: none, one for each head, one for each channel


class Plan(NamedTuple):
    """Block sizes of a call. They are small in the interpreter, so that small tests have several
    chunks and blocks.

    wide: float32, whose exact products run outside the tensor cores and need more registers. A
    decay for each channel uses chunks of 32, because registers contain the gradients of a pair's
    weights, of both its tokens and of the decays between them at once.
    """

    key_width: int
    value_width: int
    decay: int
    normalise: bool
    wide: bool
    eps: float | None = None

    @property
    def chunk(self) -> int:
        """Tokens whose pairs are weighted at once; a power of 2."""
        if interpreted():
            return 16
        return 32 if self.wide or self.decay == CHANNEL else 64

    @property
    def keys(self) -> int:
        """Channels of q and k in one program."""
        return _block(self.key_width, self.wide)

    @property
    def values(self) -> int:
        """Channels of v in one program."""
        return _block(self.value_width, self.wide)

    @property
    def gradient_keys(self) -> int:
        """Like ``keys``, for a program that also sums the gradients of a head's decays."""
        return min(self.keys, 32) if self.decay == HEAD else self.keys

    @property
    def decay_widths(self) -> tuple[int, int]:
        """Width of the decays, and the part of it that one program cumulates."""
        return (self.key_width, self.keys) if self.decay == CHANNEL else (1, 1)

    def given(self, kernel: Any, **more: Any) -> dict[str, Any]:
        """Return a kernel's constants, warps and stages. The pass over the chunks loads ahead, and
        so do gradients of relu's inputs, which would spill otherwise; the others have few loads in
        sequence.
        """
        gradients, states = "d_states" in kernel.arg_names, "first" in kernel.arg_names
        width, block = self.decay_widths
        constants = {
            "DK": self.key_width,
            "DV": self.value_width,
            "BK": self.gradient_keys if gradients else self.keys,
            "BV": self.values,
            "C": self.chunk,
            "LEVELS": self.chunk.bit_length() - 1,  # levels of a chunk's binary splitting
            "DECAY": self.decay,
            "NORMALISE": self.normalise,
            "EPS": self.eps,
            "W": width,
            "BW": block,
        } | more
        # If some rows do not begin at multiples of 16 bytes, each number has a separate address,
        # and 4 warps would spill.
        ahead = states or (gradients and self.eps is not None)
        odd_widths = any(width % 8 and width > 1 for width in (self.key_width, self.value_width))
        warps = 8 if not self.wide and (odd_widths or (gradients and self.decay == CHANNEL)) else 4
        return {name: value for name, value in constants.items() if name in kernel.arg_names} | {
            "num_warps": warps,
            "num_stages": 3 if ahead and not odd_widths else 2,
        }


def _block(width: int, wide: bool) -> int:
    if interpreted():
        return 16
    # The operands of a matrix product are at least 16 wide.
    return max(16, min(32 if wide else 64, 1 << (width - 1).bit_length()))
