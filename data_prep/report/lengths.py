"""data_prep: how long documents are: exact counts of every length, of any number of documents, and their picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.store.indexed import DOCUMENTS_AT_ONCE
from fem_common.plot import COLOURS, INK, QUIET, new_figure, plain_axes, png
from fem_common.text import count


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


def joined(parts: Iterable[Lengths]) -> Lengths:
    """The lengths of several sets of documents as one."""
    values, documents = (np.concatenate(column) for column in zip(*((part.values, part.documents) for part in parts), strict=True))
    distinct, place = np.unique(values, return_inverse=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, place, documents)
    return Lengths(distinct, total)


def count_lengths(lengths: npt.NDArray[np.int32], advance: Callable[[int], None]) -> Lengths:
    """The distribution of lengths [n], which may be mapped: they are read in parts, and ``advance`` hears of bytes read."""
    found = []
    for start in range(0, max(1, len(lengths)), DOCUMENTS_AT_ONCE):
        part = lengths[start : start + DOCUMENTS_AT_ONCE]
        values, documents = np.unique(part, return_counts=True)
        found.append(Lengths(values.astype(np.int64), documents))
        advance(part.nbytes)
    return joined(found)


DOCUMENTS, TOKENS = COLOURS[:2]
MANY = 5000  # documents, from which on narrow bins show the shape rather than chance
MARKS = (0.05, 0.5, 0.95)
SMALLEST_NAMED = 6.0  # percent; a number beside a lower point would stand on the axis


def draw_lengths(lengths: Lengths, title: str, marks: tuple[int, ...]) -> bytes:
    """A PNG: above, shares of documents and of tokens by length with the documents' quantiles; below, what is in documents up to a length,
    with numbers at the ``marks`` (ids)."""
    figure = new_figure((10, 7.5))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _histogram(above, lengths)
    _cumulative(below, lengths, marks)
    above.set_title(title, loc="left", fontsize=12, color=INK, pad=12)
    low, high = _limits(lengths)
    below.set_xscale("log", base=2)
    below.set_xlim(low, high)
    ticks = 2.0 ** np.arange(np.ceil(np.log2(low)), np.floor(np.log2(high)) + 1)
    below.set_xticks(ticks, [_power(tick) for tick in ticks])
    plain_axes(above, y="share for each doubling of length, %", grid="x")
    plain_axes(below, "length of a document, tokens (EOD included)", "share in documents up to a length, %", grid="x")
    for axes in (above, below):
        axes.minorticks_off()
    return png(figure)


def _limits(lengths: Lengths) -> tuple[float, float]:
    """All but the outermost documents, at least four doublings."""
    low, high = max(lengths.quantile(0.0005) / 1.5, 0.7), lengths.quantile(0.9998) * 1.5
    return low, max(high, low * 16)


def _power(value: float) -> str:
    return f"{value:.0f}" if value < 1024 else f"{value / 1024:.0f}k" if value < 2**20 else f"{value / 2**20:.0f}M"


def _edges(lengths: Lengths) -> npt.NDArray[np.float64]:
    """Edges between integers, six or three a doubling: every bin holds at least one possible length."""
    per_doubling = 6 if lengths.total >= MANY else 3
    last = np.ceil(np.log2(max(int(lengths.values[-1]), 2))) + 1
    return np.unique(np.round(2 ** np.arange(0, last, 1 / per_doubling))) - 0.5


def _histogram(axes: Any, lengths: Lengths) -> None:
    edges = _edges(lengths)
    doublings = np.diff(np.log2(edges))
    for weights, colour, label in (
        (lengths.documents, DOCUMENTS, f"{count(lengths.total)} documents"),
        (lengths.values * lengths.documents, TOKENS, f"{count(lengths.tokens)} tokens"),
    ):
        share = np.histogram(lengths.values, edges, weights=weights / weights.sum())[0] / doublings * 100
        axes.stairs(share, edges, fill=True, color=colour, alpha=0.22)
        axes.stairs(share, edges, color=colour, linewidth=1.8, label=label)
    top = axes.get_ylim()[1] * 1.16
    axes.set_ylim(0, top)
    for number, mark in enumerate(MARKS):
        name = "median" if mark == 0.5 else f"{mark:.0%}"
        _upright(axes, lengths.quantile(mark), top, name, DOCUMENTS, left=number == 0)
    _upright(axes, lengths.token_quantile(0.5), top * 0.93, "half of the tokens", TOKENS, left=False)
    axes.legend(loc="upper left", frameon=False, fontsize=10, bbox_to_anchor=(0.0, 0.86))


def _upright(axes: Any, length: int, top: float, name: str, colour: str, *, left: bool) -> None:
    axes.axvline(length, color=colour, linewidth=1.1, linestyle=(0, (4, 3)))
    beside, where = (-5, "right") if left else (5, "left")
    text = axes.annotate(f"{name}: {length:,}", (length, top), (beside, -4), textcoords="offset points", ha=where, va="top", fontsize=9)
    text.set(color=colour, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0}, zorder=5)


def _cumulative(axes: Any, lengths: Lengths, marks: tuple[int, ...]) -> None:
    for weights, colour in ((lengths.documents, DOCUMENTS), (lengths.values * lengths.documents, TOKENS)):
        axes.step(lengths.values, np.cumsum(weights) / weights.sum() * 100, where="post", color=colour, linewidth=1.8)
    low, high = _limits(lengths)
    for mark in marks:
        if low < mark < high:
            documents, tokens = (100 * share for share in lengths.at_most(mark))
            axes.plot([mark, mark], [0, documents], color=QUIET, linewidth=0.8, zorder=1)
            for share, colour, beside, where in ((documents, DOCUMENTS, (-5, 3), "right"), (tokens, TOKENS, (5, -12), "left")):
                axes.plot(mark, share, "o", color=colour, markersize=4)
                if share >= SMALLEST_NAMED:
                    axes.annotate(_percent(share), (mark, share), beside, textcoords="offset points", ha=where, fontsize=8, color=colour)
    axes.set_ylim(0, 108)
    axes.set_yticks([0, 25, 50, 75, 100])


def _percent(share: float) -> str:
    return f"{share:.1f}%" if 0.05 <= share < 99.95 else f"{share:.0f}%"
