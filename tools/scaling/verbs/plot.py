"""``plot``: write pictures of a study and its report from runs.csv and fit.json; no fitting. No
torch.

    plot STUDY.yaml [--table FILE] [--results FOLDER]

Writes into the study's results: isoflop.png, frontier.png, loss_compute.png, residuals.png and
learning_rate.png, as far as fits exist; report.html with everything in one file; and summary.md
with the main table and the statements.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pandas as pd

from fem_common.errors import ConfigError, convert_os_errors
from fem_common.plot import png
from tools.scaling import pictures
from tools.scaling.report import Report, render_html, render_summary, report_of
from tools.scaling.results import StudyFit, load_fit
from tools.scaling.study import Study, add_study, study_of
from tools.scaling.table import final_runs, read_table, write_file
from tools.scaling.verbs.collect import read_collected

PICTURES = ("isoflop", "frontier", "loss_compute", "residuals", "learning_rate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_study(parser)
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="the table that was fitted (default: runs.csv in the results of the study)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Draw and write; return 0. Raises ConfigError, StorageError."""
    study = study_of(arguments)
    file = arguments.table or study.runs_csv
    table, fit = read_table(file), load_fit(study.fit_json)
    check_same_runs(study, fit, table, file)
    results = Path(study.results)
    words = (
        as_typed(arguments.study),
        *(("--results", as_typed(arguments.results)) if arguments.results else ()),
    )
    report = report_of(study, fit, table, read_collected(file), words)
    drawn = {name: png(figure) for name, figure in figures(fit, table).items()}
    _write(results, report, drawn)
    print(
        f"wrote {', '.join(f'{name}.png' for name in drawn) or 'no picture'}, summary.md and"
        f" report.html in {results}"
    )
    for statement in report["statements"]:
        print(statement)
    return 0


def as_typed(path: Path) -> str:
    """Return a path for commands in the report: relative to the working directory if possible, else
    its name, to avoid folders of this machine.
    """
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.name


def check_same_runs(study: Study, fit: StudyFit, table: pd.DataFrame, file: Path) -> None:
    """Raise ConfigError if the fit does not belong to the table: a run is missing, or has another
    loss.
    """
    losses = dict(zip(table[table["final"]]["run"], table[table["final"]]["loss"], strict=True))
    again = f"fit again: python -m tools.scaling fit {study.path}"
    unknown = [name for name in fit.variants if name not in set(table["variant"])]
    if unknown:
        raise ConfigError(f"{study.fit_json}: variant {unknown[0]} is not in {file}; {again}")
    for variant in fit.variants.values():
        named = [(entry.run, entry.loss) for entry in variant.residuals]
        if variant.isoflop is not None:
            for parabola in variant.isoflop.parabolas:
                named += [(run, math.nan) for run in parabola.runs]
        for run, loss in named:
            if run not in losses:
                raise ConfigError(
                    f"{study.fit_json}: run {run} is not in {file}, which is another table or was"
                    f" collected after the fit; {again}"
                )
            if not math.isnan(loss) and not math.isclose(loss, losses[run], rel_tol=1e-9):
                raise ConfigError(
                    f"{study.fit_json}: run {run} has loss {loss} in the fit, but {losses[run]} in"
                    f" {file}; {again}"
                )


def figures(fit: StudyFit, table: pd.DataFrame) -> dict[str, Any]:
    """Return name -> figure for every existing fit, in the order of PICTURES."""
    final = final_runs(table)
    drawn = (
        pictures.isoflop(fit, final),
        pictures.frontier(fit, final),
        pictures.loss_compute(fit, table),
        pictures.residuals(fit),
        pictures.learning_rate(fit),
    )
    return {
        name: figure for name, figure in zip(PICTURES, drawn, strict=True) if figure is not None
    }


def _write(results: Path, report: Report, drawn: dict[str, bytes]) -> None:
    """Write every file atomically; delete pictures of an earlier fit that this one does not
    have.
    """
    for name in PICTURES:
        file = results / f"{name}.png"
        if name in drawn:
            write_file(file, drawn[name])
        else:
            with convert_os_errors():
                file.unlink(missing_ok=True)
    write_file(results / "summary.md", render_summary(report, list(drawn)).encode())
    write_file(results / "report.html", render_html(report, drawn).encode())
