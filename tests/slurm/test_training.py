"""A training job with two ranks on two nodes of a real Slurm ends with the losses of an
uninterrupted run, whatever happens to it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.job import read_json
from tests.launch.supervised import wait_for
from tests.launch.training import Training, finish, launch
from tests.pretrain.conftest import tiny_data
from tests.slurm import processes
from tests.slurm.mini import MiniSlurm

__all__ = ["tiny_data"]
SECRETS = {"WANDB_API_KEY": "canary-0c5e4f1b", "HF_TOKEN": "hf_canary-77aa61d2"}
PROFILE = """
nodes: {gpus: 0, cpus: 2, exclusive: false}
slurm: {time: "30"}
restarts: {back_off_seconds: 0.2, back_off_max_seconds: 1}
health: {free_disk_gb: 0}
environment: {OMP_NUM_THREADS: 1}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[MiniSlurm]:
    """Two nodes, with enough time to save at a preemption, because other tests may keep this
    machine busy.
    """
    with MiniSlurm(grace_seconds=120) as running:
        yield running


def test_a_run_that_is_preempted_killed_and_cancelled_continues_each_time_and_prints_no_secret(
    cluster: MiniSlurm, tmp_path: Path, tiny_data: Path
) -> None:
    """A higher partition preempts it; then its supervisor is killed; then a user cancels it with
    --save, and requeues it.
    """
    reference, run = (
        Training(tmp_path / name, tiny_data, steps=300) for name in ("reference", "here")
    )
    (run.folder / "mini.yaml").write_text(PROFILE)
    environment = {**cluster.environment, **SECRETS}

    def call(*words: str | Path, code: int = 0) -> str:
        return finish(launch(run.folder, *words, env=environment), code)

    def further(attempt: int) -> None:
        """Wait until the attempt has made some steps."""
        wait_for(
            lambda: (run.directory / f"attempts/{attempt:04}").exists() and run.is_at(0, attempt),
            240,
        )
        step = max(run.losses)
        wait_for(lambda: max(run.losses) > step + 5, 240)

    submit = ("submit", *run.words, "--cluster", "mini.yaml", "--nodes", "2")
    job = call(*submit, "--parsable").strip()
    further(1)
    for rank in (0, 1):
        report = processes.environment(run.child(rank, attempt=1))
        assert {f"{name}={value}".encode() for name, value in SECRETS.items()} <= set(report)
    urgent = cluster.sbatch(
        "-p", "urgent", "-N2", "--exclusive", "--mem=1000", "-o", os.devnull, "--wrap", "sleep 1"
    )
    cluster.wait(urgent, "COMPLETED", timeout=240)
    further(2)
    os.kill(cluster.batch_pid(job), signal.SIGKILL)
    further(3)
    call("cancel", "--save", run.directory)
    wait_for(lambda: cluster.state(job) in ("FAILED", "CANCELLED"), 240)
    first, _, third = run.attempts
    assert run.outcomes == ["saved", "lost", "saved"] and cluster.job(job)["Restarts"] == "2"
    assert third["checkpoint_end"] > third["checkpoint_start"] >= first["checkpoint_end"]
    assert read_json(run.directory / "launch" / "state.json")[
        "state"
    ] == "cancelled" and "cancelled" in call(*submit, code=2)
    job = call("requeue", run.directory).split(" as job ")[1].split(":")[0]
    assert cluster.wait(job, timeout=300) == "COMPLETED"
    finish(reference.local())
    assert run.losses == reference.losses and "[rank 0] step 300/300" in call("logs", run.directory)
    assert "nothing to do" in call(*submit) and "finished" in call("status", run.directory)
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert [
        path
        for path in files
        if any(value.encode() in path.read_bytes() for value in SECRETS.values())
    ] == []
