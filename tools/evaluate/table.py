"""Combine the results of several models into one table: cells, ranks, average rank, number of first
ranks. The module only computes; ``report`` and ``picture`` write the table.

Ranks follow Table 2 of the FEM paper, whose Avg Rank and #Top1 are all reproduced from its printed
scores (tests/tools/evaluate/test_table.py):

- Scores are compared with three decimals, as printed.
- Equal scores share the better rank, and the next rank counts all models before it (1, 1, 3).
- Every model with the best score of a column counts as first in this column.
- Only columns for which every model has a result are ranked.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

from .perplexity import METRIC as HELDOUT
from .results import BITS, Result, Score, ScoreError, leaderboard, mean
from .suite import Suite, SuiteTask

PLACES = 3


@dataclass(frozen=True)
class Column:
    """Column of the table.

    n: number of examples. fewshot: None if the task has no few-shot count. chance: score of
    guessing; None if unknown. rescaled: the column is also shown rescaled.
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
    def settings_text(self) -> str:
        """Metric and few-shot count as text, shown below the heading."""
        known = {HELDOUT: "nats/token", BITS: "bits/byte"}
        metric = known.get(self.metric) or self.metric.replace(",none", "")
        return metric if self.fewshot is None else f"{metric}, {self.fewshot}-shot"


@dataclass(frozen=True)
class Row:
    """Results of one model.

    results: column name -> result, without missing ones. rescaled: column name -> rescaled score.
    average: mean of the rescaled scores (see ``_average``); None if one is missing.
    """

    model: str
    model_key: str
    results: dict[str, Result]
    rescaled: dict[str, Score]
    average: Score | None


@dataclass(frozen=True)
class Table:
    """Results of all models.

    columns: in the order of the suite. rows: one per model, in the order of the results. notes:
    remarks for the reader, one sentence each. published: file of a paper's scores, or None.
    """

    suite: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    published: str | None = None

    def cells(self, column: Column) -> list[Result | None]:
        """Return the result of each row in a column, or None."""
        return [row.results.get(column.name) for row in self.rows]

    @property
    def ranked(self) -> tuple[Column, ...]:
        """Columns that have comparable results of every model; empty for a single model."""
        if len(self.rows) < 2:
            return ()
        return tuple(
            column
            for column in self.columns
            if None not in self.cells(column) and column.name not in self.unlike
        )

    @cached_property
    def unlike(self) -> dict[str, str]:
        """Name of each held-out column whose numbers are not comparable between the models -> the
        reason.
        """
        found = {}
        for column in self.columns:
            here = [result for result in self.cells(column) if result is not None]
            if column.metric != HELDOUT:
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
        """Return the rank of each row in a column; None for a row without a result."""
        cells = self.cells(column)
        values = [result.score.value for result in cells if result is not None]
        found = iter(ranks(values, column.higher_is_better))
        return [None if result is None else next(found) for result in cells]

    def marks(self, column: Column) -> list[int | None]:
        """Return 1 for rows with the best printed score of a column, 2 for the second best, else
        None.

        All are None if fewer than two results are comparable.
        """
        ranks = self.ranks(column)
        order = sorted({rank for rank in ranks if rank is not None})
        if len(ranks) - ranks.count(None) < 2 or column.name in self.unlike:
            return [None] * len(ranks)
        return [order.index(rank) + 1 if rank in order[:2] else None for rank in ranks]

    def ahead(self, column: Column) -> int | None:
        """Return the index of the row that is clearly better than all other rows; None without one.

        The distance must exceed one standard error of the difference. The error assumes independent
        scores, which overestimates it if all models answer the same questions. A score without an
        error counts as exact.
        """
        cells = self.cells(column)
        scores = {index: result.score for index, result in enumerate(cells) if result is not None}
        if len(scores) < 2 or column.name in self.unlike:
            return None
        sign = 1 if column.higher_is_better else -1
        best, *others = sorted(scores, key=lambda index: -sign * scores[index].value)
        first = scores[best]
        for index in others:
            other = scores[index]
            error = math.hypot(first.stderr or 0.0, other.stderr or 0.0)
            if not sign * (first.value - other.value) > error:
                return None
        return best

    def summary(self) -> list[tuple[float, int] | None]:
        """Return (average rank, number of first ranks) of each row over the ranked columns.

        The values are None if no column is ranked.
        """
        columns = self.ranked
        scores = []
        for row in self.rows:
            scores.append([row.results[column.name].score.value for column in columns])
        return summary(scores, [column.higher_is_better for column in columns])


def in_bits(table: Table) -> Table | None:
    """Return the table of bits per byte of the gold answers, without held-out columns.

    None if no result has them.
    """
    rows = []
    for row in table.rows:
        results = {
            name: replace(result, score=result.bits, metric=BITS, higher_is_better=False)
            for name, result in row.results.items()
            if result.bits is not None
        }
        rows.append(Row(row.model, row.model_key, results, {}, None))
    columns = tuple(
        replace(column, metric=BITS, chance=None, higher_is_better=False, rescaled=False)
        for column in table.columns
        if column.metric != HELDOUT
    )
    if not any(row.results for row in rows):
        return None
    return Table(table.suite, table.title, columns, tuple(rows), ())


def _cut(result: Result) -> list[Any]:
    """Return the properties of a held-out loss that identify its text and its windows."""
    return [
        result.score.n,
        *(result.raw.get(key) for key in ("bytes", "stride", "per_document")),
        sorted(result.raw.get("contexts", [])),
    ]


@dataclass(frozen=True)
class Point:
    """Held-out loss at one context length.

    nats: loss per token. bits_per_byte: None if the number of bytes of the text is unknown.
    """

    context: int
    nats: Score
    bits_per_byte: float | None


def heldout(table: Table) -> dict[str, dict[str, list[Point]]]:
    """Return text -> model -> points sorted by context length, over all held-out columns.

    The name of a text includes its windows (see ``_text``).
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
    curves: dict[str, dict[str, list[Point]]] = {}
    for text, by_model in found.items():
        curves[text] = {model: _by_context(points) for model, points in by_model.items()}
    return curves


def _by_context(points: dict[int, Point]) -> list[Point]:
    return [points[length] for length in sorted(points)]


def _text(raw: dict[str, Any]) -> str:
    """Return the name of a held-out text, followed by its windows if they differ from training."""
    name = " + ".join(Path(prefix).name for prefix in raw["data"])
    stride = "" if raw["stride"] == raw["context"] else f", stride {raw['stride']}"
    return name + stride + (", each document separately" if raw["per_document"] else "")


def printed(value: float, places: int = PLACES) -> Decimal:
    """Return the number rounded half up to ``places`` decimals, as tables print it.

    The rounding starts from the shortest decimal form of the number.
    """
    return Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)


def ranks(values: Sequence[float], higher_is_better: bool = True) -> list[int]:
    """Return the rank of each value: 1 + the number of better values.

    Values are compared as printed; equal values share the better rank.
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
    columns].

    higher_is_better: one value per column. The result contains only None without columns.
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
    """Return the table of the results.

    suite: defines the columns and their order; None: all results, in alphabetical order.

    Raises:
        ScoreError: no results, or one whose settings differ from the suite.
    """
    if not results:
        raise ScoreError("no results: evaluate a model first")
    by_name = {result.name: result for result in reversed(results)}
    if suite is None:
        settings_text = tuple(
            SuiteTask(name=name, task=by_name[name].task, label=by_name[name].label)
            for name in sorted(by_name, key=_natural)
        )
        suite = Suite(tasks=settings_text)
    else:
        _check_settings(results, suite)
    columns = tuple(_column(task, by_name.get(task.name)) for task in suite.tasks)
    known = {column.name for column in columns}
    others = sorted(by_name.keys() - known)
    by_model: dict[str, list[Result]] = {result.model: [] for result in results}
    for result in results:
        if result.name in known:
            by_model[result.model].append(result)
    rows = tuple(_row(model, own, columns) for model, own in by_model.items() if own)
    if not rows:
        raise ScoreError(
            f"no results of the suite {suite.name}: only results of {', '.join(others)}"
        )
    table = Table(suite.name, suite.title, columns, rows, (), suite.published)
    return replace(table, notes=tuple(_notes(table, others)))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that orders valid_64 before valid_256."""
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"(\d+)", name)
    ]


def _check_settings(results: Sequence[Result], suite: Suite) -> None:
    """Raise ScoreError if a result was made with other settings than the suite's."""
    tasks = {task.name: task for task in suite.tasks}
    for result in results:
        task = tasks.get(result.name)
        if task is None:
            continue
        requested = [
            ("metric", result.metric, task.metric),
            ("task", result.settings.get("task", task.task), task.task),
        ]
        if task.fewshot is not None:
            requested.append(("fewshot", str(result.fewshot), str(task.fewshot)))
        for what, here, there in requested:
            if here != there:
                raise ScoreError(
                    f"{result.file}: {what} is {here}, but the suite {suite.name} requires {there}:"
                    " evaluate again"
                )
        absent = sorted(set(task.subtask_chance) - set(result.subtasks))
        if absent:
            raise ScoreError(
                f"{result.file}: no score of the sub-task {absent[0]}, which the suite {suite.name}"
                " contains: evaluate again"
            )


def _column(task: SuiteTask, result: Result | None) -> Column:
    """Return a column as its results describe it.

    If no model has a result, the column is described by the suite.
    """
    described: SuiteTask | Result = task if result is None else result
    return Column(
        name=task.name,
        task=task.task,
        label=task.label,
        group=task.group,
        metric=described.metric,
        version="" if result is None else result.version,
        fewshot=described.fewshot,
        n=None if result is None else result.score.n,
        chance=task.chance if result is None else result.score.chance,
        higher_is_better=described.higher_is_better,
        rescaled=task.rescale == "leaderboard",
    )


def _row(model: str, results: Sequence[Result], columns: Sequence[Column]) -> Row:
    by_name = {result.name: result for result in results}
    rescaled = {}
    wanted = [column for column in columns if column.rescaled]
    for column in wanted:
        result = by_name.get(column.name)
        if result:
            # Without a known score of guessing the value is left out; a note reports it.
            with contextlib.suppress(ValueError):
                rescaled[column.name] = leaderboard(result.score, list(result.subtasks.values()))
    return Row(model, results[0].model_key, by_name, rescaled, _average(rescaled, wanted))


def _average(rescaled: dict[str, Score], columns: Sequence[Column]) -> Score | None:
    """Return the leaderboard's average of the rescaled scores.

    Columns of one task (IFEval's two) are averaged first. Such numbers are not independent, so the
    standard error of their average is unknown. None for a single task, or if a score is missing.
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
    """Return notes on missing and excluded results and on their effect on the ranks.

    others: names of results that the suite does not contain.
    """
    notes = []
    columns, rows = table.columns, table.rows
    found = [
        (row, column, row.results[column.name])
        for row in rows
        for column in columns
        if column.name in row.results
    ]
    for row in rows:
        holes = [column.label for column in columns if column.name not in row.results]
        if holes:
            notes.append(f"{row.model} has no result of {', '.join(holes)} (–).")
    if len(rows) > 1 and len(table.ranked) < len(columns):
        notes.append(
            f"Ranks count the {len(table.ranked)} of {len(columns)} columns that every model"
            " has and that are comparable."
        )
    for column in columns:
        if column.name in table.unlike:
            notes.append(f"{column.label}: {table.unlike[column.name]}.")
    unknown = []
    for column in columns:
        name = column.name
        left_out = any(name in row.results and name not in row.rescaled for row in rows)
        if column.rescaled and left_out:
            unknown.append(column.label)
    if unknown:
        notes.append(
            f"Not rescaled, because the score of guessing is not known: {', '.join(unknown)}."
        )
    keys: dict[str, list[str]] = {}
    for row in rows:
        keys.setdefault(row.model_key, []).append(row.model)
    for models in keys.values():
        if len(models) > 1:
            notes.append(f"{' and '.join(models)} have the same weights.")
    measured = [result.version for _, column, result in found if column.metric != HELDOUT]
    versions = {version.split(",")[0] for version in measured}
    if len(versions) > 1:
        notes.append(
            f"Columns were measured with more than one version: {', '.join(sorted(versions))}."
        )
    limits = {column.label: result.settings.get("limit") for _, column, result in found}
    limited = [f"{label} (the first {limit} examples)" for label, limit in limits.items() if limit]
    if limited:
        notes.append(
            f"Scores of a part of the examples, not of the complete task: {', '.join(limited)}."
        )
    for model, own in itertools.groupby(found, key=lambda cell: cell[0].model):
        cut = [
            f"{column.label} {result.truncated}" for _, column, result in own if result.truncated
        ]
        if cut:
            notes.append(
                f"{model}: prompts longer than its context, cut at the beginning: {', '.join(cut)}."
            )
    if others:
        notes.append(f"Results without a column in this table are left out: {', '.join(others)}.")
    return notes
