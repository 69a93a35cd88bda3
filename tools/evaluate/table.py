"""Results of several models as one table: cells, ranks, average rank, number of first ranks. Only
arithmetic, no drawing.

Ranks follow Table 2 of the FEM paper, whose Avg Rank and #Top1 are all reproduced from its printed
scores (tests/tools/evaluate/test_table.py): scores are compared with three decimals as printed;
equal scores share the better rank, and the next rank counts all models before it (1, 1, 3); every
model with the best score of a column counts as first; a column counts once. Only columns that every
model has are ranked.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from .perplexity import METRIC as HELDOUT
from .results import Result, Score, ScoreError, leaderboard, mean
from .suite import Suite, SuiteTask

PLACES = 3


@dataclass(frozen=True)
class Column:
    """Heading of a column, and whether it is also shown rescaled. n: examples; fewshot: None if the
    task has no few-shot count.
    """

    name: str
    task: str
    label: str
    group: str
    metric: str
    version: str
    fewshot: int | None
    n: int | None
    chance: float | None
    higher_is_better: bool
    rescaled: bool

    @property
    def asked(self) -> str:
        """Metric and few-shot count, shown below the heading."""
        metric = "nats/token" if self.metric == HELDOUT else self.metric.replace(",none", "")
        return metric if self.fewshot is None else f"{metric}, {self.fewshot}-shot"


@dataclass(frozen=True)
class Row:
    """Results of one model by column name; missing ones are absent. average: over the rescaled
    tasks, if it has all of them.
    """

    model: str
    model_key: str
    results: dict[str, Result]
    rescaled: dict[str, Score]
    average: Score | None


@dataclass(frozen=True)
class Table:
    """Columns in the order of the suite, rows in the order of the results. notes: remarks for the
    reader, one sentence each.
    """

    suite: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def ranked(self) -> tuple[Column, ...]:
        """Columns that every model has with equal settings; none for a single model."""
        if len(self.rows) < 2:
            return ()
        return tuple(
            column
            for column in self.columns
            if all(column.name in row.results for row in self.rows)
            and column.name not in self.unlike
        )

    @property
    def unlike(self) -> dict[str, str]:
        """Held-out columns whose numbers are not comparable between the models, with the reason."""
        found = {}
        for column in self.columns:
            here = [row.results[column.name] for row in self.rows if column.name in row.results]
            if column.metric != HELDOUT or not here:
                continue
            if len({repr(_cut(result)) for result in here}) > 1:
                found[column.name] = (
                    "the models read different texts, or the same text in different windows: their"
                    " losses are not comparable"
                )
            elif len({result.raw.get("tokens") for result in here}) > 1:
                found[column.name] = (
                    "the models' tokenizers split the text differently: bits per byte are"
                    " comparable, nats per token are not"
                )
        return found

    def ranks(self, column: Column) -> list[int | None]:
        """Return the rank of each row in a column, None without a result."""
        here = [
            row.results[column.name].score.value for row in self.rows if column.name in row.results
        ]
        found = iter(ranks(here, column.higher_is_better))
        return [next(found) if column.name in row.results else None for row in self.rows]

    def marks(self, column: Column) -> list[int | None]:
        """Return 1 for the best printed number, 2 for the second, else None; all None if fewer than
        two results are comparable.
        """
        ranks = self.ranks(column)
        order = sorted({rank for rank in ranks if rank is not None})
        if len(ranks) - ranks.count(None) < 2 or column.name in self.unlike:
            return [None] * len(ranks)
        return [order.index(rank) + 1 if rank in order[:2] else None for rank in ranks]

    def ahead(self, column: Column) -> int | None:
        """Return the row that is better than all others by more than one standard error of the
        difference; None for a tie or without comparable scores.

        The error assumes independent scores, which overestimates it for equal questions; a score
        without an error counts as exact.
        """
        scores = {
            index: row.results[column.name].score
            for index, row in enumerate(self.rows)
            if column.name in row.results
        }
        if len(scores) < 2 or column.name in self.unlike:
            return None
        sign = 1 if column.higher_is_better else -1
        best, *others = sorted(scores, key=lambda index: -sign * scores[index].value)
        first = scores[best]
        apart = [
            sign * (first.value - scores[other].value)
            > math.hypot(first.stderr or 0.0, scores[other].stderr or 0.0)
            for other in others
        ]
        return best if all(apart) else None

    def summary(self) -> list[tuple[float, int] | None]:
        """Return (average rank, number of first ranks) of each row over the ranked columns; None if
        no column is ranked.
        """
        return summary(
            [[row.results[c.name].score.value for c in self.ranked] for row in self.rows],
            [c.higher_is_better for c in self.ranked],
        )


def _cut(result: Result) -> list[Any]:
    """Return the properties of a held-out loss that identify its text and its windows."""
    return [
        result.score.n,
        *(result.raw.get(key) for key in ("bytes", "stride", "per_document")),
        sorted(result.raw.get("contexts", [])),
    ]


@dataclass(frozen=True)
class Point:
    """Held-out loss at one context length. nats: per token; bits_per_byte: None if the bytes of the
    text are unknown.
    """

    context: int
    nats: Score
    bits_per_byte: float | None


def heldout(table: Table) -> dict[str, dict[str, list[Point]]]:
    """Return held-out text and windows -> model -> points by context length, over all held-out
    columns of the table.
    """
    found: dict[str, dict[str, dict[int, Point]]] = {}
    for row in table.rows:
        for column in table.columns:
            result = row.results.get(column.name)
            if result is None or result.metric != HELDOUT:
                continue
            for length, raw in result.raw.get("contexts", {}).items():
                score = result.subtasks.get(f"@{length}", result.score)
                point = Point(int(length), score, raw["bits_per_byte"])
                found.setdefault(_text(raw), {}).setdefault(row.model, {})[point.context] = point
    return {
        text: {model: [points[length] for length in sorted(points)] for model, points in by.items()}
        for text, by in found.items()
    }


def _text(raw: dict[str, Any]) -> str:
    """Return the name of the text, with its windows if they differ from training."""
    name = " + ".join(Path(prefix).name for prefix in raw["data"])
    stride = "" if raw["stride"] == raw["context"] else f", stride {raw['stride']}"
    return name + stride + (", each document separately" if raw["per_document"] else "")


def printed(value: float, places: int = PLACES) -> Decimal:
    """Return the number as a table prints it: rounded half up from its shortest decimal form."""
    return Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)


def ranks(values: Sequence[float], higher_is_better: bool = True) -> list[int]:
    """Return 1 + the number of better values as printed, for each value; equal values share the
    better rank.
    """
    shown = [printed(value) for value in values]
    return [
        1 + sum(other > own if higher_is_better else other < own for other in shown)
        for own in shown
    ]


def summary(
    scores: Sequence[Sequence[float]], higher_is_better: Sequence[bool]
) -> list[tuple[float, int] | None]:
    """Return (average rank, number of columns ranked first) for each row of scores [models,
    columns]; None for rows without columns.
    """
    if not higher_is_better:
        return [None] * len(scores)
    by_column = [
        ranks([row[index] for row in scores], higher)
        for index, higher in enumerate(higher_is_better)
    ]
    by_row = list(zip(*by_column, strict=True))
    return [(sum(own) / len(own), own.count(1)) for own in by_row]


def build(results: Sequence[Result], suite: Suite | None) -> Table:
    """Return the table of a suite with its columns in order; without a suite, all results sorted by
    name.

    Raises:
        ScoreError: no results, or one whose settings differ from the suite.
    """
    if not results:
        raise ScoreError("no results: evaluate a model first")
    by_name = {result.name: result for result in reversed(results)}
    asked = (
        [
            SuiteTask(name=name, task=by_name[name].task, label=by_name[name].label)
            for name in sorted(by_name, key=_natural)
        ]
        if suite is None
        else suite.tasks
    )
    if suite is not None:
        _as_asked(results, {task.name: task for task in suite.tasks}, suite.name)
    columns = tuple(_column(task, by_name.get(task.name)) for task in asked)
    known = {column.name for column in columns}
    models = dict.fromkeys(result.model for result in results)
    rows = tuple(
        _row(
            model,
            [result for result in results if result.model == model and result.name in known],
            columns,
        )
        for model in models
    )
    table = Table(
        suite.name if suite else "",
        suite.title if suite else "",
        columns,
        tuple(row for row in rows if row is not None),
        (),
    )
    others = sorted({result.name for result in results} - known)
    if not table.rows:
        raise ScoreError(
            f"no results of the suite {table.suite}: only results of {', '.join(others)}"
        )
    return Table(table.suite, table.title, columns, table.rows, tuple(_notes(table, others)))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that orders valid_64 before valid_256."""
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"(\d+)", name)
    ]


def _as_asked(results: Sequence[Result], tasks: dict[str, SuiteTask], suite: str) -> None:
    for result in results:
        task = tasks.get(result.name)
        if task is None:
            continue
        told = {
            "metric": (result.metric, task.metric),
            "task": (result.settings.get("task", task.task), task.task),
        }
        if task.fewshot is not None:
            told["fewshot"] = (str(result.fewshot), str(task.fewshot))
        for what, (here, there) in told.items():
            if here != there:
                raise ScoreError(
                    f"{result.file}: {what} is {here}, but the suite {suite} requires {there}:"
                    " evaluate again"
                )
        absent = sorted(set(task.subtask_chance) - set(result.subtasks))
        if absent:
            raise ScoreError(
                f"{result.file}: no score of the sub-task {absent[0]}, which the suite {suite}"
                " contains: evaluate again"
            )


def _column(task: SuiteTask, result: Result | None) -> Column:
    """Return a column as described by its results, or by the suite if no model has a result."""
    rescaled = task.rescale == "leaderboard"
    if result is None:
        chance, metric = task.chance, task.metric
        return Column(
            task.name,
            task.task,
            task.label,
            task.group,
            metric,
            "",
            task.fewshot,
            None,
            chance,
            task.higher_is_better,
            rescaled,
        )
    score = result.score
    described = (
        result.metric,
        result.version,
        result.fewshot,
        score.n,
        score.chance,
        result.higher_is_better,
    )
    return Column(task.name, task.task, task.label, task.group, *described, rescaled)


def _row(model: str, results: Sequence[Result], columns: Sequence[Column]) -> Row | None:
    if not results:
        return None
    by_name = {result.name: result for result in results}
    rescaled = {}
    for column in columns:
        result = by_name.get(column.name)
        if result and column.rescaled:
            # Without a known score of guessing the value is left out; a note reports it.
            with contextlib.suppress(ValueError):
                rescaled[column.name] = leaderboard(result.score, list(result.subtasks.values()))
    return Row(
        model,
        results[0].model_key,
        by_name,
        rescaled,
        _average(rescaled, [column for column in columns if column.rescaled]),
    )


def _average(rescaled: dict[str, Score], columns: Sequence[Column]) -> Score | None:
    """Return the leaderboard's average. Columns of one task (IFEval's two) are averaged first; None
    for a single task or if one is missing.

    Two numbers of the same answers are not independent, so the standard error of their average is
    unknown.
    """
    by_task: dict[str, list[Score]] = {}
    for column in columns:
        if column.name not in rescaled:
            return None
        by_task.setdefault(column.task, []).append(rescaled[column.name])
    if len(by_task) < 2:
        return None
    tasks = [own[0] if len(own) == 1 else Score(mean(own).value, None) for own in by_task.values()]
    return mean(tasks)


def _notes(table: Table, others: Sequence[str]) -> list[str]:
    """Return notes on missing and excluded results, and their effect on the ranks."""
    notes = []
    holes = {
        row.model: [c.label for c in table.columns if c.name not in row.results]
        for row in table.rows
    }
    notes += [
        f"{model} has no result of {', '.join(labels)} (–)."
        for model, labels in holes.items()
        if labels
    ]
    if len(table.rows) > 1 and len(table.ranked) < len(table.columns):
        notes.append(
            f"Ranks count the {len(table.ranked)} of {len(table.columns)} columns that every model"
            " has and that are comparable."
        )
    notes += [
        f"{column.label}: {table.unlike[column.name]}."
        for column in table.columns
        if column.name in table.unlike
    ]
    unknown = [
        c.label
        for c in table.columns
        if c.rescaled
        and any(c.name in row.results and c.name not in row.rescaled for row in table.rows)
    ]
    if unknown:
        notes.append(
            f"Not rescaled, because the score of guessing is not known: {', '.join(unknown)}."
        )
    keys: dict[str, list[str]] = {}
    for row in table.rows:
        keys.setdefault(row.model_key, []).append(row.model)
    notes += [
        f"{' and '.join(models)} have the same weights."
        for models in keys.values()
        if len(models) > 1
    ]
    versions = {
        row.results[c.name].version.split(",")[0]
        for row in table.rows
        for c in table.columns
        if c.name in row.results and c.metric != HELDOUT
    }
    if len(versions) > 1:
        notes.append(
            f"Columns were measured with more than one version: {', '.join(sorted(versions))}."
        )
    limits = {
        c.label: row.results[c.name].settings.get("limit")
        for row in table.rows
        for c in table.columns
        if c.name in row.results
    }
    limited = [f"{label} (the first {limit} examples)" for label, limit in limits.items() if limit]
    if limited:
        notes.append(
            f"Scores of a part of the examples, not of the complete task: {', '.join(limited)}."
        )
    for row in table.rows:
        lost = [
            (c.label, row.results[c.name].truncated) for c in table.columns if c.name in row.results
        ]
        cut = [f"{label} {number}" for label, number in lost if number]
        if cut:
            notes.append(
                f"{row.model}: prompts longer than its context, cut at the beginning:"
                f" {', '.join(cut)}."
            )
    if others:
        notes.append(f"Results without a column in this table are left out: {', '.join(others)}.")
    return notes
