"""Requests, and the command line as a person calls it, for tests whose working directory is the fixture `here`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launch.cluster.profile import load_profile
from launch.job import Job, launch_folder, write_json
from launch.job.request import Request
from launch.job.snapshot import ROOT
from launch.verbs.submit import prepare

DEMO = str(ROOT / "configs" / "run" / "demo.yaml")
LOCAL = "scheduler: local\nnodes: {gpus: 0, cpus: 1, processes: 2}\nhealth: {check: false}\n"
SLURM = "scheduler: slurm\nnodes: {gpus: 2, cpus: 2}\nslurm: {partition: main, time: 1-12:00:00, exclude: [n9]}\n"


def run(*words: str, update: bool = False, directory: str | None = None, profile: str = "local.yaml") -> Request:
    return Request(words, False, load_profile(profile), profile, update=update, directory=directory)


def command(
    *words: str, tasks: int | None = None, update: bool = False, directory: str | None = None, profile: str = "local.yaml"
) -> Request:
    return Request(words, True, load_profile(profile), profile, tasks=tasks, update=update, directory=directory)


def launch(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The command line, as a person calls it, where no Slurm is."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/nowhere"}
    done = subprocess.run([sys.executable, "-m", "launch", *words], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    return done


def begin(request: Request) -> Job:
    """Prepare a job, and let its items have been started."""
    job = prepare(request)
    for item in job.items:
        (Path(item.directory) / "attempts" / "0001").mkdir(parents=True, exist_ok=True)
    return job


def finish(job: Job, *items: int) -> None:
    """As a supervisor does."""
    for index in items:
        write_json(launch_folder(Path(job.items[index].directory)) / "state.json", {"format": 1, "state": "finished"})


def wait_for(met: Callable[[], object], seconds: float = 60.0) -> None:
    """Poll until ``met()``."""
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.05)
