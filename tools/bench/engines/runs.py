"""Runs of the variants: each is ``python -m pretrain`` on generated tokens, on the job's ranks.

The measurements are those of the run's metrics.jsonl.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fem_common.errors import reason
from fem_common.files import write_atomically
from fem_common.ports import server_port
from fem_common.text import duration
from fem_megatron.megatron import platform
from tools.bench.engines.variants import VARIANTS, Job, configuration, plan_of
from tools.bench.runner import ROOT
from tools.bench.training import command, step_rows, write_data

ENDING = 8.0  # seconds in which a rank that has not trained yet must end itself
POLL = 0.5  # seconds between reads of the metrics
# With these settings, glibc's malloc returns freed blocks to the system, so that the peak of the
# resident memory is the memory in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**17)}
TAIL = 15  # lines of a failed rank's output that are reported
IMPORTS = """
import importlib, sys
from fem_megatron.megatron import platform, upstream
upstream.import_megatron()
import pretrain.run
importlib.import_module(f"pretrain.engines.{sys.argv[1]}")
print(platform.peak_resident_bytes())
"""

Log = Callable[[str], None]


@dataclass(frozen=True)
class Round:
    """Measurements of one run of a variant.

    seconds: seconds of each timed step.
    peak: peak bytes of memory of the rank that uses most: of device memory, or on a CPU of
        resident memory without the libraries.
    hosts: on a GPU, peak bytes of resident memory of each rank, with the libraries; else None.
    loss: loss of the last step.
    """

    seconds: tuple[float, ...]
    peak: int
    hosts: tuple[int, ...] | None
    loss: float


Partial = Callable[[Round], None]


class CannotRun(Exception):
    """Error raised if a job fails; the message is the reason in one line."""


def is_partial(job: Job, measured: Round) -> bool:
    """Return True if fewer steps were timed than the job requires."""
    return len(measured.seconds) < job.steps


class Ranks:
    """Processes of a job's ranks, which train in ``folder``.

    The run has one step more than the job, so that it is ended before it writes its checkpoint.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        from fem_common.config import dump_yaml  # needs PyYAML

        self.job, self.run = job, folder / "run"
        config = configuration(job)
        assert config.model.vocab_size is not None
        file, data = folder / "run.yaml", folder / "data"
        file.write_text(dump_yaml(config), encoding="utf-8")
        write_data(data, config.model.vocab_size)
        words = command(file, self.run, data, job.warmup + job.steps + 1, (), splits=("train",))
        self.logs = [folder / f"rank{rank}.log" for rank in range(job.ranks)]
        self.peaks = [0] * job.ranks  # bytes of resident memory
        self.processes: list[subprocess.Popen[bytes]] = []
        group = {
            "WORLD_SIZE": job.ranks,
            "LOCAL_WORLD_SIZE": job.ranks,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": server_port(),
        }
        for rank, log in enumerate(self.logs):
            own = {
                key: str(number)
                for key, number in {**group, "RANK": rank, "LOCAL_RANK": rank}.items()
            }
            with log.open("wb") as stream:
                self.processes.append(
                    subprocess.Popen(
                        words,
                        cwd=ROOT,
                        env={**environment(), **own},
                        stdin=subprocess.DEVNULL,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                    )
                )

    def rows(self) -> list[dict[str, float]]:
        """Return the metrics of the steps so far, at most as many as the job has."""
        with suppress(OSError, ValueError):  # not written yet, or its last line is incomplete
            return list(step_rows(self.run).values())[: self.job.warmup + self.job.steps]
        return []

    @property
    def ended(self) -> bool:
        """True if one of the processes has ended; updates the peaks of memory."""
        for rank, process in enumerate(self.processes):
            with suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
                for kibibytes in re.findall(r"VmHWM:\s+(\d+) kB", status):
                    self.peaks[rank] = max(self.peaks[rank], 1024 * int(kibibytes))
        return any(process.poll() is not None for process in self.processes)

    def end(self) -> None:
        """End all processes: with SIGKILL, after SIGTERM if they do not train yet.

        A rank that is killed while it loads an op of DeepSpeed leaves a lock file.
        """
        if not self.rows():
            for process in self.processes:
                process.terminate()
            until = time.monotonic() + ENDING
            for process in self.processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.wait()

    def failure(self) -> str:
        """Return why the ranks have ended, in one line: the message of the first that failed."""
        failed = [rank for rank, process in enumerate(self.processes) if process.poll()]
        if not failed:
            return "the ranks ended before the last step"
        first = min(failed, key=lambda rank: self.logs[rank].stat().st_mtime_ns)
        lines = read_lines(self.logs[first])
        errors = [line for line in lines if "Error" in line or line.startswith("pretrain: ")]
        last = (errors or lines or ["no output"])[-1]
        return f"rank {first} ended with exit code {self.processes[first].returncode}: {last[:300]}"


def launch(
    job: Job,
    *,
    log: Log = lambda line: None,
    partial: Partial = lambda measured: None,
    logs: Path | None = None,
) -> Round:
    """Train the job and return its measurements.

    The progress callback is called with a line after every step, and with the end of the ranks'
    logs after a failure.

    partial: called with the measurements so far after every timed step.
    logs: folder for the ranks' logs, MODEL-VARIANT.log, which is written unless all steps were
        completed.

    At the job's limit the ranks are ended, and the measurements so far are returned if they contain
    a timed step (`is_partial`).

    Raises:
        CannotRun: a rank failed or ended, a step was skipped, or the limit was reached before the
            first timed step.
    """
    until = time.monotonic() + job.limit
    with tempfile.TemporaryDirectory(prefix="bench-engines-", ignore_cleanup_errors=True) as name:
        ranks = Ranks(job, Path(name))
        try:
            measured = _watch(ranks, until, log, partial)
        except CannotRun as error:
            raise CannotRun(f"{error}{_keep(ranks, logs, log)}") from None
        # Ctrl-C or SIGTERM: report before the ranks are ended, since the sender may not wait.
        except BaseException:
            log(f"{job.variant} was stopped{_keep(ranks, logs, log)}")
            raise
        finally:
            ranks.end()
        if is_partial(job, measured):
            taken = f"{len(measured.seconds)} of {job.steps} timed steps"
            log(f"{job.variant}: ended after {job.limit} s with {taken}{_keep(ranks, logs, log)}")
        return measured


def _watch(ranks: Ranks, until: float, log: Log, partial: Partial) -> Round:
    """Report the progress of the ranks until the last step, their end, or the time ``until``.

    Raises CannotRun.
    """
    job = ranks.job
    reported = 0  # steps
    late = False
    measured = None
    while True:
        ended, rows = ranks.ended, ranks.rows()
        for number, row in enumerate(rows[reported:], reported + 1):
            if row["skipped"]:
                raise CannotRun(
                    f"a step was skipped: loss {row['loss']}, gradient norm {row['grad_norm']}"
                )
            log(f"{job.variant}: {_line(job, number, row)}")
        if len(rows) > max(reported, job.warmup):
            measured = _round(ranks, rows)
            partial(measured)
        reported = max(reported, len(rows))
        if measured and (late or not is_partial(job, measured)):
            return measured
        if ended:
            raise CannotRun(ranks.failure())
        if late:
            raise CannotRun(
                f"no timed step within {job.limit} s, and {reported} of the {job.warmup} steps "
                "before them"
            )
        time.sleep(max(0.0, min(POLL, until - time.monotonic())))
        late = time.monotonic() >= until


def _round(ranks: Ranks, rows: list[dict[str, float]]) -> Round:
    """Return the measurements from the metrics of the steps so far."""
    seconds = tuple(row["step_seconds"] for row in rows[ranks.job.warmup :])
    peak = int(rows[-1]["peak_memory_bytes"])
    loss = rows[-1]["loss"]
    if platform.has_cuda():
        return Round(seconds, peak, tuple(ranks.peaks), loss)
    libraries = libraries_bytes(VARIANTS[ranks.job.variant].name)
    return Round(seconds, peak - libraries, None, loss)


def _line(job: Job, number: int, row: dict[str, float]) -> str:
    """Return the line of progress of a step."""
    steps = job.warmup + job.steps
    untimed = "" if number > job.warmup else " (not timed)"
    seconds = row["step_seconds"]
    tokens = plan_of(job, cuda=False).schedule.step_tokens
    rest = duration((steps - number) * seconds)
    rate = f"{tokens / seconds:,.0f} tokens/s"
    return f"step {number} of {steps}{untimed}: {seconds:.3f} s, {rate}, about {rest} to go"


@cache
def libraries_bytes(engine: str) -> int:
    """Return the resident bytes of a process that has imported the trainer and an engine.

    Raises CannotRun if the import fails.
    """
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORTS, engine],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    lines = found.stdout.split()
    if found.returncode or not lines:
        raise CannotRun(f"importing {engine} failed: {(found.stderr.splitlines() or [''])[-1]}")
    return int(lines[-1])


def environment() -> dict[str, str]:
    """Return the environment of a rank: one thread by default, and this checkout's modules."""
    malloc = {} if platform.has_cuda() else MALLOC
    return {"OMP_NUM_THREADS": "1", **malloc, **os.environ, "PYTHONPATH": str(ROOT)}


def read_lines(log: Path) -> list[str]:
    """Return the lines of a log that are not empty."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _keep(ranks: Ranks, logs: Path | None, log: Log) -> str:
    """Report the last lines of the ranks' logs and copy the logs to the folder ``logs``.

    Return the end of an error message: the path of the copy, or the reason why it could not be
    written. It is empty if ``logs`` is None.
    """
    lines = [line for log in ranks.logs for line in read_lines(log)]
    for line in lines[-TAIL:]:
        log(f"  | {line}")
    if logs is None:
        return ""
    job = ranks.job
    path = logs / f"{Path(job.model or job.size).stem}-{job.variant}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "\n".join(lines) + "\n")
    except OSError as error:
        return f"; the log is lost: {reason(error)}"
    return f"; log: {path}"
