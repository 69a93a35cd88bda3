"""DeepSpeed trains the same model as Megatron's engine in one process: every stage and layout, real gloo ranks, real DeepSpeed.

Every case starts from the Megatron engine's checkpoint of eight steps, so each of them resumes the other engine's optimizer state as well,
most of them at another layout. Losses alone would not do: AdamW hides a gradient that is off by a factor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.reader import load_full_model_state
from pretrain.report.progress_file import read_progress
from tests.pretrain.conftest import DEMO, SMALL
from tests.pretrain.rank_processes import finished, losses, started, wait_until
from tests.pretrain.test_parity import ROOT, launch

TP2 = ["parallel.tensor_model_parallel_size=2"]
SP = ["parallel.sequence_parallel=true"]
RECOMPUTE = ["train.recompute=full"]
STEPS = 5
pytestmark = pytest.mark.timeout(1500)  # the first case waits for the processes of all
LAYOUTS: dict[int, dict[str, list[str]]] = {
    1: {"one process": []},
    2: {"DP2": [], "TP2": TP2},
    4: {"TP2 x DP2": TP2, "TP2 x DP2 + SP": TP2 + SP, "TP2 x DP2 + SP, recompute": TP2 + SP + RECOMPUTE},
}


def deepspeed(stage: int) -> list[str]:
    return ["engine.name=deepspeed", f"engine.zero_stage={stage}"]


# Micro-batches a step: 4 at TP2, 2 at DP2.
OPTIONS: dict[str, list[str]] = {
    **{f"stage {stage}": deepspeed(stage) for stage in (0, 1, 2, 3)},
    "stage 1, one micro-batch": [*deepspeed(1), "train.micro_batch_size=4"],
    **{f"stage {stage}, four micro-batches": [*deepspeed(stage), "train.micro_batch_size=1"] for stage in (2, 3)},
    "stage 2, offload": [*deepspeed(2), "engine.offload_optimizer=true"],
    "stage 3, all offloaded": [*deepspeed(3), "engine.offload_optimizer=true", "engine.offload_parameters=true"],
    # Nothing stays whole: at the default threshold of 1e5 elements every parameter of so small a model does.
    "stage 3, all split": [*deepspeed(3), "engine.deepspeed.param_persistence_threshold=0"],
    "stage 2, overlapped": [*deepspeed(2), "parallel.overlap_grad_reduce=true"],
}
CASES = [
    (1, "one process", "stage 1"),
    *((2, "DP2", option) for option in OPTIONS),
    (2, "TP2", "stage 1"),
    (4, "TP2 x DP2", "stage 2"),
    (4, "TP2 x DP2 + SP", "stage 1"),
    (4, "TP2 x DP2 + SP", "stage 3, all split"),
    (4, "TP2 x DP2 + SP, recompute", "stage 3, all split"),
]
BF16 = [*((2, "DP2", f"stage {stage}") for stage in (1, 2, 3)), (4, "TP2 x DP2 + SP", "stage 3")]


# What writes a checkpoint: resumed there bit for bit, and elsewhere by either engine.
SAVED = [
    *(("bf16", 2, "DP2", f"stage {stage}") for stage in (1, 2, 3)),
    *(("fp32", 2, "DP2", option) for option in ("stage 0", "stage 1", "stage 3, all offloaded")),
    ("fp32", 4, "TP2 x DP2", "stage 2"),
    ("fp32", 4, "TP2 x DP2 + SP", "stage 3, all split"),
]
MOVES: list[tuple[int, list[str], str]] = [
    (1, [], "DP2: stage 3, all offloaded"),
    (1, [], "TP2 x DP2 + SP: stage 3, all split"),
    (2, TP2 + deepspeed(1), "TP2 x DP2: stage 2"),  # TP2 x DP2 to TP2 x DP1
    (2, deepspeed(2), "TP2 x DP2: stage 2"),  # and to TP1 x DP2
    (2, TP2 + SP + deepspeed(3), "DP2: stage 1"),
    (2, ["parallel.pipeline_model_parallel_size=2"], "TP2 x DP2 + SP: stage 3, all split"),
]


@pytest.fixture(scope="module")
def results(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases; processes are shared by the cases of one world size."""
    folder = tmp_path_factory.mktemp("deepspeed")
    base = [f"data.train.0.prefix={tiny_data / 'train'}", f"data.valid.0.prefix={tiny_data / 'valid'}", "data.test=[]", *SMALL]
    base += ["model.tie_embeddings=false", "model.num_layers=2"]

    def job(precision: str, name: str, settings: list[str], **more: Any) -> dict[str, Any]:
        run_dir = str(folder / precision)
        overrides = [*base, f"run_dir={run_dir}", f"train.precision={precision}", *settings]
        return {"name": f"{precision} {name}", "overrides": overrides, "steps": STEPS, "load": run_dir, **more}

    def saved(precision: str, name: str) -> str:
        return str(folder / f"{precision} {name}".replace(":", "").replace(" ", "_"))

    answers: dict[str, Any] = {}
    for world, layouts in LAYOUTS.items():
        jobs = []
        if world == 1:
            for precision in ("fp32", "bf16"):
                jobs.append({**job(precision, "start", [], save=True, load=None), "steps": 8})
                jobs.append(job(precision, "megatron", []))
        jobs += [job("fp32", f"{layout}: {option}", layouts[layout] + OPTIONS[option]) for at, layout, option in CASES if at == world]
        jobs += [job("bf16", f"{layout}: {option}", layouts[layout] + OPTIONS[option]) for at, layout, option in BF16 if at == world]
        # Two steps and a checkpoint; three more from it, at the same layout.
        for precision, at, layout, option in SAVED:
            if at == world:
                name, settings = f"{layout}: {option}", layouts[layout] + OPTIONS[option]
                place = [f"run_dir={saved(precision, name)}"]
                jobs.append({**job(precision, f"{name}, saved", settings + place, save=True), "steps": 2})
                jobs.append({**job(precision, f"{name}, resumed", settings + place), "load": saved(precision, name), "steps": 3})
        answers |= launch(world, jobs, folder)
    for world in (1, 2):
        moves = [move for move in MOVES if move[0] == world]
        jobs = [{**job("fp32", str(move), move[1]), "load": saved("fp32", move[2]), "steps": 3} for move in moves]
        answers |= launch(world, jobs, folder)
    return answers


@pytest.mark.parametrize(("world", "layout", "option"), CASES)
def test_equals_the_megatron_engine(results: dict[str, Any], world: int, layout: str, option: str) -> None:
    # 1e-6: an fp32 sum in another order.
    wanted = results["fp32 megatron"]["steps"]
    assert results[f"fp32 {layout}: {option}"]["steps"] == [pytest.approx(step, rel=1e-6) for step in wanted]


@pytest.mark.parametrize(("world", "layout", "option"), BF16)
def test_equals_the_megatron_engine_in_bf16(results: dict[str, Any], world: int, layout: str, option: str) -> None:
    # As between Megatron's own layouts: an activation rounded to 8 bits moves by 4e-3, the loss averages over the tokens.
    for (loss, norm), (wanted_loss, wanted_norm) in zip(
        results[f"bf16 {layout}: {option}"]["steps"], results["bf16 megatron"]["steps"], strict=True
    ):
        assert loss == pytest.approx(wanted_loss, rel=2e-4)
        assert norm == pytest.approx(wanted_norm, rel=1e-2)


@pytest.mark.parametrize(("precision", "world", "layout", "option"), SAVED)
def test_resumes_to_the_last_bit_at_the_same_layout(results: dict[str, Any], precision: str, world: int, layout: str, option: str) -> None:
    name = f"{precision} {layout}: {option}"
    whole = results[name]["steps"]
    assert results[f"{name}, saved"]["steps"] + results[f"{name}, resumed"]["steps"] == whole


@pytest.mark.parametrize("move", MOVES, ids=str)
def test_resumes_at_another_layout_stage_and_engine(results: dict[str, Any], move: tuple[int, list[str], str]) -> None:
    # 1e-6: as between layouts; what is read has every bit of what was written.
    wanted = results["fp32 megatron"]["steps"][2:]
    assert results[f"fp32 {move}"]["steps"] == [pytest.approx(step, rel=1e-6) for step in wanted]


def test_fifty_steps_give_the_megatron_engines_curve(settings: list[str], tmp_path: Path) -> None:
    """From the same initial weights, the whole command."""
    curves = {}
    for name, more in {"megatron": [], "deepspeed": deepspeed(3)}.items():
        run_dir = tmp_path / name
        arguments = [DEMO, *settings, *more, f"run_dir={run_dir}", "train.steps=50", "train.eval_interval=25"]
        finished(1, arguments, tmp_path / f"out.{name}")
        curves[name] = losses(run_dir)
    assert len(curves["megatron"]) == 50
    weights = {name: load_full_model_state(tmp_path / name)[0] for name in curves}  # what every export reads
    assert {key: (value.shape, value.dtype) for key, value in weights["deepspeed"].items()} == {
        key: (value.shape, value.dtype) for key, value in weights["megatron"].items()
    }
    for step, wanted in curves["megatron"].items():
        # Adam divides a gradient of rounding's size by its own root: what starts at 1e-7 grows with every step.
        assert curves["deepspeed"][step][0] == pytest.approx(wanted[0], rel=1e-5)


def test_a_killed_run_resumes_to_the_last_bit(settings: list[str], tmp_path: Path) -> None:
    """SIGKILL on both ranks after a checkpoint; the same command again, against a run that nobody killed."""
    arguments = [
        DEMO,
        *settings,
        *deepspeed(2),
        "train.steps=12",
        "checkpoint.interval=4",
        "train.eval_interval=0",
        "log.straggler_interval=3",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finished(2, [*arguments, f"run_dir={whole}"], tmp_path / "out.whole")
    with started(2, [*arguments, f"run_dir={killed}"], tmp_path / "out.first", naps={0: 0.05, 1: 0.05}) as ranks:
        wait_until(lambda: (killed / "checkpoints/step_00000004/manifest.json").exists() and len(losses(killed)) >= 5, ranks)
        for rank in ranks:
            rank.kill()
    assert "resumed from" in finished(2, [*arguments, f"run_dir={killed}"], tmp_path / "out.second")
    assert read_progress(killed)["state"] == "complete"  # type: ignore[index]
    assert losses(killed) == losses(whole) and len(losses(whole)) == 12
    assert (whole / "ranks.jsonl").exists()


@pytest.fixture(scope="module")
def looks(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("looks") / "out.json"
    base = [f"data.train.0.prefix={tiny_data / 'train'}", f"data.valid.0.prefix={tiny_data / 'valid'}", "data.test=[]", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/pretrain/deepspeed_worker.py"), str(out), *base]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_a_step_that_is_not_finite_changes_nothing(looks: dict[str, Any], stage: str) -> None:
    """A NaN in the loss, and one that is infinite while its gradients are not."""
    found = looks[stage]
    assert found["skipped"] == [False, True, True, False]
    assert found["untouched"] and found["moved"]


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_restored_groups_keep_their_own_steps_and_settings(looks: dict[str, Any], stage: str) -> None:
    """DeepSpeed's own loading shares one step tensor among all, which Adam then adds to for each, and copies the first group's settings."""
    restored, later = looks[stage]["steps"]
    assert len(restored) >= 2 and set(restored) == {2.0} and set(later) == {3.0}
    assert looks[stage]["decays"] == [0.0, 0.1] and len(looks[stage]["rates"]) == 1
    assert set(looks[stage]["groups"]) == {3.0}
