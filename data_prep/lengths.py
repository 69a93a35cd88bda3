"""data_prep: how long documents are: exact counts of every length, from .idx files of any size. Draws and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.indexed import DOCUMENTS_AT_ONCE, read_index

COUNTED_BELOW = 1 << 20  # lengths counted by place; longer ones, of which no disk holds many, are kept one by one


@dataclass(frozen=True)
class Lengths:
    """Distinct lengths (ids, EOD included) int64 [k], ascending, and how many documents have each int64 [k]."""

    values: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @property
    def total(self) -> int:
        """Documents."""
        return int(self.documents.sum())

    @property
    def tokens(self) -> int:
        """Ids of all documents."""
        return int((self.values * self.documents).sum())

    def quantile(self, share: float) -> int:
        """The smallest length that at least ``share`` of the documents do not exceed."""
        return self._at(self.documents, share)

    def token_quantile(self, share: float) -> int:
        """The smallest length such that documents up to it hold at least ``share`` of the tokens."""
        return self._at(self.values * self.documents, share)

    def _at(self, weights: npt.NDArray[np.int64], share: float) -> int:
        reached = np.cumsum(weights)
        return int(self.values[np.searchsorted(reached, share * reached[-1]).clip(max=len(reached) - 1)])

    def at_most(self, length: int) -> tuple[float, float]:
        """Shares of the documents, and of the tokens, in documents of at most this length."""
        end = int(np.searchsorted(self.values, length, side="right"))
        tokens = int((self.values[:end] * self.documents[:end]).sum())
        return int(self.documents[:end].sum()) / self.total, tokens / self.tokens

    def __add__(self, other: Lengths) -> Lengths:
        return _collected(np.concatenate((self.values, other.values)), np.concatenate((self.documents, other.documents)))


def read_lengths(path: Path, advance: Callable[[int], None]) -> Lengths:
    """The lengths in an .idx file, read in parts; ``advance`` hears of bytes read. Raises indexed.FormatError."""
    lengths = read_index(path).lengths
    parts = (lengths[start : start + DOCUMENTS_AT_ONCE] for start in range(0, len(lengths), DOCUMENTS_AT_ONCE))
    return count_lengths(parts, advance)


def count_lengths(parts: Iterable[npt.NDArray[np.int32]], advance: Callable[[int], None]) -> Lengths:
    """The distribution of lengths that come in parts."""
    counts = np.zeros(COUNTED_BELOW, np.int64)
    long: list[npt.NDArray[np.int64]] = []
    for part in parts:
        short = part < COUNTED_BELOW
        counts += np.bincount(part[short], minlength=COUNTED_BELOW)
        if not short.all():
            long.append(part[~short].astype(np.int64))
        advance(part.nbytes)
    values = np.flatnonzero(counts)
    rest = np.concatenate(long) if long else np.zeros(0, np.int64)
    return _collected(np.concatenate((values, rest)), np.concatenate((counts[values], np.ones(len(rest), np.int64))))


def _collected(values: npt.NDArray[np.int64], documents: npt.NDArray[np.int64]) -> Lengths:
    distinct, place = np.unique(values, return_inverse=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, place, documents)
    return Lengths(distinct, total)
