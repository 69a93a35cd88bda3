"""Figure of a study's learning rates: loss against the peak rate at each model size, one panel per
variant, and a panel of the optimum against the size.
"""

from __future__ import annotations

import math
from typing import Any

from fem_common.plot import QUIET, colour_of, plain_axes
from fem_common.text import count
from tools.scaling.results import LearningRateFit, LearningRateOptimum, StudyFit

from .losses import size_words
from .style import (
    WIDEST,
    draw_law,
    error_bars,
    headed,
    law_text,
    legend_below,
    log_axis,
    looks_of,
    marked,
    star,
    titled_figure,
)


def learning_rate(fit: StudyFit) -> Any | None:
    """Return a figure of loss against learning rate, or None if no variant has an optimum.

    It has one panel per variant and one panel with the optima of all variants.
    """
    shown: dict[str, LearningRateFit] = fit.fitted("learning_rate")
    if not any(entry.optima for entry in shown.values()):
        return None
    across = min(len(shown) + 1, WIDEST)
    rows = math.ceil((len(shown) + 1) / across)
    looks = looks_of(_key(optimum) for entry in shown.values() for optimum in entry.optima)
    title = (
        f"{fit.study}: held-out loss against the peak learning rate, and the best rate at each size"
    )
    figure = titled_figure(
        (4.3 * across + 0.5, 3.5 * rows + 0.5 + 0.25 * math.ceil(len(looks) / 3)), title
    )
    grid = figure.subplots(rows, across, squeeze=False).ravel()
    for axes in grid[len(shown) + 1 :]:
        axes.set_visible(False)
    for axes, (name, entry) in zip(grid, shown.items(), strict=False):
        _panel(axes, entry, looks)
        headed(axes, name)
    _optima_panel(grid[len(shown)], fit, shown)
    _legend(figure, looks)
    return figure


def _key(optimum: LearningRateOptimum) -> tuple[float, float]:
    return optimum.parameters, optimum.budget or 0.0


def _panel(
    axes: Any, entry: LearningRateFit, looks: dict[tuple[float, float], dict[str, Any]]
) -> None:
    for optimum in entry.optima:
        look = looks[_key(optimum)]
        axes.plot(optimum.rates, optimum.losses, linestyle="", markersize=5, **look)
        if optimum.curve:
            axes.plot(*zip(*optimum.curve, strict=True), color=look["color"], linewidth=1.3)
        star(axes, optimum.rate.value, optimum.loss, look["color"], is_open=optimum.edge)
    plain_axes(axes, "peak learning rate", "loss, nats per token")
    rates = [rate for optimum in entry.optima for rate in optimum.rates]
    log_axis(axes.xaxis, min(rates) / 1.2, max(rates) * 1.2, "number")


def _optima_panel(axes: Any, fit: StudyFit, shown: dict[str, LearningRateFit]) -> None:
    """Draw the optimum against the size for every variant, with the fitted law.

    Optima at the smallest or largest measured rate have open markers. They are excluded from the
    law.
    """
    optima = [optimum for entry in shown.values() for optimum in entry.optima]
    sizes, rates = (
        [optimum.parameters for optimum in optima],
        [optimum.rate.value for optimum in optima],
    )
    for name, entry in shown.items():
        look = colour_of(list(fit.variants).index(name))
        for optimum in entry.optima:
            face = {"markerfacecolor": "white"} if optimum.edge else {}
            where = [optimum.parameters], [optimum.rate.value]
            axes.errorbar(
                *where, yerr=error_bars([optimum.rate]), markersize=6.5, capsize=2, **look, **face
            )
        words = law_text("best rate", entry.by_parameters, "N") if entry.by_parameters else "no law"
        axes.plot([], [], linewidth=1.7, markersize=6.5, label=f"{name}: {words}", **look)
        if entry.by_parameters is not None:
            draw_law(axes, entry.by_parameters, min(sizes), max(sizes), fit.interval, look)
    axes.legend(loc="upper left", frameon=False, fontsize=8.5)
    plain_axes(axes, size_words(fit), "best peak learning rate")
    log_axis(axes.xaxis, min(sizes) / 1.3, max(sizes) * 1.3, "count")
    # The upper limit leaves space for the legend.
    log_axis(axes.yaxis, min(rates) / 1.6, max(rates) * (1.6 + 0.2 * len(shown)), "number")


def _legend(figure: Any, looks: dict[tuple[float, float], dict[str, Any]]) -> None:
    several = len({budget for _, budget in looks}) > 1
    handles = [marked(linewidth=1.3, markersize=5, **look) for look in looks.values()]
    labels = [
        f"{count(n)} parameters" + (f", {budget:.3g} FLOPs" if several and budget else "")
        for n, budget in looks
    ]
    handles.append(
        marked(linestyle="", marker="*", markersize=11, color=QUIET, markeredgecolor="white")
    )
    labels.append(
        "optimum by Akima interpolation (open: at the smallest or largest rate, no optimum)"
    )
    legend_below(figure, handles, labels, 3)
