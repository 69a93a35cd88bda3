"""What the pictures of a study share beside the style of all: panels, axes with ticks that can be read, laws with their bands, numbers.

A variant has a colour of Okabe and Ito's and a marker of its own; budgets, which have an order, go from dark to light.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fem_common.plot import new_figure, ordered_colours, plain_axes
from fem_common.text import count as count_text
from tools.scaling.laws import Estimate, PowerLaw

WIDEST = 3  # panels side by side


def panels(
    count: int, title: str, panel: tuple[float, float] = (4.3, 3.6), below: float = 0.9
) -> tuple[Any, list[Any]]:
    """A figure with a title and ``count`` panels, at most WIDEST side by side, and inches ``below`` them for a legend; all axes shared."""
    across = 2 if count == 4 else min(count, WIDEST)
    rows = math.ceil(count / across)
    figure = titled_figure((max(6.4, panel[0] * across + 0.5), panel[1] * rows + below), title)
    grid = figure.subplots(rows, across, squeeze=False, sharex=True, sharey=True).ravel()
    for number, axes in enumerate(grid):
        axes.set_visible(number < count)
        axes.tick_params(labelbottom=number + across >= count)  # nothing under it
    return figure, list(grid[:count])


def titled_figure(size: tuple[float, float], title: str, fontsize: float = 11) -> Any:
    """A figure of so many inches with its title above all panels."""
    figure = new_figure(size)
    figure.suptitle(title, x=0.01, ha="left", fontsize=fontsize)
    return figure


def headed(axes: Any, title: str, fontsize: float = 9.5) -> None:
    """A panel's own title."""
    axes.set_title(title, loc="left", fontsize=fontsize)


def looks_of(values: Iterable[Any]) -> dict[Any, dict[str, Any]]:
    """A colour and a marker for each of the values, in their order."""
    keys = sorted(set(values))
    return dict(zip(keys, ordered_colours(len(keys)), strict=True))


def star(axes: Any, x: float, y: float, color: Any, *, is_open: bool) -> None:
    """An optimum; ``is_open``: it is on the edge of what was measured, and none."""
    face = (
        {"color": "white", "markeredgecolor": color}
        if is_open
        else {"color": color, "markeredgecolor": "white"}
    )
    axes.plot([x], [y], marker="*", markersize=13, zorder=3, **face)


def outer_labels(grid: Sequence[Any], x: str, y: str) -> None:
    """Axis labels of panels that share their axes: under the lowest of each column, beside the first of each row."""
    across = grid[0].get_subplotspec().get_gridspec().ncols
    for number, axes in enumerate(grid):
        plain_axes(
            axes, x if number + across >= len(grid) else "", y if number % across == 0 else ""
        )


def log_axis(axis: Any, low: float, high: float, kind: str) -> None:
    """A logarithmic axis, and those that share it, from ``low`` to ``high``, with ticks at decades, or 1-2-5 steps where there are few.

    ``kind``: "count" (12M, 3.4B), "flops" (3·10¹⁸) or "number".
    """
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for steps in (
        (1,),
        (1, 3),
        (1, 2, 5),
        (1, 1.5, 2, 3, 4, 5, 6, 8),
        tuple(np.arange(1.0, 10.0, 0.1).round(1)),
    ):
        inside = [
            step * 10.0**decade
            for decade in decades
            for step in steps
            if low <= step * 10.0**decade <= high
        ]
        if len(inside) >= 3:
            break
    while len(inside) > 7:
        inside = inside[::2]
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    axis.set_major_locator(FixedLocator(inside))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    text = {"count": count_text, "flops": flops_text, "number": "{:.4g}".format}[kind]
    axis.set_major_formatter(lambda value, _: text(value))


def flops_text(value: float) -> str:
    """3·10¹⁸, in letters that need no mathematics mode."""
    decade = math.floor(math.log10(value) + 1e-9)
    power = f"10{str(decade).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    factor = f"{value / 10.0**decade:.3g}"
    return power if factor == "1" else f"{factor}·{power}"


def interval_text(estimate: Estimate, digits: str = ".2f") -> str:
    """0.49 (0.45–0.53), −0.35 (−0.37 to −0.33); the value alone where nothing was resampled."""
    return estimate.text(digits).replace("-", "−")


def law_text(what: str, law: PowerLaw, of: str) -> str:
    """N ∝ C^0.49 (0.45–0.53)."""
    return f"{what} ∝ {of}^{interval_text(law.exponent)}"


def draw_law(
    axes: Any, law: PowerLaw, low: float, high: float, interval: float, look: dict[str, Any]
) -> None:
    """A power law as a line from ``low`` to ``high``, its band behind it."""
    x = np.geomspace(low, high, 60)
    axes.plot(x, law.at(x), color=look["color"], linewidth=1.7)
    band = law.band(x, interval)
    if band is not None:
        axes.fill_between(x, *band, color=look["color"], alpha=0.16, linewidth=0)


def error_bars(estimates: Sequence[Estimate]) -> Any:
    """Distances below and above the values, for errorbar; None where one has no interval."""
    if any(estimate.low is None or estimate.high is None for estimate in estimates):
        return None
    below = [max(0.0, estimate.value - (estimate.low or 0.0)) for estimate in estimates]
    above = [max(0.0, (estimate.high or 0.0) - estimate.value) for estimate in estimates]
    return np.array([below, above])


def legend_below(figure: Any, handles: Sequence[Any], labels: Sequence[str], columns: int) -> None:
    """One legend under all panels."""
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=max(1, min(columns, len(labels))),
        frameon=False,
        fontsize=9,
    )


def marked(**look: Any) -> Any:
    """A legend's handle: a line, its marker or both."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)
