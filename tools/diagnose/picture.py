"""Picture of the diagnostics: a row per layer (and iteration) and a column per quantity.

Each column is shaded from its minimum to its maximum.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from fem_common.plot import GRID, QUIET, new_figure, save

LEAST, GREATEST, ABSENT = "#ffffff", "#56a3d9", "#efefef"


def table(values: dict[str, float]) -> tuple[list[str], list[str], np.ndarray]:
    """Return row labels, column labels and numbers [rows, columns].

    A number is NaN if the layer does not have the quantity.

    ``layer_03/mixer/step_norm`` is in row "layer 3", column "mixer: step norm". The columns of
    mixers precede those of MLPs.
    """
    cells: dict[tuple[str, tuple[str, str]], float] = {}
    for name, value in values.items():
        *place, part, quantity = name.split("/")
        row = ", ".join(_numbered(word) for word in place)
        cells[row, (part, quantity)] = value
    rows = list(dict.fromkeys(row for row, _ in cells))
    columns = list(dict.fromkeys(column for _, column in cells))
    columns.sort(key=lambda column: column[0] != "mixer")
    numbers = np.array([[cells.get((row, column), math.nan) for column in columns] for row in rows])
    return rows, [f"{part}: {_in_words(quantity)}" for part, quantity in columns], numbers


def _numbered(word: str) -> str:
    """Return ``layer_03`` as ``layer 3``."""
    kind, _, number = word.rpartition("_")
    return f"{kind} {int(number)}"


def _in_words(quantity: str) -> str:
    words = quantity.replace("_", " ")
    return f"{words}%" if words[-1].isdigit() else words


def draw(values: dict[str, float], title: str, file: Path) -> None:
    """Draw the diagnostics as a table with shaded cells and write it to ``file`` as PNG."""
    from matplotlib.colors import LinearSegmentedColormap

    rows, columns, numbers = table(values)
    size = (1.9 + 0.74 * len(columns), 2.6 + 0.31 * len(rows))
    figure = new_figure(size)
    axes = figure.subplots()
    shades = LinearSegmentedColormap.from_list("shades", [LEAST, GREATEST]).with_extremes(
        bad=ABSENT
    )
    axes.imshow(shade(numbers), cmap=shades, vmin=0.0, vmax=1.0, aspect="auto")
    for (row, column), number in np.ndenumerate(numbers):
        if not math.isnan(number):
            axes.text(column, row, f"{number:.3g}", ha="center", va="center", fontsize=8)
    axes.set_xticks(
        range(len(columns)), columns, rotation=40, ha="left", rotation_mode="anchor", fontsize=9
    )
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.xaxis.tick_top()
    axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color=GRID, linewidth=0.7)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(
        f"{title}\nshade: from a column's minimum to its maximum; "
        "grey: the layer does not have this quantity",
        loc="left",
        fontsize=9,
        color=QUIET,
    )
    save(figure, file)


def shade(numbers: np.ndarray) -> np.ndarray:
    """Map each column's finite numbers to 0 .. 1, and to 0 if all are equal; NaN stays NaN."""
    finite = np.where(np.isfinite(numbers), numbers, np.nan)
    known = np.isfinite(finite).any(axis=0)
    low = np.full(numbers.shape[1], np.nan)
    high = low.copy()
    low[known] = np.nanmin(finite[:, known], axis=0)
    high[known] = np.nanmax(finite[:, known], axis=0)
    span = np.where(high > low, high - low, 1.0)
    shaded: np.ndarray = (finite - low) / span
    return shaded
