"""``cancel``: end runs, or one item of an array. Only requeue starts them again.

cancel DIR...            end at once: progress since the last checkpoint is lost
cancel --save DIR...     save a checkpoint, then end; a run that waits in the queue ends at once
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import shlex
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from fem_common.errors import UserError
from launch.cluster import slurm
from launch.job import Job, read_json, write_json
from launch.job.item_state import Standing, counted, find_job, standings, start_time
from launch.job.plan import locked

LINES = 8
# A local supervisor's time to end its ranks, before it and they are killed.
GRACE_SECONDS = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        help="directory of a run or a job, or of one item of an array",
    )
    parser.add_argument("--save", action="store_true", help="save a checkpoint first")


def main(arguments: argparse.Namespace) -> int:
    """Cancel items that run or are in the queue. Return 0.

    Raises:
        UserError: a directory has no job, or an item runs on another machine.
    """
    for directory in arguments.directories:
        job, items = find_job(directory)
        with locked(job.path):
            chosen = [standing for standing in standings(job) if standing.index in items]
            active = [standing for standing in chosen if standing.kind == "active"]
            if active:
                _cancel(job, active, save=arguments.save)
            else:
                print(f"{directory}: nothing to cancel: {counted(chosen)}")
    return 0


def who() -> str:
    """Return USER@HOST of this process, which is recorded in stop.json."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _cancel(job: Job, active: Sequence[Standing], *, save: bool) -> None:
    """Cancel active items: write stop.json to prevent restarts, then end the items.

    save: save a checkpoint first.

    Raises:
        UserError: an item runs on a machine that this host cannot reach.
    """
    far = next(
        (standing for standing in active if standing.job_id is None and standing.pid is None), None
    )
    if far is not None:
        raise UserError(f"{job.directory}: {far.where}; cancel it on that host")
    by = who()
    for standing in active:
        stop = {
            "why": "cancelled",
            "message": f"by {by}",
            "time": round(time.time(), 3),
            "by": by,
            "save": save,
        }
        write_json(_launch(job, standing) / "stop.json", stop)
    # A job that is being requeued (COMPLETING) reads stop.json when it starts again.
    asked = [str(standing.job_id) for standing in active if save and standing.state == "RUNNING"]
    ended = [
        standing for standing in active if standing.job_id and str(standing.job_id) not in asked
    ]
    if asked:
        slurm.signal_batch(asked, "USR1")
    if ended:
        slurm.cancel([str(standing.job_id) for standing in ended])
    for standing in active:
        if standing.state == "PENDING":
            path = _launch(job, standing) / "state.json"  # no supervisor will write it
            ended_state = {
                "state": "cancelled",
                "message": f"by {by}",
                "time": round(time.time(), 3),
            }
            write_json(path, {"format": 1, **(read_json(path) or {}), **ended_state})
    _tell(job, active, save=save)
    _end_local([standing.pid for standing in active if standing.pid is not None], save=save)


def _tell(job: Job, active: Sequence[Standing], *, save: bool) -> None:
    """Print for each of the first `LINES` items that it was cancelled and how to continue it."""
    for standing in active[:LINES]:
        told = (
            "saves, then ends"
            if save and standing.state in ("RUNNING", "local")
            else "was cancelled"
        )
        where = shlex.quote(job.items[standing.index].directory)
        print(
            f"{job.items[standing.index].name}: {standing.where} {told}; to continue: python -m "
            f"launch requeue {where}"
        )
    if len(active) > LINES:
        print(
            f"... and {len(active) - LINES} more; to continue all: python -m launch requeue "
            f"{shlex.quote(job.directory)}"
        )


def _end_local(pids: Sequence[int], *, save: bool) -> None:
    """Signal supervisors on this machine to end.

    save: save a checkpoint first, and do not wait for the end. Otherwise wait, and kill the
    supervisors that have not ended after `GRACE_SECONDS`.
    """
    born = {pid: start_time(pid) for pid in pids}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1 if save else signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while not save and (
        left := [
            pid
            for pid, birth in born.items()
            if birth is not None and abs((start_time(pid) or 0.0) - birth) < 1.0
        ]
    ):
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _launch(job: Job, standing: Standing) -> Path:
    return job.items[standing.index].launch
