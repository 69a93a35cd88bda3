"""The coordinate check's picture: every site's size against the width, over that at the smallest width. Draws alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tools.scaling.flatness import LIMIT, Record, Verdict, judge, worst

from .style import COLOURS, MARKERS, QUIET, legend_below, log_ticks, new_figure, plain_axes

BLOCKS = 3  # that are shown, of those the model has: the first, the middle and the last
LINES = ("-", (0, (5, 2)), (0, (1, 1.5)))  # of these blocks
QUANTITIES = {"scale": "RMS", "change": "RMS of the change since step 0"}
NAMES = {"mup": "muP", "standard": "standard parametrization"}


def coordinates(records: Sequence[Record]) -> Any:
    """A figure of one variant's records at their last step, a column a parametrization.

    All panels share their axes, so that slopes can be compared. A site whose value at a width is not finite or is zero is left out.
    """
    groups = {name: [record for record in records if record.parametrization == name] for name in NAMES}
    verdicts = {name: judge(group) for name, group in groups.items() if group}
    looks = _looks(shown_sites(records))
    figure = new_figure((max(7.0, 5.0 * len(verdicts)), 7.0 + 0.23 * math.ceil(len(looks) / 4)))
    steps = max(record.step for record in records)
    figure.suptitle(
        f"Coordinate check of {records[0].variant}: activations after {steps} steps against width, over those at the smallest width\n"
        f"flat: all widths within {LIMIT:g}x of each other; grey: within {LIMIT:g}x of the smallest width",
        x=0.01, ha="left", fontsize=10.5,
    )  # fmt: skip
    grid = figure.subplots(len(QUANTITIES), len(verdicts), squeeze=False, sharex=True, sharey=True)
    for column, (name, found) in enumerate(verdicts.items()):
        for row, (quantity, words) in enumerate(QUANTITIES.items()):
            axes = grid[row, column]
            some = [verdict for verdict in found if verdict.quantity == quantity]
            _panel(axes, [verdict for verdict in some if verdict.site in looks], looks)
            axes.set_title(f"{NAMES[name]}, {words}\n{_worst_words(some)}", loc="left", fontsize=9.5)
            plain_axes(axes, "width of the model" if row else "", f"over that at width {found[0].widths[0]}" if not column else "")
    bottom, top = grid[0, 0].get_ylim()
    log_ticks(grid[0, 0].yaxis, bottom, top, "number")
    widths = next(iter(verdicts.values()))[0].widths
    grid[0, 0].set_xticks(widths, [str(width) for width in widths])
    _legend(figure, looks)
    return figure


def shown_sites(records: Sequence[Record]) -> list[str]:
    """The sites in their order, of a deep model's blocks the first, the middle and the last."""
    sites = list(dict.fromkeys(record.site for record in records))
    blocks = list(dict.fromkeys(site.partition("/")[0] for site in sites if "/" in site))
    if len(blocks) > BLOCKS:
        blocks = [blocks[0], blocks[len(blocks) // 2], blocks[-1]]
    return [site for site in sites if "/" not in site or site.partition("/")[0] in blocks]


def in_words(site: str) -> str:
    """``layer_03/iteration_01/mixer`` as "layer 3, iteration 1: mixer"."""
    *place, part = site.split("/")
    words = [f"{word.rpartition('_')[0]} {int(word.rpartition('_')[2])}" for word in place]
    return f"{', '.join(words)}: {part}" if words else part


def _looks(sites: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker by what a site is, the line by its block."""
    kinds = list(dict.fromkeys(site.rpartition("/")[2] for site in sites))
    blocks = list(dict.fromkeys(site.partition("/")[0] for site in sites if "/" in site))
    looks = {}
    for site in sites:
        kind = kinds.index(site.rpartition("/")[2])
        line = LINES[blocks.index(site.partition("/")[0]) % len(LINES)] if "/" in site else "-"
        looks[site] = {"color": COLOURS[kind % len(COLOURS)], "marker": MARKERS[kind % len(MARKERS)], "linestyle": line}
    return looks


def _panel(axes: Any, verdicts: Sequence[Verdict], looks: dict[str, dict[str, Any]]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.axhspan(1 / LIMIT, LIMIT, color=QUIET, alpha=0.10, linewidth=0)
    for verdict in verdicts:
        if math.isfinite(verdict.ratio):
            over = [value / verdict.values[0] for value in verdict.values]
            axes.plot(verdict.widths, over, linewidth=1.4, markersize=4.5, alpha=1.0 if verdict.judged else 0.35, **looks[verdict.site])


def _worst_words(verdicts: Sequence[Verdict]) -> str:
    """The verdict of one quantity under one parametrization, over all sites."""
    found = worst(verdicts)
    most = f"at most x {found.ratio:.2f}" if math.isfinite(found.ratio) else found.words
    return f"{'flat' if found.flat else 'not flat'}: {most} ({in_words(found.site)})"


def _legend(figure: Any, looks: dict[str, dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linewidth=1.4, markersize=4.5, **look) for look in looks.values()]
    legend_below(figure, handles, [in_words(site) + " (pale: not judged)" * (site == "logits") for site in looks], 4)
