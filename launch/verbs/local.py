"""``local``: run training, or another command, on this machine.

Restarts, directory and snapshot are as for Slurm jobs.

    local CONFIG.yaml [section.key=value ...] --processes 2
    local --tasks 4 --at-once 2 -- data_prep run --out DIR

Rank 0's output is printed. Ctrl-C (or SIGTERM) saves a checkpoint and exits with 0; a second one
ends at once. The same command continues from the checkpoint. A crash or a hang restarts the run,
until it fails too often without progress.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from fem_common.errors import UserError
from fem_common.signals import taken
from launch.cluster.profile import SHIPPED, from_json
from launch.cluster.slurm import clean_environment
from launch.job import Job
from launch.job.item_state import counted, standings
from launch.node import hardware
from launch.node.rank import die_with
from launch.verbs import options
from launch.verbs.submit import prepare, request_of

POLL_SECONDS = 0.1


def supervisor_command(job: Job, index: int) -> tuple[list[str], dict[str, str]]:
    """Return (argv, environment) of an item's supervisor, which runs from the job's snapshot.

    index: index of the item.
    """
    profile = from_json(job.profile)
    item = ["--item", str(index)] if job.array else []
    command = [
        profile.interpreters(sys.executable)[1],
        "-m",
        "launch.supervise",
        job.directory,
        *item,
    ]
    return command, {
        **clean_environment(),
        **profile.environment,
        "PYTHONPATH": job.code,
        "PYTHONSAFEPATH": "1",
    }


def run_items(job: Job, items: Sequence[int], *, at_once: int = 1) -> int:
    """Run the supervisors of the items, at most ``at_once`` at a time.

    Return 0, or the exit code of the first supervisor that failed. An item is left out if it is
    already active or finished at its turn. SIGINT and SIGTERM are passed on to the running
    supervisors, and no further ones are started. If this process is killed, the supervisors save
    and end.
    """
    waiting = list(items)
    worst = 0
    tied = functools.partial(die_with, os.getpid(), signal.SIGTERM)
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
                    command,
                    cwd=job.working_directory,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=tied,
                )
            for index, process in list(running.items()):
                if process.poll() is not None:
                    del running[index]
                    worst = worst or process.returncode
                    if job.array:
                        how = (
                            "ended well"
                            if process.returncode == 0
                            else f"ended with {process.returncode}"
                        )
                        print(
                            f"{job.items[index].name}: {how}; {len(waiting) + len(running)} to go",
                            flush=True,
                        )
            time.sleep(POLL_SECONDS)
    return worst if worst >= 0 else 128 - worst


@contextmanager
def _passed_on(running: dict[int, subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Pass signals to end on to the running supervisors, and yield the list of received signals.

    The supervisors have separate sessions, so a terminal's Ctrl-C does not reach them directly.
    """
    came: list[int] = []

    def take(number: int, _: FrameType | None) -> None:
        came.append(number)
        for process in running.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    with taken((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), take):
        yield came


SMI_SECONDS = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(rest=[])  # the words after --
    options.add(parser, "words", *options.PLACE, "--tasks", "--at-once")
    options.add(parser, "--cluster", required=False)


def main(arguments: argparse.Namespace) -> int:
    """Prepare the job, run it on this machine, and return its supervisor's exit code.

    A job of one item does not return: the supervisor replaces this process.

    Raises:
        UserError: the profile is for Slurm, the job already runs, or its settings differ from those
        it began with.
    """
    arguments.cluster = arguments.cluster or default_profile()
    request = request_of(arguments)
    if request.profile.scheduler != "local":
        raise UserError(
            f"{request.profile_path} is a profile for Slurm; to use it: python -m launch submit"
        )
    if request.nodes != 1:
        raise UserError(
            f"--nodes {request.nodes}: this is one machine; --processes sets the number of ranks"
        )
    job = prepare(request, data=True)
    known = standings(job)
    if not any(standing.kind == "idle" for standing in known):
        print(
            f"{job.name}: nothing to do: {counted(known)} ({job.directory}); to run it again, or "
            "with other settings: --update"
        )
        return 0
    if job.array:
        return run_items(
            job,
            [standing.index for standing in known if standing.kind != "finished"],
            at_once=request.at_once or 1,
        )
    return _become_supervisor(job)


def _become_supervisor(job: Job) -> int:
    """Replace this process by the job's supervisor, which then receives this process's signals."""
    command, environment = supervisor_command(job, 0)
    print(f"{job.name}: {job.directory}", flush=True)
    sys.stderr.flush()
    os.chdir(job.working_directory)
    os.execvpe(command[0], [*command, "--show"], environment)


def default_profile() -> str:
    """Return the path of the shipped profile for this machine, with GPUs if nvidia-smi lists any.

    Raises:
        UserError: no profiles are shipped.
    """
    path = SHIPPED / ("local_gpu.yaml" if hardware.listed(SMI_SECONDS) else "local_cpu.yaml")
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; give a profile: --cluster PROFILE.yaml with scheduler: local"
        )
    return str(path)
