"""The parametric law against laws that are known, and against published data.

The published data are in tests/fixtures/chinchilla_svg.csv: the runs of Hoffmann et al. (2022), read off the vector graphics of their
figure 4 by Besiroglu, Erdil, Barnett and You, "Chinchilla Scaling: A replication attempt" (arXiv 2404.10102), from the table they
published; columns Model Size, Training FLOP and loss, rounded to seven digits. The replication fits 240 of the 245 runs; the five left
out are the first of the table, which are also the five with the most parameters a token (a fifth to two tokens a parameter).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fem_common.errors import ConfigError
from tools.scaling.fits import huber
from tools.scaling.fits.parametric import NAMES, descend, fit_parametric, leave_out
from tools.scaling.fits.points import NotIdentified, Points
from tools.scaling.results import ParametricFit
from tools.scaling.study import FitConfig

from .laws_known import BUDGETS, TRUTH, loss, points, runs

DATA = Path(__file__).parents[2] / "fixtures" / "chinchilla_svg.csv"
QUICK = FitConfig(resamples=300)
# Besiroglu et al., table 1: estimate and standard error.
REPLICATION = {"E": (1.8172, 0.03), "A": (482.01, 124.58), "B": (2085.43, 1293.23), "alpha": (0.3478, 0.02), "beta": (0.3658, 0.02)}
HOFFMANN = [1.6934, 406.4, 410.7, 0.3392, 0.2849]


def fitted(some: Points, config: FitConfig = QUICK) -> ParametricFit:
    return fit_parametric(some, config, np.random.default_rng(config.seed))


def values(law: ParametricFit) -> list[float]:
    return [getattr(law, name).value for name in NAMES]


def published() -> Points:
    size, flops, losses = np.genfromtxt(DATA, delimiter=",", skip_header=1).T
    return points(size, flops / (6 * size), losses)


def test_exact_losses_give_the_law_back() -> None:
    """Without noise rounding is left, and the gradient's tolerance; A and B are off by the exponents' error times log N = 20."""
    law = fitted(runs(noise=0.0, seed=0))
    for name in NAMES:
        assert getattr(law, name).value == pytest.approx(TRUTH[name], rel=2e-3)
    assert law.agreeing > law.starts / 2
    assert law.noise < 1e-5


@pytest.mark.parametrize(
    ("repetitions", "least", "most"), [(40, 31, 40), pytest.param(200, 170, 190, marks=pytest.mark.slow)], ids=["40", "200"]
)
def test_intervals_cover_the_known_law(repetitions: int, least: int, most: int) -> None:
    """Many times 35 noisy runs: each 90% interval holds the truth in 85 to 95% of 200 repetitions, and in 31 or more of 40.

    A method that covers 90% exactly holds it in 170 to 190 of 200 in 98 of 100 cases, and in 31 to 40 of 40 in 99. The seeds are
    fixed, so this passes or fails for good. The estimates' median is the truth but for what the noise does to that many.
    """
    names = (*NAMES, "a", "b")
    held = dict.fromkeys(names, 0)
    found = []
    for repetition in range(repetitions):
        law = fitted(runs(noise=0.004, seed=1000 + repetition), dataclasses.replace(QUICK, seed=repetition))
        assert law.failed == 0
        found.append([getattr(law, name).value for name in names])
        for name in names:
            estimate = getattr(law, name)
            assert estimate.low is not None and estimate.high is not None
            held[name] += estimate.low <= TRUTH[name] <= estimate.high
    assert {name: count for name, count in held.items() if not least <= count <= most} == {}, held
    off = np.abs(np.median(found, axis=0) / [TRUTH[name] for name in names] - 1)
    assert (off[[0, 3, 4, 5, 6]] < 0.015).all(), off  # E and exponents scatter by 1 to 2% a repetition
    assert (off[[1, 2]] < 0.08).all(), off  # A and B by 12%


def test_the_replication_of_chinchilla() -> None:
    """Besiroglu et al.'s numbers from their data: each within a tenth of its standard error, bootstrap errors as theirs.

    They print four digits of a minimum that their BFGS reached; ours is lower than the objective at their numbers, and lies where the
    objective is flat: A and B, with exponents, move along a valley. A tenth of a standard error is far inside what the data can tell.
    """
    law = fitted(published().take(np.arange(5, 245)), FitConfig())
    deviations = np.std(law.draws, axis=0)
    for index, (name, (value, error)) in enumerate(REPLICATION.items()):
        assert abs(getattr(law, name).value - value) < 0.1 * error, name
        assert 0.6 < deviations[index] / error < 1.4, name  # of 500 resamples, against two printed digits or fewer
    assert law.E.value == pytest.approx(1.8172, abs=5e-5)  # to the last digit printed
    assert law.a.value == pytest.approx(0.512, abs=0.002)
    assert law.a.low is not None and law.a.low > 0.4564  # Hoffmann et al.'s exponent, 0.2849 / (0.3392 + 0.2849), is shut out


def test_hoffmanns_constants_fit_the_data_worse() -> None:
    """The replication's point: the published constants are no minimum. The replication's own are within half a percent of it."""
    some = published().take(np.arange(5, 245))
    data = huber.Data.of(some.n, some.d, some.loss)
    _, least, _, _ = descend(data, 1e-3)
    replication = [value for value, _ in REPLICATION.values()]
    theirs, replicated = (
        float(huber.objective(data.centred(np.array([law])), data, np.ones((1, 240)), 1e-3)[0][0]) for law in (HOFFMANN, replication)
    )
    assert least < replicated < 1.005 * least
    assert theirs > 1.2 * least


def test_the_gradient_is_the_objectives() -> None:
    """Against central differences, whose error is step^2 = 1e-12 and rounding 1e-16 / 1e-6, where no residual crosses delta on the way."""
    some = runs(noise=0.01, seed=3)
    data = huber.Data.of(some.n, some.d, some.loss)
    weights = np.random.default_rng(1).integers(0, 3, (1, len(some))).astype(float)
    at = data.centred(np.array([[1.8, 300.0, 500.0, 0.32, 0.3]]))
    _, gradient = huber.objective(at, data, weights, 1e-3)
    step = 1e-6
    for index in range(5):
        move = np.zeros((1, 5))
        move[0, index] = step
        up, down = (huber.objective(at + sign * move, data, weights, 1e-3)[0][0] for sign in (1, -1))
        assert gradient[0, index] == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-9)


def test_a_wild_run_moves_the_law_little() -> None:
    """Huber's loss is linear beyond delta: one diverged run of 35, at 1.5 times its loss, leaves the exponents inside their noise."""
    some = runs(noise=0.002, seed=6)
    losses = some.loss.copy()
    losses[3] *= 1.5
    clean, spoiled = fitted(some), fitted(dataclasses.replace(some, loss=losses))
    assert spoiled.a.value == pytest.approx(clean.a.value, abs=0.01)


def test_too_few_runs_or_one_size_are_not_fitted() -> None:
    some = runs(noise=0.004, seed=8)
    with pytest.raises(NotIdentified, match="5 parameters and there are 6 runs"):
        fitted(some.take(np.arange(6)))
    tokens = np.geomspace(1e9, 1e11, 9)
    with pytest.raises(NotIdentified, match="have 1 and 9: E, A, B, alpha and beta are not identified"):
        fitted(points(np.full(9, 1e8), tokens, loss(np.full(9, 1e8), tokens)))


def test_losses_that_do_not_fall_with_size_are_not_fitted() -> None:
    """A term that is not there has no exponent: the parameter that runs away is named, and no number is given."""
    n = np.tile(np.geomspace(1e7, 1e9, 5), 5)
    d = np.repeat(np.geomspace(1e9, 1e11, 5), 5)
    noise = np.exp(np.random.default_rng(0).normal(0, 1e-3, 25))
    with pytest.raises((NotIdentified, ConfigError), match="not identified: .*(A|alpha)|does not converge"):
        fitted(points(n, d, (1.7 + 400 * d**-0.3) * noise))


def test_a_descent_that_is_cut_short_is_not_a_fit() -> None:
    """The flag is the gradient's, not the iterations': one step from far away is not converged, and says so."""
    some = runs(noise=0.004, seed=9)
    data = huber.Data.of(some.n, some.d, some.loss)
    start = data.centred(np.array([[1.0, 100.0, 100.0, 0.2, 0.2]]))
    _, one = huber.minimise(start, data, np.ones((1, len(some))), 1e-3, iterations=1)
    end, many = huber.minimise(start, data, np.ones((1, len(some))), 1e-3)
    assert not one[0] and many[0]
    _, gradient = huber.objective(end, data, np.ones((1, len(some))), 1e-3)
    assert np.abs(gradient).max() <= huber.GRADIENT_TOLERANCE * 1e-3 * len(some)


def test_leaving_a_budget_out_predicts_it() -> None:
    """The law holds, so what was left out is predicted to its noise, 0.2%, and the error of a law without a fifth of its runs."""
    some = runs(noise=0.002, seed=10)
    left, notes = leave_out(some, fitted(some), 1e-3)
    assert [one.budget for one in left] == list(BUDGETS)
    assert notes == []
    assert all(one.mean_error < 0.006 and one.mean_error <= one.worst_error < 0.02 and one.runs == 7 for one in left)
    broken = dataclasses.replace(some, loss=np.where(some.budget == 1e20, some.loss * 1.1, some.loss))
    third = leave_out(broken, fitted(broken), 1e-3)[0][2]
    assert 0.08 < third.mean_error < 0.1  # 1 - 1/1.1 = 0.091 of the loss that is there
