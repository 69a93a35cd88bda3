"""Tests of the verbs ``status`` and ``logs`` on recorded folders: the queue has precedence; origin
of lines; first failure.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import __main__ as command_line
from launch.cluster.slurm import QueueState
from launch.job import Job, append_json, launch_folder, rank_log, write_json
from launch.node.logs import Follower, Source, merged
from launch.verbs.status import Queue, Row, ask, rows_of, summary
from tests.launch.folders import (
    RESET,
    make_attempt,
    make_job,
    record,
    trace,
    write_log,
    write_state,
)
from tests.launch.supervised import start, wait_for
from tests.wording import Wording

NOW = 1_800_000_000.0
THEN = 1.79e9
SILENT = Queue({}, "squeue: cannot be reached")


def stops(job: Job, why: str) -> None:
    """Record a request to stop a job."""
    write_json(
        job.launch / "stop.json",
        {"why": why, "message": "the same failure twice", "time": NOW, "by": "x"},
    )


def row(job: Job, queue: Queue | None = None) -> Row:
    """Return the job's only row."""
    (only,) = rows_of(job, queue or Queue({}), NOW)
    return only


def slurm_state(state: str | None, reason: str = "") -> Queue:
    """Return Slurm's state of job 12."""
    return Queue({"7": QueueState("COMPLETED"), "12": QueueState(state, reason)} if state else {})


@pytest.fixture(scope="module")
def dead() -> int:
    """A process id that no process has."""
    return int(Path("/proc/sys/kernel/pid_max").read_text())


def lines_of(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> list[str]:
    """Run a command and return its lines."""
    assert command_line.main(list(map(str, words))) == code
    captured = capsys.readouterr()
    return (captured.out if code == 0 else captured.err).splitlines()


STATES = """\
-         SILENT      unknown?    active
running   SILENT      running?    active
finished  SILENT      finished    over
-         PENDING     queued      active
-         RUNNING     starting    active
-         CONFIGURING configuring active
requeued  PENDING     queued      active
requeued  RUNNING     starting    active
running   RUNNING     running     active
checking  RUNNING     checking    active
saving    COMPLETING  completing  active
running   PENDING     queued      active
stopped   RUNNING     starting    active
running   NODE_FAIL   lost        over
running   CANCELLED   lost        over
running   -           lost        over
requeued  FAILED      lost        over
-         FAILED      lost        over
-         -           new         over
finished  COMPLETED   finished    over
finished  -           finished    over
stopped   FAILED      stopped     over
cancelled CANCELLED   cancelled   over
"""


def test_the_queues_word_counts_before_the_supervisors(tmp_path: Path, wording: Wording) -> None:
    for number, line in enumerate(STATES.splitlines()):
        supervisor, queue, state, active = (None if word == "-" else word for word in line.split())
        job = make_job(tmp_path / str(number))
        if supervisor:
            write_state(job, supervisor, job_id="12", pid=4711, host="n1")
        found = row(job, SILENT if queue == "SILENT" else slurm_state(queue))
        assert (found.state, found.active) == (state, active == "active"), line
        assert found.job_id == ("12" if supervisor or queue not in (None, "SILENT") else None), line
        wording(f"{found.state}: {found.message}")


@pytest.mark.parametrize("known", [{"job_id": "7"}, {"job_id": None, "time": 1.6e9}])
def test_a_run_that_was_resubmitted_after_its_end_has_the_state_of_its_new_job(
    known: dict[str, Any], tmp_path: Path
) -> None:
    """Slurm is queried, whatever the supervisor of the earlier job wrote last."""
    for state in ("cancelled", "stopped"):
        job = make_job(tmp_path / state)
        write_state(job, state, message="of old", **known)
        assert ask([job]) != Queue({})  # this machine has no Slurm that knows these jobs
        waits = row(job, slurm_state("PENDING", "Priority"))
        assert (waits.state, waits.active, waits.message) == ("queued", True, "waits: Priority")
        assert (
            row(job, slurm_state("RUNNING")).state == "starting"
            and row(job, slurm_state("FAILED")).state == "lost"
        )
        assert row(job, SILENT).state == "unknown?"
        stops(job, "cancelled")
        assert row(job, slurm_state("CANCELLED")).state == "cancelled"


def test_a_local_supervisor_is_believed_only_while_it_lives(tmp_path: Path, dead: int) -> None:
    job = make_job(tmp_path / "demo", "local")
    assert row(job).state == "new"
    for values, expected in (
        ({}, ("running", True)),
        ({"pid": dead}, ("lost", False)),
        ({"time": time.time() - 1e6}, ("lost", False)),  # the number now belongs to another process
        ({"pid": dead, "host": "elsewhere"}, ("running?", True)),
    ):
        write_state(job, "running", **values)
        assert (row(job).state, row(job).active) == expected
    write_state(job, "stopped", pid=dead, message="saved")
    assert (row(job).state, row(job).message) == ("stopped", "saved")
    for why, state in (("cancelled", "cancelled"), ("gave up", "stopped")):
        stops(job, why)
        assert (row(job).state, row(job).message) == (state, "the same failure twice")


def trained(job: Job, age: float = 5.0) -> None:
    """Write the files of a run, with an incomplete last line."""
    directory = job.path
    write_json(
        directory / "progress.json", {"format": 1, "state": "running", "step": 100, "steps": 40000}
    )
    lines = [
        {"step": step, "loss": 10.0 - step / 100, "tokens_per_second": 1.5e6, "step_seconds": 0.5}
        for step in range(98, 103)
    ]
    text = "".join(
        json.dumps(line) + "\n"
        for line in [*lines[:3], {"step": 100, "valid_loss": 8.5}, *lines[3:]]
    ).replace("}", '}\n{"step": 9, "l')
    (directory / "metrics.jsonl").write_text(text + '{"step": 103, "lo')
    os.utime(directory / "metrics.jsonl", (NOW - age, NOW - age))


def test_the_numbers_are_those_of_the_last_whole_line(tmp_path: Path) -> None:
    job = make_job(tmp_path / "demo")
    trained(job)
    write_state(job, "running", failures=1)
    found = row(job, slurm_state("RUNNING"))
    assert (found.step, found.steps, found.loss, found.valid_loss) == (102, 40000, 10.0 - 1.02, 8.5)
    assert (found.tokens_per_second, found.step_age) == (1.5e6, 5.0)
    assert (found.attempt, found.failures) == (2, 1)
    assert found.seconds_left == (40000 - 102) * 0.5
    over = row(job, slurm_state("FAILED"))
    assert (over.step, over.loss) == (102, 10.0 - 1.02)
    assert over.seconds_left is over.step_age is None
    merge = make_job(tmp_path / "merge", kind="command")
    trained(merge)
    assert row(merge, slurm_state("RUNNING")).step is None


def test_an_array_is_one_row_of_counts_and_its_first_trouble(tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep", items=4)
    for state, index in (("finished", 0), ("running", 1), ("running", 3)):
        write_state(job, state, index)
    queue = Queue(
        {
            "7_3": QueueState("COMPLETED"),
            "12_1": QueueState("RUNNING"),
            "12_2": QueueState("PENDING", "JobArrayTaskLimit"),
        }
    )
    rows = rows_of(job, queue, NOW)
    assert [found.state for found in rows] == ["finished", "running", "queued", "lost"]
    assert [found.job_id for found in rows] == [None, "12_1", "12_2", "7_3"]
    full = summary(job, rows)
    assert (
        full.state == "1 finished, 1 running, 1 queued, 1 lost"
        and full.active
        and full.message.startswith("sweep[3]: job 7_3")
    )


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: int) -> Path:
    """A folder runs/ in the working directory with a run, an array, and a command that ended long
    ago.
    """
    monkeypatch.chdir(tmp_path)
    one = make_job(tmp_path / "runs" / "demo", "local")
    trained(one)
    write_state(one, "running")
    array = make_job(tmp_path / "runs" / "sweeps" / "lr", "local", items=3)
    write_state(array, "finished", 0)
    write_state(array, "stopped", 1, pid=dead, message="TypeError: boo", failures=2)
    write_state(
        make_job(tmp_path / "runs" / "jobs" / "merge-1", "local", kind="command"),
        "finished",
        time=time.time() - 2e5,
    )
    return tmp_path / "runs"


def test_the_table(
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wording: Wording,
) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)
    write_state(make_job(runs / "demo", "local"), "running")
    task = runs / "sweeps" / "lr" / "tasks" / "0001"
    make_job(runs / "a" / "demo", "local")
    for words in (
        [],
        [runs / "sweeps", "--items"],
        [task],
        [runs / "jobs" / "merge-1"],
        [task, task.with_name("0002"), "--items"],
    ):
        wording("\n".join(lines_of(capsys, "status", *words)))
    sweeps = lines_of(capsys, "status", runs / "sweeps")[1:]
    assert lines_of(capsys, "status", task, runs / "sweeps")[1:] == sweeps
    values = json.loads("\n".join(lines_of(capsys, "status", "--json", "--all")))
    names = " ".join(value["name"] for value in values)
    assert names == "demo demo merge-1 lr[0] lr[1] lr[2]"
    assert values[1]["step"] == 102 and values[4]["message"] == "TypeError: boo"


def test_forks_stand_below_their_parent(
    runs: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    """With a fork's fork, an array of forks, one whose parent is not a job, and two that name each
    other; all must be listed.
    """
    forks = {"decay": "demo", "anneal": "decay", "elsewhere": "by_hand", "one": "two", "two": "one"}
    for name, parent in forks.items():
        write_state(make_job(runs / name, "local"), "finished")
        write_json(
            runs / name / "fork.json", {"parent": str((runs / parent).resolve()), "step": 100}
        )
    array = make_job(runs / "decays", "local", items=2)
    for index, item in enumerate(array.items):
        write_state(array, "finished", index)
        write_json(
            item.path / "fork.json",
            {"parent": str((runs / "demo").resolve()), "step": 60},
        )
    lines = lines_of(capsys, "status", runs, "--items")
    wording("\n".join(line[: lines[0].index("STATE")].rstrip() for line in lines))


def test_watch_ends_when_all_is_over(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(lines_of(capsys, "status", runs / "sweeps", "--watch", "60")) == 2
    with start("launch", "status", str(runs / "demo"), "--watch", "0.2") as watching:
        assert watching.stdout
        first = [watching.stdout.readline().split()[0] for _ in range(4)]
        assert first == ["NAME", "demo"] * 2
        path = launch_folder(runs / "demo") / "state.json"
        write_json(path, {**json.loads(path.read_text()), "state": "finished"})
        assert "finished" in watching.stdout.read().splitlines()[-1]
    assert watching.returncode == 0


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A run whose first attempt crashed and whose second attempt runs."""
    make_job(tmp_path / "demo", "local")
    directory = tmp_path / "demo"
    failure = {"kind": "exit", "message": "ValueError: boo", "rank": 1, "step": 2}
    decision = {"action": "restart", "reason": "1 failure since the last progress"}
    first = make_attempt(
        directory, 1, THEN, ended=THEN + 5, outcome="failed", failure=failure, decision=decision
    )
    record(first, 0, THEN + 4, error=RESET)
    record(first, 1, THEN + 3, error="ValueError: boo", traceback=trace("ValueError: boo"))
    (first / "logs" / "agents.log").write_text("torchrun says a lot\n")
    os.utime(first / "logs" / "agents.log", (THEN + 4, THEN + 4))
    second = make_attempt(directory, 2, THEN + 40)
    for rank in range(2):
        record(second, rank, 0.0, ended=None, exit=None)
    write_log(
        launch_folder(directory) / "supervisor.log",
        (THEN + 1, "attempt 1: 2 ranks"),
        (THEN + 41, "attempt 2: 2 ranks"),
    )
    return directory


LOGS = ["", "--attempt 1", "--rank 1", "--rank 0-1 --tail 2", "--errors", "--errors --attempt 2"]


def test_logs_are_the_last_attempts_unless_requested_otherwise(
    crashed: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    for words in LOGS:
        wording(
            "\n".join(lines_of(capsys, "logs", crashed, *words.split())),
            CLOCK=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(THEN + 3)),
        )
    assert len(lines_of(capsys, "logs", crashed, "--attempt", "all")) == 15
    assert lines_of(capsys, "logs", crashed, "--rank", "0", "--tail", "1", "--time")[0].endswith(
        ".000 [rank 0] attempt 2 step 2"
    )
    write_json(
        launch_folder(crashed) / "stop.json",
        {"why": "gave up", "message": "the same failure twice", "time": 0, "by": "x"},
    )
    assert (
        lines_of(capsys, "logs", crashed, "--errors")[-1] == "demo: gave up: the same failure twice"
    )


KILLED = {"exit": 137, "signal": "SIGKILL"}
RANKS: dict[str, list[tuple[int, float, dict[str, Any]]]] = {
    "killed": [(1, 3, KILLED)],
    # The likely cause is not always the oldest message.
    "follower first": [(1, 5, KILLED), (0, 1.6, {"error": RESET})],
}


def test_errors_report_a_rank_without_a_traceback_by_its_last_lines_and_a_hang_by_its_stacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    clock = {
        f"AT{at}": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(THEN + at)) for at in (3, 5)
    }
    for name, ranks in RANKS.items():
        make_job(tmp_path / name, "local")
        attempt = make_attempt(tmp_path / name, 1, THEN, ended=THEN + 9, outcome="failed")
        for rank, at, values in ranks:
            record(attempt, rank, THEN + at, **values)
        wording("\n".join(lines_of(capsys, "logs", tmp_path / name, "--errors")), **clock)
    make_job(tmp_path / "hang", "local")
    failure = {"kind": "hang", "message": "no step for 20 minutes", "step": 7}
    attempt = make_attempt(
        tmp_path / "hang", 1, THEN, ended=THEN + 5, outcome="hang", failure=failure
    )
    record(attempt, 0, THEN + 3, **KILLED)
    write_log(attempt / "dumps" / "rank_00001.txt", (0, "stacks"))
    wording("\n".join(lines_of(capsys, "logs", tmp_path / "hang", "--errors")))


def test_slurms_own_file_is_reported_but_not_the_supervisors_lines_in_it(
    crashed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append_json(launch_folder(crashed) / "submissions.jsonl", {"time": 0, "job_id": "12"})
    one, two = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(THEN + at)) for at in (2, 41))
    text = (
        f"module load says hello\n{one} launch: attempt 1: 2 ranks\nslurmstepd: oom\n{two} launch:"
        " attempt 2: 2 ranks\nrequeued\n"
    )
    (launch_folder(crashed) / "slurm-12.out").write_text(text)
    (launch_folder(crashed) / "slurm-13.out").write_text("another job's\n")
    every = lines_of(capsys, "logs", crashed, "--attempt", "all")
    assert every[0] == "[slurm] module load says hello" and len(every) == 15 + 3
    for number, expected in (("1", "[slurm] slurmstepd: oom"), ("2", "[slurm] requeued")):
        lines = lines_of(capsys, "logs", crashed, "--attempt", number)
        assert [line for line in lines if "[slurm]" in line] == [expected]


def test_where_no_attempt_began_slurms_file_reports_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_job(tmp_path)
    assert lines_of(capsys, "logs", tmp_path, "--errors") == [f"{tmp_path}: no rank failed"]
    (launch_folder(tmp_path) / "slurm-12.out").write_text("launch: module load cuda failed\n")
    assert (
        lines_of(capsys, "logs", tmp_path, "--errors")[1] == "    launch: module load cuda failed"
    )
    assert lines_of(capsys, "logs", tmp_path) == ["[slurm] launch: module load cuda failed"]


def test_arrays_name_their_items_and_have_a_file_of_slurms_for_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path / "lr", items=2)
    for index, array in enumerate(("12", "13")):
        append_json(
            launch_folder(tmp_path / "lr") / "submissions.jsonl",
            {"time": 0, "job_id": array, "items": [index]},
        )
        (launch_folder(tmp_path / "lr") / f"slurm-{array}_{index}.out").write_text(
            f"task {index} of {array}\n"
        )
        (launch_folder(tmp_path / "lr") / f"slurm-{array}.out").write_text("another job's\n")
    for _ in range(2):  # before and after its first attempt
        report = [line for line in lines_of(capsys, "logs", tmp_path / "lr") if "slurm" in line]
        assert report == ["[lr[0] slurm] task 0 of 12", "[lr[1] slurm] task 1 of 13"]
        assert [
            line for line in lines_of(capsys, "logs", job.items[1].directory) if "slurm" in line
        ] == ["[slurm] task 1 of 13"]
        for index, array in enumerate(("12", "13")):
            make_attempt(job.items[index].path, 1, THEN, job_id=f"{array}_{index}")
    assert "[lr[1] rank 0] attempt 1 step 0" in lines_of(capsys, "logs", tmp_path / "lr")


MISTAKES = """\
logs demo --attempt 7
logs demo --rank 2
logs demo --rank x
logs demo --tail 0
logs empty
status nowhere
status --watch 0
cancel nowhere
requeue nowhere
requeue d --set slurm.time=1
"""


def test_mistakes_are_one_line(
    crashed: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wording: Wording,
) -> None:
    monkeypatch.chdir(crashed.parent)
    (crashed.parent / "empty").mkdir()
    for words in MISTAKES.splitlines():
        (line,) = lines_of(capsys, *words.split(), code=2)
        wording(line)


def test_merged_lines_are_all_lines_by_time_and_tails_are_their_end(tmp_path: Path) -> None:
    for seed in range(4):
        chance = random.Random(seed)
        spoken = [
            (THEN + n / 8, chance.randrange(4), f"{n} {'long ' * chance.choice((0, 1, 20_000))}é")
            for n in range(60)
        ]
        logs = []
        for who in range(4):
            own = [(at, text) for at, by, text in spoken if by == who]
            logs.append(write_log(tmp_path / f"{seed}{who}.log", *own))
        sources = [Source(log, str(who)) for who, log in enumerate(logs)]
        assert [(line.time, int(line.label), line.text) for line in merged(sources)] == spoken
        for count in (1, 3, 1000):
            lines = Follower(lambda: sources, count).read()  # noqa: B023
            assert [(line.time, int(line.label), line.text) for line in lines] == spoken[-count:]


@pytest.fixture
def following(crashed: Path) -> Iterator[list[str]]:
    """Lines of ``logs -f`` for the crashed run as they are printed; at the end the run succeeds."""
    process = start("launch", "logs", str(crashed), "-f")
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    try:
        yield lines
        assert process.wait(90) == 0
    finally:
        process.kill()
        process.wait()
        reader.join(5)


def test_following_shows_new_lines_and_attempts_and_ends_with_the_run(
    crashed: Path, following: list[str]
) -> None:
    def shown(text: str) -> None:
        wait_for(lambda: any(text in line for line in following))

    shown("[rank 1] attempt 2 step 2")
    write_log(rank_log(crashed / "attempts" / "0002", 1), (time.time(), "something new"))
    shown("[rank 1] something new")
    make_attempt(crashed, 3, time.time())
    shown("[rank 0] attempt 3 step 2")
    write_log(launch_folder(crashed) / "supervisor.log", (time.time(), "finished"))
    write_json(launch_folder(crashed) / "state.json", {"state": "finished"})
    shown("[launch] finished")
    assert len(following) == len(set(following))
