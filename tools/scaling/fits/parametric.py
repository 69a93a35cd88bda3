"""Approach 3: ``L(N, D) = E + A/N^alpha + B/D^beta`` (Hoffmann et al., arXiv 2203.15556, section
3.3 and appendix D.3).

The objective is that of `huber`. L-BFGS-B with the analytic gradient descends from a grid of starts
over (alpha, beta) and E's share of the lowest loss, with A and B from non-negative least squares at
each; damped Newton steps then refine every result. The best one is a fit only if its gradient
vanishes, no parameter is on its bound, and several starts ended in it.

Intervals are percentiles of a bootstrap over runs (`bootstrap`), within each budget if budgets
exist, warm-started from the fit. This method was chosen by the share of simulated studies of
Chinchilla's law in which a 90% interval contained the truth (range over E, A, B, alpha, beta and
a): with 35 runs (5 budgets x 7 sizes, 0.4% noise) 89 to 91%, with 12 (3 x 4, 0.2%) 84 to 89%.
Without widening, 12 runs gave 78 to 84%. With r/(r-p) as the widening, 35 runs gave up to 96%, as
did drawing runs with replacement, whose basic intervals gave 75 to 80% and BCa 84 to 86%: A, B and
E are skewed, and percentiles follow that.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy.optimize import minimize, nnls

from tools.scaling.fits.points import weights_of
from tools.scaling.study import FitConfig

from ..laws import Estimate, rounded
from ..results import LeftOut, ParametricFit, Residual
from . import huber
from .points import Array, NotConverged, NotIdentified, Points

FEWEST_RUNS = 7  # five parameters and two degrees of freedom
FEWEST_VALUES = 3  # different values of N and of D: E, A and alpha (E, B and beta) are three
STARTS = 12  # number of starting points: those of the grid with the lowest objective
FEWEST_AGREEING = 3
SAME = 1e-6  # largest relative difference between objectives of the same minimum
NAMES = ("E", "A", "B", "alpha", "beta")


def fit_parametric(points: Points, config: FitConfig, rng: np.random.Generator) -> ParametricFit:
    """Return the law through all runs with bootstrap intervals.

    Raises NotIdentified (too few runs, sizes or lengths, or a parameter at its bound: the data do
    not determine it), NotConverged (the minimisation failed).
    """
    data = _enough(points)
    best, value, starts, agreeing = descend(data, config.huber_delta)
    _check_inside(best, data)
    plain = data.plain(best)[0]
    weights = weights_of(points.strata, config.resamples, len(NAMES), config.interval, rng)
    drawn, converged = huber.minimise(
        np.repeat(best, config.resamples, axis=0), data, weights, config.huber_delta
    )
    draws = data.plain(drawn[converged])
    phi, log_k = np.polyfit(np.log(points.n), np.log(points.c / points.d), 1)
    estimates = [
        Estimate.of(plain[i], draws[:, i], config.interval, config.resamples) for i in range(5)
    ]
    both = np.vstack([plain, draws])
    growth = both[:, [4, 3]] / (both[:, 3] + phi * both[:, 4])[:, None]
    a, b = (
        Estimate.of(growth[0, i], growth[1:, i], config.interval, config.resamples)
        for i in range(2)
    )
    residual = huber.residuals(best, data)[0][0]
    return ParametricFit(
        **dict(zip(NAMES, estimates, strict=True)),
        a=a,
        b=b,
        k=float(np.exp(log_k)),
        phi=float(phi),
        noise=float(np.sqrt((residual**2).sum() / (len(points) - 5))),
        objective=value,
        huber_delta=config.huber_delta,
        points=len(points),
        starts=starts,
        agreeing=agreeing,
        resamples=config.resamples,
        failed=int((~converged).sum()),
        on_bound=int(huber.bounded(drawn[converged], data).any(axis=1).sum()),
        interval=config.interval,
        draws=rounded(draws),
    )


def residuals(points: Points, law: ParametricFit) -> list[Residual]:
    """Return the deviation of every run from the law."""
    predicted = law.loss(points.n, points.d)
    relative = points.loss / predicted - 1
    columns = (points.n, points.d, points.c, points.budget, points.loss, predicted, relative)
    rows = zip(points.run.tolist(), *(column.tolist() for column in columns), strict=True)
    return [
        Residual(run, n, d, c, None if math.isnan(budget) else budget, *rest)
        for run, n, d, c, budget, *rest in rows
    ]


def leave_out(points: Points, law: ParametricFit, delta: float) -> tuple[list[LeftOut], list[str]]:
    """Return the errors of the law fitted without each budget in turn, on that budget's runs; and a
    note for each budget without which no law exists.
    """
    found, notes = [], []
    full = huber.Data.of(points.n, points.d, points.loss)
    start = full.centred(np.array([[getattr(law, name).value for name in NAMES]]))
    for budget in points.budgets:
        rest = points.take(points.budget != budget)
        left = points.take(points.budget == budget)
        try:
            data = _enough(rest)
            end, *_ = descend(data, delta, data.centred(full.plain(start)))
            _check_inside(end, data)
        except (NotIdentified, NotConverged) as error:
            notes.append(f"left out {budget:.3g} FLOPs: {error}")
            continue
        e, a, b, alpha, beta = data.plain(end)[0]
        errors = np.abs(e + a * left.n**-alpha + b * left.d**-beta - left.loss) / left.loss
        mean, worst = float(errors.mean()), float(errors.max())
        run = str(left.run[errors.argmax()])
        found.append(LeftOut(budget, len(left), mean, worst, run))
    return found, notes


def descend(
    data: huber.Data, delta: float, warm: Array | None = None
) -> tuple[Array, float, int, int]:
    """Minimise from the grid of starts, and ``warm`` ones: (best parameters ``[1, 5]``, centred;
    objective; starts; agreeing starts).

    Raises NotConverged (no start, or too few, ended in the lowest value with a vanishing gradient).
    """
    lower, upper = data.bounds()
    weights = np.ones((1, len(data.x)))
    grid = _starts(data, delta)
    starts = grid if warm is None else np.concatenate([grid, np.clip(warm, lower, upper)])

    def scaled(parameters: Array) -> tuple[float, Array]:
        value, gradient = huber.objective(parameters[None], data, weights, delta)
        return float(value[0] / delta), gradient[0] / delta

    options = {"maxiter": 80, "ftol": 1e-13, "gtol": 1e-8}
    bounds = list(zip(lower, upper, strict=True))
    ends = np.stack(
        [
            minimize(scaled, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
            for start in starts
        ]
    )
    found, settled = huber.minimise(ends, data, np.repeat(weights, len(ends), axis=0), delta)
    values, _ = huber.objective(found, data, weights, delta)
    best = int(np.lexsort((~settled, values.round(15)))[0])
    agreeing = int((settled & (values <= values[best] * (1 + SAME) + 1e-15)).sum())
    if not settled[best] or agreeing < FEWEST_AGREEING:
        raise NotConverged(
            f"the parametric fit does not converge: {agreeing} of {len(starts)} starts reached the"
            " lowest objective with a zero gradient; check the runs for an outlier, or leave this"
            " law out with fit.approaches: [isoflop]"
        )
    return found[best : best + 1], float(values[best]), len(starts), agreeing


def _starts(data: huber.Data, delta: float) -> Array:
    """Return the best starts of the grid ``[s, 5]``: exponents and E's share of the lowest loss are
    set, A and B are solved for.
    """
    loss = np.exp(data.target)
    lower, upper = data.bounds()
    exponents = (0.1, 0.2, 0.35, 0.5, 0.8, 1.2)
    shares = (0.05, 0.3, 0.6, 0.85, 0.95)
    starts = []
    for alpha, beta, share in itertools.product(exponents, exponents, shares):
        terms = np.stack([np.exp(-alpha * data.x), np.exp(-beta * data.y)], axis=1)
        e = share * loss.min()
        (a, b), _ = nnls(terms / loss[:, None], (loss - e) / loss)
        starts.append([np.log(e), np.log(max(a, 1e-12)), np.log(max(b, 1e-12)), alpha, beta])
    grid = np.clip(np.array(starts), lower, upper)
    value, _ = huber.objective(grid, data, np.ones((1, len(loss))), delta)
    return grid[np.argsort(value, kind="stable")[:STARTS]]


def _enough(points: Points) -> huber.Data:
    """Return the runs in the form of the objective. Raises NotIdentified if they are too few or too
    similar.
    """
    sizes, lengths = len(np.unique(points.n)), len(np.unique(points.d))
    if len(points) < FEWEST_RUNS:
        raise NotIdentified(
            f"the parametric law has 5 parameters, but only {len(points)} runs exist; at least"
            f" {FEWEST_RUNS} are needed"
        )
    if sizes < FEWEST_VALUES or lengths < FEWEST_VALUES:
        raise NotIdentified(
            f"the parametric law needs at least {FEWEST_VALUES} sizes and as many numbers of"
            f" tokens, but the runs have {sizes} and {lengths}: E, A, B, alpha and beta are not"
            " identified"
        )
    return huber.Data.of(points.n, points.d, points.loss)


def _check_inside(parameters: Array, data: huber.Data) -> None:
    outside = huber.bounded(parameters, data)[0]
    if outside.any():
        names = ", ".join(name for name, out in zip(NAMES, outside, strict=True) if out)
        raise NotIdentified(
            f"the parametric law is not identified: {names} reached the end of the allowed range;"
            " more sizes or budgets are needed"
        )
