"""How attempts end when Slurm takes their nodes away, and what the supervisor does of itself about its nodes: real Slurm, stand-in runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.job import launch_folder
from launch.supervise.journal import cordon
from tests.launch.supervised import ROOT, Case, wait_for
from tests.slurm.mini import MiniSlurm

SCRIPT = """\
#!/bin/bash
#SBATCH --output={folder}/slurm-%j.out --open-mode=append --requeue --ntasks-per-node=1 --cpus-per-task=1
trap '' USR1
cd {directory}
export PYTHONPATH={root} PYTHONSAFEPATH=1
exec {python} -m launch.supervise {directory}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[MiniSlurm]:
    with MiniSlurm(nodes=2) as running:
        yield running


class Submitted(Case):
    """A stand-in run as a job on a cluster."""

    def __init__(self, cluster: MiniSlurm, directory: Path, script: list[dict[str, Any]], nodes: int = 1, **changes: Any) -> None:
        super().__init__(directory, script, nodes=nodes, **changes)
        self.cordon = directory.parent / "cordon.jsonl"
        slurm = {"scheduler": "slurm", "nodes": {"gpus": 0, "cpus": 1}, "paths": {"cordon": str(self.cordon)}}
        self.job = replace(self.job, profile={**self.job.profile, **slurm})
        self.job.save()
        self.cluster, self.id, folder = cluster, 0, launch_folder(directory)
        (folder / "job.sh").write_text(SCRIPT.format(folder=folder, directory=directory, root=ROOT, python=self.job.python))

    def submit(self, *options: str) -> None:
        """Submit it, and wait until its ranks make steps."""
        self.id = self.cluster.sbatch(f"--nodes={self.job.nodes}", *options, launch_folder(self.directory) / "job.sh")

    def running(self) -> None:
        """Wait until a rank has done its steps and waits."""
        wait_for(lambda: self.state.get("state") == "running" and (self.directory / "checkpoints").is_dir(), 90)

    def completed(self, *outcomes: str) -> None:
        """Wait for the end: a run that is finished, after attempts that ended so."""
        self.cluster.wait(self.id, "COMPLETED")
        assert self.outcomes == list(outcomes), self.said

    @property
    def said(self) -> str:
        """What the batch script said."""
        return "".join(path.read_text() for path in launch_folder(self.directory).glob("slurm-*.out"))


NOT_ONE = {"max_failures": 0, "same_failure": 1}


def test_a_requeue_by_someone_is_no_failure(cluster: MiniSlurm, tmp_path: Path) -> None:
    """Ranks that cannot save in time, and not one failure is allowed."""
    case = Submitted(cluster, tmp_path / "run", [{"to": 3, "checkpoint": [3], "end": "deaf"}, {"to": 5}], restarts=NOT_ONE)
    case.submit()
    case.running()
    cluster.run("scontrol", "requeue", str(case.id))
    case.completed("interrupted", "finished")
    assert case.attempts[0]["failure"] is None and case.attempts[0]["decision"]["action"] == "requeue"


def test_ranks_that_are_told_to_end_by_slurm_alone_have_saved(cluster: MiniSlurm, tmp_path: Path) -> None:
    """Preemption without a signal for users: the step's tasks get TERM, torchrun fails of it, the ranks save."""
    case = Submitted(cluster, tmp_path / "run", [{"to": 3, "checkpoint": [2], "end": "wait"}, {"to": 5}], torchrun=True, restarts=NOT_ONE)
    case.submit()
    case.running()
    steps = cluster.run("squeue", "--steps", "--noheader", f"--jobs={case.id}", "--format=%i|%j").stdout.split()
    (step,) = [line.split("|")[0] for line in steps if "|launch-" in line]
    cluster.run("scancel", "--signal=TERM", step)
    case.completed("saved", "finished")
    assert case.attempts[0]["checkpoint_end"] == 3 and cluster.job(case.id)["Restarts"] == "1"


def test_a_supervisor_that_is_killed_on_its_way_back_to_the_queue_is_requeued(cluster: MiniSlurm, tmp_path: Path) -> None:
    hook = {"command": "sleep 60", "events": ["saved"]}  # it is waited for between the words and the deed
    case = Submitted(cluster, tmp_path / "run", [{"to": 3, "checkpoint": [2], "end": "wait"}, {"to": 5}], notify=hook)
    case.submit()
    case.running()
    cluster.run("scancel", "--batch", "--signal=USR1", str(case.id))
    wait_for(lambda: case.state.get("state") == "requeued", 60)
    os.kill(cluster.batch_pid(case.id), signal.SIGKILL)
    case.completed("saved", "finished")
    assert cluster.job(case.id)["Restarts"] == "1"


def test_a_cordoned_node_is_left_before_the_start(cluster: MiniSlurm, tmp_path: Path) -> None:
    case = Submitted(cluster, tmp_path / "run", [{"to": 3}], restarts=NOT_ONE)
    cordon(case.cordon, ["node1"], "by hand", "")
    case.submit("--nodelist=node1", "--hold")
    cluster.run("scontrol", "update", f"JobId={case.id}", "ReqNodeList=")
    cluster.run("scontrol", "release", str(case.id))
    case.completed("misplaced", "finished")
    assert [attempt["nodes"] for attempt in case.attempts] == [["node1"], ["node2"]] and cluster.job(case.id)["ExcNodeList"] == "node1"
