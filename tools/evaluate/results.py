"""Result files: FOLDER/MODEL/NAME.json, one a model and column, and whether one that is there answers what is asked now. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.store.files import write_whole
from fem_common.errors import ConfigError, files_told

from .suite import SuiteTask

FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """All besides the model that decides a score. limit: examples a task; seed, max_length: None: the defaults; dtype: None: as stored."""

    limit: int | None
    seed: int | None
    dtype: str | None
    max_length: int | None
    harness: str

    def of(self, column: SuiteTask, digest: str | None) -> dict[str, Any]:
        """As a result says it. digest: of the harness's task, or of the tokens that a held-out loss is of."""
        if column.kind == "heldout":
            windows = {"context_lengths": list(column.context_lengths), "stride": column.stride, "max_tokens": column.max_tokens}
            return {"kind": "heldout", "dtype": self.dtype, "data": column.data, "data_digest": digest, **windows}
        general = {"limit": self.limit, "seed": self.seed, "dtype": self.dtype, "max_length": self.max_length, "lm_eval": self.harness}
        return {"task": column.task, "fewshot": column.fewshot, "task_digest": digest, **general}


def result_file(out: Path, model: str, column: SuiteTask) -> Path:
    """Where a model's result in a column is."""
    return out / model / f"{column.name}.json"


def fitting(out: Path, model: str, key: str, column: SuiteTask, settings: dict[str, Any]) -> str | None:
    """What is wrong with the result that is there; "" where nothing is, None where there is none."""
    file = result_file(out, model, column)
    with files_told():
        try:
            there = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            return f"{file} is not JSON"
    if not isinstance(there, dict) or there.get("format") != FORMAT or not isinstance(there.get("settings"), dict):
        return f"{file} is not a result of this version"
    if there.get("model_key") != key:
        return f"{file} is of other weights than {model} has now"
    made = there["settings"]
    # What the tokens are says more than where they lie; where they are not here, their place has to do.
    passed = "data" if made.get("data_digest") and settings.get("data_digest") else "data_digest"
    differing = [name for name in {**settings, **made} if name != passed and settings.get(name) != made.get(name)]
    if differing:
        name = differing[0]
        return f"{file} was made with {name} {shown(made.get(name))}, now it is {shown(settings.get(name))}"
    if there.get("metric") != column.metric:
        return f"{file} is {there.get('metric')}, the suite now wants {column.metric}"
    return ""


def shown(value: Any) -> str:
    """A setting for a sentence."""
    return "not given" if value is None else str(value)


def refuse_unfitting(complaints: list[str]) -> None:
    """Raises ConfigError where results are there that answer another question."""
    if complaints:
        more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
        raise ConfigError(f"{complaints[0]}{more}: --retry asks again and replaces, --out names another folder, NAME=MODEL another name")


def write(out: Path, model: str, column: SuiteTask, content: dict[str, Any]) -> None:
    """Writes a result, whole or not at all."""
    file = result_file(out, model, column)
    with files_told():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def harness_result(column: SuiteTask, asked: Any) -> dict[str, Any]:
    """A column's numbers from those of its task (an ``Asked``), without the model's names.

    Raises:
        ConfigError: the task has not given this metric.
    """
    metric = column.metric if "," in column.metric else f"{column.metric},none"
    scores = asked.scores[column.task]
    if metric not in scores:
        given = sorted(key.removesuffix(",none") for key in scores if "_stderr," not in key)
        raise ConfigError(f"{column.task} gave no {column.metric}; it gave {', '.join(given)}")
    error = metric.replace(",", "_stderr,", 1)
    parts = {name: count for name, count in asked.counts.items() if name != column.task}
    chances = {name: column.subtask_chance.get(name, asked.chance.get(name) if column.chance is None else column.chance) for name in parts}
    total = sum(asked.counts.values())
    return {
        "format": FORMAT,
        "task": column.name,
        "label": column.label,
        "metric": column.metric,
        "value": scores[metric],
        "stderr": scores.get(error),
        "higher_is_better": column.higher_is_better,
        "raw": scores,
        "chance": column.chance if column.chance is not None else _weighted(chances, parts) if parts else asked.chance.get(column.task),
        "subtasks": {
            name: {
                "value": asked.scores[name][metric],
                "stderr": asked.scores[name].get(error),
                "n": count,
                "chance": chances[name],
            }
            for name, count in parts.items()
        },
        "n": total,
        "fewshot": asked.fewshot,
        "version": asked.version,
        "truncated": asked.truncated,
        "requests": asked.requests,
    }


def _weighted(chances: dict[str, float | None], counts: dict[str, int]) -> float | None:
    """What guessing scores in a group whose parts weigh by their sizes."""
    known = [(chance, counts[name]) for name, chance in chances.items() if chance is not None]
    if len(known) < len(chances):
        return None
    return sum(chance * count for chance, count in known) / sum(count for _, count in known)
