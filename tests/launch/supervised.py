"""Jobs for tests of the supervisor, and their supervisors as processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.job import Item, Job, read_json

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, dict[str, Any]] = {
    "restarts": {"back_off_seconds": 0.05, "back_off_max_seconds": 0.2},
    "health": {"check": False},
}
PLAIN = Job("case", "run", "", "", str(ROOT), sys.executable, 1, 1, False, (), {}, "")


class Attempts:
    """Files of an item's attempts."""

    directory: Path

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Content of attempt.json for each attempt."""
        return [read_json(path) for path in sorted(self.directory.glob("attempts/*/attempt.json"))]

    @property
    def outcomes(self) -> list[str]:
        """Outcomes of the attempts."""
        return [attempt["outcome"] for attempt in self.attempts]


class Case(Attempts):
    """A job with one item that runs `tests.launch.stand_in`, or another program, in a directory."""

    def __init__(
        self, directory: Path, script: list[dict[str, Any]] | None = None, **changes: Any
    ) -> None:
        """Create the job. ``changes``: fields of the job; ``restarts``, ``watchdog``, ... of its
        profile; ``arguments``, ``array`` of its item.
        """
        self.directory, place = directory, str(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "script.json").write_text(json.dumps(script or [{}]))
        names = [
            name
            for name in changes
            if name in ("restarts", "watchdog", "health", "notify", "environment")
        ]
        sections = {name: {**BASE.get(name, {}), **changes.pop(name)} for name in names}
        arguments = tuple(changes.pop("arguments", ("-m", "tests.launch.stand_in", place)))
        items = (Item(place, arguments, "case", changes.pop("array", {})),)
        profile = {"scheduler": "local", **BASE, **sections}
        self.job = replace(
            PLAIN, directory=place, working_directory=place, items=items, profile=profile, **changes
        )
        self.job.save()

    def start(
        self, *options: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start the supervisor."""
        environ = {**os.environ, "PYTHONSAFEPATH": "1", **(environment or {})}
        return start("launch.supervise", str(self.directory), *options, env=environ)

    def run(self, *options: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Run the supervisor to its end; return its exit code and output."""
        return end(self.start(*options, environment=environment))

    @property
    def state(self) -> dict[str, Any]:
        """Content of state.json."""
        return read_json(self.directory / "launch" / "state.json") or {}

    def ready(self, attempt: int = 1) -> int:
        """Wait until the stand-in of an attempt has finished its steps; return the process id of
        its rank 0.
        """
        wait_for((self.directory / f"ready-{attempt}").exists)
        wait_for(lambda: self.state.get("state") in ("running", "saving"))
        record = wait_for(
            lambda: read_json(self.directory / f"attempts/{attempt:04}/ranks/rank_00000.json")
        )
        return int(record["child"])


def start(
    *words: str, cwd: Path | None = None, env: Mapping[str, str] = os.environ
) -> subprocess.Popen[str]:
    """Start ``python -m WORDS`` in a separate session, with its output and errors in one pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=cwd,
        env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for(what: Callable[[], Any], seconds: float = 180.0) -> Any:
    """Return the first true value of ``what``; raise AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)
    return value


def end(
    process: subprocess.Popen[str], number: int | None = None, seconds: float = 300.0
) -> tuple[int, str]:
    """Send a signal to a process, if given, and wait for its end; return its exit code and
    output.
    """
    if number is not None:
        process.send_signal(number)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, output


def clean_up(folder: Path) -> None:
    """Kill processes of a failed test: those with the test's folder in their command line."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process may just have ended
            if os.fsencode(folder) in Path("/proc", pid, "cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


def alive(pid: int) -> bool:
    """Return True if a process runs and is not a zombie."""
    return state_of(pid) not in ("Z", None)


def state_of(pid: int) -> str | None:
    """Return the kernel's letter for a process state: S sleeping, T stopped, Z zombie; None if it
    does not exist.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
