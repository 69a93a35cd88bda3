"""``local``: a training run, or any command of ours, on this machine, with the restarts, directory and snapshot that Slurm jobs have.

    local CONFIG.yaml [section.key=value ...] --processes 2
    local --tasks 4 --at-once 2 -- data_prep run --out DIR

Rank 0's lines are shown as they come. Ctrl-C (or SIGTERM) saves a checkpoint and ends with 0, a second one ends at once; the same command
goes on from there. A crash or a hang restarts the run, until it fails without progress too often.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

from fem_common.errors import UserError
from launch.job import Job
from launch.profile import SHIPPED
from launch.side_by_side import run_items, supervisor_command
from launch.standing import counted, standings
from launch.submit import add_place_arguments, prepare, request_of

SMI_SECONDS = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's command line."""
    parser.add_argument("words", nargs="*", metavar="CONFIG.yaml section.key=value", help="a run and settings that replace the file's")
    add_place_arguments(parser, cluster_required=False)
    parser.add_argument("--tasks", type=int, metavar="N", help="of a command: so many tasks, as of a job array")
    parser.add_argument("--at-once", type=int, default=1, metavar="K", help="of --tasks: so many at a time (default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Prepare the job and run it here: its supervisor's exit code. Does not return for a job of one item: the supervisor takes the process.

    Raises:
        UserError: the profile is for Slurm, the job is at work already, or its settings differ from those it began with.
    """
    arguments.cluster = arguments.cluster or default_profile()
    request = request_of(arguments)
    if request.profile.scheduler != "local":
        raise UserError(f"{arguments.cluster} is a profile of Slurm; to run there: python -m launch submit")
    if request.nodes != 1:
        raise UserError(f"--nodes {request.nodes}: this is one machine; --processes says how many ranks")
    job = prepare(request, data=True)
    known = standings(job)
    ready = [standing.index for standing in known if standing.kind == "idle"]
    if not ready:
        print(f"{job.name}: nothing to do: {counted(known)} ({job.directory}); to do it anew, or with other settings: --update")
        return 0
    if job.array:
        for standing in known:
            if standing.kind in ("active", "stopped"):
                told = standing.where if standing.kind == "active" else standing.message
                print(f"{job.items[standing.index].name}: left out: {told}", flush=True)
        return run_items(job, ready, at_once=arguments.at_once)
    return _become_supervisor(job)


def _become_supervisor(job: Job) -> int:
    """Replace this process by the job's supervisor, which runs from the snapshot; signals and exit code are then its own."""
    command, environment = supervisor_command(job, 0)
    print(f"{job.name}: {job.directory}", flush=True)
    sys.stderr.flush()
    os.chdir(job.working_directory)
    os.execvpe(command[0], [*command, "--show"], environment)


def default_profile() -> str:
    """The shipped profile for this machine: with its GPUs, where nvidia-smi lists some. Raises UserError where profiles are not shipped."""
    path = SHIPPED / ("local_gpu.yaml" if _has_gpus() else "local_cpu.yaml")
    if not path.is_file():
        raise UserError(f"{path} is not there; give a profile: --cluster PROFILE.yaml with scheduler: local")
    return str(path)


def _has_gpus() -> bool:
    """Whether nvidia-smi lists a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listed = subprocess.run([program, "--list-gpus"], capture_output=True, text=True, timeout=SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU " in listed.stdout
