"""Tests of the private Slurm: it is isolated and leaves no files or processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.launch.supervised import ROOT, wait_for
from tests.slurm import processes
from tests.slurm.mini import MiniSlurm

OWNER = """
import time
from tests.slurm.mini import MiniSlurm
cluster = MiniSlurm(nodes=3, gpus=0)
cluster.start()
cluster.sbatch("--nodes=3", "--output=/dev/null", "--wrap", "trap '' TERM; srun sleep 600")
cluster.wait(1, "RUNNING")
print(cluster.root, flush=True)
time.sleep(600)
"""


def left_by(root: Path) -> list[str]:
    """Return the processes, mounts and listening sockets that contain this root, and the root
    itself.
    """
    tables = "".join(Path("/proc", table).read_text() for table in ("self/mountinfo", "net/unix"))
    lines = [line for line in tables.splitlines() if str(root) in line]
    commands = [
        f"{pid} {line}"
        for pid in os.listdir("/proc")
        if pid.isdigit() and str(root) in (line := processes.command(int(pid)))
    ]
    inside = [str(pid) for pids in processes.by_node(root).values() for pid in pids]
    return [*lines, *commands, *inside, *([str(root)] if root.exists() else [])]


def test_two_clusters_do_not_meet_and_one_ends_with_its_owner(cluster: MiniSlurm) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as owner:
        assert owner.stdout is not None
        try:
            root = Path(owner.stdout.readline().strip())
            ours = processes.by_node(cluster.root)
            # slurmd, slurmstepd, the script.
            wait_for(lambda: len(processes.by_node(root).get("node1", ())) >= 3)
            theirs = processes.by_node(root)
            # The check does find processes that exist.
            assert set(theirs) == {"control", "node1", "node2", "node3"} and len(left_by(root)) > 3
            assert not {pid for pids in ours.values() for pid in pids} & {
                pid for pids in theirs.values() for pid in pids
            }
        finally:
            owner.kill()
    wait_for(lambda: left_by(root) == [])
    kept = processes.by_node(cluster.root)
    # The first process of each node is its daemon; the remains of earlier jobs may have ended.
    assert all(pids[0] in kept[node] for node, pids in ours.items())
