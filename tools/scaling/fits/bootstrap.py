"""Resampling of runs: random weights, and how much wider few runs make an interval.

Rubin's Bayesian bootstrap (The Annals of Statistics 9, 1981): a run's weight is not how often it is drawn but a share of its
stratum, so that no resample loses a size, as drawing four runs with replacement does in nine of ten cases. Its shares are uniform (a
Dirichlet distribution of shape 1), with variance ``(k-1)/(k+1)`` for k runs. Here the shape is chosen so that the weights, and so the
spread of a law fitted with them, are as much wider as Student's interval with ``r - p`` degrees of freedom is than the normal one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
SMALLEST_SHAPE = 0.1  # below it a stratum's weight is one run's


def student_over_normal(free: int, interval: float) -> float:
    """How many times wider an interval is where the scatter was estimated with ``free`` degrees of freedom than where it is known."""
    tail = (1 + interval) / 2
    return float(stats.t.ppf(tail, free) / stats.norm.ppf(tail))


def weights_of(strata: Sequence[NDArray[np.intp]], resamples: int, parameters: int, interval: float, rng: np.random.Generator) -> Array:
    """Weights ``[resamples, r]`` for a law of fewer ``parameters`` than runs and its ``interval``; a stratum's sum to its runs."""
    runs = sum(len(rows) for rows in strata)
    wider = student_over_normal(runs - parameters, interval) ** 2
    weights = np.zeros((resamples, runs))
    for rows in strata:
        k = len(rows)
        shape = ((k + 1) / wider - 1) / k
        weights[:, rows] = k * rng.dirichlet(np.full(k, max(shape, SMALLEST_SHAPE)), size=resamples)
    return weights
