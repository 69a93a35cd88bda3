"""``python -m launch.supervise.slurm_steps guard|signal ...``: separate Slurm steps next to the
ranks.

Uses only the standard library.

guard ITEM JOB RESTARTS PID   requeues a job whose supervisor was killed. When a batch script dies
                              of SIGKILL (out of memory, or a user's kill), Slurm counts the job as
                              failed and ends it without a requeue. The guard runs on the
                              supervisor's node. As a step it has a few seconds after the batch
                              script's end.
signal ATTEMPT NUMBER         sends a signal only to the keepers (`launch.node.rank`) of an attempt
                              on this node. `scancel --signal` would reach every process of a step
                              and kill those without a handler, such as the process through which
                              torch writes a checkpoint.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.cluster.slurm import SlurmError, call, job_fields
from launch.job import launch_folder, read_json
from launch.job.item_state import OVER, start_time
from launch.supervise.place import keepers, send, words_of

TRIES = 20  # tries to requeue, every quarter of a second


def main(argv: Sequence[str] | None = None) -> int:
    """Run the guard or send the signal. Return 0."""
    verb, *words = sys.argv[1:] if argv is None else argv
    if verb == "guard":
        guard(*words)
    else:
        send(keepers(Path(words[0])), int(words[1]))
    return 0


def guard(item: str, job: str, restarts: str, pid: str) -> None:
    """Wait for the supervisor's end, and requeue the job if the supervisor was killed."""
    # The guard must survive the signals that end a job, and those for ranks.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if b"launch.supervise" not in words_of(int(pid)):
        # The process is on another machine, or processes are hidden from each other.
        print(
            f"launch: process {pid} is no supervisor that can be seen from here: no guard",
            flush=True,
        )
        return
    print(f"launch: guards process {pid}", flush=True)
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


def wait_for_end(pid: int) -> None:
    """Wait until the process has ended."""
    while start_time(pid) is not None:
        time.sleep(0.2)


def of_its_own_will(item: Path) -> bool:
    """Return True if the supervisor ended regularly.

    It recorded a final state, or a user stopped the item. "requeued" is not final: the supervisor
    writes it before it calls Slurm.
    """
    state = read_json(launch_folder(item) / "state.json") or {}
    return state.get("state") in OVER or (launch_folder(item) / "stop.json").exists()


def killed(job: Mapping[str, str], restarts: str) -> bool:
    """Return True if the fields of scontrol show that the supervisor was killed.

    restarts: the job's restart count when the supervisor started.

    The job was not requeued since then. It still runs, reached its time limit, or its batch script
    died of a signal other than SIGTERM.
    """
    if job.get("Restarts") != restarts:
        return False
    if job.get("JobState") == "RUNNING":
        return True
    _, _, by_signal = job.get("ExitCode", "0:0").partition(":")
    return job.get("Reason") == "TimeLimit" or by_signal not in ("", "0", "15")


if __name__ == "__main__":
    sys.exit(main())
