"""Tests of the Slurm code without a Slurm: ports, containers, the guard's conclusions. Other tests
are in tests/slurm.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fem_common.exits import Exit
from fem_common.ports import PORTS, server_port
from launch.cluster import slurm
from launch.job import Item, Job, read_json, write_json
from launch.job.item_state import standings
from launch.supervise import __main__ as supervisor
from launch.supervise import slurm_steps as guard
from launch.supervise.journal import Journal
from launch.supervise.on_slurm import SlurmPlace, SlurmRunning, container_parts
from launch.supervise.place import Attempt, PlaceError, Unreachable, address, agent_command
from launch.supervise.watch import Signals
from launch.verbs.status import Queue, Row, rows_of
from tests.launch.folders import make_job, write_state
from tests.launch.hostile import program
from tests.launch.supervised import wait_for
from tests.wording import Wording

ITEM = Item("/shared/runs/a", ("-m", "pretrain", "/shared/runs/a/launch/config.yaml"), "a")
JOB = Job(
    "a",
    "run",
    "/shared/runs/a",
    "/project/work",
    "/shared/runs/a/launch/code",
    "/env/python",
    2,
    8,
    True,
    (ITEM,),
    {},
    "p.yaml",
)

ENVIRONMENT = {"PYTHONPATH": JOB.code, "NCCL_DEBUG": "WARN", "WANDB_API_KEY": "canary"}
INSIDE = ["env", f"PYTHONPATH={JOB.code}", "NCCL_DEBUG=WARN"]


def attempt(**profile: Any) -> Attempt:
    return Attempt(
        1,
        Path("/shared/runs/a/attempts/0001"),
        replace(JOB, profile=profile),
        ITEM,
        ("n1", "n2"),
        ENVIRONMENT,
    )


def test_a_task_of_an_array_is_named_as_such() -> None:
    """The last task of array 12 has the array's own number, and a bare 12 would mean all of its
    tasks.
    """
    for number, task, job in (
        ("12", {}, "12"),
        ("12", {"SLURM_ARRAY_TASK_ID": "0"}, "12_0"),
        ("13", {"SLURM_ARRAY_TASK_ID": "3"}, "12_3"),
    ):
        array = {"SLURM_ARRAY_JOB_ID": "12"} if task else {}
        place = SlurmPlace({"SLURM_JOB_ID": number, "SLURM_RESTART_COUNT": "2", **array, **task})
        assert (place.job_id, place.restart_count) == (job, 2)


def test_a_port_that_is_taken_is_passed_over() -> None:
    """Ranks and agents listen seconds after their port was chosen; in between Linux assigns ports,
    and other jobs choose theirs.
    """
    assert PORTS.stop <= 32768  # Linux's default: net.ipv4.ip_local_port_range
    assert len({server_port() for _ in range(50)}) == 50
    for seed in range(4711, 4811):
        first = server_port(seed)
        assert first in PORTS
        # Another process may just have taken the port.
        with socket.socket() as taken, suppress(OSError):
            taken.bind(("", first))
            taken.listen()
            assert server_port(seed) not in (first, server_port(seed + 1))
            return
    raise AssertionError


def test_a_head_node_is_named_by_what_resolves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of a cluster need not be in a name service; Slurm knows addresses."""
    known = (
        '[ "$*" = "show node no.such.name.invalid" ] && echo "   NodeAddr=address-of-it'
        ' NodeHostName=x"'
    )
    program(tmp_path / "scontrol", f"#!/bin/sh\n{known}\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert address("other.name.invalid") == "other.name.invalid"  # Slurm has no node of this name
    assert address("localhost") == "localhost"
    words = agent_command(attempt(), head="no.such.name.invalid", port=1, node_rank=None)
    assert "--master-addr=address-of-it" in words


CONTAINER = {"image": "/images/a b.sqsh", "mounts": ["/data:/data:ro"], "options": ["--own"]}


def test_pyxis_takes_options_of_srun_and_apptainer_goes_before_the_command() -> None:
    environment = {"NCCL_DEBUG": "WARN"}
    pyxis = attempt(
        container={**CONTAINER, "runtime": "pyxis"},
        paths={"shared": ["/shared"]},
        environment=environment,
    )
    options, words = container_parts(pyxis)
    assert options == [
        "--container-image=/images/a b.sqsh",
        "--container-mounts=/data:/data:ro,/project/work:/project/work,/shared:/shared",
        "--container-workdir=/project/work",
        "--own",
    ]
    assert words == INSIDE
    for gpus in (0, 8):
        container = {**CONTAINER, "runtime": "apptainer"}
        options, words = container_parts(
            attempt(container=container, nodes={"gpus": gpus}, environment=environment)
        )
        assert options == [] and words[:2] == ["apptainer", "exec"]
        assert words[-5:] == ["--own", "/images/a b.sqsh", *INSIDE]
        assert ("--nv" in words) == bool(gpus)
    binds = [after for word, after in zip(words, words[1:], strict=False) if word == "--bind"]
    own = [f"{path}:{path}" for path in ("/shared/runs/a", "/project/work")]
    assert binds == ["/data:/data:ro", *own]


# JobState, Reason, Restarts, ExitCode; whether the batch script was killed.
KILLED = """\
RUNNING    None             1 0:0  yes
COMPLETING JobLaunchFailure 1 0:9  yes
FAILED     NonZeroExitCode  1 0:9  yes
COMPLETING TimeLimit        1 0:0  yes
COMPLETING None             1 1:0  it ended by itself, and badly
COMPLETING None             1 0:0  scancel
CANCELLED  None             1 0:15 scancel
COMPLETING None             2 0:0  requeued by someone else
"""


def test_the_guard_distinguishes_a_kill_from_other_ends_and_waits_for_it(tmp_path: Path) -> None:
    for line in KILLED.splitlines():
        *words, why = line.split(maxsplit=4)
        fields = dict(zip(("JobState", "Reason", "Restarts", "ExitCode"), words, strict=True))
        assert guard.killed(fields, "1") == (why == "yes"), line
    path = tmp_path / "launch" / "state.json"
    assert not guard.of_its_own_will(tmp_path)
    # The supervisor writes "requeued" before it sends the request to Slurm.
    for state, own in (("running", False), ("requeued", False), ("stopped", True)):
        write_json(path, {"state": state})
        assert guard.of_its_own_will(tmp_path) == own
    path.rename(path.with_name("stop.json"))
    assert guard.of_its_own_will(tmp_path)
    # cat ends when its input ends.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        threading.Timer(0.5, process.stdin.close).start()
        guard.wait_for_end(process.pid)
        assert process.stdin.closed


class Commands:
    """Scripts that replace Slurm's commands and record their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()

    def put(self, name: str, script: str) -> None:
        """Add a command: a line of bash."""
        program(
            self.folder / name,
            f'#!/bin/bash\necho "$@" >> "{self.folder}/{name}.calls"\n{script}\n',
        )

    def calls(self, name: str) -> list[str]:
        """Return the arguments of each call."""
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def excluded(self) -> list[str]:
        """Nodes that each update of the job excludes."""
        calls = self.calls("scontrol")
        return [call.rpartition("=")[2] for call in calls if call.startswith("update")]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    made = Commands(tmp_path)
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    made.put("scontrol", "[[ $2 == hostnames ]] && tr , '\\n' <<< \"$3\"; exit 0")
    return made


def here(folder: Path, **profile: Any) -> Attempt:
    """Return an attempt in a folder."""
    (folder / "logs").mkdir()
    (folder / "launch").mkdir()
    item = replace(ITEM, directory=str(folder))
    job = replace(
        JOB,
        directory=str(folder),
        working_directory=str(folder),
        python=sys.executable,
        profile=profile,
    )
    return Attempt(1, folder, job, item, ("n1", "n2"), dict(os.environ))


def test_ranks_dump_stacks_while_they_still_save(commands: Commands, tmp_path: Path) -> None:
    commands.put("srun", "sleep 5")
    with subprocess.Popen(["sleep", "600"]) as process:
        running = SlurmRunning(process, "7", "launch-1", here(tmp_path))
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR2):
            running.signal(number)
        wait_for(lambda: len(commands.calls("srun")) == 2)
        assert sorted(call.split()[-1] for call in commands.calls("srun")) == ["10", "12"]
        process.kill()


def test_a_check_that_srun_cannot_start_is_no_nodes_fault(
    commands: Commands, tmp_path: Path
) -> None:
    commands.put(
        "srun",
        'echo "srun: error: Unable to create step for job 7: Invalid credential" >&2; exit 1',
    )
    place = SlurmPlace({"SLURM_JOB_ID": "7"})
    attempt = here(tmp_path, health={"timeout_seconds": 20})
    with pytest.raises(PlaceError, match="the nodes cannot be checked: srun: .*Invalid credential"):
        place.check_nodes(attempt)
    write_json(
        tmp_path / "health" / "n1.json",
        {"node": "n1", "faults": [], "warnings": [], "facts": {}, "time": time.time()},
    )
    faults = place.check_nodes(attempt)
    assert not faults["n1"] and "did not answer" in faults["n2"][0]


def test_a_controller_that_is_away_is_waited_for(commands: Commands) -> None:
    commands.put(
        "scontrol", 'echo "Unable to contact slurm controller (connect failure)" >&2; exit 1'
    )
    place = SlurmPlace({"SLURM_JOB_ID": "7"})
    with pytest.raises(Unreachable):
        place.requeue(())
    assert place.taken() is None and not place.cancelled() and not place.enough_without(["n1"])
    commands.put(
        "scontrol", 'echo "Requested operation is presently disabled for job 7" >&2; exit 1'
    )
    with pytest.raises(PlaceError, match="disabled") as refused:
        place.requeue(())
    assert not isinstance(refused.value, Unreachable)


SHOWN = (
    "JobId=7 JobState=PENDING Restarts=1 Partition=main Features=fast NumNodes=2-2"
    " TresPerNode=gres:gpu:h100:8 ExcNodeList=(null)"
)
NODES = "".join(
    f"NodeName=n{number} CPUTot=8 RealMemory=16000 AvailableFeatures={feature} Gres=gpu:{kind}:8"
    " Partitions=main\\n"
    for number, (feature, kind) in enumerate(
        (("fast", "h100"),) * 4 + (("slow", "h100"), ("fast", "a100"))
    )
)


def answers(commands: Commands, nodes: str | None) -> None:
    """Let scontrol report job 7 and these nodes; None: it refuses to list nodes."""
    denied = "{ echo 'slurm_load_node error: Access/permission denied' >&2; exit 1; }"
    listed = denied if nodes is None else f"printf '{nodes}'"
    of_job, of_nodes = f"[[ $* == *job* ]] && echo '{SHOWN}'", f"[[ $2 == nodes ]] && {listed}"
    commands.put(
        "scontrol", f"[[ $2 == hostnames ]] && tr , '\\n' <<< \"$3\"; {of_job}; {of_nodes}; exit 0"
    )


@pytest.mark.parametrize(
    ("listed", "exclude", "enough", "left"),
    [
        (NODES, ["n0", "n1", "gone"], True, "n0,n1"),
        (NODES, ["n0", "n1", "n2", "gone"], False, "n0"),
        (None, ["n0", "n1"], False, "n0,n1"),
    ],
)
def test_an_exclusion_that_cannot_be_is_not_requested(
    commands: Commands, listed: str | None, exclude: list[str], enough: bool, left: str
) -> None:
    """Four nodes fit, one lacks the feature, one has another GPU, and two are needed; the profile
    excludes n0. A node that is gone is ignored. If the site lists no nodes (PrivateData=nodes), the
    names are used unchecked: a refusal does not mean that no nodes exist.
    """
    notices = ("a notice of the site\\n", "the second line = of a reason\\n")
    answers(commands, listed and listed.join(notices))
    place = SlurmPlace({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, ("n0",))
    assert place.enough_without(exclude) == enough
    with pytest.raises(SystemExit):
        place.requeue(exclude)
    assert commands.excluded == [left]


def test_nodes_enough_are_of_one_partition_and_of_the_reservation_and_named_ones_stay(
    commands: Commands,
) -> None:
    """Slurm accepts each of these exclusions and would let the job wait forever. Text in a job's
    comment is not a field of it.
    """
    reserved = "[[ $3 == r ]] && echo 'ReservationName=r Nodes=n0,n1,n2 NodeCnt=3'"
    commands.put("scontrol", f"[[ $2 == hostnames ]] && tr , '\\n' <<< \"$3\"; {reserved}; exit 0")
    nodes = [
        slurm.Node(f"n{number}", "IDLE", "", 8, 16000, "", ("a" if number < 3 else "b", "all"))
        for number in range(6)
    ]
    job = {"NumNodes": "3", "Partition": "all"}
    for more, exclude, enough in (
        ("", "n0 n3", True),
        ("Partition=a,b", "n0", True),
        ("Partition=a,b", "n0 n3", False),
        ("Reservation=r", "n3", True),
        ("Reservation=r", "n0", False),
        ("Reservation=gone", "n0", True),
        ("ReqNodeList=n0,n1", "n2", True),
        ("ReqNodeList=n0,n1", "n1", False),
    ):
        requested = job | slurm.fields(more)
        assert slurm.enough_nodes(nodes, requested, exclude.split()) == enough, (more, exclude)
    report = slurm.fields(
        "JobId=7 Restarts=1 Partition=main Comment=as Restarts=9 in Partition=x StdIn=/dev/null"
    )
    assert (report["Restarts"], report["Partition"], report["StdIn"]) == ("1", "main", "/dev/null")


def test_hidden_partitions_are_requested(commands: Commands, tmp_path: Path) -> None:
    """Otherwise Slurm lists neither steps nor jobs in them: a hang would not be ended, and a run
    would be submitted twice.
    """
    script = tmp_path / "job.sh"
    hidden = (
        f"case $* in *--steps*) echo '7.0|launch-1' ;; *) echo '7|RUNNING|None|n1|{script}' ;; esac"
    )
    commands.put("squeue", f'[ "$SQUEUE_ALL" ] && {{ {hidden}; }}; exit 0')
    assert set(slurm.queue(["7"])) == set(slurm.jobs_of(script)) == {"7"}
    with subprocess.Popen(["sleep", "600"]) as process:
        commands.put("scancel", f"kill {process.pid}")
        SlurmRunning(process, "7", "launch-1", here(tmp_path)).kill(0.5)
    assert "--signal=KILL 7.0" in commands.calls("scancel")


def test_a_row_that_is_no_row_is_skipped(commands: Commands) -> None:
    """The reason of a node may have two lines, and a site may print a notice before any output."""
    commands.put("sinfo", "printf 'n1|draining|bad fan\\ncall | me\\nn2|idle|none\\n'")
    place = SlurmPlace({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2"})
    assert place.down_nodes() == {"n1": "draining: bad fan"}
    commands.put("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    commands.put(
        "sacct",
        "printf 'maintenance on Monday\\n7|CANCELLED by 0|None assigned|sbatch --wrap=a|b\\n'",
    )
    assert slurm.queue(["7"]) == {"7": slurm.QueueState("CANCELLED", command="sbatch --wrap=a|b")}
    commands.put(
        "sacct",
        "[[ $* != *SubmitLine* ]] || { echo 'sacct: error: Invalid field requested: \"SubmitLine\"'"
        " >&2; exit 1; }; echo '7|FAILED|n1'",
    )
    assert slurm.queue(["7"]) == {"7": slurm.QueueState("FAILED", nodes="n1")}  # Slurm before 21.08


def row_of(job: Job, state: slurm.QueueState) -> Row:
    """Return the job's row for Slurm's state of job 12."""
    (row,) = rows_of(job, Queue({"12": state}), time.time())
    return row


def test_a_job_id_that_slurm_uses_again_is_another_job(commands: Commands, tmp_path: Path) -> None:
    """Identified by squeue's command and by sacct's submit line; also for `cancel`, which ends the
    jobs of `standings`.
    """
    job = make_job(tmp_path / "a run")
    script = job.launch / "job.sh"
    write_state(job, "running", job_id="12", pid=4711, host="n1")
    for command in (str(script), f"sbatch --parsable '{script}'", ""):  # "": unknown
        assert row_of(job, slurm.QueueState("RUNNING", command=command)).state == "running"
    assert row_of(job, slurm.QueueState("RUNNING", command="/else/launch/job.sh")).state == "lost"
    commands.put("squeue", "echo '12|RUNNING|None|n1|/else/launch/job.sh'")
    assert [standing.kind for standing in standings(job)] == ["idle"]
    commands.put(
        "squeue", f"echo '12|SUSPENDED|None|n1|{script}'; echo '13|RUNNING|None|n1|(null)'"
    )
    assert [standing.job_id for standing in standings(job)] == ["12"]
    # If the site's sbatch passes the script through a pipe, the recorded id and the name of the job
    # decide.
    commands.put("squeue", "echo '12|RUNNING|None|n1|(null)'; echo '13|RUNNING|None|n1|(null)'")
    for name, kind in (("a run", "active"), ("another", "idle")):
        commands.put("scontrol", f"echo 'JobId=12 JobName={name} UserId=me(7)'")
        assert [standing.kind for standing in standings(job)] == [kind]


def test_a_job_that_cannot_start_reports_it(tmp_path: Path, wording: Wording) -> None:
    job = make_job(tmp_path / "demo")
    write_state(job, "requeued", message="two failures on node1", job_id="12")
    row = row_of(job, slurm.QueueState("PENDING", "BadConstraints"))
    assert row.state == "queued" and "cannot start" in row.message
    wording(row.message)


@pytest.fixture
def alone(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], AbstractContextManager[bool]]:
    """Lock an item as a Slurm job; notices are written to ``notices``."""
    answers(commands, "")
    monkeypatch.setattr(supervisor, "LOCK_SECONDS", 0.0)
    write_json(tmp_path / "launch" / "state.json", {"job_id": "7", "host": "n9"})
    item = replace(ITEM, directory=str(tmp_path))
    notify = {"command": f"cat >> '{tmp_path}/notices'", "events": ["stopped"]}

    def hold(job_id: str) -> AbstractContextManager[bool]:
        place = SlurmPlace({"SLURM_JOB_ID": job_id, "SLURM_RESTART_COUNT": "0"})
        return supervisor._alone(
            item,
            place,
            Signals(),
            Journal(replace(JOB, items=(item,), profile={"notify": notify}), item, job_id),
        )

    return hold


def test_a_lock_that_is_left_held_stops_no_run(
    commands: Commands,
    tmp_path: Path,
    alone: Callable[[str], AbstractContextManager[bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If an earlier start of this job holds it, the run continues. If another job holds it, the job
    returns to the queue, without a user error.

    If that other job does not end, this one does, after the number of starts or the time in the
    README.
    """
    busy, notices = tmp_path / "launch" / "busy_8.json", tmp_path / "notices"

    def refused() -> Any:
        with pytest.raises(SystemExit) as left, alone("8"):
            raise AssertionError
        return left.value.code

    with (tmp_path / "launch" / "supervisor.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with alone("7") as held:
            assert held is False
        monkeypatch.setattr(supervisor, "BUSY_TIMES", 2)
        assert (
            [refused(), refused()] == [0, 0]
            and commands.calls("scontrol").count("requeue 8") == 2
            and not notices.exists()
        )
        assert (
            refused() == Exit.FAULT
            and commands.calls("scontrol").count("requeue 8") == 2
            and not busy.exists()
        )
        report = json.loads(notices.read_text())
        assert (
            report["event"] == "stopped"
            and "another job (7, on n9), after 3 starts and 0 minutes" in report["message"]
        )
        monkeypatch.setattr(supervisor, "BUSY_SECONDS", 100.0)
        write_json(busy, {"since": time.time() - 101.0, "times": 1})
        assert refused() == Exit.FAULT
        assert refused() == 0 and read_json(busy)["times"] == 1
    with alone("8") as held:
        assert held and not busy.exists()
