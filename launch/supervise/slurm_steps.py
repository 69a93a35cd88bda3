"""``python -m launch.supervise.slurm_steps guard|signal ...``: Slurm steps of their own beside the ranks. Standard library alone.

guard ITEM JOB RESTARTS PID   requeues a job whose supervisor was killed. To Slurm a batch script that dies of SIGKILL (want of memory,
                              someone's hand) is a job that failed, and it ends the job for good. This runs on the supervisor's node: such
                              a step has a few seconds after the batch script's end.
signal ATTEMPT NUMBER         sends a signal to the keepers (`launch.node.rank`) of an attempt on this node, and to them alone: `scancel
                              --signal` reaches every process of a step, and kills those that know nothing of it, such as the process
                              through which torch writes a checkpoint.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launch.cluster.slurm import SlurmError, call
from launch.job import launch_folder, read_json
from launch.job.item_state import start_time
from launch.supervise.on_slurm import job_fields

# What a supervisor says in state.json that ends of its own will. Of "requeued" Slurm knows better: it says so before it asks Slurm.
OVER = ("finished", "stopped", "cancelled")
TRIES = 20  # to requeue, every quarter of a second


def main(argv: Sequence[str] | None = None) -> int:
    """Do one of them. Returns 0."""
    verb, *words = sys.argv[1:] if argv is None else argv
    if verb == "guard":
        guard(*words)
    else:
        for pid in keepers(words[0]):
            with suppress(ProcessLookupError):
                os.kill(pid, int(words[1]))
    return 0


def guard(item: str, job: str, restarts: str, pid: str) -> None:
    """Wait for the supervisor's end; requeue the job if it was not of its own will."""
    # The signals that end a job, and those for ranks, are not for the guard.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if not visible(int(pid)):
        print(f"launch: process {pid} is no supervisor that can be seen from here: no guard", flush=True)
        return
    wait_for_end(int(pid))
    for _ in range(TRIES):
        if of_its_own_will(Path(item)):
            break
        try:
            if not killed(job_fields(job), restarts):
                break
            call("scontrol", "requeue", job)
            print(f"launch: the supervisor was killed: job {job} is requeued", flush=True)
            break
        except SlurmError as error:
            print(f"launch: the supervisor was killed: {error}", flush=True)
            time.sleep(0.25)


def visible(pid: int) -> bool:
    """Whether the process is a supervisor; elsewhere, or where processes are hidden from each other, its number says nothing."""
    try:
        return b"launch.supervise" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def wait_for_end(pid: int) -> None:
    """Wait until the process is over."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # a kernel before 5.3
        started = start_time(pid)
        while started is not None and start_time(pid) == started:
            time.sleep(0.2)
        return
    select.select([handle], [], [])
    os.close(handle)


def of_its_own_will(item: Path) -> bool:
    """Whether the supervisor said that it was done, or someone asked the item to stop."""
    state = read_json(launch_folder(item) / "state.json") or {}
    return state.get("state") in OVER or (launch_folder(item) / "stop.json").exists()


def killed(job: Mapping[str, str], restarts: str) -> bool:
    """Whether Slurm's fields of the job say: not requeued since, and, if it is over, by a signal to its batch script or the time limit."""
    if job.get("Restarts") != restarts:
        return False
    if job.get("JobState") == "RUNNING":
        return True
    _, _, by_signal = job.get("ExitCode", "0:0").partition(":")
    return job.get("Reason") == "TimeLimit" or by_signal not in ("", "0", "15")


def keepers(folder: str) -> list[int]:
    """The processes on this node that keep a rank of the attempt in a folder."""
    wanted = [b"-m", b"launch.node.rank", os.fsencode(folder)]
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _words(name)[1:4] == wanted]


def _words(pid: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main())
