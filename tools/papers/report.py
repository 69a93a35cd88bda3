"""``report``: write one page of all results: tables with the papers' numbers, a picture each, and
the orders that agree.

    report [--runs FOLDER] [--out FOLDER]

Reads the results of ``run`` and those of earlier reports in the page's folder, and stores both in
it: OUT/papers.md and OUT/papers/NAME-quick.jsonl, with a picture.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from pathlib import Path
from typing import Any

from fem_common.cli import Parser
from fem_common.errors import UserError, convert_os_errors
from fem_common.files import make_folder, write_atomically
from fem_common.plot import COLOURS, QUIET, colour_of, new_figure, plain_axes, png
from fem_common.text import count, counted, markdown_table
from tools.papers.catalogue import NAMES, RUNS, experiment_of
from tools.papers.experiment import (
    Claim,
    Outcome,
    gather,
    interval,
    line_of,
    read_results,
    texts,
)

TITLE = "# The papers' experiments"
ABOUT = (
    "Written by `python -m tools.papers report` from the results in the folder papers. Quick forms"
    " are small models with little training. They show whether our layers behave as the papers"
    " report, not how well they perform. ± is half of a 95 % interval over seeds (Student's t)."
    " Every row is tried with the same learning rates; the validation data of the first seed select"
    " one. The number in brackets is the paper's, at the paper's size. The order of two rows"
    " *agrees* or *disagrees* with the paper if the 95 % interval of the differences between them"
    " over the seeds excludes zero; otherwise it *tends to agree* or *tends to disagree*."
)
LEVEL = "both solve the task"
DOTTED: dict[str, Any] = {"color": QUIET, "linewidth": 0.8, "linestyle": ":"}
ACROSS = 4  # panels side by side, at most
VERDICTS = ("agrees", "tends to agree", "tends to disagree", "disagrees", LEVEL)


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "--runs",
        type=Path,
        default=RUNS,
        metavar="FOLDER",
        help="folder of the results of run (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("docs"),
        metavar="FOLDER",
        help="folder of the page (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the page and return 0. Raises UserError without results, ConfigError, StorageError."""
    page, folder = arguments.out / "papers.md", arguments.out / "papers"
    with convert_os_errors():
        found = found_results(arguments.runs, folder)
        if not found:
            raise UserError(
                f"no results in {arguments.runs} or {folder}: python -m"
                " tools.papers run argmax --quick creates some"
            )
        make_folder(folder)
        for outcome in found:
            lines = [line_of(*item) for item in outcome.results.items()]
            write_atomically(folder / f"{outcome.name}.jsonl", "".join(lines))
            write_atomically(folder / f"{outcome.name}.png", png(picture(outcome)))
            if outcome.experiment.curves:
                write_atomically(
                    folder / f"{outcome.name}-iterations.png", png(iterations(outcome))
                )
        parts = [TITLE, wrapped(ABOUT), *map(section, found)]
        write_atomically(page, "\n\n".join(parts) + "\n")
    names = [f"{outcome.experiment.name} ({outcome.kind})" for outcome in found]
    print(f"wrote {page}: {', '.join(names)}")
    return 0


def found_results(runs: Path, page: Path) -> list[Outcome]:
    """Return the experiments and sizes that have results, with these in a fixed order.

    Results are read from the page's folder ``page`` and from ``runs``. Trials that were made with
    other settings than the current sizes are omitted.
    """
    found = []
    for experiment in map(experiment_of, NAMES):
        rows, cases = list(experiment.rows), list(experiment.cases)
        for kind, size in experiment.sizes.items():
            name = f"{experiment.name}-{kind}"
            both = read_results(page / f"{name}.jsonl") | gather(runs / name)
            kept = [
                trial
                for trial in both
                if trial.size == size.key() and trial.case in cases and trial.row in rows
            ]
            kept.sort(
                key=lambda one: (cases.index(one.case), rows.index(one.row), one.seed, one.rate)
            )
            if kept:
                results = {trial: both[trial] for trial in kept}
                found.append(Outcome(experiment, kind, size, results))
    return found


def wrapped(text: str, first: str = "") -> str:
    """Wrap prose at 100 columns."""
    return textwrap.fill(
        text,
        100,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=False,
    )


def section(outcome: Outcome) -> str:
    """Return the report's section on one experiment at one size, as Markdown."""
    experiment, size, results = outcome.experiment, outcome.size, outcome.results
    text = texts()[experiment.name]
    title, remarks = text["title"], text["told"]
    minutes = sum(record["seconds"] for record in results.values()) / 60
    rates = ", ".join(f"{rate:g}" for rate in size.rates)
    trained = f"{size.epochs} epochs" if size.epochs else f"{size.steps:,} steps"
    made = (
        f"{outcome.kind.capitalize()} form: {trained} with batches of {size.batch},"
        f" width {size.width}, {counted(size.layers, 'layer')}, rates {rates};"
        f" {len(results)} trials, {minutes:.0f} minutes in total."
    )
    tables = [table(outcome, experiment.metric)]
    for name, note in experiment.also.items():
        tables += [wrapped(note), table(outcome, name)]
    shown = f"![{title}](papers/{outcome.name}.png)"
    if experiment.curves:
        shown += (
            "\n![Values by iteration; dotted: the number of iterations in"
            f" training](papers/{outcome.name}-iterations.png)"
        )
    remarks_text = wrapped(f"{remarks} {made}")
    return "\n\n".join([f"## {title}", remarks_text, *tables, shown, *orders(outcome)])


def table(outcome: Outcome, metric: str) -> str:
    """Return a Markdown table of ``metric``, one row per model variant and one column per case.

    A cell contains the mean ± half the width of its interval, and the paper's number in brackets.
    """
    experiment, cases = outcome.experiment, outcome.columns
    main = metric == experiment.metric
    # If means are in the table, the paper's numbers are theirs.
    compared = [name for name in cases if name in experiment.means] or cases
    lines = [["", "parameters", *cases]]
    for row in outcome.rows:
        size = next(
            record["parameters"] for one, record in outcome.results.items() if one.row == row
        )
        cells = [row, count(size)]
        for case in cases:
            known = main and case in compared
            published = experiment.published.get((case, row)) if known else None
            cells.append(cell(outcome.values(case, row, metric), published))
        lines.append(cells)
    if experiment.chance is not None and main:
        chances = [experiment.scale * experiment.chance(case, outcome.size) for case in cases]
        lines.append(["guessing", "", *(f"{chance:.3g}" for chance in chances)])
    return markdown_table(lines[0], lines[1:])


def cell(values: list[float], published: float | None) -> str:
    """Format a table cell, for example ``52.1 ± 1.4 (44.3)``: mean, half interval, paper's number.

    Returns ``-`` without values.
    """
    if not values:
        return "-"
    mean, half = interval(values)
    digits = 1 if abs(mean) >= 10 else 3
    text = f"{mean:.{digits}f}"
    if half != float("inf"):
        text += f" ± {half:.{digits}f}"
    if published is not None:
        text += f" ({published:g})"
    return text


def orders(outcome: Outcome) -> list[str]:
    """Return one line for each order that the paper claims, with the cases in which it is
    confirmed.
    """
    lines = []
    for claim in outcome.experiment.claims:
        found: dict[str | None, list[str]] = {}
        for case in claim.cases or (*outcome.experiment.cases, *outcome.experiment.means):
            found.setdefault(verdict(outcome, claim, case), []).append(case)
        parts = [
            f"{verdict_text} for {', '.join(found[verdict_text])}"
            for verdict_text in VERDICTS
            if verdict_text in found
        ]
        if parts:
            lines.append(
                wrapped(f"{claim.above} better than {claim.below}: {'; '.join(parts)}.", "- ")
            )
    return ["\n".join(lines)] if lines else []


def verdict(outcome: Outcome, claim: Claim, case: str) -> str | None:
    """Return whether one claim holds in a case, as one of VERDICTS.

    It is computed from the differences between the two rows over the seeds that both have. The
    result is None if fewer than two seeds are common.
    """
    experiment = outcome.experiment
    metric = experiment.metric
    above = outcome.by_seed(case, claim.above)
    below = outcome.by_seed(case, claim.below)
    both = [(above[seed][metric], below[seed][metric]) for seed in above if seed in below]
    if len(both) < 2:
        return None
    means = [interval(values)[0] for values in zip(*both, strict=True)]
    if min(means) >= experiment.enough:
        return LEVEL
    mean, half = interval((low - high if experiment.falls else high - low) for high, low in both)
    if mean > 0:
        place = 0 if mean > half else 1
    else:
        place = 3 if -mean > half else 2
    return VERDICTS[place]


def picture(outcome: Outcome) -> Any:
    """Return a figure with one panel per case: mean and interval of each row, and the paper's
    number as an open diamond.
    """
    experiment, rows = outcome.experiment, outcome.rows
    cases = [name for name in outcome.columns if name in experiment.means] or outcome.cases
    percent = experiment.scale == 100
    lines = math.ceil(len(cases) / ACROSS)
    across = math.ceil(len(cases) / lines)
    figure = new_figure((max(6.8, 1.6 + 1.7 * across), 0.8 + lines * (0.9 + 0.24 * len(rows))))
    grid = figure.subplots(lines, across, sharey=True, squeeze=False)
    panels = grid.ravel()
    marks: dict[str, Any] = {}  # label in the legend -> one of its marks
    for axes in panels[len(cases) :]:
        axes.set_visible(False)
    for case, axes in zip(cases, panels, strict=False):
        for place, row in enumerate(rows):
            values = outcome.values(case, row)
            if values:
                mean, half = interval(values)
                error = half if half < math.inf else 0
                style = {"color": COLOURS[0], "markersize": 4, "linewidth": 1.2}
                bars = axes.errorbar(mean, place, xerr=error, fmt="o", **style)
                marks["our mean (line: 95 % interval over the seeds)"] = bars
            published = experiment.published.get((case, row))
            if published is not None:
                style = {"color": COLOURS[1], "markersize": 5, "markerfacecolor": "none"}
                (diamond,) = axes.plot(published, place, "D", **style)
                marks["the paper's value, at its model size"] = diamond
        if experiment.chance is not None:
            chance = experiment.scale * experiment.chance(case, outcome.size)
            marks["guessing"] = axes.axvline(chance, **DOTTED)
        lower = ", lower is better" if experiment.falls else ""
        plain_axes(axes, experiment.metric + (", %" if percent else lower), grid="x")
        if percent:
            low, high = axes.get_xlim()
            axes.set_xlim(max(low, -3), min(high, 103))
        _small_text(axes, case)
    panels[0].set_yticks(range(len(rows)), rows)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    _title(figure, outcome)
    figure.legend(
        marks.values(), marks.keys(), loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    return figure


def _small_text(axes: Any, title: str) -> None:
    """Set the title of a panel, and the sizes of its texts."""
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_size(8)


def _title(figure: Any, outcome: Outcome, addition: str = "") -> None:
    """Set the title of a figure: the experiment's, and its form."""
    title = f"{texts()[outcome.experiment.name]['title']} ({outcome.kind} form){addition}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)


def iterations(outcome: Outcome) -> Any:
    """Return a figure of values recorded per iteration of the repeated layer, one panel per curve.

    It shows the first case, means over the seeds, and marks the number of iterations in training.
    """
    curves = outcome.experiment.curves
    figure = new_figure((2.3 * len(curves) + 0.3, 3.2))
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    styles: dict[str, dict[str, Any]] = {}  # of a row, the same in all panels
    marks: dict[str, Any] = {}
    for (name, label), axes in zip(curves.items(), panels, strict=True):
        means = {}
        for row in outcome.experiment.rows:
            records = outcome.by_seed(outcome.size.cases[0], row).values()
            found = [record[name] for record in records if name in record]
            if found:
                means[row] = [sum(values) / len(values) for values in zip(*found, strict=True)]
        sizes = [abs(mean[0]) for mean in means.values()]
        # With very different sizes, the largest curve would flatten the others.
        if sizes and max(sizes) > 10 * min(sizes) > 0:
            means = {row: [value / abs(mean[0]) for value in mean] for row, mean in means.items()}
            label += ",\nrelative to the start"
        for row, mean in means.items():
            number = len(styles)
            line = {"linestyle": "-" if number < len(COLOURS) else "--", **colour_of(number)}
            style = {"markersize": 2, "linewidth": 1, **styles.setdefault(row, line)}
            (marks[row],) = axes.plot(range(len(mean)), mean, **style)
        trained = max(map(len, means.values()), default=0) / 2
        known = axes.axvline(trained, **DOTTED)
        plain_axes(axes, "iteration", grid="y")
        axes.xaxis.get_major_locator().set_params(integer=True)
        _small_text(axes, label)
    _title(figure, outcome, ", mean over the seeds")
    marks["iterations in training"] = known
    figure.legend(
        marks.values(), marks.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False
    )
    return figure
