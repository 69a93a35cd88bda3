"""Tests of ``run``: its calls of launch, its messages; marked slow, real runs that are killed and
resumed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from fem_common.errors import ConfigError
from launch.verbs.sweep import read_list
from tests.pretrain.data_folder import write_folder
from tests.ranks import losses, records
from tests.test_house import ROOT
from tests.tools.scaling.studies import TRUNKS, write
from tests.tools.scaling.test_collect import make
from tools.scaling.__main__ import main
from tools.scaling.planned_runs import plan_study
from tools.scaling.study import load_study
from tools.scaling.table import final_runs, read_table
from tools.scaling.verbs import run as running

# Seconds to wait for any event. Half a minute is usual; a machine shared by many tests takes ten
# times as long.
PATIENCE = 900.0


def arguments(*words: str) -> Namespace:
    parser = ArgumentParser()
    running.add_arguments(parser)
    return parser.parse_args(["study.yaml", *words])


def test_launch_is_handed_the_studys_runs_and_layout(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, "cluster: {processes: 4, at_once: 3}"))
    runs = plan_study(study)
    (tmp_path / "list.txt").write_text(running.run_list(runs))
    assert read_list(tmp_path / "list.txt") == {run.name: run.settings for run in runs}
    requested = arguments("--nodes", "2", "--dependency", "7", "--time", "10", "--update")
    report = " ".join(running.launch_command(study, requested))
    for option in "nodes 2 --processes 2,at-once 3,dependency 7,time 10,update".split(","):
        assert f"--{option}" in report
    assert f"--directory {study.directory}" in report and "--dry-run" not in report
    for wrong in (("--nodes", "3"), ("--nodes", "0"), ("--at-once", "0")):
        with pytest.raises(ConfigError, match=wrong[0]):
            running.launch_command(study, arguments(*wrong))
    (tmp_path / "mine.yaml").write_text("base: local_cpu\n")
    (tmp_path / "cluster.yaml").write_text("base: slurm_h100_ib\nslurm: {partition: gpu}\n")
    assert running.is_local(tmp_path / "mine.yaml") and running.is_local(Path("local_cpu"))
    assert not running.is_local(tmp_path / "cluster.yaml")


def test_progress_counts_flops_and_states_what_is_left(tmp_path: Path) -> None:
    study = load_study(write(tmp_path))
    runs = plan_study(study)
    new = {"state": "new", "active": False, "step": None}
    rows = {run.name: {**new, "name": run.name, "steps": run.steps} for run in runs}
    progress = running.Progress(study, runs, began=time.monotonic() - 100.0)
    assert progress.line(rows) == "study: 0 of 12 runs done, 0% of the FLOPs"
    for run in runs[:6]:
        rows[run.name]["state"] = "finished"
    share = sum(run.flops for run in runs[:6]) / sum(run.flops for run in runs)
    rows[runs[-1].name] |= {"state": "running", "active": True, "step": 0}
    line = progress.line(rows)
    assert f"6 of 12 runs done, {share:.0%} of the FLOPs; " in line
    assert line.endswith(f"now {runs[-1].name} 0/{runs[-1].steps}")


@pytest.mark.parametrize("local", [True, False])
def test_forks_start_after_their_trunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """On this machine after their trunk has finished, not for a failed trunk; on Slurm as a second
    array that waits for them.
    """
    study = load_study(write(tmp_path, TRUNKS))
    runs, started = plan_study(study), list[tuple[set[str], list[str]]]()
    trunks = [run.name for run in runs if not run.trunk]
    rows = {name: {"state": "stopped" if name == trunks[0] else "finished"} for name in trunks}
    monkeypatch.setattr(running, "standings", lambda study: rows)

    def follow(command: list[str], *_: object) -> tuple[int, bool]:
        after = [
            value
            for word, value in zip(command, command[1:], strict=False)
            if word == "--dependency"
        ]
        list_file = Path(command[command.index("--list") + 1])
        started.append((set(read_list(list_file)), after))
        return int(local), False

    monkeypatch.setattr(running, "_follow", follow)
    command = running.launch_command(study, arguments())
    assert running._start(study, runs, command, {}, local) == (int(local), False)
    first, second = started
    assert first == (set(trunks), [])
    missing = trunks[0] if local else ""
    forks = {run.name for run in runs if run.trunk and run.trunk != missing}
    assert second == (forks, [] if local else [f"{study.directory}/{name}" for name in trunks])


LAUNCH = """
import signal, sys, time
came = []
signal.signal(signal.SIGTERM, lambda *_: came.append(1))
print("ready", flush=True)
while not came: time.sleep(0.01)
time.sleep(1.2)  # a second signal would come now
sys.exit(100 + len(came))
"""


@pytest.mark.parametrize(
    ("states", "killed", "code"),
    [
        (["finished"] * 12, False, 0),
        (["finished"] * 11 + ["lost"], False, 1),
        (["finished"] * 5 + ["stopped"] * 7, True, 130),
        (None, False, 3),
    ],
    ids=["all done", "one failed", "killed", "refused by launch"],
)
def test_a_study_ends_as_its_runs_did(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    states: list[str] | None,
    killed: bool,
    code: int,
) -> None:
    """launch is replaced by a process that prints "ready" and ends: it receives a signal once, and
    the states of the runs determine the exit code.
    """
    path = write(tmp_path, directory=str(tmp_path / "runs"))
    write_folder(tmp_path / "data", tokens=3_000_000)
    names = [run.name for run in plan_study(load_study(path))]
    rows = states and {
        name: {"state": state, "message": "no memory"}
        for name, state in zip(names, states, strict=True)
    }
    program = LAUNCH if killed else f"import sys; sys.exit({3 if states is None else 0})"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "launch_command", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setattr(running, "standings", lambda study: rows)

    def kill() -> None:
        while "ready" not in capfd.readouterr().out:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if killed:
        threading.Thread(target=kill).start()
    assert main(["run", str(path)]) == code
    output = capfd.readouterr()
    assert ("the same command continues" in output.out) == killed
    assert (f"failed: {names[-1]}: no memory" in output.err) == (code == 1)


@pytest.mark.parametrize(
    "words", [(), ("--cluster", "nowhere.yaml")], ids=["no data", "no profile"]
)
def test_a_study_that_cannot_run_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    path = write(tmp_path, directory=str(tmp_path / "runs"))
    assert main(["run", str(path), *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "runs").exists()


# --- real training --------------------------------------------------------------------------------


def trained(folder: Path) -> list[int]:
    """Return the steps with a loss in metrics.jsonl, in order."""
    return [line["step"] for line in records(folder) if "loss" in line]


def quiet(folder: Path) -> list[str]:
    """Return settings of a run that logs and saves little, with the data in ``folder``."""
    data = [f"data.{split}.0.prefix={folder}/data/{split}" for split in ("train", "valid")]
    few = (
        "train.eval_batches=8 checkpoint.interval=1000 log.diagnostics_interval=0"
        " log.straggler_interval=0 log.interval=1000"
    )
    return [*data, *few.split()]


@pytest.mark.slow
def test_a_study_killed_on_its_way_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (
        "{sizes: [16, 8], budgets: [], tokens: [80000], validations: 2,"
        " shape: {head_size: 8, aspect_ratio: 32, min_layers: 1, ffn_multiple: 8}}"
    )
    path, study, runs = make(tmp_path, small, settings=quiet(tmp_path))
    folders = [Path(study.directory) / run.name for run in runs]
    command = [sys.executable, "-m", "tools.scaling", "run", str(path)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    first = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
    end = time.monotonic() + PATIENCE
    while first.poll() is None and time.monotonic() < end and len(trained(folders[1])) < 20:
        time.sleep(0.05)
    if first.poll() is None:
        os.killpg(first.pid, signal.SIGTERM)
    report, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == running.INTERRUPTED, report
    assert "the same command continues" in report, report
    before = [(folder / "metrics.jsonl").read_bytes() for folder in folders]
    assert len(trained(folders[0])) == runs[0].steps and len(trained(folders[1])) < runs[1].steps

    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert second.returncode == 0, second.stdout + second.stderr
    for run, folder, text, attempts in zip(runs, folders, before, (1, 2), strict=True):
        # Each step occurs once: no step was repeated.
        assert trained(folder) == list(range(1, run.steps + 1)), run.name
        assert (folder / "metrics.jsonl").read_bytes().startswith(text)
        assert len(list((folder / "attempts").iterdir())) == attempts
    assert main(["collect", str(path)]) == 0, capsys.readouterr().err
    assert len(final_runs(read_table(study.runs_csv))) == 2


@pytest.mark.slow
def test_trunks_and_forks_are_the_straight_runs_to_the_last_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training losses, gradient norms and the last validation of every run; fewer steps were
    trained.
    """
    settings = [*quiet(tmp_path), "optimizer.schedule=wsd", "optimizer.decay_steps=10"]
    small = (
        "{sizes: [16], budgets: [], tokens: [7680, 11520, 15360],"
        " shape: {head_size: 8, min_layers: 1}, warmup_steps: 5}"
    )
    found = {}
    for trunks in (False, True):
        directory = str(tmp_path / f"runs{trunks}")
        more = {"trunks": trunks, "directory": directory, "settings": settings}
        path, study, runs = make(tmp_path, small, tokens_of_data=20_000, **more)
        command = [sys.executable, "-m", "tools.scaling", "run", str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        assert main(["collect", str(path)]) == 0, capsys.readouterr().err
        taught = {
            run.name: (losses(Path(study.directory) / run.name), run.begin_step) for run in runs
        }
        found[trunks] = taught, final_runs(read_table(study.runs_csv))
    (straight, table), (forked, other) = found[False], found[True]
    assert [begin for _, begin in forked.values()] == [20, 35, 0]
    for name, (steps, begin) in forked.items():
        assert steps == {
            step: report for step, report in straight[name][0].items() if step > begin
        }, name
    for column in ("loss", "config_hash"):
        assert other[column].tolist() == table[column].tolist()
