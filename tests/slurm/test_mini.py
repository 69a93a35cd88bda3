"""The private Slurm itself: it is like a real one where the tests need it, alone, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.launch.supervised import ROOT, wait_for
from tests.slurm import processes
from tests.slurm.conftest import MakeCluster
from tests.slurm.mini import MiniSlurm


def left_by(root: Path) -> list[str]:
    """Processes, mounts and listening sockets that tell this root, and the root itself."""
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(root) in line]
    sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if str(root) in line]
    commands = [f"{pid} {line}" for pid in os.listdir("/proc") if pid.isdigit() and str(root) in (line := processes.command(int(pid)))]
    inside = [str(pid) for pids in processes.by_node(root).values() for pid in pids]
    return [*mounts, *sockets, *commands, *inside, *([str(root)] if root.exists() else [])]


def test_a_job_sees_nodes_of_its_own(cluster: MiniSlurm, tmp_path: Path) -> None:
    script = "scontrol show hostnames $SLURM_JOB_NODELIST; srun --label sh -c 'echo $(hostname) $SLURM_JOB_GPUS $CUDA_VISIBLE_DEVICES'"
    job = cluster.sbatch("--nodes=2", "--gres=gpu:2", f"--output={tmp_path}/%j", "--wrap", script)
    assert cluster.wait(job) == "COMPLETED"
    lines = (tmp_path / str(job)).read_text().splitlines()
    assert lines[:2] == ["node1", "node2"]
    assert sorted(lines[2:]) == ["0: node1 0,1 0,1", "1: node2 0,1 0,1"]
    assert cluster.job(job) | {"NodeList": "node[1-2]", "Restarts": "0", "ExitCode": "0:0"} == cluster.job(job)
    # From outside: the command's own output, and only as many GPUs as there are.
    assert sorted(cluster.run("srun", "--nodes=2", "hostname").stdout.split()) == ["node1", "node2"]
    with pytest.raises(subprocess.CalledProcessError) as refused:
        cluster.run("srun", "--gres=gpu:9", "hostname")
    assert "Requested node configuration is not available" in refused.value.stderr


def test_two_clusters_do_not_meet_and_leave_nothing(cluster: MiniSlurm, make_cluster: MakeCluster) -> None:
    other = make_cluster(nodes=3, gpus=0)
    assert other.sbatch("--nodes=3", "--output=/dev/null", "--wrap", "srun sleep 100") == 1
    other.wait(1, "RUNNING")
    wait_for(lambda: len(other.pids(1)) > 3)
    ours, theirs, all_theirs = processes.by_node(cluster.root), other.pids(1), processes.by_node(other.root)
    assert set(all_theirs) == {"control", "node1", "node2", "node3"} and len(left_by(other.root)) > 3  # the probe sees it where it is
    assert not {pid for pids in ours.values() for pid in pids} & {pid for pids in all_theirs.values() for pid in pids}
    other.stop()
    assert left_by(other.root) == [] and processes.by_node(cluster.root) == ours
    assert {processes.state(pid) for pid in theirs} <= {"", "Z"}  # at most zombies, until init takes note


def test_it_ends_with_its_owner() -> None:
    code = textwrap.dedent("""
        import time
        from tests.slurm.mini import MiniSlurm
        cluster = MiniSlurm(nodes=1)
        cluster.start()
        cluster.sbatch("--output=/dev/null", "--wrap", "trap '' TERM; sleep 100")
        cluster.wait(1, "RUNNING")
        print(cluster.root, flush=True)
        time.sleep(100)
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        try:
            root = Path(owner.stdout.readline().strip())
            wait_for(lambda: len(processes.by_node(root)["node1"]) >= 3)  # slurmd, slurmstepd, the script
        finally:
            owner.kill()
    wait_for(lambda: left_by(root) == [])
