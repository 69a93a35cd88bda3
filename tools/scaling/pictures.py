"""Figures of a study, created from its fit and table without further computation of results.

They show the loss against model size at equal compute, against the parametric law, against compute
and against the learning rate, and the best model sizes and token counts along the frontier. Each
variant has a marker and a colour of the palette of Okabe and Ito. Budgets, which are ordered, have
colours from dark to light.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fem_common.plot import QUIET, colour_of, new_figure, ordered_colours, plain_axes
from fem_common.text import count as count_text
from tools.scaling.laws import Array, Estimate, PowerLaw
from tools.scaling.results import (
    IsoFlopFit,
    LearningRateFit,
    LearningRateOptimum,
    Residual,
    StudyFit,
    VariantFit,
    optimal,
)
from tools.scaling.study import SIZE_COLUMN, SIZE_WORDS

Style = dict[str, Any]  # matplotlib keywords of a series: colour, marker, line style
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


def styles_of(values: Iterable[Any]) -> dict[Any, Style]:
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
        lowest, first = number + across >= len(grid), number % across == 0
        plain_axes(axes, x if lowest else "", y if first else "")


def log_axis(axis: Any, low: float, high: float, kind: str) -> None:
    """Make an axis, and all axes that share it, logarithmic from ``low`` to ``high``.

    The ticks are at decades, or at finer steps if the range contains fewer than three of them; at
    most 7 ticks. ``kind``, the format of the labels: "count" (12M, 3.4B), "flops" (3·10¹⁸) or
    "number".
    """
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    decades = 10.0 ** np.arange(first, last + 1)
    finest = np.arange(1.0, 10.0, 0.1).round(1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), finest):
        ticks = np.outer(decades, steps).ravel()
        inside = ticks[(low <= ticks) & (ticks <= high)]
        if len(inside) >= 3:
            break
    while len(inside) > 7:
        inside = inside[::2]
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    axis.set_major_locator(FixedLocator(inside.tolist()))
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
    axes: Any, law: PowerLaw, low: float, high: float, interval: float, style: Style
) -> None:
    """Draw a power law from ``low`` to ``high``, with its confidence band if it has one."""
    x = np.geomspace(low, high, 60)
    axes.plot(x, law.at(x), color=style["color"], linewidth=1.7)
    band = law.band(x, interval)
    if band is not None:
        _draw_band(axes, x, band, style)


def _draw_band(axes: Any, x: Array, band: tuple[Array, Array], style: Style) -> None:
    axes.fill_between(x, *band, color=style["color"], alpha=0.16, linewidth=0)


def error_bars(estimates: Sequence[Estimate]) -> Any:
    """Return the distances below and above the values for ``errorbar``, or None if an estimate has
    no interval.
    """
    bounds = [(one.low, one.high) for one in estimates if one.low is not None]
    if len(bounds) < len(estimates):
        return None
    low, high = np.array(bounds, dtype=np.float64).reshape(-1, 2).T
    value = np.array([one.value for one in estimates])
    return np.maximum(0.0, [value - low, high - value])


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


def marked(**style: Any) -> Any:
    """Return a legend handle: a line, a marker or both."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


# --- losses ---------------------------------------------------------------------------------------


def isoflop(fit: StudyFit, final: pd.DataFrame) -> Any | None:
    """Return a figure of loss against model size for each budget, one panel per variant.

    ``final`` are the complete runs. Returns None if no variant has an isoFLOP fit.
    """
    shown: dict[str, IsoFlopFit] = fit.fitted("isoflop")
    if not shown:
        return None
    styles = styles_of(parabola.budget for found in shown.values() for parabola in found.parabolas)
    figure, grid = panels(
        len(shown), f"{fit.study}: held-out loss against model size at equal training compute"
    )
    sizes = final.set_index("run")[SIZE_COLUMN[fit.parameters]].astype(float)
    losses = final.set_index("run")["loss"]
    for axes, (name, found) in zip(grid, shown.items(), strict=True):
        _isoflop_panel(axes, found, sizes, losses, styles)
        law = law_text("best N", found.n_opt, "C") if found.n_opt else "no law through the minima"
        headed(axes, f"{name}: {law}")
    outer_labels(grid, SIZE_WORDS[fit.parameters], "held-out loss, nats per token")
    shown_sizes = sizes[final["variant"].isin(list(shown)).to_numpy()]
    log_axis(grid[0].xaxis, shown_sizes.min() * 0.85, shown_sizes.max() * 1.18, "count")
    labels = [f"{flops_text(budget)} FLOPs" for budget in styles]
    _style_legend(
        figure, styles, labels, "minimum of the parabola (open: outside the measured sizes)"
    )
    return figure


def _isoflop_panel(
    axes: Any,
    found: IsoFlopFit,
    sizes: pd.Series[float],
    losses: pd.Series[float],
    styles: dict[float, Style],
) -> None:
    """Draw the runs and parabolas of one variant; ``sizes`` and ``losses`` are indexed by run."""
    for parabola in found.parabolas:
        style = styles[parabola.budget]
        n, seen = sizes[parabola.runs].to_numpy(), losses[parabola.runs].to_numpy()
        axes.plot(n, seen, linestyle="", markersize=5.5, **style)
        x = np.geomspace(n.min(), n.max(), 80)
        axes.plot(x, parabola.at(x), color=style["color"], linewidth=1.3)
        if parabola.inside:
            star(axes, parabola.n_opt.value, parabola.loss.value, style["color"], is_open=False)
        else:
            star(axes, n[np.argmin(seen)], seen.min(), style["color"], is_open=True)
    minima = [parabola for parabola in found.parabolas if parabola.inside]
    where = (
        [parabola.n_opt.value for parabola in minima],
        [parabola.loss.value for parabola in minima],
    )
    axes.plot(*where, color=QUIET, linewidth=1.0, linestyle=(0, (3, 2)), zorder=1)


def _style_legend(
    figure: Any,
    styles: dict[Any, Style],
    labels: list[str],
    optimum: str = "",
    size: float = 5.5,
) -> None:
    """Add a legend of ``styles``; ``optimum`` is the text of the star, empty without lines and
    stars.
    """
    line = {} if optimum else {"linestyle": ""}
    handles = [marked(**line, linewidth=1.3, markersize=size, **style) for style in styles.values()]
    if optimum:
        handles.append(
            marked(linestyle="", marker="*", markersize=11, color=QUIET, markeredgecolor="white")
        )
        labels = [*labels, optimum]
    legend_below(figure, handles, labels, 3 if optimum else 4)


def residuals(fit: StudyFit) -> Any | None:
    """Return a figure of the deviation of each run from its variant's parametric law, one panel per
    variant; None without a law.
    """
    shown = {
        name: (variant.parametric.noise, variant.residuals)
        for name, variant in fit.variants.items()
        if variant.parametric
    }
    entries = [entry for _, some in shown.values() for entry in some]
    if not entries:
        return None
    styles = styles_of(_group(entry) for entry in entries)
    worst = max(abs(entry.relative) for entry in entries)
    title = (
        f"{fit.study}: measured loss against the parametric law\nlargest distance of a run:"
        f" {100 * worst:.2g}%"
    )
    figure, grid = panels(len(shown), title, panel=(4.3, 3.0))
    for axes, (name, (noise, some)) in zip(grid, shown.items(), strict=True):
        axes.axhspan(-100 * noise, 100 * noise, color=QUIET, alpha=0.10, linewidth=0)
        axes.axhline(0.0, color=QUIET, linewidth=1.0)
        for entry in some:
            style = styles[_group(entry)]
            axes.plot([entry.n], [100 * entry.relative], linestyle="", markersize=5.5, **style)
        headed(axes, f"{name}: typical distance {100 * noise:.2g}%")
    outer_labels(grid, SIZE_WORDS[fit.parameters], "loss over law − 1, %")
    sizes = [entry.n for entry in entries]
    log_axis(grid[0].xaxis, min(sizes) * 0.85, max(sizes) * 1.18, "count")
    grid[0].set_ylim(-130 * worst, 130 * worst)
    if all(entry.budget is not None for entry in entries):
        labels = [f"{flops_text(value)} FLOPs" for value in styles]
    else:
        labels = [f"{count_text(value)} tokens" for value in styles]
    _style_legend(figure, styles, labels)
    return figure


def _group(entry: Residual) -> float:
    return entry.d if entry.budget is None else entry.budget


DASHED, OTHERS = (0, (5, 2)), "#bbbbbb"
_BEYOND = 1.5  # factor by which a law is drawn beyond the measured budgets


def frontier(fit: StudyFit, final: pd.DataFrame) -> Any | None:
    """Return a figure of the best N and D against FLOPs, one row of panels per variant.

    N is the number of parameters and D the number of tokens with the lowest loss. Returns None if
    no variant has an isoFLOP or a parametric law.
    """
    shown = {name: variant for name, variant in fit.variants.items() if _has_frontier(variant)}
    if not shown:
        return None
    low, high = final["flops"].min() / _BEYOND, final["flops"].max() * _BEYOND
    title = (
        f"{fit.study}: model size N and training tokens D with the lowest loss for a compute budget"
        f" C\nN: {SIZE_WORDS[fit.parameters]}"
    )
    figure = titled_figure((10.4, 1.4 + 2.35 * len(shown)), title)
    grid = figure.subplots(len(shown), 2, squeeze=False, sharex=True, sharey="col")
    for column, side in enumerate(("n", "d")):
        values: list[float] = []
        for axes, (name, variant) in zip(grid[:, column], shown.items(), strict=True):
            others = [
                getattr(other.isoflop, f"{side}_opt", None)
                for other in shown.values()
                if other is not variant
            ]
            for law in filter(None, others):
                axes.plot((low, high), law.at((low, high)), color=OTHERS, linewidth=1.2, zorder=1)
            values += _frontier_lines(
                axes, variant, side, (low, high), colour_of(list(fit.variants).index(name))
            )
            headed(axes, _frontier_words(name, variant, side))
            plain_axes(
                axes,
                "training compute C, FLOPs" if axes is grid[-1, column] else "",
                f"best {side.upper()}",
            )
        log_axis(grid[0, column].xaxis, low, high, "flops")
        log_axis(grid[0, column].yaxis, min(values) / 1.4, max(values) * 1.4, "count")
    _frontier_legend(figure, fit, shown)
    return figure


def _frontier_legend(figure: Any, fit: StudyFit, shown: dict[str, VariantFit]) -> None:
    entries = {}
    if any(variant.isoflop is not None for variant in shown.values()):
        minima = f"minima of the isoFLOP parabolas and their law, {fit.interval:.0%} intervals"
        entries[minima] = marked(linewidth=1.7, markersize=6, color=QUIET, marker="o")
        entries["laws of the minima of the other variants"] = marked(color=OTHERS, linewidth=1.2)
    if any(variant.parametric is not None for variant in shown.values()):
        entries["parametric law"] = marked(color=QUIET, linewidth=1.4, linestyle=DASHED)
    legend_below(figure, list(entries.values()), list(entries), 3)


def _has_frontier(variant: VariantFit) -> bool:
    return variant.parametric is not None or (
        variant.isoflop is not None and variant.isoflop.n_opt is not None
    )


def _frontier_words(name: str, variant: VariantFit, side: str) -> str:
    """Return the fitted exponents of N or D (``side`` "n" or "d"), one line per method."""
    words = []
    law = getattr(variant.isoflop, f"{side}_opt", None)
    if law is not None:
        words.append(f"{law_text(side.upper(), law, 'C')} from the minima")
    if variant.parametric is not None:
        exponent = variant.parametric.a if side == "n" else variant.parametric.b
        words.append(f"{side.upper()} ∝ C^{interval_text(exponent)} from the parametric law")
    return f"{name}: " + "\n".join(words)


def _frontier_lines(
    axes: Any, variant: VariantFit, side: str, span: tuple[float, float], style: Style
) -> list[float]:
    """Draw one variant's N or D (``side``) along the frontier; return values that the axis must
    include.
    """
    values: list[float] = []
    if variant.isoflop is not None:
        minima = [parabola for parabola in variant.isoflop.parabolas if parabola.inside]
        estimates = [getattr(parabola, f"{side}_opt") for parabola in minima]
        where = [parabola.budget for parabola in minima]
        values = [estimate.value for estimate in estimates]
        bars = error_bars(estimates)
        if values:
            points = {"linestyle": "", "markersize": 6, "capsize": 2, "elinewidth": 1.0}
            axes.errorbar(where, values, yerr=bars, **points, **style)
        law = getattr(variant.isoflop, f"{side}_opt")
        if law is not None:
            draw_law(axes, law, *span, variant.isoflop.interval, style)
            values += [float(law.at(edge)) for edge in span]
    if variant.parametric is not None:
        x = np.geomspace(*span, 40)
        best = [optimal(variant, float(flops), "parametric") for flops in x]
        estimates = [getattr(entry, side) for entry in best]
        line = np.array([entry.value for entry in estimates])
        axes.plot(x, line, color=style["color"], linewidth=1.4, linestyle=DASHED)
        bars = error_bars(estimates)
        if bars is not None and variant.isoflop is None:
            _draw_band(axes, x, (line - bars[0], line + bars[1]), style)
        values += [float(line[0]), float(line[-1])]
    return values


def loss_compute(fit: StudyFit, table: pd.DataFrame) -> Any | None:
    """Return a figure of training curves (faint), final losses and the lowest loss for a compute
    budget, for all variants; None without a law.
    """
    final = table[table["final"]]
    if not any(_has_frontier(variant) for variant in fit.variants.values()):
        return None
    low, high = final["flops"].min() / 4, final["flops"].max() * _BEYOND
    figure = new_figure((8.2, 5.0 + 0.24 * len(fit.variants)))
    axes = figure.subplots()
    handles, labels = [], []
    for number, (name, variant) in enumerate(fit.variants.items()):
        style = colour_of(number)
        for _, run in table[table["variant"] == name].groupby("run", sort=False):
            axes.plot(run["flops"], run["loss"], color=style["color"], linewidth=0.8, alpha=0.25)
        ends = final[final["variant"] == name]
        points = {"linestyle": "", "markersize": 4.5, "alpha": 0.75, "markeredgewidth": 0}
        axes.plot(ends["flops"], ends["loss"], **points, **style)
        words = _least_loss(axes, variant, (ends["flops"].min(), high), style) if len(ends) else ""
        handles.append(marked(linewidth=1.7, markersize=6, **style))
        labels.append(f"{name}{words}")
    plain_axes(axes, "training compute C, FLOPs", "held-out loss, nats per token")
    shown = table[table["flops"] >= low]["loss"]
    ends_of_laws = [
        float(line.get_ydata()[-1]) for line in axes.lines if line.get_linewidth() > 1.5
    ]
    bottom = min([final["loss"].min(), *ends_of_laws]) * 0.985
    top = min(shown.max() * 1.02, final["loss"].max() * 1.25)
    log_axis(axes.xaxis, low, high, "flops")
    log_axis(axes.yaxis, bottom, top, "number")
    note = (
        "points: finished runs; faint: during training; lines: lowest loss for the compute,"
        f" {fit.interval:.0%} intervals"
    )
    headed(axes, f"{fit.study}: held-out loss against training compute\n{note}", 11)
    legend_below(figure, handles, labels, 1)
    return figure


def _least_loss(axes: Any, variant: VariantFit, span: tuple[float, float], style: Style) -> str:
    """Draw L(C) along the frontier and return the name of its law."""
    law = variant.least_loss("isoflop")
    if law is not None and variant.isoflop is not None:
        draw_law(axes, law, *span, variant.isoflop.interval, style)
        return f": lowest loss {_loss_words(law)} (isoFLOP minima)"
    if variant.parametric is None:
        return ": no law"
    draw_law(axes, variant.parametric.frontier, *span, variant.parametric.interval, style)
    return f": lowest loss by the parametric law, E = {interval_text(variant.parametric.E)}"


def _loss_words(law: PowerLaw) -> str:
    value = law.coefficient.value
    power = flops_text(value) if value > 0 and (value >= 1e3 or value < 1e-2) else f"{value:.3g}"
    offset = f"{law.offset.value:.3g} + " if law.offset is not None else ""
    return f"= {offset}{power} C^{law.exponent.value:.3f}".replace("-", "−")


# --- learning rates -------------------------------------------------------------------------------


def learning_rate(fit: StudyFit) -> Any | None:
    """Return a figure of loss against learning rate, or None if no variant has an optimum.

    It has one panel per variant and one panel with the optima of all variants.
    """
    shown: dict[str, LearningRateFit] = fit.fitted("learning_rate")
    if not any(entry.optima for entry in shown.values()):
        return None
    across = min(len(shown) + 1, WIDEST)
    rows = math.ceil((len(shown) + 1) / across)
    styles = styles_of(_key(optimum) for entry in shown.values() for optimum in entry.optima)
    title = (
        f"{fit.study}: held-out loss against the peak learning rate, and the best rate at each size"
    )
    figure = titled_figure(
        (4.3 * across + 0.5, 3.5 * rows + 0.5 + 0.25 * math.ceil(len(styles) / 3)), title
    )
    grid = figure.subplots(rows, across, squeeze=False).ravel()
    for axes in grid[len(shown) + 1 :]:
        axes.set_visible(False)
    for axes, (name, entry) in zip(grid, shown.items(), strict=False):
        _panel(axes, entry, styles)
        headed(axes, name)
    _optima_panel(grid[len(shown)], fit, shown)
    several = len({budget for _, budget in styles}) > 1
    labels = [
        f"{count_text(n)} parameters" + (f", {budget:.3g} FLOPs" if several and budget else "")
        for n, budget in styles
    ]
    optimum = "optimum by Akima interpolation (open: at the smallest or largest rate, no optimum)"
    _style_legend(figure, styles, labels, optimum, size=5)
    return figure


def _key(optimum: LearningRateOptimum) -> tuple[float, float]:
    return optimum.parameters, optimum.budget or 0.0


def _panel(axes: Any, entry: LearningRateFit, styles: dict[tuple[float, float], Style]) -> None:
    for optimum in entry.optima:
        style = styles[_key(optimum)]
        axes.plot(optimum.rates, optimum.losses, linestyle="", markersize=5, **style)
        if optimum.curve:
            axes.plot(*zip(*optimum.curve, strict=True), color=style["color"], linewidth=1.3)
        star(axes, optimum.rate.value, optimum.loss, style["color"], is_open=optimum.edge)
    plain_axes(axes, "peak learning rate", "loss, nats per token")
    rates = [rate for optimum in entry.optima for rate in optimum.rates]
    log_axis(axes.xaxis, min(rates) / 1.2, max(rates) * 1.2, "number")


def _optima_panel(axes: Any, fit: StudyFit, shown: dict[str, LearningRateFit]) -> None:
    """Draw the optimum against the size for every variant, with the fitted law.

    Optima at the smallest or largest measured rate have open markers. They are excluded from the
    law.
    """
    optima = [optimum for entry in shown.values() for optimum in entry.optima]
    sizes = [optimum.parameters for optimum in optima]
    rates = [optimum.rate.value for optimum in optima]
    for name, entry in shown.items():
        style = colour_of(list(fit.variants).index(name))
        for optimum in entry.optima:
            face = {"markerfacecolor": "white"} if optimum.edge else {}
            axes.errorbar(
                [optimum.parameters],
                [optimum.rate.value],
                yerr=error_bars([optimum.rate]),
                markersize=6.5,
                capsize=2,
                **style,
                **face,
            )
        words = law_text("best rate", entry.by_parameters, "N") if entry.by_parameters else "no law"
        axes.plot([], [], linewidth=1.7, markersize=6.5, label=f"{name}: {words}", **style)
        if entry.by_parameters is not None:
            draw_law(axes, entry.by_parameters, min(sizes), max(sizes), fit.interval, style)
    axes.legend(loc="upper left", frameon=False, fontsize=8.5)
    plain_axes(axes, SIZE_WORDS[fit.parameters], "best peak learning rate")
    log_axis(axes.xaxis, min(sizes) / 1.3, max(sizes) * 1.3, "count")
    # The upper limit leaves space for the legend.
    log_axis(axes.yaxis, min(rates) / 1.6, max(rates) * (1.6 + 0.2 * len(shown)), "number")
