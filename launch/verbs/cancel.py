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
from collections.abc import Iterable, Sequence

from fem_common.errors import UserError
from launch.cluster import slurm
from launch.job import Job, read_json, write_json
from launch.job.item_state import Standing, counted, find_job, standings, start_time
from launch.job.plan import locked
from launch.verbs import options

LINES = 8
# A local supervisor's time to end its ranks, before it and they are killed.
GRACE_SECONDS = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    options.add(parser, "directories")
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
    for standing in active:
        if standing.job_id is None and standing.pid is None:
            raise UserError(f"{job.directory}: {standing.where}; cancel it on that host")
    by = who()
    end = {"message": f"by {by}", "time": round(time.time(), 3)}
    for standing in active:
        stop = {"why": "cancelled", **end, "by": by, "save": save}
        write_json(job.items[standing.index].launch / "stop.json", stop)
    # A job that is being requeued (COMPLETING) reads stop.json when it starts again.
    jobs = [standing for standing in active if standing.job_id]
    saving = [str(item.job_id) for item in jobs if save and item.state == "RUNNING"]
    slurm.signal_batch(saving, "USR1")
    slurm.cancel([str(item.job_id) for item in jobs if item.job_id not in saving])
    for standing in jobs:
        if standing.state == "PENDING":  # no supervisor will write its state
            path = job.items[standing.index].launch / "state.json"
            state = {"format": 1, **(read_json(path) or {}), "state": "cancelled", **end}
            write_json(path, state)
    _report(job, active, save=save)
    _end_local([standing.pid for standing in active if standing.pid is not None], save=save)


def _report(job: Job, active: Sequence[Standing], *, save: bool) -> None:
    """Print for each of the first `LINES` items that it was cancelled and how to continue it."""
    for standing in active[:LINES]:
        saves = save and standing.state in ("RUNNING", "local")
        what = "saves, then ends" if saves else "was cancelled"
        item = job.items[standing.index]
        print(
            f"{item.name}: {standing.where} {what}; to continue: python -m launch requeue "
            f"{shlex.quote(item.directory)}"
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
    left = {pid: born for pid in pids if (born := start_time(pid)) is not None}
    _send(pids, signal.SIGUSR1 if save else signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while left and not save:
        time.sleep(0.1)
        left = {
            pid: born for pid, born in left.items() if abs((start_time(pid) or 0.0) - born) < 1.0
        }
        if time.monotonic() > deadline:
            _send(left, signal.SIGKILL)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes, skipping those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
