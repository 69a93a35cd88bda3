"""Tests of attempts whose nodes Slurm takes away, and of the supervisor's own reactions to its
nodes: real Slurm, stand-in runs.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.job import launch_folder, read_json
from launch.supervise.journal import cordon, cordoned
from tests.launch.supervised import ROOT, Case, wait_for
from tests.slurm.conftest import MakeCluster
from tests.slurm.mini import MiniSlurm

Script = list[dict[str, Any]]
SCRIPT = """\
#!/bin/bash
#SBATCH --output={folder}/slurm-%j.out --open-mode=append --requeue --ntasks-per-node=1 --cpus-per-task=1
trap '' USR1
cd {directory}
export PYTHONPATH={root} PYTHONSAFEPATH=1
exec {python} -m launch.supervise {directory}
"""  # noqa: E501


@pytest.fixture(scope="module")
def cluster() -> Iterator[MiniSlurm]:
    with MiniSlurm(nodes=2, grace_seconds=60, gpu_types=("h100", "a100")) as running:
        yield running


class Submitted(Case):
    """A stand-in run as a job on a cluster."""

    def __init__(
        self,
        cluster: MiniSlurm,
        directory: Path,
        script: list[dict[str, Any]],
        nodes: int = 1,
        **changes: Any,
    ) -> None:
        super().__init__(directory, script, nodes=nodes, **changes)
        self.cordon = directory.parent / "cordon.jsonl"
        slurm = {
            "scheduler": "slurm",
            "nodes": {"gpus": 0, "cpus": 1, "exclusive": False},
            "paths": {"cordon": str(self.cordon)},
        }
        self.job = replace(self.job, profile={**self.job.profile, **slurm})
        self.job.save()
        self.cluster = cluster
        self.id = 0
        folder = launch_folder(directory)
        (folder / "job.sh").write_text(
            SCRIPT.format(folder=folder, directory=directory, root=ROOT, python=self.job.python)
        )

    def submit(self, *options: str) -> None:
        """Submit the job."""
        self.id = self.cluster.sbatch(
            f"--nodes={self.job.nodes}", *options, launch_folder(self.directory) / "job.sh"
        )

    def child(self, rank: int, attempt: int) -> int:
        """Wait for a rank of an attempt and return its process id."""
        path = self.directory / f"attempts/{attempt:04}/ranks/rank_{rank:05}.json"
        return int(wait_for(lambda: (read_json(path) or {}).get("child")))

    def supervisor(self) -> int:
        """Wait until the supervisor is guarded and return its process id."""

        def guarded() -> int | None:
            pid, log = self.cluster.batch_pid(self.id), launch_folder(self.directory) / "guard.log"
            return pid if log.exists() and f"guards process {pid}\n" in log.read_text() else None

        return int(wait_for(guarded))

    def completed(self, *outcomes: str) -> None:
        """Wait for the successful end of the run and check the outcomes of its attempts."""
        self.cluster.wait(self.id, "COMPLETED", timeout=240)
        assert self.outcomes == list(outcomes), self.output

    @property
    def output(self) -> str:
        """Output of the batch script."""
        return "".join(
            path.read_text() for path in launch_folder(self.directory).glob("slurm-*.out")
        )


NOT_ONE = {"max_failures": 0, "same_failure": 1}
DEAF: Script = [{"to": 3, "checkpoint": [3], "end": "deaf"}, {"to": 5}]
WAITS: Script = [{"to": 3, "checkpoint": [2], "end": "wait"}, {"to": 5}]


def test_a_requeue_by_someone_is_no_failure(cluster: MiniSlurm, tmp_path: Path) -> None:
    """With ranks that cannot save in time, and no failure allowed."""
    case = Submitted(cluster, tmp_path / "run", DEAF, restarts=NOT_ONE)
    case.submit()
    case.ready()
    cluster.run("scontrol", "requeue", str(case.id))
    case.completed("interrupted", "finished")
    assert (
        case.attempts[0]["failure"] is None and case.attempts[0]["decision"]["action"] == "requeue"
    )


def test_the_time_limit_and_a_preemption_save_and_requeue(
    cluster: MiniSlurm, tmp_path: Path
) -> None:
    waits_twice: Script = [{"to": 3, "end": "wait"}, {"to": 5, "end": "wait"}, {"to": 7}]
    case = Submitted(
        cluster, tmp_path / "run", waits_twice, nodes=2, torchrun=True, restarts=NOT_ONE
    )
    case.submit("--signal=B:USR1@30", "--time=30")
    case.ready()
    # Slurm checks the limit every half minute.
    cluster.run("scontrol", "update", f"JobId={case.id}", "TimeLimit=1")
    wait_for(lambda: cluster.state(case.id) == "PENDING", 150)
    cluster.run("scontrol", "update", f"JobId={case.id}", "TimeLimit=30")
    case.ready(2)
    urgent = cluster.sbatch(
        "-p", "urgent", "-N2", "--exclusive", "--mem=1000", "-o", os.devnull, "--wrap", "sleep 1"
    )
    cluster.wait(urgent, "COMPLETED", timeout=120)
    case.completed("saved", "saved", "finished")
    assert [
        attempt["checkpoint_end"] >= least
        for attempt, least in zip(case.attempts, (3, 5), strict=False)
    ] == [True, True]
    assert cluster.job(case.id)["Restarts"] == "2" and case.attempts[2]["restart_count"] == 2


def test_ranks_that_are_signalled_to_end_by_slurm_alone_have_saved(
    cluster: MiniSlurm, tmp_path: Path
) -> None:
    """Preemption without a user signal: the tasks of the step get TERM, torchrun fails, the ranks
    save.
    """
    case = Submitted(cluster, tmp_path / "run", WAITS, torchrun=True, restarts=NOT_ONE)
    case.submit()
    case.ready()
    steps = cluster.run(
        "squeue", "--steps", "--noheader", f"--jobs={case.id}", "--format=%i|%j"
    ).stdout.split()
    (step,) = [line.split("|")[0] for line in steps if "|launch-" in line]
    cluster.run("scancel", "--signal=TERM", step)
    case.completed("saved", "finished")
    assert case.attempts[0]["checkpoint_end"] == 3 and cluster.job(case.id)["Restarts"] == "1"


@pytest.mark.parametrize("returning", [False, True])
def test_a_supervisor_that_is_killed_is_requeued(
    cluster: MiniSlurm, tmp_path: Path, returning: bool
) -> None:
    """While its ranks run, and while it returns to the queue."""
    # The supervisor waits for this command between its announcement and its action.
    hook = {"command": "sleep 60", "events": ["saved"]}
    case = Submitted(cluster, tmp_path / "run", WAITS, notify=hook)
    case.submit()
    case.ready()
    if returning:
        cluster.run("scancel", "--batch", "--signal=USR1", str(case.id))
        wait_for(lambda: case.state.get("state") == "requeued", 60)
    os.kill(case.supervisor(), signal.SIGKILL)
    case.completed("saved" if returning else "lost", "finished")
    assert cluster.job(case.id)["Restarts"] == "1"


def test_a_hang_of_two_nodes_is_dumped_and_restarted(cluster: MiniSlurm, tmp_path: Path) -> None:
    # The second attempt has no step left after which it could end late.
    script: Script = [{"to": 3, "checkpoint": [3], "end": "hang"}, {"to": 3}]
    case = Submitted(
        cluster, tmp_path / "run", script, nodes=2, torchrun=True, watchdog={"step_minutes": 0.1}
    )
    case.submit()
    os.kill(case.child(1, 1), signal.SIGSTOP)
    case.completed("hang", "finished")
    assert {attempt["job_id"] for attempt in case.attempts} == {str(case.id)}
    assert "no step for 6 s" in case.attempts[0]["failure"]["message"]
    dumps = [
        (case.directory / f"attempts/0001/dumps/rank_0000{rank}.txt").read_text() for rank in (0, 1)
    ]
    assert "stand_in" in dumps[0] and "T (stopped)" in dumps[1]


def test_a_cordoned_node_is_left_before_the_start(cluster: MiniSlurm, tmp_path: Path) -> None:
    case = Submitted(cluster, tmp_path / "run", [{"to": 3}], restarts=NOT_ONE)
    cordon(case.cordon, ["node1"], "by hand", "")
    case.submit("--nodelist=node1", "--hold")
    cluster.run("scontrol", "update", f"JobId={case.id}", "ReqNodeList=")
    cluster.run("scontrol", "release", str(case.id))
    case.completed("misplaced", "finished")
    assert [attempt["nodes"] for attempt in case.attempts] == [
        ["node1"],
        ["node2"],
    ] and cluster.job(case.id)["ExcNodeList"] == "node1"


def test_a_node_that_no_other_can_stand_in_for_is_kept(cluster: MiniSlurm, tmp_path: Path) -> None:
    """It failed twice, but without it Slurm would let the job wait forever: the other node has
    other GPUs.
    """
    script: Script = [
        *({"to": step, "checkpoint": [step], "end": "hang"} for step in (3, 5)),
        {"to": 7},
    ]
    case = Submitted(cluster, tmp_path / "run", script)
    case.submit("--gres=gpu:h100:1")
    for attempt in (1, 2):
        os.kill(case.ready(attempt), signal.SIGKILL)
    case.completed("failed", "failed", "finished")
    assert (
        case.attempts[1]["decision"]["exclude"] == ["node1"]
        and "too few nodes are left without node1" in case.output
    )
    assert (
        case.attempts[2]["nodes"] == ["node1"] and cluster.job(case.id)["ExcNodeList"] == "(null)"
    )


def test_a_drained_node_is_left_whatever_its_reason_looks_like(
    cluster: MiniSlurm, tmp_path: Path
) -> None:
    case = Submitted(
        cluster, tmp_path / "run", [{"to": 3, "checkpoint": [3], "end": "hang"}, {"to": 5}]
    )
    case.submit()
    child = case.ready()
    (node,) = case.attempts[0]["nodes"]
    cluster.run(
        "scontrol",
        "update",
        f"NodeName={node}",
        "State=DRAIN",
        "Reason=bad fan\ncall me | page | him",
    )
    try:
        os.kill(child, signal.SIGKILL)
        case.completed("failed", "finished")
    finally:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert case.attempts[0]["failure"][
        "message"
    ] == f"{node} is down: draining: bad fan" and case.attempts[1]["nodes"] != [node]


def test_a_node_that_fails_twice_is_cordoned_and_one_that_dies_is_done_without(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(nodes=4, slurmd_timeout=5)
    # Without its peer, no rank can save.
    script: Script = [*[{"to": 3, "checkpoint": [3], "end": "hang"}] * 3, {"to": 5}]
    case = Submitted(cluster, tmp_path / "run", script, nodes=2, torchrun=True)
    case.submit()
    for attempt in (1, 2):
        other = case.ready(attempt)
        # A stopped process receives no signal, like a rank that waits for a lost peer.
        os.kill(other, signal.SIGSTOP)
        os.kill(case.child(1, attempt), signal.SIGKILL)
        record = case.directory / f"attempts/{attempt:04}/ranks/rank_00001.json"
        wait_for(lambda: (read_json(record) or {}).get("ended"))  # noqa: B023
        os.kill(other, signal.SIGKILL)
    case.ready(3)
    *before, (head, other) = (attempt["nodes"] for attempt in case.attempts)
    assert before == [["node1", "node2"]] * 2 and "node2" not in (head, other)
    assert cluster.job(case.id)["ExcNodeList"] == "node2" and list(cordoned(case.cordon)) == [
        "node2"
    ]
    cluster.kill_node(head)  # the batch host
    cluster.wait(case.id, "COMPLETED", timeout=300)
    assert (
        not {"node2", head} & set(case.attempts[-1]["nodes"]) and case.outcomes[-1] == "finished"
    ), case.output


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_random_kills(cluster: MiniSlurm, tmp_path: Path) -> None:
    """Kills of a rank or of the supervisor at any time: each is survived, and no step of the last
    checkpoint is lost.
    """
    chance, never = random.Random(0), {"max_failures": 100, "same_failure": 0, "node_failures": 0}
    script: Script = [{"to": 3000, "checkpoint": list(range(50, 3000, 50))}]
    case = Submitted(cluster, tmp_path / "run", script, nodes=2, torchrun=True, restarts=never)
    case.submit()
    for _ in range(20):
        before = len(case.attempts)
        time.sleep(chance.choice((0.0, 2 * chance.random())))
        while len(case.attempts) == before and cluster.state(case.id) != "COMPLETED":
            with contextlib.suppress(LookupError, ProcessLookupError):  # between two attempts
                folders = sorted(case.directory.glob("attempts/*"))
                number = int(folders[-1].name) if folders else 1
                os.kill(
                    chance.choice((case.child(chance.randrange(2), number), case.supervisor())),
                    signal.SIGKILL,
                )
            time.sleep(0.5)
    cluster.wait(case.id, "COMPLETED", timeout=600)
    starts = [attempt["checkpoint_start"] or 0 for attempt in case.attempts]
    assert starts == sorted(starts) and case.outcomes[-1] == "finished" and len(starts) > 10, (
        case.output
    )
