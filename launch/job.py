"""What was asked for, as ``launch/job.json``: written by whoever submits, read by the supervisor. Standard library alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch.layout import launch_folder, read_json, write_json

FORMAT = 1


@dataclass(frozen=True)
class Item:
    """One run of a job: the whole of it, or one task of an array."""

    directory: str  # absolute; attempts, state and the run's own files
    arguments: tuple[str, ...]  # after the interpreter: ("-m", "pretrain", "/runs/x/launch/config.yaml")
    name: str
    environment: dict[str, str] = field(default_factory=dict)  # for this item alone: an array command's SLURM_ARRAY_TASK_*


@dataclass(frozen=True)
class Job:
    """A job: items that run on the same code with the same resources."""

    name: str
    kind: str  # "run": a training run, which has steps to watch and a checkpoint to save; "command": anything else
    directory: str  # absolute
    working_directory: str  # absolute; relative paths of the command start here
    code: str  # absolute; the snapshot, first on PYTHONPATH
    python: str  # the ranks' interpreter
    nodes: int
    processes_per_node: int
    torchrun: bool  # False: one process, started as it is
    items: tuple[Item, ...]
    profile: dict[str, Any]  # launch.profile.Profile as plain values
    profile_path: str
    array: bool = False  # items are the tasks of a Slurm job array

    @property
    def world_size(self) -> int:
        """Ranks of an item."""
        return self.nodes * self.processes_per_node

    def save(self) -> None:
        """Write DIR/launch/job.json."""
        write_json(launch_folder(Path(self.directory)) / "job.json", {"format": FORMAT, **asdict(self)})


def load_job(directory: Path) -> Job | None:
    """The job in a directory, or None where there is none."""
    raw = read_json(launch_folder(directory) / "job.json")
    if raw is None or raw.pop("format", None) != FORMAT:
        return None
    items = tuple(Item(**{**item, "arguments": tuple(item["arguments"])}) for item in raw.pop("items"))
    return Job(items=items, **raw)
