"""Estimates with confidence intervals, power laws, and least-squares fits of power laws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
DRAW_DIGITS = 6  # significant digits of a stored bootstrap draw
FEWEST_DRAWS = 0.5  # an interval requires a law in at least this share of the resamples


@dataclass(frozen=True)
class Estimate:
    """A number with its confidence interval, whose level is the one of the study's fit.

    ``low`` and ``high`` are None without bootstrap resamples.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, value: float, draws: Array, interval: float, requested: int) -> Estimate:
        """Return an estimate whose interval is the percentiles of the bootstrap ``draws``.

        If fewer than half of the requested draws exist, the estimate has no interval.
        """
        if not len(draws) or len(draws) < FEWEST_DRAWS * requested:
            return cls(float(value))
        low, high = percentiles(draws, interval)
        return cls(float(value), float(low), float(high))

    def text(self, form: str | Callable[[float], str], alone: str = "") -> str:
        """Format as 0.49 (0.45–0.53), -0.35 (-0.37 to -0.33); without an interval, the value and
        the words ``alone``.
        """
        formatted = form if callable(form) else f"{{:{form}}}".format
        if self.low is None or self.high is None:
            return formatted(self.value) + alone
        return (
            f"{formatted(self.value)}"
            f" ({formatted(self.low)}{' to ' if self.value < 0 else '–'}{formatted(self.high)})"
        )


@dataclass(frozen=True)
class PowerLaw:
    """Power law ``y = offset + coefficient x^exponent`` with its bootstrap draws.

    Attributes:
        x: name of the argument for a picture's axis: "FLOPs", "parameters" or "width".
        y: name of the result.
        draws: one (coefficient, exponent, offset) per resample, for `band`.
    """

    x: str
    y: str
    coefficient: Estimate
    exponent: Estimate
    offset: Estimate | None = None  # None: a power law without an offset
    draws: list[tuple[float, float, float]] = field(default_factory=list)

    def at(self, x: ArrayLike) -> Array:
        """Return the law's value at ``x``."""
        offset = self.offset.value if self.offset else 0.0
        return (
            offset + self.coefficient.value * np.asarray(x, dtype=np.float64) ** self.exponent.value
        )

    def band(self, x: ArrayLike, interval: float = 0.9) -> tuple[Array, Array] | None:
        """Return (low, high) at each ``x``: percentiles over the draws, or None without draws."""
        if not self.draws:
            return None
        coefficient, exponent, offset = np.asarray(self.draws, dtype=np.float64).T[:, :, None]
        values = offset + coefficient * np.asarray(x, dtype=np.float64).reshape(1, -1) ** exponent
        return percentiles(values, interval)


def percentiles(values: ArrayLike, interval: float) -> tuple[Array, Array]:
    """Return (low, high), over the first axis, of the central ``interval`` of values."""
    low, high = np.quantile(
        np.asarray(values, dtype=np.float64), [(1 - interval) / 2, (1 + interval) / 2], axis=0
    )
    return low, high


def rounded(rows: Array) -> list[Any]:
    """Return bootstrap draws as rows of floats with `DRAW_DIGITS` significant digits."""
    return [tuple(float(f"{value:.{DRAW_DIGITS}g}") for value in row) for row in rows]


FEWEST_WITH_OFFSET = 4  # fewest points for a law with an offset, its third parameter


def pure(x: Array, y: Array) -> Array:
    """Fit ``y = k x^s`` by least squares in logarithms for each of r rows of ``y``.

    ``x`` is ``[p]`` and ``y`` ``[r, p]``. Returns rows (k, s, 0) ``[r, 3]``; the 0 is the offset.
    """
    log_x, log_y = np.log(x), np.log(y)
    middle = log_x.mean()
    slope = ((log_x - middle) * log_y).sum(axis=1) / ((log_x - middle) ** 2).sum()
    return np.stack([np.exp(log_y.mean(axis=1) - slope * middle), slope, np.zeros(len(y))], axis=1)


def with_offset(x: Array, y: Array) -> Array:
    """Fit ``y = offset + k x^-s`` with offset >= 0 by least squares of relative errors.

    ``x`` is ``[p]`` and ``y`` ``[r, p]``; returns rows (k, -s, offset) ``[r, 3]``. For each s of a
    grid from 0.01 to 1, k and the offset follow linearly; the grid is then refined about the best
    s.
    """
    center = float(np.exp(np.log(x).mean()))
    relative = x / center
    grid = np.repeat(np.geomspace(0.01, 1.0, 120)[None], len(y), axis=0)
    width = 100 ** (1 / 119)
    for _ in range(3):
        k, offset, error = _linear(relative, y, grid)
        best = error.argmin(axis=1)
        rows = np.arange(len(y))
        found = grid[rows, best]
        law = np.stack([k[rows, best] * center**found, -found, offset[rows, best]], axis=1)
        grid = np.clip(found[:, None] * np.geomspace(1 / width, width, 41)[None], 0.01, 1.0)
        width **= 1 / 20
    return law


def _linear(x: Array, y: Array, grid: Array) -> tuple[Array, Array, Array]:
    """Return k, offset and squared relative error ``[r, g]`` for each exponent of ``grid`` ``[r,
    g]``.
    """
    term = x[None, None, :] ** -grid[:, :, None] / y[:, None, :]
    flat = np.broadcast_to(1 / y[:, None, :], term.shape)
    tt, ff, tf, t1, f1 = (
        (a * b).sum(axis=2)
        for a, b in ((term, term), (flat, flat), (term, flat), (term, 1.0), (flat, 1.0))
    )
    determinant = np.maximum(tt * ff - tf * tf, 1e-300)
    k, offset = (t1 * ff - f1 * tf) / determinant, (f1 * tt - t1 * tf) / determinant
    below = offset < 0
    k, offset = np.where(below, t1 / tt, k), np.where(below, 0.0, offset)
    return k, offset, ((k[:, :, None] * term + offset[:, :, None] * flat - 1) ** 2).sum(axis=2)


def power_law(
    x_name: str,
    y_name: str,
    value: Array,
    draws: Array,
    requested: int,
    interval: float,
    offset: bool,
) -> PowerLaw:
    """Return a `PowerLaw` from its (k, s, offset) ``[3]`` and the resamples' ``[r, 3]``; without an
    interval if too few of the ``requested`` resamples exist.
    """
    coefficient, exponent, level = (
        Estimate.of(value[column], draws[:, column], interval, requested) for column in range(3)
    )
    kept = rounded(draws) if coefficient.low is not None else []
    return PowerLaw(x_name, y_name, coefficient, exponent, level if offset else None, kept)
