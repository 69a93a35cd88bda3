"""Write the report of an evaluation from its result files: table.md, results.json, table.png,
heldout.png, and a table on the terminal.

    python -m tools.evaluate.report DIR... --suite paper --out merged

merges the results of several folders, for example of several machines, into one table. No score is
computed.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fem_common import cli
from fem_common.errors import convert_os_errors
from fem_common.files import write_atomically
from fem_common.plot import png
from fem_common.text import aligned

from .results import Result, Score, read
from .suite import Suite, load_suite
from .table import Point, Table, build, heldout, in_bits, printed

MISSING = "–"
AVERAGE = "Leaderboard average, rescaled"


def number(score: Score | None, places: int = 3) -> str:
    """Return a score as text: ``0.313 ± 0.014``, or only the number without a standard error.

    None becomes the sign for a missing score. places: number of decimals.
    """
    if score is None:
        return MISSING
    error = "" if score.stderr is None else f" ± {printed(score.stderr, places)}"
    return f"{printed(score.value, places)}{error}"


def markdown(table: Table) -> str:
    """Return the complete report as Markdown.

    It contains the scores with ranks, rescaled scores, held-out perplexity, a description of the
    columns, and notes.
    """
    blocks = [
        f"# Evaluation: {table.suite}" if table.suite else "# Evaluation",
        table.title,
        _scores(table),
    ]
    if len(table.rows) > 1:
        blocks.append(
            "± is one standard error. **Best** and <u>second</u> of each column. Avg Rank and #Top1"
            " are over the columns that every model has; models with the same printed score share"
            " the better rank."
        )
    bits = in_bits(table)
    if bits is not None:
        note = "Of the gold answers, in UTF-8 bytes; lower is better."
        blocks += ["## Bits per byte", note, _scores(bits)]
    blocks += [*_published(table), *_rescaled(table), *_heldout(table)]
    blocks += ["## Columns", _columns(table)]
    if table.notes:
        blocks += ["## Notes", "\n".join(f"- {note}" for note in table.notes)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _scores(table: Table) -> str:
    heads = [
        "Model",
        *(
            f"{_escaped(column.label)}<br>{_escaped(column.settings_text)}"
            for column in table.columns
        ),
    ]
    rows = [[_escaped(row.model)] for row in table.rows]
    for column in table.columns:
        found = zip(table.cells(column), table.marks(column), strict=True)
        for cells, (result, mark) in zip(rows, found, strict=True):
            value, *error = number(result.score if result else None).split(" ", 1)
            marked = {1: f"**{value}**", 2: f"<u>{value}</u>"}.get(mark or 0, value)
            cells.append(" ".join([marked, *error]))
    if len(table.rows) > 1:
        heads += ["Avg Rank", "#Top1"]
        for cells, ranked in zip(rows, table.summary(), strict=True):
            if ranked is None:
                cells += [MISSING, MISSING]
            else:
                average, firsts = ranked
                cells += [str(printed(average, 2)), str(firsts)]
    return _grid_markdown(heads, rows)


def _published(table: Table) -> list[str]:
    """Return a section with the scores of the suite's paper, in its models' groups."""
    if table.published is None:
        return []
    found = json.loads(Path(table.published).read_text(encoding="utf-8"))
    heads = ["Model", *found["columns"], "Avg Rank", "#Top1"]
    blocks = ["## Published scores", f"{found['source']}."]
    for group in found["groups"]:
        rows = [
            [
                _escaped(row["model"]),
                *(str(printed(score)) for score in row["scores"]),
                row["avg_rank"],
                str(row["top1"]),
            ]
            for row in group["rows"]
        ]
        blocks += [f"{group['name']}:", _grid_markdown(heads, rows)]
    return blocks


def _rescaled(table: Table) -> list[str]:
    columns = [column for column in table.columns if column.rescaled]
    if not any(row.rescaled for row in table.rows):
        return []
    heads = ["Model", *(_escaped(column.label) for column in columns), "Average"]
    rows = []
    for row in table.rows:
        scores = [number(row.rescaled.get(column.name), 2) for column in columns]
        rows.append([_escaped(row.model), *scores, number(row.average, 2)])
    note = (
        "0 is guessing or worse, 100 is all answers right; the sub-tasks of BBH and MuSR are"
        " rescaled before they are averaged. Average: mean over the tasks, with the two numbers of"
        " IFEval as one task."
    )
    return ["## Rescaled as the Open LLM Leaderboard does", note, _grid_markdown(heads, rows)]


def _heldout(table: Table) -> list[str]:
    blocks = []
    for text, by_model in heldout(table).items():
        lengths = sorted({point.context for points in by_model.values() for point in points})
        heads = ["Model", *(f"{length} tokens" for length in lengths)]
        rows = []
        for model, points in by_model.items():
            at = {point.context: point for point in points}
            cells = [_loss(at[length]) if length in at else MISSING for length in lengths]
            rows.append([_escaped(model), *cells])
        blocks += [
            f"## Held-out loss: {text}",
            "By context length; nats per token (bits per byte).",
            _grid_markdown(heads, rows),
        ]
    return blocks


def _loss(point: Point) -> str:
    bits = "" if point.bits_per_byte is None else f" ({printed(point.bits_per_byte)})"
    return number(point.nats) + bits


def _columns(table: Table) -> str:
    heads = [
        "Column",
        "Group",
        "Task",
        "Metric",
        "Few-shot",
        "Examples",
        "Chance",
        "Better",
        "Measured by",
    ]
    rows = []
    for column in table.columns:
        cells = [
            column.label,
            column.group or MISSING,
            column.task,
            column.metric,
            MISSING if column.fewshot is None else str(column.fewshot),
            MISSING if column.n is None else str(column.n),
            MISSING if column.chance is None else str(printed(column.chance)),
            "higher" if column.higher_is_better else "lower",
            column.version or MISSING,
        ]
        rows.append([_escaped(cell) for cell in cells])
    return _grid_markdown(heads, rows, "---")


def _grid_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], side: str = "---:") -> str:
    lines = [heads, ["---", *[side] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def console(table: Table) -> str:
    """Return the table as text for a terminal: tasks are rows, models are columns.

    ``*`` marks the best score of a row.
    """
    # The character after each number is for the star.
    heads = [f"{row.model} ".rjust(12) for row in table.rows]
    grid, bits = _grid(table), in_bits(table)
    if bits is not None:
        empty = [""] * len(heads)
        grid += [["", *empty], ["Bits per byte of the gold answers", *empty], *_grid(bits)]
    lines = aligned([[table.suite.ljust(len(AVERAGE)), *heads], *grid], (0,))
    legend = "± one standard error; * best" if len(table.rows) > 1 else "± one standard error"
    notes = [textwrap.fill(note, 120) for note in (legend, *table.notes)]
    return "\n".join([*lines, "", *notes, ""])


def _grid(table: Table) -> list[list[str]]:
    """Return the cells of the terminal table by row: a label, then one cell per model.

    Rows are the groups, the tasks, the average of the rescaled scores, and the ranks.
    """
    empty = [""] * (len(table.rows) + 1)
    grid: list[list[str]] = []
    for group, columns in groupby(table.columns, key=lambda column: column.group):
        if group:
            grid += [empty, [group, *empty[1:]]]
        elif grid:
            grid.append(empty)
        for column in columns:
            cells = [f"{column.label} ({column.settings_text})"]
            for result, mark in zip(table.cells(column), table.marks(column), strict=True):
                score = number(result.score if result else None).replace(" ", "")
                cells.append(score + ("*" if mark == 1 else " "))
            grid.append(cells)
    if any(row.average for row in table.rows):
        averages = [number(row.average, 2).replace(" ", "") for row in table.rows]
        grid += [empty, [AVERAGE, *(f"{average} " for average in averages)]]
    if table.ranked:
        ranks = [found or (math.nan, 0) for found in table.summary()]
        grid += [
            empty,
            ["average rank", *(f"{printed(rank, 2)} " for rank, _ in ranks)],
            [f"first, of {len(table.ranked)}", *(f"{first} " for _, first in ranks)],
        ]
    return grid


def as_json(table: Table) -> dict[str, Any]:
    """Return the content of results.json: all data of the table in full precision."""
    ranks = {column.name: table.ranks(column) for column in table.ranked}
    models = []
    for index, (row, ranked) in enumerate(zip(table.rows, table.summary(), strict=True)):
        average_rank, top1 = ranked or (None, None)
        results = {}
        for column in table.columns:
            name = column.name
            if name in row.results:
                rank = ranks[name][index] if name in ranks else None
                results[name] = _result_json(row.results[name], rank, row.rescaled.get(name))
        models.append(
            {
                "model": row.model,
                "model_key": row.model_key,
                "average_rank": average_rank,
                "top1": top1,
                "leaderboard_average": _score(row.average),
                "results": results,
            }
        )
    return {
        "format": 1,
        "suite": table.suite,
        "columns": [{**vars(column), "ranked": column in table.ranked} for column in table.columns],
        "models": models,
        "notes": list(table.notes),
    }


def _result_json(result: Result, rank: int | None, rescaled: Score | None) -> dict[str, Any]:
    return {
        **vars(result.score),
        "rank": rank,
        "bits_per_byte": _score(result.bits),
        "rescaled": _score(rescaled),
        "subtasks": {name: vars(part) for name, part in result.subtasks.items()},
        "raw": result.raw,
    }


def _score(score: Score | None) -> dict[str, float | None] | None:
    return None if score is None else {"value": score.value, "stderr": score.stderr}


def report(out: Path, suite: Suite | None, folders: Sequence[Path] = ()) -> None:
    """Write the report on all results in ``folders`` into ``out``, and print the table.

    folders: folders of an evaluation; empty: only ``out``. suite: defines the columns and their
    order; None: all results, in alphabetical order.

    Raises:
        ScoreError: a file is not a result, or the results cannot share one table.
        ConfigError, StorageError: files cannot be read or written.
    """
    from . import picture  # imports matplotlib, which takes a second

    table = build(read(folders or [out]), suite)
    curves = picture.heldout(heldout(table))
    numbers = json.dumps(as_json(table), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    files = {
        "table.md": markdown(table).encode(),
        "results.json": numbers.encode(),
        "table.png": png(picture.scores(table)),
    }
    if curves is not None:
        files["heldout.png"] = png(curves)
    with convert_os_errors():
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(out / name, content)
        if curves is None:
            (out / "heldout.png").unlink(missing_ok=True)
    print(console(table), end="")
    print(f"\nwrote {', '.join(str(out / name) for name in files)}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Report on folders of results and return the exit code."""
    parser = cli.Parser(
        prog="python -m tools.evaluate.report",
        description="Write one table of the results in one or several folders.",
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="a folder that tools.evaluate wrote"
    )
    parser.add_argument(
        "--suite",
        metavar="NAME|FILE",
        help="columns, order, groups, rescaling; default: all results, sorted by name",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the report; default for one DIR: DIR",
    )
    given = parser.parse_args(arguments)
    if given.out is None and len(given.folders) > 1:
        parser.error("several folders need --out DIR for the report")
    suite, out = given.suite, given.out or given.folders[0]
    return cli.run(
        "tools.evaluate.report",
        lambda: report(out, load_suite(suite) if suite else None, given.folders),
    )


if __name__ == "__main__":
    sys.exit(main())
