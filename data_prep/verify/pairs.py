"""Check of one .bin/.idx pair against its entry.

The checks cover sizes, hashes, .idx against .bin, EOD, and the vocabulary. Every byte is read
once, in blocks, for both the hash and the content checks. This module does not depend on units,
plans or inputs.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_prep.aliases import Advance, AnyArray, Int64Array
from data_prep.prepared.document_ids import IdsEntry, count_lines
from data_prep.prepared.indexed import (
    DOCUMENTS_AT_ONCE,
    HEADER,
    FormatError,
    Index,
    read_index,
    sample_digest,
    with_ending,
)
from data_prep.prepared.loss_mask import MaskEntry
from data_prep.prepared.manifest import MergedEntry, SplitEntry

BLOCK_BYTES = 1 << 25


@dataclass(frozen=True)
class Ids:
    """Expected properties of the ids of a pair: dtype, id of EOD, and size of the vocabulary."""

    dtype: str
    eod_id: int
    vocab_size: int


def pair_faults(
    prefix: Path, entry: SplitEntry, record: str, ids: Ids, advance: Advance
) -> Iterator[str]:
    """Yield an error text for each fault of a pair and its .ids file.

    Each text starts with the name of a file. ``record`` is the name of the record that contains
    ``entry``, for the texts. ``advance`` is called with the number of bytes of each block that is
    read.
    """
    binary, index_path = with_ending(prefix, "bin"), with_ending(prefix, "idx")
    missing = set()
    for kind, size in entry.sizes.items():
        path = with_ending(prefix, kind)
        if not path.is_file():
            missing.add(kind)
            yield f"{path} is missing"
        elif path.stat().st_size != size:
            change = "truncated" if path.stat().st_size < size else "too long"
            yield f"{path}: {path.stat().st_size} bytes, {record} says {size} ({change})"
    if entry.ids and "ids" not in missing:
        yield from _ids_faults(
            with_ending(prefix, "ids"), entry.ids, entry.documents, record, advance
        )
    if entry.mask and "mask" not in missing:
        yield from _mask_faults(
            with_ending(prefix, "mask"), entry.mask, entry.tokens, record, advance
        )
    if missing - {"ids", "mask"}:
        return
    index = None
    try:
        index = read_index(index_path)
    except FormatError as error:
        yield f"{index_path} {error}"
    sound = True
    if index is not None:
        for fault in _index_faults(index_path, index, binary, entry, record, ids, advance):
            sound = False
            yield fault
    kind = index.dtype if index else ids.dtype
    yield from _token_faults(binary, index if sound else None, kind, entry, record, ids, advance)


def _ids_faults(
    path: Path, ids: IdsEntry, documents: int, record: str, advance: Advance
) -> Iterator[str]:
    digest = hashlib.sha256()
    lines = 0
    unread = b""
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
            advance(len(block))
            lines, unread = lines + count_lines(block), block[-1:]
    if digest.hexdigest() != ids.sha256:
        yield f"{path}: content differs from {record}'s hash"
    elif lines != documents or unread not in (b"", b"\n"):
        yield f"{path}: {lines} ids for {documents} documents"


def _mask_faults(
    path: Path, mask: MaskEntry, tokens: int, record: str, advance: Advance
) -> Iterator[str]:
    digest = hashlib.sha256()
    counted = size = others = 0
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
            advance(len(block))
            values = np.frombuffer(block, np.uint8)
            size += len(block)
            counted += int(np.count_nonzero(values == 1))
            others += int(np.count_nonzero(values > 1))
    if digest.hexdigest() != mask.sha256:
        yield f"{path}: content differs from {record}'s hash"
    elif sample_digest(path) != mask.sample:
        yield f"{path}: its sample differs from {record}'s, though the hash agrees"
    if others:
        yield f"{path}: {others} bytes are neither 0 nor 1"
    if size != tokens:
        yield f"{path}: {size} bytes for {tokens} tokens"
    if counted != mask.counted:
        yield f"{path}: {counted} tokens count, {record} says {mask.counted}"


def _index_faults(
    path: Path,
    index: Index,
    binary: Path,
    entry: SplitEntry,
    record: str,
    ids: Ids,
    advance: Advance,
) -> Iterator[str]:
    width, documents = np.dtype(index.dtype).itemsize, len(index.lengths)
    digest = hashlib.sha256()
    tokens = 0
    shortest = 1
    pointers_agree = True
    numbers_agree = len(index.document_indices) == documents + 1
    with path.open("rb", buffering=0) as stream:
        digest.update(stream.read(HEADER.size))
        for _, lengths in _parts(stream, "<i4", documents, digest.update, advance):
            tokens += int(lengths.sum(dtype=np.int64))
            shortest = min(shortest, int(lengths.min()))
        end = 0
        for start, pointers in _parts(stream, "<i8", documents, digest.update, advance):
            ends = end + np.cumsum(index.lengths[start : start + len(pointers)], dtype=np.int64)
            pointers_agree &= int(pointers[0]) == end * width and bool(
                (pointers[1:] == ends[:-1] * width).all()
            )
            end = int(ends[-1])
        for start, numbers in _parts(
            stream, "<i8", len(index.document_indices), digest.update, advance
        ):
            numbers_agree &= bool((numbers == np.arange(start, start + len(numbers))).all())
    if digest.hexdigest() != entry.idx_sha256:
        yield f"{path}: content differs from {record}'s hash"
    if index.dtype != ids.dtype:
        yield f"{path}: ids are {index.dtype}, {record} says {ids.dtype}"
    if tokens * width != binary.stat().st_size:
        yield (
            f"{path} does not belong to {binary.name}: it describes {tokens * width} bytes, the "
            f"file has {binary.stat().st_size}"
        )
    if shortest < 1 or not pointers_agree:
        yield f"{path}: lengths and pointers disagree"
    if not numbers_agree:
        yield f"{path}: document indices are not one document a sequence"
    if (documents, tokens) != (entry.documents, entry.tokens):
        yield (
            f"{path}: {documents} documents and {tokens} tokens, {record} says {entry.documents} "
            f"and {entry.tokens}"
        )


def _parts(
    stream: BinaryIO,
    dtype: str,
    number: int,
    update: Callable[[Any], None],
    advance: Advance,
) -> Iterator[tuple[int, AnyArray]]:
    """Yield the next ``number`` values of a file in parts: (index of the first value, values)."""
    for start in range(0, number, DOCUMENTS_AT_ONCE):
        values = np.fromfile(stream, dtype, min(DOCUMENTS_AT_ONCE, number - start))
        update(values)
        advance(values.nbytes)
        if len(values):
            yield start, values


def _token_faults(
    path: Path,
    index: Index | None,
    dtype: str,
    entry: SplitEntry,
    record: str,
    ids: Ids,
    advance: Advance,
) -> Iterator[str]:
    """Yield the faults of a .bin file: wrong hash, ids outside the vocabulary, misplaced EOD.

    The number of EODs must be the number of documents. If ``index``, the content of the .idx file,
    is not None, EOD must also be at the end of every document.
    """
    digest, kind = hashlib.sha256(), np.dtype(dtype).newbyteorder("<")
    found = foreign = unended = read = document = 0
    first = -1
    with path.open("rb", buffering=0) as stream:
        while len(part := np.fromfile(stream, kind, BLOCK_BYTES // kind.itemsize)):
            digest.update(part.data)
            advance(part.nbytes)
            found += int(np.count_nonzero(part == ids.eod_id))
            foreign += int(np.count_nonzero((part < 0) | (part >= ids.vocab_size)))
            if index is not None:
                ends, document = _ends(index, document, read, read + part.nbytes)
                wrong = np.flatnonzero(part[ends] != ids.eod_id)
                if len(wrong) and not unended:
                    first = document - len(ends) + int(wrong[0])
                unended += len(wrong)
            read += part.nbytes
    if digest.hexdigest() != entry.bin_sha256:
        yield f"{path}: content differs from {record}'s hash"
    elif isinstance(entry, MergedEntry) and sample_digest(path) != entry.bin_sample:
        yield (
            f"{path}: its sample differs from {record}'s bin_sample, though the hash agrees: "
            f"{record} was altered"
        )
    if foreign:
        yield f"{path}: {foreign} ids are outside the vocabulary of {ids.vocab_size}"
    if found != entry.documents:
        yield f"{path}: EOD occurs {found} times for {entry.documents} documents"
    if unended:
        yield f"{path}: {unended} documents do not end in EOD, number {first} first"


def _ends(index: Index, document: int, start: int, stop: int) -> tuple[Int64Array, int]:
    """Return (ends of documents in a byte range of a .bin file, next document).

    The range is [start, stop). The ends are indices of ids counted from ``start``. ``document`` is
    the first document that ends at or after ``start``; the second result is the first document that
    ends after ``stop``.
    """
    width = np.dtype(index.dtype).itemsize
    after = bisect_right(index.pointers, stop, lo=min(document + 1, len(index.pointers)))
    ends = (index.pointers[document + 1 : after] - start) // width - 1
    document = max(after - 1, document)
    if (
        document < len(index.pointers)
        and int(index.pointers[document]) + int(index.lengths[document]) * width == stop
    ):
        ends, document = np.append(ends, (stop - start) // width - 1), document + 1
    return ends.astype(np.int64), document
