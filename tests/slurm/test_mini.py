"""The private Slurm itself: it is like a real one where the tests need it, alone, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm import processes
from tests.slurm.conftest import MakeCluster
from tests.slurm.mini import MiniSlurm

REPOSITORY = Path(__file__).resolve().parents[2]


def until(met: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll until ``met``."""
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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


def test_cancel_ends_what_the_job_started(cluster: MiniSlurm) -> None:
    job = cluster.sbatch("--nodes=2", "--output=/dev/null", "--wrap", "srun setsid --wait sleep 100")
    cluster.wait(job, "RUNNING")
    until(lambda: len(cluster.pids(job, "node2")) == 2)  # setsid and sleep, in a session of their own
    assert processes.command(cluster.batch_pid(job)).startswith("/bin/sh")
    assert set(cluster.pids(job)) == {*cluster.pids(job, "node1"), *cluster.pids(job, "node2")}
    cluster.run("scancel", str(job))
    assert cluster.wait(job) == "CANCELLED"
    assert cluster.pids(job) == []
    with pytest.raises(LookupError, match="is CANCELLED and has no batch script"):
        cluster.batch_pid(job)
    with pytest.raises(KeyError, match="job 99999: .*Invalid job id"):
        cluster.state(99999)
    with pytest.raises(TimeoutError, match=r"(?s)is CANCELLED, not RUNNING.*JobId=.*--- slurmctld.log"):
        cluster.wait(job, "RUNNING", timeout=0.1)


def test_two_clusters_do_not_meet_and_leave_nothing(cluster: MiniSlurm, make_cluster: MakeCluster) -> None:
    other = make_cluster(nodes=3, gpus=0)
    assert other.root != cluster.root
    assert other.run("sinfo", "--noheader", "--format=%D").stdout.split()[0] == "3"
    assert cluster.run("sinfo", "--noheader", "--format=%D").stdout.split()[0] == "2"
    assert other.sbatch("--nodes=3", "--output=/dev/null", "--wrap", "srun sleep 100") == 1
    other.wait(1, "RUNNING")
    until(lambda: len(other.pids(1)) > 3)
    theirs, all_theirs = other.pids(1), processes.by_node(other.root)
    assert set(all_theirs) == {"control", "node1", "node2", "node3"}
    assert len(left_by(other.root)) > 3  # the probe sees it where it is
    ours = processes.by_node(cluster.root)
    intruder = MiniSlurm(root=cluster.root)
    with pytest.raises(RuntimeError, match="a MiniSlurm runs there, or was there; name another root"):
        intruder.start()
    intruder.stop()
    assert processes.by_node(cluster.root) == ours
    assert not {pid for pids in ours.values() for pid in pids} & {pid for pids in all_theirs.values() for pid in pids}
    other.stop()
    other.stop()
    assert left_by(other.root) == []
    assert {processes.state(pid) for pid in theirs} <= {"", "Z"}  # at most zombies, until init takes note
    assert processes.by_node(cluster.root) == ours


def test_requeued_after_preemption_and_after_the_loss_of_a_node(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(nodes=4, slurmd_timeout=5)
    common = ["--requeue", "--open-mode=append"]
    script = 'trap "echo USR1" USR1; while :; do sleep 0.2; done'
    both = ["--nodelist=node3,node4", "--exclusive"]
    preempted = cluster.sbatch(*common, *both, "--signal=B:USR1@30", f"--output={tmp_path}/preempted", "--wrap", script)
    script = 'hostname; if [ "$SLURM_RESTART_COUNT" ]; then srun hostname; else srun sleep 100; fi'
    lost = cluster.sbatch(*common, "--exclude=node3,node4", f"--output={tmp_path}/lost", "--wrap", script)
    assert cluster.batch_pid(preempted)
    urgent = cluster.sbatch("--partition=urgent", *both, "--output=/dev/null", "--wrap", "true")
    until(lambda: any(processes.command(pid).endswith("/sleep 100") for pid in cluster.pids(lost)))
    assert cluster.job(lost)["BatchHost"] == "node1"
    cluster.kill_node("node1")
    assert cluster.pids(lost) == []
    assert set(processes.by_node(cluster.root)) == {"control", "node2", "node3", "node4"}

    cluster.wait(lost, "PENDING")
    cluster.run("scontrol", "update", f"JobId={lost}", "StartTime=now")
    assert cluster.wait(lost) == "COMPLETED"
    assert cluster.job(lost) | {"Restarts": "1", "NodeList": "node2"} == cluster.job(lost)
    assert (tmp_path / "lost").read_text().split() == ["node1", "node2", "node2"]  # nothing on the dead node had a last word
    cluster.start_node("node1")
    assert sorted(cluster.run("srun", "--nodelist=node[1-2]", "hostname").stdout.split()) == ["node1", "node2"]

    assert cluster.wait(urgent) == "COMPLETED"
    assert cluster.job(preempted)["Restarts"] == "1"
    log = (tmp_path / "preempted").read_text()
    assert log.startswith("USR1\n") and "DUE TO PREEMPTION" in log


def test_jobs_outlive_slurmd(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(nodes=1)
    job = cluster.sbatch(f"--output={tmp_path}/log", "--wrap", "sleep 2; hostname")
    pid = cluster.batch_pid(job)
    cluster.kill_slurmd("node1")
    with pytest.raises(ValueError, match="node1: its slurmd does not run"):
        cluster.kill_slurmd("node1")
    assert cluster.batch_pid(job) == pid
    cluster.freeze_node("node1")
    until(lambda: processes.state(pid) == "T")
    cluster.thaw_node("node1")
    until(lambda: processes.state(pid) != "T")
    cluster.start_node("node1")
    with pytest.raises(ValueError, match="node1: its slurmd runs already"):
        cluster.start_node("node1")
    assert cluster.wait(job) == "COMPLETED"
    assert (tmp_path / "log").read_text() == "node1\n"
    with pytest.raises(ValueError, match="no node node7: node1"):
        cluster.kill_node("node7")


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
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as owner:
        assert owner.stdout is not None
        try:
            root = Path(owner.stdout.readline().strip())
            until(lambda: len(processes.by_node(root)["node1"]) >= 3)  # slurmd, slurmstepd, the script
        finally:
            owner.kill()
    until(lambda: left_by(root) == [])


def test_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nodes=0: 1 to 7"):
        MiniSlurm(nodes=0)
    with pytest.raises(ValueError, match="at most 50 characters, no blanks"):
        MiniSlurm(root=tmp_path / "a b")
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # of a job that these tests run in
    assert [name for name in MiniSlurm(root=Path("/tmp/x")).environment if name.startswith("SLURM")] == ["SLURM_CONF"]
    assert MiniSlurm.unavailable() is None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert MiniSlurm.unavailable() == "a private Slurm needs root"
    refused = MiniSlurm()
    with pytest.raises(RuntimeError, match="a private Slurm needs root"):
        refused.start()
    assert not refused.root.exists()


def test_by_the_command_line(tmp_path: Path) -> None:
    root = Path("/tmp") / f"slurm-up-{os.getpid()}"

    def call(verb: str, *options: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "tests.slurm", verb, *options]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout, done.stderr

    here = f"--root={root}"
    assert call("down", here) == (1, f"none runs in {root}\n", "")
    code, out, err = call("up", here, "--nodes=3")
    try:
        assert (code, err) == (0, "")
        export = out.splitlines()[0]
        assert export == f"export SLURM_CONF={root}/etc/slurm.conf"
        srun = subprocess.run(f"{export}; srun --nodes=3 hostname", shell=True, capture_output=True, text=True, check=True)
        assert sorted(srun.stdout.split()) == ["node1", "node2", "node3"]
        code, out, err = call("up", here)
        assert (code, out) == (2, "") and err == (
            f"python -m tests.slurm up: one runs in {root} already; end it: python -m tests.slurm down --root {root}\n"
        )
        assert "node[1-3]" in call("status", here)[1]
    finally:
        code, out, err = call("down", here)
    assert (code, out, err) == (0, f"ended; {root} is as before\n", "")
    assert left_by(root) == []
    for options in ([f"--root={tmp_path}/with blank"], ["--nodes=0", here]):
        code, out, err = call("up", *options)
        assert (code, out) == (2, "") and err.startswith("python -m tests.slurm up: ") and err.count("\n") == 1
