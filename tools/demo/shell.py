"""Execution of commands in the form in which a user would type them.

The module starts commands, prints their output, and ends those that still run after an error. It
is independent of what the commands do.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from fem_common.errors import Fault
from fem_common.signals import taken

POLL_SECONDS = 0.2
GRACE_SECONDS = 45.0  # torchrun itself gives its workers 30 s


class DemoError(Fault):
    """Failure of a step of the demo; the message is one line."""


def print_now(text: str = "") -> None:
    """Print and flush, so that the lines of the demo and of its commands stay in order."""
    print(text, flush=True)


@dataclass(frozen=True)
class Shell:
    """Runner of commands in the folder ``root``.

    environment: variables that are added to those of this process.
    forked: modules whose commands ``python -m MODULE`` run in processes that are forked from the
    server, instead of in new interpreters.
    """

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    forked: Collection[str] = ()

    def serve(self, preloaded: str) -> None:
        """Start the server for the commands of ``forked``, a process that imports ``preloaded``.

        It ends with this process. Without this call, the first such command starts it, without
        imports.
        """
        os.environ.update(self.environment)
        _CONTEXT.set_forkserver_preload([preloaded])
        with taken([signal.SIGINT], signal.SIG_IGN):  # a terminal's Ctrl-C is for this process
            forkserver.ensure_running()

    @property
    def python(self) -> str:
        """Path of this interpreter, in the form in which a user in ``root`` would type it.

        Symbolic links are not resolved, since a virtual environment's interpreter is one.
        """
        return self.shown(Path(sys.executable))

    @property
    def torchrun(self) -> list[str]:
        """Command of torchrun as a list, with a free port and no host name lookup."""
        return [
            *(self.python, "-m", "torch.distributed.run"),
            *("--standalone", "--local-addr", "127.0.0.1"),
        ]

    def shown(self, path: Path) -> str:
        """Return ``path`` relative to ``root``, or the full path if it is outside ``root``."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def together(self, commands: dict[str, list[str]], limit: float) -> None:
        """Run several commands at once, each on its own core, in at most ``limit`` seconds.

        commands: description for error messages -> command. Their outputs are printed one after the
        other, in this order.

        Raises:
            DemoError: a command failed (see `run`). It is raised for the first one, after all have
            ended.
        """
        outputs: dict[str, list[str]] = {what: [] for what in commands}
        with ThreadPoolExecutor(len(commands)) as pool:
            ends = [
                pool.submit(self.run, command, what, limit, output=outputs[what].append)
                for what, command in commands.items()
            ]
        for end, lines in zip(ends, outputs.values(), strict=True):
            print_now("\n".join(lines))
            end.result()

    def run(
        self,
        command: Sequence[str],
        what: str,
        limit: float,
        watch: Callable[[int], None] | None = None,
        output: Callable[[str], object] = print_now,
    ) -> None:
        """Print ``$ command``, run it and print its output indented.

        what: description of the command for error messages.
        limit: seconds that the command may take.
        watch: called with the command's process id several times per second.
        output: called with each line.

        Raises:
            DemoError: the command cannot be started, exits with a code other than 0, or takes more
            than ``limit`` seconds.
        """
        output(f"  $ {printed(command)}")
        try:
            process = self._started(command)
        except OSError as error:
            raise DemoError(f"{what}: {command[0]} cannot be started: {error.strerror}") from None
        reader = threading.Thread(target=_show, args=(process, output), daemon=True)
        end = time.monotonic() + limit
        reader.start()
        try:
            while process.poll() is None:
                if time.monotonic() > end:
                    raise DemoError(
                        f"{what}: the command above took more than {limit:.0f} s and was ended"
                    )
                if watch is not None:
                    watch(process.pid)
                time.sleep(POLL_SECONDS)
        finally:
            _end(process)
            reader.join(timeout=5.0)
        if process.returncode:
            raise DemoError(f"{what}: the command above failed: exit code {process.returncode}")

    def _started(self, command: Sequence[str]) -> subprocess.Popen[str] | Forked:
        if [*command[:2]] == [self.python, "-m"] and command[2] in self.forked:
            return Forked(command[2:], self.root)
        return subprocess.Popen(
            command,
            cwd=self.root,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )


class Forked:
    """Command ``python -m MODULE WORDS...`` in a fork of the server, with the interface of Popen.

    words: MODULE WORDS... root: its working directory.
    """

    def __init__(self, words: Sequence[str], root: Path) -> None:
        reader, writer = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_run_module, args=(words, root, writer))
        with _LOCK:
            self._process.start()
        writer.close()
        assert self._process.pid is not None
        self.pid, self.terminate, self.kill = (
            self._process.pid,
            self._process.terminate,
            self._process.kill,
        )
        self.stdout = open(os.dup(reader.fileno()), errors="replace")  # noqa: SIM115
        reader.close()

    def poll(self) -> int | None:
        """Return the exit code, or None while the command runs."""
        with _LOCK:
            return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raise subprocess.TimeoutExpired after ``timeout`` seconds."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code


_CONTEXT = multiprocessing.get_context("forkserver")
_LOCK = threading.Lock()  # multiprocessing polls every process when one is started


def _run_module(words: Sequence[str], root: Path, output: Connection) -> None:
    """Run ``python -m WORDS...`` in this process, as `Shell` runs a command in a new one."""
    os.setsid()
    os.chdir(root)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def printed(command: Sequence[str]) -> str:
    """Return the command as it can be typed into a shell; a plain ``key=value`` needs no quotes."""
    return " ".join(
        word if re.fullmatch(r"[\w./:=,@%+-]+", word) else shlex.quote(word) for word in command
    )


def terminate_children(pid: int) -> None:
    """Send SIGTERM to the direct children of the process ``pid``, which the demo started."""
    for child in _children(pid):
        with suppress(psutil.NoSuchProcess):
            child.terminate()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:  # the process has ended meanwhile
        return []


def _show(process: subprocess.Popen[str] | Forked, output: Callable[[str], object]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line == "Next:\n":  # the command's hints for its user: the demo has its own
            break
        output(f"    {line.rstrip()}")
    process.stdout.read()


def _end(process: subprocess.Popen[str] | Forked) -> None:
    """End a command that still runs.

    It gets SIGTERM first, so that torchrun can end its workers. After GRACE_SECONDS the process and
    its children are killed.
    """
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        for child in _children(process.pid):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()
