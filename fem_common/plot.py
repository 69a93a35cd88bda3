"""Common style of all matplotlib figures, and functions to create and save them.

The colours and markers are distinguishable with every kind of colour vision. Figures are drawn
without a window. matplotlib is imported only when a figure is made, because the import takes a
second and would delay --help.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from fem_common.files import write_atomically

# Colours of Okabe and Ito without yellow, which is too faint for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
INK, QUIET, GRID = "#222222", "#555555", "#e6e6e6"
DPI = 150


def new_figure(size: tuple[float, float]) -> Any:
    """Return an empty matplotlib figure; ``size`` is (width, height) in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """Return the figure as the content of a PNG file; the same figure gives the same bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def save(figure: Any, path: Path) -> None:
    """Write the figure as a PNG file atomically."""
    write_atomically(path, png(figure))


def plain_axes(axes: Any, x: str = "", y: str = "", *, grid: str = "both") -> None:
    """Set axis labels, remove the upper and right frame lines, and draw a light grid.

    ``grid`` names the axis of the grid lines: x, y or both.
    """
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def colour_of(number: int) -> dict[str, Any]:
    """Return matplotlib keywords with the colour and marker of series ``number``."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def ordered_colours(count: int) -> list[dict[str, Any]]:
    """Return matplotlib keywords for ``count`` series that have an order, from dark to light."""
    from matplotlib import colormaps

    places = [0.85 * number / (count - 1) for number in range(count)] if count > 1 else [0.3]
    return [
        {"color": colormaps["viridis"](place), "marker": MARKERS[number % len(MARKERS)]}
        for number, place in enumerate(places)
    ]
