"""fit.json and what is asked of it: the same numbers back, bands, predictions, optima."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fem_common.errors import ConfigError
from tools.scaling.fits.parametric import fit_parametric
from tools.scaling.fitting import fit_variant
from tools.scaling.results import StudyFit, VariantFit, load_fit, optimal, predict_loss, save_fit
from tools.scaling.study import FitConfig

from .laws_known import best_n, loss, runs


@pytest.fixture(scope="module")
def variant() -> VariantFit:
    """Fits of 35 runs with 0.2% noise."""
    return fit_variant("transformer", runs(0.002, 1), FitConfig(resamples=200), np.random.default_rng(0))


def test_a_fit_comes_back_from_its_file(variant: VariantFit, tmp_path: Path) -> None:
    fit = StudyFit("small", "total", 0.9, "runs.csv", {"transformer": variant}, [], ["a note"])
    save_fit(fit, tmp_path / "deep" / "fit.json")
    assert load_fit(tmp_path / "deep" / "fit.json") == fit
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["fit.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 7}', '{"format": 2}', '{"format": 2, "study": "x", "variants": [1]}'])
def test_what_is_no_fit_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "fit.json").write_text(text)
    with pytest.raises(ConfigError, match="fit.json: .*python -m tools.scaling fit"):
        load_fit(tmp_path / "fit.json")
    with pytest.raises(ConfigError, match="not there; python -m tools.scaling fit"):
        load_fit(tmp_path / "none.json")


def test_the_optimum_is_where_the_law_is_least(variant: VariantFit) -> None:
    """Equation 4's closed form against a search along the budget; the truth is within a width of its 90% interval."""
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
    assert frontier.n.value == pytest.approx(best_n(1e20), rel=0.1)
    assert frontier.method == "isoflop" and frontier.loss.mean == pytest.approx(
        float(loss(np.array(best_n(1e20)), np.array(1e20 / 6 / best_n(1e20)))), rel=0.01
    )


def test_the_optimum_is_along_the_runs_own_flops() -> None:
    """FLOPs a token that grow as N^1.2: the best size for C, and its exponent, are those of that curve and not of a mean k in C = k N D."""
    some = runs(0.0, 1)
    own = dataclasses.replace(some, c=2 * some.n**1.2 * some.d)
    law = fit_parametric(own, FitConfig(resamples=50), np.random.default_rng(0))
    found = VariantFit("cem", len(own), parametric=law)
    best = []
    for flops in (1e19, 1e22):
        n = np.geomspace(1e7, 1e11, 200_001)
        d = flops / (2 * n**1.2)
        least = law.loss(n, d).argmin()
        optimum = optimal(found, flops)
        assert (optimum.n.value, optimum.d.value) == pytest.approx((n[least], d[least]), rel=1e-3)  # steps of the search: 5e-5
        best.append((n[least], d[least]))
    growth = np.log(np.divide(best[1], best[0])) / np.log(1e3)
    assert (law.a.value, law.b.value) == pytest.approx(growth, abs=1e-4)


def test_a_prediction_holds_new_runs(variant: VariantFit) -> None:
    """Of 350 new runs of the same law and noise nine in ten lie in their 90% intervals: 85 to 96% allows for the noise being estimated."""
    held = 0
    for seed in range(10):
        new = runs(0.002, 100 + seed)
        for n, d, seen in zip(new.n, new.d, new.loss, strict=True):
            said = predict_loss(variant, float(n), float(d))
            assert said.low is not None and said.high is not None
            held += said.low <= seen <= said.high
    assert 0.85 <= held / 350 <= 0.96
    near, far = (predict_loss(variant, n, n * 20) for n in (1e9, 1e13))
    assert near.low is not None and near.high is not None and far.low is not None and far.high is not None
    assert (far.high - far.low) / far.mean > (near.high - near.low) / near.mean
    assert far.mean == pytest.approx(float(loss(np.array(1e13), np.array(2e14))), abs=0.05)


def test_what_was_not_fitted_predicts_nothing(variant: VariantFit) -> None:
    bare = dataclasses.replace(variant, parametric=None, notes=["6 runs are too few"])
    with pytest.raises(ConfigError, match="transformer: no parametric law.*6 runs are too few"):
        predict_loss(bare, 1e8, 1e9)
    assert optimal(bare, 1e20).method == "isoflop"
    with pytest.raises(ConfigError, match="no law to take an optimum from"):
        optimal(dataclasses.replace(bare, isoflop=None), 1e20)
