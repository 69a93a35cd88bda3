"""The learning rates' picture: loss against the peak rate at each size, a panel a variant, and the optimum against size."""

from __future__ import annotations

import math
from typing import Any

from fem_common.plot import QUIET, colour_of, new_figure, ordered_colours, plain_axes
from fem_common.text import count
from tools.scaling.pictures.losses import size_words
from tools.scaling.pictures.style import WIDEST, draw_law, error_bars, law_text, legend_below, log_ticks, marked
from tools.scaling.results import LearningRateFit, LearningRateOptimum, StudyFit


def learning_rate(fit: StudyFit) -> Any | None:
    """A figure: panels of the variants, then the optima of all; None where no variant has a learning-rate fit."""
    shown = {name: variant.learning_rate for name, variant in fit.variants.items() if variant.learning_rate is not None}
    if not any(entry.optima for entry in shown.values()):
        return None
    count = len(shown) + 1
    across = min(count, WIDEST)
    rows = math.ceil(count / across)
    keys = sorted({_key(optimum) for entry in shown.values() for optimum in entry.optima})
    figure = new_figure((4.3 * across + 0.5, 3.5 * rows + 0.5 + 0.25 * math.ceil(len(keys) / 3)))
    figure.suptitle(
        f"{fit.study}: held-out loss against the peak learning rate, and the best rate at each size", x=0.01, ha="left", fontsize=11
    )
    grid = figure.subplots(rows, across, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.set_visible(False)
    looks = dict(zip(keys, ordered_colours(len(keys)), strict=True))
    for axes, (name, entry) in zip(grid, shown.items(), strict=False):
        _panel(axes, entry, looks)
        axes.set_title(name, loc="left", fontsize=9.5)
    _optima_panel(grid[count - 1], fit, shown)
    _legend(figure, looks)
    return figure


def _key(optimum: LearningRateOptimum) -> tuple[float, float]:
    return optimum.parameters, optimum.budget or 0.0


def _panel(axes: Any, entry: LearningRateFit, looks: dict[tuple[float, float], dict[str, Any]]) -> None:
    for optimum in entry.optima:
        look = looks[_key(optimum)]
        axes.plot(optimum.rates, optimum.losses, linestyle="", markersize=5, **look)
        if optimum.curve:
            axes.plot(*zip(*optimum.curve, strict=True), color=look["color"], linewidth=1.3)
        inner = {"color": look["color"], "markeredgecolor": "white"}
        edge = {"color": "white", "markeredgecolor": look["color"]}
        axes.plot([optimum.rate.value], [optimum.loss], marker="*", markersize=13, zorder=3, **(edge if optimum.edge else inner))
    plain_axes(axes, "peak learning rate", "loss, nats a token")
    axes.set_xscale("log")
    rates = [rate for optimum in entry.optima for rate in optimum.rates]
    low, high = min(rates) / 1.2, max(rates) * 1.2
    axes.set_xlim(low, high)
    log_ticks(axes.xaxis, low, high, "number")


def _optima_panel(axes: Any, fit: StudyFit, shown: dict[str, LearningRateFit]) -> None:
    """The optima against size; those on the edge of the rates are open and made no law."""
    sizes = [optimum.parameters for entry in shown.values() for optimum in entry.optima]
    low, high = min(sizes) / 1.3, max(sizes) * 1.3
    for number, name in enumerate(fit.variants):
        if name not in shown:
            continue
        look, entry = colour_of(number), shown[name]
        for optimum in entry.optima:
            face = {"markerfacecolor": "white"} if optimum.edge else {}
            axes.errorbar(
                [optimum.parameters], [optimum.rate.value], yerr=error_bars([optimum.rate]), markersize=6.5, capsize=2, **look, **face
            )
        words = f"{name}: {law_text('best rate', entry.by_parameters, 'N')}" if entry.by_parameters else f"{name}: no law"
        axes.plot([], [], linewidth=1.7, markersize=6.5, label=words, **look)
        if entry.by_parameters is not None:
            draw_law(axes, entry.by_parameters, min(sizes), max(sizes), fit.interval, look)
    axes.legend(loc="upper left", frameon=False, fontsize=8.5)
    plain_axes(axes, size_words(fit), "best peak learning rate")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    log_ticks(axes.xaxis, low, high, "count")
    rates = [optimum.rate.value for entry in shown.values() for optimum in entry.optima]
    bottom, top = min(rates) / 1.6, max(rates) * (1.6 + 0.2 * len(shown))  # and the legend above
    axes.set_ylim(bottom, top)
    log_ticks(axes.yaxis, bottom, top, "number")


def _legend(figure: Any, looks: dict[tuple[float, float], dict[str, Any]]) -> None:
    several = len({budget for _, budget in looks}) > 1
    handles = [marked(linewidth=1.3, markersize=5, **look) for look in looks.values()]
    labels = [f"{count(n)} parameters" + (f", {budget:.3g} FLOPs" if several and budget else "") for n, budget in looks]
    handles.append(marked(linestyle="", marker="*", markersize=11, color=QUIET, markeredgecolor="white"))
    labels.append("optimum by Akima interpolation (open: on the edge of the rates, no optimum)")
    legend_below(figure, handles, labels, 3)
