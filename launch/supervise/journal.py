"""launch: what a supervisor tells: lines, launch/supervisor.log, launch/state.json, the user's hook. Standard library alone."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from launch.job import Item, Job
from launch.layout import launch_folder, write_json
from launch.notify import SECONDS, Notifier


class Journal:
    """Tells how one item stands. A disk or a terminal that refuses does not end the run."""

    def __init__(self, job: Job, item: Item, job_id: str | None) -> None:
        self.job, self.item, self.job_id = job, item, job_id
        self.folder = launch_folder(Path(item.directory))
        self.attempt = self.failures = 0
        self.nodes: tuple[str, ...] = ()
        self._notifier = Notifier(job.profile.get("notify") or {})

    def say(self, text: str) -> None:
        """A line for people, and into supervisor.log as "<unix time> <text>"."""
        now, line = time.time(), " ".join(text.split())
        with contextlib.suppress(OSError, ValueError):
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))} launch: {line}", flush=True)
        with contextlib.suppress(OSError), (self.folder / "supervisor.log").open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{now:.3f} {line}\n")

    def state(self, state: str, message: str | None = None) -> None:
        """Write state.json."""
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
            self.say(f"state.json cannot be written: {error}")

    def event(self, event: str, message: str, **facts: Any) -> None:
        """Tell the profile's hook, if it is to know of such events."""
        known = {"name": self.item.name, "directory": self.item.directory, "job_id": self.job_id, "attempt": self.attempt}
        self.settle(0.0)
        trouble = self._notifier.send(event, {**known, "nodes": list(self.nodes), "message": message, **facts})
        if trouble:
            self.say(trouble)

    def settle(self, seconds: float = SECONDS) -> None:
        """Give the hook so long to end what it does, and tell what failed of it."""
        for trouble in self._notifier.troubles(seconds):
            self.say(trouble)
