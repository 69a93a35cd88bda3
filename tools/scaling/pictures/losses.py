"""Figures of a study's losses.

They show the loss against model size at equal compute, against the parametric law and against
compute, and the best model sizes and token counts along the frontier.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fem_common.plot import QUIET, colour_of, new_figure, plain_axes
from fem_common.text import count
from tools.scaling.laws import PowerLaw
from tools.scaling.results import IsoFlopFit, Residual, StudyFit, VariantFit, optimal

from .style import (
    draw_law,
    error_bars,
    flops_text,
    headed,
    interval_text,
    law_text,
    legend_below,
    log_axis,
    looks_of,
    marked,
    outer_labels,
    panels,
    star,
    titled_figure,
)


def size_column(fit: StudyFit) -> str:
    """Return the table column that contains N, the number of parameters in the laws."""
    return "parameters" if fit.parameters == "total" else "non_embedding_parameters"


def size_words(fit: StudyFit) -> str:
    """Return the description of N for an axis."""
    return (
        "parameters"
        if fit.parameters == "total"
        else "parameters without embedding and output layer"
    )


def isoflop(fit: StudyFit, final: pd.DataFrame) -> Any | None:
    """Return a figure of loss against model size for each budget, one panel per variant.

    ``final`` are the complete runs. Returns None if no variant has an isoFLOP fit.
    """
    shown: dict[str, IsoFlopFit] = fit.fitted("isoflop")
    if not shown:
        return None
    looks = looks_of(parabola.budget for found in shown.values() for parabola in found.parabolas)
    figure, grid = panels(
        len(shown), f"{fit.study}: held-out loss against model size at equal training compute"
    )
    for axes, (name, found) in zip(grid, shown.items(), strict=True):
        _isoflop_panel(
            axes, found, final[final["variant"] == name].set_index("run"), size_column(fit), looks
        )
        if found.n_opt:
            headed(axes, f"{name}: {law_text('best N', found.n_opt, 'C')}")
        else:
            headed(axes, f"{name}: no law through the minima")
    outer_labels(grid, size_words(fit), "held-out loss, nats per token")
    sizes = final[final["variant"].isin(list(shown))][size_column(fit)].astype(float)
    log_axis(grid[0].xaxis, sizes.min() * 0.85, sizes.max() * 1.18, "count")
    _budget_legend(figure, looks, "minimum of the parabola (open: outside the measured sizes)")
    return figure


def _isoflop_panel(
    axes: Any,
    found: IsoFlopFit,
    runs: pd.DataFrame,
    column: str,
    looks: dict[float, dict[str, Any]],
) -> None:
    for parabola in found.parabolas:
        look = looks[parabola.budget]
        points = runs.loc[[run for run in parabola.runs if run in runs.index]]
        n, losses = points[column].astype(float).to_numpy(), points["loss"].to_numpy()
        axes.plot(n, losses, linestyle="", markersize=5.5, **look)
        if len(n):
            x = np.geomspace(n.min(), n.max(), 80)
            axes.plot(x, parabola.at(x), color=look["color"], linewidth=1.3)
        if parabola.inside:
            star(axes, parabola.n_opt.value, parabola.loss.value, look["color"], is_open=False)
        elif len(n):
            star(axes, n[np.argmin(losses)], losses.min(), look["color"], is_open=True)
    minima = [parabola for parabola in found.parabolas if parabola.inside]
    where = (
        [parabola.n_opt.value for parabola in minima],
        [parabola.loss.value for parabola in minima],
    )
    axes.plot(*where, color=QUIET, linewidth=1.0, linestyle=(0, (3, 2)), zorder=1)


def _budget_legend(
    figure: Any, looks: dict[float, dict[str, Any]], star: str = "", words: str = "FLOPs"
) -> None:
    handles = [
        marked(**({} if star else {"linestyle": ""}), linewidth=1.3, markersize=5.5, **look)
        for look in looks.values()
    ]
    labels = [
        f"{flops_text(value) if words == 'FLOPs' else count(value)} {words}" for value in looks
    ]
    if star:
        handles.append(
            marked(linestyle="", marker="*", markersize=11, color=QUIET, markeredgecolor="white")
        )
        labels.append(star)
    legend_below(figure, handles, labels, 3 if star else 4)


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
    looks = looks_of(_group(entry) for entry in entries)
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
            axes.plot(
                [entry.n],
                [100 * entry.relative],
                linestyle="",
                markersize=5.5,
                **looks[_group(entry)],
            )
        headed(axes, f"{name}: typical distance {100 * noise:.2g}%")
    outer_labels(grid, size_words(fit), "loss over law − 1, %")
    sizes = [entry.n for entry in entries]
    log_axis(grid[0].xaxis, min(sizes) * 0.85, max(sizes) * 1.18, "count")
    grid[0].set_ylim(-130 * worst, 130 * worst)
    _budget_legend(
        figure,
        looks,
        words="FLOPs" if all(entry.budget is not None for entry in entries) else "tokens",
    )
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
        f" C\nN: {size_words(fit)}"
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
    handles, labels = [], []
    if any(variant.isoflop is not None for variant in shown.values()):
        handles += [
            marked(linewidth=1.7, markersize=6, color=QUIET, marker="o"),
            marked(color=OTHERS, linewidth=1.2),
        ]
        labels += [
            f"minima of the isoFLOP parabolas and their law, {fit.interval:.0%} intervals",
            "laws of the minima of the other variants",
        ]
    if any(variant.parametric is not None for variant in shown.values()):
        handles.append(marked(color=QUIET, linewidth=1.4, linestyle=DASHED))
        labels.append("parametric law")
    legend_below(figure, handles, labels, 3)


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
    axes: Any, variant: VariantFit, side: str, span: tuple[float, float], look: dict[str, Any]
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
        if values:
            axes.errorbar(
                where,
                values,
                yerr=error_bars(estimates),
                linestyle="",
                markersize=6,
                capsize=2,
                elinewidth=1.0,
                **look,
            )
        law = getattr(variant.isoflop, f"{side}_opt")
        if law is not None:
            draw_law(axes, law, *span, variant.isoflop.interval, look)
            values += [float(law.at(edge)) for edge in span]
    if variant.parametric is not None:
        x = np.geomspace(*span, 40)
        best = [optimal(variant, float(flops), "parametric") for flops in x]
        estimates = [getattr(entry, side) for entry in best]
        axes.plot(
            x,
            [entry.value for entry in estimates],
            color=look["color"],
            linewidth=1.4,
            linestyle=DASHED,
        )
        bars = error_bars(estimates)
        if bars is not None and variant.isoflop is None:
            line = np.array([entry.value for entry in estimates])
            axes.fill_between(
                x, line - bars[0], line + bars[1], color=look["color"], alpha=0.16, linewidth=0
            )
        values += [estimates[0].value, estimates[-1].value]
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
        look = colour_of(number)
        for _, run in table[table["variant"] == name].groupby("run", sort=False):
            axes.plot(run["flops"], run["loss"], color=look["color"], linewidth=0.8, alpha=0.25)
        ends = final[final["variant"] == name]
        axes.plot(
            ends["flops"],
            ends["loss"],
            linestyle="",
            markersize=4.5,
            alpha=0.75,
            markeredgewidth=0,
            **look,
        )
        words = _least_loss(axes, variant, (ends["flops"].min(), high), look) if len(ends) else ""
        handles.append(marked(linewidth=1.7, markersize=6, **look))
        labels.append(f"{name}{words}")
    plain_axes(axes, "training compute C, FLOPs", "held-out loss, nats per token")
    shown = table[table["flops"] >= low]["loss"]
    ends_of_laws = [
        float(line.get_ydata()[-1]) for line in axes.lines if line.get_linewidth() > 1.5
    ]
    bottom, top = (
        min([final["loss"].min(), *ends_of_laws]) * 0.985,
        min(shown.max() * 1.02, final["loss"].max() * 1.25),
    )
    log_axis(axes.xaxis, low, high, "flops")
    log_axis(axes.yaxis, bottom, top, "number")
    told = (
        "points: finished runs; faint: during training; lines: lowest loss for the compute,"
        f" {fit.interval:.0%} intervals"
    )
    headed(axes, f"{fit.study}: held-out loss against training compute\n{told}", 11)
    legend_below(figure, handles, labels, 1)
    return figure


def _least_loss(
    axes: Any, variant: VariantFit, span: tuple[float, float], look: dict[str, Any]
) -> str:
    """Draw L(C) along the frontier and return the name of its law."""
    law = variant.least_loss("isoflop")
    if law is not None and variant.isoflop is not None:
        draw_law(axes, law, *span, variant.isoflop.interval, look)
        return f": lowest loss {_loss_words(law)} (isoFLOP minima)"
    if variant.parametric is None:
        return ": no law"
    draw_law(axes, variant.parametric.frontier, *span, variant.parametric.interval, look)
    return f": lowest loss by the parametric law, E = {interval_text(variant.parametric.E)}"


def _loss_words(law: PowerLaw) -> str:
    value = law.coefficient.value
    power = flops_text(value) if value > 0 and (value >= 1e3 or value < 1e-2) else f"{value:.3g}"
    offset = f"{law.offset.value:.3g} + " if law.offset is not None else ""
    return f"= {offset}{power} C^{law.exponent.value:.3f}".replace("-", "−")
