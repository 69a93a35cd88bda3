"""Write, read and check result files, FOLDER/MODEL/NAME.json, one per model and column, and rescale
scores like the Open LLM Leaderboard.

Each condition that would put a wrong number into a table raises an error of one line: a file that
is not a result, NaN, two sets of weights with one name, and models with different examples,
few-shot count, metric or task version in one column. Only held-out loss may use a different text
for each model; the table reports it.

Rescaled scores follow the leaderboard's page "Scores Normalization"
(https://huggingface.co/docs/leaderboards/open_llm_leaderboard/normalization): 0 for guessing, 100
for a perfect score. The scores of guessing are 1 / number of choices and are stored with the
scores: MMLU-Pro 0.1 (though a sixth of its questions have fewer than ten choices), GPQA 0.25, BBH
and MuSR one value per sub-task, MATH and IFEval 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fem_common.config import build
from fem_common.errors import ConfigError, UserError, convert_os_errors
from fem_common.files import write_atomically
from fem_common.settings import setting

from .perplexity import METRIC as HELDOUT
from .suite import SuiteTask


@dataclass(frozen=True)
class Score:
    """A measured score. n: number of examples. stderr, n and chance (score of guessing) are None if
    unknown.
    """

    value: float
    stderr: float | None = setting(None, "", least=0)
    n: int | None = setting(None, "", least=0)
    chance: float | None = setting(None, "", least=0, below=1)


def rescale(score: Score) -> Score:
    """Convert a score on the scale 0 to 1 to the leaderboard's: 0 for guessing, 100 for perfect.

    Scores below guessing become 0. Their standard error is scaled linearly like all others, because
    they are not known more precisely.

    Raises:
        ValueError: the score of guessing is unknown.
    """
    if score.chance is None:
        raise ValueError("the score of guessing is not known")
    stretch = 100.0 / (1.0 - score.chance)
    stderr = None if score.stderr is None else stretch * score.stderr
    return Score(max(0.0, stretch * (score.value - score.chance)), stderr, score.n, 0.0)


def mean(scores: Sequence[Score]) -> Score:
    """Return the unweighted mean of the scores.

    Its standard error assumes that the measurements are independent. Standard error and number of
    examples are None if one of them is unknown.
    """
    errors = [score.stderr for score in scores if score.stderr is not None]
    known = len(errors) == len(scores)
    counts = [score.n for score in scores if score.n is not None]
    return Score(
        math.fsum(score.value for score in scores) / len(scores),
        math.hypot(*errors) / len(scores) if known else None,
        sum(counts) if len(counts) == len(scores) else None,
        0.0 if all(score.chance == 0.0 for score in scores) else None,
    )


def leaderboard(score: Score, subtasks: Sequence[Score]) -> Score:
    """Return the score of a task as the leaderboard shows it, 0 to 100.

    subtasks: scores of its sub-tasks. If their scores of guessing differ (BBH, MuSR), each is
    rescaled, and the result is the unweighted mean. If they are equal (GPQA's three sets, the
    chapters of MATH), the score of the entire task is rescaled.

    Raises:
        ValueError: the score of guessing is unknown.
    """
    if len({None if part.chance is None else round(part.chance, 9) for part in subtasks}) > 1:
        return mean([rescale(part) for part in subtasks])
    return rescale(score)


FORMAT = 1
BITS = "bits_per_byte"  # metric of gold answers in ``raw`` of a result


@dataclass(frozen=True)
class Settings:
    """Settings of the command line that affect a score.

    limit: examples per task. limit, seed and max_length are None for the default, dtype for the
    stored dtype. harness: version of the harness.
    """

    limit: int | None
    seed: int | None
    dtype: str | None
    max_length: int | None
    harness: str

    def of(self, column: SuiteTask, digest: str | None) -> dict[str, Any]:
        """Return the settings of one column as a result file records them.

        digest: hash of the definition of the harness task, or of the tokens of a held-out loss.
        """
        if column.kind == "heldout":
            wanted = {
                "kind": "heldout",
                "dtype": self.dtype,
                "data": column.data,
                "data_digest": digest,
                "context_lengths": list(column.context_lengths),
                "stride": column.stride,
                "max_tokens": column.max_tokens,
            }
            # Results without this entry are of the first tokens of the data.
            return {**wanted, "sample": "spread"} if column.max_tokens else wanted
        return {
            "task": column.task,
            "fewshot": column.fewshot,
            "task_digest": digest,
            "limit": self.limit,
            "seed": self.seed,
            "dtype": self.dtype,
            "max_length": self.max_length,
            "lm_eval": self.harness,
        }


def result_file(out: Path, model: str, column: SuiteTask) -> Path:
    """Return the path of a model's result in a column."""
    return out / model / f"{column.name}.json"


def fitting(
    out: Path, model: str, key: str, column: SuiteTask, settings: dict[str, Any]
) -> str | None:
    """Return why an existing result file cannot be used for this evaluation.

    Returns:
        A message; "" if the result can be used; None if the file does not exist.
    """
    file = result_file(out, model, column)
    with convert_os_errors():
        try:
            there = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            return f"{file} is not JSON"
    if (
        not isinstance(there, dict)
        or there.get("format") != FORMAT
        or not isinstance(there.get("settings"), dict)
    ):
        return f"{file} is not a result of this version"
    if there.get("model_key") != key:
        return f"{file} belongs to other weights than {model} has now"
    made = there["settings"]
    # If both have a digest of the tokens, the path of the data is not compared; else the digest is
    # not.
    passed = "data" if made.get("data_digest") and settings.get("data_digest") else "data_digest"
    differing = [
        name
        for name in {**settings, **made}
        if name != passed and settings.get(name) != made.get(name)
    ]
    if differing:
        name = differing[0]
        return (
            f"{file} was created with {name} {shown(made.get(name))}, now it is"
            f" {shown(settings.get(name))}"
        )
    if there.get("metric") != column.metric:
        return f"{file} contains {there.get('metric')}, but the suite now requires {column.metric}"
    return ""


def shown(value: Any) -> str:
    """Return the value of a setting as text for a message; None becomes "not given"."""
    return "not given" if value is None else str(value)


def write(out: Path, model: str, column: SuiteTask, content: dict[str, Any]) -> None:
    """Write the content of a result file atomically."""
    file = result_file(out, model, column)
    with convert_os_errors():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def harness_result(column: SuiteTask, requested: Any) -> dict[str, Any]:
    """Return the content of a result file for one column, except the names of the model.

    The scores are those of the column's task, as returned by ``harness.ask``.

    Raises:
        ConfigError: the task does not have the metric of the column.
    """
    metric = column.metric if "," in column.metric else f"{column.metric},none"
    scores = requested.scores[column.task]
    if metric not in scores:
        given = sorted(key.removesuffix(",none") for key in scores if "_stderr," not in key)
        raise ConfigError(f"{column.task} gave no {column.metric}; it gave {', '.join(given)}")
    error = metric.replace(",", "_stderr,", 1)
    parts = {name: count for name, count in requested.counts.items() if name != column.task}
    chances = {}
    for name in parts:
        default = requested.chance.get(name) if column.chance is None else column.chance
        chances[name] = column.subtask_chance.get(name, default)
    chance = column.chance
    if chance is None and parts:
        chance = _weighted(chances, parts)
    elif chance is None:
        chance = requested.chance.get(column.task)
    total = sum(requested.counts.values())
    return {
        "format": FORMAT,
        "task": column.name,
        "label": column.label,
        "metric": column.metric,
        "value": scores[metric],
        "stderr": scores.get(error),
        "higher_is_better": column.higher_is_better,
        "raw": scores,
        "chance": chance,
        "subtasks": {
            name: {
                "value": requested.scores[name][metric],
                "stderr": requested.scores[name].get(error),
                "n": count,
                "chance": chances[name],
            }
            for name, count in parts.items()
        },
        "n": total,
        "fewshot": requested.fewshot,
        "version": requested.version,
        "truncated": requested.truncated,
        "requests": requested.requests,
    }


def _weighted(chances: dict[str, float | None], counts: dict[str, int]) -> float | None:
    """Return the score of guessing in a group: the mean over its members, weighted by size.

    None if it is unknown for a member. counts: name of a member -> number of examples.
    """
    known = [(chance, counts[name]) for name, chance in chances.items() if chance is not None]
    if len(known) < len(chances):
        return None
    return sum(chance * count for chance, count in known) / sum(count for _, count in known)


class ScoreError(UserError, ValueError):
    """Error: results cannot share one table; the message names the file and the fault."""


def _text(value: str) -> str | None:
    return None if value else "expected a non-empty text"


@dataclass(frozen=True, kw_only=True)
class Written:
    """Fields of a result file that are read unchanged.

    settings: settings of the evaluation. truncated: number of prompts that were too long and lost
    their beginning.
    """

    model: str = setting("", "", check=_text)
    model_key: str = setting("", "", check=_text)
    task: str = setting("", "", check=_text)
    label: str = setting("", "", check=_text)
    metric: str = setting("", "", check=_text)
    version: str = setting("", "", check=_text)
    fewshot: int | None = setting(None, "", least=0)
    higher_is_better: bool = True
    subtasks: dict[str, Score] = setting(dict, "")
    raw: dict[str, Any] = setting(dict, "")
    settings: dict[str, Any] = setting(dict, "")
    truncated: int | None = setting(None, "", least=0)


@dataclass(frozen=True, kw_only=True)
class Result(Written):
    """Content of one result file.

    name: name of the file and of the column. score: a score from 0 to 1, or nats per token if lower
    is better.
    """

    file: Path
    name: str
    score: Score

    @property
    def bits(self) -> Score | None:
        """Bits per byte of the gold answers; None if unknown, and for held-out loss."""
        value = self.raw.get(f"{BITS},none")
        if value is None:
            return None
        return Score(value, self.raw.get(f"{BITS}_stderr,none"), self.score.n)


def read(folders: Sequence[Path]) -> list[Result]:
    """Return all results in the folders: in the order of ``folders``, then by model and name.

    Identical results in several folders count once.

    Raises:
        ScoreError: a file is not a result, or the results cannot share one table.
        ConfigError, StorageError: a folder cannot be read.
    """
    found: dict[tuple[str, str], Result] = {}
    for folder in folders:
        with convert_os_errors():
            if not folder.is_dir():
                raise FileNotFoundError(2, "no such folder of results", str(folder))
            files = sorted(
                file
                for file in folder.glob("*/*.json")
                if not file.name.startswith(".") and not file.parent.name.startswith(".")
            )
        for file in files:
            result = read_one(file)
            other = found.setdefault((result.model, result.name), result)
            same = (other.model_key, other.score, other.subtasks) == (
                result.model_key,
                result.score,
                result.subtasks,
            )
            if not same and other.model_key == result.model_key:
                raise ScoreError(
                    f"{other.file} and {file} have different numbers for the same model and task:"
                    " keep one of them"
                )
            _one_model(other, result)
    results = list(found.values())
    check(results)
    return results


def read_one(file: Path) -> Result:
    """Return the result in one file.

    Raises:
        ScoreError: it is not a result of this format, or a value in it is not a number.
    """
    with convert_os_errors():
        text = file.read_text(encoding="utf-8")
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ScoreError(f"{file}: not JSON ({error}): delete it and evaluate again") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found_format = raw.get("format") if isinstance(raw, dict) else None
        raise ScoreError(
            f"{file}: not a result of an evaluation, or a result of another version (format"
            f" {found_format!r}, expected {FORMAT})"
        )
    scores = tuple(item.name for item in fields(Score))
    texts = tuple(item.name for item in fields(Written))
    missing = [key for key in (*texts[:7], *scores) if key not in raw]
    if missing:
        raise ScoreError(f"{file}: has no {missing[0]!r}: evaluate again")
    try:
        score = build(Score, {key: raw[key] for key in scores}, file)
        written = build(Written, {key: raw[key] for key in texts if key in raw}, file)
    except ConfigError as error:
        raise ScoreError(f"{str(error).splitlines()[0]}: evaluate again") from None
    placed = {"": score}
    for name, part in written.subtasks.items():
        placed[f"subtasks.{name}."] = part
    for place, one in placed.items():
        if written.higher_is_better and not 0.0 <= one.value <= 1.0:
            raise ScoreError(
                f"{file}: {place}value = {one.value:g}: expected a share of right answers in 0 .. 1"
            )
    return Result(**vars(written), file=file, name=file.stem, score=score)


def check(results: Iterable[Result]) -> None:
    """Raise ScoreError unless the results can share one table.

    A name must belong to one model, and all models must be evaluated equally in each column.
    """
    models: dict[str, Result] = {}
    columns: dict[str, Result] = {}
    for result in results:
        _one_model(models.setdefault(result.model, result), result)
        first = columns.setdefault(result.name, result)
        for what, ours, theirs in _conditions(result, first):
            if ours != theirs:
                raise ScoreError(
                    f"{result.name}: {what} is {ours} for {result.model} ({result.file}), but"
                    f" {theirs} for {first.model} ({first.file}): evaluate both with the same"
                    " settings"
                )


def _one_model(first: Result, result: Result) -> None:
    if first.model_key != result.model_key:
        raise ScoreError(
            f"{first.file} and {result.file} belong to different weights, but both have the model"
            f" name {result.model}: give one of them another name"
        )


def _conditions(ours: Result, theirs: Result) -> list[tuple[str, Any, Any]]:
    """Return the properties that must be equal in two results of one column.

    Each entry is (name of the property, its value in ``ours``, its value in ``theirs``).
    """
    named = [
        (what, getattr(ours, what), getattr(theirs, what))
        for what in ("metric", "fewshot", "version", "higher_is_better")
    ]
    if ours.metric == HELDOUT:
        return named
    conditions = [
        (what, ours.settings.get(what), theirs.settings.get(what))
        for what in ("task", "task_digest", "limit", "seed")
    ]
    numbers = [
        ("the number of examples", ours.score.n, theirs.score.n),
        ("the score of guessing", ours.score.chance, theirs.score.chance),
    ]
    return [*named, *conditions, *numbers]
