"""Several models' results as one table: cells, ranks, average rank, how often a model is first. Arithmetic on results; draws nothing.

Ranks are those of the FEM paper's Table 2, whose Avg Rank and #Top1 all come out of its printed scores this way
(tests/tools/evaluate/test_table.py): scores are compared as they are printed, with three decimals; models of the same printed
score share the better rank, the next one's counts all before it (1, 1, 3); every model that shares the best score of a column counts as
first; a column counts once. Only columns that every model has are ranked.
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
    """What stands over a column, and whether it is also shown rescaled. n: examples; fewshot: None where the task has no such thing."""

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
        """Metric and few-shot count, for under the heading."""
        metric = "nats/token" if self.metric == HELDOUT else self.metric.replace(",none", "")
        return metric if self.fewshot is None else f"{metric}, {self.fewshot}-shot"


@dataclass(frozen=True)
class Row:
    """One model's results, by column name; absent where it has none. average: of the rescaled tasks, where it has all of them."""

    model: str
    model_key: str
    results: dict[str, Result]
    rescaled: dict[str, Score]
    average: Score | None


@dataclass(frozen=True)
class Table:
    """Columns in the suite's order, rows in the results'. notes: what a reader must know, one sentence each."""

    suite: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def ranked(self) -> tuple[Column, ...]:
        """The columns that every model has, asked alike; none where there is one model alone."""
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
        """Held-out columns whose numbers do not compare between the models, and why."""
        found = {}
        for column in self.columns:
            here = [row.results[column.name] for row in self.rows if column.name in row.results]
            if column.metric != HELDOUT or not here:
                continue
            if len({repr(_cut(result)) for result in here}) > 1:
                found[column.name] = (
                    "the models read other texts, or cut them otherwise: their losses do not compare"
                )
            elif len({result.raw.get("tokens") for result in here}) > 1:
                found[column.name] = (
                    "the models' tokenizers cut the text differently: bits a byte compare, nats a token do not"
                )
        return found

    def ranks(self, column: Column) -> list[int | None]:
        """Each row's rank in a column, None where it has no result."""
        here = [
            row.results[column.name].score.value for row in self.rows if column.name in row.results
        ]
        found = iter(ranks(here, column.higher_is_better))
        return [next(found) if column.name in row.results else None for row in self.rows]

    def marks(self, column: Column) -> list[int | None]:
        """1 for the best as printed, 2 for the next best number; None for all else, and where fewer than two results compare."""
        ranks = self.ranks(column)
        order = sorted({rank for rank in ranks if rank is not None})
        if len(ranks) - ranks.count(None) < 2 or column.name in self.unlike:
            return [None] * len(ranks)
        return [order.index(rank) + 1 if rank in order[:2] else None for rank in ranks]

    def ahead(self, column: Column) -> int | None:
        """The row whose score is better than all others by more than a standard error of the difference; None: a tie, or none compares.

        The error is that of independent scores, more than the same questions' have; a score without one counts as exact.
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
        """Each row's (average rank, how often first) over the ranked columns; None where nothing is ranked."""
        return summary(
            [[row.results[c.name].score.value for c in self.ranked] for row in self.rows],
            [c.higher_is_better for c in self.ranked],
        )


def _cut(result: Result) -> list[Any]:
    """Which text a held-out loss is of, and how it was read."""
    return [
        result.score.n,
        *(result.raw.get(key) for key in ("bytes", "stride", "per_document")),
        sorted(result.raw.get("contexts", [])),
    ]


@dataclass(frozen=True)
class Point:
    """Held-out loss at one context length. nats: a token; bits_per_byte: None where the text's bytes are not known."""

    context: int
    nats: Score
    bits_per_byte: float | None


def heldout(table: Table) -> dict[str, dict[str, list[Point]]]:
    """What held-out text and how it was cut -> model -> points by context length, of all the table's held-out columns together."""
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
    """The name of the text and how it is cut, where not as in training."""
    name = " + ".join(Path(prefix).name for prefix in raw["data"])
    stride = "" if raw["stride"] == raw["context"] else f", stride {raw['stride']}"
    return name + stride + (", each document alone" if raw["per_document"] else "")


def printed(value: float, places: int = PLACES) -> Decimal:
    """The number as a table prints it: rounded half up from its shortest decimal form."""
    return Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)


def ranks(values: Sequence[float], higher_is_better: bool = True) -> list[int]:
    """1 + how many are better as printed; equals share the better rank."""
    shown = [printed(value) for value in values]
    return [
        1 + sum(other > own if higher_is_better else other < own for other in shown)
        for own in shown
    ]


def summary(
    scores: Sequence[Sequence[float]], higher_is_better: Sequence[bool]
) -> list[tuple[float, int] | None]:
    """(average rank, number of columns where first) of each row of scores [models, columns]; None of every row without columns."""
    if not higher_is_better:
        return [None] * len(scores)
    by_column = [
        ranks([row[index] for row in scores], higher)
        for index, higher in enumerate(higher_is_better)
    ]
    by_row = list(zip(*by_column, strict=True))
    return [(sum(own) / len(own), own.count(1)) for own in by_row]


def build(results: Sequence[Result], suite: Suite | None) -> Table:
    """The table of a suite, its columns in its order; without one, all results, by name.

    Raises:
        ScoreError: there is none, or one was asked another thing than the suite says.
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
        raise ScoreError(f"no results of the suite {table.suite}: only of {', '.join(others)}")
    return Table(table.suite, table.title, columns, table.rows, tuple(_notes(table, others)))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts valid_64 before valid_256."""
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
                    f"{result.file}: {what} is {here}, but the suite {suite} asks for {there}: evaluate again"
                )
        absent = sorted(set(task.subtask_chance) - set(result.subtasks))
        if absent:
            raise ScoreError(
                f"{result.file}: no score of the sub-task {absent[0]}, of which the suite {suite} tells: evaluate again"
            )


def _column(task: SuiteTask, result: Result | None) -> Column:
    """A column, described by what was found, or, where no model has it, by the suite alone."""
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
            with contextlib.suppress(
                ValueError
            ):  # what guessing scores is not known: the notes tell
                rescaled[column.name] = leaderboard(result.score, list(result.subtasks.values()))
    return Row(
        model,
        results[0].model_key,
        by_name,
        rescaled,
        _average(rescaled, [column for column in columns if column.rescaled]),
    )


def _average(rescaled: dict[str, Score], columns: Sequence[Column]) -> Score | None:
    """The leaderboard's average: columns of one task (IFEval's two) first, as one; None of one task, or where one is missing.

    Two numbers of the same answers are not independent: the standard error of their average is not known from theirs.
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
    """What is missing, what is left out, and what follows for the ranks."""
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
            f"Ranks count the {len(table.ranked)} of {len(table.columns)} columns that every model has and that compare."
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
            f"Not rescaled, since what guessing scores is not known: {', '.join(unknown)}."
        )
    keys: dict[str, list[str]] = {}
    for row in table.rows:
        keys.setdefault(row.model_key, []).append(row.model)
    notes += [
        f"{' and '.join(models)} are the same weights."
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
            f"Columns were measured by more than one version: {', '.join(sorted(versions))}."
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
            f"Not the tasks' scores, but those of a part of their examples: {', '.join(limited)}."
        )
    for row in table.rows:
        lost = [
            (c.label, row.results[c.name].truncated) for c in table.columns if c.name in row.results
        ]
        cut = [f"{label} {number}" for label, number in lost if number]
        if cut:
            notes.append(
                f"{row.model}: prompts that were longer than its context and lost their beginning: {', '.join(cut)}."
            )
    if others:
        notes.append(
            f"Results that are no columns of this table are left out: {', '.join(others)}."
        )
    return notes
