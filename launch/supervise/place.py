"""Interface of a place that runs ranks, and its implementation for this machine.

The supervisor's loop makes the decisions. A place starts, signals and ends the ranks, and reports
observations. `launch.supervise.on_slurm` contains the implementation for Slurm. Uses only the
standard library, because it runs inside jobs, from the snapshot.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fem_common.errors import reason
from fem_common.ports import server_port
from launch.cluster.slurm import SlurmError, call
from launch.job import Item, Job, read_json
from launch.job.item_state import start_time
from launch.node.checks import check_command, node_name, read_reports
from launch.node.rank import die_with


@dataclass(frozen=True)
class Attempt:
    """One start of an item's ranks."""

    number: int  # from 1, over all submissions of the item
    folder: Path  # attempts/NNNN of the item; it exists, with logs/ in it
    job: Job
    item: Item
    nodes: tuple[str, ...]  # the nodes of this attempt; the first is the head node
    # The ranks' complete environment, with LAUNCH_ATTEMPT=FOLDER and secrets: never write it to a
    # file.
    environment: Mapping[str, str]


class PlaceError(Exception):
    """A place could not do what was requested (no allocation, Slurm refused).

    The message is one line. The supervisor's loop treats the error as a failure of the attempt.
    """


class Unreachable(PlaceError):
    """The queue does not answer, which is temporary."""


class Running(Protocol):
    """Ranks of an attempt that has been started: interface to poll, signal and end them."""

    def poll(self) -> int | None:
        """Return the exit code of torchrun or srun, or None while a process is left. Do not wait.

        The code is 128 + n if signal n ended the program.
        """

    def signal(self, number: int) -> None:
        """Send a signal to the keeper (`launch.node.rank`) of every rank. Never raise.

        USR1: save and end. USR2: dump stacks. TERM: end. Ranks that have ended are skipped.
        """

    def kill(self) -> None:
        """End every process on all nodes with SIGKILL.

        Return once the processes have ended, or after a minute if a node does not answer.
        """


class Place:
    """Nodes on which an item's ranks run. The base class implements a place without a queue."""

    job_id: str | None = None  # Slurm's; ARRAY_TASK for a task of an array
    restart_count = 0  # number of requeues by Slurm
    can_requeue = False  # True if `requeue` can get other nodes and a new time limit

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes to run on, the head node first.

        Raises:
            PlaceError: the nodes are not known or not suitable.
        """
        raise NotImplementedError

    def check_nodes(self, attempt: Attempt) -> dict[str, list[str]]:
        """Run the pre-flight check (`launch.node.checks`) on every node and return node -> faults.

        The list of a sound node is empty. For a node that does not answer within
        health.timeout_seconds, the missing answer is the fault. The reports are in
        ATTEMPT/health/NODE.json.
        """
        raise NotImplementedError

    def start(self, attempt: Attempt) -> Running:
        """Start the ranks with `agent_command` and return the running ranks.

        The output of the agents (torchrun or srun) is written to ATTEMPT/logs/agents.log, or to one
        file per node, agents_NODE.log.

        Raises:
            PlaceError: the ranks cannot be started.
        """
        raise NotImplementedError

    def down_nodes(self) -> dict[str, str]:
        """Return node -> reason of the allocated nodes that are down, failing or draining.

        Return {} if the nodes' states are not known. Never raise.
        """
        return {}

    def cancelled(self) -> bool:
        """Return True if the queue reports that a user cancelled this job. Never raise.

        Return False if the queue does not answer. Called after SIGTERM.
        """
        return False

    def taken(self) -> bool | None:
        """Return True if the queue takes the allocation away. Never raise.

        The reasons are preemption, a requeue, or a lost node. Return False if the job ends for
        another reason, such as its time limit. Return None if no end of the job is known. Called
        once after an attempt that ended badly.
        """
        return None

    def enough_without(self, exclude: Sequence[str]) -> bool:
        """Return True if the job could still get enough nodes without those in ``exclude``.

        Return False if that is not known. Never raise.
        """
        return False

    def requeue(self, exclude: Sequence[str]) -> None:
        """Requeue this job without the nodes in ``exclude``, if enough other nodes are left.

        If the requeue succeeds, Slurm ends this process, and the method does not return.

        Raises:
            PlaceError: the requeue failed.
            Unreachable: the queue does not answer.
        """
        raise PlaceError(
            f"this machine has no queue, and no nodes other than {', '.join(exclude) or 'this'}"
        )


def agent_command(attempt: Attempt, *, head: str, port: int, node_rank: int | None) -> list[str]:
    """Return the command that runs once on each node and starts the ranks.

    It is torchrun with static rendezvous at head:port. A job without torchrun starts its only rank
    directly.

    node_rank: number of the node; None: torchrun reads it from the variable PET_NODE_RANK.
    """
    job = attempt.job
    rank = [
        "-m",
        "launch.node.rank",
        str(attempt.folder),
        "--",
        job.python,
        *attempt.item.arguments,
    ]
    if not job.torchrun:
        return [job.python, *rank]
    numa = job.section("nodes").get("numa") or "none"
    number = [] if node_rank is None else [f"--node-rank={node_rank}"]
    binding = [] if numa == "none" else [f"--numa-binding={numa}"]
    return [
        *(job.python, "-m", "torch.distributed.run"),
        *(f"--nnodes={len(attempt.nodes)}", *number, f"--nproc-per-node={job.processes_per_node}"),
        *(
            "--rdzv-backend=static",
            f"--master-addr={address(head)}",
            f"--master-port={port}",
            "--max-restarts=0",
            *binding,
        ),
        *("--no-python", job.python, *rank),
    ]


def address(node: str) -> str:
    """Return a node's name, or Slurm's address of the node if the name cannot be resolved."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        try:
            found = re.search(r"\bNodeAddr=(\S+)", call("scontrol", "show", "node", node))
        except SlurmError:
            return node
        return found[1] if found else node
    return node


_GONE_SECONDS = 60.0


class LocalPlace(Place):
    """Place for jobs without a queue: this machine."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def nodes(self) -> tuple[str, ...]:
        """Return a tuple with only this machine's name.

        Raises:
            PlaceError: the job needs more than one node.
        """
        if self.job.nodes != 1:
            raise PlaceError(
                f"the job needs {self.job.nodes} nodes, and this is one machine; --nodes 1, or a "
                "profile with scheduler: slurm"
            )
        return (node_name(),)

    def check_nodes(self, attempt: Attempt) -> dict[str, list[str]]:
        """Run the pre-flight check on this machine; see `Place.check_nodes`."""
        folder, health = attempt.folder / "health", self.job.section("health")
        folder.mkdir(exist_ok=True)
        command = check_command(
            self.job.profile, folder, python=self.job.python, folders=[attempt.item.directory]
        )
        log = attempt.folder / "logs" / "check.log"
        try:
            check = started(command, log, cwd=self.job.working_directory, env=attempt.environment)
        except OSError as error:
            return {attempt.nodes[0]: [f"the check cannot be started: {reason(error)}"]}
        with contextlib.suppress(subprocess.TimeoutExpired):  # the missing report shows it
            check.wait(float(health.get("timeout_seconds") or 180.0))
        check.kill()
        return {node: report.faults for node, report in read_reports(folder, attempt.nodes).items()}

    def start(self, attempt: Attempt) -> LocalRanks:
        """Start torchrun, or the only rank of a job without torchrun, and return the running ranks.

        Raises:
            PlaceError: the program cannot be started.
        """
        log = attempt.folder / "logs" / "agents.log"
        tied = functools.partial(_in_the_agent, os.getpid())
        try:
            command = agent_command(attempt, head="127.0.0.1", port=server_port(), node_rank=0)
            agent = started(
                command,
                log,
                cwd=self.job.working_directory,
                env=attempt.environment,
                preexec_fn=tied,
            )
            return LocalRanks(attempt, agent)
        except OSError as error:
            raise PlaceError(f"cannot start the ranks: {reason(error)}") from None


def started(command: Sequence[str], log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command in a new session, and return the process. Append its output to ``log``.

    options: further arguments of subprocess.Popen.

    Raises:
        OSError: the command cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            **options,
        )


def _in_the_agent(supervisor: int) -> None:
    """Prepare the agent's process between fork and exec.

    It dies with the supervisor, and ignores the signals that are meant for the ranks.
    """
    die_with(supervisor, signal.SIGKILL)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


class LocalRanks:
    """Processes of an attempt on this machine.

    They are found by the attempt's folder in their environment.
    """

    def __init__(self, attempt: Attempt, agent: subprocess.Popen[bytes]) -> None:
        self.attempt, self._agent = attempt, agent
        self._over_since: float | None = None

    def poll(self) -> int | None:
        """Return the agent's exit code, or None while a process of the attempt is left.

        See `Running.poll`. Processes that remain 10 seconds after the agent's end are killed.
        """
        code = self._agent.poll()
        if code is None:
            return None
        now = time.monotonic()
        self._over_since = self._over_since or now
        left = processes(self.attempt.folder)
        if left and now - self._over_since < _GONE_SECONDS:
            if now - self._over_since > 10.0:
                # launch.node.rank ends its command's left-over processes within this time.
                send(left, signal.SIGKILL)
            return None
        return 128 - code if code < 0 else code

    def signal(self, number: int) -> None:
        """Send a signal to every rank's keeper; see `Running.signal`."""
        send(keepers(self.attempt.folder), number)

    def kill(self) -> None:
        """End every process of the attempt; see `Running.kill`."""
        deadline = time.monotonic() + _GONE_SECONDS
        while time.monotonic() < deadline:
            left = processes(self.attempt.folder)
            send(left, signal.SIGKILL)
            self._agent.poll()
            if not left:
                return
            time.sleep(0.05)


def end_orphans(folders: Sequence[Path]) -> int:
    """End the processes that earlier attempts left on this machine, and return their number.

    Such processes remain if an attempt's supervisor was killed. folders: the attempts' folders.
    """
    mine = [
        folder
        for folder in folders
        if (read_json(folder / "attempt.json") or {}).get("host") == socket.gethostname()
    ]
    left = [pid for folder in mine for pid in processes(folder)]
    send(left, signal.SIGKILL)
    return len(left)


def processes(folder: Path) -> list[int]:
    """Return the ids of this machine's processes, except zombies, that belong to an attempt.

    folder: folder of the attempt.
    """
    mine = [
        pid
        for pid in _others()
        if os.fsencode(f"LAUNCH_ATTEMPT={folder}") in words_of(pid, "environ")
    ]
    return [pid for pid in mine if start_time(pid) is not None]


def keepers(folder: Path) -> list[int]:
    """Return the process ids of an attempt's keepers (`launch.node.rank`) on this machine.

    folder: folder of the attempt.
    """
    return [
        pid
        for pid in _others()
        if words_of(pid)[1:4] == [b"-m", b"launch.node.rank", os.fsencode(folder)]
    ]


def _others() -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    ]


def words_of(pid: int, what: str = "cmdline") -> list[bytes]:
    """Return a process's command line as words, or [] if it cannot be read.

    what: "cmdline", or "environ" for the environment variables.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{what}").read_bytes().split(b"\0")
    return []


def send(pids: Sequence[int], number: int) -> None:
    """Send a signal to processes, skipping those that have ended."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
