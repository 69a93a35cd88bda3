"""The supervisor on this machine, as a process, over ranks that are processes: what it does at each end, and what it writes down.

The program is `tests.launch.stand_in`, which behaves as a training run and starts in a moment; `test_local` has real training.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fem_common.exits import Exit
from launch.job import write_json
from launch.supervise.place import processes
from launch.supervise.watch import Patience, Watchdog, noted
from tests.launch.supervised import Case, alive, clean_up, end, wait_for

HOURS = {"start_minutes": 60.0, "step_minutes": 60.0, "save_minutes": 60.0}


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    clean_up(tmp_path)


def test_crashes_are_survived_from_the_last_checkpoint(tmp_path: Path) -> None:
    events = tmp_path / "events"
    script = [{"to": 5, "checkpoint": [3], "end": "signal 9"}, {"to": 8, "end": "raise boom"}, {"to": 10, "checkpoint": [10]}]
    case = Case(tmp_path / "run", script, notify={"command": f"cat >> '{events}'", "events": ["started", "failed", "finished"]})
    code, said = case.run("--show", environment={"MY_TOKEN": "canary-canary"})
    assert code == 0, said
    assert case.outcomes == ["failed", "failed", "finished"]
    first, second, _ = case.attempts
    assert first["failure"].pop("host")
    message = "killed by SIGKILL: the kernel's out-of-memory killer, or someone"
    assert first["failure"] == {"kind": "signal", "message": message, "rank": 0, "step": 5, "exit": 137}
    assert second["failure"]["message"] == "RuntimeError: boom" and second["failure"]["step"] == 8
    assert [attempt["checkpoint_start"] for attempt in case.attempts] == [None, 3, 3]
    assert [attempt["checkpoint_end"] for attempt in case.attempts] == [3, 3, 10]
    assert [attempt["decision"]["action"] for attempt in case.attempts] == ["restart", "restart", "finish"]
    # The first failure left a checkpoint, so that the next wait was twice as long, and no longer.
    assert [attempt["decision"]["delay_seconds"] for attempt in case.attempts] == [0.05, 0.1, 0.0]
    assert case.state["state"] == "finished" and case.state["attempt"] == 3
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["event"] for event in told] == ["started", "failed", "started", "failed", "started", "finished"]
    assert "attempt 2 from step 3, token ***" in said  # rank 0's line, as it is in its log
    everything = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"canary-canary" in content for content in everything)
    assert case.run()[1].endswith("launch: finished before; nothing to do\n") and len(case.attempts) == 3


def test_every_line_is_told_with_its_time(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"to": 2}])
    said = [line.partition(" launch: ")[2] for line in case.run()[1].splitlines()]
    kept = (tmp_path / "launch" / "supervisor.log").read_text().splitlines()
    assert [re.fullmatch(r"\d{10}\.\d{3} (.*)", line)[1] for line in kept] == said  # type: ignore[index]
    assert (tmp_path / "attempts" / "0001" / "logs" / "rank_00000.log").read_text().count("attempt 1 from step 0") == 1
    environment = json.loads((tmp_path / "attempts" / "0001" / "environment.json").read_text())
    assert environment["command"] == [sys.executable, "-m", "tests.launch.stand_in", str(tmp_path)]


def test_a_crash_loop_stops_with_the_diagnosis(tmp_path: Path) -> None:
    script = [{"to": 4, "end": f"raise {reason}"} for reason in ("one", "two", "three", "four", "five")]
    case = Case(tmp_path, script, restarts={"max_failures": 2})
    code, said = case.run()
    assert code == 1 and case.outcomes == ["failed"] * 3
    why = "3 failures without a new checkpoint (restarts.max_failures: 2); the last: RuntimeError: three (rank 0, on "
    assert case.state["state"] == "stopped" and case.state["message"].startswith(why)
    stop = json.loads((tmp_path / "launch" / "stop.json").read_text())
    assert stop["why"] == "gave up" and stop["message"] == case.state["message"]
    assert f"python -m launch logs --errors {tmp_path}" in said and f"python -m launch requeue {tmp_path}" in said
    # Until a person removes stop.json nothing starts.
    assert case.run()[0] == 1 and len(case.attempts) == 3 and case.state["state"] == "cancelled"
    (tmp_path / "launch" / "stop.json").unlink()
    assert case.run()[0] == 1 and case.outcomes == ["failed"] * 6  # "four", then "five" twice in a row
    assert case.state["message"].startswith("the same failure 2 times in a row")


def test_the_same_failure_twice_stops_at_once(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"to": 4, "checkpoint": [1], "end": "raise at 0x12"}, {"to": 4, "checkpoint": [2], "end": "raise at 0x99"}])
    code, _ = case.run()
    assert code == 1 and len(case.attempts) == 2
    assert case.state["message"].startswith("the same failure 2 times in a row, at the same step: RuntimeError: at 0x99 (rank 0, on ")


@pytest.mark.parametrize(
    ("end", "code", "kind", "message"),
    [
        ("exit 2", 2, "config", "the input is wrong, and stays so: stand_in: error: no such setting (rank 0, on "),
        ("exit 127", 1, "exit", "1 failure without a new checkpoint (restarts.max_failures: 0); the last: exited with 127"),
    ],
)
def test_ends_that_are_not_tried_again(tmp_path: Path, end: str, code: int, kind: str, message: str) -> None:
    case = Case(tmp_path, [{"end": end}], restarts={"max_failures": 0})
    assert case.run()[0] == code
    assert len(case.attempts) == 1 and case.attempts[0]["failure"]["kind"] == kind
    assert case.state["message"].startswith(message)


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    case = Case(tmp_path / "a", python="/no/such/python", restarts={"max_failures": 1})
    assert case.run()[0] == 1
    assert case.attempts[0]["failure"]["message"] == "cannot start the ranks: /no/such/python: No such file or directory"
    assert "the same failure 2 times in a row" in case.state["message"]
    case = Case(tmp_path / "b", nodes=2, restarts={"max_failures": 0})
    assert case.run()[0] == 1 and "--nodes 1" in case.state["message"]


def test_a_directory_in_use_is_waited_for_and_not_counted(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"end": "exit 75"}, {"to": 2}], restarts={"max_failures": 0})
    assert case.run()[0] == 0
    assert case.outcomes == ["busy", "finished"] and case.attempts[0]["decision"]["delay_seconds"] == 1.0


def test_a_hang_is_dumped_and_restarted(tmp_path: Path) -> None:
    """A rank that is stopped makes no step; its stacks are taken by its keeper, and a new attempt goes on."""
    case = Case(tmp_path, [{"to": 3, "checkpoint": [3], "end": "hang"}, {"to": 6}], watchdog={**HOURS, "step_minutes": 0.03})
    supervisor = case.start()
    pid = wait_for(lambda: (tmp_path / "checkpoints").is_dir() and case.pids().get(0))
    os.kill(pid, signal.SIGSTOP)
    said, _ = supervisor.communicate(timeout=100)
    assert supervisor.returncode == 0, said
    assert case.outcomes == ["hang", "finished"]
    nowhere = {"rank": None, "host": None, "exit": None}
    message = "no step for 1.8 s after step 3; rank 0 stopped: by SIGSTOP, or a debugger"
    assert case.attempts[0]["failure"] == {"kind": "hang", "message": message, "step": 3, **nowhere}
    assert (tmp_path / "attempts/0001/dumps/rank_00000.txt").stat().st_size > 0
    assert "stacks of 1 of 1 ranks are in" in said
    assert not alive(pid)


def test_a_start_without_a_step_is_a_hang_and_a_deaf_one_is_not_waited_for(tmp_path: Path) -> None:
    case = Case(tmp_path / "start", [{"end": "hang"}, {"to": 2}], watchdog={**HOURS, "start_minutes": 0.03})
    assert case.run()[0] == 0
    assert case.attempts[0]["failure"]["message"] == "no first step within 1.8 s of the start"
    case = Case(tmp_path / "save", [{"to": 2, "checkpoint": [2], "end": "deaf"}], watchdog={**HOURS, "save_minutes": 0.02})
    supervisor = case.start()
    wait_for(lambda: (tmp_path / "save" / "checkpoints").is_dir() and case.state.get("state") == "running")
    code, said = end(supervisor)
    assert code == 1 and case.outcomes == ["hang"], said
    assert case.state["message"].startswith("not saved and ended within 1.2 s of the signal") and "same command" in case.state["message"]
    assert not (tmp_path / "save" / "launch" / "stop.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_end_of_the_supervisor_saves_and_the_same_command_goes_on(tmp_path: Path, number: int) -> None:
    case = Case(tmp_path, [{"to": 3, "end": "wait"}, {"to": 5}])
    supervisor = case.start()
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and (tmp_path / "metrics.jsonl").read_text().count("\n") == 3)
    code, said = end(supervisor, number)
    assert code == 0 and case.outcomes == ["saved"], said
    assert case.state["state"] == "stopped" and case.state["message"] == "saved; the same command continues"
    assert case.attempts[0]["checkpoint_end"] == 3
    assert case.run()[0] == 0 and case.outcomes == ["saved", "finished"]


def test_a_supervisor_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with noted() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_save_before_the_first_step_says_that_nothing_was_saved(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"to": 3, "checkpoint": [3], "end": "exit 1"}, {"end": "wait"}])
    supervisor = case.start()
    wait_for(lambda: case.state.get("attempt") == 2 and case.state["state"] == "running" and case.pids())
    code, said = end(supervisor)
    assert code == 0 and case.outcomes == ["failed", "saved"], said
    assert "attempt 2 ended before its first step" in said and "saved at step" not in said


def test_usr1_saves_and_starts_again(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"to": 3, "end": "wait"}, {"to": 5}])
    with case.start() as supervisor:
        wait_for(lambda: case.state.get("state") == "running" and (tmp_path / "metrics.jsonl").exists())
        for _ in range(3):
            supervisor.send_signal(signal.SIGUSR1)
        said, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, said
    assert case.outcomes == ["saved", "finished"]


@pytest.mark.parametrize(("number", "outcome"), [(signal.SIGUSR1, "saved"), (signal.SIGTERM, "cancelled")])
def test_a_cancelled_run_ends_and_stays_so(tmp_path: Path, number: int, outcome: str) -> None:
    """cancel --save is stop.json and USR1, cancel is stop.json and TERM, which does not wait for a run that would save."""
    case = Case(tmp_path, [{"to": 3, "end": "wait" if outcome == "saved" else "deaf"}, {"to": 5}], watchdog=HOURS)
    supervisor = case.start()
    wait_for(lambda: case.state.get("state") == "running" and case.pids())
    if outcome == "cancelled":
        wait_for((tmp_path / "deaf").exists)
    pid = case.pids()[0]
    write_json(tmp_path / "launch" / "stop.json", {"why": "cancelled", "message": "by someone"})
    code, said = end(supervisor, number)
    assert code == 1 and case.outcomes == [outcome], said
    assert case.state["state"] == "cancelled" and case.state["message"] == "cancelled: by someone"
    assert "launch: cancelled: by someone" in said and "cancelled: cancelled" not in said
    assert not alive(pid)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"to": 3, "checkpoint": [3], "end": "deaf"}], watchdog=HOURS)
    supervisor = case.start()
    wait_for((tmp_path / "deaf").exists)
    supervisor.send_signal(signal.SIGINT)
    wait_for(lambda: case.state.get("state") == "saving")
    code, said = end(supervisor, signal.SIGINT)
    assert code == 1 and case.outcomes == ["cancelled"], said
    assert not (tmp_path / "launch" / "stop.json").exists()


def test_a_killed_supervisor_takes_its_ranks_along_and_the_next_one_goes_on(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"to": 3, "checkpoint": [2], "end": "wait"}, {"to": 5}])
    supervisor = case.start()
    wait_for(lambda: (tmp_path / "checkpoints").is_dir() and case.pids())
    pid = case.pids()[0]
    supervisor.kill()
    supervisor.communicate()
    wait_for(lambda: not alive(pid), 30)
    assert case.attempts[0]["ended"] is None
    assert case.run()[0] == 0
    assert case.outcomes == ["lost", "finished"]
    lost = case.attempts[0]
    assert lost["failure"]["kind"] == "lost" and lost["checkpoint_end"] == 2 and lost["decision"]["action"] == "restart"


def test_a_killed_supervisor_takes_torchrun_along(tmp_path: Path) -> None:
    case = Case(tmp_path, kind="command", arguments=("-c", "import time; time.sleep(600)"), torchrun=True, processes_per_node=2)
    supervisor = case.start()
    wait_for(lambda: len(case.pids()) == 2)
    mine = processes(tmp_path / "attempts" / "0001")
    assert len(mine) == 5  # torchrun, and two keepers with a program each
    supervisor.kill()
    supervisor.communicate()
    wait_for(lambda: not any(map(alive, mine)), 30)


def test_supervisors_that_are_killed_again_and_again_give_up(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"to": 3, "end": "wait"}], restarts={"max_failures": 1})
    for number in (1, 2):
        supervisor = case.start()
        wait_for(lambda: len(case.attempts) == number and case.pids())  # noqa: B023
        supervisor.kill()
        supervisor.communicate()
    assert case.run()[0] == 1
    assert case.outcomes == ["lost", "lost"] and case.state["message"].startswith("2 failures without a new checkpoint")


def test_two_supervisors_do_not_share_an_item(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"to": 3, "end": "wait"}])
    supervisor = case.start()
    wait_for(lambda: case.state.get("state") == "running")
    code, said = case.run()
    assert code == Exit.IN_USE and said.startswith(f"launch: error: {tmp_path} is kept going by another process already")
    assert end(supervisor)[0] == 0 and len(case.attempts) == 1


def test_an_unhealthy_machine_stops_the_run_before_it_starts(tmp_path: Path) -> None:
    case = Case(tmp_path / "run", [{"to": 3}], health={"check": True, "free_memory_gb": 1e6, "timeout_seconds": 60})
    assert case.run()[0] == 1
    assert case.outcomes == ["unhealthy"] and case.attempts[0]["failure"]["kind"] == "health"
    assert case.state["message"].startswith("this machine fails its check: ") and "memory" in case.state["message"]
    assert not (tmp_path / "cordon.jsonl").exists()  # nobody else is told of a machine without a queue
    assert Case(tmp_path / "well", [{"to": 3}], health={"check": True, "timeout_seconds": 60}).run()[0] == 0


def test_commands_have_no_steps_and_are_ended_by_term(tmp_path: Path) -> None:
    program = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print('on', flush=True); time.sleep({})"
    case = Case(
        tmp_path / "a", kind="command", arguments=("-c", program.format(0)), watchdog={"step_minutes": 0.001, "start_minutes": 0.001}
    )
    assert case.run()[0] == 0 and case.outcomes == ["finished"]
    case = Case(tmp_path / "b", kind="command", arguments=("-c", program.format(60)))
    supervisor = case.start("--show")
    wait_for(lambda: case.pids() and "on" in (tmp_path / "b/attempts/0001/logs/rank_00000.log").read_text())
    code, said = end(supervisor)
    assert code == 0 and case.outcomes == ["saved"], said


def test_only_an_array_command_sees_an_array(tmp_path: Path) -> None:
    show = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if 'ARRAY' in k or k == 'TUNED'}))"
    around = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_JOB_ID": "12"}

    def seen(name: str, **item: Any) -> dict[str, str]:
        case = Case(tmp_path / name, kind="command", environment={"TUNED": "1"})
        made = {**case.job.__dict__, "items": ({**case.job.items[0].__dict__, "arguments": ["-c", show], **item},)}
        write_json(tmp_path / name / "launch" / "job.json", {"format": 1, **made})
        assert case.run(environment=around)[0] == 0
        line = (tmp_path / name / "attempts/0001/logs/rank_00000.log").read_text()
        values: dict[str, str] = json.loads(line.partition(" ")[2])
        return values

    assert seen("plain") == {"TUNED": "1"}
    assert seen("task", environment={"SLURM_ARRAY_TASK_ID": "3"}) == {"TUNED": "1", "SLURM_ARRAY_TASK_ID": "3"}


def test_what_a_command_leaves_running_is_gone_with_it(tmp_path: Path) -> None:
    leave = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    case = Case(tmp_path, kind="command", arguments=("-c", leave))
    assert case.run()[0] == 0
    log = (tmp_path / "attempts/0001/logs/rank_00000.log").read_text()
    assert not alive(int(log.splitlines()[0].partition(" ")[2]))


def test_a_hook_that_fails_is_told_and_changes_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"to": 2}], notify={"command": "echo no chat >&2; exit 3", "events": ["started", "finished"]})
    code, said = case.run()
    assert code == 0 and said.count("notify.command ended with 3: no chat") == 2


def test_a_hook_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    case = Case(tmp_path, [{"to": 3, "end": "wait"}], notify={"command": "sleep 60", "events": ["started"]})
    supervisor = case.start()
    wait_for(lambda: case.state.get("state") == "running" and (tmp_path / "metrics.jsonl").exists())
    supervisor.send_signal(signal.SIGTERM)
    wait_for(lambda: case.state.get("state") == "stopped", 15)
    supervisor.kill()
    supervisor.communicate()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    case = Case(tmp_path, restarts={"max_failures": 1})
    (tmp_path / "attempts").write_text("")
    code, said = case.run()
    assert code == Exit.WRONG_INPUT and said.count("attempts/0001: Not a directory") == 2, said
    assert case.state["state"] == "stopped"


def test_a_directory_without_a_job_is_refused(tmp_path: Path) -> None:
    case = Case(tmp_path)
    (tmp_path / "launch" / "job.json").unlink()
    assert case.run() == (2, f"launch: error: {tmp_path}: no job there with an item 0; it is made by: python -m launch submit\n")


class TestWatchdog:
    """The watchdog alone, with a clock that the test turns."""

    def test_it_waits_for_the_first_step_then_for_each(self) -> None:
        dog = Watchdog(Patience(start=100, step=10, save=20), 0.0)
        assert dog.look(95, "a", stepped=False, step=None) is None  # a look counts 30 s at most
        verdicts = [dog.look(95 + 30 * n, "a", stepped=False, step=None) for n in range(1, 5)]
        assert verdicts[-1] == "no first step within 1.66667 minutes of the start"
        dog = Watchdog(Patience(start=100, step=10, save=20), 0.0)
        assert [dog.look(5.0 * n, n, stepped=True, step=n) for n in range(1, 50)] == [None] * 49
        assert dog.look(254, 49, stepped=True, step=49) is None
        assert dog.look(255, 49, stepped=True, step=49) == "no step for 10 s after step 49"

    def test_a_machine_that_slept_did_not_hang(self) -> None:
        dog = Watchdog(Patience(start=100, step=100, save=20), 0.0)
        assert dog.look(1, 1, stepped=True, step=1) is None
        assert dog.look(9000, 1, stepped=True, step=1) is None

    def test_after_a_signal_only_the_end_counts(self) -> None:
        dog = Watchdog(Patience(start=100, step=10, save=20), 0.0)
        dog.look(1, 1, stepped=True, step=1)
        dog.tell()
        assert dog.look(12, 1, stepped=True, step=1) is None
        assert dog.look(20, 2, stepped=True, step=2) is None  # a step more is no end
        dog.tell()  # again: the time goes on
        assert dog.look(22, 2, stepped=True, step=2) == "not saved and ended within 20 s of the signal"

    def test_zero_is_for_ever(self) -> None:
        dog = Watchdog(Patience(0, 0, 0), 0.0)
        assert all(dog.look(30.0 * n, 1, stepped=n > 50, step=1) is None for n in range(1, 100))
        dog.tell()
        assert dog.look(9999, 1, stepped=True, step=1) is None
