"""Tests of checkpoints from a user's view: kills, signals, damage, other models, other layouts.
Every run is ``python -m pretrain``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fem_common.ports import server_port
from pretrain.__main__ import main
from pretrain.checkpoint.folder import MANIFEST, damaged_files, hashes_of
from pretrain.checkpoint.reader import load_full_model_state
from pretrain.report.progress_file import read_progress
from pretrain.trainer import Trainer
from tests.pretrain.conftest import DEMO, QUIET, ROOT, Command, back_to, edit, flip, steps_of
from tests.pretrain.jobs import PP2, SP, TP2, deepspeed, same
from tests.ranks import (
    PATIENCE,
    finished,
    forked,
    losses,
    records,
    send,
    started,
    wait_for_lock,
    wait_until,
)


@contextlib.contextmanager
def signalled(
    monkeypatch: pytest.MonkeyPatch, step: int, *numbers: signal.Signals
) -> Iterator[None]:
    """Send these signals to this process after it has completed the step."""
    original = Trainer._step

    def made(trainer: Trainer, stream: Any) -> Any:
        report = original(trainer, stream)
        for number in numbers if trainer.progress.step == step else ():
            os.kill(os.getpid(), number)
        return report

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", made)
        yield


def torchrun(world: int, *words: str) -> subprocess.Popen[str]:
    """Start ``torchrun -m pretrain WORDS...``."""
    port, processes = f"--master-port={server_port()}", f"--nproc-per-node={world}"
    start = [sys.executable, "-m", "torch.distributed.run", processes, port, "-m", "pretrain"]
    return subprocess.Popen(
        [*start, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_full_model_state(run_dir)[0]


def check_kills(base: list[str], folder: Path, kills: list[int]) -> None:
    """Check that kills of both ranks at these steps change no loss, norm and final weight of a run.

    base: the arguments of the run without its run directory.
    """
    full, killed = folder / "whole", folder / "killed"
    arguments = [*base, f"run_dir={killed}"]
    for step in kills:
        naps, held = {0: 0.02, 1: 0.02}, (step, folder / "never")
        with started(2, arguments, folder / "out.killed", naps, held) as ranks:
            wait_until(lambda: max(losses(killed), default=0) >= step, ranks)  # noqa: B023
        wait_for_lock(killed)
    assert "resumed from" in finished(2, arguments, folder / "out.last")
    finished(2, [*base, f"run_dir={full}"], folder / "out.whole")
    assert losses(killed) == losses(full), f"killed at steps {kills}"
    assert same(weights(killed), weights(full))


@pytest.mark.parametrize(
    "layout",
    [
        TP2 + SP,
        pytest.param(deepspeed(2), marks=pytest.mark.slow),
        pytest.param(["optimizer.name=muon"], marks=pytest.mark.slow),
    ],
    ids=["TP2 + SP", "DeepSpeed, DP2", "Muon, DP2"],
)
def test_two_kills_change_no_bit(settings: list[str], tmp_path: Path, layout: list[str]) -> None:
    base = [DEMO, *settings[1:], *layout, "train.steps=20", "checkpoint.interval=3"]
    check_kills(base, tmp_path, [random.randint(4, 7), random.randint(10, 16)])


@pytest.mark.slow
def test_continues_at_another_layout(
    pretrain: Command, tmp_path: Path, settings: list[str]
) -> None:
    """A checkpoint of TP2 x PP2 continues in one process like a run that used one process from the
    start.
    """
    pretrain()
    other = tmp_path / "other"
    layout = TP2 + PP2 + SP
    finished(4, [DEMO, f"run_dir={other}", *settings[1:], *layout], tmp_path / "out")
    back_to(other, 8)
    assert "at step 8" in pretrain(f"run_dir={other}")
    # 1e-6: fp32 sums in a different order.
    assert losses(other) == {
        step: pytest.approx(values, rel=1e-6) for step, values in losses(pretrain.run_dir).items()
    }


@pytest.mark.parametrize(
    ("number", "times"),
    [
        (signal.SIGTERM, 2),
        *(
            pytest.param(number, times, marks=pytest.mark.slow)
            for number, times in ((signal.SIGUSR1, 2), (signal.SIGHUP, 2), (signal.SIGINT, 1))
        ),
    ],
)
def test_signal_saves_and_the_same_command_continues(
    pretrain: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    times: int,
) -> None:
    """Schedulers send a signal twice; the run ends cleanly with one checkpoint and loses no
    step.
    """
    pretrain(f"run_dir={tmp_path / 'whole'}", "checkpoint.interval=0")
    with signalled(monkeypatch, 3, *[number] * times):
        pretrain("checkpoint.interval=0")
    stopped = max(losses(pretrain.run_dir))
    assert 3 <= stopped <= 4 and f"stopped by {number.name} after step" in pretrain.out
    report = read_progress(pretrain.run_dir)
    assert report is not None
    assert (report["state"], report["step"], report["signal"]) == (
        "stopped",
        stopped,
        number.name,
    )
    assert [path.name for path in pretrain.checkpoints.glob("step_*")] == [f"step_{stopped:08d}"]
    pretrain()
    assert losses(pretrain.run_dir) == losses(tmp_path / "whole")


def test_a_second_ctrl_c_ends_the_run_at_once(settings: list[str], tmp_path: Path) -> None:
    """The run ends without a traceback and without the checkpoint that the first Ctrl-C
    requests.
    """
    with started(1, [DEMO, *settings], tmp_path / "out", held=(1, tmp_path / "never")) as (rank,):
        wait_until(lambda: bool(records(tmp_path / "run")), [rank])
        before = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
        for _ in range(2):
            send(rank, signal.SIGINT)
            wait_until(
                lambda: "once more ends it" in (tmp_path / "out.0").read_text(),
                [rank] if rank.is_alive() else [],
            )
        rank.join(PATIENCE)
    assert rank.exitcode == -signal.SIGINT
    assert "Traceback" not in (tmp_path / "out.0").read_text()
    assert sorted((tmp_path / "run" / "checkpoints").glob("step_*")) == before


def test_damaged_checkpoints_are_named_and_passed_over(pretrain: Command) -> None:
    """With a truncated file in the newest, a changed pickle and a missing file in earlier ones, the
    fourth from last is used.
    """
    quick = ("checkpoint.interval=3", "checkpoint.keep_last=4", *QUIET)
    pretrain(*quick)
    expected = losses(pretrain.run_dir)
    newest, second, third = (
        pretrain.checkpoints / f"step_000000{step}" for step in ("12", "09", "06")
    )
    os.truncate(newest / "__0_0.distcp", (newest / "__0_0.distcp").stat().st_size - 1)
    flip(second / ".metadata", 100)
    (third / "common.pt").unlink()
    assert f"{newest} is damaged (__0_0.distcp has" in pretrain(*quick)
    assert f"{second} is damaged (.metadata does not match the hash" in pretrain.out
    assert f"{third} is damaged (common.pt is missing)" in pretrain.out
    assert "step_00000003 at step 3" in pretrain.out and losses(pretrain.run_dir) == expected


def test_pickle_that_names_foreign_code_is_refused(pretrain: Command, tmp_path: Path) -> None:
    """A .metadata that would run a command is refused before any of its code runs, even if its hash
    matches.
    """
    pretrain("train.steps=4")
    folder = pretrain.checkpoints / "step_00000004"
    witness = tmp_path / "ran"
    evil = pickle.dumps(_Command(f"touch {witness}"))
    (folder / ".metadata").write_bytes(evil)

    def recorded(manifest: dict[str, Any]) -> None:
        manifest["files"][".metadata"] = len(evil)
        manifest["sha256"][".metadata"] = hashlib.sha256(evil).hexdigest()

    edit(folder / MANIFEST, recorded)
    assert ".metadata names posix.system" in pretrain.refused("train.steps=14")
    assert not witness.exists()
    pickle.loads(evil)
    assert witness.exists(), "the pickle of this test would have run its command"


class _Command:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_longer_run_keeps_the_order_or_is_refused(pretrain: Command) -> None:
    """Within one pass over the data a longer run reads the same samples; beyond it the order would
    change.
    """
    pretrain("train.steps=4")
    assert "at step 4" in pretrain("train.steps=6")
    assert "samples already seen would repeat; keep the run within " in pretrain.refused(
        "train.steps=100000"
    )


def test_asynchronous_save_writes_the_same(pretrain: Command, tmp_path: Path) -> None:
    """Only the last checkpoints are kept, and ``latest`` names the newest."""
    quick = ("train.steps=8", "checkpoint.interval=2", "checkpoint.keep_last=2", *QUIET)
    pretrain(*quick)
    pretrain(*quick, f"run_dir={tmp_path / 'async'}", "checkpoint.async_save=true")
    assert same(weights(tmp_path / "async"), weights(pretrain.run_dir))
    for checkpoints in (tmp_path / "async" / "checkpoints", pretrain.checkpoints):
        names = sorted(path.name for path in checkpoints.iterdir())
        assert names == ["latest", "step_00000006", "step_00000008"]
        assert (checkpoints / "latest").read_text() == "step_00000008\n"
        step = checkpoints / "step_00000008"
        files = [path.name for path in step.iterdir() if path.name != MANIFEST]
        assert (
            sorted(hashes_of(step))
            == sorted(files)
            == sorted(json.loads((step / MANIFEST).read_text())["files"])
        )
        assert not dict(damaged_files(step, lambda count: None)), (
            "the hashes that were taken on the way are the files'"
        )


# The first step is finite, but its weights give no finite loss.
RUINED = ("optimizer.lr=1e18", "optimizer.warmup_steps=0")


def bad_steps(checkpoints: Path) -> dict[int, int]:
    """Return step -> bad_steps_in_a_row for every checkpoint."""
    manifests = [json.loads((path / MANIFEST).read_text()) for path in checkpoints.glob("step_*")]
    return {
        manifest["progress"]["step"]: manifest["progress"]["bad_steps_in_a_row"]
        for manifest in manifests
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["checkpoint.async_save=false", "checkpoint.async_save=true"])
def test_a_hopeless_run_started_again_and_again_keeps_the_last_good_checkpoint(
    pretrain: Command, how: str
) -> None:
    """With a checkpoint at every step and one to keep, those within bad steps replace each other,
    never the one from before them.
    """
    ruined = (*RUINED, how, "train.max_bad_steps=3", "checkpoint.keep_last=1")
    for _ in range(2):
        output = pretrain.refused(*ruined, "checkpoint.interval=1", code=3)
        good, last = (pretrain.checkpoints / f"step_0000000{step}" for step in (1, 3))
        assert (
            f"go back to checkpoint {good}, the newest from before them (remove the later ones, up"
            f" to {last}), " in output
        )
        assert bad_steps(pretrain.checkpoints) == {1: 0, 3: 2}
    assert [line["skipped"] for line in steps_of(pretrain.run_dir)] == [False] + 4 * [True]
    back_to(pretrain.run_dir, 1)
    assert f"go back to checkpoint {good}, the newest from before them, with" in pretrain.refused(
        *ruined, "checkpoint.interval=0", code=3
    )
    assert bad_steps(pretrain.checkpoints) == {1: 0}


def _pretrain_on_a_disk_that_hangs(arguments: list[str]) -> None:
    """Train while no file of tensors can be synced."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
            time.sleep(PATIENCE)
        sync(descriptor)

    vars(os)["fsync"] = fsync
    main(arguments)


def test_kill_while_writing_leaves_no_final_name(
    pretrain: Command, settings: list[str], tmp_path: Path
) -> None:
    """After a SIGKILL at the start of a save, files with a final name are complete, and the run
    continues.
    """
    with forked(
        1, _pretrain_on_a_disk_that_hangs, [DEMO, *settings], output=tmp_path / "out"
    ) as ranks:
        wait_until(lambda: any(pretrain.checkpoints.glob(".writing_*")), ranks, nap=0.0)
    wait_for_lock(pretrain.run_dir)
    assert not list(pretrain.checkpoints.glob("step_*"))
    assert list(pretrain.checkpoints.glob(".writing_*"))
    pretrain("train.steps=4")
    assert sorted(path.name for path in pretrain.checkpoints.iterdir()) == [
        "latest",
        "step_00000004",
    ]


def test_two_runs_in_one_directory_are_refused(pretrain: Command) -> None:
    """If a worker outlives its launcher and still trains, a second run would mix its checkpoints
    and metrics with the first's.
    """
    pretrain.run_dir.mkdir()
    with (pretrain.run_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        output = pretrain.refused(code=75)  # later it may do
    assert f"{pretrain.run_dir} is in use by another process" in output
    assert not (pretrain.run_dir / "progress.json").exists(), "it is the other process's"
    pretrain("train.steps=4")
    assert "checkpoint.resume = none, but" in pretrain.refused("checkpoint.resume=none")


@pytest.mark.slow
def test_ctrl_c_under_torchrun_saves(settings: list[str], tmp_path: Path) -> None:
    """torchrun forwards Ctrl-C to its ranks and waits for them; its own traceback comes from
    torch.
    """
    process = torchrun(2, DEMO, *settings, "train.steps=2000", "checkpoint.interval=0")
    while not losses(tmp_path / "run"):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE)
    stopped = max(losses(tmp_path / "run"))
    assert f"stopped by SIGINT after step {stopped}" in output
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == [
        f"step_{stopped:08d}"
    ]


def test_saves_at_a_signal_and_at_the_end_amid_bad_steps_keep_the_last_good_checkpoint(
    pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    ruined = (*RUINED, "optimizer.schedule=constant")
    pretrain(*ruined, "train.steps=1")
    rest = (
        "train.steps=12",
        "train.max_bad_steps=100",
        "checkpoint.interval=0",
        "checkpoint.keep_last=1",
    )
    with signalled(monkeypatch, 3, signal.SIGUSR1):
        pretrain(*ruined, *rest)
    kept = bad_steps(pretrain.checkpoints)
    stopped = max(kept)
    assert 1 < stopped < 12 and kept == {1: 0, stopped: stopped - 1}
    pretrain(*ruined, *rest)
    assert bad_steps(pretrain.checkpoints) == {1: 0, 12: 11}
