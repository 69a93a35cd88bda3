"""One style for all pictures: colours and marks apart for every kind of colour vision, quiet axes, figures that no window knows.

matplotlib is imported where a figure is made: it takes a second, which --help need not wait.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from fem_common.files import write_whole

# Okabe and Ito's colours; the yellow, too faint for a line on white, left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
INK, QUIET, GRID = "#222222", "#555555", "#e6e6e6"
DPI = 150


def new_figure(size: tuple[float, float]) -> Any:
    """A figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """The figure as a PNG file's content: the same bytes for the same figure."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def save(figure: Any, path: Path) -> None:
    """Write the figure as PNG, whole or not at all."""
    write_whole(path, png(figure))


def plain_axes(axes: Any, x: str = "", y: str = "", *, grid: str = "both") -> None:
    """Axis labels, no box, a faint grid behind; ``grid``: the axis that it belongs to, x, y or both."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def colour_of(number: int) -> dict[str, Any]:
    """Colour and marker of the thing with this number."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def ordered_colours(count: int) -> list[dict[str, Any]]:
    """Colours and markers of ``count`` things that have an order, dark to light."""
    from matplotlib import colormaps

    places = [0.85 * number / (count - 1) for number in range(count)] if count > 1 else [0.3]
    return [
        {"color": colormaps["viridis"](place), "marker": MARKERS[number % len(MARKERS)]}
        for number, place in enumerate(places)
    ]
