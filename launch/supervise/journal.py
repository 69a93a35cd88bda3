"""Write a supervisor's output: its log, launch/state.json, the user's hook, and the cordon file.

The hook is the profile's notify.command. The cordon file lists the nodes that no run may use.
Each line is a JSON object {"node", "time", "reason", "run", "until"}. "run" is the item's
directory. "until" is a unix time, or null for a permanent entry. Users may add and delete lines.
Uses only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from launch.job import Item, Job, append_json, read_json_lines, write_json


def cordon_file(profile: Mapping[str, Any], working_directory: str) -> Path:
    """Return the path of the cordon file: the profile's paths.cordon, or the default.

    The default is runs/cordon.jsonl in the working directory of the submission.
    """
    return Path(
        (profile.get("paths") or {}).get("cordon") or f"{working_directory}/runs/cordon.jsonl"
    )


def cordoned(path: Path | str, now: float | None = None) -> dict[str, str]:
    """Return node -> reason for the nodes whose entry in the cordon file is in force.

    now: unix time; None: the present time.

    The last entry of a node counts. Invalid entries are skipped, because a user's mistake must not
    stop a run. The result is {} if the file is missing.

    Raises:
        OSError: the file exists and cannot be read.
    """
    now = time.time() if now is None else now
    entries = [
        line
        for line in read_json_lines(Path(path))
        if isinstance(line.get("node"), str) and line["node"]
    ]
    held = [
        line
        for line in entries
        if not isinstance(line.get("until"), int | float) or line["until"] > now
    ]
    return {line["node"]: str(line.get("reason") or "no reason given") for line in held}


def cordon(
    path: Path | str, nodes: Iterable[str], reason: str, run: Path | str, until: float | None = None
) -> list[str]:
    """Add an entry for each node that has none in force, and return the added nodes.

    until: unix time at which the entries end; None: permanent.

    Raises:
        OSError: the file cannot be read or written.
    """
    already = cordoned(path)
    added = [node for node in dict.fromkeys(nodes) if node not in already]
    for node in added:
        line = {
            "node": node,
            "time": round(time.time(), 3),
            "reason": reason,
            "run": str(run),
            "until": until,
        }
        append_json(Path(path), line)
    return added


SECONDS = 30.0  # time limit of a command; then it is killed


class Notifier:
    """Starts the profile's command for each event, and reports later which commands failed.

    It uses no threads, because the supervisor forks.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Read the profile's ``notify`` settings."""
        self._command: str | None = settings.get("command")
        self._events = tuple(settings.get("events") or ())
        # Each command with its output and its latest end (monotonic).
        self._hooks: list[tuple[subprocess.Popen[bytes], IO[bytes], float]] = []

    def send(self, event: str, facts: Mapping[str, Any]) -> str | None:
        """Start the command if the settings name this event.

        The command gets {"event", "time", **facts} as JSON on its standard input. Return an error
        text if the command cannot be started, otherwise None.
        """
        if not self._command or event not in self._events:
            return None
        text = json.dumps({"event": event, "time": time.time(), **facts}) + "\n"
        command = ["sh", "-c", self._command]
        try:
            with tempfile.TemporaryFile() as given:
                given.write(text.encode())
                given.seek(0)
                output = tempfile.TemporaryFile()  # noqa: SIM115
                process = subprocess.Popen(
                    command,
                    stdin=given,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            return f"notify.command cannot be started: {error}"
        self._hooks.append((process, output, time.monotonic() + SECONDS))
        return None

    def troubles(self, wait_seconds: float = 0.0) -> Iterator[str]:
        """Yield an error text for each command that has ended with an error.

        Wait up to ``wait_seconds`` for running commands. Kill commands that exceed their time
        limit.
        """
        until = time.monotonic() + wait_seconds
        while self._hooks:
            for process, output, end in list(self._hooks):
                late = process.poll() is None and time.monotonic() > end
                if late:
                    process.kill()
                    process.wait()
                if process.returncode is None:
                    continue
                self._hooks.remove((process, output, end))
                output.seek(0)
                lines = output.read().decode(errors="replace").strip().splitlines() or ["no output"]
                output.close()
                if late:
                    yield f"notify.command did not end within {SECONDS:g} s"
                elif process.returncode:
                    yield f"notify.command ended with {process.returncode}: {lines[-1]}"
            if time.monotonic() >= until:
                break
            time.sleep(0.05)


class Journal:
    """Log and state file of one item.

    A write error of the disk or terminal does not end the run.
    """

    def __init__(self, job: Job, item: Item, job_id: str | None) -> None:
        self.job = job
        self.item = item
        self.job_id = job_id
        self.folder = item.launch
        self.attempt = self.failures = 0
        self.nodes: tuple[str, ...] = ()
        self._notifier = Notifier(job.section("notify"))

    def log(self, text: str) -> None:
        """Print a line, and append it to supervisor.log as "<unix time> <text>"."""
        now, line = time.time(), " ".join(text.split())
        with contextlib.suppress(OSError, ValueError):
            print(
                f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))} launch: {line}",
                flush=True,
            )
        with (
            contextlib.suppress(OSError),
            (self.folder / "supervisor.log").open("a", encoding="utf-8", errors="replace") as file,
        ):
            file.write(f"{now:.3f} {line}\n")

    def state(self, state: str, message: str | None = None) -> None:
        """Write state.json with this state and message."""
        values = {
            "format": 1,
            "state": state,
            "attempt": self.attempt,
            "failures": self.failures,
            "job_id": self.job_id,
            "array_task": self.job.items.index(self.item) if self.job.array else None,
            "nodes": list(self.nodes),
            "message": message,
            "time": time.time(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        try:
            write_json(self.folder / "state.json", values)
        except OSError as error:
            self.log(f"state.json cannot be written: {error}")

    def event(self, event: str, message: str, **facts: Any) -> None:
        """Start the profile's notify command if its settings name this event."""
        known = {
            "name": self.item.name,
            "directory": self.item.directory,
            "job_id": self.job_id,
            "attempt": self.attempt,
        }
        self.settle(0.0)
        trouble = self._notifier.send(
            event, {**known, "nodes": list(self.nodes), "message": message, **facts}
        )
        if trouble:
            self.log(trouble)

    def settle(self, seconds: float = SECONDS) -> None:
        """Wait up to ``seconds`` for the notify commands to end, and log the errors."""
        for trouble in self._notifier.troubles(seconds):
            self.log(trouble)
