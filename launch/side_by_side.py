"""launch: items of a job on this machine, K at a time: a supervisor each, as a child of this process."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from fem_common.signals import taken
from launch.job import Job
from launch.profile import from_json
from launch.slurm import clean_environment
from launch.standing import standings

POLL_SECONDS = 0.1
_PDEATHSIG = 1  # of <linux/prctl.h>
_LIBC = ctypes.CDLL(None)


def supervisor_command(job: Job, index: int) -> tuple[list[str], dict[str, str]]:
    """The argv and the environment of an item's supervisor, which runs from the job's snapshot."""
    profile = from_json(job.profile)
    item = ["--item", str(index)] if job.array else []
    command = [profile.interpreters(sys.executable)[1], "-m", "launch.supervise", job.directory, *item]
    return command, {**clean_environment(), **profile.environment, "PYTHONPATH": job.code, "PYTHONSAFEPATH": "1"}


def run_items(job: Job, items: Sequence[int], *, at_once: int = 1) -> int:
    """Run the items' supervisors, ``at_once`` at a time, to their ends: 0, or the exit code of the first that failed.

    An item that is under way or over when its turn comes, by another command, is left out.
    SIGINT and SIGTERM are passed on to those that run, and no more are started; if this process is killed, they save and end.
    """
    waiting, worst, tied = list(items), 0, _Tied(os.getpid())
    running: dict[int, subprocess.Popen[bytes]] = {}
    with _passed_on(running) as ending:
        while running or (waiting and not ending):
            while waiting and len(running) < max(at_once, 1) and not ending:
                index = waiting.pop(0)
                if (now := standings(job, ask=False)[index]).kind != "idle":
                    print(f"{job.items[index].name}: left out: {now.where or now.kind}", flush=True)
                    continue
                command, environment = supervisor_command(job, index)
                running[index] = subprocess.Popen(
                    command, cwd=job.working_directory, env=environment, start_new_session=True, preexec_fn=tied
                )
            for index, process in list(running.items()):
                if process.poll() is not None:
                    del running[index]
                    worst = worst or process.returncode
                    _tell(job, index, process.returncode, len(waiting) + len(running))
            time.sleep(POLL_SECONDS)
    return worst if worst >= 0 else 128 - worst


class _Tied:
    """What a supervisor's process does between fork and exec: ask for SIGTERM at its parent's death."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def __call__(self) -> None:
        _LIBC.prctl(*map(ctypes.c_ulong, (_PDEATHSIG, signal.SIGTERM, 0, 0, 0)))
        if os.getppid() != self._parent:
            os._exit(1)


def _tell(job: Job, index: int, code: int, left: int) -> None:
    """A line an item's end."""
    if job.array:
        print(f"{job.items[index].name}: {'ended well' if code == 0 else f'ended with {code}'}; {left} to go", flush=True)


@contextmanager
def _passed_on(running: dict[int, subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """The signals to end that came, each passed on to the supervisors, which have sessions of their own."""
    came: list[int] = []

    def take(number: int, _: FrameType | None) -> None:
        came.append(number)
        for process in running.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    with taken((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), take):
        yield came
