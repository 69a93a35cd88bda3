"""The runs of one variant as arrays, which of them a law is fitted to, and their weights in a resample.

The weights are those of Rubin's Bayesian bootstrap (The Annals of Statistics 9, 1981): a run's weight is not how often it is drawn but a
share of its stratum, so that no resample loses a size, as drawing four runs with replacement does in nine of ten cases. Its shares are
uniform (a Dirichlet distribution of shape 1), with variance ``(k-1)/(k+1)`` for k runs. Here the shape is chosen so that the weights, and
so the spread of a law fitted with them, are as much wider as Student's interval with ``r - p`` degrees of freedom is than the normal one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from fem_common.errors import ConfigError

Array = NDArray[np.float64]
COLUMN = {"total": "parameters", "non_embedding": "non_embedding_parameters"}


class NotIdentified(ValueError):
    """The runs do not determine a law; the message says what is missing. A note of the fit, not its end."""


class NotConverged(ConfigError):
    """A minimisation found no minimum: the end of the fit, unless another law stands beside it; then a note."""


@dataclass(frozen=True)
class Points:
    """Final losses of one variant's runs; arrays ``[r]``, NaN where a run has no such thing (budget, width, rate, seed)."""

    run: NDArray[np.str_]
    n: Array  # parameters
    d: Array  # tokens
    c: Array  # FLOPs
    loss: Array  # nats a token
    budget: Array
    width: Array
    rate: Array
    seed: Array

    def __len__(self) -> int:
        return len(self.n)

    def take(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> Points:
        """Some of the runs."""
        return Points(**{item.name: getattr(self, item.name)[which] for item in fields(self)})

    @property
    def budgets(self) -> list[float]:
        """The budgets, rising; empty where not every run has one."""
        return (
            []
            if np.isnan(self.budget).any()
            else [float(value) for value in np.unique(self.budget)]
        )

    @property
    def strata(self) -> list[NDArray[np.intp]]:
        """Indices of the runs of each budget; of all runs where there are no budgets."""
        return [np.flatnonzero(self.budget == value) for value in self.budgets] or [
            np.arange(len(self))
        ]


def points_of(frame: pd.DataFrame, parameters: str) -> Points:
    """One variant's final rows of the table as `Points`; ``parameters``: total or non_embedding.

    Raises ConfigError (a loss, N, D or C is missing or not a positive number; the run and the column are named).
    """
    runs = np.asarray(frame["run"].astype(str), dtype=np.str_)
    arrays = {}
    wanted = {"n": COLUMN[parameters], "d": "tokens", "c": "flops", "loss": "loss"}
    optional = {"budget": "budget", "width": "width", "rate": "learning_rate", "seed": "seed"}
    for name, column in (wanted | optional).items():
        arrays[name] = frame[column].to_numpy(dtype=np.float64, na_value=np.nan)
        wrong = ~(np.isfinite(arrays[name]) & (arrays[name] > 0))
        if name in wanted and wrong.any():
            fix = (
                "; set fit.parameters: total"
                if column == COLUMN["non_embedding"]
                else "; take the run out, or run it again"
            )
            raise ConfigError(
                f"run {runs[wrong][0]}: {column} = {arrays[name][wrong][0]:g}: a law needs a positive number{fix}"
            )
    return Points(run=runs, **arrays)


def cells(points: Points) -> list[NDArray[np.intp]]:
    """Indices of the runs of each size and length: same N and same budget (without budgets: same D). One run or several rates or seeds."""
    length = points.d if not points.budgets else points.budget
    keys = sorted(set(zip(points.n, length, strict=True)))
    return [np.flatnonzero((points.n == n) & (length == d)) for n, d in keys]


def by_rate(points: Points, rows: Iterable[int]) -> dict[float, NDArray[np.intp]]:
    """Learning rate -> indices among ``rows``, rising."""
    chosen = np.asarray(list(rows), dtype=np.intp)
    return {
        float(rate): chosen[points.rate[chosen] == rate]
        for rate in np.unique(points.rate[chosen])
        if not np.isnan(rate)
    }


def best_rates(points: Points) -> tuple[Points, str | None]:
    """Of each size and length the runs of the learning rate with the least mean loss, and a note where there were several rates."""
    keep, several = list[int](), False
    for rows in cells(points):
        rates = by_rate(points, rows)
        several |= len(rates) > 1
        keep += (
            min(rates.values(), key=lambda some: float(points.loss[some].mean()))
            if len(rates) > 1
            else rows
        ).tolist()
    note = (
        "several learning rates: the laws take each size's best measured rate at each length"
        if several
        else None
    )
    return points.take(np.asarray(sorted(keep), dtype=np.intp)), note


SMALLEST_SHAPE = 0.1  # below it a stratum's weight is one run's


def student_over_normal(free: int, interval: float) -> float:
    """How many times wider an interval is where the scatter was estimated with ``free`` degrees of freedom than where it is known."""
    tail = (1 + interval) / 2
    return float(stats.t.ppf(tail, free) / stats.norm.ppf(tail))


def weights_of(
    strata: Sequence[NDArray[np.intp]],
    resamples: int,
    parameters: int,
    interval: float,
    rng: np.random.Generator,
) -> Array:
    """Weights ``[resamples, r]`` for a law of fewer ``parameters`` than runs and its ``interval``; a stratum's sum to its runs."""
    runs = sum(len(rows) for rows in strata)
    wider = student_over_normal(runs - parameters, interval) ** 2
    weights = np.zeros((resamples, runs))
    for rows in strata:
        k = len(rows)
        shape = ((k + 1) / wider - 1) / k
        weights[:, rows] = k * rng.dirichlet(np.full(k, max(shape, SMALLEST_SHAPE)), size=resamples)
    return weights
