"""Tests of the supervisor as a process on this machine, with ranks as processes: its reaction to
each end, and its files.

The program is `tests.launch.stand_in`, which behaves like a training run and starts quickly;
`test_local` uses real training.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fem_common.exits import Exit
from launch import __main__ as command_line
from launch.cluster.slurm import clean_environment
from launch.job import attempts, rank_log, read_json, write_json
from launch.supervise import policy, run_files
from launch.supervise.__main__ import supervise
from launch.supervise.run_files import ranks_environment
from launch.supervise.watch import Watchdog, noted
from tests.launch.folders import make_attempt
from tests.launch.supervised import Case, alive, clean_up, end, wait_for
from tests.wording import Wording

HOURS = {"start_minutes": 60.0, "step_minutes": 60.0, "save_minutes": 60.0}
Script = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    clean_up(tmp_path)


def compare_attempts(case: Case, wording: Wording) -> None:
    """Compare the last state and the failure of each attempt with the golden file."""
    report = [case.state, *((attempt["failure"] or {}) for attempt in case.attempts)]
    lines = [
        f"{one.get('state') or one.get('kind')}: {one.get('message')}" for one in report if one
    ]
    wording(
        re.sub(r"\d+\.\d\b", "N", "\n".join(lines)), HOST=socket.gethostname().partition(".")[0]
    )


def test_crashes_are_survived_from_the_last_checkpoint(tmp_path: Path, wording: Wording) -> None:
    events = tmp_path / "events"
    script = [
        {"to": 5, "checkpoint": [3], "end": "signal 9"},
        {"to": 8, "end": "raise boom"},
        {"to": 10, "checkpoint": [10]},
    ]
    case = Case(
        tmp_path / "run",
        script,
        notify={"command": f"cat >> '{events}'", "events": ["started", "failed", "finished"]},
    )
    code, output = case.run("--show", environment={"MY_TOKEN": "canary-canary"})
    assert code == 0 and case.outcomes == ["failed", "failed", "finished"], output
    compare_attempts(case, wording)
    failed = [one["failure"] for one in case.attempts[:2]]
    ends = [(failure["rank"], failure["step"], failure["exit"]) for failure in failed]
    assert ends == [(0, 5, 137), (0, 8, 1)]
    kept = [(one["checkpoint_start"], one["checkpoint_end"]) for one in case.attempts]
    assert kept == [(None, 3), (3, 3), (3, 10)]
    # The first failure left a checkpoint, so the next wait was twice as long, but not longer.
    decisions = [
        (one["decision"]["action"], one["decision"]["delay_seconds"]) for one in case.attempts
    ]
    assert decisions == [("restart", 0.05), ("restart", 0.1), ("finish", 0.0)]
    # The supervisor does not wait for the notification command, so a later one may be faster.
    report = [json.loads(line) for line in events.read_text().splitlines()]
    report.sort(key=lambda event: float(event["time"]))
    names = " ".join(event["event"] for event in report)
    assert names == "started failed started failed started finished"
    assert "attempt 2 from step 3, token ***" in output  # the line of rank 0, as in its log
    assert not any(
        b"canary-canary" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    )
    lines = [line.partition(" launch: ")[2] for line in output.splitlines() if " launch: " in line]
    log = (case.directory / "launch" / "supervisor.log").read_text().splitlines()
    assert [re.fullmatch(r"\d{10}\.\d{3} (.*)", line)[1] for line in log] == lines  # type: ignore[index]
    command = read_json(case.directory / "attempts" / "0001" / "environment.json")["command"]
    assert command[1:] == ["-m", "tests.launch.stand_in", str(case.directory)]
    assert (
        case.run()[1].endswith("launch: finished before; nothing to do\n")
        and len(case.attempts) == 3
    )


CRASHES = [{"to": 4, "end": f"raise {word}"} for word in "one two three four five".split()]
TINY = {"step_minutes": 0.001, "start_minutes": 0.001}
# Script of each attempt, settings of the job; the resulting exit code and outcomes. The messages
# are in the golden file.
ENDS: dict[str, tuple[Script, dict[str, Any], int, str]] = {
    "the same twice": (
        [{"to": 4, "checkpoint": [n], "end": f"raise at 0x{n}2"} for n in (1, 2)],
        {},
        1,
        "failed failed",
    ),
    "wrong input": ([{"end": "exit 2"}], {}, 2, "failed"),
    "no interpreter": ([], {"python": "/no/such/python"}, 1, "failed failed"),
    "two nodes": ([], {"nodes": 2, "restarts": {"max_failures": 0}}, 1, "failed"),
    "busy": (
        [{"end": "exit 75"}, {"to": 2}],
        {"restarts": {"max_failures": 0}},
        0,
        "busy finished",
    ),
    "no first step": (
        [{"end": "hang"}],
        {"watchdog": {**HOURS, "start_minutes": 0.02}, "restarts": {"max_failures": 0}},
        1,
        "hang",
    ),
    "a command": ([{}], {"kind": "command", "watchdog": TINY}, 0, "finished"),
    "unhealthy": (
        [{}],
        {"health": {"check": True, "free_memory_gb": 1e6, "timeout_seconds": 60}},
        1,
        "unhealthy",
    ),
    "healthy": ([{"to": 2}], {"health": {"check": True, "timeout_seconds": 60}}, 0, "finished"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "no first step" else name
        for name in ENDS
    ],
)
def test_how_runs_end(name: str, tmp_path: Path, wording: Wording) -> None:
    script, changes, code, outcomes = ENDS[name]
    case = Case(tmp_path / "run", script, **changes)
    found, output = case.run()
    assert (found, " ".join(case.outcomes)) == (code, outcomes), output
    compare_attempts(case, wording)
    # Without a queue, the node is not recorded for other jobs.
    assert not (tmp_path / "cordon.jsonl").exists()


def test_a_crash_loop_stops_until_a_person_starts_it_again(
    tmp_path: Path, wording: Wording
) -> None:
    case = Case(
        tmp_path,
        CRASHES,
        restarts={"max_failures": 2},
        notify={"command": "echo no chat >&2; exit 3", "events": ["started"]},
    )
    code, output = case.run()
    assert code == 1 and case.outcomes == ["failed"] * 3
    compare_attempts(case, wording)
    stop = json.loads((tmp_path / "launch" / "stop.json").read_text())
    assert stop["why"] == "gave up" and stop["message"] == case.state["message"]
    assert (
        f"python -m launch logs --errors {tmp_path}" in output
        and f"python -m launch requeue {tmp_path}" in output
    )
    assert output.count("notify.command ended with 3: no chat") == 3
    assert case.run()[0] == 1 and len(case.attempts) == 3 and case.state["state"] == "cancelled"
    (tmp_path / "launch" / "stop.json").unlink()
    # "four", then "five" twice in a row.
    assert case.run()[0] == 1 and case.outcomes == ["failed"] * 6
    assert case.state["message"].startswith("the same failure 2 times in a row")


WAITS: Script = [{"to": 3, "end": "wait"}, {"to": 5}]
DEAF: Script = [{"to": 3, "checkpoint": [3], "end": "deaf"}]
LATE: Script = [{"to": 3, "checkpoint": [3], "end": "exit 1"}, {"end": "wait"}]
USR1, TERM, INT = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT
# Script of each attempt, settings of the job, whether a stop was requested, the signals; the
# resulting exit code and outcomes.
SIGNALLED: dict[str, tuple[Script, dict[str, Any], bool, Sequence[int], int, str]] = {
    "the end saves": (WAITS, {}, False, [TERM], 0, "saved"),
    "before the first step": (LATE, {}, False, [TERM], 0, "failed saved"),
    "save and start again": (WAITS, {}, False, [USR1, USR1, USR1], 0, "saved finished"),
    "cancel --save": (WAITS, {}, True, [USR1], 1, "saved"),
    "cancel": (DEAF, {}, True, [TERM], 1, "cancelled"),
    "a second Ctrl-C": (DEAF, {}, False, [INT, INT], 1, "cancelled"),
    "too slow to save": (
        DEAF,
        {"watchdog": {**HOURS, "save_minutes": 0.02}},
        False,
        [TERM],
        1,
        "hang",
    ),
    "a command": ([{"end": "wait 143"}], {"kind": "command"}, False, [TERM], 0, "saved"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "too slow to save" else name
        for name in SIGNALLED
    ],
)
def test_signals(name: str, tmp_path: Path, wording: Wording) -> None:
    script, changes, stop, numbers, code, outcomes = SIGNALLED[name]
    case = Case(tmp_path, script, **{"watchdog": HOURS, **changes})
    supervisor = case.start()
    pid = case.ready(len(script) if script is LATE else 1)
    if stop:
        write_json(tmp_path / "launch" / "stop.json", {"why": "cancelled", "message": "by someone"})
    for number in numbers[:-1]:
        supervisor.send_signal(number)
        wait_for(lambda: number == USR1 or case.state["state"] == "saving")  # noqa: B023
    found, output = end(supervisor, numbers[-1])
    assert (found, " ".join(case.outcomes)) == (code, outcomes), output
    compare_attempts(case, wording)
    wording(
        "\n".join(line.partition(" launch: ")[2] for line in output.splitlines()[-2:]),
        HOST=socket.gethostname().partition(".")[0],
    )
    assert not alive(pid) and (tmp_path / "launch" / "stop.json").exists() == stop
    if name == "the end saves":  # the same command continues the run
        assert (
            case.run()[0] == 0
            and case.outcomes == ["saved", "finished"]
            and case.attempts[0]["checkpoint_end"] == 3
        )


def test_a_supervisor_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with noted() as signals:
            for number in (signal.SIGHUP, TERM, INT):
                os.kill(os.getpid(), number)
        assert signals.received == [TERM, INT] and signals.ends == 2
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hang_is_dumped_and_restarted(tmp_path: Path, wording: Wording) -> None:
    """A stopped rank makes no steps; its keeper dumps its stacks, and a new attempt continues, with
    no step left to time out.
    """
    case = Case(
        tmp_path,
        [{"to": 1, "checkpoint": [1], "end": "stop"}, {"to": 1}],
        watchdog={**HOURS, "step_minutes": 0.01},
    )
    code, output = case.run()
    assert code == 0 and case.outcomes == ["hang", "finished"], output
    compare_attempts(case, wording)
    assert (
        tmp_path / "attempts/0001/dumps/rank_00000.txt"
    ).stat().st_size > 0 and "stacks of 1 of 1 ranks are in" in output
    assert not alive(read_json(tmp_path / "attempts/0001/ranks/rank_00000.json")["child"])


def test_killed_supervisors_take_their_ranks_along_and_the_next_one_continues_or_gives_up(
    tmp_path: Path, wording: Wording
) -> None:
    case = Case(
        tmp_path,
        [{"to": 3, "checkpoint": [2], "end": "wait"}, {"to": 3, "end": "wait"}],
        restarts={"max_failures": 1},
    )
    for number in (1, 2):
        supervisor = case.start()
        pid = case.ready(number)
        if number == 1:
            code, output = case.run()
            assert code == Exit.IN_USE and output.startswith(
                f"launch: error: {tmp_path} is already supervised by another process"
            )
        end(supervisor, signal.SIGKILL)
        wait_for(lambda: not alive(pid))  # noqa: B023
        assert case.attempts[-1]["ended"] is None
    assert (
        case.attempts[0]["checkpoint_end"] == 2
        and case.attempts[0]["decision"]["action"] == "restart"
    )
    assert case.run()[0] == 1 and case.outcomes == ["lost", "lost"]
    wording(re.sub(r"process \d+", "process PID", case.state["message"]), HOST=socket.gethostname())


def test_only_an_array_command_sees_an_array(tmp_path: Path) -> None:
    show = (
        "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if 'ARRAY' in k or"
        " k == 'TUNED'}))"
    )
    for name, array in (("plain", {}), ("task", {"SLURM_ARRAY_TASK_ID": "3"})):
        case = Case(
            tmp_path / name,
            kind="command",
            environment={"TUNED": "1"},
            arguments=("-c", show),
            array=array,
        )
        assert (
            case.run(environment={"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_JOB_ID": "12"})[0] == 0
        )
        line = (tmp_path / name / "attempts/0001/logs/rank_00000.log").read_text()
        assert json.loads(line.partition(" ")[2]) == {"TUNED": "1", **array}


# Variables that Open MPI 4 and 5, Hydra, MVAPICH, PALS and PMIx set for rank 3 of a job; then
# settings that do not describe a rank.
RANK_OF_MPI = (
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_SIZE OMPI_UNIVERSE_SIZE OMPI_APP_CTX_NUM_PROCS"
    " OMPI_MCA_ess OMPI_MCA_ess_base_vpid OMPI_MCA_orte_hnp_uri OMPI_MCA_orte_ess_num_procs"
    " OMPI_MCA_orte_app_num PMIX_RANK PMIX_NAMESPACE PMIX_SERVER_URI41 PMI_RANK PMI_FD"
    " HYDI_CONTROL_FD MPI_LOCALRANKID MPI_LOCALNRANKS MV2_COMM_WORLD_RANK MPISPAWN_ID PALS_RANKID"
    " PALS_LOCAL_RANKID RANK LOCAL_RANK"
).split()
SETTINGS = (
    "OMPI_MCA_btl OMPI_MCA_orte_tmpdir_base OMPI_CC PMIX_MCA_gds PMIX_INSTALL_PREFIX I_MPI_FABRICS"
    " HYDRA_FULL_ERROR".split()
)


def test_ranks_do_not_take_themselves_for_a_rank_of_the_shell_that_submitted(
    tmp_path: Path,
) -> None:
    case = Case(tmp_path)
    environ = {**dict.fromkeys(RANK_OF_MPI, "3"), **dict.fromkeys(SETTINGS, "x")}
    found = ranks_environment(
        case.job, case.job.items[0], tmp_path / "attempts" / "0001", environ, local=True
    )
    assert not {*RANK_OF_MPI} & {*found} and {*SETTINGS} <= {*found}
    assert {*clean_environment(environ)} == {"RANK", "LOCAL_RANK", *SETTINGS}


def test_a_hook_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The run is stopped while the hook runs, which the supervisor ends after half a minute."""
    pid = tmp_path / "hook"
    case = Case(
        tmp_path,
        WAITS,
        notify={"command": f"echo $$ > '{pid}'; exec sleep 600", "events": ["started"]},
    )
    supervisor = case.start()
    case.ready()
    hook = int(wait_for(lambda: pid.exists() and pid.read_text()))
    supervisor.send_signal(TERM)
    wait_for(lambda: case.state.get("state") == "stopped")
    assert alive(hook)
    end(supervisor, signal.SIGKILL)
    os.kill(hook, signal.SIGKILL)


def test_a_folder_that_cannot_be_written_and_one_without_a_job_are_reported(tmp_path: Path) -> None:
    case = Case(tmp_path, restarts={"max_failures": 1})
    (tmp_path / "attempts").write_text("")
    code, output = case.run()
    assert code == Exit.WRONG_INPUT and output.count("attempts/0001: Not a directory") == 2, output
    assert case.state["state"] == "stopped"
    (tmp_path / "launch" / "job.json").unlink()
    code, output = case.run()
    assert code == 2 and output.startswith(f"launch: error: {tmp_path}: no job with an item 0; ")


FAILS = "import os, sys; sys.exit('no ' + 'abcde'[int(os.environ['LAUNCH_ATTEMPT'][-4:]) - 1] * 9)"


def test_attempts_between_the_first_and_the_last_keep_their_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attempts without files still count as failures, for this supervisor and for a new one."""
    monkeypatch.setattr(run_files, "KEPT_FIRST", 1)
    monkeypatch.setattr(run_files, "KEPT_LAST", 2)
    case = Case(
        tmp_path,
        kind="command",
        arguments=("-c", FAILS),
        restarts={"max_failures": 4, "back_off_seconds": 0.01},
    )
    assert supervise(case.job, 0, show=False) == 1 and case.outcomes == ["failed"] * 5
    assert case.attempts[-1]["decision"]["reason"].startswith("5 failures")
    kept = [folder.name for folder in attempts(tmp_path) if rank_log(folder, 0).exists()]
    assert kept == ["0001", "0004", "0005"]
    for number in (2, 3):
        assert [path.name for path in (tmp_path / "attempts" / f"000{number}").iterdir()] == [
            "attempt.json"
        ]
        assert (
            case.attempts[number - 1]["failure"]["message"]
            == f"exited with 1; its last line: no {'abcde'[number - 1] * 9}"
        )
    capsys.readouterr()
    why = "removed: an item keeps the files of its first 1 and its last 2 attempts"
    for words, gone in (
        ("--attempt 2", "attempt 2"),
        ("--attempt all", "2 attempts from 2 to 3"),
        ("--attempt 3 --rank 0", "attempt 3"),
    ):
        assert command_line.main(["logs", str(tmp_path), *words.split()]) == 0
        assert capsys.readouterr().err == f"launch: case: the logs of {gone} were {why}\n"
    for words, failed, emptied in (("--attempt 2", 1, 1), ("--attempt all", 5, 2), ("", 1, 0)):
        assert command_line.main(["logs", str(tmp_path), "--errors", *words.split()]) == 0
        out = capsys.readouterr().out
        assert (out.count("(failed):"), out.count(f"  its logs were {why}")) == (failed, emptied)
    (tmp_path / "launch" / "stop.json").unlink()
    ends = [record.end for record in run_files.records(tmp_path)]
    assert len(ends) == 5 and policy.failures_since_progress(ends) == 5


FIELDS: dict[str, Any] = {
    "job_id": None,
    "restart_count": 0,
    "nodes": ["n1"],
    "world_size": 2,
    "host": "h",
    "pid": 1,
}


def test_only_closed_attempts_own_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links are removed, not followed; a file that cannot be removed is reported and tried again,
    without ending the run.
    """
    outside = tmp_path / "outside"
    item = tmp_path / "item"
    output = list[str]()
    folders = {
        number: make_attempt(item, number, 1.7e9, ended=1.7e9 + 9, outcome="failed", **FIELDS)
        for number in range(1, 36)
    }
    write_json(
        folders[7] / "attempt.json", {**read_json(folders[7] / "attempt.json"), "ended": None}
    )
    for name in ("file", "folder/file"):
        (outside / name).parent.mkdir(parents=True, exist_ok=True)
        (outside / name).write_text("mine")
    for name, place in itertools.product(("file", "folder"), (folders[8], folders[8] / "logs")):
        (place / f"link_{name}").symlink_to(outside / name)
    folders[9].rename(outside / "0009")
    folders[9].symlink_to(outside / "0009")
    before = [record.end for record in run_files.records(item)]
    unlink, refused = os.unlink, {str(folders[10] / "ranks.json")}

    def refuse(path: Any, **options: Any) -> None:
        if str(path) in refused:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        unlink(path, **options)

    (folders[10] / "ranks.json").write_text("{}")
    monkeypatch.setattr(os, "unlink", refuse)
    found = run_files.prune(run_files.records(item), output.append)
    assert output == [
        f"the files of attempt 10 cannot be removed: {folders[10]}/ranks.json: Read-only file"
        " system"
    ]
    emptied = {
        number
        for number, folder in folders.items()
        if sorted(path.name for path in folder.iterdir()) == ["attempt.json"]
    }
    assert emptied == {6, 8, *range(11, 17)}  # the new attempt is the last of 20
    assert {record.attempt for record in run_files.records(item) if record.removed} == emptied
    assert all(
        (outside / name).exists() for name in ("file", "folder/file", "0009/logs/rank_00000.log")
    )
    refused.clear()
    again = run_files.prune(found, output.append)
    assert len(output) == 1 and [*folders[10].iterdir()] == [folders[10] / "attempt.json"]
    assert [record.end for record in again] == before
    assert [record.end for record in run_files.records(item)] == before
    # A folder that a person removed in between is not created again.
    shutil.rmtree(folders[17])
    run_files.prune([*again, *again[-1:]], output.append)
    assert len(output) == 1 and not folders[17].exists()


def test_the_watchdog() -> None:
    """With a simulated clock: seconds, moving counters, whether a step was completed; the
    verdict.
    """
    rows: list[tuple[tuple[int, int, int], list[tuple[float, int, bool]], str | None]] = [
        # A check counts 30 s at most, so a machine that was suspended is not reported as a hang.
        ((100, 10, 20), [(95, 0, False), (125, 0, False), (155, 0, False)], None),
        (
            (100, 10, 20),
            [(95 + 30 * n, 0, False) for n in range(5)],
            "no first step within 1.66667 minutes of the start",
        ),
        ((100, 10, 20), [(5 * n, n, True) for n in range(1, 50)], None),
        (
            (100, 10, 20),
            [(5, 1, True), (14, 1, True), (15, 1, True)],
            "no step for 10 s after step 1",
        ),
        ((100, 100, 20), [(1, 1, True), (9000, 1, True)], None),
        ((0, 0, 0), [(30 * n, 1, n > 50) for n in range(1, 100)], None),
    ]
    for patience, observations, expected in rows:
        dog = Watchdog(*patience, 0.0)
        verdicts = [
            dog.observe(now, step, stepped=stepped, step=step)
            for now, step, stepped in observations
        ]
        assert verdicts == [None] * (len(observations) - 1) + [expected], observations
    dog = Watchdog(100, 10, 20, 0.0)
    dog.observe(1, 1, stepped=True, step=1)
    for now, step, expected in (
        (12, 1, None),
        (20, 2, None),
        (22, 2, "not saved and ended within 20 s of the signal"),
    ):
        # From now on only the end counts. A second call does not reset the time, and a further step
        # is not the end.
        dog.begin_saving()
        assert dog.observe(now, step, stepped=True, step=step) == expected
