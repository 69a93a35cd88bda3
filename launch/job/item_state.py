"""Determine the state of each item of a job: finished, active, stopped, or idle.

An item is one run of a job (`launch.job`). Slurm's queue takes precedence over the state that
the item's supervisor wrote last. Uses only the standard library.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fem_common.errors import UserError
from launch.cluster import slurm
from launch.job.job import Job, launch_folder, load_job, read_json, read_json_lines

# seconds between two clocks' readings of the same moment
SLACK = 2.0


def process_of(state: Mapping[str, Any] | None) -> int | None:
    """Return the id of the process that wrote a state file if it still runs on this host, or None.

    state: contents of the item's state.json, or None.

    The result is None for a state of another host, and for a process that started after the state
    was written: that is a different process that got the same id.
    """
    if (
        not state
        or state.get("host") != socket.gethostname()
        or not isinstance(state.get("pid"), int)
    ):
        return None
    started = start_time(state["pid"])
    return (
        state["pid"]
        if started is not None and started <= float(state.get("time") or 0.0) + SLACK
        else None
    )


def start_time(pid: int) -> float | None:
    """Return the unix time at which a process started, or None if it ended (a zombie has ended)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return None
    if fields[0] in "ZX":
        return None
    return time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")


# states of a supervisor whose process runs
AT_WORK = ("checking", "running", "saving", "waiting")
OVER = ("finished", "stopped", "cancelled")  # final states that a supervisor writes


@dataclass(frozen=True)
class Standing:
    """Current state of an item: its index, its kind, and the job or process that runs it."""

    index: int
    kind: str  # "finished"; "active"; "stopped": until `requeue`; "idle": may start
    job_id: str | None = None  # active on Slurm: the id that scancel knows, ID or ID_TASK
    state: str | None = None  # active: PENDING, RUNNING, ..., or "local"
    pid: int | None = None  # active on this machine: the supervisor
    # active: the reason for waiting; stopped: the reason; idle: the reason for its end, if the same
    # command may start it again
    message: str = ""

    @property
    def where(self) -> str:
        """Text that names the item's Slurm job or process, or the message if it has neither."""
        if self.job_id:
            return f"job {self.job_id} ({self.state})"
        return f"process {self.pid}" if self.pid else self.message


def standings(job: Job, *, ask: bool = True) -> list[Standing]:
    """Return the state of every item of a job.

    ask: False leaves out the query of Slurm's queue.

    Raises:
        SlurmError: the queue is queried and does not answer.
    """
    rows = _queue(job) if ask else {}
    return [_standing(job, index, rows) for index in range(len(job.items))]


def _standing(job: Job, index: int, rows: Mapping[int, tuple[str, slurm.QueueState]]) -> Standing:
    """Return the state of one item, from its files and the rows of Slurm's queue."""
    launch = job.items[index].launch
    state = state_of(job.items[index].directory)
    if state.get("state") == "finished":
        return Standing(index, "finished")
    if index in rows:
        job_id, row = rows[index]
        return Standing(index, "active", job_id, row.state, message=row.reason)
    pid = process_of(state)
    if pid is not None and state.get("state") in AT_WORK:
        return Standing(index, "active", state="local", pid=pid)
    if (
        state.get("state") in AT_WORK
        and not state.get("job_id")
        and state.get("host") not in (None, "", socket.gethostname())
    ):
        description = (
            f"process {state.get('pid')} of host {state.get('host')} (if that process has ended, "
            f"remove {launch / 'state.json'})"
        )
        return Standing(index, "active", state="local", message=description)
    stop = read_json(launch / "stop.json")
    if stop is not None:
        return Standing(
            index,
            "stopped",
            message=f"{stop.get('why', 'stopped')}: {stop.get('message') or 'no reason given'}",
        )
    return Standing(
        index,
        "idle",
        message=str(state.get("message") or "") if state.get("state") == "stopped" else "",
    )


def _queue(job: Job) -> dict[int, tuple[str, slurm.QueueState]]:
    """Return the job id and queue state of each item in Slurm's queue, by the item's index.

    Jobs are found by their batch script. Recorded ids count only where Slurm reports no script,
    because Slurm may have given the id to another job.
    """
    if not job.on_slurm:
        return {}
    rows = {}
    ids = {str(line["job_id"]) for line in submissions(job)}
    for job_id, state in slurm.jobs_of(job.script, job.name, ids).items():
        _, underscore, task = job_id.partition("_")
        if job.array == bool(underscore) and (not underscore or task.isdigit()):
            rows[int(task) if underscore else 0] = (job_id, state)
    return {index: row for index, row in rows.items() if index < len(job.items)}


def state_of(directory: str) -> dict[str, Any]:
    """Return the contents of state.json in an item's directory, or {} if it is missing."""
    return read_json(launch_folder(Path(directory)) / "state.json") or {}


def submissions(job: Job) -> list[dict[str, Any]]:
    """Return the records of the job's Slurm submissions that have a job id, oldest first."""
    return [
        line for line in read_json_lines(job.launch / "submissions.jsonl") if line.get("job_id")
    ]


def is_resubmitted(job: Job, index: int, state: Mapping[str, Any]) -> bool:
    """Return True if an unfinished item was submitted to Slurm after its state was written.

    state: contents of the item's state.json.

    This is the case if the state's job id differs from the id of the last submission. If the state
    has no job id, the times are compared.
    """
    if not job.on_slurm or state.get("state") == "finished":
        return False
    last = next(
        (line for line in reversed(submissions(job)) if index in (line.get("items") or (index,))),
        None,
    )
    if last is None:
        return False
    if state.get("job_id"):
        return str(state["job_id"]).partition("_")[0] != str(last["job_id"])
    return float(last.get("time") or 0.0) > float(state.get("time") or 0.0)


def find_job(path: str | Path) -> tuple[Job, list[int]]:
    """Return (job, item indices) for a directory.

    For a job's directory, the indices are those of all items. For the directory of one item, the
    list contains only the index of that item.

    Raises:
        UserError: the directory belongs to no job.
    """
    given = Path(path).absolute()
    job = load_job(given)
    if job is not None:
        return job, list(range(len(job.items)))
    for parent in given.parents[:3]:
        job = load_job(parent)
        for index, item in enumerate(job.items if job else ()):
            if job and item.path.resolve() == given.resolve():
                return job, [index]
    raise UserError(
        f"{path}: {'it has no launch/job.json' if given.is_dir() else 'no such directory'}; give "
        "the directory of a run or a job"
    )


def counted(standing: Sequence[Standing]) -> str:
    """Return the number of items of each kind in words, as "3 finished, 2 to do".

    For a single item, return its kind without a number.
    """
    words = {"finished": "finished", "active": "under way", "stopped": "stopped", "idle": "to do"}
    if len(standing) == 1:
        return words[standing[0].kind]
    counts = Counter(item.kind for item in standing)
    return ", ".join(f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind])
