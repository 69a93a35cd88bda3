"""Best learning rate of each size, by Akima interpolation of the loss over log rate (as in the CEM
paper), and its power law.

Intervals are percentiles of a bootstrap over seeds, at each rate of each size; with one seed per
rate no interval is given.
"""

from __future__ import annotations

import numpy as np
from scipy.interpolate import Akima1DInterpolator

from tools.scaling.study import FitConfig

from ..laws import Array, Estimate, PowerLaw, power_law, pure
from ..results import LearningRateFit, LearningRateOptimum
from .points import Points, by_rate, cells

FEWEST_RATES = 4  # with fewer, an interpolation adds no information
DENSE = 400  # points between two rates at which the minimum is searched
CURVE = 120  # points of the curve stored for the picture


def fit_learning_rates(
    points: Points, config: FitConfig, rng: np.random.Generator
) -> tuple[LearningRateFit | None, list[str]]:
    """Return the optimum of each size and length with at least four rates, and the power laws
    through the inner optima.

    None without such a size; the notes list omitted sizes and the reasons.
    """
    optima: list[LearningRateOptimum] = []
    drawn: list[Array] = []
    notes: list[str] = []
    for rows in cells(points):
        rates = by_rate(points, rows)
        if len(rates) < 2:
            continue
        length = f"on {points.d[rows[0]]:.3g} tokens"
        if points.budgets:
            length = f"at {points.budget[rows[0]]:.3g} FLOPs"
        listed = f"{points.n[rows[0]]:.4g} parameters {length}"
        if len(rates) < FEWEST_RATES:
            notes.append(
                f"learning rate: {listed}: {len(rates)} rates, but an interpolation of the optimum"
                f" needs {FEWEST_RATES}"
            )
            continue
        losses = [points.loss[some] for some in rates.values()]
        optimum, draws = _optimum(points, int(rows[0]), np.array(list(rates)), losses, config, rng)
        if optimum.edge:
            end = "smallest" if optimum.rate.value == optimum.rates[0] else "largest"
            notes.append(
                f"learning rate: {listed}: the best is the {end} rate, {optimum.rate.value:g}: the"
                " optimum is not bracketed"
            )
        optima.append(optimum)
        drawn.append(draws)
    if not optima:
        return None, notes
    inner = [pair for pair in zip(optima, drawn, strict=True) if not pair[0].edge]
    by_parameters, by_width = (_law(name, inner, config) for name in ("parameters", "width"))
    if by_parameters is None:
        notes.append("learning rate: no power law, which needs inner optima of two sizes")
    elif not by_parameters.draws:
        notes.append("learning rate: one seed per rate, so its power law has no interval")
    return LearningRateFit(optima, by_parameters, by_width), notes


def akima_minimum(rates: Array, losses: Array) -> tuple[float, float]:
    """Return (rate, loss) at the minimum of the Akima interpolation over log rate, searched on a
    dense grid between the extreme rates.
    """
    x = np.log(rates)
    dense = np.unique(np.concatenate([x, np.linspace(x[0], x[-1], DENSE * (len(x) - 1) + 1)]))
    values = Akima1DInterpolator(x, losses)(dense)
    best = int(values.argmin())
    if best == 0:
        rate = rates[0]
    elif best == len(dense) - 1:
        rate = rates[-1]
    else:
        rate = np.exp(dense[best])
    return float(rate), float(values[best])


def _optimum(
    points: Points,
    row: int,
    rates: Array,
    losses: list[Array],
    config: FitConfig,
    rng: np.random.Generator,
) -> tuple[LearningRateOptimum, Array]:
    """Return the optimum of one size, and the best rates of its bootstrap resamples.

    The array of resamples is empty if a rate has only one seed.
    """
    means = np.array([float(some.mean()) for some in losses])
    rate, loss = akima_minimum(rates, means)
    best_rates = []
    if all(len(some) > 1 for some in losses):
        for _ in range(config.resamples):
            resampled = np.array([rng.choice(some, len(some)).mean() for some in losses])
            best_rates.append(akima_minimum(rates, resampled)[0])
    drawn = np.array(best_rates)
    x = np.linspace(np.log(rates[0]), np.log(rates[-1]), CURVE)
    curve = Akima1DInterpolator(np.log(rates), means)(x)
    width, budget = points.width[row], points.budget[row]
    return (
        LearningRateOptimum(
            width=None if np.isnan(width) else int(width),
            parameters=float(points.n[row]),
            budget=None if np.isnan(budget) else float(budget),
            rates=[float(value) for value in rates],
            losses=means.tolist(),
            curve=[(float(np.exp(a)), float(b)) for a, b in zip(x, curve, strict=True)],
            rate=Estimate.of(rate, drawn, config.interval, len(drawn)),
            loss=loss,
            edge=rate in (rates[0], rates[-1]),
        ),
        drawn,
    )


def _law(
    name: str, inner: list[tuple[LearningRateOptimum, Array]], config: FitConfig
) -> PowerLaw | None:
    """Return the power law of the best rate against size, or None with fewer than two sizes.

    ``name`` is the attribute of the optima that is the size: "parameters" or "width". ``inner``:
    the optima, each with the best rates of its resamples.
    """
    known = [(optimum, drawn) for optimum, drawn in inner if getattr(optimum, name)]
    x = np.array([float(getattr(optimum, name)) for optimum, _ in known])
    if len(np.unique(x)) < 2:
        return None
    rates = np.array([[optimum.rate.value for optimum, _ in known]])
    draws = np.empty((0, 3))
    if all(len(drawn) for _, drawn in known):
        draws = pure(x, np.stack([drawn for _, drawn in known], axis=1))
    return power_law(
        name, "learning rate", pure(x, rates)[0], draws, config.resamples, config.interval, False
    )
