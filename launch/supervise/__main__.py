"""``python -m launch.supervise DIRECTORY [--item N]``: supervise one item of a job. It is the batch
script's only process.

Standard library alone: it runs from the job's snapshot, before and alongside the ranks.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fem_common.cli import Parser, run
from fem_common.errors import InUse, UserError
from fem_common.exits import Exit
from launch.job import Item, Job, attempts, load_job, read_json, write_json
from launch.supervise.journal import Journal
from launch.supervise.loop import REQUEUE_SECONDS, Supervisor
from launch.supervise.place import LocalPlace, Place, PlaceError, Unreachable, end_orphans
from launch.supervise.policy import BUSY_SECONDS, BUSY_TIMES
from launch.supervise.watch import Signals, noted

# on Slurm: how long a supervisor on a failed node may still hold its lock
LOCK_SECONDS = 120.0
# in ITEM/launch: how often, and since when, this job found the item in use by another job
BUSY = "busy_{}.json"


def main(argv: list[str] | None = None) -> int:
    """Supervise an item and return the exit code.

    0: the item is finished, or saved at a user's request. 1: it stopped. 2: its input, or this
    command line, is wrong.
    """
    parser = Parser(prog="python -m launch.supervise", description="Supervise one item of a job.")
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIRECTORY",
        help="the job's directory, with launch/job.json in it",
    )
    parser.add_argument(
        "--item",
        type=int,
        default=0,
        metavar="N",
        help="index of the item in the job (default: %(default)s)",
    )
    parser.add_argument("--show", action="store_true", help="print rank 0's output")
    arguments = parser.parse_args(argv)

    def keep() -> int:
        job = load_job(arguments.directory.absolute())
        if job is None or not 0 <= arguments.item < len(job.items):
            raise UserError(
                f"{arguments.directory}: no job with an item {arguments.item}; create it with: "
                "python -m launch submit"
            )
        return supervise(job, arguments.item, show=arguments.show)

    return run("launch", keep)


def supervise(job: Job, index: int, *, show: bool) -> int:
    """Supervise an item until it ends, and return the exit code.

    show: print the output of rank 0.

    Raises:
        UserError: another process already supervises the item.
    """
    item, place = job.items[index], place_of(job)
    item.launch.mkdir(parents=True, exist_ok=True)
    journal = Journal(job, item, place.job_id)
    with noted() as signals, _alone(item, place, signals, journal) as alone:
        if not alone:
            journal.log(
                "the lock of this item's last supervisor is still held; Slurm has ended that "
                "supervisor, so this one continues without the lock"
            )
        state = read_json(item.launch / "state.json") or {}
        if state.get("state") == "finished":
            journal.log("finished before; nothing to do")
            return Exit.DONE
        if place.job_id is None:
            left = end_orphans(attempts(item.path))
            if left:
                journal.log(f"ended {left} processes that an earlier attempt left running")
        code = Supervisor(job, index, place, signals, journal, show=show).run()
        journal.settle()
        return code


def place_of(job: Job) -> Place:
    """Return the `Place` that runs the job's ranks: the Slurm allocation, or this machine.

    Raises:
        UserError: the job is for Slurm, and this process is not inside a Slurm job.
    """
    if job.on_slurm:
        if "SLURM_JOB_ID" not in os.environ:
            raise UserError(
                f"{job.directory} is a job for Slurm, and this process is not inside a Slurm job; "
                "start it with: python -m launch submit"
            )
        from launch.supervise.on_slurm import SlurmPlace

        return SlurmPlace(os.environ, job.section("slurm").get("exclude") or ())
    return LocalPlace(job)


@contextmanager
def _alone(item: Item, place: Place, signals: Signals, journal: Journal) -> Iterator[bool]:
    """Lock the item, so that no second supervisor runs it.

    Yield True if the lock was acquired, or if the file system has no locks. Yield False if an
    earlier start of this same job still has the lock. If another job has the lock, requeue this job
    and end the process (SystemExit).

    Raises:
        InUse: the job has no queue, and another process has the lock.
    """
    folder, began = item.launch, time.monotonic()
    with (folder / "supervisor.lock").open("a+", encoding="utf-8") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if place.job_id is None:
                    raise InUse(
                        f"{item.directory} is already supervised by another process; see: python "
                        "-m launch status"
                    ) from None
                if time.monotonic() - began < LOCK_SECONDS and not signals.ends:
                    time.sleep(1.0)
                    continue
                if (read_json(folder / "state.json") or {}).get("job_id") == place.job_id:
                    # Slurm never runs a job twice at once: a failed node, or its file server, still
                    # holds the lock.
                    yield False
                    return
                _back(item, place, journal)
            except OSError:
                pass
            break
        (folder / BUSY.format(place.job_id)).unlink(missing_ok=True)
        yield True


def _back(item: Item, place: Place, journal: Journal) -> None:
    """Requeue this job because another job supervises the item, and end this process (SystemExit).

    After `BUSY_TIMES` starts or `BUSY_SECONDS`, the process ends with Exit.FAULT instead of a
    requeue. The file `BUSY` counts both over requeues. The other job's state.json is not changed.
    """
    folder = item.launch
    other = read_json(folder / "state.json") or {}
    holder = (
        f"another job ({other.get('job_id') or 'of unknown id'}, on "
        f"{other.get('host') or 'an unknown host'})"
    )
    if (folder / "stop.json").exists():
        print(f"launch: {item.directory} is supervised by {holder}, and must stop", flush=True)
        sys.exit(Exit.FAULT)
    count = folder / BUSY.format(place.job_id)
    seen = read_json(count) or {"since": time.time(), "times": 0}
    seen["times"] += 1
    write_json(count, seen)
    print(f"launch: {item.directory} is supervised by {holder}: back to the queue", flush=True)
    why = "it does not end; see python -m launch status"
    while seen["times"] <= BUSY_TIMES and time.time() - seen["since"] < BUSY_SECONDS:
        try:
            place.requeue(())
        except Unreachable as error:
            print(f"launch: {error}", flush=True)
            time.sleep(REQUEUE_SECONDS)
        except PlaceError as error:
            why = str(error)
            break
    count.unlink(missing_ok=True)
    minutes = (time.time() - seen["since"]) / 60
    message = (
        f"{item.directory} is supervised by {holder}, after {seen['times']} starts and "
        f"{minutes:.0f} minutes of this one: {why}"
    )
    print(f"launch: stopped: {message}", flush=True)
    journal.event("stopped", message)
    journal.settle()
    sys.exit(Exit.FAULT)


if __name__ == "__main__":
    sys.exit(main())
