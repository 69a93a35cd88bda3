"""Forked workers of ``run`` for tests. A new interpreter would need half a second for imports that
are already done.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from data_prep.encode import workers

INTERPRETERS = ("test_crash.py", "test_workers.py")  # tests of the processes themselves


class Fork:
    """Worker process forked from the test's process, with the part of `subprocess.Popen` that its
    parent uses.
    """

    def __init__(
        self, command: Sequence[str], pass_fds: Sequence[int], env: Mapping[str, str]
    ) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            # The child must not finalize objects of other libraries, whose threads are gone.
            gc.disable()
            first = 3
            for descriptor in (*sorted(pass_fds), os.sysconf("SC_OPEN_MAX")):
                os.closerange(first, descriptor)
                first = descriptor + 1
            os.environ.clear()
            os.environ.update(env)
            workers.work(*command[3:])
        except BaseException as error:
            traceback.print_exception(error)
        finally:
            os._exit(1)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code, or minus the signal number."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
            else:
                time.sleep(0.002)
        return self._code

    def kill(self) -> None:
        """Kill the process."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)


def start(
    command: Sequence[str], *, stdin: int, pass_fds: Sequence[int], env: Mapping[str, str]
) -> Any:
    """Start a worker: a fork if it encodes with libraries of Hugging Face, else a normal process.

    gigatoken requires a normal process because its threads would not exist in a fork.
    """
    if command[-1] in ("hf", "chat"):
        return Fork(command, pass_fds, env)
    return subprocess.Popen(command, stdin=stdin, pass_fds=pass_fds, env=env)


@pytest.fixture(autouse=True)
def forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers of a ``run`` that a test calls in its own process."""
    if request.path.name not in INTERPRETERS:
        stand_in = SimpleNamespace(
            Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
        )
        monkeypatch.setattr(workers, "subprocess", stand_in)
