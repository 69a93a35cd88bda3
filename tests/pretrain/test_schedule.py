"""Tests of lengths and learning rates after changes of the batch size: on resumes, at forks, in
random histories.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from pretrain.__main__ import main
from pretrain.checkpoint.folder import MANIFEST, Progress, find
from pretrain.config import OptimizerConfig, RunConfig, TrainConfig
from pretrain.engines.building import LearningRates
from pretrain.schedule import Schedule
from pretrain.training_stages import Part
from tests.pretrain.conftest import (
    DEMO,
    SMALL,
    Command,
    back_to,
    data_of,
    edit,
    spikes_at,
    steps_of,
)
from tests.pretrain.test_fork import step_of
from tests.ranks import losses

LENGTH = 16  # tokens of a sample
BASE = (
    *(
        "model.num_layers=1",
        "data.seq_length=16",
        "data.valid=[]",
        "optimizer.lr=1e-3",
        "optimizer.min_lr=0",
        "optimizer.warmup_steps=0",
    ),
    *(
        "log.diagnostics_interval=0",
        "checkpoint.interval=0",
        "checkpoint.keep_last=9",
        "checkpoint.keep=[12,16,18]",
    ),
)
TOKENS = ("train.steps=null", "train.tokens=1280")
STEPS = ("train.steps=20",)
WSD = ("optimizer.schedule=wsd", "optimizer.decay_steps=4")
ENGINES = ["megatron", "deepspeed"]
QUICK = [
    ("megatron", "tokens, 4 to 8"),
    ("megatron", "steps, wsd, 4 to 8"),
    ("megatron", "warm-up done, 4 to 8"),
    ("deepspeed", "tokens, 4 to 8"),
]


def cosine(*parts: float) -> list[float]:
    return [0.5 + 0.5 * math.cos(math.pi * part) for part in parts]


CASES: dict[str, tuple[tuple[str, ...], int, list[float]]] = {
    # A run of 20 steps of 4 samples: its settings, the batch size from step 11 on, the learning
    # rates from step 11 on in units of 1e-3.
    "tokens, 4 to 8": (TOKENS, 8, cosine(0.6, 0.7, 0.8, 0.9, 1)),
    "tokens, wsd, 4 to 8": ((*TOKENS, *WSD), 8, [1, 0.75, 0.5, 0.25, 0]),
    "tokens, 4 to 2": (TOKENS, 2, cosine(*(n / 40 for n in range(21, 41)))),
    "steps, 4 to 2": (STEPS, 2, cosine(*(n / 20 for n in range(11, 21)))),
    "steps, 4 to 8": (STEPS, 8, cosine(*(n / 20 for n in range(11, 21)))),
    "steps, wsd, 4 to 8": ((*STEPS, *WSD), 8, [1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
    "warm-up done, 4 to 8": (
        (*STEPS, "optimizer.warmup_steps=8"),
        8,
        cosine(*(n / 12 for n in range(3, 13))),
    ),
}


@pytest.fixture(scope="module")
def ten_steps(
    tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Path], None]:
    """Copies of a run of an engine with ten steps of four samples."""
    made = dict[str, Path]()

    def copied(engine: str, run_dir: Path) -> None:
        if engine not in made:
            made[engine] = tmp_path_factory.mktemp(engine) / "run"
            own = [f"run_dir={made[engine]}", *data_of(tiny_data, "train")]
            assert main([DEMO, *SMALL, *BASE, *own, "train.steps=10", f"engine.name={engine}"]) == 0
        shutil.copytree(made[engine], run_dir)

    return copied


def learning_rates(run_dir: Path) -> dict[int, float]:
    return {
        record["step"]: 1e3 * record["lr"] for record in steps_of(run_dir) if record["step"] > 10
    }


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        pytest.param(engine, name, marks=() if (engine, name) in QUICK else pytest.mark.slow)
        for engine in ENGINES
        for name in CASES
    ],
)
def test_a_resume_with_another_batch_size(
    engine: str, name: str, pretrain: Command, ten_steps: Callable[[str, Path], None]
) -> None:
    more, batch, wanted = CASES[name]
    ten_steps(engine, pretrain.run_dir)
    pretrain(*BASE, *more, f"engine.name={engine}", f"train.global_batch_size={batch}")
    # Cosines are summed in a different order; 0 is exact.
    assert list(learning_rates(pretrain.run_dir).values()) == pytest.approx(
        wanted, rel=1e-9, abs=1e-15
    )
    assert wanted[-1] == list(learning_rates(pretrain.run_dir).values())[-1] == 0
    last = find(pretrain.run_dir).progress
    assert (last.step, last.consumed_samples, last.batch_changes) == (
        10 + len(wanted),
        40 + batch * len(wanted),
        ((10, 40),),
    )
    assert last.order_samples == last.consumed_samples, (
        "samples of the order are left, or read that it was not drawn for"
    )
    report = json.loads((pretrain.run_dir / "progress.json").read_text())
    assert (report["state"], report["steps"], report["total_tokens"]) == (
        "complete",
        last.step,
        last.consumed_samples * LENGTH,
    )


def test_the_batch_size_changes_twice_and_back_and_the_run_is_killed(
    pretrain: Command, ten_steps: Callable[[str, Path], None], tmp_path: Path
) -> None:
    """Over consumed samples the cosine equals that of an unchanged run; the checkpoint of step 10
    predates the record of changes.
    """
    ten_steps("megatron", pretrain.run_dir)
    manifest = step_of(pretrain.run_dir, 10) / MANIFEST
    edit(manifest, lambda old: old["progress"].pop("batch_changes"))
    wanted, consumed = dict[int, float](), 40
    for batch, last, kept in (
        (8, 15, range(11, 13)),
        (2, 24, range(13, 17)),
        (4, 20, range(17, 21)),
    ):
        pretrain(*BASE, *TOKENS, f"train.global_batch_size={batch}")
        assert pretrain.out.count(f" {last} steps of {batch * LENGTH} tokens") == 1
        for step in kept:
            consumed += batch
            (wanted[step],) = cosine(consumed / 80)
        back_to(pretrain.run_dir, kept[-1])
    report = learning_rates(pretrain.run_dir)
    assert {step: report[step] for step in wanted} == pytest.approx(wanted, rel=1e-9, abs=1e-15)
    assert consumed == 80
    assert find(pretrain.run_dir).progress.batch_changes == ((10, 40), (12, 56), (16, 64))
    through = losses(pretrain.run_dir)
    back_to(pretrain.run_dir, 19)
    pretrain(*BASE, *TOKENS)
    assert losses(pretrain.run_dir) == through
    assert "is complete at step 20" in pretrain(*BASE, *TOKENS)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        pytest.param(
            (*STEPS, "optimizer.warmup_steps=8"),
            cosine(*(n / 12 for n in range(3, 13))),
            marks=pytest.mark.slow,
        ),
        (
            (*TOKENS, "optimizer.from_step=4", "optimizer.schedule=linear"),
            [0.5, 0.375, 0.25, 0.125, 0],
        ),
    ],
    ids=["warm-up done", "from_step"],
)
def test_a_fork_with_another_batch_size(
    more: tuple[str, ...],
    wanted: list[float],
    pretrain: Command,
    ten_steps: Callable[[str, Path], None],
    tmp_path: Path,
) -> None:
    """Its earlier steps are its parent's, also after a kill of a fork that predates the record of
    changes.
    """
    ten_steps("megatron", pretrain.run_dir)
    new = tmp_path / "new"
    for killed in (False, True) if "optimizer.warmup_steps=8" in more else (False,):
        if killed:
            back_to(new, 12)
            assert find(new).progress.batch_changes == ((10, 40),)
            edit(step_of(new, 12) / MANIFEST, lambda old: old["progress"].pop("batch_changes"))
        pretrain.fork(pretrain.run_dir, new, *BASE, *more, "train.global_batch_size=8")
        assert list(learning_rates(new).values()) == pytest.approx(wanted, rel=1e-9, abs=1e-15)
    assert find(new).progress.consumed_samples == 40 + 8 * len(wanted)


def test_training_goes_back_from_a_spike_up_to_the_change(
    pretrain: Command, ten_steps: Callable[[str, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 11 the checkpoint is from before the change, so the step is skipped. At step 12 it is
    that of the change.
    """
    spikes_at(monkeypatch, 1, 2)
    ten_steps("megatron", pretrain.run_dir)
    # The checkpoint that the run returns to.
    shutil.copytree(step_of(pretrain.run_dir, 10), step_of(pretrain.run_dir, 8))
    guard = (
        "train.on_spike=rewind",
        "train.spike_rewind=2",
        "checkpoint.interval=2",
        "train.global_batch_size=8",
    )
    assert "step 11 skipped" in pretrain(*BASE, *STEPS, *guard)
    assert "back at" in pretrain.out
    assert "step_00000010, 16 samples passed over" in pretrain.out
    last = find(pretrain.run_dir).progress
    assert (last.consumed_samples, last.passed_over, last.batch_changes) == (120, 16, ((10, 40),))
    assert list(learning_rates(pretrain.run_dir).values()) == pytest.approx(
        CASES["steps, 4 to 8"][2], rel=1e-9, abs=1e-15
    )


def test_a_schedule_in_tokens_is_the_one_in_steps() -> None:
    """A number of tokens is rounded up to full steps."""
    step = 4 * LENGTH
    in_steps = config_of(
        {"steps": 12, "global_batch_size": 4},
        {"schedule": "wsd", "warmup_steps": 3, "decay_steps": 4},
    )
    in_tokens = config_of(
        {"tokens": 12 * step - 1, "global_batch_size": 4},
        {"schedule": "wsd", "warmup_tokens": 3 * step - 1, "decay_tokens": 4 * step},
    )
    assert Schedule.of(in_tokens) == Schedule.of(in_steps)


def test_a_change_that_was_not_recorded_counts_from_the_checkpoint_on() -> None:
    part = Part(config_of({"tokens": 1280, "global_batch_size": 8}, {}))
    assert part.resumed(Progress(12, 56, 80)).batch_changes == ((12, 56),)
    assert part.resumed(Progress(12, 56, 80, batch_changes=((10, 40),))).batch_changes == (
        (10, 40),
    )
    assert part.schedule(part.resumed(Progress(12, 56, 80))).total_samples == 80


def config_of(train: dict[str, Any], optimizer: dict[str, Any]) -> RunConfig:
    base = RunConfig()
    return replace(
        base,
        data=replace(base.data, seq_length=LENGTH),
        train=TrainConfig(**train),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-5, **optimizer),
    )


@some.composite
def histories(draw: some.DrawFn) -> tuple[dict[str, Any], dict[str, Any], list[tuple[int, int]]]:
    """Draw settings of train and optimizer, and a list of (steps, batch size); warm-up and decay
    fit the run at every batch size.
    """
    in_steps = draw(some.booleans())
    train = (
        {"steps": draw(some.integers(30, 60))}
        if in_steps
        else {"tokens": draw(some.integers(240 * LENGTH, 400 * LENGTH))}
    )
    optimizer: dict[str, Any] = {"schedule": draw(some.sampled_from(["cosine", "linear", "wsd"]))}
    warmup = {
        "warmup_steps": some.integers(0, 9),
        "warmup_tokens": some.integers(1, 30 * LENGTH),
        "warmup_fraction": some.floats(0.01, 0.3),
    }
    decay = {"decay_steps": some.integers(1, 9), "decay_tokens": some.integers(1, 30 * LENGTH)}
    for choice in (warmup, decay if optimizer["schedule"] == "wsd" else {}):
        if key := draw(some.sampled_from([None, *choice])):
            optimizer[key] = draw(choice[key])
    batches = some.tuples(some.integers(1, 25), some.sampled_from([1, 2, 3, 4, 5, 8, 12]))
    return train, optimizer, draw(some.lists(batches, min_size=2, max_size=5))


@settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(histories())
def test_the_rate_through_random_changes_of_the_batch_size(
    history: tuple[dict[str, Any], dict[str, Any], list[tuple[int, int]]],
) -> None:
    """The rate is continuous at a change for equal samples, increases only in the warm-up, and is
    min_lr at the last step.

    In a run in steps, with warm-up and decay in steps, it equals that of the initial batch size
    step by step.
    """
    train, optimizer, batches = history
    curve = list[float]()
    changes = list[tuple[int, int]]()
    step = 0
    consumed = 0
    for number, (steps, batch) in enumerate(batches):
        changes += [(step, consumed)] if step else []
        config = config_of({**train, "global_batch_size": batch}, optimizer)
        schedule = Schedule.of(config, changes)
        optimized = torch.optim.SGD([{"params": [torch.zeros(1)], "lr_mult": 1.0}], lr=1.0)
        rate = LearningRates(config, schedule, optimized).set
        if curve:  # equal up to the rounding of a few operations
            assert rate(consumed) == pytest.approx(curve[-1], rel=1e-12)
        end = schedule.steps if number == len(batches) - 1 else min(schedule.steps, step + steps)
        while step < end:
            step, consumed = step + 1, consumed + batch
            curve.append(rate(consumed))
        if step == schedule.steps:
            break
    top = curve.index(max(curve))
    assert curve[: top + 1] == sorted(curve[: top + 1])
    assert curve[top:] == sorted(curve[top:], reverse=True)
    assert curve[-1] == 1e-5 < curve[-2], "it ends at min_lr, and not earlier"
    requested = train["steps"] if "steps" in train else -(-train["tokens"] // LENGTH)
    assert len(curve) == requested if "steps" in train else consumed - batch < requested <= consumed
    if "warmup_steps" in optimizer:
        assert optimizer["warmup_steps"] == 0 or curve[optimizer["warmup_steps"] - 1] == 1e-3 > max(
            [0.0, *curve[: optimizer["warmup_steps"] - 1]]
        )
    if "steps" in train and not {"warmup_tokens", "decay_tokens"} & {*optimizer}:
        straight = config_of({**train, "global_batch_size": batches[0][1]}, optimizer)
        rate = LearningRates(straight, Schedule.of(straight), optimized).set
        assert curve == [rate(step * batches[0][1]) for step in range(1, len(curve) + 1)]
