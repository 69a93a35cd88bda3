"""Tests of the interface to launchers: progress.json, exit codes, signals at any time, a run
directory shared with a launcher.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pretrain.checkpoint.folder import MANIFEST
from pretrain.report.progress_file import NAME, ProgressFile, read_progress
from pretrain.run_directory import relaunch_command
from pretrain.schedule import Schedule
from pretrain.trainer import Outcome, Trainer
from tests.pretrain.conftest import ROOT, Command
from tests.ranks import PATIENCE, records

TOKENS = 4 * 32  # tokens per step
STOP = (signal.SIGTERM, signal.SIGUSR1)


def progress(run_dir: Path) -> dict[str, Any]:
    report = read_progress(run_dir)
    assert report is not None
    return report


def stand(run_dir: Path) -> tuple[Any, ...]:
    report = progress(run_dir)
    assert report["consumed_tokens"] == report["step"] * TOKENS
    assert report["total_tokens"] == report["steps"] * TOKENS
    return tuple(report[key] for key in ("state", "step", "steps", "checkpoint", "signal"))


def checkpoint(step: int) -> str:
    return f"checkpoints/step_{step:08d}"


@contextmanager
def watching(run_dir: Path) -> Iterator[list[tuple[str, int, str | None]]]:
    """Yield all states of progress.json, (state, step, checkpoint), and check that a reader never
    sees an incomplete file.
    """
    seen, broken = list[tuple[str, int, str | None]](), list[str]()
    over, write = threading.Event(), ProgressFile.write

    def poll() -> None:
        while not over.is_set():
            if (run_dir / NAME).exists() and read_progress(run_dir) is None:
                broken.append((run_dir / NAME).read_text())
            time.sleep(0.0005)

    def write_and_check(file: ProgressFile, state: str, **given: Any) -> None:
        write(file, state, **given)
        output = progress(run_dir)
        now = (output["state"], output["step"], output["checkpoint"])
        if output["checkpoint"] and not (run_dir / output["checkpoint"] / MANIFEST).exists():
            now = ("names a checkpoint that is not there", *now[1:])
        if now not in seen[-1:]:
            seen.append(now)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        with mock.patch.object(ProgressFile, "write", write_and_check):
            yield seen
    finally:
        over.set()
        thread.join()
    assert not broken


@pytest.fixture
def ignored() -> Iterator[None]:
    """SIGTERM and SIGUSR1 are ignored outside training, as a launcher starts ranks, so that the
    tests' signals cannot end pytest.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send_when(holds: Any, *numbers: signal.Signals) -> threading.Thread:
    """Send signals to this process as soon as ``holds`` is true."""

    def send() -> None:
        while not holds():
            time.sleep(0.0005)
        for number in numbers:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "how",
    [
        "checkpoint.async_save=false",
        pytest.param("checkpoint.async_save=true", marks=pytest.mark.slow),
    ],
)
def test_from_start_to_end_and_on(pretrain: Command, how: str) -> None:
    """Every state occurs in order; a complete run that is started again has no work, and a longer
    one continues.
    """
    with watching(pretrain.run_dir) as seen:
        pretrain(how)
    assert seen[0] == ("starting", 0, None)
    assert seen[-1] == ("complete", 12, checkpoint(12))
    states = [state for state, _, _ in seen]
    assert [states[0], *(b for a, b in zip(states, states[1:], strict=False) if a != b)] == [
        "starting",
        "running",
        "complete",
    ]
    running = [entry for entry in seen if entry[0] == "running"]
    assert running[0] == ("running", 1, None)
    assert {name for _, _, name in running} <= {None, checkpoint(4), checkpoint(8), checkpoint(12)}
    assert all(name is None or int(name[-8:]) <= step for _, step, name in running)
    report = progress(pretrain.run_dir)
    assert stand(pretrain.run_dir) == ("complete", 12, 12, checkpoint(12), None)
    assert (report["format"], report["message"], report["pid"], report["world_size"]) == (
        1,
        None,
        os.getpid(),
        1,
    )
    assert abs(report["time"] - time.time()) < 60

    lines = len(records(pretrain.run_dir))
    pretrain(how)
    assert (
        "complete at step 12; raise train.steps" in pretrain.out
        and "parameters" not in pretrain.out
    ), "no model was built"
    assert stand(pretrain.run_dir) == ("complete", 12, 12, checkpoint(12), None)
    assert len(records(pretrain.run_dir)) == lines
    # another model is refused here, too
    pretrain(how, "model.hidden_size=48", code=2)
    assert stand(pretrain.run_dir)[0] == "failed"

    with watching(pretrain.run_dir) as seen:
        pretrain(how, "train.steps=14")
    assert ("starting", 12, checkpoint(12)) in seen and ("running", 13, checkpoint(12)) in seen
    assert stand(pretrain.run_dir) == ("complete", 14, 14, checkpoint(14), None)


def test_a_failure_is_reported_in_one_line(pretrain: Command) -> None:
    """Cases: the run gives up, the configuration is invalid after the directory was claimed, and an
    unexpected error.
    """
    pretrain(
        "optimizer.lr=1e18",
        "train.max_bad_steps=3",
        "optimizer.warmup_steps=0",
        "checkpoint.interval=1",
        code=3,
    )
    assert stand(pretrain.run_dir) == ("failed", 4, 12, checkpoint(3), None)
    assert progress(pretrain.run_dir)["message"] == pretrain.err.removeprefix(
        "pretrain: error: "
    ).rstrip("\n")
    pretrain("model.hidden_size=48", code=2)
    assert progress(pretrain.run_dir)["message"].startswith("checkpoint ")
    (pretrain.run_dir / "metrics.jsonl").unlink()
    (pretrain.run_dir / "metrics.jsonl").mkdir()
    with pytest.raises(RuntimeError, match="Is a directory: an earlier check should have rejected"):
        pretrain()
    assert progress(pretrain.run_dir)["message"].startswith("IsADirectoryError: ")


def test_a_message_is_one_line_without_secrets_and_other_ranks_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule(10, 8, 32, 0, 0)
    ProgressFile(None, schedule, 2).write("failed", message="x")
    assert list(tmp_path.iterdir()) == [] and read_progress(tmp_path) is None
    monkeypatch.setenv("MY_SECRET_2", CANARIES["MY_SECRET_2"])
    ProgressFile(tmp_path, schedule, 2).write(
        "failed", message="a\n  b" + "c" * 985 + CANARIES["MY_SECRET_2"] + "d" * 5000
    )
    message = progress(tmp_path)["message"]
    assert message.startswith("a bccc") and len(message) == 1000 and "canary" not in message, (
        "cut after what is hidden, not before"
    )
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_file_system_that_fails_is_one_line_and_code_1(pretrain: Command) -> None:
    """A symbolic link to itself gives an OSError that no wrong path gives: when rank 0 searches the
    checkpoint, builds, and claims.
    """
    pretrain("train.steps=4")
    manifest, place = pretrain.run_dir / checkpoint(4) / MANIFEST, pretrain.run_dir / "place"
    content = manifest.read_text()
    cases = (
        (manifest, manifest, ""),
        (place, place / "cache", "the index cache cannot be written: "),
        (pretrain.run_dir / "lock",) * 2,
    )
    for link, path, *begins in cases:
        link.unlink(missing_ok=True)
        link.symlink_to(link.name)
        pretrain(*([f"data.index_cache={path}"] if link == place else []), code=1)
        output = pretrain.err.removeprefix("pretrain: error: ").rstrip("\n")
        assert pretrain.err.count("\n") == 1
        assert f"{path}: Too many levels of symbolic links" in output
        assert not begins or (
            output.startswith(begins[0])
            and (progress(pretrain.run_dir)["message"], stand(pretrain.run_dir)[0])
            == (output, "failed")
        )
        link.unlink()
        if link == manifest:
            manifest.write_text(content)
    # the same command goes on when the file system is well
    pretrain()


CANARIES = {
    "HUB_API_KEY": "canary-0123456789",
    "MY_SECRET_2": "canary-0123456789-and-longer",
    "DB_PASSWORD_FILE": "canary of\n several lines",
}


def test_what_a_run_leaves_holds_no_value_of_a_secret(
    pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of a run that failed for a path with a secret in it, except those that record the
    configuration as typed.
    """
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    load = pretrain.run_dir / CANARIES["HUB_API_KEY"]
    pretrain("train.steps=4", f"checkpoint.load={load}", code=2)
    assert progress(pretrain.run_dir)["message"].startswith(
        f"{pretrain.run_dir}/*** has no checkpoint"
    )
    pretrain("train.steps=4")
    written = [path for path in pretrain.run_dir.rglob("*") if path.is_file()]
    assert {"environment.json", "relaunch.sh", "attempts.jsonl", NAME} <= {
        path.name for path in written
    }
    assert [
        path for path in written if b"canary" in path.read_bytes() and path.name != "changes.diff"
    ] == []


def test_signals_before_the_first_step_are_not_lost(
    pretrain: Command, ignored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals are sent repeatedly as soon as training's handlers exist: no step, no checkpoint, and
    the next attempt loses no data.
    """
    run = Trainer.run

    def later(trainer: Trainer) -> Outcome:
        during_start.join()
        return run(trainer)

    monkeypatch.setattr(Trainer, "run", later)
    twice = (signal.SIGUSR1, signal.SIGUSR1)
    during_start: threading.Thread = send_when(
        lambda: signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN, *twice
    )
    with watching(pretrain.run_dir) as seen:
        pretrain()
    assert [state for state, _, _ in seen] == ["starting", "stopped"]
    assert "stopped by SIGUSR1 after step 0; the same command starts it" in pretrain.out
    assert stand(pretrain.run_dir) == ("stopped", 0, 12, None, "SIGUSR1")
    assert not pretrain.checkpoints.exists() and records(pretrain.run_dir) == []
    pretrain("train.steps=4")
    during_start = send_when(
        lambda: signal.getsignal(signal.SIGTERM).__module__ == "pretrain.signals", signal.SIGTERM
    )
    pretrain()
    assert stand(pretrain.run_dir) == ("stopped", 4, 12, checkpoint(4), "SIGTERM")
    assert "continues from" in pretrain.out
    assert max(line["step"] for line in records(pretrain.run_dir)) == 4
    pretrain()
    assert stand(pretrain.run_dir) == ("complete", 12, 12, checkpoint(12), None)


def test_a_signal_after_the_last_step_changes_nothing(pretrain: Command, ignored: None) -> None:
    late = send_when(
        lambda: any(line.get("step") == 12 for line in records(pretrain.run_dir)),
        signal.SIGUSR1,
        signal.SIGTERM,
    )
    pretrain("checkpoint.interval=0")
    late.join()
    assert stand(pretrain.run_dir) == ("complete", 12, 12, checkpoint(12), None)
    assert "stopped" not in pretrain.out


def test_started_by_a_launcher(pretrain: Command, tmp_path: Path) -> None:
    """From launch/config.yaml in the run directory, as torchrun does it, with SIGUSR1 pending since
    before the program started.
    """
    run_dir = tmp_path / "run"
    (run_dir / "attempts" / "0001").mkdir(parents=True)
    (run_dir / "launch").mkdir()
    start = [sys.executable, "-m", "pretrain"]
    pretrain("--resolve")
    config = run_dir / "launch" / "config.yaml"
    config.write_text(pretrain.out)
    torchrun = {
        "GROUP_WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        environment = {
            **os.environ,
            **torchrun,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            "PYTHONPATH": "",
            "PYTHONSAFEPATH": "",
        }
        process = subprocess.Popen([*start, str(config)], cwd=ROOT, env=environment)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=PATIENCE) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
    assert stand(run_dir) == ("stopped", 0, 12, None, "SIGUSR1")
    assert sorted(path.name for path in (run_dir / "attempts").iterdir()) == ["0001"]
    assert len(records(run_dir, "attempts.jsonl")) == 1
    assert (
        run_dir / "relaunch.sh"
    ).read_text() == f"cd {ROOT} && {sys.executable} -m pretrain {config}\n"


def test_the_command_to_relaunch_on_two_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/code/pretrain/__main__.py", "runs/a b/launch/config.yaml"])
    for name, value in {
        "GROUP_WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "4",
        "PYTHONPATH": "/a code",
        "PYTHONSAFEPATH": "",
    }.items():
        monkeypatch.setenv(name, value)
    nodes = (
        "--nnodes 2 --node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port $MASTER_PORT"
    )
    start = f"cd {tmp_path} && PYTHONPATH='/a code' torchrun --nproc-per-node 4 {nodes}"
    assert relaunch_command(8) == f"{start} -m pretrain 'runs/a b/launch/config.yaml'"
