"""data_prep: Megatron's indexed format, byte for byte that of megatron.core.datasets.indexed_dataset, in numpy alone.

``.bin``: the ids of all documents, one after the other. ``.idx``, little-endian: ``MMIDIDX\\0\\0``, version u64 = 1, dtype code u8,
sequences u64, documents + 1 u64, lengths int32 [n] (ids), pointers int64 [n] (bytes into .bin), document indices int64 [n + 1].
Here a document is one sequence.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = len(MAGIC) + 8 + 1 + 8 + 8
DTYPE_CODES = {"uint16": 8, "int32": 4}
UINT16_BELOW = 65500  # Megatron's DType.optimal_dtype


class FormatError(ValueError):
    """An .idx file that Megatron would not read, or would read wrongly."""


def dtype_name(vocab_size: int) -> str:
    """Megatron's choice of id width: uint16 where the vocabulary is below 65500 entries, else int32."""
    return "uint16" if vocab_size < UINT16_BELOW else "int32"


def index_bytes(lengths: npt.NDArray[np.int32], dtype: str) -> bytes:
    """The .idx file of documents with these lengths [n] (ids)."""
    pointers = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= np.dtype(dtype).itemsize
    head = MAGIC + struct.pack("<QBQQ", VERSION, DTYPE_CODES[dtype], len(lengths), len(lengths) + 1)
    return b"".join((head, lengths.astype("<i4").tobytes(), pointers.tobytes(), np.arange(len(lengths) + 1, dtype="<i8").tobytes()))


@dataclass(frozen=True)
class Index:
    """An .idx file's content: id type, lengths int32 [n] (ids), pointers int64 [n] (bytes), document indices int64 [documents + 1]."""

    dtype: str
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    document_indices: npt.NDArray[np.int64]


def read_index(path: Path) -> Index:
    """Read an .idx file. Raises FormatError where header or size is wrong."""
    raw = path.read_bytes()
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        raise FormatError("is not a Megatron index (bad magic)")
    version, code, sequences, documents = struct.unpack_from("<QBQQ", raw, len(MAGIC))
    names = {code: name for name, code in DTYPE_CODES.items()}
    if version != VERSION or code not in names:
        raise FormatError(f"has version {version} and dtype code {code}, expected {VERSION} and one of {sorted(names)}")
    expected = HEADER_BYTES + 12 * sequences + 8 * documents
    if len(raw) != expected:
        raise FormatError(f"is {len(raw)} bytes, its header says {expected}")
    pointers_at = HEADER_BYTES + 4 * sequences
    return Index(
        names[code],
        np.frombuffer(raw, "<i4", sequences, HEADER_BYTES),
        np.frombuffer(raw, "<i8", sequences, pointers_at),
        np.frombuffer(raw, "<i8", documents, pointers_at + 8 * sequences),
    )


@dataclass(frozen=True)
class Written:
    """A finished pair: documents, tokens (ids, EOD included), and size and hash of both files."""

    documents: int
    tokens: int
    bin_bytes: int
    bin_sha256: str
    idx_bytes: int
    idx_sha256: str


class IndexedWriter:
    """Writes one ``PREFIX.bin`` as documents come, and ``PREFIX.idx`` at the end."""

    def __init__(self, prefix: Path, dtype: str) -> None:
        self.prefix = prefix
        self.dtype = dtype
        self.tokens = 0
        self.documents = 0
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._hash = hashlib.sha256()
        self._stream: BinaryIO = prefix.with_suffix(".bin").open("wb", buffering=0)

    def add(self, documents: Sequence[Sequence[int]], eod: int) -> None:
        """Append documents (ids), each followed by ``eod``."""
        lengths = np.fromiter((len(ids) + 1 for ids in documents), dtype=np.int32, count=len(documents))
        flat = chain.from_iterable(chain(ids, (eod,)) for ids in documents)
        tokens = int(lengths.sum(dtype=np.int64))
        raw = memoryview(np.fromiter(flat, dtype=np.dtype(self.dtype).newbyteorder("<"), count=tokens).tobytes())
        self._hash.update(raw)
        try:
            while raw:
                raw = raw[self._stream.write(raw) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._stream.name) from None
        self._lengths.append(lengths)
        self.tokens += tokens
        self.documents += len(documents)

    def close(self) -> None:
        """Close .bin; nothing more is written."""
        self._stream.close()

    def finish(self) -> Written:
        """Write .idx, wait until both files are on the disk, and say what they hold."""
        os.fsync(self._stream.fileno())
        self.close()
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, dtype=np.int32)
        index = index_bytes(lengths, self.dtype)
        with self.prefix.with_suffix(".idx").open("wb") as stream:
            stream.write(index)
            stream.flush()
            os.fsync(stream.fileno())
        return Written(
            self.documents,
            self.tokens,
            self.tokens * np.dtype(self.dtype).itemsize,
            self._hash.hexdigest(),
            len(index),
            hashlib.sha256(index).hexdigest(),
        )
