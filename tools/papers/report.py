"""``report``: write one page of all results: tables with the papers' numbers, a picture each, and
the orders that agree.

    report [--runs FOLDER] [--out FOLDER]

Reads the results of ``run`` and those of earlier reports in the page's folder, and stores both in
it: OUT/papers.md and OUT/papers/NAME-quick.jsonl, with a picture.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

from fem_common.cli import Parser
from fem_common.errors import UserError, files_told
from fem_common.files import make_folder, write_whole
from fem_common.plot import COLOURS, QUIET, colour_of, new_figure, plain_axes, png
from fem_common.text import count, counted, markdown_table
from tools.papers.catalogue import NAMES, RUNS, experiment_of
from tools.papers.experiment import (
    Claim,
    Experiment,
    Results,
    Size,
    by_seed,
    chosen,
    gather,
    interval,
    line_of,
    read_results,
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
    with files_told():
        found = found_results(arguments.runs, arguments.out)
        if not found:
            raise UserError(
                f"no results in {arguments.runs} or {arguments.out / 'papers'}: python -m"
                " tools.papers run argmax --quick creates some"
            )
        make_folder(arguments.out / "papers")
        parts = [TITLE, wrapped(ABOUT)]
        for (name, kind), results in found.items():
            experiment, size = experiment_of(name), experiment_of(name).sizes[kind]
            write_whole(
                arguments.out / "papers" / f"{name}-{kind}.jsonl",
                "".join(line_of(*item) for item in results.items()),
            )
            write_whole(
                arguments.out / "papers" / f"{name}-{kind}.png",
                png(picture(experiment, size, results)),
            )
            if experiment.curves:
                write_whole(
                    arguments.out / "papers" / f"{name}-{kind}-iterations.png",
                    png(iterations(experiment, size, results)),
                )
            parts.append(section(experiment, kind, size, results))
        write_whole(arguments.out / "papers.md", "\n\n".join(parts) + "\n")
    print(
        f"wrote {arguments.out / 'papers.md'}:"
        f" {', '.join(f'{name} ({kind})' for name, kind in found)}"
    )
    return 0


def found_results(runs: Path, out: Path) -> dict[tuple[str, str], Results]:
    """Return (experiment, size) -> results of its trials, in a fixed order.

    Results are read from the page's folder ``out`` and from ``runs``. Trials that were made with
    other settings than the current sizes are omitted.
    """
    found = {}
    for name in NAMES:
        for kind, size in experiment_of(name).sizes.items():
            both = read_results(out / "papers" / f"{name}-{kind}.jsonl") | gather(
                runs / f"{name}-{kind}"
            )
            rows, cases = list(experiment_of(name).rows), list(experiment_of(name).cases)
            kept = {
                trial: record
                for trial, record in both.items()
                if trial.size == size.key() and trial.case in cases and trial.row in rows
            }
            order = sorted(
                kept,
                key=lambda trial: (
                    cases.index(trial.case),
                    rows.index(trial.row),
                    trial.seed,
                    trial.rate,
                ),
            )
            if order:
                found[name, kind] = {trial: kept[trial] for trial in order}
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


def section(experiment: Experiment, kind: str, size: Size, results: Results) -> str:
    """Return the report's section on one experiment at one size, as Markdown."""
    seconds = sum(record["seconds"] for record in results.values())
    rates = ", ".join(f"{rate:g}" for rate in size.rates)
    sizes = (
        f"{size.steps:,} steps with batches of {size.batch}, width {size.width},"
        f" {counted(size.layers, 'layer')}, rates {rates}"
    )
    made = f"{kind} form: {sizes}; {len(results)} trials, {seconds / 60:.0f} minutes in total."
    tables = [table(experiment, size, results, experiment.metric)]
    for name, said in experiment.also.items():
        tables += [wrapped(said), table(experiment, size, results, name)]
    shown = f"![{experiment.title}](papers/{experiment.name}-{kind}.png)"
    if experiment.curves:
        shown += (
            "\n![Values by iteration; dotted: the number of iterations in"
            f" training](papers/{experiment.name}-{kind}-iterations.png)"
        )
    return "\n\n".join(
        [
            f"## {experiment.title}",
            wrapped(f"{experiment.told} {made[0].upper()}{made[1:]}"),
            *tables,
            shown,
            *orders(experiment, size, results),
        ]
    )


def table(experiment: Experiment, size: Size, results: Results, metric: str) -> str:
    """Return a Markdown table of ``metric``, one row per model variant and one column per case.

    A cell contains the mean ± half the width of its interval, and the paper's number in brackets.
    """
    rows = [row for row in experiment.rows if any(trial.row == row for trial in results)]
    cases = [case for case in experiment.cases if any(trial.case == case for trial in results)]
    lines = [["", "parameters", *cases]]
    for row in rows:
        known = [record["parameters"] for trial, record in results.items() if trial.row == row]
        cells = [row, count(known[0]) if known else ""]
        for case in cases:
            values = [
                experiment.scale * record[metric]
                for record in chosen(experiment, results, case, row, size)
            ]
            published = (
                experiment.published.get((case, row)) if metric == experiment.metric else None
            )
            cells.append(cell(values, published))
        lines.append(cells)
    if experiment.chance is not None and metric == experiment.metric:
        lines.append(
            [
                "guessing",
                "",
                *(f"{experiment.scale * experiment.chance(case, size):.3g}" for case in cases),
            ]
        )
    return markdown_table(lines[0], lines[1:])


def cell(values: list[float], published: float | None) -> str:
    """Format a table cell, for example ``52.1 ± 1.4 (44.3)``: mean, half interval, paper's number.

    Returns ``-`` without values.
    """
    if not values:
        return "-"
    mean, half = interval(values)
    digits = 1 if abs(mean) >= 10 else 3
    said = f"{mean:.{digits}f}" + ("" if half == float("inf") else f" ± {half:.{digits}f}")
    return said + ("" if published is None else f" ({published:g})")


def orders(experiment: Experiment, size: Size, results: Results) -> list[str]:
    """Return one line for each order that the paper claims, with the cases in which it is
    confirmed.
    """
    lines = []
    for claim in experiment.claims:
        found: dict[str, list[str]] = {}
        for case in claim.cases or experiment.cases:
            said = verdict(experiment, size, results, claim, case)
            if said is not None:
                found.setdefault(said, []).append(case)
        if found:
            parts = [f"{said} for {', '.join(found[said])}" for said in VERDICTS if said in found]
            lines.append(
                wrapped(f"{claim.above} better than {claim.below}: {'; '.join(parts)}.", "- ")
            )
    return ["\n".join(lines)] if lines else []


def verdict(
    experiment: Experiment, size: Size, results: Results, claim: Claim, case: str
) -> str | None:
    """Return whether one claim holds in a case, as one of VERDICTS.

    It is computed from the differences between the two rows over the seeds that both have. The
    result is None if fewer than two seeds are common.
    """
    above, below = (
        by_seed(experiment, results, case, row, size) for row in (claim.above, claim.below)
    )
    both = [
        (above[seed][experiment.metric], below[seed][experiment.metric])
        for seed in above
        if seed in below
    ]
    if len(both) < 2:
        return None
    if min(mean for mean, _ in map(interval, zip(*both, strict=True))) >= experiment.enough:
        return LEVEL
    mean, half = interval((low - high if experiment.falls else high - low) for high, low in both)
    return VERDICTS[(0 if mean > half else 1) if mean > 0 else (3 if -mean > half else 2)]


def picture(experiment: Experiment, size: Size, results: Results) -> Any:
    """Return a figure with one panel per case: mean and interval of each row, and the paper's
    number as an open diamond.
    """
    rows = [row for row in experiment.rows if any(trial.row == row for trial in results)]
    cases = [case for case in experiment.cases if any(trial.case == case for trial in results)]
    figure = new_figure((1.6 + 1.7 * len(cases), 1.0 + 0.24 * len(rows)))
    panels = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
    for case, axes in zip(cases, panels, strict=True):
        for place, row in enumerate(rows):
            values = [
                experiment.scale * record[experiment.metric]
                for record in chosen(experiment, results, case, row, size)
            ]
            if values:
                mean, half = interval(values)
                axes.errorbar(
                    mean,
                    place,
                    xerr=half if half < float("inf") else 0,
                    fmt="o",
                    color=COLOURS[0],
                    markersize=4,
                    linewidth=1.2,
                )
            published = experiment.published.get((case, row))
            if published is not None:
                axes.plot(
                    published, place, "D", color=COLOURS[1], markerfacecolor="none", markersize=5
                )
        if experiment.chance is not None:
            axes.axvline(
                experiment.scale * experiment.chance(case, size),
                color=QUIET,
                linewidth=0.8,
                linestyle=":",
            )
        plain_axes(axes, experiment.metric + (", %" if experiment.scale == 100 else ""), grid="x")
        if experiment.scale == 100:
            low, high = axes.get_xlim()
            axes.set_xlim(max(low, -3), min(high, 103))
        axes.set_title(case, fontsize=8)
        axes.tick_params(labelsize=7)
    panels[0].set_yticks(range(len(rows)), rows)
    panels[0].invert_yaxis()
    return figure


def iterations(experiment: Experiment, size: Size, results: Results) -> Any:
    """Return a figure of values recorded per iteration of the repeated layer, one panel per curve.

    It shows the first case, means over the seeds, and marks the number of iterations in training.
    """
    figure = new_figure((2.6 * len(experiment.curves) + 1.2, 2.4))
    panels = figure.subplots(1, len(experiment.curves), squeeze=False)[0]
    for (name, said), axes in zip(experiment.curves.items(), panels, strict=True):
        kept = {
            row: chosen(experiment, results, size.cases[0], row, size) for row in experiment.rows
        }
        lines = {
            row: [record[name] for record in records]
            for row, records in kept.items()
            if records and name in records[0]
        }
        means = {
            row: [sum(values) / len(values) for values in zip(*found, strict=True)]
            for row, found in lines.items()
        }
        sizes = [abs(mean[0]) for mean in means.values()]
        # With very different sizes, the largest curve would flatten the others.
        if sizes and max(sizes) > 10 * min(sizes) > 0:
            means = {row: [value / abs(mean[0]) for value in mean] for row, mean in means.items()}
            said += ", relative to the start"
        for number, (row, mean) in enumerate(means.items()):
            axes.plot(
                range(len(mean)), mean, label=row, markersize=2, linewidth=1, **colour_of(number)
            )
            axes.axvline(len(mean) / 2, color=QUIET, linewidth=0.8, linestyle=":")
        plain_axes(axes, "iteration", grid="y")
        axes.set_title(said, fontsize=8)
        axes.tick_params(labelsize=7)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside right center",
        fontsize=7,
        frameon=False,
    )
    return figure
