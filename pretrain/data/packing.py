"""Best-fit packing: which pieces of documents share a sequence, so that a document that fits into one is never cut.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830). A sequence of ``length`` tokens and their labels has
room for length + 1 tokens. A longer document fills sequences of its own until what is left of it fits; each begins with the token that
was the last one's label. These last pieces, the largest first, go each into the fullest sequence that has room. No torch, no Megatron.
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
    """``each`` pieces of ``size`` tokens lie in each of the sequences [first, end)."""

    size: int
    first: int
    end: int
    each: int


@dataclass(frozen=True)
class Packing:
    """An epoch's sequences. pieces [pieces, 2]: document, and how many sequences of its own are before this piece of it; sequence after
    sequence. first [sequences + 1]: which piece a sequence begins with."""

    pieces: Int32
    first: Int64


@dataclass(frozen=True)
class Share:
    """What packing costs a source: ``padding`` tokens of ``sequences`` of an epoch; ``cut`` of its ``documents`` are longer than one."""

    sequences: int
    padding: int
    documents: int
    cut: int


def cuts(lengths: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """How many sequences of its own each document fills before its last piece, of 2 to length + 1 tokens where it is cut."""
    return np.maximum(lengths - 2, 0) // length


def best_fit(counts: Sequence[int], room: int) -> tuple[list[Placed], int, dict[int, int]]:
    """Best-fit-decreasing of counts[size] pieces of each size from 1 to ``room``, all equal ones at once.

    -> where they lie, the largest first; the number of sequences; how many of them have so many tokens left, without the full ones.

    Of sequences with the least room that does, each takes pieces until one has no place, and is then left with less than a half of what it
    had: a run of alike sequences is moved at most log2(room) times, and there are two more runs a size at most.
    """
    placed, used, runs, spaces = list[Placed](), 0, dict[int, list[range]](), list[int]()

    def put(run: range, each: int) -> None:
        """``each`` pieces, or none, into every sequence of a run of which each has ``space`` tokens left."""
        left = space - each * size
        if run and each:
            placed.append(Placed(size, run.start, run.stop, each))
        if run and left:
            if left not in runs:
                insort(spaces, left)
            runs.setdefault(left, []).append(run)

    for size in range(room, 0, -1):
        count = int(counts[size])
        while count:
            at = bisect_left(spaces, size)
            if at < len(spaces):
                space = spaces[at]
                run = runs[space].pop()
                if not runs[space]:
                    del runs[space], spaces[at]
            else:
                space, run = room, range(used, used - -count // (room // size))
                used = run.stop
            most = space // size
            full, more = count // most, min(1, count % most)
            put(run[:full], most)
            put(run[full : full + more], count % most)
            put(run[full + more :], 0)
            count = max(0, count - most * len(run))
    return placed, used, {space: sum(map(len, some)) for space, some in runs.items()}


def pack(lengths: npt.NDArray[Any], length: int, seed: int) -> Packing:
    """An epoch of documents of so many tokens (int32 [documents]); which of those of one size meet, and their order, are the seed's.

    A document without tokens is nowhere. Uses about 40 bytes a document.
    """
    room = length + 1
    order = (
        np.random.RandomState(seed).permutation(len(lengths)).astype(np.int32)
    )  # numpy's frozen generator
    sizes = lengths[order]
    order, sizes = order[sizes > 0], sizes[sizes > 0]
    before = cuts(sizes, length).astype(np.int32)
    last = sizes - before * length
    placed, used, _ = best_fit(np.bincount(last, minlength=room + 1).tolist(), room)
    where = np.empty(len(order), np.int32)  # the sequence of each last piece
    small = np.uint16 if room < 2**16 else np.int32  # which numpy sorts by radix
    where[np.argsort((room - last).astype(small), kind="stable")] = np.concatenate(
        [np.repeat(np.arange(first, end, dtype=np.int32), each) for _, first, end, each in placed]
    )
    first = np.concatenate(([0], np.cumsum(np.bincount(where, minlength=used))))
    place = np.argsort(where, kind="stable")
    whole = np.flatnonzero(before)  # and the sequences that one piece fills
    alone = np.repeat(whole, before[whole])
    number = np.arange(len(alone)) - np.repeat(
        np.cumsum(before[whole]) - before[whole], before[whole]
    )
    pieces = np.empty((len(order) + len(alone), 2), np.int32)
    pieces[: len(order), 0], pieces[: len(order), 1] = order[place], before[place]
    pieces[len(order) :, 0], pieces[len(order) :, 1] = order[alone], number
    return Packing(pieces, np.concatenate((first, np.arange(len(order) + 1, len(pieces) + 1))))


def passes(sequences: int, samples: int, seed: int) -> npt.NDArray[np.uint32]:
    """The order of whole epochs, as many as so many samples take: of each its own, so that a longer run begins alike."""
    epochs = range(max(1, -(-samples // sequences)))
    return np.concatenate(
        [
            np.random.RandomState([seed, epoch]).permutation(sequences).astype(np.uint32)
            for epoch in epochs
        ]
    )


def share(lengths: npt.NDArray[Any], length: int) -> Share:
    """What `pack` would cost, without doing it."""
    lengths = lengths[lengths > 0]
    before = cuts(lengths, length)
    _, used, spaces = best_fit(
        np.bincount(lengths - before * length, minlength=length + 2).tolist(), length + 1
    )
    padding = sum(
        (space - 1) * count for space, count in spaces.items()
    )  # of the room for length + 1, the first is a label's
    return Share(used + int(before.sum()), padding, len(lengths), int(np.count_nonzero(before)))


def told(data: DataConfig, facts: DataFacts) -> str | None:
    """A line on what packing costs, of a blend as its weights have it; None where nothing is packed. Reads the .idx files."""
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
            cut, documents = (
                sum(getattr(each, name) for each in shares) for name in ("cut", "documents")
            )
            words.append(f"{title} {padding:.2%} padding, {cut:,} of {documents:,} documents cut")
    return f"data.packing = best_fit: {'; '.join(words)}"


def document_lengths(prefix: str) -> Int32:
    """Tokens of each document of a .idx, mapped."""
    index = Path(f"{prefix}.idx")
    with index.open("rb") as file:
        sequences = HEADER.unpack(file.read(HEADER.size))[3]
    return np.memmap(index, "<i4", "r", HEADER.size, (sequences,))
