"""Tests of `launch doctor` on a real Slurm: a healthy cluster passes, and each fault is named
without a wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.cluster import trial as doctor_trial
from tests.launch import smi
from tests.launch.test_doctor import Findings, examined
from tests.slurm.conftest import MakeCluster
from tests.slurm.mini import MiniSlurm

PROFILE = (
    "scheduler: slurm\nnodes: {gpus: 0, cpus: 2}\nslurm: {partition: main}\nenvironment:"
    " {GLOO_SOCKET_IFNAME: lo}\n"
)
Examine = Callable[..., tuple[int, Findings]]


@pytest.fixture
def examine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Examine:
    """Run `doctor` against a cluster; return the exit code, and name -> (level, text)."""

    def run(on: MiniSlurm, *options: str) -> tuple[int, Findings]:
        monkeypatch.setenv("SLURM_CONF", on.environment["SLURM_CONF"])
        return examined(tmp_path, capsys, PROFILE, *options)

    return run


@contextmanager
def hidden(cluster: MiniSlurm, folder: Path) -> Iterator[None]:
    """Replace a folder by another one on the nodes, as if a file system were not mounted."""
    on_all = ("srun", "--nodes=2")
    cluster.run(*on_all, "mount", "-t", "tmpfs", "none", folder)
    try:
        yield
    finally:
        cluster.run(*on_all, "umount", folder)


def queued(cluster: MiniSlurm) -> list[str]:
    """Return the names of pending and running jobs, without jobs whose nodes are being cleaned
    up.
    """
    return cluster.run(
        "squeue", "--noheader", "--states=pending,running", "--format=%j"
    ).stdout.split()


def failed(failed_checks: Findings) -> list[str]:
    return [
        name for name, lines in failed_checks.items() for level, _ in lines if level == "FAILED"
    ]


def test_a_sound_cluster_passes_and_nothing_is_left(
    examine: Examine, cluster: MiniSlurm, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    code, output = examine(
        cluster, f"--set=paths.shared=[{shared}]", "--set=health.all_reduce_gb_per_second=0.0001"
    )
    assert code == 0 and {level for lines in output.values() for level, _ in lines} == {"ok"}, (
        output
    )
    assert output["Slurm"][0][1].startswith("22.05") or "UP" in output["Slurm"][0][1]
    assert output["trial"] == [("ok", "ran on node1, node2")] and {
        "node node1",
        "node node2",
        "shared folders",
        "clocks",
    } < set(output)
    assert "2 ranks on 2 nodes over gloo" in output["all-reduce"][0][1]
    assert list((tmp_path / "trials").iterdir()) == list(
        shared.iterdir()
    ) == [] and "launch-doctor" not in queued(cluster)


def test_what_slurm_would_refuse_is_reported_without_a_job(
    examine: Examine, cluster: MiniSlurm
) -> None:
    for options, name, report in (
        (["--nodes=0", "--set=slurm.partition=mian"], "partition", "partition mian does not exist"),
        (
            ["--nodes=0", "--set=nodes.gpus=16", "--set=nodes.cpus=1"],
            "nodes",
            "takes 16 gpus a node; the nodes have 8",
        ),
        (["--nodes=3"], "nodes", "3 wanted"),
        (["--nodes=1", "--set=slurm.constraint=h100"], "sbatch", "feature"),
    ):
        code, output = examine(cluster, *options)
        assert code == 1 and failed(output) == [name] and report in output[name][0][1].lower(), (
            output
        )


def test_a_full_queue_is_not_waited_for(
    examine: Examine, cluster: MiniSlurm, tmp_path: Path
) -> None:
    blocker = cluster.sbatch(
        "--nodes=2",
        "--exclusive",
        "--job-name=blocker",
        "--output=/dev/null",
        "--wrap=sleep 300",
        cwd=tmp_path,
    )
    cluster.wait(blocker, "RUNNING")
    code, output = examine(cluster, "--wait=1")
    assert (
        code == 1
        and failed(output) == ["trial"]
        and "waited 1 s in the queue (" in output["trial"][0][1]
    )
    assert queued(cluster) == ["blocker"]


def test_a_gpu_that_is_broken_is_named_with_its_node(
    examine: Examine, cluster: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = smi.Node(changed={(3, "ecc.errors.uncorrected.volatile.total"): "5"})
    smi.install(tmp_path / "bin", smi.Node().answers())
    monkeypatch.setenv("PATH", smi.install(tmp_path / "bin", broken.answers(), "node2")["PATH"])
    code, output = examine(cluster, "--set=nodes.gpus=8", "--set=health.matmul=false")
    assert code == 1 and failed(output) == ["node node2", "trial"]
    assert "GPU 3 (00000000:5D:00.0): 5 uncorrected ECC errors" in output["node node2"][0][1]
    assert (
        output["node node1"][0][0] == "ok"
        and "8 x NVIDIA H100 80GB HBM3, driver 550.90.07" in output["node node1"][0][1]
    )
    assert not list(tmp_path.rglob("cordon.jsonl")), "a doctor takes no node away"


def test_a_folder_that_the_nodes_do_not_see_is_named(
    examine: Examine, cluster: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_trial, "END_SECONDS", 2.0)
    (tmp_path / "trials").mkdir()
    with hidden(cluster, tmp_path / "trials"):
        code, output = examine(cluster)
    assert code == 1 and failed(output) == ["trial"]
    assert (
        f"ended without any output in {tmp_path / 'trials'}" in output["trial"][0][1]
        and "do not see that folder" in output["trial"][0][1]
    )


def test_a_hung_node_is_named_and_not_waited_for(
    examine: Examine, make_cluster: MakeCluster
) -> None:
    cluster = make_cluster(slurmd_timeout=500)
    cluster.freeze_node("node2")
    began = time.monotonic()
    code, output = examine(cluster, "--nodes=2", "--set=health.timeout_seconds=15")
    assert (
        code == 1
        and failed(output) == ["node node2", "trial"]
        and "did not answer the health check" in output["node node2"][0][1]
    )
    assert output["node node1"][0][0] == "ok" and time.monotonic() - began < 300
