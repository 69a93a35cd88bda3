"""Jobs made by hand for tests of the supervisor, and their supervisors as processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch.job import Item, Job, read_json

ROOT = Path(__file__).resolve().parent.parent.parent
QUICK = {"back_off_seconds": 0.05, "back_off_max_seconds": 0.2}


class Case:
    """A job of one item that runs `tests.launch.stand_in`, or another program, in a directory."""

    def __init__(self, directory: Path, script: list[dict[str, Any]] | None = None, **changes: Any) -> None:
        """``changes``: of the job's fields; ``restarts``, ``watchdog``, ``health``, ... of its profile; ``arguments`` of its item."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "script.json").write_text(json.dumps(script or [{}]))
        sections = {name: changes.pop(name, {}) for name in ("watchdog", "notify", "environment")}
        profile = {"scheduler": "local", "restarts": {**QUICK, **changes.pop("restarts", {})}, "health": {"check": False}, **sections}
        profile["health"] |= changes.pop("health", {})
        arguments = changes.pop("arguments", ("-m", "tests.launch.stand_in", str(directory)))
        fields: dict[str, Any] = {
            "name": "case",
            "kind": "run",
            "directory": str(directory),
            "working_directory": str(directory),
            "code": str(ROOT),
            "python": sys.executable,
            "nodes": 1,
            "processes_per_node": 1,
            "torchrun": False,
            "items": (Item(str(directory), tuple(arguments), "case"),),
            "profile": profile,
            "profile_path": "",
            **changes,
        }
        self.job = Job(**fields)
        self.job.save()

    def start(self, *options: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the supervisor."""
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", **(environment or {})}
        command = [sys.executable, "-m", "launch.supervise", str(self.directory), *options]
        return subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)

    def run(self, *options: str, environment: Mapping[str, str] | None = None, seconds: float = 120.0) -> tuple[int, str]:
        """Run the supervisor to its end: its exit code and what it said."""
        with self.start(*options, environment=environment) as supervisor:
            try:
                said, _ = supervisor.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                supervisor.kill()
                raise
        return supervisor.returncode, said

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """attempt.json of each attempt."""
        return [read_json(path) for path in sorted(self.directory.glob("attempts/*/attempt.json"))]

    @property
    def outcomes(self) -> list[str]:
        """How the attempts ended."""
        return [attempt["outcome"] for attempt in self.attempts]

    @property
    def state(self) -> dict[str, Any]:
        """state.json."""
        return read_json(self.directory / "launch" / "state.json") or {}

    def pids(self) -> dict[int, int]:
        """The ranks' programs of the last attempt, by rank."""
        last = max(self.directory.glob("attempts/*"), default=self.directory)
        records = (read_json(path) for path in sorted(last.glob("ranks/*.json")))
        return {record["rank"]: record["child"] for record in records if record and record["ended"] is None and record["child"]}


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value; an AssertionError after so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = what()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError("it did not come")


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM, seconds: float = 60.0) -> tuple[int, str]:
    """Signal a supervisor and wait for its end."""
    process.send_signal(number)
    said, _ = process.communicate(timeout=seconds)
    return process.returncode, said


def clean_up(folder: Path) -> None:
    """Kill what a failed test left running: processes with the test's folder in their command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
