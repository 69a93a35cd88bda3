"""A variant against the baseline: the share of the baseline's FLOPs with which it reaches the same
loss.

``x(C) = C_v(L_b(C)) / C``, with ``L_b(C)`` the baseline's lowest loss for C and ``C_v`` the
variant's FLOPs for that loss, by the law of the isoFLOP frontier or the parametric one. Intervals
pair the bootstrap draws of both, which are independent. The overall number is the geometric mean
over the baseline's budgets.
"""

from __future__ import annotations

import numpy as np

from ..laws import Array, Estimate, percentiles
from ..results import Comparison, Multiplier, VariantFit

METHODS = {"isoflop": "isoFLOP frontier", "parametric": "parametric law"}


def compare(variant: VariantFit, baseline: VariantFit, interval: float) -> list[Comparison]:
    """Return one comparison for each method by which both variants have a law."""
    return [
        _compared(variant, baseline, method, interval)
        for method in METHODS
        if variant.least_loss(method) is not None and baseline.least_loss(method) is not None
    ]


def _compared(
    variant: VariantFit, baseline: VariantFit, method: str, interval: float
) -> Comparison:
    by, flops = METHODS[method], _budgets(baseline)
    (ours, our_draws), (theirs, their_draws) = (_rows(fit, method) for fit in (variant, baseline))
    # ``reach``: losses of the baseline, decreasing.
    reach, own = _loss(theirs, flops)[0], _loss(ours, _budgets(variant))[0]
    none = ""
    if own.min() > reach.max() or reach.min() > own.max():
        spans = f"{own.min():.3f} to {own.max():.3f} and {reach.min():.3f} to {reach.max():.3f}"
        none = (
            f"{variant.name} and {baseline.name} have no common range of losses ({spans} by the"
            f" {by})"
        )
    value = _flops_for(ours, reach[None]) / flops
    kept = np.isfinite(value[0])
    if not kept.any():
        none = none or f"{variant.name} does not reach any loss of {baseline.name} by the {by}"
    if none:
        return Comparison(
            variant.name,
            baseline.name,
            method,
            [],
            None,
            f"{none}, so no compute multiplier exists",
        )
    flops, reach, value = flops[kept], reach[kept], value[:, kept]
    draws = min(len(our_draws), len(their_draws))
    ratios = _flops_for(our_draws[:draws], _loss(their_draws[:draws], flops)) / flops
    multipliers = [
        Multiplier(float(c), float(loss), _estimate(float(v), column, interval))
        for c, loss, v, column in zip(flops, reach, value[0], ratios.T, strict=True)
    ]
    overall = _estimate(
        float(np.exp(np.log(value[0]).mean())), np.exp(np.log(ratios).mean(axis=1)), interval
    )
    words = (
        f"{variant.name} reaches the loss of {baseline.name} with {overall.text('.2f')} times its"
        f" FLOPs, by the {by} from {flops.min():.1e} to {flops.max():.1e} FLOPs"
    )
    if overall.low is None:
        words += "; too few resamples reach that loss for an interval"
    elif overall.high is not None and overall.low <= 1 <= overall.high:
        words += "; the interval contains 1, so neither is shown to be better"
    return Comparison(variant.name, baseline.name, method, multipliers, overall, words)


def _budgets(fit: VariantFit) -> Array:
    """Return the FLOPs for comparing a variant: its budgets with a minimum inside, or the range of
    its runs without budgets.
    """
    if fit.isoflop is not None and fit.isoflop.loss is not None:
        return np.array([parabola.budget for parabola in fit.isoflop.parabolas if parabola.inside])
    flops = np.array([row.flops for row in fit.residuals])
    return np.geomspace(flops.min(), flops.max(), 3)


def _rows(fit: VariantFit, method: str) -> tuple[Array, Array]:
    """Return the law ``L = offset + k C^s`` as (k, s, offset): its value ``[1, 3]`` and its draws
    ``[r, 3]``.
    """
    law = fit.least_loss(method)
    assert law is not None
    value = law.coefficient.value, law.exponent.value, law.offset.value if law.offset else 0.0
    return np.array([value]), np.array(law.draws).reshape(-1, 3)


def _loss(law: Array, flops: Array) -> Array:
    return law[:, 2:] + law[:, :1] * flops[None] ** law[:, 1:2]


def _flops_for(law: Array, loss: Array) -> Array:
    """Return the FLOPs for each loss ``[r, p]``; infinite if the law's offset is not below it."""
    above = loss - law[:, 2:]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(
            above > 0, (np.maximum(above, 1e-300) / law[:, :1]) ** (1 / law[:, 1:2]), np.inf
        )


def _estimate(value: float, draws: Array, interval: float) -> Estimate:
    """Return the estimate of draws. A draw that never reaches the loss is infinite; if such draws
    exceed the upper tail, no interval is given.
    """
    finite = np.isfinite(draws)
    if not len(draws) or 1 - finite.mean() >= (1 - interval) / 2:
        return Estimate(value)
    low, high = percentiles(np.where(finite, draws, draws[finite].max()), interval)
    return Estimate(value, float(low), float(high))
