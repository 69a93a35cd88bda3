"""Shared style of a study's figures: panels, log axes with readable ticks, power laws with
confidence bands, formatted numbers.

Each variant has a marker and a colour of the palette of Okabe and Ito. Budgets, which are ordered,
have colours from dark to light.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fem_common.plot import new_figure, ordered_colours, plain_axes
from fem_common.text import count as count_text
from tools.scaling.laws import Estimate, PowerLaw

WIDEST = 3  # largest number of panels in a row


def panels(
    count: int, title: str, panel: tuple[float, float] = (4.3, 3.6), below: float = 0.9
) -> tuple[Any, list[Any]]:
    """Return a figure with a title and ``count`` panels with shared axes, at most WIDEST per row,
    and ``below`` inches for a legend under them.
    """
    across = 2 if count == 4 else min(count, WIDEST)
    rows = math.ceil(count / across)
    figure = titled_figure((max(6.4, panel[0] * across + 0.5), panel[1] * rows + below), title)
    grid = figure.subplots(rows, across, squeeze=False, sharex=True, sharey=True).ravel()
    for number, axes in enumerate(grid):
        axes.set_visible(number < count)
        # Tick labels only if no panel is below this one.
        axes.tick_params(labelbottom=number + across >= count)
    return figure, list(grid[:count])


def titled_figure(size: tuple[float, float], title: str, fontsize: float = 11) -> Any:
    """Return a figure of ``size`` inches with its title above all panels."""
    figure = new_figure(size)
    figure.suptitle(title, x=0.01, ha="left", fontsize=fontsize)
    return figure


def headed(axes: Any, title: str, fontsize: float = 9.5) -> None:
    """Set the title of a panel."""
    axes.set_title(title, loc="left", fontsize=fontsize)


def looks_of(values: Iterable[Any]) -> dict[Any, dict[str, Any]]:
    """Return a colour and a marker for each distinct value, in ascending order and from dark to
    light.
    """
    keys = sorted(set(values))
    return dict(zip(keys, ordered_colours(len(keys)), strict=True))


def star(axes: Any, x: float, y: float, color: Any, *, is_open: bool) -> None:
    """Draw an optimum as a star.

    is_open: draw it open, because it is at the edge of the measured range and therefore no optimum.
    """
    face = (
        {"color": "white", "markeredgecolor": color}
        if is_open
        else {"color": color, "markeredgecolor": "white"}
    )
    axes.plot([x], [y], marker="*", markersize=13, zorder=3, **face)


def outer_labels(grid: Sequence[Any], x: str, y: str) -> None:
    """Label only the outer axes of panels that share their axes: ``x`` below the lowest panel of
    each column, ``y`` left of the first panel of each row.
    """
    across = grid[0].get_subplotspec().get_gridspec().ncols
    for number, axes in enumerate(grid):
        plain_axes(
            axes, x if number + across >= len(grid) else "", y if number % across == 0 else ""
        )


def log_axis(axis: Any, low: float, high: float, kind: str) -> None:
    """Make an axis, and all axes that share it, logarithmic from ``low`` to ``high``.

    The ticks are at decades, or at finer steps if the range contains fewer than three of them; at
    most 7 ticks. ``kind``, the format of the labels: "count" (12M, 3.4B), "flops" (3·10¹⁸) or
    "number".
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
    """Format a number of FLOPs as 3·10¹⁸, in plain characters without TeX."""
    decade = math.floor(math.log10(value) + 1e-9)
    power = f"10{str(decade).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    factor = f"{value / 10.0**decade:.3g}"
    return power if factor == "1" else f"{factor}·{power}"


def interval_text(estimate: Estimate, digits: str = ".2f") -> str:
    """Format an estimate as 0.49 (0.45–0.53), −0.35 (−0.37 to −0.33).

    Without an interval, the text is only the value.
    """
    return estimate.text(digits).replace("-", "−")


def law_text(what: str, law: PowerLaw, of: str) -> str:
    """Format a power law as N ∝ C^0.49 (0.45–0.53)."""
    return f"{what} ∝ {of}^{interval_text(law.exponent)}"


def draw_law(
    axes: Any, law: PowerLaw, low: float, high: float, interval: float, look: dict[str, Any]
) -> None:
    """Draw a power law from ``low`` to ``high``, with its confidence band if it has one."""
    x = np.geomspace(low, high, 60)
    axes.plot(x, law.at(x), color=look["color"], linewidth=1.7)
    band = law.band(x, interval)
    if band is not None:
        axes.fill_between(x, *band, color=look["color"], alpha=0.16, linewidth=0)


def error_bars(estimates: Sequence[Estimate]) -> Any:
    """Return the distances below and above the values for ``errorbar``, or None if an estimate has
    no interval.
    """
    if any(estimate.low is None or estimate.high is None for estimate in estimates):
        return None
    below = [max(0.0, estimate.value - (estimate.low or 0.0)) for estimate in estimates]
    above = [max(0.0, (estimate.high or 0.0) - estimate.value) for estimate in estimates]
    return np.array([below, above])


def legend_below(figure: Any, handles: Sequence[Any], labels: Sequence[str], columns: int) -> None:
    """Add one legend below all panels."""
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=max(1, min(columns, len(labels))),
        frameon=False,
        fontsize=9,
    )


def marked(**look: Any) -> Any:
    """Return a legend handle: a line, a marker or both."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)
