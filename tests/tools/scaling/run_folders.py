"""A study and its run directories as pretrain leaves them, made by hand in milliseconds; losses by a law that the test knows."""

from __future__ import annotations

import json
from pathlib import Path

from fem_common.config import dump_yaml
from pretrain.config import RunConfig, load_run
from pretrain.plan.run_plan import count_by_component
from pretrain.run_directory import resolved
from pretrain.validate import prepare
from tests.pretrain.data_folder import write_folder
from tools.scaling.planning import PlannedRun, plan_study
from tools.scaling.study import Study, load_study

BASE = """
model: {mixer: transformer, vocab_size: null, make_vocab_size_divisible_by: 8}
data:
  train: [{prefix: DATA/train}]
  valid: [{prefix: DATA/valid}]
  seq_length: 16
train: {steps: 100, global_batch_size: 4, precision: fp32, eval_batches: 2}
optimizer: {lr: 1.0e-3, min_lr: 1.0e-4}
"""
STUDY = """
name: hand
base: base.yaml
directory: FOLDER/runs
variants:
  transformer: [model.mixer=transformer]
  cem: [model.mixer=cem, optimizer.lr=2e-3]
shape: {head_size: 8, aspect_ratio: 16, ffn_multiple: 8}
sizes: [16, 32, 48]
budgets: [3.0e9, 1.0e10]
max_epochs: 100000
min_steps: 10
"""


def loss_of(variant: str, parameters: float, tokens: float) -> float:
    """The law of the made-up runs: nats a token."""
    return 1.7 + {"transformer": 40.0, "cem": 36.0}.get(variant, 44.0) / parameters**0.35 + 30.0 / tokens**0.31


def write_study(folder: Path, text: str = STUDY, **replaced: str) -> Path:
    """The study's file, its base run and its data in ``folder``; ``replaced``: words of the text and what stands in their place."""
    if not (folder / "data").exists():
        write_folder(folder / "data")
    (folder / "base.yaml").write_text(BASE.replace("DATA", str(folder / "data")))
    for word, other in replaced.items():
        assert word in text
        text = text.replace(word, other)
    (folder / "study.yaml").write_text(text.replace("FOLDER", str(folder)))
    return folder / "study.yaml"


def planned(path: Path) -> tuple[Study, list[PlannedRun]]:
    study = load_study(path)
    return study, plan_study(study)


def write_run(study: Study, run: PlannedRun, *, up_to: int | None = None, state: str = "complete", words: tuple[str, ...] = ()) -> Path:
    """The directory of a run that trained ``up_to`` a step; ``words`` are settings that the study does not know of."""
    folder = Path(study.directory) / run.name
    folder.mkdir(parents=True, exist_ok=True)
    config = load_run(study.base, (*run.settings, *words, f"name={run.name}", f"run_dir={folder}"))
    config = resolved(prepare(config, 1).config)
    (folder / "config.yaml").write_text(dump_yaml(config))
    steps = run.steps if up_to is None else up_to
    lines = [line for step in range(1, steps + 1) for line in lines_of(config, run, step)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_progress(folder, state, steps, run.steps)
    return folder


def write_progress(folder: Path, state: str, step: int, steps: int) -> None:
    told = {"format": 1, "state": state, "step": step, "steps": steps, "signal": None, "message": "out of memory"}
    (folder / "progress.json").write_text(json.dumps(told))


def lines_of(config: RunConfig, run: PlannedRun, step: int) -> list[dict[str, object]]:
    """What metrics.jsonl has of a step."""
    tokens = step * run.batch_tokens
    parameters = sum(count_by_component(config.model).values())
    held = loss_of(run.variant, parameters, tokens)
    lines: list[dict[str, object]] = [
        {"step": step, "consumed_tokens": tokens, "loss": held - 0.01, "lr": 1e-3, "skipped": False, "step_seconds": 0.5}
    ]
    if step % config.train.eval_interval == 0 or step == run.steps:
        lines.append({"step": step, "valid_loss": held})
    return lines


def write_all(path: Path) -> tuple[Study, list[PlannedRun]]:
    """All runs of the study, complete."""
    study, runs = planned(path)
    for run in runs:
        write_run(study, run)
    return study, runs
