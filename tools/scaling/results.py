"""Results of a study's fits: the numbers of ``fit.json``, and predictions from them without fitting
again.

Dataclasses that are written to and read from JSON, with `predict_loss`, `optimal`, `PowerLaw.at`,
`PowerLaw.band`, `ParametricFit.loss`, `ParametricFit.band`. Losses are nats per token, N
parameters, D tokens, C FLOPs. No torch, no scipy, no files except ``fit.json``.
"""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fem_common.errors import ConfigError, convert_os_errors
from tools.scaling.laws import Array, Estimate, PowerLaw, percentiles
from tools.scaling.table import write_file

FORMAT = 2  # format of fit.json


@dataclass(frozen=True)
class Parabola:
    """Loss against log N in one budget: ``c0 + c1 log N + c2 (log N)^2``, natural logarithms, and
    its minimum.

    Attributes:
        inside: the minimum is between the smallest and the largest measured size; only such minima
        form the frontier. runs: the fitted runs, one per size.
    """

    budget: float
    coefficients: tuple[float, float, float]
    n_opt: Estimate
    d_opt: Estimate
    loss: Estimate
    inside: bool
    runs: list[str]

    def at(self, n: ArrayLike) -> Array:
        """Return the parabola's loss at N parameters."""
        x = np.log(np.asarray(n, dtype=np.float64))
        c0, c1, c2 = self.coefficients
        return c0 + c1 * x + c2 * x * x


@dataclass(frozen=True)
class IsoFlopFit:
    """Approach 2 of Hoffmann et al. (arXiv 2203.15556, section 3.2): the minima of the budgets and
    the power laws through them.

    Attributes:
        n_opt, d_opt, loss: N_opt, D_opt and the lowest loss against FLOPs; None if fewer than two
        budgets have a minimum inside. resamples, failed: requested bootstrap resamples, and those
        without a frontier.
    """

    parabolas: list[Parabola]
    n_opt: PowerLaw | None
    d_opt: PowerLaw | None
    loss: PowerLaw | None
    resamples: int
    failed: int
    interval: float


@dataclass(frozen=True)
class ParametricFit:
    """Approach 3 of Hoffmann et al. (section 3.3): ``L = E + A/N^alpha + B/D^beta``.

    Attributes:
        k, phi: ``C = k N^phi D``, least squares through the logarithms of the FLOPs per token of
        the runs; 6 and 1 if C = 6 N D; different in small models, where embeddings, attention and
        the number of layers by the shape rule matter. a, b: exponents of the optimal N and D in C:
        beta / (alpha + phi beta), alpha / (alpha + phi beta); equation 4 at phi = 1. noise: scatter
        of the runs about the law: standard deviation of log loss, corrected for degrees of freedom.
        objective: the sum of Huber losses at the minimum; ``agreeing`` of the ``starts`` ended in
        it. on_bound: converged resamples with a parameter at the end of its range; they are among
        the draws. draws: (E, A, B, alpha, beta), one per converged resample.
    """

    E: Estimate
    A: Estimate
    B: Estimate
    alpha: Estimate
    beta: Estimate
    a: Estimate
    b: Estimate
    k: float
    phi: float
    noise: float
    objective: float
    huber_delta: float
    points: int
    starts: int
    agreeing: int
    resamples: int
    failed: int
    on_bound: int
    interval: float
    draws: list[tuple[float, float, float, float, float]] = field(default_factory=list)

    def loss(self, n: ArrayLike, d: ArrayLike) -> Array:
        """Return the law's loss at N parameters and D tokens."""
        n, d = np.asarray(n, dtype=np.float64), np.asarray(d, dtype=np.float64)
        return (
            self.E.value + self.A.value * n**-self.alpha.value + self.B.value * d**-self.beta.value
        )

    def band(self, n: ArrayLike, d: ArrayLike) -> tuple[Array, Array] | None:
        """Return (low, high) of the predicted loss at each point, or None without draws.

        The band is the uncertainty of the law, without the scatter of single runs.
        """
        if not self.draws:
            return None
        e, a, b, alpha, beta = np.asarray(self.draws, dtype=np.float64).T[:, :, None]
        n, d = (np.asarray(each, dtype=np.float64).reshape(1, -1) for each in (n, d))
        return percentiles(e + a * n**-alpha + b * d**-beta, self.interval)

    @property
    def values(self) -> Array:
        """Return (E, A, B, alpha, beta) as one row ``[1, 5]``, in the format of the draws."""
        return np.array([[one.value for one in (self.E, self.A, self.B, self.alpha, self.beta)]])

    def best(self, parameters: ArrayLike, flops: float) -> tuple[Array, Array]:
        """Return N and D ``[r]`` with the lowest loss for ``flops``, for each row (E, A, B, alpha,
        beta) of ``parameters`` ``[r, 5]``.

        This is the zero of the derivative along ``C = k N^phi D``: ``N = G (C/k)^a``, ``D = (C/k)^b
        / G^phi`` with ``G = (alpha A / (phi beta B))^(1 / (alpha + phi beta))``; equation 4 of
        Hoffmann et al. at phi = 1.
        """
        _, a, b, alpha, beta = np.asarray(parameters, dtype=np.float64).reshape(-1, 5).T
        n = (alpha * a / (self.phi * beta * b) * (flops / self.k) ** beta) ** (
            1 / (alpha + self.phi * beta)
        )
        return n, flops / self.k / n**self.phi

    @property
    def frontier(self) -> PowerLaw:
        """Return the lowest loss for C FLOPs, ``E + K C^-p``, with the draws of the law."""

        def rows(parameters: ArrayLike) -> list[tuple[float, float, float]]:
            e, a, b, alpha, beta = np.asarray(parameters, dtype=np.float64).reshape(-1, 5).T
            n, d = self.best(parameters, 1.0)
            found = np.stack(
                [a * n**-alpha + b * d**-beta, -alpha * beta / (alpha + self.phi * beta), e], axis=1
            )
            return [tuple(row) for row in found.tolist()]

        k, exponent, e = map(Estimate, rows(self.values)[0])
        return PowerLaw("FLOPs", "loss", k, exponent, e, rows(self.draws))


@dataclass(frozen=True)
class LearningRateOptimum:
    """Losses of one size against the learning rate, and their minimum by Akima interpolation over
    log rate.

    Attributes:
        rates, losses: the measured points, increasing in rate; losses are means over the seeds.
        curve: (rate, loss) along the interpolation, for the picture. edge: True if the lowest loss
        is at the smallest or largest rate, so that the optimum may be beyond it; the power law
        omits it.
    """

    width: int | None
    parameters: float
    budget: float | None
    rates: list[float]
    losses: list[float]
    curve: list[tuple[float, float]]
    rate: Estimate
    loss: float
    edge: bool


@dataclass(frozen=True)
class LearningRateFit:
    """Optimal learning rates of the sizes and ``rate = k size^exponent`` through them (None with
    fewer than two inner optima).
    """

    optima: list[LearningRateOptimum]
    by_parameters: PowerLaw | None
    by_width: PowerLaw | None


@dataclass(frozen=True)
class LeftOut:
    """A law fitted without one budget, and its errors on the runs of that budget: |predicted -
    loss| / loss.
    """

    budget: float
    runs: int
    mean_error: float
    worst_error: float
    worst_run: str


@dataclass(frozen=True)
class Residual:
    """Deviation of a run from the parametric law; ``relative`` = loss / predicted - 1."""

    run: str
    n: float
    d: float
    flops: float
    budget: float | None
    loss: float
    predicted: float
    relative: float


@dataclass(frozen=True)
class VariantFit:
    """All fits of one variant's runs; an impossible fit is None, with its reason in ``notes``."""

    name: str
    runs: int
    isoflop: IsoFlopFit | None = None
    parametric: ParametricFit | None = None
    learning_rate: LearningRateFit | None = None
    residuals: list[Residual] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def why(self) -> str:
        """Notes as the end of a message about a fit that does not exist."""
        return f": {'; '.join(self.notes)}" if self.notes else ""

    def least_loss(self, method: str) -> PowerLaw | None:
        """Return the lowest loss for C FLOPs by ``method`` ("isoflop" or "parametric"), or None
        without such a law.
        """
        if method == "isoflop":
            return self.isoflop.loss if self.isoflop else None
        return self.parametric.frontier if self.parametric else None


@dataclass(frozen=True)
class Multiplier:
    """Share of the baseline's FLOPs with which the variant reaches the baseline's loss at
    ``flops``; below 1 is better.
    """

    flops: float
    loss: float
    ratio: Estimate


@dataclass(frozen=True)
class Comparison:
    """Comparison of a variant with the baseline by one method ("isoflop" or "parametric").

    Attributes:
        overall: geometric mean of the multipliers over the budgets; None if the two have no common
        loss. words: sentence that states the result, also in that case.
    """

    variant: str
    baseline: str
    method: str
    multipliers: list[Multiplier]
    overall: Estimate | None
    words: str


@dataclass(frozen=True)
class StudyFit:
    """Content of ``fit.json``.

    Attributes:
        parameters: the N of the laws: "total" or "non_embedding".
        interval: level of every interval.
        source: path of the table.
    """

    study: str
    parameters: str
    interval: float
    source: str
    variants: dict[str, VariantFit]
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    format: int = FORMAT

    def fitted(self, what: str) -> dict[str, Any]:
        """Return variant -> its fit by ``what`` ("isoflop", "parametric" or "learning_rate") for
        variants that have one.
        """
        fits = {name: getattr(variant, what) for name, variant in self.variants.items()}
        return {name: found for name, found in fits.items() if found is not None}


@dataclass(frozen=True)
class Optimum:
    """The best N and D for a number of FLOPs by ``method`` ("parametric" or "isoflop"), and the
    loss at that point.
    """

    flops: float
    n: Estimate
    d: Estimate
    loss: Estimate
    method: str


def predict_loss(fit: VariantFit, n: float, d: float) -> Estimate:
    """Return the loss of one run with N parameters on D tokens by the parametric law.

    The interval is that of a run: the law's uncertainty (percentiles over the draws) and a run's
    scatter about the law, both in log loss, added in quadrature. Raises ConfigError (the variant
    has no parametric law).
    """
    law = fit.parametric
    if law is None:
        raise ConfigError(
            f"{fit.name}: no parametric law was fitted, so no loss can be predicted{fit.why}"
        )
    mean, band = float(law.loss(n, d)), law.band(n, d)
    if band is None:
        return Estimate(mean)
    scatter = law.noise * NormalDist().inv_cdf(0.5 + law.interval / 2)
    below, above = (math.log(float(side[0]) / mean) for side in band)
    return Estimate(
        mean,
        mean * math.exp(-math.hypot(min(below, 0.0), scatter)),
        mean * math.exp(math.hypot(max(above, 0.0), scatter)),
    )


def optimal(fit: VariantFit, flops: float, method: str | None = None) -> Optimum:
    """Return the N and D with the lowest loss for ``flops``, and that loss.

    Uses the parametric law if it exists (`ParametricFit.best`), else the power laws of the isoFLOP
    frontier; ``method`` selects one. Raises ConfigError (the variant has no such fit).
    """
    law, found = fit.parametric, fit.isoflop
    if law is not None and method in (None, "parametric"):
        pairs = zip(law.best(law.values, flops), law.best(law.draws, flops), strict=True)
        n, d = (Estimate.of(value[0], draws, law.interval, len(draws)) for value, draws in pairs)
        return Optimum(flops, n, d, predict_loss(fit, n.value, d.value), "parametric")
    if found and found.n_opt and found.d_opt and found.loss and method in (None, "isoflop"):
        laws = (found.n_opt, found.d_opt, found.loss)
        best_n, best_d, loss = (_law_at(one, flops, found.interval) for one in laws)
        return Optimum(flops, best_n, best_d, loss, "isoflop")
    raise ConfigError(f"{fit.name}: no {method or 'law'} for an optimum{fit.why}")


def load_fit(path: Path) -> StudyFit:
    """Read ``fit.json``. Raises ConfigError (missing, or not a fit of this format),
    StorageError.
    """
    if not path.exists():
        raise ConfigError(
            f"{path}: does not exist; python -m tools.scaling fit STUDY.yaml writes it"
        )
    with convert_os_errors():
        text = path.read_text(encoding="utf-8")
    try:
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}")
        return typing.cast(StudyFit, built(StudyFit, values))
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ConfigError(
            f"{path}: not a fit of format {FORMAT}; write it again: python -m tools.scaling fit"
            " STUDY.yaml"
        ) from None


def save_fit(fit: StudyFit, path: Path) -> None:
    """Write ``fit.json`` atomically. Raises ConfigError (the folder cannot be written),
    StorageError.
    """
    text = json.dumps(asdict(fit), separators=(",", ":"), allow_nan=False)
    write_file(path, f"{text}\n".encode())


def _law_at(law: PowerLaw, x: float, interval: float) -> Estimate:
    sides = law.band([x], interval) or ()
    return Estimate(float(law.at(x)), *(float(side[0]) for side in sides))


def built(hint: Any, value: Any) -> Any:
    """Convert JSON values to the type of ``hint``; raises TypeError, KeyError or ValueError if they
    do not fit.
    """
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return typing.cast(type, hint)(
            **{name: built(hints[name], inner) for name, inner in value.items()}
        )
    origin, inner_hints = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else built(inner_hints[0], value)
    if origin is list:
        return [built(inner_hints[0], inner) for inner in value]
    if origin is tuple:
        return tuple(built(kind, inner) for kind, inner in zip(inner_hints, value, strict=True))
    if origin is dict:
        return {key: built(inner_hints[1], inner) for key, inner in value.items()}
    return float(value) if hint is float else value
