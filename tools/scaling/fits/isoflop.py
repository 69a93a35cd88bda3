"""Approach 2: a parabola of the loss over log N in each budget, and power laws through their minima
(Hoffmann et al., section 3.2).

Intervals are percentiles of a bootstrap of the residuals of the runs about the parabola of their
budget. Residuals are resampled and not runs: of four sizes drawn with replacement a third of the
draws contain only one or two, which do not define a parabola. A residual is relative to the loss,
divided by ``sqrt(1 - leverage)``, which gives it a run's variance, and drawn from all budgets
together. With 12 runs in three budgets nine coefficients leave three residuals to estimate the
scatter, so draws are widened by the ratio of Student's interval to the normal one. In simulated
studies of that design with scatter 0.7% (tests/tools/scaling/test_laws.py) a 90% interval then
contains an exponent in 90% and a compute multiplier in 94% of cases; without widening in 80 and
84%. If every budget has as many sizes as a parabola has coefficients, no residual remains: then no
interval is given, and a note states it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fem_common.errors import ConfigError
from fem_common.text import counted
from tools.scaling.fits.points import student_over_normal
from tools.scaling.study import FitConfig

from ..laws import FEWEST_WITH_OFFSET, Estimate, PowerLaw, power_law, pure, with_offset
from ..results import IsoFlopFit, Parabola
from .points import Array, NotIdentified, Points

FEWEST_SIZES = 3  # number of coefficients of a parabola
FEWEST_MINIMA = 2  # number of parameters of a power law


@dataclass(frozen=True)
class _Budget:
    """Runs of one budget and the linear maps from their losses to a parabola in ``x = log N -
    center``.
    """

    flops: float
    points: Points
    center: float
    solve: Array  # [3, r]: losses -> coefficients
    leverage: Array  # [r]
    tokens: Array  # coefficients of log D in the same basis

    @classmethod
    def of(cls, flops: float, points: Points) -> _Budget:
        log_n = np.log(points.n)
        center = float(log_n.mean())
        design = _basis(log_n - center)
        solve = np.asarray(np.linalg.pinv(design), dtype=np.float64)
        leverage = (design * solve.T).sum(axis=1)
        return cls(flops, points, center, solve, leverage, solve @ np.log(points.d))

    def minima(self, losses: Array) -> tuple[Array, Array, Array, Array]:
        """Return (N, D, loss, curvature) at the parabola's vertex for each row of ``losses`` ``[k,
        r]``; NaN without a minimum.
        """
        coefficients = losses @ self.solve.T
        curvature = coefficients[:, 2]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            x = np.where(curvature > 0, -coefficients[:, 1] / (2 * curvature), np.nan)
            loss = coefficients[:, 0] + coefficients[:, 1] * x + curvature * x * x
            return (
                np.exp(x + self.center),
                np.exp(_basis(x) @ self.tokens),
                np.where(loss > 0, loss, np.nan),
                curvature,
            )


def fit_isoflop(
    points: Points, config: FitConfig, rng: np.random.Generator
) -> tuple[IsoFlopFit, list[str]]:
    """Return the parabolas and their frontier, and notes on budgets without a minimum inside and on
    missing intervals.

    Raises ConfigError (a budget has fewer than three sizes), NotIdentified (the runs have no
    budgets, or no parabola has a minimum).
    """
    if not points.budgets:
        raise NotIdentified("the runs have no budgets, so isoFLOP parabolas cannot be fitted")
    for flops in points.budgets:
        sizes = np.unique(points.n[points.budget == flops])
        if len(sizes) < FEWEST_SIZES:
            listed = " and ".join(f"{size:.4g}" for size in sizes)
            raise ConfigError(
                f"budget {flops:.4g} FLOPs has {counted(len(sizes), 'size')} ({listed} parameters),"
                f" but a parabola needs {FEWEST_SIZES}: add sizes, or leave this approach out with"
                " fit.approaches: [parametric]"
            )
    budgets = [_Budget.of(flops, points.take(points.budget == flops)) for flops in points.budgets]
    drawn, notes = _draws(budgets, config, rng)
    parabolas, inside = [], []
    for budget, losses in zip(budgets, drawn, strict=True):
        parabola, note = _parabola(budget, losses, config.interval)
        notes += [note] if note else []
        parabolas += [parabola] if parabola else []
        inside.append(parabola is not None and parabola.inside)
    if not parabolas:
        raise NotIdentified(
            "no budget has a minimum of the loss over the sizes: " + "; ".join(notes)
        )
    laws, failed = _frontier(
        [b for b, ok in zip(budgets, inside, strict=True) if ok], drawn, inside, config
    )
    if laws is None:
        notes.append(
            f"{sum(inside)} of {len(budgets)} budgets have a minimum inside their sizes, but a"
            f" frontier needs {FEWEST_MINIMA}"
        )
    n_opt, d_opt, loss = laws or (None, None, None)
    if loss is not None and loss.offset is None:
        notes.append(
            f"{sum(inside)} minima: the lowest loss is a power law of FLOPs without an offset,"
            f" which would need {FEWEST_WITH_OFFSET}"
        )
    if failed > 0.05 * config.resamples:
        notes.append(
            f"{failed} of {config.resamples} resamples had no frontier; the intervals do not"
            " include them and are too narrow"
        )
    return (
        IsoFlopFit(parabolas, n_opt, d_opt, loss, config.resamples, failed, config.interval),
        notes,
    )


def _draws(
    budgets: list[_Budget], config: FitConfig, rng: np.random.Generator
) -> tuple[list[Array], list[str]]:
    """Return bootstrap losses of each budget's runs, and notes.

    If no residual remains, each array has no rows (``[0, r]``) and a note gives the reason.
    """
    pool, fitted = [], []
    degrees = sum(len(budget.points) - FEWEST_SIZES for budget in budgets)
    for budget in budgets:
        loss, free = budget.points.loss, 1 - budget.leverage
        smooth = _basis(np.log(budget.points.n) - budget.center) @ (budget.solve @ loss)
        fitted.append(smooth)
        if free.sum() > 0.5:  # at least one degree of freedom remains
            some = free > 1e-6
            pool.append(((loss - smooth) / smooth)[some] / np.sqrt(free[some]))
    if not pool:
        note = "every budget has three sizes, which a parabola fits exactly: no intervals"
        return [np.empty((0, len(one))) for one in fitted], [note]
    residuals = np.concatenate(pool) * student_over_normal(degrees, config.interval)
    signed = np.concatenate([residuals, -residuals])
    return [
        smooth * (1 + rng.choice(signed, size=(config.resamples, len(smooth)))) for smooth in fitted
    ], []


def _parabola(budget: _Budget, drawn: Array, interval: float) -> tuple[Parabola | None, str | None]:
    points, sizes = budget.points, budget.points.n
    n, d, loss, _ = (float(value[0]) for value in budget.minima(points.loss[None]))
    if np.isnan(n) or np.isnan(loss):
        return (
            None,
            f"budget {budget.flops:.3g} FLOPs: the parabola opens downwards, so it has no minimum",
        )
    c0, c1, c2 = (float(value) for value in budget.solve @ points.loss)
    inside = bool(sizes.min() <= n <= sizes.max())
    note = None
    if not inside:
        end = "smallest" if n < sizes.min() else "largest"
        note = (
            f"budget {budget.flops:.3g} FLOPs: the minimum is beyond the {end} size, so the"
            " frontier does not use it; add sizes beyond that one"
        )
    shifted = (c0 - c1 * budget.center + c2 * budget.center**2, c1 - 2 * c2 * budget.center, c2)
    pairs = zip((n, d, loss), budget.minima(drawn)[:3], strict=True)
    best, tokens, least = (
        Estimate.of(value, draws[np.isfinite(draws)], interval, len(draws))
        for value, draws in pairs
    )
    return (
        Parabola(
            budget.flops, shifted, best, tokens, least, inside, [str(run) for run in points.run]
        ),
        note,
    )


def _frontier(
    budgets: list[_Budget], drawn: list[Array], inside: list[bool], config: FitConfig
) -> tuple[tuple[PowerLaw, PowerLaw, PowerLaw] | None, int]:
    """Return the three laws through the inner minima, and the number of resamples without a minimum
    in one of these budgets.
    """
    if len(budgets) < FEWEST_MINIMA:
        return None, 0
    flops = np.array([budget.flops for budget in budgets])
    # [3, budgets]
    value = np.stack(
        [np.concatenate(budget.minima(budget.points.loss[None])[:3]) for budget in budgets], axis=1
    )
    used = [losses for losses, ok in zip(drawn, inside, strict=True) if ok]
    # [3, k, budgets]
    draws = np.stack(
        [np.stack(budget.minima(losses)[:3]) for budget, losses in zip(budgets, used, strict=True)],
        axis=2,
    )
    spans = np.array([[budget.points.n.min(), budget.points.n.max()] for budget in budgets])
    good = np.isfinite(draws).all(axis=(0, 2)) & (
        (draws[0] > spans[:, 0] / 10) & (draws[0] < spans[:, 1] * 10)
    ).all(axis=1)
    offset = len(budgets) >= FEWEST_WITH_OFFSET
    laws = []
    for name, one, some in zip(("N_opt", "D_opt", "loss"), value, draws[:, good], strict=True):
        has_offset = offset and name == "loss"
        fit = with_offset if has_offset else pure
        found, resampled = fit(flops, one[None])[0], fit(flops, some)
        laws.append(
            power_law(
                "FLOPs", name, found, resampled, config.resamples, config.interval, has_offset
            )
        )
    return (laws[0], laws[1], laws[2]), int((~good).sum())


def _basis(x: Array) -> Array:
    return np.stack([np.ones_like(x), x, x * x], axis=-1)
