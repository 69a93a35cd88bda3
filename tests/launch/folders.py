"""What jobs leave on disk, as they would: ranks' records and logs, supervisors' words, for tests of those who read them."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from launch.job import Item, Job, append_json, launch_folder, rank_log, rank_record, write_json

RESET = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31337"


def record(attempt: Path, rank: int, at: float, **values: Any) -> None:
    """A rank's record that ended at a time."""
    known = {"rank": rank, "host": f"node{rank // 2}", "started": 1000.0, "ended": at, "exit": 1, "signal": None, "told": {}, "error": None}
    write_json(rank_record(attempt, rank), {**known, "error_time": at if values.get("error") else None, "traceback": None, **values})


def trace(error: str, prefix: str = "") -> str:
    """A traceback as Python writes it."""
    return "\n".join(f"{prefix}{line}" for line in ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    g()", error])


def make_job(directory: Path, scheduler: str = "slurm", items: int = 1, kind: str = "run") -> Job:
    """A job's directory, submitted as job 7 and again as job 12 where there is a Slurm."""
    array, name = items > 1, directory.name
    folders = [directory / "tasks" / f"{index:04}" for index in range(items)] if array else [directory]
    made = tuple(Item(str(folder), ("-m", "pretrain"), f"{name}[{index}]" if array else name) for index, folder in enumerate(folders))
    place = (str(directory), str(directory), str(directory / "launch" / "code"), sys.executable)
    job = Job(name, kind, *place, 1, 2, True, made, {"scheduler": scheduler}, "x.yaml", array)
    job.save()
    for job_id in ("7", "12") if scheduler == "slurm" else ():
        append_json(launch_folder(directory) / "submissions.jsonl", {"time": 1.7e9, "job_id": job_id})
    return job


def says(job: Job, state: str, index: int = 0, **values: Any) -> None:
    """A supervisor's state.json: of this process, now."""
    known = {"format": 1, "state": state, "attempt": 2, "failures": 0, "job_id": None, "message": None, "time": time.time()}
    path = launch_folder(Path(job.items[index].directory)) / "state.json"
    write_json(path, {**known, "pid": os.getpid(), "host": socket.gethostname(), **values})


def write_log(path: Path, *lines: tuple[float, str]) -> Path:
    """A stamped log, or more of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{at:.3f} {text}\n" for at, text in lines)
    return path


def make_attempt(item: Path, number: int, started: float, **values: Any) -> Path:
    """An attempt with two ranks that said something."""
    attempt = item / "attempts" / f"{number:04}"
    write_json(attempt / "attempt.json", {"attempt": number, "started": started, "ended": None, "outcome": None, "failure": None, **values})
    for rank in range(2):
        write_log(rank_log(attempt, rank), *((started + step + rank / 10, f"attempt {number} step {step}") for step in range(3)))
    return attempt
