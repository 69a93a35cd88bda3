"""Logs merged by time and followed while they grow, and the verb ``logs``: who said what, and which rank failed first."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import __main__ as command_line
from launch.job import Item, Job, append_json, launch_folder, rank_log, write_json
from launch.node.logs import Follower, Source, Tail, merged
from tests.launch.ranks import RESET, record, trace

ROOT = Path(__file__).resolve().parents[2]


# --- merging and following -------------------------------------------------------------------------------------------------------


def write_log(path: Path, *lines: tuple[float, str]) -> Source:
    """A stamped log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{at:.3f} {text}\n" for at, text in lines)
    return Source(path, path.stem)


@pytest.mark.parametrize("seed", range(10))
def test_merged_lines_are_all_lines_by_time_and_tails_are_their_end(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    said = [(1.79e9 + number / 8, chance.randrange(4), f"{number} {'long ' * chance.choice((0, 1, 20_000))}é") for number in range(60)]
    sources = [write_log(tmp_path / f"{who}.log", *((at, text) for at, speaker, text in said if speaker == who)) for who in range(4)]
    assert [(line.time, int(line.label), line.text) for line in merged(sources)] == said
    for count in (1, 3, 1000):
        lines = Follower(lambda: sources, count).read()
        assert [(line.time, int(line.label), line.text) for line in lines] == said[-count:]


@pytest.mark.parametrize("seed", range(10))
def test_following_gives_each_line_once_however_it_is_written(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    path, said = tmp_path / "a.log", [f"line {number}" for number in range(50)]
    data, got = "".join(f"{1.79e9 + i:.3f} {text}\n" for i, text in enumerate(said)).encode(), list[str]()
    tail = Tail(Source(path, "a"))
    assert tail.read() == []
    while data:
        size = chance.randrange(1, 100)
        with path.open("ab") as file:
            file.write(data[:size])
        data = data[size:]
        got += [line.text for line in tail.read()]
    assert got == said


def test_the_last_lines_of_a_log_that_is_no_longer_named_are_not_lost(tmp_path: Path) -> None:
    old, new = write_log(tmp_path / "old.log", (1.79e9, "a")), tmp_path / "new.log"
    named = [old]
    follower = Follower(lambda: named)
    assert [line.text for line in follower.read()] == ["a"]
    write_log(old.path, (1.79e9 + 1, "last word"))
    named[:] = [write_log(new, (1.79e9 + 2, "b"))]
    assert [line.text for line in follower.read()] == ["last word", "b"]
    write_log(old.path, (1.79e9 + 3, "never"))
    assert follower.read() == []


# --- the verb --------------------------------------------------------------------------------------------------------------------


def make_job(directory: Path, items: int = 1, **values: Any) -> Job:
    """A job's directory, nothing started."""
    array = items > 1
    folders = [directory / "tasks" / f"{index:04}" for index in range(items)] if array else [directory]
    job = Job(
        name="demo",
        kind="run",
        directory=str(directory),
        working_directory=str(directory),
        code=str(ROOT),
        python=sys.executable,
        nodes=1,
        processes_per_node=2,
        torchrun=True,
        items=tuple(Item(str(folder), ("-m", "pretrain"), f"demo[{index}]" if array else "demo") for index, folder in enumerate(folders)),
        profile={"scheduler": "local"},
        profile_path="local_cpu.yaml",
        array=array,
        **values,
    )
    job.save()
    return job


def make_attempt(item: Path, number: int, started: float, **values: Any) -> Path:
    """An attempt with two ranks that said something."""
    attempt = item / "attempts" / f"{number:04}"
    write_json(attempt / "attempt.json", {"attempt": number, "started": started, "ended": None, "outcome": None, "failure": None, **values})
    for rank in range(2):
        write_log(rank_log(attempt, rank), *((started + step + rank / 10, f"attempt {number} step {step}") for step in range(3)))
    return attempt


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A run whose first attempt crashed and whose second goes on."""
    make_job(tmp_path)
    failure = {"kind": "exit", "message": "ValueError: boo", "rank": 1, "host": "node1", "step": 2, "exit": 1}
    decision = {"action": "restart", "delay_seconds": 30, "exclude": [], "reason": "1 failure since the last progress"}
    first = make_attempt(tmp_path, 1, 1.79e9, ended=1.79e9 + 5, outcome="failed", failure=failure, decision=decision)
    record(first, 0, 1.79e9 + 4, error=RESET)
    record(first, 1, 1.79e9 + 3, error="ValueError: boo", traceback=trace("ValueError: boo"))
    (first / "logs" / "agents.log").write_text("torchrun says a lot\n")
    os.utime(first / "logs" / "agents.log", (1.79e9 + 4, 1.79e9 + 4))
    second = make_attempt(tmp_path, 2, 1.79e9 + 40)
    for rank in range(2):
        record(second, rank, 0.0, ended=None, exit=None)
    write_log(launch_folder(tmp_path) / "supervisor.log", (1.79e9 + 1, "attempt 1: 2 ranks"), (1.79e9 + 41, "attempt 2: 2 ranks"))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> list[str]:
    """The lines that a command prints."""
    assert command_line.main(list(map(str, words))) == code
    captured = capsys.readouterr()
    return (captured.out if code == 0 else captured.err).splitlines()


def test_logs_are_the_last_attempts_unless_asked_otherwise(crashed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = said(capsys, "logs", crashed)
    assert last[:2] == ["[rank 0] attempt 2 step 0", "[rank 1] attempt 2 step 0"] and "[launch] attempt 2: 2 ranks" in last
    assert len(last) == 7 and not any("attempt 1" in line for line in last)
    first = said(capsys, "logs", crashed, "--attempt", "1")
    assert len(first) == 8 and "[agents] torchrun says a lot" in first and "[launch] attempt 1: 2 ranks" in first
    assert not any("attempt 2" in line for line in first)
    assert len(said(capsys, "logs", crashed, "--attempt", "all")) == 15
    assert said(capsys, "logs", crashed, "--rank", "1") == [f"[rank 1] attempt 2 step {step}" for step in range(3)]
    assert said(capsys, "logs", crashed, "--rank", "0-1", "--tail", "2") == ["[rank 0] attempt 2 step 2", "[rank 1] attempt 2 step 2"]
    assert said(capsys, "logs", crashed, "--rank", "0", "--tail", "1", "--time")[0].endswith(".000 [rank 0] attempt 2 step 2")


def test_errors_tell_the_first_rank_and_why_even_while_the_next_attempt_runs(crashed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "logs", crashed, "--errors")
    assert lines[0] == "demo, attempt 1 (failed after step 2):"
    assert any(line.startswith("  first: rank 1 on node0 at 20") and line.endswith("ValueError: boo") for line in lines)
    assert "    ValueError: boo" in lines and '      File "a.py", line 3, in f' in lines
    assert any("then:  rank 0 on node0, +1.0 s: RuntimeError:" in line for line in lines)
    assert lines[-1] == "  then: restart: 1 failure since the last progress"
    assert said(capsys, "logs", crashed, "--errors", "--attempt", "2") == [f"{crashed}: no rank failed"]


def test_errors_of_a_run_that_gave_up_say_so(crashed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(launch_folder(crashed) / "stop.json", {"why": "gave up", "message": "the same failure twice", "time": 0, "by": "x"})
    assert said(capsys, "logs", crashed, "--errors")[-1] == "demo: gave up: the same failure twice"


def test_a_rank_without_a_traceback_is_told_with_its_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(tmp_path)
    attempt = make_attempt(tmp_path, 1, 1.79e9, ended=1.79e9 + 5, outcome="failed")
    record(attempt, 1, 1.79e9 + 3, exit=137, signal="SIGKILL")
    lines = said(capsys, "logs", tmp_path, "--errors")
    assert "killed by SIGKILL" in lines[1] and lines[2:] == [f"    attempt 1 step {step}" for step in range(3)]


def test_no_rank_follows_at_a_time_before_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The likely cause is not always the oldest word."""
    make_job(tmp_path)
    attempt = make_attempt(tmp_path, 1, 1.79e9, ended=1.79e9 + 9, outcome="failed")
    record(attempt, 1, 1.79e9 + 5, exit=137, signal="SIGKILL")
    record(attempt, 0, 1.79e9 + 1.6, error=RESET)
    lines = said(capsys, "logs", tmp_path, "--errors")
    assert any(line.startswith("  most likely: rank 1 on node0 at ") for line in lines)
    assert any(line.startswith("  also:  rank 0 on node0: ") and "Connection closed" in line for line in lines)
    assert not any("first:" in line or "then:" in line or "-3.4" in line for line in lines)


def test_slurms_own_file_is_told_but_not_the_supervisors_lines_in_it(crashed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_json(launch_folder(crashed) / "submissions.jsonl", {"time": 0, "job_id": "12"})
    stamp = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1.79e9 + at)) for at in (2, 41)]
    text = (
        f"module load says hello\n{stamp[0]} launch: attempt 1: 2 ranks\nslurmstepd: oom\n{stamp[1]} launch: attempt 2: 2 ranks\nrequeued\n"
    )
    (launch_folder(crashed) / "slurm-12.out").write_text(text)
    (launch_folder(crashed) / "slurm-13.out").write_text("another job's\n")
    every = said(capsys, "logs", crashed, "--attempt", "all")
    assert every[0] == "[slurm] module load says hello" and len(every) == 15 + 3
    first, last = (said(capsys, "logs", crashed, "--attempt", number) for number in "12")
    assert [line for line in first if "[slurm]" in line] == ["[slurm] slurmstepd: oom"]
    assert [line for line in last if "[slurm]" in line] == ["[slurm] requeued"]


def test_where_no_attempt_began_slurms_file_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(tmp_path)
    append_json(launch_folder(tmp_path) / "submissions.jsonl", {"time": 0, "job_id": "12"})
    assert said(capsys, "logs", tmp_path, "--errors") == [f"{tmp_path}: no rank failed"]
    (launch_folder(tmp_path) / "slurm-12.out").write_text("launch: module load cuda failed\n")
    assert said(capsys, "logs", tmp_path, "--errors")[1] == "    launch: module load cuda failed"
    assert said(capsys, "logs", tmp_path) == ["[slurm] launch: module load cuda failed"]


def test_a_task_of_an_array_has_a_file_of_slurms_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the array's id and the task's number, before and after its first attempt."""
    job = make_job(tmp_path, items=2)
    for index, array in enumerate(("12", "13")):
        append_json(launch_folder(tmp_path) / "submissions.jsonl", {"time": 0, "job_id": array, "items": [index]})
        (launch_folder(tmp_path) / f"slurm-{array}_{index}.out").write_text(f"task {index} of {array}\n")
        (launch_folder(tmp_path) / f"slurm-{array}.out").write_text("another job's\n")
    for _ in range(2):
        assert [line for line in said(capsys, "logs", tmp_path) if "slurm" in line] == [
            f"[demo[{i}] slurm] task {i} of {12 + i}" for i in (0, 1)
        ]
        assert [line for line in said(capsys, "logs", tmp_path, "--item", "1") if "slurm" in line] == ["[slurm] task 1 of 13"]
        for index, array in enumerate(("12", "13")):
            make_attempt(Path(job.items[index].directory), 1, 1.79e9, job_id=f"{array}_{index}")
    assert said(capsys, "logs", tmp_path, "--item", "0")[0] == "[slurm] task 0 of 12"


def test_a_hang_is_told_with_its_stacks_and_not_blamed_on_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(tmp_path)
    failure = {"kind": "hang", "message": "no step for 20 minutes", "step": 7}
    attempt = make_attempt(tmp_path, 1, 1.79e9, ended=1.79e9 + 5, outcome="hang", failure=failure)
    record(attempt, 0, 1.79e9 + 3, exit=137, signal="SIGKILL")
    (attempt / "dumps").mkdir()
    (attempt / "dumps" / "rank_00001.txt").write_text("stacks")
    lines = said(capsys, "logs", tmp_path, "--errors")
    assert lines == [
        "demo, attempt 1 (hang after step 7):",
        "  hang: no step for 20 minutes",
        f"  stacks of 1 rank: {attempt / 'dumps'}",
    ]


def test_arrays_name_their_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path, items=3)
    make_attempt(Path(job.items[1].directory), 1, 1.79e9)
    make_attempt(Path(job.items[2].directory), 1, 1.79e9 + 0.05)
    assert said(capsys, "logs", tmp_path)[:2] == ["[demo[1] rank 0] attempt 1 step 0", "[demo[2] rank 0] attempt 1 step 0"]
    for words in (["logs", tmp_path, "--item", "2"], ["logs", job.items[2].directory]):
        assert said(capsys, *words)[0] == "[rank 0] attempt 1 step 0"
    assert said(capsys, "logs", tmp_path, "--item", "3", code=2) == [f"launch: error: --item 3: {tmp_path} has the items 0 to 2"]


def test_mistakes_are_told_in_one_line(crashed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mistakes: dict[tuple[str, ...], str] = {
        ("--attempt", "7"): "has the attempts 1, 2",
        ("--rank", "2"): "the job has the ranks 0 to 1",
        ("--rank", "x"): "not a rank; give 3, or 0,8-15",
        ("--tail", "0"): "at least 1",
    }
    for words, expected in mistakes.items():
        lines = said(capsys, "logs", crashed, *words, code=2)
        assert len(lines) == 1 and expected in lines[0]
    assert "launch/job.json" in said(capsys, "logs", ROOT / "docs", code=2)[0]


@pytest.fixture
def following(crashed: Path) -> Iterator[subprocess.Popen[str]]:
    """``logs -f`` of the crashed run."""
    command = [sys.executable, "-m", "launch", "logs", str(crashed), "-f"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_following_shows_new_lines_and_attempts_and_ends_with_the_run(crashed: Path, following: subprocess.Popen[str]) -> None:
    lines: list[str] = []
    assert following.stdout
    reader = threading.Thread(target=lambda: lines.extend(following.stdout or ()), daemon=True)
    reader.start()

    def shown(text: str) -> None:
        end = time.monotonic() + 20
        while not any(text in line for line in lines):
            assert time.monotonic() < end, (text, lines)
            time.sleep(0.05)

    shown("[rank 1] attempt 2 step 2")
    write_log(rank_log(crashed / "attempts" / "0002", 1), (time.time(), "something new"))
    shown("[rank 1] something new")
    make_attempt(crashed, 3, time.time())
    shown("[rank 0] attempt 3 step 2")
    write_log(launch_folder(crashed) / "supervisor.log", (time.time(), "finished"))
    write_json(launch_folder(crashed) / "state.json", {"state": "finished"})
    assert following.wait(20) == 0
    reader.join(5)
    assert any("[launch] finished" in line for line in lines) and len(lines) == len(set(lines))
