"""Tests of forks: bit for bit in their parent's order, or with other data, length, batch, schedule.
Real trainings.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fem_common.config import dump_yaml
from fem_common.files import sha256
from pretrain.checkpoint.folder import MANIFEST, find
from pretrain.config import load_run
from pretrain.run_directory import FORK
from tests.pretrain.conftest import DEMO, QUIET, Command, back_to, edit, steps_of
from tests.ranks import losses
from tests.wording import Wording
from tools.checkpoint.__main__ import main as checkpoint

WSD = ("optimizer.schedule=wsd", "optimizer.decay_steps=4", *QUIET)


def step_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


@pytest.mark.parametrize("engine", ["megatron", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_trunk_and_decay_are_a_straight_run_to_the_last_bit(
    engine: str, pretrain: Command, tmp_path: Path
) -> None:
    """Holds after a kill in the decay and after further training of the trunk; the checkpoint of
    the fork is kept.
    """
    trunk = pretrain.run_dir
    straight = tmp_path / "straight"
    decay = tmp_path / "decay"
    base = (*WSD, f"engine.name={engine}")
    pretrain(*base, "train.steps=10", f"run_dir={straight}")
    pretrain(*base, "checkpoint.keep_last=1", "checkpoint.keep=[4,6]")
    assert sorted((trunk / "checkpoints").glob("step_*")) == [
        step_of(trunk, step) for step in (4, 6, 12)
    ]
    full = ("train.steps=10", "checkpoint.keep_last=3")
    wanted = {step: report for step, report in losses(straight).items() if step > 4}
    pretrain.fork(step_of(trunk, 4), decay, *full)
    assert "forked from" in pretrain.out and losses(decay) == wanted
    assert losses(decay)[8] != losses(trunk)[8]  # the decay of the trunk has not begun
    back_to(decay, 9)
    pretrain.fork(step_of(trunk, 4), decay, *full)
    assert "resumed from" in pretrain.out and losses(decay) == wanted
    shutil.rmtree(decay / "checkpoints")
    pretrain.fork(step_of(trunk, 4), decay, *full)
    assert losses(decay) == wanted
    record = json.loads((decay / FORK).read_text())
    parent = step_of(trunk, 4)
    assert record == {
        "parent": str(trunk), "checkpoint": str(parent), "step": 4, "order_begin": 0,
        "manifest_sha256": sha256(parent / MANIFEST)
    }  # fmt: skip


@pytest.mark.slow
def test_another_validation_set_or_none_changes_no_training_step(
    pretrain: Command, tiny_data: Path, tmp_path: Path
) -> None:
    """A fork and a resume continue bit for bit; manifests without a separate key of the training
    sources still open.
    """
    base = (
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        "checkpoint.interval=2",
        "log.diagnostics_interval=0",
    )
    another, none = f"data.valid=[{{prefix: {tiny_data / 'train'}}}]", "data.valid=[]"
    pretrain(*base, "train.steps=6", f"run_dir={tmp_path / 'straight'}")
    wanted = losses(tmp_path / "straight")
    pretrain(*base, "train.steps=2")
    pretrain.fork(pretrain.run_dir, tmp_path / "fork", *base, "train.steps=4", another)
    assert losses(tmp_path / "fork") == {step: wanted[step] for step in (3, 4)}
    assert "its data differs" not in pretrain.out
    pretrain(*base, "train.steps=4", none)
    manifest = step_of(pretrain.run_dir, 4) / MANIFEST
    edit(manifest, lambda content: content.pop("training_data"))
    pretrain(*base, "train.steps=6", code=2)
    assert "data.valid, which its older manifest does not distinguish" in pretrain.err
    pretrain(*base, "train.steps=6", none)
    assert losses(pretrain.run_dir) == wanted


def test_a_fork_of_other_data_length_batch_and_schedule(
    pretrain: Command, tmp_path: Path, wording: Wording
) -> None:
    """It starts at the first sample of its own order, continues the token count, has a new warm-up,
    and resumes bit for bit.
    """
    pretrain("train.steps=4", *QUIET)
    new = tmp_path / "new"
    fresh = tmp_path / "fresh"
    last = tmp_path / "last"
    other = ("data.seq_length=64", "train.global_batch_size=6", *QUIET)
    full = (
        *other,
        "train.steps=12",
        "optimizer.from_step=4",
        "optimizer.warmup_steps=2",
        "optimizer.schedule=linear",
    )
    pretrain.fork(pretrain.run_dir, new, *full)
    report = [
        line
        for line in pretrain.out.splitlines()
        if line.startswith(("different from", "its data"))
    ]
    wording("\n".join(report))
    pretrain(
        *other,
        "train.steps=1",
        "optimizer.warmup_steps=0",
        f"run_dir={fresh}",
        f"checkpoint.load={pretrain.run_dir}",
    )
    assert losses(new)[5][0] == losses(fresh)[1][0]
    curve = {record["step"]: record for record in steps_of(new)}
    assert list(curve) == list(range(5, 13))
    assert [curve[step]["consumed_tokens"] for step in (5, 12)] == [
        4 * 4 * 32 + n * 6 * 64 for n in (1, 8)
    ]
    # Linear from the peak to the floor.
    assert curve[5]["lr"] == curve[6]["lr"] / 2 and curve[12]["lr"] == pytest.approx(3e-4)
    progress = find(new).progress
    assert (
        progress.begin_step,
        progress.begin_samples,
        progress.order_begin,
        progress.order_samples,
    ) == (4, 8, 8, 8 * 6)
    back_to(new, 11)
    wanted = losses(new)
    pretrain.fork(pretrain.run_dir, new, *full)
    assert losses(new) == wanted
    # A fork of a fork.
    pretrain.fork(
        new,
        last,
        "train.tokens=4000",
        "train.steps=null",
        "optimizer.from_step=0",
        "optimizer.warmup_steps=0",
    )
    assert find(last).progress.step == 12 + -(-(4000 - 512 - 8 * 6 * 64) // (6 * 64))
    assert losses(last)[13] != losses(new)[12] and find(last).progress.order_begin == 8


@pytest.mark.slow
def test_a_configuration_means_its_newest_run(pretrain: Command, tmp_path: Path) -> None:
    """The demo trains into runs/demo/fem, while its file names runs/demo/mixers/{mixer}. Another
    model or name is not the run.
    """
    short = ("train.steps=1", "optimizer.warmup_steps=0", *QUIET)
    demo = tmp_path / "demo"
    new = tmp_path / "new"
    file = tmp_path / "demo.yaml"
    file.write_text(
        dump_yaml(load_run(DEMO, [*pretrain.settings, *short, f"run_dir={demo}/mixers/{{mixer}}"]))
    )
    runs = {
        "old": (),
        "fem": (),
        "other": ("model.num_layers=1",),
        "mixers/named": ("name=another",),
    }
    for number, (run, more) in enumerate(runs.items()):
        pretrain(*short, *more, f"run_dir={demo / run}")
        os.utime(step_of(demo / run, 1) / MANIFEST, (number, number))
    pretrain.fork(file, new, "train.steps=2")
    assert f"forked from {step_of(demo / 'fem', 1)} at step 1" in pretrain.out
    assert "the newest run of demo" in pretrain.err
    pretrain(config=str(file))
    pretrain.fork(file, tmp_path / "newer", "train.steps=2")
    assert f"forked from {step_of(demo / 'mixers/fem_softmax', 1)}" in pretrain.out


@pytest.mark.slow
def test_a_fork_stretches_rope(pretrain: Command, tmp_path: Path, wording: Wording) -> None:
    """Only RoPE scaling of the model and the sequence length change; weights and moments continue.
    So does a run from the weights only.
    """
    pretrain("train.steps=4", *QUIET)
    long = ("data.seq_length=64", "train.steps=6", "optimizer.warmup_steps=0", *QUIET)
    yarn = "model.rope_scaling={kind: yarn, factor: 2, original_length: 32}"
    new = tmp_path / "new"
    loaded = tmp_path / "loaded"
    plain = tmp_path / "plain"
    pretrain.fork(pretrain.run_dir, new, *long, yarn)
    wording(
        "\n".join(line for line in pretrain.out.splitlines() if line.startswith("different from"))
    )
    pretrain.fork(pretrain.run_dir, plain, *long)
    pretrain(
        *long, "train.steps=1", yarn, f"run_dir={loaded}", f"checkpoint.load={pretrain.run_dir}"
    )
    assert losses(new)[5][0] == losses(loaded)[1][0] != losses(plain)[5][0]
    pretrain.fork(pretrain.run_dir, tmp_path / "base", *long, "model.rope_base=500000", code=2)
    wording(pretrain.err.strip().splitlines()[-1])
    # A resumed run, not a fork.
    pretrain(*long, yarn, "train.steps=8", "data.seq_length=32", code=2)
    wording(pretrain.err.strip().splitlines()[-1])


def test_what_is_no_fork_is_refused(pretrain: Command, tmp_path: Path, wording: Wording) -> None:
    pretrain("train.steps=4", *QUIET)
    run = pretrain.run_dir
    new = tmp_path / "new"
    merged = tmp_path / "merged"
    assert checkpoint(["merge", str(run), "--out", str(merged)]) == 0
    for parent, out, *overrides in (
        (run, new),
        (run, run, "train.steps=8"),
        (DEMO, run, "train.steps=8", f"run_dir={tmp_path / 'nowhere'}"),
        (run, new, "train.steps=8", "model.num_layers=4"),
        (run, new, "train.steps=8", "train.precision=bf16"),
        (run, new, "train.steps=8", "optimizer.name=muon"),
        (run, new, "train.steps=8", "optimizer.from_step=8"),
        (run, new, "train.steps=8", f"checkpoint.load={run}"),
        (DEMO, new, "train.steps=8", f"run_dir={tmp_path / 'nowhere'}"),
        (DEMO, new, "train.steps=8", f"run_dir={merged}"),
    ):
        pretrain.fork(Path(parent), out, *overrides, code=2)
        wording(pretrain.err.strip().splitlines()[-1])
    assert not (new / "checkpoints").exists()
