"""The result files of an evaluation, read and checked: FOLDER/MODEL/NAME.json, one a model and column. Computes nothing.

What would put a wrong number into a table ends here in one line: a file that is not a result, NaN, two sets of weights under one name, and
models that were not asked the same (other examples, few-shot count, metric, or version of the task). Held-out loss alone may be of each
model's own text: the table tells.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fem_common.errors import UserError, files_told

from .normalise import Score
from .perplexity import METRIC as HELDOUT

FORMAT = 1
TEXTS = ("model", "model_key", "task", "label", "metric", "version")


class ScoreError(UserError, ValueError):
    """Results that cannot stand in one table, told in one line: which file, what is wrong."""


@dataclass(frozen=True)
class Result:
    """What one file says. name: the file's, which is the column's; score: a share of 1, or nats a token where lower is better.

    settings: what the evaluation was told, as it wrote it; cut: prompts that lost their beginning since they were too long.
    """

    file: Path
    name: str
    model: str
    model_key: str
    task: str
    label: str
    metric: str
    version: str
    fewshot: int | None
    higher_is_better: bool
    score: Score
    subtasks: dict[str, Score]
    raw: dict[str, Any]
    settings: dict[str, Any]
    cut: int


def read(folders: Sequence[Path]) -> list[Result]:
    """All results under the folders, in their order, then by model and name; the same result found twice is taken once.

    Raises:
        ScoreError: a file is not a result, or the results do not belong into one table.
        ConfigError, StorageError: a folder cannot be read.
    """
    found: dict[tuple[str, str], Result] = {}
    for folder in folders:
        with files_told():
            if not folder.is_dir():
                raise FileNotFoundError(2, "no such folder of results", str(folder))
            files = sorted(
                file for file in folder.glob("*/*.json") if not file.name.startswith(".") and not file.parent.name.startswith(".")
            )
        for file in files:
            result = read_one(file)
            other = found.setdefault((result.model, result.name), result)
            same = (other.model_key, other.score, other.subtasks) == (result.model_key, result.score, result.subtasks)
            if not same and other.model_key == result.model_key:
                raise ScoreError(f"{other.file} and {file} give other numbers for the same model and task: keep one of them")
            _one_model(other, result)
    results = list(found.values())
    check(results)
    return results


def read_one(file: Path) -> Result:
    """One result file.

    Raises:
        ScoreError: it is not a result of this format, or a number in it is not one.
    """
    with files_told():
        text = file.read_text(encoding="utf-8")
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ScoreError(f"{file}: not JSON ({error}): delete it and evaluate again") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        told = raw.get("format") if isinstance(raw, dict) else None
        raise ScoreError(f"{file}: not a result of an evaluation, or of another version of it (format {told!r}, expected {FORMAT})")
    missing = [key for key in (*TEXTS, "value", "stderr", "n", "fewshot", "chance") if key not in raw]
    if missing:
        raise ScoreError(f"{file}: has no {missing[0]!r}: evaluate again")
    for key in TEXTS:
        if not isinstance(raw[key], str) or not raw[key]:
            raise ScoreError(f"{file}: {key} = {raw[key]!r}: expected a text")
    subtasks = raw.get("subtasks") or {}
    if not isinstance(subtasks, dict) or not all(isinstance(part, dict) and "value" in part for part in subtasks.values()):
        raise ScoreError(f"{file}: subtasks: expected a mapping of names to scores")
    for key in ("raw", "settings"):
        if not isinstance(raw.get(key) or {}, dict):
            raise ScoreError(f"{file}: {key}: expected a mapping")
    higher = raw.get("higher_is_better", True)
    texts: dict[str, Any] = {key: raw[key] for key in TEXTS}
    return Result(
        file=file,
        name=file.stem,
        fewshot=_count(raw["fewshot"], file, "fewshot"),
        higher_is_better=bool(higher),
        score=_score(raw, file, "", bool(higher)),
        subtasks={name: _score(part, file, f"subtasks.{name}.", bool(higher)) for name, part in subtasks.items()},
        raw=raw.get("raw") or {},
        settings=raw.get("settings") or {},
        cut=_count(raw.get("truncated"), file, "truncated") or 0,
        **texts,
    )


def check(results: Iterable[Result]) -> None:
    """Raises ScoreError where a name stands for two models, or models were asked unlike things in one column."""
    models: dict[str, Result] = {}
    columns: dict[str, Result] = {}
    for result in results:
        _one_model(models.setdefault(result.model, result), result)
        first = columns.setdefault(result.name, result)
        for what, ours, theirs in _conditions(result, first):
            if ours != theirs:
                raise ScoreError(
                    f"{result.name}: {what} is {ours} for {result.model} ({result.file}), but {theirs} for {first.model} ({first.file}): "
                    "evaluate both alike"
                )


def _one_model(first: Result, result: Result) -> None:
    if first.model_key != result.model_key:
        raise ScoreError(
            f"{first.file} and {result.file} are of different weights, but both of a model called {result.model}: give one another name"
        )


def _conditions(ours: Result, theirs: Result) -> list[tuple[str, Any, Any]]:
    """(what, here, there) of all that must be alike."""
    named = [(what, getattr(ours, what), getattr(theirs, what)) for what in ("metric", "fewshot", "version", "higher_is_better")]
    if ours.metric == HELDOUT:
        return named
    told = [(what, ours.settings.get(what), theirs.settings.get(what)) for what in ("task", "task_digest", "limit", "seed")]
    numbers = [("the number of examples", ours.score.n, theirs.score.n), ("what guessing scores", ours.score.chance, theirs.score.chance)]
    return [*named, *told, *numbers]


def _score(raw: dict[str, Any], file: Path, place: str, share: bool) -> Score:
    """The numbers of a task or sub-task. share: it lies in 0 .. 1."""
    value, stderr, chance = (_number(raw.get(key), file, place + key) for key in ("value", "stderr", "chance"))
    if value is None:
        raise ScoreError(f"{file}: {place}value is null: a result has a number")
    if share and not 0.0 <= value <= 1.0:
        raise ScoreError(f"{file}: {place}value = {value:g}: expected a share of right answers in 0 .. 1")
    if stderr is not None and stderr < 0.0:
        raise ScoreError(f"{file}: {place}stderr = {stderr:g}: expected none below 0")
    if chance is not None and not 0.0 <= chance < 1.0:
        raise ScoreError(f"{file}: {place}chance = {chance:g}: expected a share in [0, 1)")
    return Score(value, stderr, _count(raw.get("n"), file, f"{place}n"), chance)


def _number(value: Any, file: Path, what: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ScoreError(f"{file}: {what} = {value!r}: expected a finite number")
    return float(value)


def _count(value: Any, file: Path, what: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ScoreError(f"{file}: {what} = {value!r}: expected a whole number")
    return value
