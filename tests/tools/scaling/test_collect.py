"""collect: exact numbers of real runs, resumed runs counted once, and everything that may not be mixed refused by name."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from fem_common.config import plain
from pretrain.__main__ import main as pretrain
from pretrain.config import load_run
from pretrain.data.facts import check_contents, check_data
from pretrain.plan.run_plan import flops_per_token
from pretrain.report.loggers import _scalars
from pretrain.report.metrics import StepRecord
from tests.pretrain.data_folder import write_folder
from tests.tools.scaling.run_folders import STUDY, loss_of, planned, write_all, write_progress, write_run, write_study
from tools.scaling.__main__ import main
from tools.scaling.planning import PlannedRun
from tools.scaling.study import Study, load_study
from tools.scaling.table import final_runs, read_table

SMALLER = {"  cem: [model.mixer=cem, optimizer.lr=2e-3]\n": "", "3.0e9, 1.0e10": "3.0e9"}  # three runs


def small(folder: Path) -> tuple[Path, Study, list[PlannedRun]]:
    """A study of three runs, complete."""
    path = write_study(folder, **SMALLER)
    return path, *write_all(path)


def error(path: Path, capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """collect's message; nothing was written."""
    results = Path(load_study(path).results)
    assert main(["collect", str(path), *words]) == code
    told = capsys.readouterr()
    assert not results.exists()
    if code == 2:
        assert told.err.startswith("tools.scaling: error: ") and told.err.count("\n") == 1
    return told.out + told.err


def test_all_rows_of_all_runs(tmp_path: Path) -> None:
    path = write_study(tmp_path, **{"3.0e9, 1.0e10": "3.0e9"})
    study, runs = write_all(path)
    assert main(["collect", str(path)]) == 0
    table = read_table(study.runs_csv)
    final = final_runs(table).set_index("run")
    assert list(final.index) == [run.name for run in runs]
    for run in runs:
        row = final.loc[run.name]
        assert (row["parameters"], row["tokens"], row["steps"]) == (run.parameters, run.tokens, run.steps)
        # Whole numbers and products of two: exact. The loss went through JSON and CSV, both of which write every digit.
        assert row["flops"] == run.tokens * run.flops_per_token
        assert row["loss"] == loss_of(run.variant, run.parameters, run.tokens)
        assert (row["variant"], row["budget"], row["learning_rate"]) == (run.variant, run.budget, run.learning_rate)
        own = table[table["run"] == run.name]
        assert own["final"].tolist() == [False] * (len(own) - 1) + [True]
        assert own["wall_seconds"].tolist() == [0.5 * step for step in own["step"]]
        assert len(own) >= study.validations
    assert json.loads(study.runs_csv.with_name("collected.json").read_text()) == {"planned": 6, "complete": 6, "left_out": {}}
    parquet = tmp_path / "out" / "runs.parquet"
    assert main(["collect", str(path), "--out", str(parquet)]) == 0
    assert read_table(parquet).equals(table)


def test_the_training_loss_is_the_mean_since_the_row_before(tmp_path: Path) -> None:
    path, study, runs = small(tmp_path)
    assert main(["collect", str(path)]) == 0
    rows = read_table(study.runs_csv)
    rows = rows[rows["run"] == runs[0].name]
    first, second = int(rows["step"].iloc[0]), int(rows["step"].iloc[1])
    losses = [loss_of("transformer", runs[0].parameters, step * runs[0].batch_tokens) - 0.01 for step in range(first + 1, second + 1)]
    # Sums of at most some hundred losses in another order.
    assert rows["train_loss"].iloc[1] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12)


def test_of_a_resumed_run_the_last_attempt_counts(tmp_path: Path) -> None:
    """It trained up to its end, was found wanting, and went on from a checkpoint: steps and a validation are there twice."""
    path, study, runs = small(tmp_path)
    metrics = Path(study.directory) / runs[1].name / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    again = [json.loads(line) for line in lines[-6:]]
    for line in again:
        line.update({key: line[key] + 0.125 for key in ("valid_loss", "loss") if key in line})
    wrong = [json.dumps({**json.loads(line), "step_seconds": 9.0}) if '"loss"' in line else line for line in lines[-6:]]
    metrics.write_text("\n".join([*lines[:-6], *wrong, *(json.dumps(line) for line in again)]) + '\n{"step": 3, "valid_lo')
    assert main(["collect", str(path)]) == 0
    row = final_runs(read_table(study.runs_csv)).set_index("run").loc[runs[1].name]
    assert row["loss"] == loss_of("transformer", runs[1].parameters, runs[1].tokens) + 0.125
    assert row["wall_seconds"] == 0.5 * runs[1].steps


def test_runs_that_are_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_study(tmp_path, **{"1.0e10": "4.0e9"})
    study, runs = planned(path)
    write_run(study, runs[0], state="failed", up_to=runs[0].steps // 2)
    write_run(study, runs[1], state="stopped", up_to=1)
    told = error(path, capsys, code=1)
    assert "12 of 12 runs are not complete" in told and "and 2 more" in told
    assert f"{runs[0].name}: failed at step {runs[0].steps // 2} of {runs[0].steps}: out of memory" in told
    assert f"{runs[2].name}: not begun" in told
    assert f"python -m tools.scaling run {path}" in told and "--partial" in told
    assert "none of its 12 runs is complete" in error(path, capsys, "--partial")
    for run in runs[2:]:
        write_run(study, run)
    assert main(["collect", str(path), "--partial"]) == 0
    table = read_table(study.runs_csv)
    assert set(final_runs(table)["run"]) == {run.name for run in runs[2:]}, "an unfinished run has no last row"
    assert set(json.loads(study.runs_csv.with_name("collected.json").read_text())["left_out"]) == {runs[0].name, runs[1].name}


def test_a_diverged_run_is_left_out_of_a_partial_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, study, runs = small(tmp_path)
    metrics = Path(study.directory) / runs[0].name / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + json.dumps({"step": runs[0].steps, "valid_loss": math.nan}) + "\n")
    assert f"{runs[0].name}: valid_loss = nan at step {runs[0].steps}: the run diverged" in error(path, capsys)
    write_progress(metrics.parent, "failed", 3, runs[0].steps)
    assert main(["collect", str(path), "--partial"]) == 0
    table = read_table(study.runs_csv)
    assert runs[0].name not in set(final_runs(table)["run"])
    assert table["loss"].notna().all()


def test_a_run_without_validation_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, study, runs = small(tmp_path)
    metrics = Path(study.directory) / runs[2].name / "metrics.jsonl"
    metrics.write_text("".join(line + "\n" for line in metrics.read_text().splitlines() if "valid_loss" not in line))
    assert f"{runs[2].name}: it has no validation at its last step, {runs[2].steps}" in error(path, capsys)


def test_a_run_that_the_study_does_not_plan_now_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, study, runs = small(tmp_path)
    write_run(study, runs[1], words=("optimizer.weight_decay=0.3",))
    assert f"{runs[1].name}: it was trained with optimizer.weight_decay = 0.3, and {path} plans 0.1 now" in error(path, capsys)
    # What changes nothing of what is learnt may differ.
    write_run(study, runs[1], words=("log.interval=3", "train.micro_batch_size=2", "checkpoint.interval=7", "train.recompute=full"))
    assert main(["collect", str(path)]) == 0


def test_runs_of_other_data_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, study, runs = small(tmp_path)
    for change, told in (({"tokens": 950}, "data of contents"), ({"tokenizer": "two"}, "tokenizers of sha256")):
        other = write_folder(tmp_path / f"other_{told[:4]}", **change)
        words = (f"data.train.0.prefix={other / 'train'}", f"data.valid.0.prefix={other / 'valid'}")
        write_run(study, runs[2], words=words)
        message = error(path, capsys)
        assert f"runs {runs[0].name} and {runs[2].name} cannot be compared, they read {told}" in message


def test_a_checkpoint_tells_what_data_it_was_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, study, runs = small(tmp_path)
    folder = Path(study.directory) / runs[0].name
    step = folder / "checkpoints" / "step_00000010"
    step.mkdir(parents=True)
    (step.parent / "latest").write_text(step.name + "\n")
    config = load_run(folder / "config.yaml")
    (step / "manifest.json").write_text(json.dumps({"data": check_contents(check_data(config)).key}))
    assert main(["collect", str(path)]) == 0
    before = set(read_table(study.runs_csv)["data"])
    write_folder(tmp_path / "data", tokens=950)
    assert main(["collect", str(path)]) == 2
    assert f"{folder}: it was trained on other data" in capsys.readouterr().err
    for file in (tmp_path / "data").glob("*.*"):
        file.unlink()
    assert len(before) == 1


def test_two_runs_of_one_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A variant that differs in what changes nothing is the same run again."""
    again = "  again: [model.mixer=transformer, log.interval=3]\n"
    path = write_study(tmp_path, text=STUDY.replace("  cem: [model.mixer=cem, optimizer.lr=2e-3]\n", again).replace(", 1.0e10", ""))
    _, runs = write_all(path)
    assert f"runs {runs[0].name} and {runs[1].name} have the same configuration" in error(path, capsys)


def exported(study: Study, run: PlannedRun, interval: int = 10) -> dict[str, object]:
    """The export's line of a run, from what the logger hands to Weights & Biases: config, scalars every so many steps, validations."""
    folder = Path(study.directory) / run.name
    history: dict[int, dict[str, object]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "valid_loss" in line:
            history.setdefault(line["step"], {})["valid_loss"] = line["valid_loss"]
        elif line["step"] % interval == 0:
            whole: dict[str, Any] = {"grad_norm": 1.0, "tokens_per_second": 1.0, "tflops_per_device": 1.0, "mfu": None}
            history.setdefault(line["step"], {}).update(_scalars(StepRecord(**line, **whole, peak_memory_bytes=1, eta_seconds=1.0)))
    config = {**plain(load_run(folder / "config.yaml")), "_wandb": {"runtime": 3}}
    return {"name": run.name, "config": config, "history": [{"_step": step, **row} for step, row in history.items()]}


def test_from_weights_and_biases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same table as from the directories, but for the training losses and seconds, of which the logger writes every tenth."""
    path, study, runs = small(tmp_path)
    assert main(["collect", str(path)]) == 0
    ours = read_table(study.runs_csv)
    export = tmp_path / "export.jsonl"
    lines = [exported(study, run) for run in runs]
    export.write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path(study.directory, "results", "runs.csv").unlink()
    Path(study.directory).rename(tmp_path / "elsewhere")
    assert main(["collect", str(path), "--wandb", str(export)]) == 0
    theirs = read_table(study.runs_csv)
    same = [column for column in ours.columns if column not in ("train_loss", "wall_seconds", "source")]
    assert theirs[same].equals(ours[same])
    assert set(theirs["source"]) == {"wandb"}
    # Every step took half a second; steps after the last logged one, nine at most, are not there.
    assert final_runs(theirs)["wall_seconds"].tolist() == pytest.approx(final_runs(ours)["wall_seconds"].tolist(), abs=5.0)
    study.runs_csv.unlink()
    capsys.readouterr()
    for change, told in (
        (lambda line: line.pop("history"), "line 2: history is missing"),
        (lambda line: line["config"].update(model=None), "line 2: run"),
        (lambda line: line["config"]["model"].update(vocab_size=None), "model.vocab_size is missing"),
        (lambda line: line["history"].append({"loss": 1.0}), "_step is missing"),
        (lambda line: [row.pop("valid_loss", None) for row in line["history"]], "no row has valid_loss"),
        (lambda line: line["history"][-1].update(valid_loss="NaN"), "the run diverged"),
    ):
        broken = json.loads(json.dumps(lines[1]))
        change(broken)
        export.write_text(f"{json.dumps(lines[0])}\n{json.dumps(broken)}\n{json.dumps(lines[2])}\n")
        assert main(["collect", str(path), "--wandb", str(export)]) == 2
        message = capsys.readouterr().err
        assert told in message and str(export) in message and message.count("\n") == 1
        assert not study.runs_csv.exists()


def train(study: Study, run: PlannedRun) -> Path:
    """Train a run of the study by ``python -m pretrain`` in this process; its directory."""
    folder = Path(study.directory) / run.name
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    assert pretrain([study.base, *run.settings, f"name={run.name}", f"run_dir={folder}"]) == 0
    return folder


def test_real_runs(tmp_path: Path) -> None:
    """Runs of pretrain, one of them killed after its first checkpoint and started again: the table has their own numbers."""
    text = STUDY.replace("  cem: [model.mixer=cem, optimizer.lr=2e-3]\n", "").replace("budgets: [3.0e9, 1.0e10]", "tokens: [1600]")
    path = write_study(tmp_path, text=text.replace("sizes: [16, 32, 48]", "sizes: [16]"))
    with (tmp_path / "base.yaml").open("a") as base:
        base.write("checkpoint: {interval: 10}\n")
    study, runs = planned(path)
    folders = [train(study, run) for run in runs]
    first, *later = sorted((folders[0] / "checkpoints").glob("step_*"))
    for newer in later:
        newer.rename(tmp_path / newer.name)
    (first.parent / "latest").write_text(first.name + "\n")
    train(study, runs[0])
    assert main(["collect", str(path)]) == 0
    final = final_runs(read_table(study.runs_csv)).set_index("run")
    for run, folder in zip(runs, folders, strict=True):
        row, lines = final.loc[run.name], [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        last = {line["step"]: line for line in lines if "loss" in line}
        assert row["tokens"] == last[run.steps]["consumed_tokens"] == run.tokens
        assert row["loss"] == [line["valid_loss"] for line in lines if "valid_loss" in line][-1]
        assert row["flops"] == run.tokens * flops_per_token(load_run(folder / "config.yaml"))
        assert row["wall_seconds"] == pytest.approx(sum(line["step_seconds"] for line in last.values()), rel=1e-12)  # order of a sum
    steps = [line for line in (folders[0] / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(steps) > runs[0].steps, "steps are there twice"
