"""Minimisation of the objective of approach 3 for many weightings of the same runs at once.

The objective is that of Hoffmann et al. (arXiv 2203.15556, equation 3): the sum over runs of ``w
Huber_delta(LSE(e, a - alpha log N, b - beta log D) - log L)``, with ``E, A, B = exp(e, a, b)``. It
is the sum, not the mean: Besiroglu et al. (arXiv 2404.10102) trace the original's early stop to the
mean, whose gradients are below L-BFGS-B's tolerance.

log N and log D are centred, which does not move the minimum and makes the five parameters far less
correlated. Parameters ``[r, 5]`` are (e, a, b, alpha, beta) in this form, and `Data` converts them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
LARGEST_EXPONENT = 3.0  # bound of alpha and beta; published values are between 0.2 and 1.2
SMALLEST_EXPONENT = 0.01
# Lower bound of E and of the terms at the centre of the runs, as a share of the lowest loss.
SMALLEST_SHARE = 1e-4
# Relative to delta, the largest gradient of one run, times the number of runs.
GRADIENT_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Data:
    """Runs of a fit as arrays ``[r]``: centred log N (x), centred log D (y), and log loss (target).

    ``center`` is the mean of log N and of log D that was subtracted.
    """

    x: Array
    y: Array
    target: Array
    center: tuple[float, float]

    @classmethod
    def of(cls, n: ArrayLike, d: ArrayLike, loss: ArrayLike) -> Data:
        """Create from parameters, tokens and losses."""
        x = np.log(np.asarray(n, dtype=np.float64))
        y = np.log(np.asarray(d, dtype=np.float64))
        center = float(x.mean()), float(y.mean())
        return cls(x - center[0], y - center[1], np.log(np.asarray(loss, dtype=np.float64)), center)

    def plain(self, parameters: Array) -> Array:
        """Convert centred (e, a, b, alpha, beta) to (E, A, B, alpha, beta)."""
        e, a, b, alpha, beta = parameters.T
        a, b = a + alpha * self.center[0], b + beta * self.center[1]
        return np.stack([np.exp(e), np.exp(a), np.exp(b), alpha, beta], axis=1)

    def centred(self, plain: Array) -> Array:
        """Inverse of `plain`."""
        e, a, b, alpha, beta = plain.T
        a, b = np.log(a) - alpha * self.center[0], np.log(b) - beta * self.center[1]
        return np.stack([np.log(e), a, b, alpha, beta], axis=1)

    def bounds(self) -> tuple[Array, Array]:
        """Return (lower, upper) of the centred parameters."""
        low, high = float(self.target.min()), float(self.target.max())
        smallest = low + np.log(SMALLEST_SHARE)
        lower = np.array([smallest, smallest, smallest, SMALLEST_EXPONENT, SMALLEST_EXPONENT])
        return lower, np.array([low, high, high, LARGEST_EXPONENT, LARGEST_EXPONENT])


def residuals(parameters: Array, data: Data) -> tuple[Array, Array]:
    """Return predicted minus measured log loss ``[r, runs]``, and its Jacobian ``[r, runs, 5]``."""
    e, a, b, alpha, beta = parameters.T[:, :, None]
    terms = np.stack(
        [np.broadcast_to(e, (len(parameters), len(data.x))), a - alpha * data.x, b - beta * data.y]
    )
    top = terms.max(axis=0)
    shares = np.exp(terms - top)
    total = shares.sum(axis=0)
    shares /= total
    jacobian = np.stack(
        [shares[0], shares[1], shares[2], -shares[1] * data.x, -shares[2] * data.y], axis=-1
    )
    return top + np.log(total) - data.target, jacobian


def huber(residual: Array, delta: float) -> Array:
    """Return the Huber loss: half the square up to delta, linear beyond."""
    size = np.abs(residual)
    return np.where(size <= delta, 0.5 * residual * residual, delta * (size - 0.5 * delta))


def objective(parameters: Array, data: Data, weights: Array, delta: float) -> tuple[Array, Array]:
    """Return the objective ``[r]`` and its gradient ``[r, 5]``."""
    residual, jacobian = residuals(parameters, data)
    gradient = np.einsum("rn,rnk->rk", weights * np.clip(residual, -delta, delta), jacobian)
    return (weights * huber(residual, delta)).sum(axis=1), gradient


def bounded(parameters: Array, data: Data) -> NDArray[np.bool_]:
    """Return a mask ``[r, 5]`` of the parameters that are on their bounds."""
    lower, upper = data.bounds()
    return (parameters <= lower + 1e-9) | (parameters >= upper - 1e-9)


def minimise(
    start: Array, data: Data, weights: Array, delta: float, iterations: int = 300
) -> tuple[Array, NDArray[np.bool_]]:
    """Minimise from ``start`` ``[r, 5]`` with ``weights`` ``[r, runs]``; return the minima ``[r,
    5]`` and a mask of vanishing gradients.

    Damped Newton steps. The damping matrix is the quadratic that bounds the Huber loss from above
    (weights ``min(1, delta/|residual|)``). With damping 1 a step is one of iteratively reweighted
    least squares, which never increases the objective of a linear model; with little damping it is
    Newton's, which uses only the runs within delta.
    """
    lower, upper = data.bounds()
    found = np.clip(start, lower, upper)
    done = np.zeros(len(found), dtype=bool)
    damping = np.ones(len(found))
    value, _ = objective(found, data, weights, delta)
    tolerance = GRADIENT_TOLERANCE * delta * weights.sum(axis=1)
    for _ in range(iterations):
        rows = np.flatnonzero(~done)
        if not len(rows):
            break
        here, w = found[rows], weights[rows]
        residual, jacobian = residuals(here, data)
        gradient = np.einsum("rn,rnk->rk", w * np.clip(residual, -delta, delta), jacobian)
        free = ~(((here <= lower) & (gradient > 0)) | ((here >= upper) & (gradient < 0)))
        gradient *= free
        settled = np.abs(gradient).max(axis=1) <= tolerance[rows]
        done[rows[settled]] = True
        size = np.abs(residual)
        above = w * np.minimum(1.0, delta / np.maximum(size, delta))
        curvature = w * (size <= delta) + damping[rows, None] * above
        matrix = (jacobian * curvature[:, :, None]).transpose(0, 2, 1) @ jacobian
        matrix *= free[:, :, None] & free[:, None, :]
        diagonal = np.einsum("rkk->rk", matrix)
        diagonal += np.where(free, 1e-12 * diagonal.max(axis=1, keepdims=True), 1.0)
        trial = np.clip(here - np.linalg.solve(matrix, gradient[:, :, None])[:, :, 0], lower, upper)
        trial_value = (w * huber(residuals(trial, data)[0], delta)).sum(axis=1)
        better = trial_value < value[rows]
        found[rows[better]] = trial[better]
        value[rows[better]] = trial_value[better]
        damping[rows] = np.clip(np.where(better, damping[rows] / 3, damping[rows] * 5), 1e-4, 1e8)
    return found, done
