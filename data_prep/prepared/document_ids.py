"""``PREFIX.ids`` files, which contain the ids of the documents of a .bin/.idx pair.

Each id is one UTF-8 line; the lines are in the order of the pair's documents. In a line, a
backslash is written as two backslashes, a newline as backslash and n, and a byte that is not
UTF-8 as backslash, x and its hexadecimal number. One pass over the file finds a document by its
number or its id. The module requires only numpy and does not depend on splits, units or
manifests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.prepared.hashed import HashedWriter

BLOCK_BYTES = 1 << 23


@dataclass(frozen=True)
class IdsEntry:
    """Size and SHA-256 of a .ids file."""

    bytes: int
    sha256: str


class IdsWriter(HashedWriter):
    """Incremental writer of a .ids file."""

    def add(self, ids: Iterable[bytes]) -> None:
        """Append the ids of documents."""
        self.write(b"".join([line_of(each) + b"\n" for each in ids]))

    def finish(self) -> IdsEntry:
        """Complete the file, and return its size and hash."""
        return IdsEntry(self.bytes, self.complete())


def line_of(document_id: bytes) -> bytes:
    """Return the escaped line that represents an id in a .ids file, without the newline."""
    line = (
        document_id.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
        if b"\\" in document_id or b"\n" in document_id
        else document_id
    )
    return line if line.isascii() else line.decode(errors="backslashreplace").encode()


def lines_at(path: Path, numbers: Collection[int]) -> dict[int, str]:
    """Return a dictionary from document number (from 0) to its line in a .ids file.

    Those of ``numbers`` that the file does not contain are absent.
    """
    wanted = np.unique(np.fromiter(numbers, np.int64, len(numbers)))
    found = dict[int, str]()
    first = 0
    rest = b""
    with path.open("rb") as stream:
        while len(found) < len(wanted) and (block := stream.read(BLOCK_BYTES)):
            block = rest + block
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            low, high = np.searchsorted(wanted, (first, first + len(ends)))
            for number in wanted[low:high].tolist():
                start = int(ends[number - first - 1]) + 1 if number > first else 0
                found[number] = block[start : int(ends[number - first])].decode()
            first, rest = first + len(ends), block[int(ends[-1]) + 1 :] if len(ends) else block
    return found


def numbers_of(path: Path, line: bytes) -> list[int]:
    """Return the numbers of the documents whose line in a .ids file equals ``line``, ascending."""
    # ``rest`` begins with the newline before document ``first``.
    found = list[int]()
    first = 0
    rest = b"\n"
    sought = b"\n" + line + b"\n"
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            block, at = rest + block, -1
            while (at := block.find(sought, at + 1)) >= 0:
                found.append(first + count_lines(block[:at]))
            last = block.rindex(b"\n")
            first, rest = first + count_lines(block[:last]), block[last:]
    return found


def count_lines(block: bytes | memoryview) -> int:
    """Return the number of newlines in a block of a file."""
    return int(np.count_nonzero(np.frombuffer(block, np.uint8) == ord("\n")))
