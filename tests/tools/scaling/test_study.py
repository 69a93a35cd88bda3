"""Tests of studies and their plans: exact runs and token counts; studies that cannot answer their
question are refused in one line.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pretrain.config import load_run
from pretrain.plan.run_plan import make_plan
from pretrain.validate import prepare
from tests.pretrain.data_folder import write_folder
from tests.test_house import ROOT
from tests.tools.scaling.studies import TRUNKS, planned, write
from tests.wording import Wording
from tools.scaling.__main__ import main
from tools.scaling.planned_runs import (
    nearest_sizes,
    non_embedding_parameters,
    shaped,
    total_parameters,
)
from tools.scaling.study import ShapeRule


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_runs_are_those_of_the_study_in_pretrains_own_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    study, runs = planned(path)
    assert len({run.name for run in runs}) == len(runs) == 2 * 3 * 2
    # The cheap runs are first.
    assert [run.budget for run in runs] == sorted(run.budget or 0 for run in runs)
    assert main(["plan", str(path), "--csv", "plan.csv"]) == 0
    report = capsys.readouterr().out.splitlines()
    rows = pd.read_csv("plan.csv").set_index("name")
    assert [rows.loc[run.name, "flops"] for run in runs] == [run.flops for run in runs]
    for line, run in zip(report[3:], runs, strict=False):
        config = prepare(load_run(study.base, run.settings), 1, plan_only=True).config
        plan = make_plan(config, 1)
        assert run.parameters == plan.total_parameters
        assert run.non_embedding_parameters == plan.non_embedding_parameters
        assert (run.steps, run.tokens) == (plan.schedule.steps, plan.tokens)
        assert run.flops_per_token == plan.train_flops
        assert run.flops == run.tokens * run.flops_per_token
        step_flops = run.flops_per_token * run.batch_tokens
        assert run.budget and abs(run.flops - run.budget) <= step_flops / 2  # the nearest step
        assert config.optimizer.warmup_steps == pytest.approx(0.05 * run.steps, abs=0.5)
        rate = {"transformer": 1e-3, "cem": 5e-4}[run.variant]
        assert config.optimizer.lr == run.learning_rate == rate
        # The same fraction of the peak as in the base configuration.
        assert config.optimizer.min_lr == pytest.approx(run.learning_rate / 5)
        assert -(-run.steps // config.train.eval_interval) == study.validations
        assert (config.model.hidden_size, config.model.num_layers) == (run.width, run.layers)
        assert run.hours == pytest.approx(run.flops / 1e10 / 3600)
        assert run.epochs is None
        numbers = (run.non_embedding_parameters, run.parameters, run.tokens, run.steps)
        variant, *cells = line.split()
        assert variant == run.variant and {f"{number:,}" for number in numbers} <= set(cells)
    rest = "\n".join(report[3 + len(runs) :])
    for words in (
        "12 runs",
        "layers = max(2, round(width / 32))",
        "a process sustains 0.01 TFLOP/s",
        "was not checked",
    ):
        assert words in rest


def test_lengths_in_tokens_are_the_baselines_for_all_variants(tmp_path: Path) -> None:
    by_tokens = (
        "{budgets: [], tokens_per_parameter: [2], learning_rates: [0.001, 0.003], seeds: [1, 2],"
        " variants: {transformer: [], cem: [model.mixer=cem]}}"
    )
    _, runs = planned(write(tmp_path, by_tokens))
    assert len(runs) == 3 * 2 * 2 * 2
    for width in (32, 64, 96):
        same = [run for run in runs if run.width == width]
        (baseline,) = {run.parameters for run in same if run.variant == "transformer"}
        assert {run.tokens for run in same} == {round(2 * baseline / 256) * 256}
    assert {run.learning_rate for run in runs} == {1e-3, 3e-3}


def test_a_variant_may_have_an_mlp_of_its_own_width(tmp_path: Path) -> None:
    variants = {
        "transformer": [],
        "wide": ["model.mlp=cem", "model.ffn_hidden_size=192"],
    }
    _, runs = planned(write(tmp_path, "budgets: []", variants=variants, tokens=[512_000]))
    widths = {}
    for run in runs:
        model = load_run(tmp_path / "base.yaml", list(run.settings)).model
        widths[run.variant, run.width] = model.ffn_hidden_size
    assert {width for (name, _), width in widths.items() if name == "wide"} == {192}
    assert widths["transformer", 96] == 256  # the rule: 8 / 3


def test_data_that_is_there_is_counted_and_not_repeated_too_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "data", tokens=100_000)
    _, runs = planned(write(tmp_path, max_epochs=2.6))
    assert all(run.epochs == pytest.approx(run.tokens / 100_000) for run in runs)
    most = max(run.epochs or 0 for run in runs)
    assert main(["plan", str(write(tmp_path, max_epochs=most * 0.99))]) == 2
    error = capsys.readouterr().err
    assert f"it reads its training data {most:.2f} times" in error
    fix = float(error.rpartition("max_epochs: ")[2])
    assert planned(write(tmp_path, max_epochs=fix))[1]  # the suggested value is valid


@pytest.mark.parametrize(
    "count", [total_parameters, pytest.param(non_embedding_parameters, marks=pytest.mark.slow)]
)
def test_the_rule_gives_whole_heads_and_the_nearest_parameters(
    tmp_path: Path, count: Callable[..., int]
) -> None:
    shape = ShapeRule(head_size=16, aspect_ratio=32)
    model = load_run(ROOT / "configs/run/scaling_cpu.yaml").model
    counts = {width: count(shaped(shape, width).of(model)) for width in range(16, 512, 16)}
    for target in (3e4, 7.7e5, 4e6):
        sizes = nearest_sizes(shape, model, target, count)
        away = {width: max(found / target, target / found) for width, found in counts.items()}
        assert away[sizes.width] == min(away.values())
        assert sizes.heads * 16 == sizes.width
        assert sizes.ffn % shape.ffn_multiple == 0 and sizes.ffn >= sizes.width * 8 / 3
    targets = [5e4, 2e5, 5e5]
    _, runs = planned(write(tmp_path, sizes={"parameters": targets}, budgets=[1e11]))
    found = sorted({run.non_embedding_parameters for run in runs if run.variant == "transformer"})
    # The width changes in steps of a head.
    assert all(0.5 < count / target < 2 for count, target in zip(found, targets, strict=True))


def test_the_shorter_runs_are_forks_of_the_longest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    """Forks train 10 + 20 + 400 steps for each model, rate and seed instead of 100 + 200 + 400.
    Only the keys of the forks differ.
    """
    study, straight = planned(write(tmp_path, TRUNKS, trunks=False))
    path = write(tmp_path, TRUNKS)
    _, runs = planned(path)
    assert len(runs) == 3 * 2 * 2 * 2
    assert [run.name for run in runs] == [run.name for run in straight]
    for run, full in zip(runs, straight, strict=True):
        config, wanted = load_run(study.base, run.settings), load_run(study.base, full.settings)
        begin = {100: 90, 200: 180, 400: 0}[run.steps]
        trunk = run.name.replace(f"-d{run.tokens}-", "-d102400-")
        fork = f"runs/studies/study/{trunk}/checkpoints/step_{begin:08d}" if begin else None
        assert config.checkpoint.fork == fork
        assert config.checkpoint.keep == (() if begin else (90, 180))
        assert replace(config, checkpoint=wanted.checkpoint) == wanted
        assert wanted.optimizer.warmup_steps == 20
        own_flops = (run.steps - begin) / run.steps * full.flops
        assert run.own_flops == pytest.approx(own_flops, rel=1e-12)
        assert run.hours == pytest.approx(own_flops / 1e10 / 3600)
        assert (run.flops, run.tokens) == (full.flops, full.tokens)
        assert (run.trunk, run.begin_step) == ((trunk, begin) if begin else ("", 0))
    assert main(["plan", str(path)]) == 0
    out = capsys.readouterr().out
    total = sum(run.flops for run in straight)
    assert "trunks: 16 runs start " in out and f"{270 / 700 * total:.4g} saved (39%)" in out
    write_folder(tmp_path / "data", tokens=90_000)
    forks = ["optimizer.schedule=wsd", "checkpoint.fork=runs/a"]
    wrong: list[dict[str, Any]] = [{}, {"settings": []}, {"settings": forks}]
    for changed in [*wrong, {"warmup_steps": None}]:
        assert main(["plan", str(write(tmp_path, TRUNKS, **changed))]) == 2
        error = capsys.readouterr().err
        wording(error)
        assert error.count("\n") == 1


# Keys of the study with wrong values.
WRONG = """
varients: {}
variants: {}
variants: {a b: []}
variants: {x: [model.mixr=cem]}
variants: {x: [model.hidden_size=64]}
variants: {x: [model.mixer]}
settings: [optimizer.eps=1e-9, optimizer.eps=1e-8]
settings: [checkpoint.mirror=m]
learning_rates: [0.001]
sizes: [32, 64]
sizes: [32, 64, 64]
sizes: [32, 64, 90]
sizes: [32, 64, {layers: 2}]
sizes: [32, 64, {width: 96, heads: 7}]
sizes: {parameters: [1.0e+5, 1.01e+5, 5.0e+5]}
budgets: [3.0e+10, 3.0e+10]
budgets: [0]
budgets: []
budgets: [2.0e+8, 4.0e+10]
tokens: [1.0e+6]
warmup: 1.0
warmup_steps: 5000
seeds: []
cluster: {processes: 3}
base: bse.yaml
base: ""
name: a/b
path: x
fit: {approaches: [isoflops]}
fit: {approaches: []}
variants: {x: [], y: [model.mixer=transformer]}
{budgets: [2.0e+8, 4.0e+10], min_steps: 1}
"""


def test_a_wrong_study_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    for changes in WRONG.strip().splitlines():
        assert main(["plan", str(write(tmp_path, changes))]) == 2, changes
        out, error = capsys.readouterr()
        assert out == "" and error.startswith("tools.scaling: error: ") and error.count("\n") == 1
        wording(error)
    for verb in ("plan", "fit", "collect", "plot"):
        assert main([verb, str(ROOT / "configs" / "run" / "demo.yaml")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "is the configuration of a run, not a study" in error


@pytest.mark.parametrize(
    ("key", "too_short", "unit"),
    [
        ("budgets", [2e8, 4e10], "FLOPs"),
        ("tokens", [100], "tokens"),
        ("tokens_per_parameter", [0.001], "tokens per parameter"),
    ],
)
def test_a_short_runs_fix_is_long_enough(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    key: str,
    too_short: list[float],
    unit: str,
) -> None:
    """Each suggested fix suits the named run; the longest of them suits all."""
    changes: dict[str, Any] = {"budgets": [], key: too_short}
    fixes = list[float]()
    while main(["plan", str(write(tmp_path, **changes))]) == 2:
        fix, _, text = capsys.readouterr().err.partition("give at least ")[2].partition(" ")
        assert text.startswith(f"{unit}, or")
        fixes.append(float(fix))
        assert fixes[-1] > changes[key][0]
        changes[key] = fixes[-1:]
    # At most one fix for each of the study's sizes and variants.
    assert 1 <= len(fixes) <= 8


def test_a_plan_needs_no_torch_and_little_time() -> None:
    """75 runs take 1.7 s of a CPU, and other tests share the core and its caches: 12 s would be
    another order of magnitude.
    """
    code = (
        "from tools.scaling.__main__ import main; import sys, time; main(['plan', sys.argv[1]]);"
        " heavy = {'torch', 'matplotlib', 'scipy'}; assert not heavy & set(sys.modules); assert"
        " time.process_time() < 12, time.process_time()"
    )
    study = ROOT / "configs/studies/fem_vs_transformer_h100.yaml"
    done = subprocess.run(
        [sys.executable, "-c", code, str(study)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "75 runs" in done.stdout
