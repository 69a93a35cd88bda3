"""Byte streams of input files, local or on the Hugging Face Hub, and fingerprints of the files.

Compressed files are decompressed. This module does not depend on rows or columns.
"""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import pyarrow as pa

from data_prep.sources import hub
from data_prep.sources.rows import raise_if_memory
from fem_common.errors import UserError, from_os_error
from fem_common.text import one_line

SAMPLE_BYTES, SAMPLES = 1 << 16, 64


class LocalFile(io.FileIO):
    """File whose reads raise UserError or StorageError instead of OSError.

    A reader can therefore distinguish a failing disk from a damaged file.
    """

    def __init__(self, path: str) -> None:
        with _readable(path):
            super().__init__(path)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read and return at most ``size`` bytes; the result is empty at the end of the file."""
        with _readable(str(self.name)):
            return super().read(-1 if size is None else size) or b""

    def readinto(self, buffer: Any, /) -> int:
        """Read once into ``buffer`` and return the number of bytes read."""
        with _readable(str(self.name)):
            return super().readinto(buffer) or 0

    def readall(self) -> bytes:
        """Read and return all bytes up to the end of the file."""
        with _readable(str(self.name)):
            return super().readall() or b""


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """Raise UserError or StorageError instead of an OSError of the block."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except OSError as error:
        bare = OSError(error.errno, error.strerror)
        raise from_os_error(bare, f"{path} cannot be read (", ")") from None


def open_input(path: str, *, ahead: bool = False) -> BinaryIO:
    """Open a local file or a file on the Hub (``hf://``) for random access.

    Opening and reading raise CommandError on failure. For ``ahead`` see hub.open_remote.
    """
    return (
        hub.open_remote(path, ahead=ahead) if hub.is_hub(path) else cast(BinaryIO, LocalFile(path))
    )


def size_of(file: BinaryIO) -> int:
    """Return the size of an open file in bytes and seek to its beginning."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size


def chunks(file: BinaryIO, kind: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of ``file`` in chunks of at most 1 MiB.

    Reading starts at the current position. ``kind`` is jsonl, jsonl.gz or jsonl.zst. Consecutive
    gzip members or zstd frames are one stream. Raises DamagedStream after the last bytes that could
    be decompressed.
    """
    if kind.endswith(".gz"):
        yield from gunzip(file)
    elif kind.endswith(".zst"):
        yield from unzstd(file)
    else:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def sampled(file: BinaryIO) -> str:
    """Return ``sample:SIZE:SHA256``, a fast fingerprint of a file.

    The hash covers 64 blocks of 64 KiB spread evenly over the file, which takes milliseconds. A
    change between the blocks is not detected.
    """
    size, digest = size_of(file), hashlib.sha256()
    for number in range(SAMPLES):
        file.seek(max(number * SAMPLE_BYTES, number * (size - SAMPLE_BYTES) // (SAMPLES - 1)))
        digest.update(file.read(SAMPLE_BYTES))
    file.seek(0)
    return f"sample:{size}:{digest.hexdigest()}"


def parquet_footer(file: BinaryIO) -> str:
    """Return ``footer:SIZE:SHA256``, the size of a parquet file and the hash of its footer.

    The footer contains the schema, row counts, and the offsets, sizes and statistics of all column
    chunks. A change in the data that keeps all of these, for example a flipped bit, is not
    detected.
    """
    size = size_of(file)
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(0, size - 8 - length))
    footer = file.read(length + 8)
    file.seek(0)
    return f"footer:{size}:{hashlib.sha256(footer).hexdigest()}"


CHUNK_BYTES = 1 << 20  # maximum output of one call of zlib
PACKED_BYTES = 1 << 16  # input of one call of zlib; lost if it is damaged
# Output of one read from Arrow; lost, in addition to the damaged block, if the stream is damaged.
READ_BYTES = 1 << 12
# Message of zstd for a frame whose window exceeds its limit of 128 MiB.
_WIDE = "requires too much memory"
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class DamagedStream(Exception):
    """Error raised if a compressed stream ends early or cannot be decompressed further."""


def is_skippable(begin: bytes) -> bool:
    """Return True if a zstd file that starts with ``begin`` starts with a skippable frame."""
    return begin[1:4] == b"\x2a\x4d\x18" and 0x50 <= begin[0] <= 0x5F


def gunzip(file: BinaryIO) -> Iterator[bytes]:
    """Yield the decompressed content of all members of a gzip file, in order.

    Zero padding between and after the members is skipped. Raises DamagedStream after the last bytes
    that could be decompressed.
    """
    packed = b""
    member = None
    members = 0
    while True:
        packed = packed or file.read(PACKED_BYTES)
        ended = not packed
        if member is None:
            packed = packed.lstrip(b"\0") if members else packed  # some tools add padding
            if not packed:
                if ended:
                    return
                continue
            member, members = zlib.decompressobj(zlib.MAX_WBITS | 16), members + 1
        try:
            chunk = member.decompress(packed, CHUNK_BYTES)
        except zlib.error as error:
            raise_if_memory(error)
            raise DamagedStream(one_line(error)) from None
        packed = member.unconsumed_tail
        if chunk:
            yield chunk
        if member.eof:
            packed, member = member.unused_data, None
        elif ended and not chunk:
            raise DamagedStream("the gzip stream ends early")


def unzstd(file: BinaryIO) -> Iterator[bytes]:
    """Yield the decompressed content of all frames of a zstd file, in order.

    Raises DamagedStream after the last bytes that could be decompressed, and UserError for a window
    larger than Arrow supports.
    """
    with pa.CompressedInputStream(_Unclosed(file), "zstd") as stream:
        while True:
            try:
                chunk = stream.read(READ_BYTES)
            except OSError as error:
                raise_if_memory(error)
                if _WIDE in str(error):
                    name = getattr(file, "name", "it")
                    advice = "unpack it first: zstd -d --long=31 FILE.zst"
                    raise UserError(
                        f"{name} was packed by zstd with a window above 128 MiB (--long=28 "
                        f"or more); {advice}"
                    ) from None
                raise DamagedStream(one_line(error)) from None
            if not chunk:
                return
            yield chunk


class _Unclosed(io.RawIOBase):
    """Wrapper of a file that Arrow reads but does not close."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
