"""What one run left behind, wherever it was logged: its configuration, its steps and its validations. From a run directory, or an export
of Weights & Biases; and the rows of the table that follow. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError, told
from pretrain.config import RunConfig
from pretrain.loader import load_run, load_values
from pretrain.plan import count_by_component, flops_per_token
from pretrain.progress_file import read_progress
from pretrain.schedule import Schedule
from tools.demo.history import History

from .identity import DataIdentity, config_hash
from .planning import PlannedRun

RUN_DIRECTORY, WANDB = "run_dir", "wandb"
EMBEDDING = ("embedding", "output layer")  # components of pretrain.plan
EXPORTED_KEYS = ("_step", "loss", "step_seconds", "valid_loss")


@dataclass(frozen=True)
class Step:
    """A training step that was logged; ``seconds`` stand for all steps since the one logged before."""

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Record:
    """A run as it was logged: steps and validations in order, each step once. ``place`` is for messages.

    ``unfinished`` says in words why the run is not complete; empty where it is.
    """

    place: str
    source: str
    config: RunConfig
    steps: tuple[Step, ...]
    validations: tuple[tuple[int, float], ...]
    unfinished: str
    directory: Path | None = None

    def check(self) -> None:
        """Raises ConfigError where a complete run has no loss, or a loss that is no number."""
        last = Schedule.of(self.config).steps
        if not self.validations or (not self.unfinished and self.validations[-1][0] != last):
            raise ConfigError(
                f"{self.place}: it has no validation at its last step, {last}; give it data.valid and run it again, or leave it out "
                "of the study"
            )
        for step, loss in self.validations:
            if not math.isfinite(loss):
                raise ConfigError(
                    f"{self.place}: valid_loss = {loss} at step {step}: the run diverged; lower its learning rate and run it again, or "
                    "leave it out of the study"
                )


def read_directory(folder: Path) -> Record | None:
    """The run in a directory; None where none was started there.

    Raises:
        ConfigError: its configuration is not one that this code knows.
        StorageError: a file system failed.
    """
    if not (folder / "config.yaml").is_file():
        return None
    config = load_run(folder / "config.yaml")
    try:
        history = History.read(folder)
    except OSError as error:
        raise told(error) from None
    steps = tuple(Step(entry["step"], entry["loss"], entry["step_seconds"]) for entry in history.steps)
    return Record(str(folder), RUN_DIRECTORY, config, steps, history.validations, _unfinished(folder, config), folder)


def _unfinished(folder: Path, config: RunConfig) -> str:
    progress, steps = read_progress(folder), Schedule.of(config).steps
    if progress is None:
        return "not begun: no progress.json"
    state, step = progress["state"], progress["step"]
    if state == "complete" and step >= steps:
        return ""
    if state == "failed":
        return f"failed at step {step} of {steps}: {progress.get('message')}"
    if state == "stopped":
        return f"stopped by {progress.get('signal')} at step {step} of {steps}"
    return f"{state} at step {step} of {steps}, or ended without a word"


def read_export(path: Path) -> dict[str, Record]:
    """Name of the run -> record, of a JSON-lines export: a line a run, {"name", "config", "history"} as docs/scaling.md makes it.

    The logger writes every ``log.interval`` steps, so training losses and seconds are means over the steps that it wrote.

    Raises:
        ConfigError: a line is no such object, lacks a key, or a run is there twice.
        StorageError: a file system failed.
    """
    records: dict[str, Record] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise told(error) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8; docs/scaling.md shows how the export is made") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            record = _exported(f"{path}: line {number}", line)
            if record.config.name in records:
                raise ConfigError(f"{record.place}: the run is there twice, see {records[record.config.name].place}; keep one of the lines")
            records[record.config.name] = record
    return records


def _exported(where: str, line: str) -> Record:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON ({error}); docs/scaling.md shows how the export is made") from None
    for key, kind in (("name", str), ("config", dict), ("history", list)):
        if not isinstance(raw, dict) or not isinstance(raw.get(key), kind):
            raise ConfigError(f"{where}: {key} is missing; docs/scaling.md shows how the export is made")
    place = f"{where}: run {raw['name']}"
    values = {key: value for key, value in raw["config"].items() if not key.startswith("_")}
    try:
        config = load_values(values, Path("config"))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    if config.model.vocab_size is None or not values.get("name"):
        absent = "name" if not values.get("name") else "model.vocab_size"
        raise ConfigError(f"{place}: config: {absent} is missing: it is not the configuration that pretrain logs")
    rows = sorted(_rows(place, raw["history"]), key=lambda row: int(row["_step"]))
    absent_keys = [key for key in EXPORTED_KEYS if not any(key in row for row in rows)]
    if absent_keys:
        raise ConfigError(f"{place}: history: no row has {', '.join(absent_keys)}; export the rows with {', '.join(EXPORTED_KEYS)}")
    steps, before = [], 0
    for row in rows:
        if "loss" in row and "step_seconds" in row:
            steps.append(Step(row["_step"], row["loss"], row["step_seconds"] * (row["_step"] - before)))
            before = row["_step"]
    validations = tuple({row["_step"]: row["valid_loss"] for row in rows if "valid_loss" in row}.items())
    last, wanted = (validations[-1][0] if validations else 0), Schedule.of(config).steps
    unfinished = "" if last == wanted else f"its last validation is of step {last} of {wanted}"
    return Record(place, WANDB, config, tuple(steps), validations, unfinished)


def _rows(place: str, history: list[Any]) -> Iterator[dict[str, Any]]:
    """The rows' numbers: Weights & Biases writes what is not finite as text, and null where a row has no such value."""
    for number, row in enumerate(history):
        if not isinstance(row, dict) or "_step" not in row:
            raise ConfigError(f"{place}: history.{number}: _step is missing; export the rows with {', '.join(EXPORTED_KEYS)}")
        try:
            numbers = {key: float(row[key]) for key in EXPORTED_KEYS if row.get(key) is not None}
        except (TypeError, ValueError):
            raise ConfigError(f"{place}: history.{number}: {', '.join(EXPORTED_KEYS)} are not all numbers") from None
        yield {**numbers, "_step": int(numbers["_step"])}


def table_rows(record: Record, planned: PlannedRun, data: DataIdentity) -> list[dict[str, object]]:
    """The table's rows of a run, one a validation; the last of a complete run is final. Rows that have no finite loss are left out."""
    config, schedule = record.config, Schedule.of(record.config)
    counts, per_token = count_by_component(config.model), flops_per_token(config)
    same: dict[str, object] = {
        "run": planned.name,
        "variant": planned.variant,
        "seed": config.train.seed,
        "budget": planned.budget,
        "width": config.model.hidden_size,
        "layers": config.model.num_layers,
        "heads": config.model.num_attention_heads,
        "parametrization": config.model.parametrization,
        "parameters": sum(counts.values()),
        "non_embedding_parameters": sum(count for name, count in counts.items() if name not in EMBEDDING),
        "flops_per_token": per_token,
        "batch_tokens": schedule.step_tokens,
        "learning_rate": config.optimizer.lr,
        "steps": schedule.steps,
        "data": data.key,
        "tokenizer": data.tokenizer[:16],
        "config_hash": config_hash(config, data),
        "source": record.source,
    }
    rows, before = [], 0
    for step, loss in record.validations:
        if not math.isfinite(loss):
            continue
        tokens = step * schedule.step_tokens
        losses = [entry.loss for entry in record.steps if before < entry.step <= step and math.isfinite(entry.loss)]
        seconds = sum(entry.seconds for entry in record.steps if entry.step <= step)
        of_this = {"step": step, "tokens": tokens, "flops": tokens * per_token, "loss": loss, "wall_seconds": seconds}
        mean = sum(losses) / len(losses) if losses else math.nan
        rows.append({**same, **of_this, "train_loss": mean, "final": not record.unfinished and step == schedule.steps})
        before = step
    return rows
