"""Job description (``launch/job.json``), file layout of a job, and functions for its small files.

The other modules of this package plan a job, take its code snapshot and render its batch script.
Standard library alone: the supervisor reads these files inside jobs.

    DIR/launch/job.json          the job's description (`Job`), including the profile
    DIR/launch/job.sh            the rendered batch script (Slurm)
    DIR/launch/config.yaml       the resolved configuration of a run; every attempt starts from it
    DIR/launch/code/             the code snapshot that every attempt runs
    DIR/launch/code.json         the snapshot's revision, number of files and sha256
    DIR/launch/changes.diff      the changes since that revision, if any
    DIR/launch/submissions.jsonl one line per submission: time, job id, the user's command
    DIR/launch/slurm-%j.out      output of Slurm and the supervisor (appended over requeues);
                                 of an array: slurm-%A_%a.out

An item is one run of the job. Its directory is the job's or, in an array, a separate one:

    ITEM/launch/state.json       the item's state, written by its supervisor
    ITEM/launch/stop.json        a user stopped the item, or the supervisor gave up: the item does
                                 not restart until `requeue` removes this file
    ITEM/launch/busy_JOB.json    how often, and since when, that job found the item in use by
                                 another job
    ITEM/attempts/0001/          attempt.json, environment.json, job.sh, config.yaml
        logs/rank_00000.log      lines of "<unix time> <text>"; at most 64 MiB, then the first and
                                 last 16 MiB (`launch.node.logs`)
        ranks/rank_00000.json    pid, host, exit, error
        health/NODE.json         the pre-flight check
        dumps/rank_00000.txt     stacks of a hang
        flight/                  NCCL's flight recorder
    ITEM/progress.json, metrics.jsonl, checkpoints/ ...
                                 a training run's files (see pretrain's README)

When an attempt begins, the attempts between the first 5 and the last 20 lose all files except
attempt.json (`launch.supervise.run_files.prune`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fem_common.files import append_json_line, write_atomically

FORMAT = 1
TAIL_BYTES = 1 << 16  # part of a long file that is read


class Folder:
    """Base class of a job and an item: its directory."""

    directory: str  # absolute

    @property
    def path(self) -> Path:
        """Directory as a path."""
        return Path(self.directory)

    @property
    def launch(self) -> Path:
        """Launcher's folder in the directory."""
        return launch_folder(self.path)


@dataclass(frozen=True)
class Item(Folder):
    """One run of a job: the job's only run, or one task of its array."""

    directory: str  # absolute; contains attempts, state and the run's files
    # command line after the interpreter: ("-m", "pretrain", "/runs/x/launch/config.yaml")
    arguments: tuple[str, ...]
    name: str
    # additional variables of this item: an array command's SLURM_ARRAY_TASK_*
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job(Folder):
    """A job: items that run on the same code with the same resources."""

    name: str
    # "run": a training run, which has steps to watch and a checkpoint to save; "command": any other
    kind: str
    directory: str  # absolute
    working_directory: str  # absolute; start of the command's relative paths
    code: str  # absolute; the snapshot, first on PYTHONPATH
    python: str  # the ranks' interpreter
    nodes: int
    processes_per_node: int
    torchrun: bool  # False: one process, started directly
    items: tuple[Item, ...]
    profile: dict[str, Any]  # launch.cluster.profile.Profile as plain values
    profile_path: str
    array: bool = False  # items are the tasks of a Slurm job array

    @property
    def world_size(self) -> int:
        """Number of ranks of an item."""
        return self.nodes * self.processes_per_node

    @property
    def script(self) -> Path:
        """Path of the rendered batch script, which exists on Slurm only."""
        return self.launch / "job.sh"

    @property
    def on_slurm(self) -> bool:
        """True if the job runs on Slurm, False if it runs on one machine."""
        return self.profile.get("scheduler") == "slurm"

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the profile, or {} if the profile does not contain it."""
        return self.profile.get(name) or {}

    def save(self) -> None:
        """Write DIR/launch/job.json."""
        write_json(self.launch / "job.json", {"format": FORMAT, **asdict(self)})


def load_job(directory: Path) -> Job | None:
    """Return the job in a directory, or None if the directory has no job.json of this format."""
    raw = read_json(launch_folder(directory) / "job.json")
    if raw is None or raw.pop("format", None) != FORMAT:
        return None
    items = tuple(
        Item(**{**item, "arguments": tuple(item["arguments"])}) for item in raw.pop("items")
    )
    return Job(items=items, **raw)


def launch_folder(directory: Path) -> Path:
    """Return the launcher's folder of a job or an item."""
    return directory / "launch"


def attempts(directory: Path) -> list[Path]:
    """Return an item's attempt folders, oldest first."""
    return sorted(
        path for path in (directory / "attempts").glob("[0-9][0-9][0-9][0-9]*") if path.is_dir()
    )


def rank_log(attempt: Path, rank: int) -> Path:
    """Return the path of a rank's log."""
    return attempt / "logs" / f"rank_{rank:05}.log"


def rank_record(attempt: Path, rank: int) -> Path:
    """Return the path of the record of a rank's process (`launch.node.rank`)."""
    return attempt / "ranks" / f"rank_{rank:05}.json"


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file atomically: a reader gets either the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(value, indent=1) + "\n", synced=False)


def read_json(path: Path) -> Any:
    """Return the object in a JSON file.

    Return None if the file is missing, incomplete, or contains no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def last_bytes(path: Path, count: int) -> bytes:
    """Return the last ``count`` bytes of a file, or b"" if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - count))
            return file.read()
    except OSError:
        return b""


def last_lines(path: Path, count: int = 1) -> list[str]:
    """Return the last ``count`` non-empty lines of a file, or [] if the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def append_json(path: Path, value: Any) -> None:
    """Append a value as one line to a JSON-lines file, and create its folder if missing.

    The line is written atomically, so that several processes may append.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    append_json_line(path, value)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file, or [] if the file is missing.

    Lines that are incomplete or contain no JSON object are skipped.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return list(_objects(lines))


def last_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of the complete lines in a file's last `TAIL_BYTES`, the last line first.

    Yield no objects if the file cannot be read.
    """
    return _objects(reversed(last_bytes(path, TAIL_BYTES).split(b"\n")[:-1]))


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among the lines, and skip all other lines."""
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
