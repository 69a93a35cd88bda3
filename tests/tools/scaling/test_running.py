"""``run``, on real training: a study of six runs is killed on its way, run again, collected and fitted; and what is said on the way.

Six runs of some seconds, most of it imports: about a minute of two cores.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import yaml

from fem_common.errors import ConfigError
from launch.verbs.sweep import read_list
from tests.pretrain.data_folder import write_folder
from tests.test_house import ROOT
from tests.tools.scaling.test_study import write
from tools.scaling import running
from tools.scaling.__main__ import main
from tools.scaling.planning import PlannedRun, plan_study
from tools.scaling.results import load_fit
from tools.scaling.study import load_study
from tools.scaling.table import final_runs, read_table

ENTRIES = 60  # of the vocabulary
PATIENCE = 900.0  # seconds for anything; half a minute is usual, and a machine shared by many tests takes ten times that


def markov_documents(documents: int = 50, tokens: int = 400) -> list[list[int]]:
    """Text with something to learn: each id is followed by one of four, at unequal odds."""
    dice = random.Random(0)
    follow = [[dice.randrange(ENTRIES) for _ in range(4)] for _ in range(ENTRIES)]
    found = []
    for _ in range(documents):
        text = [dice.randrange(ENTRIES)]
        while len(text) < tokens:
            text.append(follow[text[-1]][min(3, int(dice.expovariate(1.2)))])
        found.append(text)
    return found


def real_study(folder: Path) -> Path:
    """Two mixers at three sizes, one budget: six runs of 90 to 450 steps."""
    write_folder(folder / "data", vocab_size=ENTRIES + 4, documents=markov_documents())
    base = {
        "model": {"vocab_size": None, "make_vocab_size_divisible_by": 8, "init_std": 0.1},
        "data": {"train": [{"prefix": str(folder / "data/train")}], "valid": [{"prefix": str(folder / "data/valid")}], "seq_length": 32},
        "train": {"steps": 100, "micro_batch_size": 4, "global_batch_size": 4, "precision": "fp32", "eval_batches": 8},
        "optimizer": {"lr": 1e-2, "min_lr": 1e-3},
        "checkpoint": {"interval": 1000, "keep_last": 1},
        "log": {"diagnostics_interval": 0, "straggler_interval": 0, "interval": 1000},
    }
    study = {
        "base": "base.yaml",
        "directory": str(folder / "runs"),
        "variants": {"transformer": ["model.mixer=transformer"], "fem_softmax": ["model.mixer=fem_softmax"]},
        "shape": {"head_size": 8, "aspect_ratio": 32, "min_layers": 1, "ffn_multiple": 8},
        "sizes": [24, 16, 8],  # the longest last
        "budgets": [6e8],
        "max_epochs": 4,
        "min_steps": 20,
        "validations": 2,
        "cluster": {"at_once": 2, "tflops": 0.001},
    }
    for name, values in (("base", base), ("study", study)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder / "study.yaml"


def test_a_study_killed_on_its_way_goes_on_and_is_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = real_study(tmp_path)
    study = load_study(path)
    runs = plan_study(study)
    folders = {run.name: Path(study.directory) / run.name for run in runs}
    command = [sys.executable, "-m", "tools.scaling", "run", str(path)]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    began = time.monotonic()
    while first.poll() is None and time.monotonic() - began < PATIENCE and not _late_enough(runs, folders):
        time.sleep(0.05)
    if first.poll() is None:
        os.killpg(first.pid, signal.SIGTERM)
    told, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == running.INTERRUPTED and "the same command goes on" in told, told
    done = {name for name, folder in folders.items() if _state(folder) == "finished"}
    stopped = {name for name, folder in folders.items() if (folder / "attempts").is_dir()} - done
    before = {name: (folders[name] / "metrics.jsonl").read_bytes() for name in done | stopped if _steps(folders[name])}
    assert done and stopped & set(before)

    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"all {len(runs)} runs are done" in second.stdout
    for run in runs:
        steps = _steps(folders[run.name])
        assert steps == list(range(1, run.steps + 1)), run.name  # each step once: nothing was done anew
        attempts = sorted(folder.name for folder in (folders[run.name] / "attempts").iterdir())
        assert (len(attempts) == 1) == (run.name not in stopped), run.name
    for name, text in before.items():
        assert (folders[name] / "metrics.jsonl").read_bytes().startswith(text)
        assert name not in done or (folders[name] / "metrics.jsonl").read_bytes() == text

    for verb in ("collect", "fit"):
        assert main([verb, str(path)]) == 0, capsys.readouterr().err
    losses = final_runs(read_table(study.runs_csv))["loss"]
    assert len(losses) == len(runs)
    assert all(0.84 < loss < 3.0 for loss in losses)  # the successors' entropy is 0.85, and log 60 = 4.09 is knowing nothing
    fit = load_fit(study.fit_json)
    for variant in study.variants:
        isoflop = fit.variants[variant].isoflop
        assert isoflop is not None and len(isoflop.parabolas) == 1
        assert set(isoflop.parabolas[0].runs) == {run.name for run in runs if run.variant == variant}


@pytest.mark.slow
def test_a_run_that_fails_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = real_study(tmp_path)
    values = yaml.safe_load(path.read_text())
    del values["budgets"], values["variants"]["fem_softmax"]
    values |= {"tokens": [8000], "sizes": [8], "settings": ["checkpoint.load=/nowhere"]}
    path.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "tools.scaling", "run", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    (run,) = plan_study(load_study(path))
    assert done.returncode == 2  # as the run itself ended
    assert f"failed: {run.name}: " in done.stderr and "/nowhere: no checkpoint there" in done.stderr
    assert f"python -m launch logs --errors {tmp_path}/runs/{run.name}" in done.stderr
    assert "1 of 1 runs failed" in done.stderr


def _late_enough(runs: list[PlannedRun], folders: dict[str, Path]) -> bool:
    """Whether a run is done and another one in its middle, with seconds of steps left, so that there is something to go on from."""
    under_way = [run for run in runs if 3 < len(_steps(folders[run.name])) < run.steps / 2 and run.steps > 200]
    return bool(under_way) and any(_state(folder) == "finished" for folder in folders.values())


def _state(folder: Path) -> str | None:
    try:
        state: str | None = json.loads((folder / "launch" / "state.json").read_text())["state"]
    except (OSError, ValueError):
        return None
    return state


def _steps(folder: Path) -> list[int]:
    """Steps whose loss is in metrics.jsonl, in its order."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # being written
        if "loss" in row:
            found.append(row["step"])
    return found


# --- without training --------------------------------------------------------------------------------------------------------------


def arguments(*words: str) -> Namespace:
    parser = ArgumentParser()
    running.add_arguments(parser)
    return parser.parse_args(["study.yaml", *words])


def test_launch_reads_the_list_of_a_study(tmp_path: Path) -> None:
    runs = plan_study(load_study(write(tmp_path)))
    (tmp_path / "list.txt").write_text(running.run_list(runs))
    assert read_list(tmp_path / "list.txt") == {run.name: run.settings for run in runs}


def test_the_processes_of_a_run_are_spread_over_nodes(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, lambda values: values.update(cluster={"processes": 4, "at_once": 3})))
    words = running.launch_command(study, arguments("--nodes", "2", "--dependency", "7", "--time", "10", "--update"), "list.txt")
    told = " ".join(words)
    for option in ("--nodes 2 --processes 2", "--at-once 3", "--dependency 7", "--time 10", "--update", f"--directory {study.directory}"):
        assert option in told
    assert "--dry-run" not in told
    for wrong in (("--nodes", "3"), ("--nodes", "0"), ("--at-once", "0")):
        with pytest.raises(ConfigError, match=wrong[0]):
            running.launch_command(study, arguments(*wrong), "list.txt")


def test_profiles_of_this_machine_are_known(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: local_cpu\n")
    (tmp_path / "cluster.yaml").write_text("base: slurm_h100_ib\nslurm: {partition: gpu}\n")
    assert running.is_local(tmp_path / "mine.yaml") and running.is_local(Path("local_cpu"))
    assert not running.is_local(tmp_path / "cluster.yaml")


def test_progress_counts_flops_and_says_what_is_left(tmp_path: Path) -> None:
    study = load_study(write(tmp_path))
    runs = plan_study(study)
    rows = {run.name: {"name": run.name, "state": "new", "active": False, "step": None, "steps": run.steps} for run in runs}
    progress = running.Progress(study, runs, began=time.monotonic() - 100.0)
    assert progress.line(rows) == "study: 0 of 12 runs done, 0% of the FLOPs"
    half = 0.0
    for run in runs:
        if half < 0.5 * sum(other.flops for other in runs):
            rows[run.name]["state"], half = "finished", half + run.flops
    share = half / sum(run.flops for run in runs)
    rows[runs[-1].name] |= {"state": "running", "active": True, "step": 0}
    line = progress.line(rows)
    assert f"{share:.0%} of the FLOPs; {running.duration(100 * (1 - share) / share)} left" in line
    assert line.endswith(f"now {runs[-1].name} 0/{runs[-1].steps}")
    assert [running.duration(seconds) for seconds in (45, 61, 3599, 3661, 90000)] == ["45s", "1m", "60m", "1h 01m", "25h 00m"]


def test_a_run_without_data_is_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, lambda values: values.update(directory=str(tmp_path / "runs")))
    assert main(["run", str(path)]) == 2
    error = capsys.readouterr().err
    assert "data/train.bin not found; make the data with" in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    assert main(["run", str(path), "--cluster", "nowhere.yaml"]) == 2
    assert "nowhere.yaml: no such file" in capsys.readouterr().err
