"""launch: ranks on this machine: torchrun as a child of the supervisor. Standard library alone: it runs from the snapshot."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fem_common.errors import reason
from launch.job import Job
from launch.layout import read_json
from launch.node_check import check_command, node_name, read_reports
from launch.supervise.command import agent_command
from launch.supervise.place import Attempt, PlaceError

_PDEATHSIG = 1  # of <linux/prctl.h>
_GONE_SECONDS = 60.0
_LIBC = ctypes.CDLL(None, use_errno=True)


class LocalPlace:
    """This machine, without a queue."""

    job_id: str | None = None
    restart_count = 0
    can_requeue = False

    def __init__(self, job: Job) -> None:
        self.job = job

    def nodes(self) -> tuple[str, ...]:
        """This machine. Raises PlaceError where the job asks for more than one."""
        if self.job.nodes != 1:
            raise PlaceError(
                f"the job asks for {self.job.nodes} nodes, and this is one machine; --nodes 1, or a profile with scheduler: slurm"
            )
        return (node_name(),)

    def check_nodes(self, attempt: Attempt) -> dict[str, list[str]]:
        """Run the pre-flight check here; see `Place.check_nodes`."""
        folder, health = attempt.folder / "health", self.job.profile.get("health") or {}
        folder.mkdir(exist_ok=True)
        began = time.time()
        command = check_command(self.job.profile, folder, python=self.job.python, folders=[attempt.item.directory])
        try:
            with (attempt.folder / "logs" / "check.log").open("ab") as log:
                subprocess.run(
                    command,
                    cwd=self.job.working_directory,
                    env=attempt.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=float(health.get("timeout_seconds") or 180.0),
                )
        except subprocess.TimeoutExpired:
            pass  # the missing report says it
        except OSError as error:
            return {attempt.nodes[0]: [f"the check cannot be started: {reason(error)}"]}
        return {node: list(report.faults) for node, report in read_reports(folder, attempt.nodes, began).items()}

    def start(self, attempt: Attempt) -> LocalRanks:
        """Start torchrun, or the only rank. Raises PlaceError."""
        command = agent_command(attempt, head="127.0.0.1", port=free_port(), node_rank=0)
        try:
            with (attempt.folder / "logs" / "agents.log").open("ab") as log:
                agent = subprocess.Popen(
                    command,
                    cwd=self.job.working_directory,
                    env=attempt.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_Child(os.getpid()),
                )
        except OSError as error:
            raise PlaceError(f"cannot start the ranks: {reason(error)}") from None
        return LocalRanks(attempt, agent)

    def down_nodes(self) -> dict[str, str]:
        """Never any: this machine is up."""
        return {}

    def cancelled(self) -> bool:
        """Never: there is no queue to say so."""
        return False

    def taken(self) -> bool | None:
        """Never known: nobody takes this machine away."""
        return None

    def enough_without(self, exclude: Sequence[str]) -> bool:
        """Never: there is one machine."""
        return False

    def requeue(self, exclude: Sequence[str]) -> None:
        """Raises PlaceError: there is no queue."""
        raise PlaceError(f"this machine has no queue to go back to, nor other nodes than {', '.join(exclude) or 'this'}")


class _Child:
    """What the agent's process does between fork and exec: die with the supervisor; the ranks' signals are not its own."""

    def __init__(self, supervisor: int) -> None:
        self._supervisor = supervisor

    def __call__(self) -> None:
        _LIBC.prctl(ctypes.c_int(_PDEATHSIG), ctypes.c_ulong(signal.SIGKILL), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
        if os.getppid() != self._supervisor:
            os._exit(1)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)


class LocalRanks:
    """An attempt's processes on this machine: those whose environment names its folder."""

    def __init__(self, attempt: Attempt, agent: subprocess.Popen[bytes]) -> None:
        self.attempt, self._agent = attempt, agent
        self._over_since: float | None = None

    def poll(self) -> int | None:
        """See `Running.poll`. What the agent leaves running is ended after a moment."""
        code = self._agent.poll()
        if code is None:
            return None
        now = time.monotonic()
        self._over_since = self._over_since or now
        left = processes(self.attempt.folder)
        if left and now - self._over_since < _GONE_SECONDS:
            if now - self._over_since > 10.0:  # launch.rank ends what its command leaves behind within that
                _send(left, signal.SIGKILL)
            return None
        return 128 - code if code < 0 else code

    def signal(self, number: int) -> None:
        """See `Running.signal`."""
        _send([pid for pid in processes(self.attempt.folder) if _is_keeper(pid)], number)

    def kill(self) -> None:
        """See `Running.kill`."""
        deadline = time.monotonic() + _GONE_SECONDS
        while time.monotonic() < deadline:
            left = processes(self.attempt.folder)
            _send(left, signal.SIGKILL)
            self._agent.poll()
            if not left:
                return
            time.sleep(0.05)


def end_orphans(folders: Sequence[Path]) -> int:
    """End the processes that earlier attempts left on this machine when their supervisor was killed: how many there were."""
    mine = [folder for folder in folders if (read_json(folder / "attempt.json") or {}).get("host") == socket.gethostname()]
    left = [pid for folder in mine for pid in processes(folder)]
    _send(left, signal.SIGKILL)
    return len(left)


def processes(folder: Path) -> list[int]:
    """The processes on this machine, zombies aside, that belong to the attempt of a folder."""
    marker = os.fsencode(f"LAUNCH_ATTEMPT={folder}")
    return [
        pid
        for pid in _pids()
        if marker in _read(pid, "environ").split(b"\0") and _read(pid, "stat").rpartition(b")")[2].split()[:1] != [b"Z"]
    ]


def free_port() -> int:
    """A TCP port on the loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            yield int(name)


def _is_keeper(pid: int) -> bool:
    return _read(pid, "cmdline").split(b"\0")[1:3] == [b"-m", b"launch.rank"]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
