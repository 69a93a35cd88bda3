"""``recommend``: the YAML is a run that pretrain takes, at the law's optimum for that compute; what it does not know it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.config import load_run
from pretrain.plan.run_plan import make_plan
from pretrain.validate import prepare
from tests.pretrain.data_folder import write_folder
from tests.tools.scaling.test_study import write
from tests.wording import Wording
from tools.scaling.__main__ import main
from tools.scaling.laws import Estimate, PowerLaw
from tools.scaling.planning import shaped, total_parameters
from tools.scaling.results import LearningRateFit, ParametricFit, StudyFit, VariantFit, optimal, save_fit
from tools.scaling.study import load_study

DRAWS = [(1.7 + 0.01 * step, 40.0, 30.0, 0.35, 0.31) for step in range(-5, 6)]
LARGEST = 1.5e11  # the study's


def law(a: float) -> ParametricFit:
    """L = 1.7 + a / N^0.35 + 30 / D^0.31."""
    numbers = {name: Estimate(value) for name, value in (("E", 1.7), ("A", a), ("B", 30.0), ("alpha", 0.35), ("beta", 0.31))}
    return ParametricFit(
        **numbers,
        a=Estimate(0.31 / 0.66),
        b=Estimate(0.35 / 0.66),
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
        draws=DRAWS,
    )


def fitted(folder: Path, **variants: VariantFit) -> Path:
    """A study whose fit.json holds these variants; without any, CEM's law is the better one."""
    path = write(folder)
    found = variants or {
        "transformer": VariantFit("transformer", 12, parametric=law(40.0)),
        "cem": VariantFit("cem", 12, parametric=law(36.0)),
    }
    save_fit(StudyFit("study", "total", 0.9, "runs.csv", found), load_study(path).fit_json)
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("flops", [3e10, 1.6e12, 1.6e13])
def test_the_run_is_the_optimum_and_pretrain_takes_it(flops: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = load_study(fitted(tmp_path))
    command = ["recommend", study.path, "--flops", str(flops), "--variant", "transformer", "--out", "out.yaml"]
    if flops > 100 * LARGEST:
        assert main(command) == 2
        out, error = capsys.readouterr()
        assert "107 times the study's largest run" in error and "1.5e13, and further with --extrapolate" in error
        assert out == "" and error.count("\n") == 1 and not (tmp_path / "out.yaml").exists()
        command.append("--extrapolate")
    assert main(command) == 0
    warned = capsys.readouterr().err
    assert ("times the study's largest run" in warned) == (flops > 10 * LARGEST)
    prepared = prepare(load_run("out.yaml"), None, plan_only=True)
    plan = make_plan(prepared.config, 1)
    model = prepared.config.model
    assert abs(plan.tokens * plan.train_flops - flops) <= plan.train_flops * plan.schedule.step_tokens / 2  # the nearest step
    best = optimal(VariantFit("transformer", 12, parametric=law(40.0)), flops).n.value
    near = [total_parameters(shaped(study.shape, width).of(model)) for width in range(16, 8 * model.hidden_size, 16)]
    assert max(plan.total_parameters / best, best / plan.total_parameters) == min(max(n / best, best / n) for n in near)
    text = (tmp_path / "out.yaml").read_text()
    assert f"Predicted held-out loss: {float(law(40.0).loss(plan.total_parameters, plan.tokens)):.4f} (" in text
    assert f"this is {flops / LARGEST:.3g} times as much" in text
    assert prepared.config.optimizer.lr == 1e-3 and prepared.config.optimizer.min_lr == 2e-4
    assert prepared.config.optimizer.warmup_steps == round(0.05 * plan.schedule.steps)


def test_without_a_variant_it_is_the_best_one_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", str(fitted(tmp_path)), "--flops", "2e11"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(text)
    config = load_run("printed.yaml")
    assert (config.model.mixer, config.optimizer.lr, config.name) == ("cem", 5e-4, "study-cem-2e11")
    assert "for comparison, transformer at its own optimum" in text


def test_a_law_of_the_learning_rate_is_followed(tmp_path: Path) -> None:
    by_width = PowerLaw("width", "learning rate", Estimate(0.32), Estimate(-1.0))
    variant = VariantFit("cem", 12, parametric=law(36.0), learning_rate=LearningRateFit([], None, by_width))
    assert main(["recommend", str(fitted(tmp_path, cem=variant)), "--flops", "2e11", "--out", "out.yaml"]) == 0
    config = load_run("out.yaml")
    assert config.optimizer.lr == pytest.approx(0.32 / config.model.hidden_size, rel=5e-3)  # three digits
    assert config.optimizer.min_lr == pytest.approx(config.optimizer.lr / 5)
    assert "the study's law of the best rate against width" in (tmp_path / "out.yaml").read_text()


def test_repeated_data_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fitted(tmp_path)
    write_folder(tmp_path / "data", tokens=10_000)
    assert main(["recommend", str(path), "--flops", "1e12"]) == 0
    out, error = capsys.readouterr()
    assert "it reads its training data" in error and "WARNING: it reads" in out


@pytest.mark.parametrize(
    "words",
    [
        "--flops 0",
        "--flops=-1e9",
        "--flops nan",
        "--flops 1e6",
        "--flops 2e11 --variant ecm",
        "--flops 2e11 --variant transformer",
        "--flops 2e11 --variant cem --out nowhere/out.yaml",
    ],
)
def test_what_cannot_be_recommended_is_one_line(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording) -> None:
    path = fitted(tmp_path, cem=VariantFit("cem", 12, parametric=law(36.0)))
    assert main(["recommend", str(path), *words.split()]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    wording(error)


def test_without_a_fit_or_a_law_it_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    assert main(["recommend", str(path), "--flops", "1e11"]) == 2
    assert f"first: python -m tools.scaling fit {path}" in capsys.readouterr().err
    fitted(tmp_path, cem=VariantFit("cem", 3, notes=["too few runs"]))
    for words in ((), ("--variant", "cem")):
        assert main(["recommend", str(path), "--flops", "1e11", *words]) == 2
        assert "too few runs" in capsys.readouterr().err
