"""Simulated files of jobs: records and logs of ranks, states of supervisors, for tests of their
readers.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from launch.cluster.profile import load_profile
from launch.job import Item, Job, append_json, launch_folder, rank_log, rank_record, write_json
from launch.job.request import Request
from launch.job.snapshot import ROOT
from launch.verbs.submit import prepare

RESET = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by"
    " peer [127.0.0.1]:31337"
)


def record(attempt: Path, rank: int, at: float, **values: Any) -> None:
    """Write the record of a rank that ended at the time ``at``."""
    known = {
        "rank": rank,
        "host": f"node{rank // 2}",
        "started": 1000.0,
        "ended": at,
        "exit": 1,
        "signal": None,
        "told": {},
        "error": None,
    }
    write_json(
        rank_record(attempt, rank),
        {**known, "error_time": at if values.get("error") else None, "traceback": None, **values},
    )


def trace(error: str, prefix: str = "") -> str:
    """Return a traceback in Python's format."""
    lines = f'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n{error}'
    return "\n".join(f"{prefix}{line}" for line in lines.splitlines())


def make_job(directory: Path, scheduler: str = "slurm", items: int = 1, kind: str = "run") -> Job:
    """Create the directory of a job, submitted as job 7 and again as job 12 on Slurm."""
    array, name = items > 1, directory.name
    folders = (
        [directory / "tasks" / f"{index:04}" for index in range(items)] if array else [directory]
    )
    made = tuple(
        Item(str(folder), ("-m", "pretrain"), f"{name}[{index}]" if array else name)
        for index, folder in enumerate(folders)
    )
    place = (str(directory), str(directory), str(directory / "launch" / "code"), sys.executable)
    job = Job(name, kind, *place, 1, 2, True, made, {"scheduler": scheduler}, "x.yaml", array)
    job.save()
    for job_id in ("7", "12") if scheduler == "slurm" else ():
        append_json(
            launch_folder(directory) / "submissions.jsonl", {"time": 1.7e9, "job_id": job_id}
        )
    return job


def write_state(job: Job, state: str, index: int = 0, **values: Any) -> None:
    """Write a supervisor's state.json for this process and the current time."""
    known = {
        "format": 1,
        "state": state,
        "attempt": 2,
        "failures": 0,
        "job_id": None,
        "message": None,
        "time": time.time(),
    }
    path = job.items[index].launch / "state.json"
    write_json(path, {**known, "pid": os.getpid(), "host": socket.gethostname(), **values})


def write_log(path: Path, *lines: tuple[float, str]) -> Path:
    """Write or extend a log with time stamps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{at:.3f} {text}\n" for at, text in lines)
    return path


def make_attempt(item: Path, number: int, started: float, **values: Any) -> Path:
    """Create an attempt with two ranks that wrote logs."""
    attempt = item / "attempts" / f"{number:04}"
    known = {"attempt": number, "started": started, "ended": None, "outcome": None}
    write_json(attempt / "attempt.json", {**known, "failure": None, **values})
    for rank in range(2):
        write_log(
            rank_log(attempt, rank),
            *((started + step + rank / 10, f"attempt {number} step {step}") for step in range(3)),
        )
    return attempt


DEMO = str(ROOT / "configs" / "run" / "demo.yaml")
LOCAL = "scheduler: local\nnodes: {gpus: 0, cpus: 1, processes: 2}\nhealth: {check: false}\n"
SLURM = (
    "scheduler: slurm\nnodes: {gpus: 2, cpus: 2}\nslurm: {partition: main, time: 1-12:00:00,"
    " exclude: [n9]}\n"
)


def run(*words: str, profile: str = "local.yaml", **options: Any) -> Request:
    """Return the request of a command line that starts a run."""
    return Request(words, False, load_profile(profile), profile, **options)


def command(*words: str, profile: str = "local.yaml", **options: Any) -> Request:
    """Return the request of a command line with a command after --."""
    return Request(words, True, load_profile(profile), profile, **options)


def launch(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does on a machine without Slurm."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:/nowhere",
    }
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == code, done.stderr
    return done


def begin(request: Request) -> Job:
    """Prepare a job and mark its items as started."""
    job = prepare(request)
    for item in job.items:
        (item.path / "attempts" / "0001").mkdir(parents=True, exist_ok=True)
    return job


def finish(job: Job, *items: int) -> None:
    """Mark items as finished, as a supervisor does."""
    for index in items:
        write_json(
            job.items[index].launch / "state.json",
            {"format": 1, "state": "finished"},
        )


def config_of(directory: str | Path) -> dict[str, dict[str, object]]:
    """Return the configuration with which a run was submitted."""
    values: dict[str, dict[str, object]] = yaml.safe_load(
        (launch_folder(Path(directory)) / "config.yaml").read_text()
    )
    return values
