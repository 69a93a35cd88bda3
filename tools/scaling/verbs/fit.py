"""``fit``: fit the laws of a study's table with intervals; write them as text and as ``fit.json``.
The module does not import torch.

    fit STUDY.yaml [--table FILE] [--results FOLDER]

Reads runs.csv in the study's results (written by ``collect``), else the study's published table, or
another table. Published data need only the columns variant, parameters, tokens, flops and loss.
Writes fit.json in the results, which ``plot`` and ``recommend`` read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fem_common.errors import ConfigError
from fem_common.progress import Progress
from fem_common.text import aligned, nearest
from tools.scaling.fits.compare import compare
from tools.scaling.fits.isoflop import fit_isoflop
from tools.scaling.fits.learning_rate import fit_learning_rates
from tools.scaling.fits.parametric import fit_parametric, leave_out, residuals
from tools.scaling.fits.points import NotConverged, NotIdentified, Points, best_rates, points_of
from tools.scaling.report import listings, notes, statements
from tools.scaling.results import ParametricFit, StudyFit, VariantFit, save_fit
from tools.scaling.study import FIT, FitConfig, Study, add_study, study_of
from tools.scaling.table import final_runs, read_table

QUIET_SECONDS = 5.0  # duration of a fit after which progress is reported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_study(parser)
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="another table, CSV or Parquet (default: runs.csv in the results of the study)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Fit, print and write; return 0."""
    study = study_of(arguments)
    table = arguments.table or study.runs_csv
    frame = final_runs(read_table(table))
    variants = _variants(study, frame, table, foreign=arguments.table is not None)
    progress = Progress(len(variants), "variants", every=QUIET_SECONDS)
    fit = fit_study(
        study.name,
        frame,
        variants,
        study.fit,
        str(table),
        lambda number: progress.update(number, variants[number]),
    )
    progress.close()
    written = Path(study.results) / FIT
    save_fit(fit, written)
    print(console(fit), end="")
    print(f"\nread: {table}\nwritten: {written}")
    return 0


def console(fit: StudyFit) -> str:
    """Return the fit as text: the tables of the report, the comparisons and the notes."""
    runs = sum(variant.runs for variant in fit.variants.values())
    n_is = "all parameters" if fit.parameters == "total" else "non-embedding parameters"
    lines = [
        f"{fit.study}: {runs} runs of {', '.join(fit.variants)}; N is {n_is}; intervals are"
        f" {fit.interval:.0%}"
    ]
    for listing in listings(fit):
        lines += ["", listing.title, *aligned([listing.header, *listing.rows])]
    lines += ["", *statements(fit), "", *(f"note: {note}" for note in notes(fit))]
    return "\n".join(lines).rstrip() + "\n"


def _variants(study: Study, frame: pd.DataFrame, table: Path, foreign: bool) -> list[str]:
    """Return the names of the variants to fit, with the baseline first.

    They are those of the study, or those in the table if it is ``foreign``, that is, given by
    ``--table``. Raises ConfigError (a variant in the study's table is not in the study).
    """
    there = list(dict.fromkeys(frame["variant"].astype(str)))
    if not foreign:
        for name in there:
            if name not in study.variants:
                near = nearest(name, list(study.variants)) or study.baseline
                raise ConfigError(
                    f"{table}: variant: {name} is not a variant of {study.path}; the nearest one is"
                    f" {near}; collect again"
                )
        return list(study.variants)
    return sorted(there, key=lambda name: name != study.baseline)


def fit_study(
    name: str,
    frame: pd.DataFrame,
    variants: Sequence[str],
    config: FitConfig,
    source: str,
    before: Callable[[int], None] = lambda number: None,
) -> StudyFit:
    """Fit the final runs in ``frame`` (table.final_runs) for each of ``variants``, the first of
    which is the baseline.

    ``before`` is called with a variant's number when its fit starts. Every variant has its own
    random stream, so its numbers do not depend on the others and pairs of draws are independent.
    Raises ConfigError (runs without a possible law, a fit that does not converge without another
    one, a variant without a fit; it names source and variant).
    """
    found: dict[str, VariantFit] = {}
    notes = []
    for number, variant in enumerate(variants):
        before(number)
        runs = frame[frame["variant"] == variant]
        if not len(runs):
            notes.append(f"{variant}: no complete run in {source}")
            continue
        try:
            rng = np.random.default_rng([config.seed, number])
            found[variant] = fit_variant(variant, points_of(runs, config.parameters), config, rng)
        except ConfigError as error:
            raise ConfigError(f"{source}: {variant}: {error}") from None
    if not found:
        raise ConfigError(
            f"{source}: no complete run of {', '.join(variants)}; python -m tools.scaling run"
            " STUDY.yaml trains them, then collect"
        )
    baseline = found.get(variants[0])
    comparisons = []
    for fit in found.values():
        if baseline is not None and fit is not baseline:
            comparisons += compare(fit, baseline, config.interval)
    return StudyFit(name, config.parameters, config.interval, source, found, comparisons, notes)


def fit_variant(
    name: str, points: Points, config: FitConfig, rng: np.random.Generator
) -> VariantFit:
    """Return the fits of one variant; a fit that is not possible is None, with its reason in the
    notes. Raises ConfigError (see `fit_study`).
    """
    learning_rate, notes = fit_learning_rates(points, config, rng)
    chosen, note = best_rates(points)
    notes += [note] if note else []
    found: dict[str, Any] = {}
    if "isoflop" in config.approaches:
        try:
            found["isoflop"], more = fit_isoflop(chosen, config, rng)
            notes += more
        except NotIdentified as error:
            notes.append(str(error))
    if "parametric" in config.approaches:
        try:
            law = fit_parametric(chosen, config, rng)
            found["left_out"], more = leave_out(chosen, law, config.huber_delta)
            found |= {"parametric": law, "residuals": residuals(chosen, law)}
            notes += more + _doubts(law)
        except NotIdentified as error:
            notes.append(str(error))
        except NotConverged as error:
            if "isoflop" not in found:
                raise
            notes.append(f"{error}; it is left out")
    if not found and learning_rate is None:
        raise ConfigError("no law could be fitted: " + "; ".join(notes))
    return VariantFit(name, len(points), learning_rate=learning_rate, notes=notes, **found)


def _doubts(law: ParametricFit) -> list[str]:
    """Return notes on resamples that determine the law badly."""
    notes = []
    if law.failed:
        notes.append(
            f"{law.failed} of {law.resamples} resamples of the parametric law did not converge; the"
            " intervals do not include them"
        )
    if law.on_bound > 0.02 * law.resamples:
        notes.append(
            f"in {law.on_bound} of {law.resamples} resamples a parameter of the parametric law"
            " reached the end of its range: the data hardly determine it"
        )
    return notes
