"""Runs of one variant as arrays, selection of runs for a law, and their weights in a resample.

The weights are those of Rubin's Bayesian bootstrap (The Annals of Statistics 9, 1981): a run's
weight is a share of its stratum and not a count, so that no resample loses a size, as drawing four
runs with replacement does in nine of ten cases. Its shares are uniform (a Dirichlet distribution of
shape 1), with variance ``(k-1)/(k+1)`` for k runs. In this module the shape is chosen so that the
weights, and therefore the spread of a law, are widened by the ratio of Student's interval with ``r
- p`` degrees of freedom to the normal one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from fem_common.errors import ConfigError
from tools.scaling.study import SIZE_COLUMN

Array = NDArray[np.float64]


class NotIdentified(ValueError):
    """The runs do not determine a law; the message names what is missing. It becomes a note of the
    fit.
    """


class NotConverged(ConfigError):
    """A minimisation found no minimum. It ends the fit, unless another law exists; then it becomes
    a note.
    """


@dataclass(frozen=True)
class Points:
    """Final losses of one variant's runs; arrays ``[r]``, NaN for missing values (budget, width,
    rate, seed).
    """

    run: NDArray[np.str_]
    n: Array  # parameters
    d: Array  # tokens
    c: Array  # FLOPs
    loss: Array  # nats per token
    budget: Array
    width: Array
    rate: Array
    seed: Array

    def __len__(self) -> int:
        return len(self.n)

    def take(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> Points:
        """Return a selection of the runs."""
        return Points(**{item.name: getattr(self, item.name)[which] for item in fields(self)})

    @property
    def budgets(self) -> list[float]:
        """Budgets in increasing order; empty if a run has none."""
        return [] if np.isnan(self.budget).any() else np.unique(self.budget).tolist()

    @property
    def strata(self) -> list[NDArray[np.intp]]:
        """Indices of the runs of each budget; of all runs without budgets."""
        by_budget = [np.flatnonzero(self.budget == value) for value in self.budgets]
        return by_budget or [np.arange(len(self))]


def points_of(frame: pd.DataFrame, parameters: str) -> Points:
    """Convert one variant's final rows of the table to `Points`; ``parameters``: total or
    non_embedding.

    Raises ConfigError (a loss, N, D or C is missing or not a positive number; names run and
    column).
    """
    runs = np.asarray(frame["run"].astype(str), dtype=np.str_)
    arrays = {}
    wanted = {"n": SIZE_COLUMN[parameters], "d": "tokens", "c": "flops", "loss": "loss"}
    optional = {"budget": "budget", "width": "width", "rate": "learning_rate", "seed": "seed"}
    for name, column in (wanted | optional).items():
        arrays[name] = frame[column].to_numpy(dtype=np.float64, na_value=np.nan)
        wrong = ~(np.isfinite(arrays[name]) & (arrays[name] > 0))
        if name in wanted and wrong.any():
            fix = "; remove the run, or run it again"
            if column == SIZE_COLUMN["non_embedding"]:
                fix = "; set fit.parameters: total"
            raise ConfigError(
                f"run {runs[wrong][0]}: {column} = {arrays[name][wrong][0]:g}: a law needs a"
                f" positive number{fix}"
            )
    return Points(run=runs, **arrays)


def cells(points: Points) -> list[NDArray[np.intp]]:
    """Return the indices of the runs of each size and length: same N and same budget (without
    budgets: same D), with any rates and seeds.
    """
    length = points.d if not points.budgets else points.budget
    keys = sorted(set(zip(points.n, length, strict=True)))
    return [np.flatnonzero((points.n == n) & (length == d)) for n, d in keys]


def by_rate(points: Points, rows: NDArray[np.intp]) -> dict[float, NDArray[np.intp]]:
    """Return learning rate -> indices among ``rows``, in increasing order."""
    rates = points.rate[rows]
    return {rate: rows[rates == rate] for rate in np.unique(rates[~np.isnan(rates)]).tolist()}


def best_rates(points: Points) -> tuple[Points, str | None]:
    """Return, for each size and length, the runs at the learning rate with the lowest mean loss,
    and a note if several rates exist.
    """
    keep, note = list[NDArray[np.intp]](), None
    for rows in cells(points):
        rates = by_rate(points, rows)
        if len(rates) > 1:
            rows = min(rates.values(), key=lambda some: float(points.loss[some].mean()))
            note = (
                "several learning rates: the laws use the best measured rate of each size at each"
                " length"
            )
        keep.append(rows)
    return points.take(np.sort(np.concatenate(keep))), note


SMALLEST_SHAPE = 0.1  # below it, the weight of a stratum is on one run


def student_over_normal(free: int, interval: float) -> float:
    """Return the ratio of an interval with scatter estimated from ``free`` degrees of freedom to
    one with known scatter.
    """
    tail = (1 + interval) / 2
    return float(stats.t.ppf(tail, free) / stats.norm.ppf(tail))


def weights_of(
    strata: Sequence[NDArray[np.intp]],
    resamples: int,
    parameters: int,
    interval: float,
    rng: np.random.Generator,
) -> Array:
    """Return weights ``[resamples, r]`` for a law with ``parameters`` parameters and its
    ``interval``; the weights of a stratum sum to its number of runs.
    """
    runs = sum(len(rows) for rows in strata)
    wider = student_over_normal(runs - parameters, interval) ** 2
    weights = np.zeros((resamples, runs))
    for rows in strata:
        k = len(rows)
        shape = ((k + 1) / wider - 1) / k
        weights[:, rows] = k * rng.dirichlet(np.full(k, max(shape, SMALLEST_SHAPE)), size=resamples)
    return weights
