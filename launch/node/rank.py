"""Parent process of one rank (its keeper): ``python -m launch.node.rank ATTEMPT -- COMMAND...``
starts the command and runs until it ends.

The keeper writes the command's output with time stamps into ATTEMPT/logs/rank_NNNNN.log ("<unix
time> <text>", the values of secrets as ***). It writes the pid, the host, the time of the end, the
exit code and the error into ATTEMPT/ranks/rank_NNNNN.json. It forwards signals to the command, and
on SIGUSR2 it dumps stacks. When the keeper's own parent dies, the keeper, the command and the
command's children end too. Its exit code is the command's, or 128 + n after a signal n.

The command ignores SIGUSR1 and SIGUSR2 until it installs its own handlers, so that a signal during
the import of torch does not end it. This module uses only the standard library, because it runs in
the ranks' interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from fem_common import secrets
from fem_common.errors import reason
from fem_common.exits import Exit
from fem_common.signals import PDEATHSIG, PTRACER, SUBREAPER, prctl, signal_name
from fem_common.text import counted
from launch.job import rank_log, rank_record, write_json
from launch.node import caches, stacks
from launch.node.failures import (
    Findings,
    blameless_signal,
    killed_for_memory,
    kind_of,
    signalled_to_end,
)
from launch.node.logs import Scribe

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# Seconds after which an incomplete line is written to the log, and seconds that processes left
# running by the command have to end after SIGTERM.
PATIENCE_SECONDS = 5.0
# Interval at which the count of out-of-memory kills is read. Only kills of the last one to two
# intervals can be the cause of the rank's end.
OOM_SECONDS = 60.0
_FLIGHT_FOLDERS = {
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
}
_NO_GPUS = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES
OWN_CGROUPS, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Return 2 if the command line is wrong, and 126 or 127 if the command cannot be started.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) < 3 or words[1] != "--":
        print(
            "launch.node.rank: error: usage: python -m launch.node.rank ATTEMPT -- COMMAND...",
            file=sys.stderr,
        )
        return Exit.WRONG_INPUT
    try:
        return Keeper(Path(words[0]), words[2:], os.environ).run()
    except OSError as error:
        print(f"launch.node.rank: error: {reason(error)}", file=sys.stderr)
        return Exit.NOT_STARTED


class Keeper:
    """Parent process of one rank's command: writes the command's log and record."""

    def __init__(self, attempt: Path, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.attempt, self.command = attempt, list(command)
        self.rank = int(environ.get("RANK") or 0)
        self.local_rank = int(environ.get("LOCAL_RANK") or 0)
        self._started = self._child_ended = time.time()
        self._host = environ.get("SLURMD_NODENAME") or socket.gethostname()
        compiled, fault = caches.variables(environ, self._host, Path(__file__).resolve().parents[2])
        self._environ = {**self._defaults(environ), **compiled, **environ}
        self._findings = Findings()
        self._scribe = Scribe(rank_log(attempt, self.rank), secrets.values(environ), self._findings)
        self._child: subprocess.Popen[bytes] | None = None
        self._signal_times: dict[str, float] = {}
        self._oom_counter = oom_counter()
        self._oom_looked, self._oom_kills = time.monotonic(), oom_kills(self._oom_counter)
        self._oom_latest = self._oom_kills
        self._changed = self._dump = False
        if fault:
            self._scribe.note(f"no folder on this node for compiled kernels: {fault}")

    def _defaults(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return default environment variables for the command.

        They request unbuffered output, stacks after a crash, and NCCL's flight recorder. Variables
        that are already set override them.

        The flight recorder's older variable names are added only if a GPU may exist: older versions
        of torch use only these, and newer ones warn about them.
        """
        flight = str(self.attempt / "flight" / "rank_")
        older = {
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": flight,
        }
        pipe = {}
        with contextlib.suppress(FileNotFoundError):  # without a writable folder, use no pipe
            name = f"launch_{int(self._started * 1000)}_{os.getpid()}_"
            pipe["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = str(Path(tempfile.gettempdir()) / name)
        return {
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_DUMP_TEMP_FILE": flight,
            **pipe,
            **(older if _may_have_gpus(environ) else {}),
        }

    def run(self) -> int:
        """Start the command, supervise it, record its end, and return its exit code."""
        _die_with_parent()
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED[:3])
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        source, sink = os.pipe()
        try:
            for name in self._environ.keys() & _FLIGHT_FOLDERS:
                # torch does not create these folders, and the rank fails if the pipe's is missing.
                Path(self._environ[name]).parent.mkdir(parents=True, exist_ok=True)
            prepare = functools.partial(_in_the_command, os.getpid())
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=self._environ,
                preexec_fn=prepare,
            )
        except (OSError, ValueError) as error:
            return self._not_started(error)
        finally:
            os.close(sink)
        self._save()
        self._follow(self._child, source)
        self._clean_up(source)
        return self._ended(self._child)

    def _not_started(self, error: Exception) -> int:
        """Record a command that could not be started, and return the exit code."""
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        message = self._scribe.hide(f"cannot start {self.command[0]}: {why}")
        print(f"launch.node.rank: error: {message}", file=sys.stderr)
        self._scribe.note(message)
        code = Exit.NOT_FOUND if isinstance(error, FileNotFoundError) else Exit.NOT_STARTED
        self._save(ended=time.time(), exit=code, kind="exit", error=message, error_time=time.time())
        return code

    def _follow(self, child: subprocess.Popen[bytes], source: int) -> None:
        """Read the command's output and pass signals on until the command has ended."""
        with _Wakeup() as wakeup, selectors.DefaultSelector() as selector:
            for number in FORWARDED:
                signal.signal(number, self._forward)
            signal.signal(signal.SIGUSR2, self._ask_for_dump)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            selector.register(source, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while child.poll() is None:
                ready = {key.fd for key, _ in selector.select(PATIENCE_SECONDS)}
                if wakeup in ready:
                    os.read(wakeup, 4096)
                if source in ready and not self._take(source):
                    selector.unregister(source)
                self._scribe.flush(PATIENCE_SECONDS)
                if time.monotonic() - self._oom_looked >= OOM_SECONDS:
                    self._oom_looked, self._oom_kills = time.monotonic(), self._oom_latest
                    self._oom_latest = oom_kills(self._oom_counter)
                if self._dump:
                    self._dump = False
                    self._dump_stacks(child.pid)
                if self._changed:
                    self._changed = False
                    self._save()

    def _take(self, source: int) -> bool:
        """Read available output from the pipe once. Return False at the end of the pipe."""
        data = os.read(source, 1 << 16)
        self._scribe.feed(data)
        return bool(data)

    def _forward(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on to the command, and record the time of the signal's first arrival."""
        name = signal.Signals(number).name
        self._changed |= name not in self._signal_times
        self._signal_times.setdefault(name, time.time())
        if self._child is not None:
            self._child.send_signal(number)

    def _ask_for_dump(self, _: int, __: FrameType | None) -> None:
        self._dump = True

    def _dump_stacks(self, pid: int) -> None:
        text = self._scribe.hide(stacks.dump(pid, self.rank, self._environ))
        path = self.attempt / "dumps" / f"rank_{self.rank:05}.txt"
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self._scribe.note(f"the stacks cannot be written: {error}")

    def _clean_up(self, source: int) -> None:
        """End the processes that the command left running, and read the rest of its output."""
        self._child_ended = time.time()
        os.set_blocking(source, False)
        meanwhile = functools.partial(self._drain, source)
        _wait_for_children(None, 1.0, meanwhile)
        left = _wait_for_children(signal.SIGTERM, PATIENCE_SECONDS, meanwhile)
        _wait_for_children(signal.SIGKILL, PATIENCE_SECONDS, meanwhile)
        self._drain(source)
        os.close(source)
        self._scribe.flush()
        if left:
            self._scribe.note(f"ended {counted(left, 'process')} that the command left running")
        if pipe := self._environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
            with contextlib.suppress(OSError):
                os.unlink(f"{pipe}{self.rank}.pipe")

    def _drain(self, source: int) -> None:
        """Read everything that the pipe contains now."""
        with contextlib.suppress(BlockingIOError):
            while self._take(source):
                pass

    def _ended(self, child: subprocess.Popen[bytes]) -> int:
        """Record the command's end and return its exit code (128 + n after a signal n)."""
        by = signal_name(-child.returncode) if child.returncode < 0 else None
        code = 128 - child.returncode if child.returncode < 0 else child.returncode
        found = self._findings.cause(by) if code else None
        error = found.message if found else None
        if oom_kills(self._oom_counter) > self._oom_kills and not signalled_to_end(
            self._signal_times, self._child_ended
        ):
            error = killed_for_memory(error, code) or error
        telling = None if found and blameless_signal(by, found.traceback) else by
        kind = kind_of(error or "", code, telling) if code else None
        self._save(
            ended=self._child_ended,
            exit=code,
            signal=by,
            kind=kind,
            error=error,
            error_time=found.time if found else None,
            traceback=found.traceback if found else None,
        )
        return code

    def _save(self, **end: object) -> None:
        """Write the record of the rank, with ``end`` as its last entries.

        A write error of the disk does not end the rank.
        """
        record: dict[str, object] = {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "host": self._host,
            "pid": os.getpid(),
            "child": self._child.pid if self._child else None,
            "started": self._started,
            "told": self._signal_times,
            **dict.fromkeys("ended exit signal kind error error_time traceback".split()),
            "last_line": self._findings.last_line[:1000] or None,
            "last_output": self._scribe.last_output,
            "lines_lost": self._scribe.lost,
            **end,
        }
        try:
            write_json(rank_record(self.attempt, self.rank), record)
        except OSError as error:
            print(
                f"launch.node.rank: rank {self.rank}'s record cannot be written: {error}",
                file=sys.stderr,
            )


class _Wakeup:
    """Read end of a pipe that wakes up `select` when a signal arrives.

    Python writes a byte into the pipe for every signal.
    """

    def __enter__(self) -> int:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self._read

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)


def _may_have_gpus(environ: Mapping[str, str]) -> bool:
    """Return True if the command may find an NVIDIA GPU. Only then can it use NCCL."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return Path("/dev/nvidiactl").exists() if visible is None else visible.strip() not in _NO_GPUS


def oom_counter() -> Path | None:
    """Return the kernel's file with the number of out-of-memory kills, or None if it is not found.

    The file counts the kills in this process's memory cgroup.
    """
    with contextlib.suppress(OSError):
        for line in OWN_CGROUPS.read_text(errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            # first the folder and file of cgroup version 1, then those of version 2
            folder = CGROUPS / controllers
            name = "memory.oom_control" if controllers else "memory.events"
            # The second path is for containers, which may mount their own cgroup as the root.
            for counter in (folder / path.lstrip("/") / name, folder / name):
                if counter.is_file():
                    return counter
    return None


def oom_kills(counter: Path | None) -> int:
    """Return the number of out-of-memory kills in the file of `oom_counter`, or 0 if unknown."""
    with contextlib.suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", counter.read_text() if counter else "", re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def _die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies.

    Also make this process the parent of all processes that the command leaves behind.
    """
    parent = os.getppid()
    prctl(PDEATHSIG, signal.SIGKILL)
    prctl(SUBREAPER, 1)
    if os.getppid() != parent:
        sys.exit(1)


def die_with(parent: int, number: int) -> None:
    """Request that the kernel sends signal ``number`` to this process when its parent dies.

    Exit if the parent is already dead. Called between fork and exec. parent: the parent's pid.
    """
    prctl(PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _in_the_command(keeper: int) -> None:
    """Prepare the command's process between fork and exec.

    It will die with the keeper, the keeper's py-spy may attach to it, and signals are unblocked.
    """
    die_with(keeper, signal.SIGKILL)
    prctl(PTRACER, keeper)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _children() -> list[int]:
    """Return the ids of this process's running child processes."""
    mine = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", pid, "stat").read_text(errors="replace")
            state, parent = stat.rpartition(")")[2].split()[:2]
        except (OSError, ValueError):  # it ended
            continue
        if int(parent) == os.getpid() and state != "Z":
            mine.append(int(pid))
    return mine


def _wait_for_children(
    number: signal.Signals | None, seconds: float, meanwhile: Callable[[], None]
) -> int:
    """Wait at most ``seconds`` until no child process is left, including adopted processes.

    Return the number of processes that got the signal.

    number: signal to send once to each child; None: no signal. meanwhile: called repeatedly during
    the wait.
    """
    end, signalled = time.monotonic() + seconds, set[int]()
    while children := _children():
        if number is not None:
            for pid in {*children} - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                signalled.add(pid)
        meanwhile()
        if time.monotonic() > end:
            break
        time.sleep(0.02)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    return len(signalled)


if __name__ == "__main__":
    sys.exit(main())
