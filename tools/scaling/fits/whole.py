"""All fits of a study's table: each variant's laws, then the variants against the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from fem_common.errors import ConfigError

from ..results import StudyFit, VariantFit
from .compare import compare
from .config import FitConfig
from .isoflop import fit_isoflop
from .learning_rate import fit_learning_rates
from .parametric import fit_parametric, leave_out, residuals
from .points import NotConverged, NotIdentified, Points, best_rates, points_of


def fit_study(
    name: str,
    frame: pd.DataFrame,
    variants: Sequence[str],
    config: FitConfig,
    source: str,
    before: Callable[[int], None] = lambda number: None,
) -> StudyFit:
    """Fits the final runs in ``frame`` (table.final_runs) of each of ``variants``, the first the baseline.

    ``before`` is called with a variant's number as its fit starts. Every variant draws from a stream of its own, so that its numbers
    do not depend on the others and pairs of draws are independent.

    Raises:
        ConfigError: runs that no law may be fitted to, a fit that does not converge and has none beside it, a variant without a fit; it
            names source and variant.
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
            f"{source}: no complete run of {', '.join(variants)}; python -m tools.scaling run STUDY.yaml makes them, then collect"
        )
    baseline = variants[0]
    others = [fit for variant, fit in found.items() if variant != baseline] if baseline in found else []
    comparisons = [one for fit in others for one in compare(fit, found[baseline], config.interval)]
    return StudyFit(name, config.parameters, config.interval, source, found, comparisons, notes)


def fit_variant(name: str, points: Points, config: FitConfig, rng: np.random.Generator) -> VariantFit:
    """One variant's fits; what could not be fitted is None, with its reason in the notes.

    Raises:
        ConfigError: see `fit_study`.
    """
    learning_rate, notes = fit_learning_rates(points, config, rng)
    chosen, note = best_rates(points)
    notes += [note] if note else []
    fit = VariantFit(name, len(points), learning_rate=learning_rate, notes=notes)
    if "isoflop" in config.approaches:
        try:
            isoflop, more = fit_isoflop(chosen, config, rng)
            fit = replace(fit, isoflop=isoflop, notes=fit.notes + more)
        except NotIdentified as error:
            fit = replace(fit, notes=[*fit.notes, str(error)])
    if "parametric" in config.approaches:
        try:
            fit = _with_parametric(fit, chosen, config, rng)
        except NotIdentified as error:
            fit = replace(fit, notes=[*fit.notes, str(error)])
        except NotConverged as error:
            if fit.isoflop is None:
                raise
            fit = replace(fit, notes=[*fit.notes, f"{error}; it is left out"])
    if (fit.isoflop, fit.parametric, fit.learning_rate) == (None, None, None):
        raise ConfigError("nothing could be fitted: " + "; ".join(fit.notes))
    return fit


def _with_parametric(fit: VariantFit, points: Points, config: FitConfig, rng: np.random.Generator) -> VariantFit:
    law = fit_parametric(points, config, rng)
    left_out, notes = leave_out(points, law, config.huber_delta)
    if law.failed:
        notes.append(f"{law.failed} of {law.resamples} resamples of the parametric law did not converge; the intervals leave them out")
    if law.on_bound > 0.02 * law.resamples:
        notes.append(
            f"in {law.on_bound} of {law.resamples} resamples a parameter of the parametric law ran to the end of its range: "
            "it is hardly identified"
        )
    return replace(fit, parametric=law, residuals=residuals(points, law), left_out=left_out, notes=fit.notes + notes)
