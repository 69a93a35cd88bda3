"""Tests of ``recommend``: the YAML is a valid run at the law's optimum for the compute, and states
its uncertainties.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretrain.config import load_run
from pretrain.plan.run_plan import make_plan
from pretrain.validate import prepare
from tests.pretrain.data_folder import write_folder
from tests.tools.scaling.studies import TRUTH, write
from tests.wording import Wording
from tools.scaling.__main__ import main
from tools.scaling.laws import Estimate, PowerLaw
from tools.scaling.planned_runs import shaped, total_parameters
from tools.scaling.results import (
    LearningRateFit,
    ParametricFit,
    StudyFit,
    VariantFit,
    optimal,
    save_fit,
)
from tools.scaling.study import load_study

LARGEST = 1.5e11  # the largest of the study


def law(a: float) -> ParametricFit:
    """Return L = 1.7 + a / N^0.35 + 30 / D^0.31."""
    values = (1.7, a, 30.0, 0.35, 0.31, 0.31 / 0.66, 0.35 / 0.66)
    estimates: dict[str, Any] = dict(zip(TRUTH, map(Estimate, values), strict=True))
    return ParametricFit(
        **estimates,
        k=6.0,
        phi=1.0,
        noise=0.004,
        objective=1e-6,
        huber_delta=1e-3,
        points=12,
        starts=1,
        agreeing=1,
        resamples=11,
        failed=0,
        on_bound=0,
        interval=0.9,
        draws=[(1.7 + 0.01 * step, 40.0, 30.0, 0.35, 0.31) for step in range(-5, 6)],
    )


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study with a fit in which CEM is better."""
    monkeypatch.chdir(tmp_path)
    return fitted(
        write(tmp_path),
        VariantFit("transformer", 12, parametric=law(40.0)),
        VariantFit("cem", 12, parametric=law(36.0)),
    )


def fitted(path: Path, *variants: VariantFit) -> Path:
    """Write a fit.json with only these variants for the study."""
    found = {variant.name: variant for variant in variants}
    save_fit(StudyFit("study", "total", 0.9, "runs.csv", found), load_study(path).fit_json)
    return path


def recommend(study: Path, words: str) -> int:
    return main(["recommend", str(study), *words.split()])


@pytest.mark.parametrize("flops", [3e10, 1.6e12, 1.6e13])
def test_the_run_is_the_optimum_and_pretrain_takes_it(
    flops: float, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--flops {flops} --variant transformer --out out.yaml"
    if flops > 100 * LARGEST:
        assert recommend(study, words) == 2
        out, error = capsys.readouterr()
        assert "107 times the FLOPs of the study's largest run" in error
        assert "1.5e13, and beyond only with --extrapolate" in error
        assert out == "" and error.count("\n") == 1 and not Path("out.yaml").exists()
        words += " --extrapolate"
    assert recommend(study, words) == 0
    warned = "times the FLOPs of the study's largest run" in capsys.readouterr().err
    assert warned == (flops > 10 * LARGEST)
    config = prepare(load_run("out.yaml"), None, plan_only=True).config
    plan = make_plan(config, 1)
    model = config.model
    optimizer = config.optimizer
    step_flops = plan.train_flops * plan.schedule.step_tokens
    assert abs(plan.tokens * plan.train_flops - flops) <= step_flops / 2  # the nearest step
    best = optimal(VariantFit("transformer", 12, parametric=law(40.0)), flops).n.value
    shape = load_study(study).shape
    widths = range(16, 8 * model.hidden_size, 16)
    near = [total_parameters(shaped(shape, width).of(model)) for width in widths]
    found = plan.total_parameters
    assert max(found / best, best / found) == min(max(n / best, best / n) for n in near)
    text = Path("out.yaml").read_text()
    loss = float(law(40.0).loss(found, plan.tokens))
    assert f"Predicted held-out loss: {loss:.4f} (" in text
    assert f"this is {flops / LARGEST:.3g} times as much" in text
    assert (optimizer.lr, optimizer.min_lr) == (1e-3, 2e-4)
    assert optimizer.warmup_steps == round(0.05 * plan.schedule.steps)


def test_without_a_variant_it_is_the_best_one_and_repeated_data_is_warned_of(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recommend(study, "--flops 2e11") == 0
    text = capsys.readouterr().out
    Path("printed.yaml").write_text(text)
    config = load_run("printed.yaml")
    assert (config.model.mixer, config.optimizer.lr, config.name) == ("cem", 5e-4, "study-cem-2e11")
    assert "for comparison, transformer at its optimum" in text and "WARNING" not in text
    write_folder(Path("data"), tokens=10_000)
    assert recommend(study, "--flops 1e12") == 0
    out, error = capsys.readouterr()
    assert "it reads its training data" in error and "WARNING: it reads" in out


def test_a_law_of_the_learning_rate_is_followed(study: Path) -> None:
    by_width = PowerLaw("width", "learning rate", Estimate(0.32), Estimate(-1.0))
    rates = LearningRateFit([], None, by_width)
    fitted(study, VariantFit("cem", 12, parametric=law(36.0), learning_rate=rates))
    assert recommend(study, "--flops 2e11 --out out.yaml") == 0
    config = load_run("out.yaml")
    # Three digits.
    assert config.optimizer.lr == pytest.approx(0.32 / config.model.hidden_size, rel=5e-3)
    assert config.optimizer.min_lr == pytest.approx(config.optimizer.lr / 5)
    assert "the study's law of the best rate against width" in Path("out.yaml").read_text()


def test_what_cannot_be_recommended_is_one_line(
    study: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    few = VariantFit("cem", 3, notes=["too few runs"])
    good = VariantFit("cem", 12, parametric=law(36.0))
    of_good = "0,nan,1e6,2e11 --variant ecm,2e11 --variant transformer,2e11 --out no/out.yaml"
    for variant, cases in ((good, of_good), (few, "1e11,1e11 --variant cem")):
        fitted(study, variant)
        for words in cases.split(","):
            assert recommend(study, f"--flops {words}") == 2
            out, error = capsys.readouterr()
            assert out == "" and error.count("\n") == 1
            wording(error)
    load_study(study).fit_json.unlink()
    assert recommend(study, "--flops 1e11") == 2
    wording(capsys.readouterr().err)
