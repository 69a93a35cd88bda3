"""launch: the verb ``status``: how runs stand, one line a run: queue, attempt, step, loss, tokens/s, time left, the last step's age.

    python -m launch status                all under runs/ but those that ended more than a day ago
    python -m launch status DIR... --items each task of an array on a line of its own
    python -m launch status --watch 10     again every 10 seconds, until all are over

DIR is a job's directory, or a folder with such directories below it. What Slurm says of a job counts more than what its supervisor
wrote last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from fem_common.errors import UserError
from launch.job import Job, load_job
from launch.rows import Row, ask, rows_of, summary
from launch.standing import find_job

ROOT = "runs"
DEPTH = 4  # folders below a root
RECENT_SECONDS = 86400.0
HEADER = ("NAME", "STATE", "JOB", "ATTEMPT", "STEP", "LOSS", "TOKENS/S", "LEFT", "LAST STEP", "MESSAGE")
WATCH_SECONDS = 10.0
_NOT_ENTERED = {"attempts", "tasks", "checkpoints", "launch", "__pycache__"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's command line."""
    parser.add_argument(
        "directories", nargs="*", metavar="DIR", help=f"a job's directory, or a folder with jobs below it (default: {ROOT})"
    )
    parser.add_argument("--all", action="store_true", help="also those that ended more than a day ago")
    parser.add_argument("--items", action="store_true", help="a line for each task of an array")
    parser.add_argument(
        "--watch", metavar="S", nargs="?", type=float, const=WATCH_SECONDS, help="again every S seconds, until all are over"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, all items")


def main(arguments: argparse.Namespace) -> int:
    """Print the board, once or again and again. Raises UserError where a DIR is no job and has none below."""
    if arguments.watch is not None and arguments.watch <= 0:
        raise UserError(f"--watch is {arguments.watch}; it must be more than 0 seconds")
    while True:
        text, active = _board(arguments)
        live = arguments.watch is not None and sys.stdout.isatty()
        print(f"\x1b[H\x1b[2J{text}" if live else text, flush=True)
        if arguments.watch is None or not active:
            return 0
        try:
            time.sleep(arguments.watch)
        except KeyboardInterrupt:
            return 0


def _board(arguments: argparse.Namespace) -> tuple[str, bool]:
    """The text, and whether anything is active."""
    now = time.time()
    asked = bool(arguments.directories)
    jobs = _once(found for directory in arguments.directories or [ROOT] for found in _jobs(Path(directory), asked=asked))
    queue = ask([job for job, _ in jobs])
    found = [(job, rows_of(job, queue, now, items)) for job, items in jobs]
    hidden = 0
    if not arguments.all and not arguments.directories:
        shown = [(job, rows) for job, rows in found if not _is_old(rows, now)]
        found, hidden = shown, len(found) - len(shown)
    active = any(row.active for _, rows in found for row in rows)
    if arguments.json:
        return json.dumps([asdict(row) for _, rows in found for row in rows], indent=1), active
    names = Counter(_head(job, rows).name for job, rows in found)
    lines = [line for job, rows in found for line in _lines(job, rows, names, items=arguments.items)]
    text = _table([HEADER, *lines]) if lines else ["no job here that did not end more than a day ago" if hidden else "no job here yet"]
    if hidden:
        text.append(f"{hidden} that ended more than a day ago: --all")
    if queue.silent:
        text.append(f"Slurm does not answer, so states with a ? are the supervisors' last words: {queue.silent}")
    return "\n".join(text), active


def _is_old(rows: Sequence[Row], now: float) -> bool:
    return not any(row.active or row.since is None or now - row.since < RECENT_SECONDS for row in rows)


def _jobs(directory: Path, *, asked: bool) -> list[tuple[Job, list[int]]]:
    """The jobs in a folder or below it, by name of their folder, with their items; of a task's folder, the job and that item alone."""
    found = [job for path in _job_folders(directory, DEPTH) if (job := load_job(path)) is not None]
    if found or not asked:
        return [(job, list(range(len(job.items)))) for job in found]
    return [find_job(directory)]


def _once(found: Iterable[tuple[Job, list[int]]]) -> list[tuple[Job, list[int]]]:
    """Each job once, with all of its items that were found."""
    jobs: dict[Path, tuple[Job, set[int]]] = {}
    for job, items in found:
        jobs.setdefault(Path(job.directory).resolve(), (job, set()))[1].update(items)
    return [(job, sorted(items)) for job, items in jobs.values()]


def _job_folders(directory: Path, depth: int) -> Iterator[Path]:
    if (directory / "launch" / "job.json").is_file():
        yield directory
        return
    if depth == 0:
        return
    try:
        inner = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and entry.name not in _NOT_ENTERED)
    except OSError:
        return
    for name in inner:
        if not name.startswith("."):
            yield from _job_folders(directory / name, depth - 1)


def _head(job: Job, rows: Sequence[Row]) -> Row:
    """The row that stands for a job: its only one, or a summary of all."""
    return rows[0] if len(rows) == 1 else summary(job, rows)


def _lines(job: Job, rows: Sequence[Row], names: Counter[str], *, items: bool) -> Iterator[tuple[str, ...]]:
    """A job's lines; where other jobs have its name, too, its directory instead."""
    head = _head(job, rows)
    name, *cells = _cells(head)
    yield (_place(head.directory) if names[name] > 1 else name, *cells)
    if items and len(rows) > 1:
        for row in rows:
            name, *cells = _cells(row)
            yield (f"  {name}", *cells)


def _place(directory: str) -> str:
    """A directory, relative to the working directory where it lies below it."""
    path, here = Path(directory), Path.cwd()
    return str(path.relative_to(here)) if path != here and path.is_relative_to(here) else directory


def _cells(row: Row) -> tuple[str, ...]:
    """A row as the table shows it."""
    attempt = "-" if row.attempt is None else str(row.attempt)
    steps = f"{row.step if row.step is not None else '-'}{f'/{row.steps}' if row.steps else ''}"
    loss = "-" if row.loss is None else f"{row.loss:.4f}"
    return (
        row.name,
        row.state,
        row.job_id or "-",
        f"{attempt} ({row.failures} failed)" if row.failures else attempt,
        steps,
        loss if row.valid_loss is None else f"{loss} (valid {row.valid_loss:.4f})",
        "-" if row.tokens_per_second is None else _count(row.tokens_per_second),
        "-" if row.seconds_left is None else _duration(row.seconds_left),
        "-" if row.step_age is None else f"{_duration(row.step_age)} ago",
        row.message,
    )


def _count(number: float) -> str:
    """A number with its magnitude: 950, 12.3k, 4.56M."""
    size, unit = next(((size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= size), (1.0, ""))
    return f"{number / size:.3g}{unit}" if unit else f"{number:.0f}"


def _duration(seconds: float) -> str:
    """Seconds in two units at most: 12s, 3m 05s, 4h 10m, 2d 03h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02}s"
    if seconds < 86400:
        return f"{seconds // 3600}h {seconds % 3600 // 60:02}m"
    return f"{seconds // 86400}d {seconds % 86400 // 3600:02}h"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as aligned lines, without columns that nobody fills, as wide as the terminal where there is one."""
    used = [index for index in range(len(rows[0])) if any(row[index] not in ("", "-") for row in rows[1:])]
    widths = [max(len(row[index]) for row in rows) for index in used]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = ("  ".join(row[index].ljust(width) for index, width in zip(used, widths, strict=True)).rstrip() for row in rows)
    return [line[:limit] for line in lines]
