"""The verb ``status``: the queue's word counts before the supervisor's, numbers are the run's own, and nothing that is gone looks alive."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch import __main__ as command_line
from launch.cluster.slurm import QueueState
from launch.job import Item, Job, append_json, launch_folder, write_json
from launch.verbs.status import Queue, Row, ask, rows_of, summary

NOW = 1_800_000_000.0


def make_job(directory: Path, scheduler: str = "slurm", items: int = 1, kind: str = "run") -> Job:
    """A job's directory, submitted as job 12 where there is a Slurm."""
    array = items > 1
    folders = [directory / "tasks" / f"{index:04}" for index in range(items)] if array else [directory]
    name = directory.name
    job = Job(
        name=name,
        kind=kind,
        directory=str(directory),
        working_directory=str(directory),
        code=str(directory / "launch" / "code"),
        python=sys.executable,
        nodes=2,
        processes_per_node=8,
        torchrun=True,
        items=tuple(Item(str(folder), ("-m", "pretrain"), f"{name}[{index}]" if array else name) for index, folder in enumerate(folders)),
        profile={"scheduler": scheduler},
        profile_path="x.yaml",
        array=array,
    )
    job.save()
    if scheduler == "slurm":
        for job_id in ("7", "12"):
            append_json(launch_folder(directory) / "submissions.jsonl", {"time": 1.7e9, "job_id": job_id})
    return job


def says(job: Job, state: str, index: int = 0, **values: Any) -> None:
    """A supervisor's state.json: of this process, now."""
    known = {"format": 1, "state": state, "attempt": 2, "failures": 0, "job_id": None, "message": None, "time": time.time()}
    path = launch_folder(Path(job.items[index].directory)) / "state.json"
    write_json(path, {**known, "pid": os.getpid(), "host": socket.gethostname(), **values})


def stops(job: Job, why: str) -> None:
    """Someone asked it to stop."""
    write_json(launch_folder(Path(job.directory)) / "stop.json", {"why": why, "message": "the same failure twice", "time": NOW, "by": "x"})


def row(job: Job, queue: Queue | None = None) -> Row:
    """The job's only row."""
    (only,) = rows_of(job, queue or Queue({}), NOW)
    return only


def slurm_says(state: str, reason: str = "") -> Queue:
    """Slurm's answer on job 12."""
    return Queue({"7": QueueState("COMPLETED"), "12": QueueState(state, reason)})


@pytest.fixture
def dead() -> int:
    """The pid of a process that is over."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


# --- the state -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("supervisor", "queue", "state", "active"),
    [
        (None, "PENDING", "queued", True),
        (None, "RUNNING", "starting", True),
        (None, "CONFIGURING", "configuring", True),
        ("requeued", "PENDING", "queued", True),
        ("requeued", "RUNNING", "starting", True),
        ("running", "RUNNING", "running", True),
        ("checking", "RUNNING", "checking", True),
        ("saving", "COMPLETING", "completing", True),
        ("running", "PENDING", "queued", True),
        ("stopped", "RUNNING", "starting", True),
        ("running", "NODE_FAIL", "lost", False),
        ("running", "CANCELLED", "lost", False),
        ("running", None, "lost", False),
        ("requeued", "FAILED", "lost", False),
        (None, "FAILED", "lost", False),
        (None, None, "new", False),
        ("finished", "COMPLETED", "finished", False),
        ("finished", None, "finished", False),
        ("stopped", "FAILED", "stopped", False),
        ("cancelled", "CANCELLED", "cancelled", False),
    ],
)
def test_the_queues_word_counts_before_the_supervisors(
    supervisor: str | None, queue: str | None, state: str, active: bool, tmp_path: Path
) -> None:
    job = make_job(tmp_path / "demo")
    if supervisor:
        says(job, supervisor, job_id="12")
    found = row(job, slurm_says(queue) if queue else None)
    assert (found.state, found.active) == (state, active)
    assert found.job_id == ("12" if supervisor or queue else None)
    if state == "lost":
        assert "launch requeue" in found.message or "launch logs" in found.message


@pytest.mark.parametrize("state", ["cancelled", "stopped"])
@pytest.mark.parametrize("known", [{"job_id": "7"}, {"job_id": None, "time": 1.6e9}])
def test_a_run_that_was_resubmitted_after_its_end_stands_as_its_new_job_does(state: str, known: dict[str, Any], tmp_path: Path) -> None:
    """Slurm is asked, whatever the supervisor of the job before wrote last."""
    job = make_job(tmp_path / "demo")
    says(job, state, message="of old", **known)
    assert ask([job]) != Queue({})  # here is no Slurm that knows them, or none at all
    waits = row(job, slurm_says("PENDING", "Priority"))
    assert (waits.state, waits.active, waits.message) == ("queued", True, "waits: Priority")
    assert row(job, slurm_says("RUNNING")).state == "starting"
    failed = row(job, slurm_says("FAILED"))
    assert failed.state == "lost" and "job 12: FAILED before the supervisor began" in failed.message
    assert row(job, Queue({}, "squeue: cannot be reached")).state == "unknown?"
    stops(job, "cancelled")
    assert row(job, slurm_says("CANCELLED")).state == "cancelled"


def test_what_ended_in_its_last_job_is_not_asked_for(tmp_path: Path) -> None:
    job = make_job(tmp_path / "demo")
    for values in ({"job_id": "12"}, {"job_id": None}):
        says(job, "stopped", **values)
        assert ask([job]) == Queue({}) and row(job).state == "stopped"
    array = make_job(tmp_path / "sweep", items=2)
    append_json(launch_folder(tmp_path / "sweep") / "submissions.jsonl", {"time": 1.7e9, "job_id": "13", "items": [1]})
    says(array, "stopped", 0, job_id="12_0")
    says(array, "stopped", 1, job_id="12_1")
    found = rows_of(array, Queue({"12_0": QueueState("FAILED"), "13_1": QueueState("PENDING")}), NOW)
    assert [one.state for one in found] == ["stopped", "queued"]


def test_printed_commands_survive_a_shell(tmp_path: Path, dead: int) -> None:
    job = make_job(tmp_path / "my runs; rm", "local")
    says(job, "running", pid=dead)
    assert shlex.split(row(job).message.split("`")[1])[-1] == job.directory
    job = make_job(tmp_path / "it's")
    assert shlex.split(row(job, slurm_says("FAILED")).message.partition("see: ")[2])[-1] == job.directory


def test_a_queued_job_says_why_it_waits_and_why_it_came_back(tmp_path: Path) -> None:
    job = make_job(tmp_path / "demo")
    assert row(job, slurm_says("PENDING", "Resources")).message == "waits: Resources"
    says(job, "requeued", message="saved at step 100")
    assert row(job, slurm_says("PENDING", "BeginTime")).message == "saved at step 100; waits: BeginTime"


def test_a_silent_slurm_makes_states_doubtful_and_nothing_lost(tmp_path: Path) -> None:
    job = make_job(tmp_path / "demo")
    silent = Queue({}, "squeue: cannot be reached")
    assert row(job, silent).state == "unknown?"
    says(job, "running")
    assert (row(job, silent).state, row(job, silent).active) == ("running?", True)
    says(job, "finished")
    assert row(job, silent).state == "finished"


def test_a_local_supervisor_is_believed_only_while_it_lives(tmp_path: Path, dead: int) -> None:
    job = make_job(tmp_path / "demo", "local")
    assert row(job).state == "new"
    says(job, "running")
    assert (row(job).state, row(job).active) == ("running", True)
    says(job, "running", pid=dead)
    assert (row(job).state, row(job).active) == ("lost", False) and f"process {dead}" in row(job).message
    says(job, "running", time=time.time() - 1e6)  # the number is another process's by now
    assert row(job).state == "lost"
    says(job, "running", pid=dead, host="elsewhere")
    assert row(job).state == "running?" and "elsewhere" in row(job).message
    says(job, "stopped", pid=dead, message="saved")
    assert (row(job).state, row(job).message) == ("stopped", "saved")


@pytest.mark.parametrize(("why", "state"), [("cancelled", "cancelled"), ("gave up", "stopped")])
def test_a_run_that_was_stopped_says_why(why: str, state: str, tmp_path: Path, dead: int) -> None:
    job = make_job(tmp_path / "demo", "local")
    says(job, "stopped", pid=dead)
    stops(job, why)
    assert (row(job).state, row(job).message) == (state, "the same failure twice")


# --- the numbers -----------------------------------------------------------------------------------------------------------------


def trained(job: Job, age: float = 5.0) -> None:
    """A run's own files, with a last line that is not whole yet."""
    directory = Path(job.directory)
    write_json(directory / "progress.json", {"format": 1, "state": "running", "step": 100, "steps": 40000})
    lines = [{"step": step, "loss": 10.0 - step / 100, "tokens_per_second": 1.5e6, "step_seconds": 0.5} for step in range(98, 103)]
    text = "".join(json.dumps(line) + "\n" for line in [*lines[:3], {"step": 100, "valid_loss": 8.5}, *lines[3:]])
    (directory / "metrics.jsonl").write_text(text + '{"step": 103, "lo')
    os.utime(directory / "metrics.jsonl", (NOW - age, NOW - age))


def test_the_numbers_are_those_of_the_last_whole_line(tmp_path: Path) -> None:
    job = make_job(tmp_path / "demo")
    trained(job)
    says(job, "running", failures=1)
    found = row(job, slurm_says("RUNNING"))
    assert (found.step, found.steps, found.loss, found.valid_loss) == (102, 40000, 10.0 - 1.02, 8.5)
    assert (found.tokens_per_second, found.step_age, found.attempt, found.failures) == (1.5e6, 5.0, 2, 1)
    assert found.seconds_left == (40000 - 102) * 0.5
    over = row(job, slurm_says("FAILED"))
    assert (over.step, over.loss) == (102, 10.0 - 1.02) and over.seconds_left is None and over.step_age is None


def test_no_time_is_left_where_no_step_is_made(tmp_path: Path) -> None:
    """Neither of lines that an earlier attempt left, nor while the run waits, or its nodes are checked."""
    job = make_job(tmp_path / "demo")
    trained(job, age=100.0)
    for started, left in ((NOW - 1000, (40000 - 102) * 0.5), (NOW - 50, None)):
        write_json(tmp_path / "demo" / "attempts" / "0001" / "attempt.json", {"started": started})
        says(job, "running", job_id="12")
        assert row(job, slurm_says("RUNNING")).seconds_left == left
        for state, queue in (("waiting", "RUNNING"), ("checking", "RUNNING"), ("running", "PENDING")):
            says(job, state, job_id="12")
            assert row(job, slurm_says(queue)).seconds_left is None, state


def test_commands_have_no_numbers(tmp_path: Path) -> None:
    job = make_job(tmp_path / "merge", kind="command")
    trained(job)
    assert row(job, slurm_says("RUNNING")).step is None


def test_an_array_is_one_row_of_counts_and_its_first_trouble(tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep", items=4)
    says(job, "finished", 0)
    says(job, "running", 1)
    says(job, "running", 3)
    queue = Queue({"7_3": QueueState("COMPLETED"), "12_1": QueueState("RUNNING"), "12_2": QueueState("PENDING", "JobArrayTaskLimit")})
    rows = rows_of(job, queue, NOW)
    assert [found.state for found in rows] == ["finished", "running", "queued", "lost"]
    assert [found.job_id for found in rows] == [None, "12_1", "12_2", "7_3"]
    whole = summary(job, rows)
    assert whole.state == "1 finished, 1 running, 1 queued, 1 lost" and whole.active and whole.message.startswith("sweep[3]: job 7_3")


# --- the verb --------------------------------------------------------------------------------------------------------------------


def board(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> list[str]:
    """What the verb prints."""
    assert command_line.main(["status", *map(str, words)]) == code
    captured = capsys.readouterr()
    return (captured.out if code == 0 else captured.err).splitlines()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: int) -> Path:
    """A folder runs/ with a run, an array, a command that is long over, in the working directory."""
    monkeypatch.chdir(tmp_path)
    one = make_job(tmp_path / "runs" / "demo", "local")
    trained(one)
    says(one, "running")
    array = make_job(tmp_path / "runs" / "sweeps" / "lr", "local", items=3)
    says(array, "finished", 0)
    says(array, "stopped", 1, pid=dead, message="TypeError: boo", failures=2)
    old = make_job(tmp_path / "runs" / "jobs" / "merge-1", "local", kind="command")
    says(old, "finished", time=time.time() - 2e5)
    return tmp_path / "runs"


def test_the_board_has_a_line_a_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, demo, array, note = board(capsys)
    assert header.split()[:3] == ["NAME", "STATE", "ATTEMPT"]
    assert demo.split()[:6] == ["demo", "running", "2", "102/40000", "8.9800", "(valid"] and "1.5M" in demo
    assert array.startswith("lr ") and "1 finished, 1 stopped, 1 new" in array and "lr[1]: TypeError: boo" in array
    assert note == "1 that ended more than a day ago: --all"
    assert any(line.startswith("merge-1") for line in board(capsys, "--all"))


def test_items_and_single_directories(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = board(capsys, runs / "sweeps", "--items")
    assert [line.split()[0] for line in lines] == ["NAME", "lr", "lr[0]", "lr[1]", "lr[2]"] and "2 (2 failed)" in lines[3]
    one = board(capsys, runs / "sweeps" / "lr" / "tasks" / "0001")
    assert len(one) == 2 and one[1].startswith("lr[1]") and "TypeError" in one[1]
    assert board(capsys, runs / "jobs" / "merge-1")[1].split()[:2] == ["merge-1", "finished"]


def test_runs_of_one_name_are_told_by_their_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("here/a/demo", "here/b/demo", "here/c/other", "far/demo"):
        make_job(tmp_path / folder, "local")
    monkeypatch.chdir(tmp_path / "here")
    lines = board(capsys, "a", tmp_path / "here", tmp_path / "far", "a/demo")
    assert [line.split()[0] for line in lines] == ["NAME", "a/demo", "b/demo", "other", str(tmp_path / "far" / "demo")]


def test_a_task_and_its_array_are_one_job_and_a_task_alone_is_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path / "lr", "local", items=3)
    says(job, "finished", 1)
    task = tmp_path / "lr" / "tasks" / "0001"
    assert board(capsys, task)[1].split() == ["lr[1]", "finished", "2"]
    assert board(capsys, task, tmp_path / "lr")[1:] == board(capsys, tmp_path / "lr")[1:]
    assert [line.split()[0] for line in board(capsys, task, tmp_path / "lr" / "tasks" / "0002", "--items")] == [
        "NAME",
        "lr",
        "lr[1]",
        "lr[2]",
    ]
    slurm = make_job(tmp_path / "wd", items=3)
    (only,) = rows_of(slurm, Queue({"12_0": QueueState("RUNNING"), "12_2": QueueState("PENDING")}), NOW, [2])
    assert (only.name, only.state, only.job_id) == ("wd[2]", "queued", "12_2")


def test_json_has_every_item(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads("\n".join(board(capsys, "--json", "--all")))
    assert [value["name"] for value in values] == ["demo", "merge-1", "lr[0]", "lr[1]", "lr[2]"]
    assert values[0]["step"] == 102 and values[3]["message"] == "TypeError: boo"


def test_watch_ends_when_all_is_over(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(board(capsys, runs / "sweeps", "--watch", "60")) == 2
    command = [sys.executable, "-m", "launch", "status", str(runs / "demo"), "--watch", "0.2"]
    environ = {**os.environ, "PYTHONPATH": str(Path(command_line.__file__).parents[1])}
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert watching.stdout
        assert [watching.stdout.readline().split()[0] for _ in range(4)] == ["NAME", "demo", "NAME", "demo"]
        path = launch_folder(runs / "demo") / "state.json"
        write_json(path, {**json.loads(path.read_text()), "state": "finished"})
        assert watching.wait(20) == 0 and "finished" in watching.stdout.read().splitlines()[-1]
    finally:
        watching.kill()
        watching.communicate()


def test_nothing_and_mistakes_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert board(capsys) == ["no job here yet"]
    (missing,) = board(capsys, "nowhere", code=2)
    assert missing.startswith("launch: error: nowhere: no such directory")
    (wrong,) = board(capsys, "--watch", "0", code=2)
    assert "more than 0 seconds" in wrong
