"""The verbs submit, sweep, cancel and requeue as a person calls them, where no Slurm is: refusals, dry runs, jobs of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from launch.cluster.slurm import clean_environment
from launch.job import launch_folder, read_json, read_json_lines, write_json
from launch.job.item_state import Standing, find_job, standings
from launch.job.snapshot import ROOT
from launch.verbs.requeue import restart
from launch.verbs.submit import prepare, send
from tests.launch.requests import DEMO, command, launch, wait_for
from tests.launch.supervised import Case

pytestmark = pytest.mark.usefixtures("here")


def test_a_dry_run_shows_all_and_writes_nothing(tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "cordon.jsonl").write_text(json.dumps({"node": "n7", "reason": "ECC", "time": 0, "run": "x", "until": None}) + "\n")
    words = [
        "submit",
        DEMO,
        "--cluster",
        "slurm.yaml",
        "train.global_batch_size=8",
        "--nodes",
        "2",
        "--set",
        f"paths.cordon={tmp_path}/cordon.jsonl",
    ]
    done = launch(*words, "model.vocab_size=1000", "--exclude", "n8", "--dependency", "12", "--dry-run")
    (tmp_path / "cordon.jsonl").unlink()
    assert sorted(tmp_path.rglob("*")) == before
    lines = done.stdout.splitlines()
    for told in (
        "4 processes",
        "n9, n8, n7",
        "afterok:12",
        "144 GPU hours",
        "#SBATCH --exclude=n9,n8,n7",
        "#SBATCH --nodes=2",
        "sbatch --parsable",
    ):
        assert any(told in line for line in lines), f"{told}\n{done.stdout}"
    assert "#!/bin/bash" in lines


def test_a_dry_run_of_a_run_whose_data_is_not_made_yet() -> None:
    done = launch("submit", DEMO, "--cluster", "slurm.yaml", "--dry-run")
    assert "pretrain's plan is not known yet: data.train.0.prefix" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("submit", "--cluster", "slurm.yaml", "--", "data_prep", "status", "a"), "sbatch: not installed here"),
        (("submit", DEMO, "--cluster", "slurm.yaml"), "train.bin not found; make the data with: python -m data_prep run"),
        (("submit", DEMO, "--cluster", "slurm.yaml"), "where another job makes it: --dependency JOB"),
        (("local", DEMO, "--cluster", "local.yaml"), "train.bin not found"),
        (("submit", DEMO, "--cluster", "local.yaml"), "python -m launch local"),
        (("submit", "--cluster", "slurm.yaml"), "nothing to do: give CONFIG.yaml"),
        (("submit", DEMO, "--cluster", "slurm.yaml", "--", "data_prep"), "both a run"),
        (("submit", DEMO, "--cluster", "slurm.yaml", "--tasks", "2"), "launch sweep"),
        (("submit", DEMO, "--cluster", "slurm.yaml", "--at-once", "2"), "--at-once 2: it is for an array"),
        (("submit", DEMO, "--cluster", "slurm.yaml", "--nodes", "0"), "must be at least 1"),
        (("submit", "--cluster", "slurm.yaml", "--", "os", "x"), "os: not a command of ours"),
        (("submit", DEMO, "--cluster", "nowhere.yaml"), "nowhere.yaml"),
        (("cancel", "nowhere"), "no such directory"),
        (("requeue", "nowhere"), "no such directory"),
        (("submit", DEMO, "--cluster", "slurm.yaml", "--time", "5"), "slurm.time = 5 must be more than slurm.signal_seconds = 300"),
        (("requeue", "d", "--set", "slurm.time=1"), "give --cluster, too"),
        (("sweep", DEMO, "--cluster", "local.yaml", "--list", "nowhere.txt"), "nowhere.txt: No such file"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    said = launch(*words, code=2).stderr
    assert told in said and said.count("\n") == 1
    assert read_json(tmp_path / "runs" / "demo" / "mixers" / "fem_softmax" / "launch" / "submissions.jsonl") is None


def test_local_jobs_are_requeued_and_cancelled_here(tmp_path: Path) -> None:
    """A command that waits (its configuration is a pipe) stands for a run; its supervisors are real."""
    os.mkfifo(tmp_path / "config.yaml")
    job = prepare(command("pretrain", "config.yaml", "--plan"))
    command_line = [sys.executable, "-m", "launch.supervise", job.directory]
    environment = {**clean_environment(), "PYTHONPATH": job.code, "PYTHONSAFEPATH": "1"}
    with (tmp_path / "out").open("w") as out:
        supervisor = subprocess.Popen(command_line, env=environment, stdout=out, stderr=out)
        try:
            wait_for(lambda: standings(job)[0].pid == supervisor.pid and list(Path(job.directory).glob("attempts/0001/ranks/*")) != [])
            launch("cancel", job.directory)
            assert supervisor.wait(60) != 0
        finally:
            supervisor.kill()
            supervisor.wait()
    assert read_json(launch_folder(Path(job.directory)) / "stop.json")["why"] == "cancelled"
    assert "nothing to cancel: stopped" in launch("cancel", job.directory).stdout
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").write_text("{}")  # which pretrain refuses
    assert "attempt 2 failed" in launch("requeue", job.directory, code=2).stdout


def test_a_run_that_saves_in_order_to_end_goes_on_when_it_is_requeued(tmp_path: Path) -> None:
    case = Case(tmp_path / "run", [{"to": 3, "checkpoint": [3], "end": "deaf"}, {}], watchdog={"save_minutes": 0.05})
    with case.start() as supervisor:
        try:
            wait_for(lambda: (case.directory / "checkpoints" / "step_00000003").exists())
            assert "saves, then ends" in launch("cancel", "--save", str(case.directory)).stdout
            wait_for(lambda: case.state["state"] == "saving")
            assert "saves and starts again" in launch("requeue", str(case.directory)).stdout
            assert supervisor.wait(60) == 0
        finally:
            supervisor.kill()
    assert (case.state["state"], len(case.attempts)) == ("finished", 2)


@pytest.mark.parametrize(
    ("state", "supervisor", "told"),
    [
        ("COMPLETING", "cancelled", "is just ending; if it does not come back to the queue, give this command again"),
        ("COMPLETING", "requeued", "is just ending"),
        ("RUNNING", "cancelled", "is just ending"),
    ],
)
def test_a_requeue_tells_what_becomes_of_a_job(state: str, supervisor: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = prepare(command("data_prep", "status", "a", profile="slurm.yaml"))
    write_json(launch_folder(Path(job.directory)) / "state.json", {"state": supervisor, "job_id": "12"})
    write_json(launch_folder(Path(job.directory)) / "stop.json", {"why": "cancelled"})
    restart(job, [Standing(0, "active", "12", state)])
    assert f"job 12 ({state}) {told}" in capsys.readouterr().out
    assert not (launch_folder(Path(job.directory)) / "stop.json").exists()


def test_what_is_submitted_is_noted_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 12\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HF_TOKEN", "hf_'0123456789")
    monkeypatch.setattr(sys, "argv", ["launch", "submit", "--name", "a b", "--set", "x=hf_'0123456789", "no secret"])
    request = command("data_prep", "status", "a", profile="slurm.yaml")
    send(prepare(request), request.profile, [0], at_once=None, after=None, exclude=[])
    (line,) = read_json_lines(tmp_path / next(tmp_path.glob("runs/jobs/*")) / "launch" / "submissions.jsonl")
    assert line["command"] == "launch submit --name 'a b' --set 'x=***' 'no secret'"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_tasks_on_this_machine_end_together(tmp_path: Path, number: signal.Signals) -> None:
    """Three tasks, two at once, all waiting; a restart of one, then the end of the command: two end, the third never starts."""
    os.mkfifo(tmp_path / "config.yaml")
    words = "local --cluster local.yaml --directory d --tasks 3 --at-once 2 -- pretrain config.yaml --plan".split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "launch", *words], env=environment, start_new_session=True)
    items = [tmp_path / "d" / "tasks" / f"{index:04}" for index in range(3)]

    def started() -> list[int]:
        return [len(list(item.glob("attempts/*/ranks/*.json"))) for item in items]

    try:
        wait_for(lambda: started() == [1, 1, 0])
        assert "saves and starts again" in launch("requeue", "d/tasks/0001").stdout
        wait_for(lambda: started() == [1, 2, 0])
        os.kill(process.pid, number)
        process.wait(60)
        job, _ = find_job("d")
        wait_for(lambda: all(standing.kind == "idle" for standing in standings(job)))
    finally:
        process.kill()
        process.wait()
    assert started() == [1, 2, 0]


def test_tasks_that_are_under_way_are_not_started_again(tmp_path: Path) -> None:
    """The same command twice at once: the second one does what the first one has not begun, and the first leaves that alone."""
    os.mkfifo(tmp_path / "config.yaml")
    words = "local --cluster local.yaml --name t --directory d --tasks 3 --at-once 2 -- pretrain config.yaml --plan".split()
    command_line = [sys.executable, "-m", "launch", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    items, processes = [tmp_path / "d" / "tasks" / f"{index:04}" for index in range(3)], list[subprocess.Popen[str]]()

    def started() -> list[int]:
        return [len(list(item.glob("attempts/*/ranks/*.json"))) for item in items]

    def reached(expected: list[int]) -> bool:
        return started() == expected

    try:
        for expected in ([1, 1, 0], [1, 1, 1]):
            processes.append(subprocess.Popen(command_line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
            wait_for(partial(reached, expected))
        launch("cancel", "d/tasks/0000")
        launch("cancel", "d/tasks/0001")
        first, _ = processes[0].communicate(timeout=60)
        launch("cancel", "d/tasks/0002")
        second, _ = processes[1].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert started() == [1, 1, 1]
    assert "t[2]: left out: process" in first
    assert "t[0]: left out: process" in second and "t[1]: left out: process" in second and "t[2]: ended with" in second


def test_a_sweep_on_this_machine(tmp_path: Path) -> None:
    """Runs that their data refuses end at once, each by itself; the exit code says it."""
    words = ("sweep", DEMO, "--cluster", "local.yaml", "--grid", "train.seed=1,2", "--directory", "s", "--at-once", "2")
    assert "idle" in launch(*words, "--dry-run").stdout
    assert not (tmp_path / "s").exists()
    launch(*words, code=2)
    states = [read_json(tmp_path / "s" / f"train.seed={seed}" / "launch" / "state.json")["state"] for seed in (1, 2)]
    assert states == ["stopped", "stopped"]
