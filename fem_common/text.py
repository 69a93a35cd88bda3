"""Formatting of numbers, times and words for messages.

The module uses only the standard library.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence


def first_few(items: Sequence[str], most: int, between: str = ", ") -> str:
    """Join the first ``most`` items, followed by the number of remaining items.

    Example: ``a, b and 3 more``.
    """
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return between.join(items[:most]) + more


def ranges(numbers: Iterable[int], between: str = ", ") -> str:
    """Format numbers in ascending order as ranges: ``1, 3-5, 9``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return between.join("-".join(map(str, run)) for run in runs)


def count(number: float) -> str:
    """Format a number with a magnitude suffix, for example 950, 12.3k, 4.56M, 1.2B, 3T."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit * 0.9995:  # 999,600 is 1M, not 1e+03k
            return f"{number / unit:.3g}{suffix}"
    return f"{number:.0f}"


def si(number: float) -> str:
    """Format a number with an SI prefix, to be followed by a unit: ``1.234 P`` (of FLOPs).

    Below a million the number has no prefix, but the space: ``12 ``.
    """
    for unit, prefix in (
        (1e21, "Z"),
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
    ):
        if number >= unit:
            return f"{number / unit:.4g} {prefix}"
    return f"{number:,.0f} "


def size(number: float) -> str:
    """Format bytes of files in powers of 1000: 950 B, 12.3 kB, 4.56 MB, 1.2 GB, 3 TB."""
    for unit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {suffix}"
    return f"{number:.0f} B"


def gib(number: float) -> str:
    """Format bytes of memory in powers of 1024: 1.25 GiB, 12.0 MiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 / 10 else f"{number / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Format seconds with at most two units: 12s, 3m 05s, 4h 10m, 2d 03h; ``?`` if not finite."""
    if not math.isfinite(seconds):
        return "?"
    full = round(seconds)
    if full < 60:
        return f"{full}s"
    if full < 3600:
        return f"{full // 60}m {full % 60:02}s"
    if full < 86400:
        return f"{full // 3600}h {full % 3600 // 60:02}m"
    return f"{full // 86400}d {full % 86400 // 3600:02}h"


def counted(number: int, what: str) -> str:
    """Format a number with a noun in singular or plural: 1 unit, 2,000 units, 2 processes."""
    if number == 1:
        ending = ""
    elif what.endswith("s"):
        ending = "es"
    else:
        ending = "s"
    return f"{number:,} {what}{ending}"


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] | None = None) -> list[str]:
    """Return rows of cells as lines with aligned columns.

    Columns in ``left`` (None: all columns) are aligned to the left, other columns to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if left is None or number in left else ">" for number in range(len(widths))]
    lines = []
    for row in rows:
        cells = [
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return cells, which must contain no ``|``, as a Markdown table without a final line break."""
    first, *others = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([first, "|---" * len(head) + "|", *others])


def one_line(message: object, longest: int = 0) -> str:
    """Return the text of a message or an exception on one line.

    The line is cut to ``longest`` characters; 0 means no limit. An exception without text gives the
    name of its type.
    """
    text = " ".join(str(message).split()) or (
        type(message).__name__ if isinstance(message, BaseException) else ""
    )
    return text if not longest or len(text) <= longest else f"{text[: longest - 1].rstrip()}…"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the entry of ``known`` most similar to ``word``, or None if no entry is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), 1, cutoff)), None)


def did_you_mean(word: str, known: Sequence[str], otherwise: str = "choose one of") -> str:
    """Return the end of a message about an unknown word: a suggestion or a list.

    The text suggests the most similar of the ``known`` words. If no word is similar, it is
    ``otherwise`` followed by all known words.
    """
    near = nearest(word, known)
    return f"did you mean {near}?" if near else f"{otherwise} {', '.join(known)}"
