"""Run ``tools.evaluate`` on checkpoints during training, and pass the scores to the loggers.

The callback exists only on rank 0. It uses the evaluation through its command line and its output
files. One evaluation runs at a time; the newest further checkpoint that is due waits. A failed
evaluation does not stop training.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fem_common.errors import ConfigError
from fem_common.files import append_json_line
from fem_common.signals import signal_name
from pretrain import subprocesses
from pretrain.config import EvaluateConfig
from pretrain.report.loggers import Callback
from pretrain.report.metrics import StepRecord

NAME = "evaluations.jsonl"
FOLDER = "evaluations"
# Prefixes of variables that would make the evaluation a rank of the training.
_LAUNCHERS = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_", "PET_", "ROLE_", "GROUP_")
# Suffix that tools.evaluate gives the average of a run's newest checkpoints.
_AVERAGE = re.compile(r"-last_(\d+)$")
_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_POLL_SECONDS = 0.2
# Interval of messages while the end of training waits; without output a supervisor assumes a hang.
_WORD_SECONDS = 300.0
_END_SECONDS = 10.0  # between SIGTERM and SIGKILL


class CheckpointView(Protocol):
    """Interface of ``pretrain.checkpoint.manager.Checkpoints`` that evaluations use."""

    folder: Path
    last: Path | None
    in_use: set[Path]


@dataclass
class _Running:
    """A running evaluation."""

    step: int
    checkpoint: Path
    process: subprocess.Popen[bytes]
    started: float


@dataclass
class Evaluations(Callback):
    """Callback that starts, monitors and reports evaluations.

    It must be the first callback, because it still uses the other loggers when training ends.

    folder: the run directory. steps: number of the last step. received: list that receives stop
    signals. step: the last finished step.
    """

    settings: EvaluateConfig
    folder: Path
    steps: int
    checkpoints: CheckpointView
    loggers: Sequence[Callback]
    received: list[int]
    step: int = 0
    running: _Running | None = None
    waiting: tuple[int, Path] | None = None
    seen: Path | None = None  # the newest checkpoint that was considered

    def __post_init__(self) -> None:
        """Start the newest due evaluation that has not ended in an earlier attempt."""
        newest = _newest(self.checkpoints)
        # Later evaluations were of weights that no longer exist.
        self.ended = {number for number in _ended(self.folder / NAME) if number <= newest}
        self._poll()

    def on_step(self, record: StepRecord) -> None:
        """Report a finished evaluation and start the next one that is due."""
        self.step = record.step
        self._poll()

    def on_end(self) -> None:
        """Wait for the running evaluation if training is complete.

        If training stopped early or a signal arrives while waiting, the evaluation is terminated.
        """
        try:
            self._poll()
            now = time.monotonic()
            while self.running is not None and self.step >= self.steps and not self.received:
                if time.monotonic() - now > _WORD_SECONDS:
                    now = time.monotonic()
                    self._log(
                        f"waiting for the evaluation of step {self.running.step} "
                        f"({(now - self.running.started) / 60:.0f} minutes)"
                    )
                time.sleep(_POLL_SECONDS)
                self._poll()
        finally:
            self._leave()

    def _poll(self) -> None:
        """Report a finished evaluation, and start the next one that is due.

        Errors of files and processes are reported, not raised.
        """
        try:
            self._take()
            if self.checkpoints.last != self.seen:
                self.seen = self.checkpoints.last
                # Training may have rewound.
                self.ended = {
                    number for number in self.ended if number <= _newest(self.checkpoints)
                }
                self._note_due()
            if self.running is None and self.waiting is not None:
                (step, checkpoint), self.waiting = self.waiting, None
                self._start(step, checkpoint)
        except OSError as error:
            self._log(f"evaluation: {error}")

    def _note_due(self) -> None:
        """Queue the newest checkpoint that is due; it replaces an older checkpoint in the queue."""
        due = [
            (step, path)
            for path in self.checkpoints.folder.glob("step_*")
            if self._is_due(step := _step(path))
        ]
        busy = [self.running.step] if self.running else []
        step, path = max(due, default=(0, None))
        if path is None or step in busy or (self.waiting is not None and step <= self.waiting[0]):
            return
        if self.waiting is not None:
            self._log(
                f"evaluation of step {self.waiting[0]} is skipped: that of step {busy[0]} still "
                f"runs, and step {step} is due"
            )
        elif busy:
            self._log(f"evaluation of step {step} waits: that of step {busy[0]} still runs")
        self.waiting = step, path
        self._note_use()

    def _is_due(self, step: int) -> bool:
        # Older checkpoints were evaluated or skipped; later ones than the newest good one are
        # damaged.
        if not max(self.ended, default=0) < step <= _newest(self.checkpoints):
            return False
        return bool(self.settings.interval and step % self.settings.interval == 0) or (
            self.settings.at_end and step == self.steps
        )

    def _start(self, step: int, checkpoint: Path) -> None:
        out = self._out(checkpoint)
        out.mkdir(parents=True, exist_ok=True)
        module = "pretrain.report.evaluation_process"
        command = subprocesses.command(module, os.getpid(), *self._command(checkpoint))
        with (out / "log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(os.environ, self.settings.device),
                start_new_session=True,  # Ctrl-C at the training's terminal does not stop it
            )
        self.running = _Running(step, checkpoint, process, time.monotonic())
        self._note_use()

    def _take(self) -> None:
        """Report the running evaluation if it has ended.

        Terminate it if its time limit is exceeded.
        """
        running = self.running
        if running is None:
            return
        code, seconds = running.process.poll(), time.monotonic() - running.started
        late = code is None and seconds > 60 * self.settings.timeout_minutes
        if code is None and not late:
            return
        if late:
            _end(running.process)
        self.running = None
        self.ended.add(running.step)
        self._note_use()
        out = self._out(running.checkpoint)
        # With exit code 1 a task failed, and the other tasks have scores.
        scores = _scores(out, running.checkpoint) if code in (0, 1) and not late else {}
        fault = (
            f"not done within {self.settings.timeout_minutes:g} minutes"
            if late
            else _fault(code, out / "log")
        )
        if code == 0:
            fault = "" if scores else "no scores were written"
        line: dict[str, Any] = {
            "step": running.step,
            "checkpoint": running.checkpoint.name,
            "suite": self.settings.suite,
            "seconds": round(seconds, 1),
        }
        if scores:
            values = {f"evaluation/{label}": score["value"] for label, score in scores.items()}
            values |= {
                f"evaluation/{label}, bits per byte": score["bits_per_byte"]
                for label, score in scores.items()
                if score["bits_per_byte"] is not None
            }
            for logger in self.loggers:
                logger.on_values(running.step, values)
            listed = ", ".join(f"{label} {_with_error(score)}" for label, score in scores.items())
            self._log(f"evaluation of step {running.step}: {listed} ({seconds:.0f} s)")
            line["scores"] = scores
        if fault:
            self._log(f"evaluation of step {running.step} failed: {fault}; see {out / 'log'}")
            line["failed"] = fault
        append_json_line(self.folder / NAME, line)

    def _leave(self) -> None:
        """Terminate the running evaluation, and report unfinished evaluations.

        Each report contains the command that runs the evaluation.
        """
        undone = [self.running.checkpoint] if self.running is not None else []
        if self.running is not None:
            _end(self.running.process)
            self.running = None
        if self.waiting is not None:
            undone.append(self.waiting[1])
        for checkpoint in undone:
            command = shlex.join(["python", *self._command(checkpoint)[1:]])
            self._log(
                f"evaluation of step {_step(checkpoint)} is not finished; resuming the training "
                f"starts it again, or run: {command}"
            )

    def _command(self, checkpoint: Path) -> list[str]:
        settings = self.settings
        options: list[object] = ["--suite", settings.suite, "--out", self._out(checkpoint)]
        options += ["--device", settings.device]
        # A step that is trained again has other weights, so earlier results are invalid.
        options.append("--retry")
        if self._averaged(checkpoint):
            options += ["--merge", settings.merge]
        if settings.limit is not None:
            options += ["--limit", settings.limit]
        return subprocesses.command("tools.evaluate", checkpoint, *options)

    def _out(self, checkpoint: Path) -> Path:
        return self.folder / FOLDER / checkpoint.name

    def _averaged(self, checkpoint: Path) -> list[Path]:
        """Return the newest checkpoints up to ``checkpoint`` whose average is evaluated with it.

        Their number is settings.merge. The list is empty if too few checkpoints exist.
        """
        older = (
            path
            for path in self.checkpoints.folder.glob("step_*")
            if _step(path) <= _step(checkpoint)
        )
        found = sorted(older, key=_step)[-(self.settings.merge or 1) :]
        return found if len(found) == self.settings.merge else []

    def _note_use(self) -> None:
        """Mark the checkpoints that evaluations read, now or next, as in use.

        Checkpoints in use are not deleted.
        """
        used = [self.running.checkpoint] if self.running else []
        used += [self.waiting[1]] if self.waiting else []
        self.checkpoints.in_use = {
            *used,
            *(path for checkpoint in used for path in self._averaged(checkpoint)),
        }

    def _log(self, text: str) -> None:
        for logger in self.loggers:
            logger.on_message(text)


def environment(inherited: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the environment variables of an evaluation process.

    The variables of a rank are removed, the number of threads is set, and all GPUs are hidden if
    ``device`` is the CPU.
    """
    kept = {
        name: value
        for name, value in subprocesses.environ(inherited).items()
        if name not in _RANKS and not name.startswith(_LAUNCHERS)
    }
    kept["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 4))
    if device == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept


def _scores(out: Path, checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Return label -> {value, stderr, metric} from every result file of an evaluation.

    Other files are ignored. Files older than the checkpoint are ignored too, because they belong to
    weights that a rewind discarded.
    """
    found = {}
    for file in sorted(out.glob("*/[!.]*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if file.stat().st_mtime_ns < checkpoint.stat().st_mtime_ns:
                continue
            raw, average = json.loads(file.read_bytes()), _AVERAGE.search(file.parent.name)
            label = str(raw["label"]) + (f" (average of {average[1]})" if average else "")
            found[label] = {
                "value": float(raw["value"]),
                "stderr": raw["stderr"],
                "metric": raw["metric"],
                "bits_per_byte": _bits(raw.get("raw", {})),
            }
    return found


def _bits(raw: Mapping[str, Any]) -> float | None:
    """Return bits per byte from the metrics of a result: of gold answers, or of held-out text."""
    value: float | None = raw.get("bits_per_byte,none", raw.get("bits_per_byte"))
    return value


def _with_error(score: Mapping[str, Any]) -> str:
    return (
        f"{score['value']:.4f}"
        if score["stderr"] is None
        else f"{score['value']:.4f} ± {score['stderr']:.4f}"
    )


def _fault(code: int | None, log: Path) -> str:
    """Return a text with the exit code or signal of a process and the last line of its log."""
    if code is not None and code < 0:
        return f"ended by {signal_name(-code)}"
    with suppress(OSError):
        lines = log.read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
        return f"exit code {code}: {lines[-1]}" if lines else f"exit code {code}"
    return f"exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process and its children, which form one session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
            return


def _ended(file: Path) -> set[int]:
    """Return the steps whose evaluation ended, successfully or not, in any attempt.

    file: JSON lines with one line per ended evaluation. After a rewind, a line for an earlier step
    than the previous lines removes the later steps.
    """
    found = set[int]()
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                step = int(json.loads(line)["step"])
                found = {earlier for earlier in found if earlier < step} | {step}
    return found


def _newest(checkpoints: CheckpointView) -> int:
    """Return the step of the newest checkpoint known to be good, or 0."""
    return 0 if checkpoints.last is None else _step(checkpoints.last)


def _step(path: Path) -> int:
    digits = path.name.removeprefix("step_")
    return int(digits) if digits.isdigit() else 0


def check_suite(settings: EvaluateConfig) -> None:
    """Raise ConfigError if the evaluation command rejects the suite.

    The check runs at the start of training, so that the error does not appear hours later.
    """
    if not settings.wanted:
        return
    done = subprocess.run(
        subprocesses.command("tools.evaluate", "--list", "--suite", settings.suite),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(os.environ, "cpu"),
    )
    if done.returncode:
        fault = subprocesses.last_line(done, "tools.evaluate")
        raise ConfigError(f"evaluate.suite = '{settings.suite}': {fault}")
