"""Draw the figures of an evaluation: the scores of all models, and held-out loss against context
length.

The figure of scores has one small panel per column of the table, with a dot and its standard
error for each model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

from fem_common.plot import COLOURS, MARKERS, QUIET, new_figure, plain_axes
from fem_common.text import counted

from .table import Column, Point, Table, in_bits, printed

BEST, OTHER = COLOURS[1], COLOURS[0]
ACROSS = 3  # panels side by side, at most: more would be too small on a page of 830 pixels
CENTRED = {"ha": "center", "va": "center", "color": QUIET}
ROW, HEAD = 0.27, 1.05  # inches per model in a panel, and for the title and axis of a panel


def scores(table: Table) -> Any:
    """Return the figure of scores with one panel per column, arranged by groups of columns.

    Panels of bits per byte follow, where a model has them. Models are sorted by average rank. A
    dashed line is the score of guessing.
    """
    groups = [(table, *group) for group in _groups(table)]
    bits = in_bits(table)
    if bits is not None:
        known = tuple(column for column in bits.columns if any(bits.cells(column)))
        groups += [
            (bits, f"Bits per byte: {name}".removesuffix(": "), columns)
            for name, columns in _groups(replace(bits, columns=known))
        ]
    sizes = [len(columns) for _, _, columns in groups]
    across = min(
        range(1, ACROSS + 1), key=lambda wide: sum(math.ceil(size / wide) for size in sizes)
    )
    lines = [math.ceil(size / across) for size in sizes]
    order = _order(table)
    left = 0.085 * max(len(_short(row.model)) for row in table.rows)
    panel = HEAD + ROW * len(order)
    heights = [count * panel + 0.3 for count in lines]
    figure = new_figure((max(6.4, left + 2.35 * across), sum(heights) + 0.75))
    title = f"Evaluation: {table.suite}" if table.suite else "Evaluation"
    legend = "score ± one standard error; dashed: guessing"
    if len(table.rows) > 1:
        legend += "\nvermilion: best by more than the standard error of a difference"
    title_text = f"{title}, {counted(len(table.rows), 'model')}: {legend}"
    figure.suptitle(title_text, x=0.01, ha="left", fontsize=11)
    parts = figure.subfigures(len(groups), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (own, name, columns), count in zip(parts, groups, lines, strict=True):
        if name:
            part.suptitle(name, x=0.01, ha="left", fontsize=11, fontweight="bold")
        grid = part.subplots(count, across, squeeze=False).ravel()
        for place, axes in enumerate(grid):
            if place >= len(columns):
                axes.set_visible(False)
                continue
            _panel(axes, own, columns[place], order, named=place % across == 0)
    return figure


def _groups(table: Table) -> list[tuple[str, list[Column]]]:
    return [
        (name, list(columns))
        for name, columns in groupby(table.columns, key=lambda column: column.group)
    ]


def _order(table: Table) -> list[int]:
    """Return the indices of the table's rows sorted by average rank.

    The order is unchanged if no column is ranked.
    """
    found = table.summary()
    return sorted(range(len(table.rows)), key=lambda index: (found[index] or (0.0, 0))[0])


def _panel(axes: Any, table: Table, column: Column, order: Sequence[int], *, named: bool) -> None:
    ahead, cells = table.ahead(column), table.cells(column)
    low, high = [], []
    for place, index in enumerate(order):
        result = cells[index]
        if result is None:
            axes.annotate("–", (0.5, place), xycoords=("axes fraction", "data"), **CENTRED)
            continue
        value, error = result.score.value, result.score.stderr or 0.0
        colour, quiet = (BEST, BEST) if index == ahead else (OTHER, QUIET)
        style = {"color": colour, "marker": "o", "markersize": 4.5, "linewidth": 1.3}
        axes.errorbar(value, place, xerr=error, **style)
        style = {"transform": axes.get_yaxis_transform(), "fontsize": 9, "va": "center"}
        axes.text(1.02, place, str(printed(value)), color=quiet, **style)
        low.append(value - error)
        high.append(value + error)
    negative = any(result and result.score.value < 0 for result in cells)
    floor = None if negative else 0.0
    _limits(axes, column, low, high, floor, alone=len(order) == 1)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_yticks(
        range(len(order)),
        [_short(table.rows[index].model) for index in order] if named else [""] * len(order),
        fontsize=9.5,
    )
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    plain_axes(axes, grid="x")
    axes.spines["left"].set_visible(False)
    lower = "" if column.higher_is_better else ", lower is better"
    axes.set_title(f"{column.label}\n", loc="left", fontsize=10.5)
    under = {"xycoords": "axes fraction", "xytext": (0, 4), "textcoords": "offset points"}
    axes.annotate(column.settings_text + lower, (0.0, 1.0), fontsize=9, color=QUIET, **under)


def _limits(
    axes: Any,
    column: Column,
    low: Sequence[float],
    high: Sequence[float],
    floor: float | None,
    *,
    alone: bool,
) -> None:
    """Set the horizontal range of a panel so that it contains all scores.

    The range includes the score of guessing if it is near, or if the panel shows only one model
    (``alone``). Otherwise a label states on which side it is.

    low, high: ends of the error bars. floor: lower bound of all scores; None if unknown.
    """
    if not low:
        axes.set_xticks([])
        return
    least, most = min(low), max(high)
    span = max(most - least, 0.02 if most > least else 0.1)
    chance = column.chance
    if chance is not None and (alone or least - 2.0 * span <= chance <= most + 2.0 * span):
        axes.axvline(chance, color=QUIET, linewidth=1.0, linestyle=(0, (3, 2)), zorder=1)
        least, most = min(least, chance), max(most, chance)
    elif chance is not None:
        here = {"x": 0.0, "ha": "left"} if chance < least else {"x": 1.0, "ha": "right"}
        label = f"‹ guessing {chance:.2g}" if chance < least else f"guessing {chance:.2g} ›"
        axes.text(
            y=0.03,
            s=label,
            transform=axes.transAxes,
            fontsize=8.5,
            color=QUIET,
            va="bottom",
            **here,
        )
    edge = max(0.06 * (most - least), (span - most + least) / 2)
    # If no score is negative, the axis extends below zero only for the end of a whisker and a
    # margin.
    left = least - edge if floor is None else max(least - edge, min(least, floor) - 0.06 * span)
    _ticks(axes, left, most + edge, floor)


def _ticks(axes: Any, least: float, most: float, floor: float | None) -> None:
    """Set the horizontal range from ``least`` to ``most``, with at least two labelled ticks.

    No tick is below ``floor``. Labels have as many digits as the distance of ticks requires.
    """
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(least, most)
    lowest = least if floor is None else max(least, floor)
    found = [
        tick
        for tick in MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(least, most)
        if lowest <= tick <= most
    ]
    step = min((after - before for before, after in pairwise(found)), default=0.1)
    places = next(
        (places for places in range(2, 9) if abs(round(step, places) - step) < 1e-9 * step), 9
    )
    axes.set_xticks(found, [f"{tick:.{places}f}" for tick in found])


def heldout(texts: dict[str, dict[str, list[Point]]]) -> Any | None:
    """Return a figure of held-out loss against context length, or None.

    It has one panel per text and one line per model. None if no text has two context lengths.
    texts: the result of ``table.heldout``.
    """
    shown = {
        text: models
        for text, models in texts.items()
        if any(len(points) > 1 for points in models.values())
    }
    if not shown:
        return None
    models = list(dict.fromkeys(model for by_model in shown.values() for model in by_model))
    figure = new_figure((0.6 + 5.6 * len(shown), 4.2 + 0.08 * len(models)))
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (text, by_model) in zip(panels, shown.items(), strict=True):
        for model, points in by_model.items():
            again, colour = divmod(models.index(model), len(COLOURS))
            style = {
                "color": COLOURS[colour],
                "marker": MARKERS[colour],
                "linestyle": ("-", "--", ":")[again % 3],
                "linewidth": 1.6,
                "markersize": 5,
                "capsize": 2,
                "elinewidth": 0.9,
            }
            values = [point.nats.value for point in points]
            errors = [point.nats.stderr or 0.0 for point in points]
            lengths = [point.context for point in points]
            axes.errorbar(lengths, values, yerr=errors, label=_short(model), **style)
        lengths = sorted({point.context for points in by_model.values() for point in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
        axes.set_title(f"Held-out loss: {text}", loc="left", fontsize=10.5)
        plain_axes(axes, "context length, tokens", "nats per token", grid="y")
        axes.legend(frameon=False, fontsize=9)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= 30 else name[:20] + "…" + name[-9:]
