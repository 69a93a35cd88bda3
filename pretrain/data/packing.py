"""Best-fit packing: choose the pieces of documents that share a sequence.

The algorithm is that of Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv
2404.10830). A document that fits into one sequence is never cut.

A sequence of ``length`` tokens and their labels has space for length + 1 tokens. A longer document
fills sequences alone until its rest fits into one. Each sequence of a document begins with the
token that was the last label of the previous sequence. The remaining pieces of all documents are
placed in decreasing order of size, each into the fullest sequence that has space. The module
imports neither torch nor Megatron.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pretrain.config import DataConfig
from pretrain.data.facts import HEADER, DataFacts

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Placed(NamedTuple):
    """Placement of ``per_sequence`` pieces of ``size`` tokens in each sequence of [first, end)."""

    size: int
    first: int
    end: int
    per_sequence: int


@dataclass(frozen=True)
class Packing:
    """The packed sequences of one epoch.

    pieces [pieces, 2]: for each piece, in the order of the sequences, its document and the number
    of sequences that the document fills before this piece. first [sequences + 1]: index of each
    sequence's first piece.
    """

    pieces: Int32
    first: Int64


@dataclass(frozen=True)
class Share:
    """Cost of packing a source.

    padding: padding tokens in the ``sequences`` of an epoch. cut: number of documents, out of
    ``documents``, that are longer than one sequence.
    """

    sequences: int
    padding: int
    documents: int
    cut: int


def cuts(lengths: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """Return the number of sequences that each document fills alone before its last piece.

    The last piece of a cut document has 2 to length + 1 tokens.
    """
    return np.maximum(lengths - 2, 0) // length


def best_fit(counts: Sequence[int], capacity: int) -> tuple[list[Placed], int, dict[int, int]]:
    """Place counts[size] pieces of each size from 1 to ``capacity`` by best-fit-decreasing.

    Return the placements, the largest size first; the number of sequences; and a mapping from each
    number of free tokens above 0 to the number of sequences that have it.

    Pieces of one size are placed run by run; a run is a range of sequences with equal free space.
    The sequences of the run with the least sufficient space take pieces until no more fit, and then
    have less than half of their former space. The space of a run therefore changes at most
    log2(capacity) times, and each size adds at most two runs.
    """
    placed = list[Placed]()
    used = 0
    runs = dict[int, list[range]]()
    spaces = list[int]()

    def put(run: range, each: int) -> None:
        """Place ``each`` pieces into every sequence of a run; ``each`` may be 0.

        All sequences of the run have ``space`` free tokens.
        """
        left = space - each * size
        if run and each:
            placed.append(Placed(size, run.start, run.stop, each))
        if run and left:
            if left not in runs:
                insort(spaces, left)
            runs.setdefault(left, []).append(run)

    for size in range(capacity, 0, -1):
        count = int(counts[size])
        while count:
            at = bisect_left(spaces, size)
            if at < len(spaces):
                space = spaces[at]
                run = runs[space].pop()
                if not runs[space]:
                    del runs[space], spaces[at]
            else:
                space, run = capacity, range(used, used - -count // (capacity // size))
                used = run.stop
            most = space // size
            full, more = count // most, min(1, count % most)
            put(run[:full], most)
            put(run[full : full + more], count % most)
            put(run[full + more :], 0)
            count = max(0, count - most * len(run))
    return placed, used, {space: sum(map(len, some)) for space, some in runs.items()}


def pack(lengths: npt.NDArray[Any], length: int, seed: int) -> Packing:
    """Pack an epoch of documents.

    lengths: number of tokens of each document, int32 [documents]; documents without tokens are
    omitted. length: tokens per sequence. seed: determines which pieces of equal size share a
    sequence, and the order of pieces. The function uses about 40 bytes per document.
    """
    capacity = length + 1
    # RandomState is numpy's frozen generator.
    order = np.random.RandomState(seed).permutation(len(lengths)).astype(np.int32)
    sizes = lengths[order]
    order, sizes = order[sizes > 0], sizes[sizes > 0]
    before = cuts(sizes, length).astype(np.int32)
    last = sizes - before * length
    placed, used, _ = best_fit(np.bincount(last, minlength=capacity + 1).tolist(), capacity)
    where = np.empty(len(order), np.int32)  # sequence of each last piece
    small = np.uint16 if capacity < 2**16 else np.int32  # numpy sorts 16-bit integers by radix
    where[np.argsort((capacity - last).astype(small), kind="stable")] = np.concatenate(
        [np.repeat(np.arange(first, end, dtype=np.int32), each) for _, first, end, each in placed]
    )
    first = np.concatenate(([0], np.cumsum(np.bincount(where, minlength=used))))
    place = np.argsort(where, kind="stable")
    full = np.flatnonzero(before)  # documents with pieces that fill a sequence
    alone = np.repeat(full, before[full])
    number = np.arange(len(alone)) - np.repeat(np.cumsum(before[full]) - before[full], before[full])
    pieces = np.empty((len(order) + len(alone), 2), np.int32)
    pieces[: len(order), 0], pieces[: len(order), 1] = order[place], before[place]
    pieces[len(order) :, 0], pieces[len(order) :, 1] = order[alone], number
    return Packing(pieces, np.concatenate((first, np.arange(len(order) + 1, len(pieces) + 1))))


def passes(sequences: int, samples: int, seed: int) -> npt.NDArray[np.uint32]:
    """Return the order of the sequences for ``samples`` samples, rounded up to complete epochs.

    Each epoch is shuffled separately, so that a longer run begins with the order of a shorter one.
    """
    epochs = range(max(1, -(-samples // sequences)))
    return np.concatenate(
        [
            np.random.RandomState([seed, epoch]).permutation(sequences).astype(np.uint32)
            for epoch in epochs
        ]
    )


def share(lengths: npt.NDArray[Any], length: int) -> Share:
    """Return the cost of `pack` for documents of these lengths, without packing them."""
    lengths = lengths[lengths > 0]
    before = cuts(lengths, length)
    _, used, spaces = best_fit(
        np.bincount(lengths - before * length, minlength=length + 2).tolist(), length + 1
    )
    # Of the length + 1 places of a sequence, the last one only holds a label.
    padding = sum((space - 1) * count for space, count in spaces.items())
    return Share(used + int(before.sum()), padding, len(lengths), int(np.count_nonzero(before)))


def packing_line(data: DataConfig, facts: DataFacts) -> str | None:
    """Return a line about the cost of packing, or None if ``data.packing`` is stream.

    Padding is averaged over a blend by its weights; cut documents are summed. The function reads
    the .idx files.
    """
    if data.packing == "stream":
        return None
    words = []
    for split, title in (("train", "training"), ("valid", "validation")):
        weights = [source.weight for source in getattr(data, split)]
        shares = [
            share(document_lengths(source.local), data.seq_length)
            for source in facts.sources
            if source.split == split
        ]
        if shares:
            parts = [
                weight * each.padding / each.sequences
                for weight, each in zip(weights, shares, strict=True)
            ]
            padding = sum(parts) / sum(weights) / data.seq_length
            cut = sum(each.cut for each in shares)
            documents = sum(each.documents for each in shares)
            words.append(f"{title} {padding:.2%} padding, {cut:,} of {documents:,} documents cut")
    return f"data.packing = best_fit: {'; '.join(words)}"


def document_lengths(prefix: str) -> Int32:
    """Return the number of tokens of each document of an .idx file, int32, memory-mapped."""
    index = Path(f"{prefix}.idx")
    with index.open("rb") as file:
        documents = HEADER.unpack(file.read(HEADER.size))[3]  # Megatron's sequences, one each
    return np.memmap(index, "<i4", "r", HEADER.size, (documents,))
