"""`launch doctor` on a real Slurm: a sound cluster passes, and each thing that is wrong with one is said by name and not waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.cluster import trial as doctor_trial
from tests.launch import smi
from tests.slurm.conftest import MakeCluster
from tests.slurm.mini import MiniSlurm

PROFILE = "scheduler: slurm\nnodes: {gpus: 0, cpus: 2}\nslurm: {partition: main}\nenvironment: {GLOO_SOCKET_IFNAME: lo}\n"
Said = dict[str, list[tuple[str, str]]]
Examine = Callable[..., tuple[int, Said]]


@pytest.fixture
def examine(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Examine:
    """`doctor` against a cluster: the exit code, and what is said by name as (level, text)."""

    def run(on: MiniSlurm, *options: str) -> tuple[int, Said]:
        monkeypatch.setenv("SLURM_CONF", on.environment["SLURM_CONF"])
        (tmp_path / "profile.yaml").write_text(PROFILE, encoding="utf-8")
        code = main(["doctor", f"--cluster={tmp_path / 'profile.yaml'}", f"--directory={tmp_path / 'trials'}", *options])
        said: Said = {}
        for line in capsys.readouterr().out.splitlines():
            if line.startswith(("ok ", "warning ", "FAILED ")):
                said.setdefault(line[9:23].strip(), []).append((line[:8].strip(), line[24:]))
        return code, said

    return run


@contextmanager
def hidden(cluster: MiniSlurm, folder: Path, *nodes: str) -> Iterator[None]:
    """The folder is another one on these nodes, as where a file system is not mounted."""
    for node in nodes:
        cluster.run("srun", f"--nodelist={node}", "mount", "-t", "tmpfs", "none", folder)
    try:
        yield
    finally:
        for node in nodes:
            cluster.run("srun", f"--nodelist={node}", "umount", folder)


def queued(cluster: MiniSlurm) -> list[str]:
    """The names of the jobs that are not over."""
    return cluster.run("squeue", "--noheader", "--format=%j").stdout.split()


def failed(said: Said) -> list[str]:
    return [name for name, lines in said.items() for level, _ in lines if level == "FAILED"]


def test_a_sound_cluster_passes_and_nothing_is_left(examine: Examine, cluster: MiniSlurm, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    code, said = examine(cluster, f"--set=paths.shared=[{shared}]", "--set=health.all_reduce_gb_per_second=0.0001")
    assert code == 0 and {level for lines in said.values() for level, _ in lines} == {"ok"}, said
    assert said["Slurm"][0][1].startswith("22.05") or "UP" in said["Slurm"][0][1]
    assert said["trial"] == [("ok", "ran on node1, node2")] and {"node node1", "node node2", "shared folders", "clocks"} < set(said)
    assert "2 ranks on 2 nodes over gloo" in said["all-reduce"][0][1]
    assert list((tmp_path / "trials").iterdir()) == list(shared.iterdir()) == [] and "launch-doctor" not in queued(cluster)


def test_what_slurm_would_refuse_is_said_without_a_job(examine: Examine, cluster: MiniSlurm) -> None:
    code, said = examine(cluster, "--nodes=0", "--set=slurm.partition=mian")
    assert code == 1 and failed(said) == ["partition"] and "no partition mian" in said["partition"][0][1]
    code, said = examine(cluster, "--nodes=0", "--set=nodes.gpus=16", "--set=nodes.cpus=1")
    assert code == 1 and failed(said) == ["nodes"] and "takes 16 GPUs a node; the nodes have 8" in said["nodes"][0][1]
    code, said = examine(cluster, "--nodes=3")
    assert code == 1 and failed(said) == ["nodes"] and said["trial"][0][0] == "warning"
    code, said = examine(cluster, "--nodes=1", "--set=slurm.constraint=h100")
    assert code == 1 and failed(said) == ["sbatch"] and "feature" in said["sbatch"][0][1].lower()
    cluster.run("scontrol", "update", "PartitionName=urgent", "MaxTime=1:00:00")
    try:
        code, said = examine(cluster, "--nodes=0", "--set=slurm.partition=urgent", "--set=slurm.time=2:00:00")
    finally:
        cluster.run("scontrol", "update", "PartitionName=urgent", "MaxTime=INFINITE")
    assert code == 1 and failed(said) == ["time limit"] and "more than partition urgent gives: 01:00:00" in said["time limit"][0][1]


def test_a_full_queue_is_not_waited_for(examine: Examine, cluster: MiniSlurm, tmp_path: Path) -> None:
    blocker = cluster.sbatch("--nodes=2", "--exclusive", "--job-name=blocker", "--output=/dev/null", "--wrap=sleep 300", cwd=tmp_path)
    cluster.wait(blocker, "RUNNING")
    code, said = examine(cluster, "--wait=1")
    assert code == 1 and failed(said) == ["trial"] and "waited 1 s in the queue (" in said["trial"][0][1]
    assert queued(cluster) == ["blocker"]


def test_a_gpu_that_is_broken_is_named_with_its_node(
    examine: Examine, cluster: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = smi.Node(changed={(3, "ecc.errors.uncorrected.volatile.total"): "5"})
    smi.install(tmp_path / "bin", smi.Node().answers())
    monkeypatch.setenv("PATH", smi.install(tmp_path / "bin", broken.answers(), "node2")["PATH"])
    code, said = examine(cluster, "--set=nodes.gpus=8", "--set=health.matmul=false")
    assert code == 1 and failed(said) == ["node node2", "trial"]
    assert "GPU 3 (00000000:5D:00.0): 5 uncorrected ECC errors" in said["node node2"][0][1]
    assert said["node node1"][0][0] == "ok" and "8 x NVIDIA H100 80GB HBM3, driver 550.90.07" in said["node node1"][0][1]
    assert not list(tmp_path.rglob("cordon.jsonl")), "a doctor takes no node away"


def test_a_folder_that_the_nodes_do_not_see_is_named(
    examine: Examine, cluster: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_trial, "END_SECONDS", 2.0)
    (tmp_path / "trials").mkdir()
    with hidden(cluster, tmp_path / "trials", "node1", "node2"):
        code, said = examine(cluster)
    assert code == 1 and failed(said) == ["trial"]
    assert f"ended without a word in {tmp_path / 'trials'}" in said["trial"][0][1] and "do not see that folder" in said["trial"][0][1]


def test_a_hung_node_is_named_and_not_waited_for(examine: Examine, make_cluster: MakeCluster) -> None:
    cluster = make_cluster(slurmd_timeout=300)
    cluster.freeze_node("node2")
    began = time.monotonic()
    code, said = examine(cluster, "--nodes=2", "--set=health.timeout_seconds=6")
    assert code == 1 and failed(said) == ["node node2", "trial"] and "did not answer the health check" in said["node node2"][0][1]
    assert said["node node1"][0][0] == "ok" and time.monotonic() - began < 90
