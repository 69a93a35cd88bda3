"""Tests of collect: exact numbers of real runs, resumed runs counted once, and incompatible runs
refused by their names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fem_common.config import plain
from pretrain.__main__ import main as pretrain
from pretrain.config import load_run
from pretrain.data.facts import check_contents, check_data
from pretrain.plan.run_plan import flops_per_token
from pretrain.report.loggers import _scalars
from pretrain.report.metrics import StepRecord
from tests.pretrain.data_folder import write_folder
from tests.ranks import VARIABLES, records
from tests.tools.scaling.studies import loss, planned, write, write_run
from tools.scaling.__main__ import main
from tools.scaling.planned_runs import PlannedRun
from tools.scaling.study import Study
from tools.scaling.table import final_runs, read_table

Made = tuple[Path, Study, list[PlannedRun]]


FEW = """
variants: {transformer: []}
sizes: [32, 48, 64]
budgets: [1.0e+10]
min_steps: 20
max_epochs: 1.0e+6
"""


def make(folder: Path, changes: str = "{}", *, tokens_of_data: int = 900, **changed: Any) -> Made:
    """Return a study of three runs of the Transformer, with ``changes`` (YAML) and ``changed``, and
    its data, before any run.
    """
    write_folder(folder / "data", tokens=tokens_of_data)
    values = yaml.safe_load(FEW) | {"directory": str(folder / "runs")} | yaml.safe_load(changes)
    path = write(folder, model="vocab_size: null", **values | changed)
    return path, *planned(path)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A study of three complete runs."""
    monkeypatch.chdir(tmp_path)
    made = make(tmp_path)
    for run in made[2]:
        write_run(made[1], run)
    return made


def metrics(study: Study, run: PlannedRun, change: Callable[[list[str]], list[str]]) -> None:
    """Change the lines of a run's metrics.jsonl."""
    file = Path(study.directory) / run.name / "metrics.jsonl"
    file.write_text("\n".join(change(file.read_text().splitlines())))


def collected(study: Made, *words: str) -> Any:
    """Run collect and return its table."""
    assert main(["collect", str(study[0]), *words]) == 0
    return read_table(study[1].runs_csv)


def refused(study: Made, capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """Return collect's message after checking that no file was written."""
    capsys.readouterr()
    assert main(["collect", str(study[0]), *words]) == code
    report = capsys.readouterr()
    assert not Path(study[1].results).exists()
    if code == 2:
        assert report.err.startswith("tools.scaling: error: ") and report.err.count("\n") == 1
    return report.out + report.err


def test_all_rows_of_all_runs(tmp_path: Path, study: Made) -> None:
    """Integers and products of two are exact, and the loss passes through JSON and CSV, both of
    which write every digit.
    """
    _, plan, runs = study
    table = collected(study)
    final = final_runs(table).set_index("run")
    assert list(final.index) == [run.name for run in runs]
    for run in runs:
        row, own = final.loc[run.name], table[table["run"] == run.name]
        for name in ("parameters", "tokens", "steps", "variant", "budget", "learning_rate"):
            assert row[name] == getattr(run, name), name
        assert row["flops"] == run.tokens * run.flops_per_token
        assert row["loss"] == loss(run.parameters, run.tokens)
        assert own["final"].tolist() == [False] * (len(own) - 1) + [True]
        assert len(own) >= plan.validations
        assert own["wall_seconds"].tolist() == [0.5 * step for step in own["step"]]
        first, second = own["step"].iloc[:2]
        since = loss(run.parameters, np.arange(first + 1, second + 1) * run.batch_tokens) - 0.01
        # A sum in a different order.
        assert own["train_loss"].iloc[1] == pytest.approx(since.mean(), rel=1e-12)
    assert json.loads(plan.runs_csv.with_name("collected.json").read_text()) == {
        "planned": 3,
        "complete": 3,
        "left_out": {},
    }
    parquet = tmp_path / "out" / "runs.parquet"
    collected(study, "--out", str(parquet))
    assert read_table(parquet).equals(table)


def test_runs_that_are_missing_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = make(tmp_path, "seeds: [1, 2, 3, 4]")
    _, plan, runs = study
    write_run(plan, runs[0], state="failed", up_to=runs[0].steps // 2)
    write_run(plan, runs[1], state="stopped", up_to=1)
    report = refused(study, capsys, code=1)
    assert "12 of 12 runs are not complete" in report and "and 2 more" in report
    assert (
        f"{runs[0].name}: failed at step {runs[0].steps // 2} of {runs[0].steps}: out of memory"
        in report
    )
    assert f"{runs[2].name}: not begun" in report
    assert f"python -m tools.scaling run {study[0]}" in report and "--partial" in report
    assert "none of its 12 runs is complete" in refused(study, capsys, "--partial")
    for run in runs[2:]:
        write_run(plan, run)
    table = collected(study, "--partial")
    assert set(final_runs(table)["run"]) == {run.name for run in runs[2:]}, (
        "an unfinished run has no last row"
    )
    assert set(json.loads(plan.runs_csv.with_name("collected.json").read_text())["left_out"]) == {
        runs[0].name,
        runs[1].name,
    }


def test_a_diverged_run_is_left_out_of_a_partial_table(
    study: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    _, plan, (run, *_) = study
    nan = json.dumps({"step": run.steps, "valid_loss": math.nan})
    metrics(plan, run, lambda lines: [*lines, nan])
    assert f"{run.name}: valid_loss = nan at step {run.steps}: the run diverged" in refused(
        study, capsys
    )
    write_run(plan, run, state="failed", up_to=3)
    metrics(plan, run, lambda lines: [*lines, nan])
    table = collected(study, "--partial")
    assert run.name not in set(final_runs(table)["run"]) and table["loss"].notna().all()


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, study: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plan, runs = study
    metrics(plan, runs[2], lambda lines: [line for line in lines if "valid_loss" not in line])
    assert f"{runs[2].name}: it has no validation at its last step, {runs[2].steps}" in refused(
        study, capsys
    )
    for change, report in (({"tokens": 950}, "data"), ({"tokenizer": "two"}, "tokenizer")):
        other = write_folder(tmp_path / f"other_{report}", **change)
        words = tuple(f"data.{split}.0.prefix={other / split}" for split in ("train", "valid"))
        write_run(plan, runs[2], words=words)
        message = refused(study, capsys)
        assert f"{report}: runs {runs[0].name} and {runs[2].name} have " in message
        assert "cannot be compared" in message
    write_run(plan, runs[2], words=("optimizer.weight_decay=0.3",))
    assert f"trained with optimizer.weight_decay = 0.3, but {path} now plans 0.1" in refused(
        study, capsys
    )
    # Settings that do not affect the result of training may differ, and two variants that differ
    # only in them are one run. Variants of different sequence lengths cannot be compared.
    free = "log.interval=3 train.micro_batch_size=2 checkpoint.interval=7 train.recompute=full"
    write_run(plan, runs[2], words=tuple(free.split()))
    collected(study)
    for word, report in (
        ("log.interval=3", "have the same configuration"),
        ("data.seq_length=32", "have data of different identity"),
    ):
        twice = make(tmp_path, variants={"a": [], "b": [word]}, directory=str(tmp_path / word))
        for run in twice[2]:
            write_run(twice[1], run)
        assert f"runs {twice[2][0].name} and {twice[2][1].name} {report}" in refused(twice, capsys)


def test_a_checkpoint_reports_what_data_it_was_trained_on(
    tmp_path: Path, study: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(study[1].directory) / study[2][0].name
    step = folder / "checkpoints" / "step_00000010"
    step.mkdir(parents=True)
    (step.parent / "latest").write_text(step.name + "\n")
    config = load_run(folder / "config.yaml")
    contents = check_contents(check_data(config))
    (step / "manifest.json").write_text(json.dumps({"data": contents.key}))
    assert collected(study)["data"].nunique() == 1
    write_folder(tmp_path / "data", tokens=950)
    assert main(["collect", str(study[0])]) == 2
    assert f"{folder}: it was trained on other data" in capsys.readouterr().err


def exported(study: Study, run: PlannedRun, interval: int = 10) -> dict[str, Any]:
    """Return the export's line of a run, from the data that the logger sends to Weights & Biases:
    config, scalars at an interval, validations.
    """
    folder = Path(study.directory) / run.name
    history: dict[int, dict[str, object]] = {}
    for line in records(folder):
        if "valid_loss" in line:
            history.setdefault(line["step"], {})["valid_loss"] = line["valid_loss"]
        elif line["step"] % interval == 0:
            numbers: dict[str, Any] = dict.fromkeys(
                ("grad_norm", "tokens_per_second", "tflops_per_device", "eta_seconds"), 1.0
            )
            record = StepRecord(**line, **numbers, mfu=None, peak_memory_bytes=1)
            history.setdefault(line["step"], {}).update(_scalars(record))
    config = {**plain(load_run(folder / "config.yaml")), "_wandb": {"runtime": 3}}
    return {
        "name": run.name,
        "config": config,
        "history": [{"step": step, **row} for step, row in history.items()],
    }


BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "line 2: history is missing": lambda line: line.pop("history"),
    "line 2: run": lambda line: line["config"].update(model=None),
    "model.vocab_size is missing": lambda line: line["config"]["model"].update(vocab_size=None),
    "step is missing": lambda line: line["history"].append({"loss": 1.0}),
    "no row has valid_loss": lambda line: [row.pop("valid_loss", None) for row in line["history"]],
    "the run diverged": lambda line: line["history"][-1].update(valid_loss="NaN"),
}


def test_from_weights_and_biases(
    tmp_path: Path, study: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table equals that from the directories, except for training losses and seconds, of which
    the logger writes every tenth.
    """
    _, plan, runs = study
    ours, export = collected(study), tmp_path / "export.jsonl"
    lines = [exported(plan, run) for run in runs]
    resumed, old = (line["history"] for line in lines[:2])
    # These steps were trained again after the run resumed.
    resumed[:0] = [{**dict.fromkeys(row, 99.0), "step": row["step"]} for row in resumed[-2:]]
    # A run without the metric "step".
    old[:] = [{"_step": row.pop("step"), **row} for row in old]
    export.write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path(plan.directory).rename(tmp_path / "elsewhere")
    theirs = collected(study, "--wandb", str(export))
    same = [
        column for column in ours.columns if column not in ("train_loss", "wall_seconds", "source")
    ]
    assert theirs[same].equals(ours[same]) and set(theirs["source"]) == {"wandb"}
    # Every step took half a second; the export lacks the steps after the last logged one, at most
    # nine.
    assert final_runs(theirs)["wall_seconds"].tolist() == pytest.approx(
        final_runs(ours)["wall_seconds"].tolist(), abs=5.0
    )
    Path(plan.directory).rename(tmp_path / "collected")
    for report, change in BROKEN.items():
        broken = json.loads(json.dumps(lines[1]))
        change(broken)
        export.write_text(f"{json.dumps(lines[0])}\n{json.dumps(broken)}\n{json.dumps(lines[2])}\n")
        message = refused(study, capsys, "--wandb", str(export))
        assert report in message and str(export) in message


def test_a_fork_is_collected_as_a_straight_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses, tokens, FLOPs and seconds count from the start of the trunk, from directories and
    from Weights & Biases.
    """
    monkeypatch.chdir(tmp_path)
    few = (
        "{sizes: [32], budgets: [], tokens: [7680, 15360], settings: [optimizer.schedule=wsd],"
        " warmup_steps: 5}"
    )
    found = []
    for trunks in (False, True):  # the runs in separate files, and in one file after another
        directory = str(tmp_path / f"runs{trunks}")
        study = make(tmp_path, few, tokens_of_data=20_000, trunks=trunks, directory=directory)
        for run in study[2]:
            write_run(study[1], run)
        found.append((study[2], collected(study)))
    (straight, wanted), (_, ours), (path, plan, (fork, trunk)) = *found, study
    assert (fork.trunk, fork.begin_step, fork.steps, trunk.steps) == (trunk.name, 27, 30, 60)
    last = final_runs(wanted).drop(columns="train_loss")  # its means begin at other validations
    assert final_runs(ours).drop(columns="train_loss").equals(last)
    assert ours[ours["run"] == fork.name]["step"].tolist() == [12, 24, 30]
    assert ours["train_loss"].notna().all()
    lines = [exported(plan, run, interval=1) for run in (fork, trunk)]
    (tmp_path / "export.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = Path(plan.directory)
    folder.rename(tmp_path / "elsewhere")
    table = collected(study, "--wandb", "export.jsonl")
    assert final_runs(table)["wall_seconds"].tolist() == [15.0, 30.0]
    (tmp_path / "export.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert main(["collect", str(path), "--wandb", "export.jsonl"]) == 1
    assert f"{fork.name}: a fork of {trunk.name}, which has no record" in capsys.readouterr().err
    write_run(plan, trunk)
    write_run(plan, straight[0])  # as trained before the study had trunks
    assert final_runs(collected(study)).drop(columns="train_loss").equals(last)
    for run, there in ((trunk, "other"), (fork, trunk.name)):
        write_run(plan, run, words=(f"checkpoint.fork=runs/{there}/checkpoints/step_00000020",))
        assert main(["collect", str(path)]) == 2
        assert f"{run.name}: it began at runs/{there}" in capsys.readouterr().err


def test_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of pretrain, one of them reset to its first checkpoint and restarted: the table
    contains their own numbers.
    """
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    two = (
        "{variants: {transformer: [], again: [optimizer.lr=2e-3]}, sizes: [32], budgets: [],"
        " tokens: [2560], settings: [checkpoint.interval=5], shape: {head_size: 16},"
        " min_steps: 10, warmup: 0.1}"
    )
    study = make(tmp_path, two)
    _, plan, runs = study
    folders = [Path(plan.directory) / run.name for run in runs]

    def train(run: PlannedRun, folder: Path) -> None:
        assert pretrain([plan.base, *run.settings, f"name={run.name}", f"run_dir={folder}"]) == 0

    for run, folder in zip(runs, folders, strict=True):
        train(run, folder)
    first, *later = sorted((folders[0] / "checkpoints").glob("step_*"))
    for newer in later:
        newer.rename(tmp_path / newer.name)
    (first.parent / "latest").write_text(first.name + "\n")
    train(runs[0], folders[0])
    final = final_runs(collected(study)).set_index("run")
    for run, folder in zip(runs, folders, strict=True):
        row, lines = final.loc[run.name], records(folder)
        last = {line["step"]: line for line in lines if "loss" in line}
        assert row["tokens"] == last[run.steps]["consumed_tokens"] == run.tokens
        assert row["loss"] == [line["valid_loss"] for line in lines if "valid_loss" in line][-1]
        assert row["flops"] == run.tokens * flops_per_token(load_run(folder / "config.yaml"))
        assert row["wall_seconds"] == pytest.approx(
            sum(line["step_seconds"] for line in last.values()), rel=1e-12
        )  # a sum in a different order
        assert (sum("loss" in line for line in lines) > run.steps) == (run is runs[0]), (
            "steps are there twice"
        )
