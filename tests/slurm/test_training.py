"""Training jobs of two ranks on two nodes of a real Slurm, and what befalls them: each ends with the losses of a run never stopped."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from launch.supervise.journal import cordoned
from tests.slurm import processes
from tests.slurm.conftest import MakeCluster
from tests.slurm.mini import MiniSlurm
from tests.slurm.training import DEMO, STEPS, Run, call, losses, overrides, prepare_data, profile

SECRETS = {"WANDB_API_KEY": "canary-0c5e4f1b", "HF_TOKEN": "hf_canary-77aa61d2"}


class MakeRun(Protocol):
    """``make_run(cluster, restarts={...})``: a run in a folder of its own, with these sections of its profile."""

    def __call__(self, cluster: MiniSlurm, **sections: Any) -> Run: ...


@pytest.fixture(scope="module")
def cluster() -> Iterator[MiniSlurm]:
    """Two nodes, and time to save in when a job is preempted: this machine may be busy with other tests."""
    with MiniSlurm(grace_seconds=120) as running:
        yield running


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of all runs here."""
    return prepare_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def reference(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], dict[int, float]]:
    """The losses of the run on this machine, never stopped."""
    folder = tmp_path_factory.mktemp("reference")
    call("launch", "local", DEMO, *overrides(data, folder / "run"), "--cluster", profile(folder, "local", {}), "--processes", "2")
    train, valid = losses(folder / "run")
    assert sorted(train) == list(range(1, STEPS + 1)) and sorted(valid) == [STEPS // 2, STEPS]
    return train, valid


@pytest.fixture
def make_run(data: Path, tmp_path: Path) -> MakeRun:
    return lambda cluster, **sections: Run(cluster, data, tmp_path, **sections)


def test_a_job_ends_with_the_losses_of_a_local_run_and_tells_nobody_a_secret(
    cluster: MiniSlurm, make_run: MakeRun, reference: tuple[dict[int, float], dict[int, float]]
) -> None:
    run = make_run(cluster)
    run.submit(env=SECRETS)
    run.until_step(1)
    for rank in (0, 1):
        (pid,) = run.rank_pids(rank)
        assert {f"{name}={value}".encode() for name, value in SECRETS.items()} <= set(processes.environment(pid))
    assert f"/{STEPS}" in run.launch("status", run.directory)
    run.wait("COMPLETED")
    assert losses(run.directory) == reference
    assert run.outcomes() == ["finished"] and run.attempts()[0]["nodes"] == ["node1", "node2"]
    assert "finished" in run.launch("status", run.directory) and f"[rank 0] step {STEPS}/{STEPS}" in run.launch("logs", run.directory)
    assert "nothing to do" in run.launch("submit", DEMO, *run.overrides, "--cluster", run.profile, "--nodes", "2")
    told = [path for path in run.folder.rglob("*") if path.is_file() and any(v.encode() in path.read_bytes() for v in SECRETS.values())]
    assert told == []


def test_the_time_limits_signal_saves_and_requeues(
    cluster: MiniSlurm, make_run: MakeRun, reference: tuple[dict[int, float], dict[int, float]]
) -> None:
    run = make_run(cluster, slurm={"signal_seconds": 30})
    run.submit()
    cluster.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=1")  # which no profile may have with such a signal
    # Slurm looks every half a minute: until then the ranks stand still, and take the signal when they go on.
    run.until("step 10, or a signal", lambda: run.step() >= 10 or run.state().get("state") == "saving")
    ranks = run.rank_pids()
    run.signal(ranks, signal.SIGSTOP)
    run.until("signal before the limit", lambda: run.state().get("state") == "saving")
    run.signal(ranks, signal.SIGCONT)
    run.until("requeue", lambda: cluster.state(run.job) == "PENDING")
    cluster.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=30")
    run.wait("COMPLETED")
    assert run.outcomes() == ["saved", "finished"]
    assert cluster.job(run.job)["Restarts"] == "1" and run.attempts()[1]["restart_count"] == 1
    assert losses(run.directory) == reference


def test_a_preempted_killed_and_cancelled_run_goes_on_each_time(
    cluster: MiniSlurm, make_run: MakeRun, reference: tuple[dict[int, float], dict[int, float]]
) -> None:
    """Preempted by a higher partition; then its supervisor is killed; then a person cancels it with --save, and requeues it."""
    run = make_run(cluster)
    run.submit()
    run.until_step(10)
    urgent = cluster.sbatch("-p", "urgent", "-N2", "--exclusive", "--mem=1000", "-o", os.devnull, "--wrap", "sleep 1")
    cluster.wait(urgent, "COMPLETED")
    run.started(2, rank=0)
    run.until_further(5)
    os.kill(cluster.batch_pid(run.job), signal.SIGKILL)
    run.started(3, rank=0)
    run.until_further(5)
    run.launch("cancel", "--save", run.directory)
    run.wait("FAILED", "CANCELLED")
    first, _, third = run.attempts()
    assert run.outcomes() == ["saved", "lost", "saved"] and first["checkpoint_end"] >= 10 and cluster.job(run.job)["Restarts"] == "2"
    assert third["checkpoint_end"] > third["checkpoint_start"] >= first["checkpoint_end"] and run.state()["state"] == "cancelled"
    assert "cancelled" in run.launch("submit", DEMO, *run.overrides, "--cluster", run.profile, "--nodes", "2", code=2)
    run.job = int(run.launch("requeue", run.directory).split(" as job ")[1].split(":")[0])
    run.wait("COMPLETED")
    assert losses(run.directory) == reference


def test_a_hang_is_dumped_and_restarted(
    cluster: MiniSlurm, make_run: MakeRun, reference: tuple[dict[int, float], dict[int, float]]
) -> None:
    run = make_run(cluster, watchdog={"step_minutes": 0.15})
    run.submit()
    run.until_step(10)
    run.signal(run.rank_pids(1), signal.SIGSTOP)
    run.wait("COMPLETED")
    first, second = run.attempts()
    assert (first["outcome"], second["outcome"]) == ("hang", "finished") and first["job_id"] == second["job_id"]
    assert "no step for 9 s" in first["failure"]["message"]
    dumps = run.directory / "attempts" / "0001" / "dumps"
    stacks = [(dumps / "rank_00000.txt").read_text(), run.launch("logs", run.directory, "--attempt", "1", "--rank", "0")]
    assert any("train_step" in text for text in stacks) and "stopped" in (dumps / "rank_00001.txt").read_text()
    assert losses(run.directory) == reference


@pytest.mark.parametrize("node", ["node1", pytest.param("node2", marks=pytest.mark.slow)], ids=["batch host", "other"])
def test_a_node_that_dies_is_done_without(
    make_cluster: MakeCluster, make_run: MakeRun, reference: tuple[dict[int, float], dict[int, float]], node: str
) -> None:
    cluster = make_cluster(nodes=3, slurmd_timeout=5)
    run = make_run(cluster)
    run.submit()
    run.until_step(50)
    cluster.kill_node(node)
    run.wait("COMPLETED")
    assert node not in run.attempts()[-1]["nodes"] and run.attempts()[-1]["checkpoint_start"] >= 40
    assert losses(run.directory) == reference


def test_a_node_that_fails_twice_is_cordoned_and_left(make_cluster: MakeCluster, make_run: MakeRun) -> None:
    cluster = make_cluster(nodes=3)
    run = make_run(cluster)
    run.submit()
    for attempt in (1, 2):
        run.signal(run.started(attempt, rank=1), signal.SIGKILL)
    run.started(3, rank=1)
    assert [attempt["nodes"] for attempt in run.attempts()] == [["node1", "node2"], ["node1", "node2"], ["node1", "node3"]]
    assert cluster.job(run.job)["ExcNodeList"] == "node2" and list(cordoned(run.folder / "cordon.jsonl")) == ["node2"]
    assert "--exclude=node2" in run.launch(
        "submit", DEMO, *run.overrides, f"run_dir={run.folder / 'other'}", "--cluster", run.profile, "--dry-run"
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_random_kills(cluster: MiniSlurm, data: Path, tmp_path: Path) -> None:
    longer = ("train.steps=2000", "train.eval_interval=500", "checkpoint.interval=50")
    (tmp_path / "local").mkdir()
    local = overrides(data, tmp_path / "local" / "run")
    call("launch", "local", DEMO, *local, *longer, "--cluster", profile(tmp_path / "local", "local", {}), "--processes", "2", timeout=1800)
    chance = random.Random(0)
    run = Run(cluster, data, tmp_path, restarts={"max_failures": 100, "same_failure": 0, "node_failures": 0})
    run.submit(*longer)
    killed: list[str] = []
    for _ in range(20):
        run.until("rank", run.rank_pids, 600)
        if chance.random() < 0.7:  # else while the ranks start
            run.until_further(chance.randrange(1, 60))
        killed.append(chance.choice(["rank", "rank", "batch script"]))
        before = len(run.attempts())
        run.kill_one(killed[-1], chance)
        run.until("next attempt", lambda: len(run.attempts()) > before, 600)  # noqa: B023
    run.wait("COMPLETED", timeout=1800)
    print(killed, run.outcomes())
    assert losses(run.directory) == losses(tmp_path / "local" / "run") and len(losses(run.directory)[0]) == 2000
    assert len(run.attempts()) > len(killed)
