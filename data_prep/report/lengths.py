"""Distribution of document lengths: exact counts of every length, and a figure of them.

The number of documents is not limited by memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_prep.aliases import Advance, Int32Array, Int64Array
from data_prep.prepared.indexed import DOCUMENTS_AT_ONCE
from fem_common.plot import COLOURS, INK, new_figure, plain_axes, png
from fem_common.text import count


@dataclass(frozen=True)
class Lengths:
    """Distribution of document lengths.

    values: int64 [k], distinct lengths (ids including EOD), ascending.
    documents: int64 [k], number of documents of each length.
    """

    values: Int64Array
    documents: Int64Array

    @property
    def total(self) -> int:
        """Number of documents."""
        return int(self.documents.sum())

    @property
    def tokens(self) -> int:
        """Number of ids of all documents."""
        return int((self.values * self.documents).sum())

    def quantile(self, share: float) -> int:
        """Return the smallest length that at least ``share`` of the documents do not exceed.

        ``share`` is between 0 and 1.
        """
        return self._at(self.documents, share)

    def token_quantile(self, share: float) -> int:
        """Return the smallest length L for which documents up to L contain ``share`` of the tokens.

        ``share`` is between 0 and 1.
        """
        return self._at(self.values * self.documents, share)

    def _at(self, weights: Int64Array, share: float) -> int:
        reached = np.cumsum(weights)
        return int(
            self.values[np.searchsorted(reached, share * reached[-1]).clip(max=len(reached) - 1)]
        )

    def at_most(self, length: int) -> tuple[float, float]:
        """Return (share of documents, share of tokens) of the documents up to ``length`` ids."""
        end = int(np.searchsorted(self.values, length, side="right"))
        tokens = int((self.values[:end] * self.documents[:end]).sum())
        return int(self.documents[:end].sum()) / self.total, tokens / self.tokens


def joined(parts: Iterable[Lengths]) -> Lengths:
    """Return the distribution of the union of several sets of documents."""
    parts = list(parts)
    values = np.concatenate([part.values for part in parts])
    documents = np.concatenate([part.documents for part in parts])
    distinct, place = np.unique(values, return_inverse=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, place, documents)
    return Lengths(distinct, total)


def count_lengths(lengths: Int32Array, advance: Advance) -> Lengths:
    """Return the distribution of the array ``lengths`` [n], which may be memory-mapped.

    The array is read in parts, and ``advance`` is called with the number of bytes of each part.
    """
    found = []
    for start in range(0, max(1, len(lengths)), DOCUMENTS_AT_ONCE):
        part = lengths[start : start + DOCUMENTS_AT_ONCE]
        values, documents = np.unique(part, return_counts=True)
        found.append(Lengths(values.astype(np.int64), documents))
        advance(part.nbytes)
    return joined(found)


MANY = 5000  # with fewer documents, narrow bins are too noisy
MARKS = {0.05: ":", 0.5: "--", 0.95: "-."}  # quantile of the documents -> line style


def draw_lengths(lengths: Lengths, title: str) -> bytes:
    """Return a PNG with two plots of the distribution.

    The upper plot shows the shares of documents and tokens by length, with quantiles. The lower
    plot shows the share of documents and tokens in documents up to a length.
    """
    figure = new_figure((10, 7.5))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    edges = _edges(lengths)
    doublings = np.diff(np.log2(edges))
    kinds = (
        (lengths.documents, "documents", COLOURS[0]),
        (lengths.values * lengths.documents, "tokens", COLOURS[1]),
    )
    for weights, what, colour in kinds:
        share = (
            np.histogram(lengths.values, edges, weights=weights / weights.sum())[0]
            / doublings
            * 100
        )
        above.stairs(share, edges, fill=True, color=colour, alpha=0.22)
        above.stairs(
            share, edges, color=colour, linewidth=1.8, label=f"{count(weights.sum())} {what}"
        )
        below.step(
            lengths.values,
            np.cumsum(weights) / weights.sum() * 100,
            where="post",
            color=colour,
            linewidth=1.8,
        )
    marks = [
        (lengths.quantile(mark), COLOURS[0], style, f"{mark:.0%} of the documents")
        for mark, style in MARKS.items()
    ]
    marks.append((lengths.token_quantile(0.5), COLOURS[1], "--", "half of the tokens"))
    for length, colour, style, what in marks:
        label = f"{what}: {length:,}"
        above.axvline(length, color=colour, linewidth=1.1, linestyle=style, label=label)
    above.legend(loc="upper left", frameon=False, fontsize=10)
    above.set_title(title, loc="left", fontsize=12, color=INK, pad=12)
    # All documents except the outermost.
    low = max(lengths.quantile(0.0005) / 1.5, 0.7)
    high = lengths.quantile(0.9998) * 1.5
    below.set_xscale("log", base=2)
    below.set_xlim(low, max(high, low * 16))
    below.xaxis.set_major_formatter(
        lambda value, _: f"{value:g}" if value < 1024 else f"{value / 1024:g}k"
    )
    below.set_ylim(0, 108)
    plain_axes(above, y="share for each doubling of length, %", grid="x")
    plain_axes(
        below,
        "length of a document, tokens (EOD included)",
        "share in documents up to a length, %",
        grid="both",
    )
    for axes in (above, below):
        axes.minorticks_off()
    return png(figure)


def _edges(lengths: Lengths) -> npt.NDArray[np.float64]:
    """Return the bin edges of a histogram, six or three per doubling of the length.

    The edges are between integers, and every bin contains at least one possible length.
    """
    per_doubling = 6 if lengths.total >= MANY else 3
    last = np.ceil(np.log2(max(int(lengths.values[-1]), 2))) + 1
    return np.unique(np.round(2 ** np.arange(0, last, 1 / per_doubling))) - 0.5
