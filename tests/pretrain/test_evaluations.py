"""Tests of evaluation during training: the real command once, and evaluations that are slow, fail,
are many, or are interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from pretrain.config import EvaluateConfig
from pretrain.report import evaluations
from pretrain.report.evaluations import NAME, Evaluations, environment
from pretrain.report.loggers import Callback
from pretrain.report.metrics import StepRecord
from tests.pretrain.conftest import Command
from tests.ranks import PATIENCE, records

HELD_OUT = """
tasks:
- {task: held, label: valid @32, kind: heldout, metric: nats_per_token, higher_is_better: false, context_lengths: [32], max_tokens: 3000}
"""  # noqa: E501


class NotNiced(subprocess.Popen[Any]):
    """An evaluation process with normal priority: with low priority a second of CPU time would take
    minutes next to other tests.
    """

    def __init__(self, command: list[str], **given: Any) -> None:
        super().__init__(
            command[4:] if "pretrain.report.evaluation_process" in command else command, **given
        )


# --- a complete run -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_evaluated_and_its_loggers_know_the_scores(
    pretrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(HELD_OUT)
    monkeypatch.setattr(subprocess, "Popen", NotNiced)
    averaged = ("evaluate.merge=2", "checkpoint.interval=2", "checkpoint.keep_last=2")
    pretrain("train.steps=4", f"evaluate.suite={suite}", "evaluate.at_end=true", *averaged)
    (line,) = records(pretrain.run_dir, NAME)
    average = "valid @32 (average of 2)"
    assert (line["step"], line["checkpoint"], list(line["scores"])) == (
        4,
        "step_00000004",
        ["valid @32", average],
    )
    values = [each["value"] for each in line["scores"].values()]
    assert values[0] != values[1] == pytest.approx(values[0], rel=0.05), (
        "of a run that has only begun"
    )
    assert not list((pretrain.run_dir / "evaluations").glob("*/.averages"))
    metrics = [
        json.loads(text) for text in (pretrain.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    (logged,) = [record for record in metrics if "evaluation/valid @32" in record]
    score = line["scores"]["valid @32"]
    assert (logged["step"], logged["evaluation/valid @32"]) == (4, score["value"])
    # The evaluation reads other windows of the same text than the validation.
    (loss,) = [record["valid_loss"] for record in metrics if "valid_loss" in record]
    assert score["value"] == pytest.approx(loss, rel=0.05) and score["stderr"] is None, (
        "of one document"
    )
    assert (
        f"evaluation of step 4: valid @32 {values[0]:.4f}, {average} {values[1]:.4f} ("
        in pretrain.out
    )
    assert (pretrain.run_dir / "evaluations/step_00000004/log").is_file()
    # The run is complete, but a signal arrived while it waited for the evaluation: the next attempt
    # makes the evaluation, and the attempt after that has no work left.
    (pretrain.run_dir / NAME).unlink()
    line_of_shell = f"mkdir -p $1/model; echo '{SCORE}' > $1/model/held.json"
    monkeypatch.setattr(
        Evaluations,
        "_command",
        lambda ours, at: ["sh", "-c", line_of_shell, "sh", str(ours._out(at))],
    )
    for _ in range(2):
        pretrain("train.steps=4", f"evaluate.suite={suite}", "evaluate.at_end=true")
        assert "is complete at step 4" in pretrain.out
        (line,) = records(pretrain.run_dir, NAME)
        assert line["scores"]["held"]["value"] == 2.5
    assert (pretrain.run_dir / "metrics.jsonl").read_text().count('"evaluation/held": 2.5') == 1


def test_a_suite_that_is_not_there_is_reported_before_the_first_step(pretrain: Command) -> None:
    assert "evaluate.suite = 'quikc': --suite quikc: no such suite" in pretrain.refused(
        "evaluate.suite=quikc", "evaluate.interval=4"
    )


def test_an_evaluation_is_no_rank_and_sees_no_gpu() -> None:
    given = {
        "RANK": "3",
        "MASTER_ADDR": "x",
        "TORCHELASTIC_RUN_ID": "1",
        "OMP_NUM_THREADS": "64",
        "HOME": "/h",
        "PYTHONPATH": "/p",
    }
    found = environment({**given, "CUDA_VISIBLE_DEVICES": "0,1"}, "cpu")
    assert not {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & set(found)
    assert (
        found["HOME"],
        found["CUDA_VISIBLE_DEVICES"],
        found["PYTHONPATH"].split(os.pathsep)[-1],
    ) == ("/h", "", "/p")
    assert 1 <= int(found["OMP_NUM_THREADS"]) <= max(1, len(os.sched_getaffinity(0)) // 4)
    assert environment({"CUDA_VISIBLE_DEVICES": "0,1"}, "cuda")["CUDA_VISIBLE_DEVICES"] == "0,1"


# --- many, slow, failing and interrupted evaluations, with commands that take milliseconds --------


class EventLog(Callback):
    """Record of the messages to loggers."""

    def __init__(self) -> None:
        self.values, self.messages = list[tuple[int, dict[str, float]]](), list[str]()

    def on_values(self, step: int, values: dict[str, float]) -> None:
        self.values.append((step, values))

    def on_message(self, text: str) -> None:
        self.messages.append(text)


SCORE = '{"label": "held", "value": 2.5, "stderr": null, "metric": "nats_per_token"}'


class Run:
    """A training run of 40 steps whose evaluations run a shell command; $OUT is their folder, $STEP
    the name of their checkpoint.
    """

    def __init__(
        self, folder: Path, line: str, monkeypatch: pytest.MonkeyPatch, **settings: Any
    ) -> None:
        self.folder = folder
        self.events = EventLog()
        self.received = list[int]()
        self.store: Any = SimpleNamespace(folder=folder / "checkpoints", last=None, in_use=set())
        self.settings = EvaluateConfig(**{"interval": 10, **settings})
        self.line = line
        self.callback: Evaluations | None = None
        monkeypatch.setattr(
            Evaluations, "_command", lambda ours, checkpoint: self.command(ours, checkpoint)
        )

    def command(self, ours: Evaluations, checkpoint: Path) -> list[str]:
        return [
            "sh",
            "-c",
            (
                f"OUT={ours._out(checkpoint)}; STEP={checkpoint.name}; mkdir -p $OUT/model;"
                f" {self.line}"
            ),
        ]

    def start(self, step: int = 0) -> Evaluations:
        self.callback = Evaluations(
            self.settings, self.folder, 40, self.store, [self.events], self.received, step
        )
        return self.callback

    def write(self, step: int) -> Path:
        """Create a checkpoint folder without contents."""
        last: Path = self.store.folder / f"step_{step:08d}"
        shutil.rmtree(last, ignore_errors=True)
        last.mkdir(parents=True)
        self.store.last = last
        return last

    def step(self, number: int) -> None:
        assert self.callback is not None
        record = StepRecord(number, 0, 0.0, 0.0, 0.0, False, 0.0, 0.0, 0.0, None, 0, 0.0)
        self.callback.on_step(record)

    def until(self, holds: Any) -> None:
        """Run steps until a condition is true."""
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, self.events.messages
            self.step(max(self.callback.step if self.callback else 0, 1))
            time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file for which commands wait."""
    yield tmp_path / "gate"
    (tmp_path / "gate").touch()


WAIT = "while [ ! -e {gate} ]; do sleep 0.02; done; "
WRITE = (
    f"echo '{SCORE}' > $OUT/model/held.json; echo '{SCORE}' | sed s/held/half/ >"
    " $OUT/model/.held.partial.json"
)


def test_one_runs_one_waits_the_newest(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, WAIT.format(gate=gate) + WRITE, monkeypatch, merge=2)
    run.start()
    paths = {}
    for step in (5, 10, 20, 25, 30):
        paths[step] = run.write(step)
        run.step(step + 1)
    assert run.store.in_use == {paths[step] for step in (5, 10, 25, 30)}, (
        "what is read and will be, with what it is averaged with"
    )
    assert run.events.messages == [
        "evaluation of step 20 waits: that of step 10 still runs",
        "evaluation of step 20 is skipped: that of step 10 still runs, and step 30 is due",
    ]
    gate.touch()
    run.until(lambda: len(run.events.values) == 2)
    assert run.events.values == [(10, {"evaluation/held": 2.5}), (30, {"evaluation/held": 2.5})]
    assert run.store.in_use == set()
    run.write(35)
    run.step(36)
    assert run.callback is not None and run.callback.running is None, (
        "what was evaluated is not again"
    )
    assert [
        (line["step"], line["scores"]["held"]["value"]) for line in records(tmp_path, NAME)
    ] == [(10, 2.5), (30, 2.5)]


HELD = {"evaluation/held": 2.5}
# Shell command -> the reports in the log, and the logged scores.
ENDS: dict[str, tuple[list[str], dict[str, float]]] = {
    "echo first; echo no such data >&2; exit 2": (["failed: exit code 2: no such data; see"], {}),
    "true": (["failed: no scores were written; see"], {}),
    "kill -9 $$": (["failed: ended by SIGKILL; see"], {}),
    "kill -40 $$": (["failed: ended by signal 40; see"], {}),
    "sleep 60": (["failed: not done within 0.002 minutes; see"], {}),
    f"{WRITE}; echo broken > $OUT/model/other.json; exit 0": (["held 2.5000 ("], HELD),
    WRITE.replace("null", 'null, "raw": {"bits_per_byte,none": 1.5}'): (
        ["held 2.5000 ("],
        {**HELD, "evaluation/held, bits per byte": 1.5},
    ),
    f"{WRITE}; echo failed: other >&2; exit 1": (
        ["held 2.5000 (", "failed: exit code 1: failed: other; see"],
        HELD,
    ),
    "/nowhere/python": (["No such file"], {}),
}


@pytest.mark.parametrize("line", ENDS)
def test_whatever_becomes_of_it_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    report, values = ENDS[line]
    run = Run(tmp_path, line, monkeypatch, timeout_minutes=0.002 if "sleep" in line else 5.0)
    if "nowhere" in line:
        monkeypatch.setattr(sys, "executable", line)
    old = tmp_path / "evaluations/step_00000010/model/old.json"
    old.parent.mkdir(parents=True)
    old.write_text(SCORE.replace("held", "old"))
    os.utime(old, (1, 1))  # scores of weights from before the checkpoint
    run.start()
    run.write(10)
    run.until(lambda: len(run.events.messages) == len(report))
    assert all(words in message for message, words in zip(run.events.messages, report, strict=True))
    assert run.events.values == ([(10, values)] if values else [])
    if "nowhere" in line:
        return
    assert run.store.in_use == set()
    (entry,) = records(tmp_path, NAME)
    assert entry["step"] == 10
    assert ("scores" in entry) == bool(values)
    assert ("failed" in entry) == ("failed" in report[-1])
    again = Run(tmp_path, "exit 1", monkeypatch)
    again.store.last = run.store.last
    assert again.start().running is None, "what has ended, well or not, is not started again"


def test_steps_that_are_trained_anew_are_evaluated_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rollback to step 10, while a damaged checkpoint of step 40 still exists."""
    (tmp_path / NAME).write_text("".join(f'{{"step": {step}}}\n' for step in (10, 20, 30, 40)))
    run = Run(tmp_path, WRITE, monkeypatch, at_end=True)
    for step in (40, 10):
        run.write(step)
    assert run.start().running is None, "10 is evaluated, 40 is not known to be good"
    done: list[int] = []
    for step in (20, 30):
        run.write(step)
        run.until(lambda: len(run.events.values) > len(done))
        done.append(step)
    assert [step for step, _ in run.events.values] == done
    again = Run(tmp_path, WRITE, monkeypatch, at_end=True)
    again.write(40)
    assert again.start().running is not None, "its line is from before the rollback"
    again.until(lambda: again.events.values)
    monkeypatch.undo()
    assert again.callback is not None
    assert "--retry" in again.callback._command(Path("step_00000020"))


@pytest.mark.parametrize(
    "resumed", [False, True], ids=["at the end", "resumed without a step left"]
)
def test_the_end_waits_for_the_last_one(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """The training ends after the result of the last evaluation has been logged."""
    run = Run(tmp_path, WAIT.format(gate=gate) + WRITE, monkeypatch, interval=0, at_end=True)
    monkeypatch.setattr(evaluations, "_WORD_SECONDS", 0.1)
    output = run.events.on_message

    def on_message(text: str) -> None:
        output(text)
        gate.touch()

    monkeypatch.setattr(run.events, "on_message", on_message)
    if resumed:
        run.write(40)
        run.start(step=40)
    else:
        run.start()
        run.step(40)
        run.write(40)  # the training loop writes it after its last step
    assert run.callback is not None
    run.callback.on_end()
    assert run.events.values == [(40, {"evaluation/held": 2.5})]
    assert "waiting for the evaluation of step 40" in run.events.messages[0], (
        "for a supervisor that watches"
    )


@pytest.mark.parametrize("complete", [False, True])
def test_a_stop_ends_it_and_a_resumed_run_starts_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    """A training that is stopped does not wait; a complete one waits until a signal arrives."""
    begun = tmp_path / "begun"
    run = Run(tmp_path, f"sleep 601 & echo $! > {begun}; sleep 600", monkeypatch, at_end=True)
    callback = run.start()
    run.write(40 if complete else 30)
    run.step(40 if complete else 31)
    assert callback.running is not None
    run.until(lambda: begun.exists() and begun.read_text())
    pids = [callback.running.process.pid, int(begun.read_text())]
    if complete:
        monkeypatch.setattr(time, "sleep", lambda _: run.received.append(signal.SIGTERM))
    started = time.monotonic()
    callback.on_end()
    assert not alive(pids[0]) and time.monotonic() - started < PATIENCE
    # A killed process disappears when the kernel has handled the signal; time.sleep may be patched
    # in this test.
    end = time.monotonic() + PATIENCE
    while alive(pids[1]):
        assert time.monotonic() < end, "nor what it started"
        Event().wait(0.01)
    (message,) = run.events.messages
    assert "is not finished; resuming the training starts it again, or run: python -c" in message
    assert not (tmp_path / NAME).exists()
    again = Run(tmp_path, WRITE, monkeypatch, at_end=True)
    again.store.last = run.store.last
    again.start()
    monkeypatch.undo()
    again.until(lambda: again.events.values)


def test_it_dies_with_a_training_that_is_killed_and_is_niced(tmp_path: Path) -> None:
    """A killed rank performs no cleanup."""
    code = (
        "import subprocess, sys, os, time\nchild = subprocess.Popen([sys.executable, '-m',"
        " 'pretrain.report.evaluation_process', str(os.getpid()), 'sleep', '600'],"
        " start_new_session=True)\nprint(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    root = Path(evaluations.__file__).resolve().parents[1]
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + PATIENCE
    while "(sleep)" not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert int(stat.read_text().rpartition(")")[2].split()[16]) == 19
    os.kill(pid, signal.SIGUSR1)  # this signal is meant for the ranks
    time.sleep(0.1)
    assert alive(pid)
    parent.kill()
    parent.wait()
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)
