"""Records of a coordinate check, and verdicts on them: does the size of an activation stay the same
as the width grows? Output as a table, a CSV file or a figure.

Source: Tensor Programs V (arXiv 2203.03466), appendix D.1: under muP no activation, and no change
of it by training, grows or vanishes with the width. The module does not import torch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fem_common.plot import COLOURS, MARKERS, QUIET, plain_axes
from fem_common.text import aligned, markdown_table
from tools.scaling.pictures.style import headed, legend_below, log_axis, marked, titled_figure

LIMIT = 2.0
"""Largest ratio between two widths that counts as flat."""


@dataclass(frozen=True)
class Record:
    """Measurement of one site of one model at one step.

    variant: a mixer's name, or a study's variant. step: number of optimizer steps done. site:
    ``embedding``, ``layer_03/mixer``, ``layer_03/mlp``, ``residual`` or ``logits``; a layer's
    numbers are those of its addition to the residual stream. scale: root mean square of the
    activation over batch, tokens and channels. change: the same of the activation's difference from
    step 0.
    """

    variant: str
    parametrization: str
    width: int
    seed: int
    step: int
    site: str
    scale: float
    change: float


@dataclass(frozen=True)
class Verdict:
    """Verdict on how one quantity (scale or change) of one site depends on the width at the last
    step.

    values: means over the seeds, one per width. judged: False if theory allows the quantity to
    change with the width.
    """

    site: str
    quantity: str
    widths: tuple[int, ...]
    values: tuple[float, ...]
    judged: bool

    @property
    def ratio(self) -> float:
        """Largest value divided by the smallest; infinite if one is not finite or is zero."""
        if not all(math.isfinite(value) for value in self.values) or min(self.values) <= 0:
            return math.inf
        return max(self.values) / min(self.values)

    @property
    def exponent(self) -> float:
        """Slope of log value over log width by least squares; NaN if the ratio is infinite."""
        if math.isinf(self.ratio):
            return math.nan
        return statistics.linear_regression(
            [*map(math.log, self.widths)], [*map(math.log, self.values)]
        ).slope

    @property
    def flat(self) -> bool:
        """True if the largest value is at most ``LIMIT`` times the smallest."""
        return self.ratio <= LIMIT

    @property
    def words(self) -> str:
        """Text of the verdict for the table. It is in brackets if the quantity is not judged."""
        if not all(math.isfinite(value) for value in self.values):
            text = "not finite"
        elif math.isinf(self.ratio):
            text = "does not move" if self.quantity == "change" else "zero"
        elif self.flat:
            text = "flat"
        else:
            text = f"{'grows' if self.exponent > 0 else 'shrinks'} as width^{self.exponent:.2f}"
        return text if self.judged else f"({text})"


def judge(records: Sequence[Record]) -> list[Verdict]:
    """Return the verdicts on the scale and the change of every site, in the order of the sites.

    ``records`` belong to one variant under one parametrization. The scale of the logits is shown
    but not judged: under muP their initial weights decrease with the width, so logits start near
    zero. The effect of training on the logits is their change, which is judged.
    """
    last = max(record.step for record in records)
    at_end = [record for record in records if record.step == last]
    widths = tuple(sorted({record.width for record in at_end}))
    found = []
    for site, quantity in itertools.product(
        dict.fromkeys(record.site for record in at_end), QUANTITIES
    ):
        own = (
            [getattr(one, quantity) for one in at_end if (one.site, one.width) == (site, width)]
            for width in widths
        )
        values = tuple(sum(some) / len(some) for some in own)
        found.append(
            Verdict(site, quantity, widths, values, judged=(site, quantity) != ("logits", "scale"))
        )
    return found


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the judged verdict with the largest ratio."""
    return max(
        (verdict for verdict in verdicts if verdict.judged), key=lambda verdict: verdict.ratio
    )


def table(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as text, one row per quantity of a site, one column per width."""
    rows = [("site", "", *map(str, verdicts[0].widths), "max/min", "exponent", "verdict")]
    for verdict in verdicts:
        numbers = [f"{value:.4g}" for value in verdict.values]
        rows.append(
            (
                verdict.site,
                verdict.quantity,
                *numbers,
                f"{verdict.ratio:.2f}",
                f"{verdict.exponent:+.2f}",
                verdict.words,
            )
        )
    return "\n".join(aligned(rows, left=(0, 1, len(rows[0]) - 1)))


def summary(records: Sequence[Record]) -> str:
    """Return the worst judged ratio of each variant as Markdown, one column per parametrization."""
    columns = list(dict.fromkeys(record.parametrization for record in records))
    rows = []
    for variant in dict.fromkeys(record.variant for record in records):
        own = [
            [one for one in records if (one.variant, one.parametrization) == (variant, name)]
            for name in columns
        ]
        ratios = [worst(judge(some)).ratio if some else math.nan for some in own]
        cells = [f"{ratio:.{2 if ratio < 10 else 0}f}" for ratio in ratios]
        rows.append([f"`{variant}`", *cells])
    return markdown_table(["variant", *columns], rows) + "\n"


def as_csv(records: Sequence[Record]) -> str:
    """Return all records as CSV, with the shortest digits from which each number is read back
    exactly.
    """
    return str(pd.DataFrame(records).to_csv(index=False, lineterminator="\n", na_rep="nan"))


BLOCKS = 3  # number of blocks in the picture: the first, the middle and the last one
LINES = ("-", (0, (5, 2)), (0, (1, 1.5)))  # line styles of these blocks
QUANTITIES = {"scale": "RMS", "change": "RMS of the change since step 0"}
NAMES = {"mup": "muP", "standard": "standard parametrization"}


def coordinates(records: Sequence[Record]) -> Any:
    """Return a figure of one variant's records at their last step, one column per parametrization.

    All panels share their axes, so that slopes are comparable. Lines with a value that is zero or
    not finite are omitted.
    """
    groups = {
        name: [record for record in records if record.parametrization == name] for name in NAMES
    }
    verdicts = {name: judge(group) for name, group in groups.items() if group}
    looks = _looks(shown_sites(records))
    steps = max(record.step for record in records)
    title = (
        f"Coordinate check of {records[0].variant}: activations after {steps} steps by width,"
        f" relative to those at the smallest width\nflat: all widths within {LIMIT:g}x of each"
        f" other; grey: within {LIMIT:g}x of the smallest width"
    )
    figure = titled_figure(
        (max(7.0, 5.0 * len(verdicts)), 7.0 + 0.23 * math.ceil(len(looks) / 4)), title, 10.5
    )
    grid = figure.subplots(len(QUANTITIES), len(verdicts), squeeze=False, sharex=True, sharey=True)
    for column, (name, found) in enumerate(verdicts.items()):
        for row, (quantity, words) in enumerate(QUANTITIES.items()):
            axes = grid[row, column]
            some = [verdict for verdict in found if verdict.quantity == quantity]
            _panel(axes, [verdict for verdict in some if verdict.site in looks], looks)
            most = worst(some)
            verdict = f"at most x {most.ratio:.2f}" if math.isfinite(most.ratio) else most.words
            said = f"{'flat' if most.flat else 'not flat'}: {verdict} ({in_words(most.site)})"
            headed(axes, f"{NAMES[name]}, {words}\n{said}")
            plain_axes(
                axes,
                "width of the model" if row else "",
                f"relative to width {found[0].widths[0]}" if not column else "",
            )
    low, high = grid[0, 0].get_ylim()
    log_axis(grid[0, 0].yaxis, low, high, "number")
    widths = next(iter(verdicts.values()))[0].widths
    grid[0, 0].set_xticks(widths, [str(width) for width in widths])
    labels = [in_words(site) + " (pale: not judged)" * (site == "logits") for site in looks]
    legend_below(
        figure,
        [marked(linewidth=1.4, markersize=4.5, **look) for look in looks.values()],
        labels,
        4,
    )
    return figure


def shown_sites(records: Sequence[Record]) -> list[str]:
    """Return the sites that the figure shows, in order. Only the first, the middle and the last
    block of a deep model are shown.
    """
    sites = list(dict.fromkeys(record.site for record in records))
    blocks = list(dict.fromkeys(site.partition("/")[0] for site in sites if "/" in site))
    if len(blocks) > BLOCKS:
        blocks = [blocks[0], blocks[len(blocks) // 2], blocks[-1]]
    return [site for site in sites if "/" not in site or site.partition("/")[0] in blocks]


def in_words(site: str) -> str:
    """Convert ``layer_03/iteration_01/mixer`` to "layer 3, iteration 1: mixer"."""
    *place, part = site.split("/")
    words = [f"{word.rpartition('_')[0]} {int(word.rpartition('_')[2])}" for word in place]
    return f"{', '.join(words)}: {part}" if words else part


def _looks(sites: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the style of each site: colour and marker by its kind, line style by its block."""
    kinds = list(dict.fromkeys(site.rpartition("/")[2] for site in sites))
    blocks = list(dict.fromkeys(site.partition("/")[0] for site in sites if "/" in site))
    looks = {}
    for site in sites:
        kind = kinds.index(site.rpartition("/")[2])
        line = LINES[blocks.index(site.partition("/")[0]) % len(LINES)] if "/" in site else "-"
        looks[site] = {
            "color": COLOURS[kind % len(COLOURS)],
            "marker": MARKERS[kind % len(MARKERS)],
            "linestyle": line,
        }
    return looks


def _panel(axes: Any, verdicts: Sequence[Verdict], looks: dict[str, dict[str, Any]]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.axhspan(1 / LIMIT, LIMIT, color=QUIET, alpha=0.10, linewidth=0)
    for verdict in verdicts:
        if math.isfinite(verdict.ratio):
            over = [value / verdict.values[0] for value in verdict.values]
            axes.plot(
                verdict.widths,
                over,
                linewidth=1.4,
                markersize=4.5,
                alpha=1.0 if verdict.judged else 0.35,
                **looks[verdict.site],
            )
