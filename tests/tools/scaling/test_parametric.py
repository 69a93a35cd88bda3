"""Tests of the parametric law against known laws, and against published data.

The published data are in tests/fixtures/chinchilla_svg.csv: the runs of Hoffmann et al. (2022),
read off the vector graphics of their figure 4 by Besiroglu, Erdil, Barnett and You, "Chinchilla
Scaling: A replication attempt" (arXiv 2404.10102), from the table they published; columns Model
Size, Training FLOP and loss, rounded to seven digits. The replication fits 240 of the 245 runs; the
five omitted runs are the first of the table and have the most parameters per token (a fifth to two
tokens per parameter).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fem_common.errors import ConfigError
from tools.scaling.fits import huber
from tools.scaling.fits.parametric import fit_parametric, leave_out
from tools.scaling.fits.points import NotIdentified, Points
from tools.scaling.results import (
    ParametricFit,
    StudyFit,
    VariantFit,
    load_fit,
    optimal,
    predict_loss,
    save_fit,
)
from tools.scaling.study import FitConfig
from tools.scaling.verbs.fit import fit_variant

from .studies import BUDGETS, TRUTH, best_n, loss, points, runs

DATA = Path(__file__).parents[2] / "fixtures" / "chinchilla_svg.csv"
QUICK = FitConfig(resamples=300)
# Besiroglu et al., table 1: estimate and standard error.
REPLICATION = {
    "E": (1.8172, 0.03),
    "A": (482.01, 124.58),
    "B": (2085.43, 1293.23),
    "alpha": (0.3478, 0.02),
    "beta": (0.3658, 0.02),
}
HOFFMANN = [1.6934, 406.4, 410.7, 0.3392, 0.2849]


def fitted(some: Points, config: FitConfig = QUICK) -> ParametricFit:
    return fit_parametric(some, config, np.random.default_rng(config.seed))


def published() -> Points:
    size, flops, losses = np.genfromtxt(DATA, delimiter=",", skip_header=1).T
    return points(size, flops / (6 * size), losses)


def test_exact_losses_give_the_law_back() -> None:
    """Without noise the error is rounding and the gradient's tolerance; A and B have the exponents'
    error times log N = 20.
    """
    law = fitted(runs(noise=0.0, seed=0))
    for name, truth in TRUTH.items():
        assert getattr(law, name).value == pytest.approx(truth, rel=2e-3)
    assert law.agreeing > law.starts / 2
    assert law.noise < 1e-5


@pytest.mark.parametrize(
    ("repetitions", "least", "most"),
    [
        (12, 8, 12),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((40, 31, 40), (200, 170, 190))),
    ],
    ids=["12", "40", "200"],
)
def test_intervals_cover_the_known_law(repetitions: int, least: int, most: int) -> None:
    """With 35 noisy runs, each 90% interval contains the truth in 170 to 190 of 200 repetitions, at
    least 31 of 40, at least 8 of 12.

    A method with exactly 90% coverage satisfies this in 98 of 100 cases for 200 repetitions, in 99
    for 40 and for 12. The seeds are fixed, so the result is deterministic. The estimates' median is
    the truth up to the effect of noise on that number of repetitions.
    """
    truth = list(TRUTH.values())
    held = np.zeros(len(TRUTH))
    found = []
    for repetition in range(repetitions):
        some = runs(noise=0.004, seed=1000 + repetition)
        law = fitted(some, dataclasses.replace(QUICK, seed=repetition))
        assert law.failed == 0
        estimates = [getattr(law, name) for name in TRUTH]
        low, value, high = np.array([(one.low, one.value, one.high) for one in estimates]).T
        held += (low <= truth) & (truth <= high)
        found.append(value)
    assert ((least <= held) & (held <= most)).all(), held
    off = np.abs(np.median(found, axis=0) / truth - 1)
    # E and the exponents scatter by 1 to 2% per repetition.
    assert (off[[0, 3, 4, 5, 6]] < 0.015).all(), off
    assert (off[[1, 2]] < 0.08).all(), off  # A and B scatter by 12%


def test_the_replication_of_chinchilla() -> None:
    """Besiroglu et al.'s numbers from their data: each within a tenth of its standard error,
    bootstrap errors as theirs.

    They print four digits of a minimum that their BFGS reached. Ours is lower than the objective at
    their numbers, in a region where the objective is flat: A and B, with exponents, move along a
    valley. A tenth of a standard error is far below the resolution of the data. Hoffmann et al.'s
    own constants are not a minimum, which is the replication's point.
    """
    some = published().take(np.arange(5, 245))
    law = fitted(some, FitConfig())
    deviations = np.std(law.draws, axis=0)
    for index, (name, (value, error)) in enumerate(REPLICATION.items()):
        assert abs(getattr(law, name).value - value) < 0.1 * error, name
        # The errors come from 500 resamples and are compared with two printed digits or fewer.
        assert 0.6 < deviations[index] / error < 1.4, name
    assert law.E.value == pytest.approx(1.8172, abs=5e-5)  # equal to the last printed digit
    assert law.a.value == pytest.approx(0.512, abs=0.002)
    # The interval excludes the exponent of Hoffmann et al., 0.2849 / (0.3392 + 0.2849).
    assert law.a.low is not None and law.a.low > 0.4564
    data = huber.Data.of(some.n, some.d, some.loss)
    replication = [value for value, _ in REPLICATION.values()]
    theirs, replicated = huber.objective(
        data.centred(np.array([HOFFMANN, replication])), data, np.ones((2, 240)), 1e-3
    )[0]
    assert law.objective < replicated < 1.005 * law.objective and theirs > 1.2 * law.objective


def test_the_gradient_is_the_objectives() -> None:
    """Against central differences, whose error is step^2 = 1e-12 and rounding 1e-16 / 1e-6, if no
    residual crosses delta within the step.
    """
    some, step = runs(noise=0.01, seed=3), 1e-6
    data = huber.Data.of(some.n, some.d, some.loss)
    weights = np.random.default_rng(1).integers(0, 3, (1, len(some))).astype(float)
    at = data.centred(np.array([[1.8, 300.0, 500.0, 0.32, 0.3]]))
    up, down = (
        huber.objective(at + sign * step * np.eye(5), data, np.repeat(weights, 5, axis=0), 1e-3)[0]
        for sign in (1, -1)
    )
    assert huber.objective(at, data, weights, 1e-3)[1][0] == pytest.approx(
        (up - down) / (2 * step), rel=1e-5, abs=1e-9
    )
    # No jump at delta.
    assert huber.huber(np.array([0.999e-3, 1.001e-3]), 1e-3) == pytest.approx(0.5e-6, rel=3e-3)


def test_a_wild_run_moves_the_law_little() -> None:
    """Huber's loss is linear beyond delta: one diverged run of 35, at 1.5 times its loss, keeps the
    exponents within their noise.
    """
    some = runs(noise=0.002, seed=6)
    spoiled = dataclasses.replace(some, loss=some.loss * np.where(np.arange(35) == 3, 1.5, 1.0))
    assert fitted(spoiled).a.value == pytest.approx(fitted(some).a.value, abs=0.01)


def test_what_does_not_determine_a_law_is_not_fitted() -> None:
    """Cases: too few runs, one size, and a loss that does not decrease with the size; the diverging
    parameter is named.
    """
    n = np.tile(np.geomspace(1e7, 1e9, 5), 5)
    d = np.repeat(np.geomspace(1e9, 1e11, 5), 5)
    noise = np.exp(np.random.default_rng(0).normal(0, 1e-3, 25))
    one_size = np.full(25, 1e8)
    cases = {
        "5 parameters, but only 6 runs exist": runs(0.004, 8).take(np.arange(6)),
        "have 1 and 5: E, A, B, alpha and beta are not identified": points(
            one_size, d, loss(one_size, d)
        ),
        "not identified: .*(A|alpha)|does not converge": points(
            n, d, (1.7 + 400 * d**-0.3) * noise
        ),
    }
    for output, some in cases.items():
        with pytest.raises((NotIdentified, ConfigError), match=output):
            fitted(some)


def test_a_descent_that_is_cut_short_is_not_a_fit() -> None:
    """Convergence is judged by the gradient, not by iterations: one step from far away is reported
    as not converged.
    """
    some = runs(noise=0.004, seed=9)
    data = huber.Data.of(some.n, some.d, some.loss)
    weights = np.ones((1, len(some)))
    start = data.centred(np.array([[1.0, 100.0, 100.0, 0.2, 0.2]]))
    end, many = huber.minimise(start, data, weights, 1e-3)
    assert many[0] and not huber.minimise(start, data, weights, 1e-3, iterations=1)[1][0]
    assert np.abs(
        huber.objective(end, data, weights, 1e-3)[1]
    ).max() <= huber.GRADIENT_TOLERANCE * 1e-3 * len(some)


def test_leaving_a_budget_out_predicts_it() -> None:
    """If the law holds, the omitted budget is predicted up to its noise, 0.2%, and the error of a
    law without a fifth of its runs.
    """
    some = runs(noise=0.002, seed=10)
    left, notes = leave_out(some, fitted(some), 1e-3)
    assert [one.budget for one in left] == list(BUDGETS)
    assert notes == []
    assert all(
        one.mean_error < 0.006 and one.mean_error <= one.worst_error < 0.02 and one.runs == 7
        for one in left
    )
    wrong = np.where(some.budget == 1e20, some.loss * 1.1, some.loss)
    broken = dataclasses.replace(some, loss=wrong)
    third = leave_out(broken, fitted(broken), 1e-3)[0][2]
    assert 0.08 < third.mean_error < 0.1  # 1 - 1/1.1 = 0.091 of the present loss


# --- requirements of a fit ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def variant() -> VariantFit:
    """Fits of 35 runs with 0.2% noise."""
    return fit_variant(
        "transformer", runs(0.002, 1), FitConfig(resamples=200), np.random.default_rng(0)
    )


def test_a_fit_comes_back_from_its_file(variant: VariantFit, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "fit.json"
    fit = StudyFit("small", "total", 0.9, "runs.csv", {"transformer": variant}, [], ["a note"])
    save_fit(fit, path)
    assert load_fit(path) == fit and [file.name for file in path.parent.iterdir()] == ["fit.json"]
    for text in ("", "[]", '{"format": 7}', '{"format": 2, "study": "x", "variants": [1]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="fit.json: .*python -m tools.scaling fit"):
            load_fit(path)
    with pytest.raises(ConfigError, match="does not exist; python -m tools.scaling fit"):
        load_fit(tmp_path / "none.json")


def test_the_optimum_is_where_the_law_is_least(variant: VariantFit) -> None:
    """The closed form of equation 4 against a search along the budget; the truth is within one
    width of its 90% interval.
    """
    law = variant.parametric
    assert law
    for flops in (1e19, 1e24):
        best = optimal(variant, flops)
        assert law.k * best.n.value**law.phi * best.d.value == pytest.approx(flops, rel=1e-9)
        n = best.n.value * np.geomspace(0.5, 2, 2001)
        assert n[law.loss(n, flops / (6 * n)).argmin()] == pytest.approx(best.n.value, rel=1e-3)
        assert best.n.low is not None and best.n.high is not None
        width = best.n.high - best.n.low
        assert best.n.low - width < best_n(flops) < best.n.high + width
    frontier = optimal(variant, 1e20, "isoflop")
    assert frontier.method == "isoflop" and frontier.n.value == pytest.approx(best_n(1e20), rel=0.1)
    assert frontier.loss.value == pytest.approx(
        loss(best_n(1e20), 1e20 / 6 / best_n(1e20)), rel=0.01
    )
    bare = dataclasses.replace(variant, parametric=None, notes=["6 runs are too few"])
    with pytest.raises(ConfigError, match="transformer: no parametric law.*6 runs are too few"):
        predict_loss(bare, 1e8, 1e9)
    assert optimal(bare, 1e20).method == "isoflop"
    with pytest.raises(ConfigError, match="no law for an optimum"):
        optimal(dataclasses.replace(bare, isoflop=None), 1e20)


def test_the_optimum_is_along_the_runs_own_flops() -> None:
    """FLOPs per token that grow as N^1.2: the best size for C, and its exponent, follow that curve
    and not a mean k in C = k N D.
    """
    some = runs(0.0, 1)
    own = dataclasses.replace(some, c=2 * some.n**1.2 * some.d)
    law = fitted(own, FitConfig(resamples=50))
    best = []
    for flops in (1e19, 1e22):
        n = np.geomspace(1e7, 1e11, 200_001)
        d = flops / (2 * n**1.2)
        least = law.loss(n, d).argmin()
        optimum = optimal(VariantFit("cem", len(own), parametric=law), flops)
        # The search has steps of 5e-5.
        assert (optimum.n.value, optimum.d.value) == pytest.approx((n[least], d[least]), rel=1e-3)
        best.append((n[least], d[least]))
    assert (law.a.value, law.b.value) == pytest.approx(
        np.log(np.divide(best[1], best[0])) / np.log(1e3), abs=1e-4
    )


def test_a_prediction_holds_new_runs(variant: VariantFit) -> None:
    """Nine in ten of 350 new runs of the same law and noise are in their 90% intervals: 85 to 96%
    allows for estimated noise.
    """
    held = 0
    for seed in range(10):
        new = runs(0.002, 100 + seed)
        for n, d, seen in zip(new.n, new.d, new.loss, strict=True):
            output = predict_loss(variant, float(n), float(d))
            held += (output.low or np.inf) <= seen <= (output.high or 0)
    assert 0.85 <= held / 350 <= 0.96
    near, far = (predict_loss(variant, n, n * 20) for n in (1e9, 1e13))
    assert ((far.high or 0) - (far.low or 0)) / far.value > (
        (near.high or 0) - (near.low or 0)
    ) / near.value
    assert far.value == pytest.approx(loss(1e13, 2e14), abs=0.05)
