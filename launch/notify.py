"""launch: tells a command of the user's what happens to a run (the profile's ``notify``): a message to a chat, a page, a line in a file.

A command is started and not waited for: a chat that does not answer must not keep a run that has seconds to save. Standard library alone.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

SECONDS = 30.0  # for a command, from its start; then it is ended


@dataclass
class _Hook:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started: float  # monotonic


class Notifier:
    """Starts the profile's command for each event, and says later which of them failed."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """``settings``: the profile's ``notify``."""
        self._command: str | None = settings.get("command")
        self._events = tuple(settings.get("events") or ())
        self._hooks: list[_Hook] = []

    def send(self, event: str, facts: Mapping[str, Any]) -> str | None:
        """Start the command, if it is to know of such events, with {"event", "time", **facts} as JSON on its input. Why it cannot."""
        if not self._command or event not in self._events:
            return None
        text = json.dumps({"event": event, "time": time.time(), **facts}) + "\n"
        try:
            with tempfile.TemporaryFile() as given:
                given.write(text.encode())
                given.seek(0)
                output = tempfile.TemporaryFile()  # noqa: SIM115
                command = ["sh", "-c", self._command]
                process = subprocess.Popen(command, stdin=given, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            return f"notify.command cannot be started: {error}"
        self._hooks.append(_Hook(process, output, time.monotonic()))
        return None

    def troubles(self, wait_seconds: float = 0.0) -> Iterator[str]:
        """Why commands failed that are over, or by then will be; those that take too long are ended."""
        until = time.monotonic() + wait_seconds
        while self._hooks:
            for hook in list(self._hooks):
                late = hook.process.poll() is None and time.monotonic() - hook.started > SECONDS
                if late:
                    hook.process.kill()
                    hook.process.wait()
                if hook.process.returncode is not None:
                    self._hooks.remove(hook)
                    yield from self._trouble(hook, late=late)
            if time.monotonic() >= until:
                break
            time.sleep(0.05)

    def _trouble(self, hook: _Hook, *, late: bool) -> Iterator[str]:
        with hook.output as output:
            output.seek(0)
            said = output.read().decode(errors="replace").strip().splitlines()
        if late:
            yield f"notify.command did not end within {SECONDS:g} s"
        elif hook.process.returncode:
            yield f"notify.command ended with {hook.process.returncode}: {said[-1] if said else 'no word'}"
