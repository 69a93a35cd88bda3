r"""Reader and writer of Megatron's indexed dataset format, which use numpy alone.

The files are byte for byte those of megatron.core.datasets.indexed_dataset. ``.bin``: the ids of
all documents, concatenated. ``.idx``, little-endian: ``MMIDIDX\0\0``, version u64 = 1, dtype code
u8, sequences u64, documents + 1 u64, lengths int32 [n] (ids), pointers int64 [n] (bytes into
.bin), document indices int64 [n + 1]. In these files each document is one sequence. The module
does not depend on splits, units or manifests.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.aliases import AnyArray, Int32Array, Int64Array, Uint8Array
from data_prep.prepared.hashed import HashedWriter
from fem_common.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {"uint16": 8, "int32": 4}
UINT16_BELOW = 65500  # Megatron's DType.optimal_dtype
LONGEST = 2**31 - 1  # lengths are int32
DOCUMENTS_AT_ONCE = 1 << 20


class FormatError(ValueError):
    """Error raised for an .idx file that Megatron would reject or misread."""


def dtype_name(vocab_size: int) -> str:
    """Return the dtype that Megatron uses for ids of a vocabulary of ``vocab_size`` entries.

    It is uint16 below 65500 entries, else int32.
    """
    return "uint16" if vocab_size < UINT16_BELOW else "int32"


def with_ending(prefix: Path, kind: str) -> Path:
    """Return ``PREFIX.bin`` or ``PREFIX.idx``. The prefix may contain dots."""
    return prefix.with_name(f"{prefix.name}.{kind}")


def index_bytes_of(documents: int) -> int:
    """Return the size in bytes of the .idx file of ``documents`` documents."""
    return HEADER.size + 20 * documents + 8


def index_parts(
    documents: int, dtype: str, lengths: Callable[[], Iterable[AnyArray]]
) -> Iterator[bytes]:
    """Yield the content of an .idx file in parts of at most 8 MB.

    ``lengths()`` yields arrays that together contain each document's number of ids, in order. It is
    called twice.
    """
    yield HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], documents, documents + 1)
    for part in _cut(lengths()):
        yield part.astype("<i4").tobytes()
    end = 0
    for part in _cut(lengths()):
        ends = end + np.cumsum(part, dtype=np.int64)
        pointers = np.empty(len(part), dtype="<i8")
        pointers[0] = end
        pointers[1:] = ends[:-1]
        end = int(ends[-1])
        pointers *= np.dtype(dtype).itemsize
        yield pointers.tobytes()
    for start in range(0, documents + 1, DOCUMENTS_AT_ONCE):
        yield np.arange(start, min(start + DOCUMENTS_AT_ONCE, documents + 1), dtype="<i8").tobytes()


def _cut(parts: Iterable[AnyArray]) -> Iterator[AnyArray]:
    for part in parts:
        for start in range(0, len(part), DOCUMENTS_AT_ONCE):
            yield part[start : start + DOCUMENTS_AT_ONCE]


def index_bytes(lengths: AnyArray, dtype: str) -> bytes:
    """Return the content of the .idx file of n documents; ``lengths`` [n] is in ids."""
    return b"".join(index_parts(len(lengths), dtype, lambda: (lengths,)))


def write_index(
    path: Path, documents: int, dtype: str, lengths: Callable[[], Iterable[AnyArray]]
) -> tuple[int, str]:
    """Write an .idx file, flush it to disk, and return its size in bytes and its SHA-256.

    The arguments are those of ``index_parts``. A few MB of memory are used.
    """
    with closing(HashedWriter(path)) as writer:
        for part in index_parts(documents, dtype, lengths):
            writer.write(part)
        return writer.bytes, writer.complete()


@dataclass(frozen=True)
class Index:
    """Memory-mapped content of an .idx file.

    dtype: dtype of the ids in the .bin file.
    lengths: int32 [n], ids of each sequence.
    pointers: int64 [n], first byte of each sequence in the .bin file.
    document_indices: int64 [documents + 1], first sequence of each document.
    """

    dtype: str
    lengths: Int32Array
    pointers: Int64Array
    document_indices: Int64Array


def read_index(path: Path) -> Index:
    """Map an .idx file into memory. Only its header is read immediately.

    Raises FormatError if the header or the size is wrong.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise FormatError("is not a Megatron index (bad magic)")
    _, version, code, sequences, documents = HEADER.unpack(head)
    names = {code: name for name, code in DTYPE_CODES.items()}
    if version != VERSION or code not in names:
        raise FormatError(
            f"has version {version} and dtype code {code}, expected {VERSION} and one of "
            f"{sorted(names)}"
        )
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size != expected:
        raise FormatError(f"is {size} bytes, its header says {expected}")
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    pointers_at = HEADER.size + 4 * sequences
    return Index(
        names[code],
        _mapped(raw, "<i4", sequences, HEADER.size),
        _mapped(raw, "<i8", sequences, pointers_at),
        _mapped(raw, "<i8", documents, pointers_at + 8 * sequences),
    )


def _mapped(raw: Uint8Array, dtype: str, number: int, at: int) -> AnyArray:
    return np.frombuffer(raw, dtype, number, at) if number else np.zeros(0, dtype)


@dataclass(frozen=True)
class Written:
    """Summary of a finished .bin/.idx pair; ``tokens`` counts all ids including EOD."""

    documents: int
    tokens: int
    bin_bytes: int
    bin_sha256: str
    idx_bytes: int
    idx_sha256: str


class IndexedWriter:
    """Incremental writer of a .bin/.idx pair.

    ``PREFIX.bin`` is written as documents are added, and ``PREFIX.idx`` at the end. The writer uses
    four bytes of memory per document.
    """

    def __init__(self, prefix: Path, dtype: str) -> None:
        self.prefix, self.dtype = prefix, dtype
        self.tokens = self.documents = 0
        self._lengths: list[Int32Array] = []
        self._binary = HashedWriter(with_ending(prefix, "bin"))

    def add(self, ids: AnyArray, lengths: AnyArray) -> None:
        """Append n documents.

        ids: integer ids of all documents including EOD [sum of lengths].
        lengths: number of ids of each document including EOD [n].

        Raises ValueError if an id does not fit the dtype of the files or if lengths and ids
        disagree, and UserError for a document of more than 2^31 - 1 ids.
        """
        if not len(lengths):
            return
        if int(lengths.min()) < 1 or int(lengths.sum(dtype=np.int64)) != len(ids):
            raise ValueError(
                f"{len(ids)} ids for documents of {int(lengths.sum(dtype=np.int64))}, the "
                f"shortest of {int(lengths.min())}"
            )
        if int(lengths.max()) > LONGEST:
            raise UserError(
                f"{with_ending(self.prefix, 'idx')}: a document of {int(lengths.max())} ids, "
                f"more than the format's {LONGEST}"
            )
        limits = np.iinfo(self.dtype)
        if int(ids.min()) < 0 or int(ids.max()) > limits.max:
            raise ValueError(
                f"ids from {int(ids.min())} to {int(ids.max())} do not fit {self.dtype}"
            )
        raw = np.ascontiguousarray(ids, dtype=np.dtype(self.dtype).newbyteorder("<"))
        self._binary.write(raw.data.cast("B"))
        self._lengths.append(lengths.astype(np.int32))
        self.tokens += len(ids)
        self.documents += len(lengths)

    def close(self) -> None:
        """Close the .bin file. No more documents can be written."""
        self._binary.close()

    def finish(self) -> Written:
        """Write the .idx file, flush both files to disk, and return their summary."""
        binary = (self._binary.bytes, self._binary.complete())
        index = write_index(
            with_ending(self.prefix, "idx"), self.documents, self.dtype, lambda: self._lengths
        )
        return Written(self.documents, self.tokens, *binary, *index)


BLOCK_BYTES = 1 << 16
BLOCKS = 64


def sample_digest(path: Path) -> str:
    """Return ``SIZE:SHA256``, a fast fingerprint of a file.

    The hash covers 64 blocks of 64 KiB spread evenly over the file. Files of up to 4 MiB are hashed
    completely. A copy of the file has the same digest.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for number in range(BLOCKS):
            stream.seek(number * max(BLOCK_BYTES, (size - BLOCK_BYTES) // (BLOCKS - 1)))
            digest.update(stream.read(BLOCK_BYTES))
    return f"{size}:{digest.hexdigest()}"
