"""Processes of the nodes of a MiniSlurm, and their end; as a script, a watcher of the owner of one.

Every daemon runs in a separate mount namespace in which ``<root>/nodes/<name>`` is a mount point.
Its children inherit the namespace, so /proc/PID/mountinfo shows whether a process belongs to a
node: no list of pids can be stale, no other cluster's process is affected, and a job cannot escape
by a new session, group, environment or parent. Standard library only: the watcher is started by its
path.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path


def by_node(root: Path) -> dict[str, list[int]]:
    """Return node name (``control`` for munged and slurmctld) -> pids of its running processes in
    increasing order.
    """
    names: dict[str, str | None] = {}  # mount namespace -> node
    found: dict[str, list[int]] = {}
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in names:
                names[namespace] = _node_of(pid, root)
        except OSError:  # the process may just have ended
            continue
        name = names[namespace]
        if name is not None:
            found.setdefault(name, []).append(pid)
    return found


def _node_of(pid: int, root: Path) -> str | None:
    """Return the node of a process from its mount points."""
    prefix = f"{root}/nodes/"
    mounts = Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    for line in mounts.splitlines():
        point = line.split(" ")[4]
        if point.startswith(prefix):
            return point.removeprefix(prefix)
    return None


def freeze(root: Path, name: str | None = None) -> None:
    """Send SIGSTOP to all processes of a node (None: of all nodes) until none runs."""
    stopped: set[int] = set()
    while moving := set(_of(root, name)) - stopped:
        for pid in moving:
            _send(pid, signal.SIGSTOP)
        stopped |= moving


def end(root: Path, name: str | None = None, seconds: float = 20.0) -> None:
    """Send SIGKILL to all processes of a node (None: of all nodes), without any observing another's
    end.

    All are stopped first, and children killed before their parents: Linux wakes a stopped process
    group that loses its parents.

    Raises:
        TimeoutError: some still exist after ``seconds``.
    """
    freeze(root, name)
    deadline = time.monotonic() + seconds
    while pids := _of(root, name):
        for pid in sorted(pids, key=_depth, reverse=True):
            _send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{root}: processes {pids} do not end")
        time.sleep(0.01)


def _of(root: Path, name: str | None) -> list[int]:
    """Return the pids of a node, or of all nodes."""
    found = by_node(root)
    return [pid for node, pids in found.items() if name in (None, node) for pid in pids]


def _depth(pid: int) -> int:
    """Return the number of ancestors of a process."""
    depth = 0
    while pid := parent(pid):
        depth += 1
    return depth


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def environment(pid: int) -> list[bytes]:
    """Return ``NAME=value`` entries of a process as it was started; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def command(pid: int) -> str:
    """Return a process's command line, words separated by blanks; empty if it has ended."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words).decode(errors="replace").strip()
    return ""


def parent(pid: int) -> int:
    """Return a process's parent; 0 if it has ended."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(stat.rpartition(")")[2].split()[1])
    return 0


def watch(owner: int, root: Path) -> None:
    """Wait for the end of the process ``owner``, then end and remove the MiniSlurm at ``root``."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(owner)], [], [])
    end(root)
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), Path(sys.argv[2]))
