"""``launch local`` with real training in two gloo ranks: killed, interrupted and hung runs have the losses of one left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.job import read_json
from launch.verbs import local
from tests.launch.supervised import ROOT, clean_up, wait_for
from tests.pretrain.conftest import DEMO, SMALL, tiny_data

__all__ = ["tiny_data"]

STEPS = 60
LONGER = [*SMALL, f"train.steps={STEPS}", "checkpoint.interval=15", "train.eval_interval=30", "model.num_layers=2", "log.interval=30"]


class LocalRun:
    """A run by ``launch local`` in a directory of its own, from a working directory without a checkout."""

    def __init__(self, folder: Path, data: Path, *options: str) -> None:
        folder.mkdir()
        self.folder, self.directory = folder, folder / "run"
        paths = [f"run_dir={self.directory}", f"data.train.0.prefix={data / 'train'}", f"data.valid.0.prefix={data / 'valid'}"]
        self.words = [
            "local",
            DEMO,
            *paths,
            "data.test=[]",
            *LONGER,
            "--processes",
            "2",
            "--set",
            "restarts.back_off_seconds=0.1",
            *options,
        ]

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Start it, or go on with it."""
        return launch(self.folder, *self.words, *options)

    @property
    def losses(self) -> dict[int, tuple[float, float]]:
        """Step -> loss and gradient norm; the last line of a step counts."""
        lines = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}

    @property
    def attempts(self) -> list[dict[str, object]]:
        """attempt.json of each attempt."""
        return [read_json(path) for path in sorted(self.directory.glob("attempts/*/attempt.json"))]

    @property
    def outcomes(self) -> list[object]:
        """How the attempts ended."""
        return [attempt["outcome"] for attempt in self.attempts]

    def is_at(self, step: int, attempt: int) -> bool:
        """Whether this attempt is in its training, past this step."""
        folder = self.directory / "attempts" / f"{attempt:04}"
        try:
            since = read_json(folder / "attempt.json")["started"]
            metrics = self.directory / "metrics.jsonl"
            return metrics.stat().st_mtime > since and max(self.losses, default=0) > step
        except (OSError, TypeError):
            return False

    def child(self, rank: int, attempt: int) -> int:
        """The process of a rank's program."""
        return int(read_json(self.directory / "attempts" / f"{attempt:04}" / "ranks" / f"rank_{rank:05}.json")["child"])


def launch(folder: Path, *words: str) -> subprocess.Popen[str]:
    """``python -m launch WORDS`` in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PWD": str(folder)}
    command = [sys.executable, "-m", "launch", *words]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **options)  # type: ignore[call-overload]


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for the end: what it said."""
    said, _ = process.communicate(timeout=200)
    assert process.returncode == code, said
    return said


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    clean_up(tmp_path)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> LocalRun:
    """A run that nothing happens to."""
    run = LocalRun(tmp_path_factory.mktemp("reference") / "here", tiny_data)
    said = finish(run.start())
    assert run.outcomes == ["finished"] and sorted(run.losses) == list(range(1, STEPS + 1))
    assert f"step {STEPS}/{STEPS}" in said and "Traceback" not in said  # rank 0's lines, live
    return run


def test_a_killed_rank_leaves_no_trace_in_the_losses(reference: LocalRun, tmp_path: Path, tiny_data: Path) -> None:
    run = LocalRun(tmp_path / "here", tiny_data)
    process = run.start()
    wait_for(lambda: run.is_at(15, attempt=1), 120)
    os.kill(run.child(1, attempt=1), signal.SIGKILL)
    said = finish(process)
    assert run.outcomes == ["failed", "finished"], said
    failure, start = (run.attempts[0]["failure"], run.attempts[1]["checkpoint_start"])
    assert isinstance(failure, dict) and (failure["kind"], failure["rank"], failure["exit"]) == ("signal", 1, 137)
    assert isinstance(start, int) and start >= 15 and f"from step {start}" in said
    assert run.losses == reference.losses


def test_a_finished_run_is_not_run_again(reference: LocalRun) -> None:
    assert "nothing to do: finished" in finish(reference.start())
    assert len(reference.attempts) == 1
    said = finish(launch(reference.folder, *reference.words, "train.seed=7"), code=2)
    assert said.startswith("launch: error: ") and "train.seed" in said and "--update" in said


def test_a_command_of_several_tasks_is_run_side_by_side(tmp_path: Path, tiny_data: Path) -> None:
    words = ("local", "--tasks", "2", "--at-once", "2", "--directory", str(tmp_path / "job"), "--", "data_prep", "verify", str(tiny_data))
    finish(launch(tmp_path, *words))
    states = [read_json(tmp_path / f"job/tasks/{task:04}/launch/state.json") for task in range(2)]
    assert [(state["state"], state["array_task"]) for state in states] == [("finished", 0), ("finished", 1)]
    assert "nothing to do: 2 finished" in finish(launch(tmp_path, *words))


def test_a_command_that_is_refused_ends_with_2(tmp_path: Path) -> None:
    said = finish(launch(tmp_path, "local", "--", "data_prep", "verify", str(tmp_path / "nothing")), code=2)
    assert "data_prep: error: " in said and "the input is wrong" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", str(ROOT / "configs/cluster/slurm_generic.yaml")], "is a profile of Slurm; to run there: python -m launch submit"),
        (["--nodes", "2"], "--nodes 2: this is one machine; --processes says how many ranks"),
        (["--processes", "0"], "--processes must be at least 1"),
        (["--set", "watchdog.step_minute=1"], "step_minute"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path: Path, words: list[str], message: str) -> None:
    said = finish(launch(tmp_path, "local", DEMO, *words), code=2)
    assert said.startswith("launch: error: ") and message in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_profile_is_that_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for script, name in (
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'", "local_gpu"),
        ("echo No devices were found", "local_cpu"),
        ("exit 9", "local_cpu"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert Path(local.default_profile()).stem == name
