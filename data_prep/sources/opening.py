"""data_prep: an input as bytes, local or on the Hugging Face Hub, packed or not, and its identity. Knows neither rows nor columns."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from data_prep.errors import UserError
from data_prep.sources import hub
from data_prep.sources.packed import gunzip, unzstd
from fem_common.errors import CommandError, told

CHUNK_BYTES = 1 << 20
SAMPLE_BYTES, SAMPLES = 1 << 16, 64


class LocalFile(io.FileIO):
    """A file whose reads raise UserError or StorageError, never OSError: a reader must not take a failing disk for a damaged file."""

    def __init__(self, path: str) -> None:
        try:
            super().__init__(path)
        except OSError as error:
            raise _unreadable(path, error) from None

    def read(self, size: int | None = -1, /) -> bytes:
        """At most ``size`` bytes, none at the end."""
        try:
            return super().read(-1 if size is None else size) or b""
        except OSError as error:
            raise _unreadable(str(self.name), error) from None

    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer`` as far as one read goes; the number of bytes."""
        try:
            return super().readinto(buffer) or 0
        except OSError as error:
            raise _unreadable(str(self.name), error) from None

    def readall(self) -> bytes:
        """All bytes to the end."""
        try:
            return super().readall() or b""
        except OSError as error:
            raise _unreadable(str(self.name), error) from None


def _unreadable(path: str, error: OSError) -> CommandError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"no such file: {path}")
    return told(OSError(error.errno, error.strerror), f"{path} cannot be read (", ")")


def open_input(path: str) -> BinaryIO:
    """A local file or an ``hf://`` one, for reading at any place. Opening and reading raise CommandError where the bytes do not come."""
    return hub.open_remote(path) if hub.is_hub(path) else cast(BinaryIO, LocalFile(path))


def size_of(file: BinaryIO) -> int:
    """Bytes of an open file, which is then at its beginning."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size


def chunks(file: BinaryIO, kind: str) -> Iterator[bytes]:
    """The bytes from where ``file`` stands on, unpacked as its kind (jsonl, jsonl.gz, jsonl.zst) says, in chunks of 1 MiB at most.

    Several members or frames in a row are one stream. Raises DamagedStream after what could be unpacked.
    """
    if kind.endswith(".gz"):
        yield from gunzip(file)
    elif kind.endswith(".zst"):
        yield from unzstd(file)
    else:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def sampled(file: BinaryIO) -> str:
    """``sample:SIZE:SHA256`` over 64 blocks of 64 KiB spread evenly over a file: milliseconds. A change between the blocks goes unseen."""
    size, digest = size_of(file), hashlib.sha256()
    for number in range(SAMPLES):
        file.seek(max(number * SAMPLE_BYTES, number * (size - SAMPLE_BYTES) // (SAMPLES - 1)))
        digest.update(file.read(SAMPLE_BYTES))
    file.seek(0)
    return f"sample:{size}:{digest.hexdigest()}"


def parquet_footer(file: BinaryIO) -> str:
    """``footer:SIZE:SHA256`` of a parquet file's size and footer: schema, row counts, places, sizes and statistics of all column chunks.

    Unseen: another content of the pages with the same sizes and statistics, such as a flipped bit.
    """
    size = size_of(file)
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(0, size - 8 - length))
    footer = file.read(length + 8)
    file.seek(0)
    return f"footer:{size}:{hashlib.sha256(footer).hexdigest()}"
