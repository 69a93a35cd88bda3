"""``PREFIX.mask`` files: one byte for each token of a .bin file, in the same order.

1: the token counts in the loss as a label. 0: it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.prepared.hashed import HashedWriter
from data_prep.prepared.indexed import sample_digest


@dataclass(frozen=True)
class MaskEntry:
    """Record of a .mask file.

    sample: its indexed.sample_digest. counted: number of ones.
    """

    bytes: int
    sha256: str
    sample: str
    counted: int


def counting(counted: int, tokens: int) -> str:
    """Return the sentence about the tokens that count, for the output of the verbs."""
    return f"{counted:,} of {tokens:,} tokens count in the loss ({counted / tokens:.1%})"


class MaskWriter(HashedWriter):
    """Incremental writer of a .mask file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.counted = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes of 0 and 1."""
        self.counted += int(np.count_nonzero(np.frombuffer(data, np.uint8)))
        super().write(data)

    def finish(self) -> MaskEntry:
        """Complete the file, and return its record."""
        sha256 = self.complete()
        return MaskEntry(self.bytes, sha256, sample_digest(self.path), self.counted)
