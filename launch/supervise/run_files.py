"""Read and write the files of an item: the run's progress and metrics, and the attempts' folders.

Uses only the standard library.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fem_common import secrets
from fem_common.errors import reason
from launch.cluster.slurm import OTHERS_RANK
from launch.job import Item, Job, attempts, last_json_lines, read_json, write_json
from launch.supervise.policy import Decision, End, Failure

_CHECKPOINT = re.compile(r"step_(\d{8,})$")


@dataclass(frozen=True)
class RunState:
    """Progress of a run, read from its files at one moment."""

    # starting | running | complete | stopped | failed; None if unknown
    state: str | None
    step: int | None  # last complete step
    checkpoint: int | None  # the newest checkpoint's step
    message: str | None
    # Writer and time of progress.json, which distinguish the attempts.
    writer: tuple[Any, ...]
    metrics: int  # bytes of metrics.jsonl
    recorded_step: int | None = None  # the step in progress.json


def read_state(directory: Path) -> RunState:
    """Read the state of the run in a directory from its own files."""
    progress = read(directory / "progress.json") or {}
    metrics, size = directory / "metrics.jsonl", 0
    last_step = progress.get("step")
    if not isinstance(last_step, int):
        last_step = None
    with suppress(OSError):
        size = metrics.stat().st_size
    last = next(
        (line["step"] for line in last_json_lines(metrics) if isinstance(line.get("step"), int)),
        None,
    )
    return RunState(
        state=progress.get("state"),
        step=max((step for step in (last_step, last) if step is not None), default=None),
        checkpoint=newest_checkpoint(directory),
        message=progress.get("message"),
        writer=(progress.get("host"), progress.get("pid"), progress.get("time")),
        metrics=size,
        recorded_step=last_step,
    )


def has_stepped(before: RunState, now: RunState) -> bool:
    """Return True if the run made a step between two reads of its files.

    Steps in the files that an earlier attempt left do not count.
    """
    ours = (
        now.writer != before.writer
        and now.recorded_step is not None
        and now.recorded_step > (before.checkpoint or 0)
    )
    return ours or now.metrics != before.metrics


def read(path: Path) -> dict[str, Any] | None:
    """Return the object in a small JSON file, or None if the file is missing or cannot be read.

    A file system that does not answer for a moment gives None instead of an error.
    """
    with suppress(OSError):
        return read_json(path)
    return None


def newest_checkpoint(directory: Path) -> int | None:
    """Return the step of the newest complete checkpoint, or None."""
    try:
        names = os.listdir(directory / "checkpoints")
    except OSError:
        return None
    return max((int(match[1]) for match in map(_CHECKPOINT.match, names) if match), default=None)


# Variables of the supervisor's environment that would mislead its ranks: those of another array,
# another torchrun, another MPI job.
_FOREIGN = ("SLURM_ARRAY_", "TORCHELASTIC_", "PET_", "MASTER_", "ROLE_", "GROUP_")
_FOREIGN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Record:
    """Contents of attempt.json. Times are unix times; steps are None for a command."""

    attempt: int
    started: float
    job_id: str | None
    restart_count: int
    nodes: tuple[str, ...]
    world_size: int
    host: str  # host of the supervisor
    pid: int  # process id of the supervisor
    ended: float | None = None
    outcome: str | None = None  # see `policy.End`
    step_start: int | None = None
    step_end: int | None = None
    checkpoint_start: int | None = None
    checkpoint_end: int | None = None
    failure: Failure | None = None
    decision: dict[str, Any] | None = None  # {"action", "delay_seconds", "exclude", "reason"}
    removed: str | None = None  # reason for which the attempt's other files were removed
    folder: Path = field(default=Path(), compare=False)

    @property
    def progress(self) -> bool:
        """True if the attempt left a later checkpoint than it started from."""
        return self.checkpoint_end is not None and self.checkpoint_end > (
            -1 if self.checkpoint_start is None else self.checkpoint_start
        )

    @property
    def end(self) -> End:
        """Outcome, failure and progress of the attempt, as the policy's `End`."""
        stopped = (self.decision or {}).get("action") == "stop"
        stepped = self.step_end is not None and self.step_end != (self.step_start or 0)
        return End(
            self.outcome or "lost",
            self.failure,
            self.progress,
            self.ended or self.started,
            stopped,
            stepped,
        )

    def save(self) -> None:
        """Write attempt.json."""
        values = asdict(self)
        del values["folder"]
        write_json(self.folder / "attempt.json", values)

    def decided(self, decision: Decision) -> Record:
        """Return a copy of the record with the decision, after writing it to attempt.json."""
        written = {
            "action": decision.action,
            "delay_seconds": decision.delay_seconds,
            "exclude": list(decision.exclude),
        }
        record = replace(self, decision={**written, "reason": decision.reason})
        record.save()
        return record


def records(directory: Path) -> list[Record]:
    """Return the records of an item's attempts, oldest first.

    A folder without a readable attempt.json is skipped: its supervisor died right after creating
    it.
    """
    return [record for folder in attempts(directory) if (record := _read(folder)) is not None]


def _read(folder: Path) -> Record | None:
    """Return the record in an attempt's folder, or None if it is missing or invalid."""
    raw = read_json(folder / "attempt.json") or {}
    known = {entry.name for entry in fields(Record)} - {"folder"}
    values = {name: value for name, value in raw.items() if name in known}
    try:
        failure = Failure(**values["failure"]) if values.get("failure") else None
        return Record(
            **{**values, "failure": failure, "nodes": tuple(values["nodes"])}, folder=folder
        )
    except (KeyError, TypeError):
        return None


def close_lost(directory: Path, found: list[Record], trouble: str | None = None) -> list[Record]:
    """Return the attempts' records, after closing those without an end with the outcome "lost".

    An attempt has no end if its supervisor was killed, the supervisor's host crashed, or the
    supervisor had an error (``trouble``).
    """
    closed = []
    for record in found:
        if record.ended is None:
            killed = (
                f"the supervisor ended without a report (process {record.pid} on {record.host}): "
                "killed, or its host failed"
            )
            failure, newest = Failure("lost", trouble or killed), newest_checkpoint(directory)
            record = replace(
                record, ended=time.time(), outcome="lost", failure=failure, checkpoint_end=newest
            )
            record.save()
        closed.append(record)
    return closed


# Number of first and last attempts that keep all files. All others keep only attempt.json, which
# contains all that decisions need.
KEPT_FIRST, KEPT_LAST = 5, 20
PRUNE_SECONDS = 10.0  # limit, so that no attempt is delayed; the next call continues


def prune(found: Sequence[Record], report: Callable[[str], None]) -> list[Record]:
    """Remove the files of old attempts except attempt.json, and return the updated records.

    found: records of all attempts. The first and the last attempts remain complete.

    It is called when a new attempt begins. An attempt that is not closed, or whose folder is a
    symbolic link, is skipped. Files that cannot be removed are reported through the callback; the
    next call tries again.
    """
    kept, end = list(found), time.monotonic() + PRUNE_SECONDS
    # the new one counts as one of the last
    for index in range(KEPT_FIRST, len(kept) - (KEPT_LAST - 1)):
        record = kept[index]
        if record.ended is None or record.removed or record.folder.is_symlink():
            continue
        if time.monotonic() > end:
            break
        try:
            with os.scandir(record.folder) as entries:
                for entry in [entry for entry in entries if entry.name != "attempt.json"]:
                    (shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink)(
                        entry.path
                    )
            removed = (
                f"an item keeps the files of its first {KEPT_FIRST} and its last {KEPT_LAST} "
                "attempts"
            )
            kept[index] = replace(record, removed=removed)
            kept[index].save()
        except FileNotFoundError:  # another process removes it, too
            continue
        except OSError as error:
            report(f"the files of attempt {record.attempt} cannot be removed: {reason(error)}")
    return kept


def new_folder(directory: Path) -> tuple[int, Path]:
    """Create the next attempt's folder with logs/ in it, and return its number and path."""
    last = attempts(directory)
    number = int(last[-1].name) + 1 if last else 1
    while True:
        folder = directory / "attempts" / f"{number:04}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        (folder / "logs").mkdir()
        return number, folder


def ranks_environment(
    job: Job, item: Item, folder: Path, environ: Mapping[str, str], *, local: bool
) -> dict[str, str]:
    """Return the complete environment of the ranks, made from the supervisor's ``environ``.

    local: True if no batch script has set the profile's variables, so that they are added.

    Variables of a Slurm array are passed only to commands that are tasks of the array, because any
    other program would act as such a task. Variables that mpirun or srun set in the submitting
    shell are removed: sbatch exports them, and libraries (accelerate, DeepSpeed, mpi4py) would
    mistake every rank for the rank that they describe.
    """
    foreign = [
        name
        for name in environ
        if name.startswith(_FOREIGN) or name in _FOREIGN_NAMES or OTHERS_RANK.match(name)
    ]
    ours = {name: value for name, value in environ.items() if name not in foreign}
    if local:
        ours |= {name: str(value) for name, value in job.section("environment").items()}
    ours |= {"PYTHONPATH": job.code, "PYTHONSAFEPATH": "1", "LAUNCH_ATTEMPT": str(folder)}
    return ours | item.environment


def keep_inputs(job: Job, item: Item, folder: Path, environment: Mapping[str, str]) -> None:
    """Copy the attempt's inputs into its folder.

    These are job.sh, config.yaml, and the environment without secrets.
    """
    for source in (job.script, item.launch / "config.yaml"):
        if source.is_file():
            shutil.copyfile(source, folder / source.name)
    harmless = secrets.harmless_environment(environment)
    record = {
        "python": platform.python_version(),
        "host": platform.node(),
        "command": [job.python, *item.arguments],
        "environment": harmless,
    }
    write_json(folder / "environment.json", record)
