"""``MiniSlurm``: munged, slurmctld and several slurmd with simulated GPUs, in one folder and in the
foreground.

Needs root, the daemons of Slurm and munge, and the right to create namespaces; /etc and the
machine's own Slurm are not changed.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from launch.cluster.slurm import fields
from tests.slurm import configuration, processes

NEEDED = (
    "slurmctld slurmd munged sbatch squeue scontrol sinfo srun scancel unshare mount hostname"
).split()
SEARCH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
FOLDERS = ("dev", "etc", "log", "nodes", "run", "spool", "state")  # folders created below the root
# A unix socket's path has at most 107 characters, and that of slurmstepd is
# <root>/spool/nodeN/nodeN_JOB.STEP.
LONGEST_ROOT = 50
# First ports of the blocks; above the range from which Linux assigns ports automatically.
PORTS = range(61000, 65400, 8)
OVER = (
    "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL PREEMPTED OUT_OF_MEMORY BOOT_FAIL DEADLINE"
).split()
UNSHARE = "unshare --uts --mount --propagation private".split()
# Gives a node its own host name, tables and the mount point that identifies its processes (see
# processes.py).
NODE = (
    'set -e; hostname "$1"; mount --bind "$0/etc/hosts" /etc/hosts; mount --bind "$0/nodes/$1"'
    ' "$0/nodes/$1"; shift; exec "$@"'
)


class MiniSlurm:
    """A Slurm with ``nodes`` nodes (at most 7), node1 to nodeN, each with ``cpus`` CPUs and
    ``gpus`` GPUs in its configuration.

    ``gpu_types``: the type of each node's GPUs, if they have types.

    Partition ``main`` (default) is preempted by ``urgent``: its jobs get the signal of their
    ``--signal``, ``grace_seconds`` to end, and are requeued. ``slurmd_timeout``: seconds of silence
    that Slurm allows a node; it is DOWN 10 to 15 s later. Use it as a context manager, or call
    ``start`` and ``stop``. It ends with the process that started it, even if that is killed.
    """

    def __init__(
        self,
        nodes: int = 2,
        cpus: int = 8,
        gpus: int = 8,
        grace_seconds: int = 10,
        slurmd_timeout: int = 10,
        gpu_types: tuple[str, ...] = (),
    ) -> None:
        self.nodes = tuple(f"node{number}" for number in range(1, nodes + 1))
        self.shape = configuration.Shape(
            cpus, gpus, 16000, grace_seconds, slurmd_timeout, gpu_types
        )
        inside = tempfile.gettempdir()
        self.root = Path(
            tempfile.mkdtemp(
                prefix="slurm-", dir=inside if len(inside) < LONGEST_ROOT - 15 else "/tmp"
            )
        ).resolve()
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH_"))
        }
        self.environment["SLURM_CONF"] = str(self.root / "etc" / "slurm.conf")
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._watcher: subprocess.Popen[bytes] | None = None
        self._claim: socket.socket | None = None

    @staticmethod
    def unavailable() -> str | None:
        """Return the reason why MiniSlurm cannot run on this machine, or None."""
        if sys.platform != "linux":
            return "Slurm runs on Linux"
        missing = [name for name in NEEDED if _program(name) is None]
        if missing:
            return (
                f"not installed: {', '.join(missing)} (tests/slurm/install.sh, as root, on Debian"
                " or Ubuntu)"
            )
        if os.geteuid() != 0:
            return "a private Slurm needs root"
        with tempfile.TemporaryDirectory() as folder:
            try:
                os.mknod(f"{folder}/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
            except OSError as error:
                return f"no device can be made: {error.strerror}"
            trial = [*UNSHARE, "mount", "--bind", folder, folder]
            tried = subprocess.run(trial, capture_output=True, text=True, check=False)
        return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start all daemons and wait until all nodes accept jobs.

        Raises:
            RuntimeError: a daemon ended; `unavailable` reports whether this machine can run them.
            TimeoutError: the nodes are not ready after a minute.
        """
        self._claim, ports = _claim_ports(1 + len(self.nodes))
        for folder in (
            *FOLDERS,
            *(f"{kind}/{name}" for kind in ("nodes", "spool") for name in (*self.nodes, "control")),
        ):
            (self.root / folder).mkdir(parents=True)
        script = [sys.executable, "-I", processes.__file__, str(os.getpid()), str(self.root)]
        self._watcher = subprocess.Popen(
            script, stdin=subprocess.DEVNULL, start_new_session=True, cwd="/"
        )
        try:
            configuration.write(self.root, self.nodes, self.shape, ports)
            self._start_daemons()
        except BaseException:
            self.stop()
            raise

    def _start_daemons(self) -> None:
        run, log = self.root / "run", self.root / "log"
        munge = [
            f"--{what}={run / f'munge.{what}'}" for what in ("socket", "pid-file", "seed-file")
        ]
        munge += [
            f"--key-file={self.root / 'etc' / 'munge.key'}",
            f"--log-file={log / 'munged.log'}",
        ]
        self._spawn("munged", "control", "munged", "-F", "--force", *munge)
        self._until("munged", lambda: (run / "munge.socket").exists())
        etc = self.root / "etc"
        self._spawn("slurmctld", "control", "slurmctld", "-D", "-c", "-f", f"{etc}/slurm.conf")
        for name in self.nodes:
            self._spawn(name, name, "slurmd", "-D", "-N", name, "-f", f"{etc}/node.conf")
        self._until("the nodes", lambda: all(map(self._ready, self.nodes)))

    def _spawn(self, daemon: str, node: str, program: str, *argv: str) -> None:
        """Start a daemon in separate namespaces, with its own pid and session, so that Ctrl-C does
        not reach it.
        """
        path = _program(program)
        assert path is not None
        command = [*UNSHARE, "sh", "-c", NODE, str(self.root), node, path, *argv]
        clean = {
            "PATH": SEARCH,
            "HOME": "/",
            "LANG": "C.UTF-8",
            "SLURM_CONF": self.environment["SLURM_CONF"],
        }
        with (self.root / "log" / f"{daemon}.out").open("ab") as out:
            self._daemons[daemon] = subprocess.Popen(
                command,
                env=clean,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self.root / "log",
                start_new_session=True,
            )

    def _until(self, what: str, met: Callable[[], bool]) -> None:
        """Poll ``met``. If a daemon ends or the wait is too long, raise an error with the logs."""
        deadline = time.monotonic() + 60.0
        while not met():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended:
                raise RuntimeError(f"{', '.join(ended)} ended while {what} started\n{self.logs()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not ready after a minute\n{self.logs()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End every process and remove every file; may be called repeatedly."""
        if self._watcher is not None:
            processes.end(self.root)
            for daemon in self._daemons.values():
                daemon.kill()
                daemon.wait()
            self._daemons.clear()
            self._watcher.kill()
            self._watcher.wait()
            self._watcher = None
        shutil.rmtree(self.root, ignore_errors=True)
        if self._claim:
            self._claim.close()
            self._claim = None

    def run(
        self,
        *argv: str | Path,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this cluster's environment, extended by ``env``. Raises
        CalledProcessError with its output.
        """
        command = [str(word) for word in argv]
        wanted = {**self.environment, **(env or {})}
        done = subprocess.run(
            command, env=wanted, cwd=cwd, timeout=240, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            error = subprocess.CalledProcessError(
                done.returncode, command, done.stdout, done.stderr
            )
            error.add_note(f"stdout: {done.stdout.strip()}\nstderr: {done.stderr.strip()}")
            raise error
        return done

    def sbatch(
        self, *argv: str | Path, cwd: Path | str | None = None, env: Mapping[str, str] | None = None
    ) -> int:
        """Submit a job and return its id."""
        return int(self.run("sbatch", "--parsable", *argv, cwd=cwd, env=env).stdout.split(";")[0])

    def job(self, job_id: int | str) -> dict[str, str]:
        """Return the fields of ``scontrol show job``; for an array's id (not ``12_3``) those of its
        first record.

        Raises:
            KeyError: the job does not exist.
        """
        shown = self.run("scontrol", "show", "--oneliner", "job", str(job_id), check=False)
        if shown.returncode or not shown.stdout.strip():
            raise KeyError(f"job {job_id}: {shown.stderr.strip() or shown.stdout.strip()}")
        return fields(shown.stdout.splitlines()[0])

    def state(self, job_id: int | str) -> str:
        """Return PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL,
        REQUEUE_HOLD, ...: ended jobs stay visible.
        """
        return self.job(job_id)["JobState"]

    def wait(self, job_id: int | str, *states: str, timeout: float = 180) -> str:
        """Poll until the job is in one of ``states``; without any, until it has ended. Return the
        state.

        Raises:
            TimeoutError: it is not, with the job's fields and the last log lines.
        """
        deadline = time.monotonic() + timeout
        while (state := self.state(job_id)) not in (states or OVER):
            if time.monotonic() > deadline:
                shown = " ".join(f"{name}={value}" for name, value in self.job(job_id).items())
                wanted = " or ".join(states or OVER)
                raise TimeoutError(
                    f"job {job_id} is {state}, not {wanted}, after {timeout}"
                    f" s\n{shown}\n{self.logs()}"
                )
            time.sleep(0.1)
        return state

    def logs(self, lines: int = 20) -> str:
        """Return the last lines of all daemons' logs."""
        tails = []
        for path in sorted((self.root / "log").glob("*.log")) or sorted(
            (self.root / "log").glob("*.out")
        ):
            text = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
            tails += [f"--- {path.name}", *text] if text else []
        return "\n".join(tails)

    def pids(self, job_id: int | str) -> list[int]:
        """Return the running processes of a job, by this machine's numbers, without slurmstepd. A
        job is RUNNING some time before it has any.
        """
        wanted = f"SLURM_JOB_ID={self.job(job_id)['JobId']}".encode()
        found = processes.by_node(self.root)
        return [
            pid
            for name in self.nodes
            for pid in found.get(name, ())
            if wanted in processes.environment(pid)
        ]

    def batch_pid(self, job_id: int | str, timeout: float = 60) -> int:
        """Return the process id of the job's batch script; an unfinished job gets ``timeout``
        seconds to start it.

        Raises:
            LookupError: no such process.
        """
        deadline = time.monotonic() + timeout
        while True:
            known = self.job(job_id)
            for pid in self.pids(job_id):
                if processes.command(processes.parent(pid)).startswith(
                    f"slurmstepd: [{known['JobId']}.batch]"
                ):
                    return pid
            if (
                known["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING")
                or time.monotonic() > deadline
            ):
                raise LookupError(f"job {job_id} is {known['JobState']} and has no batch script")
            time.sleep(0.05)

    def kill_node(self, name: str) -> None:
        """Simulate a power loss: kill slurmd and every process of the node at once. Its connections
        are reset, as at a reboot.
        """
        processes.end(self.root, name)
        self._daemons.pop(name).wait()

    def freeze_node(self, name: str) -> None:
        """Simulate a hanging node: stop its processes; its connections stay open."""
        processes.freeze(self.root, name)

    def _ready(self, name: str) -> bool:
        """Return True if the node accepts jobs, and slurmctld knows its slurmd."""
        shown = self.run("scontrol", "show", "--oneliner", "node", name, check=False)
        node = fields(shown.stdout)
        if shown.returncode or node.get("SlurmdStartTime", "None") in ("None", "Unknown"):
            return False
        return node["State"] in ("IDLE", "MIXED", "ALLOCATED")


def _program(name: str) -> str | None:
    """Return the path of a program; daemons are often in folders that are not in a user's PATH."""
    return shutil.which(name, path=SEARCH)


def _claim_ports(count: int) -> tuple[socket.socket, list[int]]:
    """Return free ports on 127.0.0.1, which no other MiniSlurm of this machine uses while the
    returned socket with their name is open.
    """
    blocks = list(PORTS)
    random.shuffle(blocks)
    for first in blocks:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0mini-slurm-ports-{first}")
            for port in range(first, first + count):
                with socket.socket() as trial:
                    trial.bind(("0.0.0.0", port))
        except OSError:
            claim.close()
            continue
        return claim, list(range(first, first + count))
    raise RuntimeError("no free ports")
