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


def smooth(values: Any, width: float) -> Any:
    """Return values of equal distance smoothed by local linear regression with Gaussian weights.

    values: array; NaN and infinities have no weight. width: standard deviation of the weights, in
    values. Unlike a moving average, this adds no lag and does not bend the ends of the curve. The
    memory is quadratic in the number of values.
    """
    import numpy as np

    finite = np.isfinite(values)
    if finite.sum() < 3:
        return values
    numbers = np.arange(len(values))
    distance = numbers[None, :] - numbers[:, None]
    weights = np.exp(-0.5 * (distance / width) ** 2) * finite
    zeroth, first, second = ((weights * distance**power).sum(1) for power in range(3))
    known = np.where(finite, values, 0.0)
    value, moment = weights @ known, (weights * distance) @ known
    spread = zeroth * second - first**2
    # Far from the nearest value, the weights of all values vanish.
    with np.errstate(divide="ignore", invalid="ignore"):
        return (second * value - first * moment) / spread


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
