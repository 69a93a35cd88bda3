"""The model's answers to a task's requests, kept as they come, so that an interrupted task goes on where it was. Files and JSON; no model.

One file a model and task: a line that says what was asked of whom, then a line an answer. A line that a killed process left unfinished is
dropped. The file goes when the task's result is written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from fem_common.errors import InUse


class NotANumber(ValueError):
    """The model gave NaN as the log-likelihood of a text: its weights are broken, and no score of it means anything."""


class Answers:
    """Answers by request, in ``path``. identity: of the model, the task and the settings; a file of another identity is begun anew.

    truncated: keys of the requests whose beginning did not fit into the context. told: called after each answer.

    Raises InUse on entering where another process writes the file.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path, self.identity = path, identity
        self.known: dict[str, Any] = {}
        self.truncated: set[str] = set()
        self.told: Callable[[], None] = lambda: None
        self._file: BinaryIO

    def __enter__(self) -> Answers:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise InUse(f"another process is evaluating {self.path.stem} of {self.path.parent.parent.name}: wait for it") from None
        except OSError:
            pass  # a file system without locks: starting the same evaluation twice is the user's to leave
        self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def _read(self) -> None:
        """Takes over what an earlier process left of the same identity."""
        self._file.seek(0)
        lines = self._file.read().split(b"\n")[:-1]
        if not lines or lines[0] != self._header():
            self._file.truncate(0)
            self._write(self._header())
            return
        for line in lines[1:]:
            key, answer, truncated = json.loads(line)
            self.known[key] = tuple(answer) if isinstance(answer, list) else answer
            if truncated:
                self.truncated.add(key)
        self._file.truncate(sum(len(line) + 1 for line in lines))

    def _header(self) -> bytes:
        return json.dumps(self.identity, sort_keys=True).encode()

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()

    def add_partial(self, kind: str, arguments: Any, answer: Any) -> None:
        """Keeps an answer; the harness's models call this as each comes (the name is the harness's).

        Raises:
            NotANumber: it is no number.
        """
        value = answer[0] if isinstance(answer, tuple) else answer
        if value != value:
            raise NotANumber("a log-likelihood is NaN: the model's weights are broken")
        key = request_key(kind, arguments)
        if not sampled(arguments):
            self.known[key] = answer
            self._write(json.dumps([key, answer, key in self.truncated]).encode())
        self.told()

    def remove(self) -> None:
        """All is in the result."""
        os.unlink(self.path)


def request_key(kind: str, arguments: Any) -> str:
    """One request among a task's: its kind and what is asked."""
    return hashlib.sha256(json.dumps([kind, *arguments], sort_keys=True).encode()).hexdigest()


def sampled(arguments: Any) -> bool:
    """Whether a request asks for a random answer, which is drawn anew each time."""
    return len(arguments) > 1 and isinstance(arguments[1], dict) and bool(arguments[1].get("do_sample"))
