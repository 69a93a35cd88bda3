"""``status``: show runs, one line each: state, attempt, step, loss, tokens/s, time left.

    status                all under runs/ except those that ended more than a day ago
    status DIR... --items each task of an array on a separate line
    status --watch 10     again every 10 seconds, until all have ended

DIR is a job's directory, or a folder with job directories below it. A line also gives the age of
the last step. Slurm's report takes precedence over the state that a supervisor wrote last. A fork
is listed below its parent.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fem_common.errors import UserError
from fem_common.text import aligned, count, duration
from launch.cluster import slurm
from launch.job import Job, attempts, last_json_lines, load_job, read_json
from launch.job.item_state import (
    AT_WORK,
    OVER,
    find_job,
    is_resubmitted,
    process_of,
    state_of,
    submissions,
)
from launch.node.logs import started

LAST_SUBMISSIONS = 5  # of a job that are queried
_STEPPING = ("running", "running?", "saving", "saving?")  # states in which steps may be made


@dataclass(frozen=True)
class Row:
    """Values of one line of the table, for an item or an entire array. Unknown values are None."""

    name: str
    directory: str
    # queued, starting, checking, running, saving, waiting; finished, stopped, cancelled, lost;
    # "new"; of an array: counts
    state: str
    active: bool  # in the queue or running
    job_id: str | None = None
    queue: str | None = None  # Slurm's state: RUNNING
    attempt: int | None = None
    failures: int = 0
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    valid_loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    step_age: float | None = None  # seconds since the last step's line, of an active run
    # run directory of which it is a fork, and the step at which it began
    parent: str | None = None
    parent_step: int | None = None
    since: float | None = None  # unix time of the supervisor's last state
    message: str = ""


@dataclass(frozen=True)
class Queue:
    """States of jobs in Slurm's queue, or the reason for which Slurm does not answer."""

    states: Mapping[str, slurm.QueueState]
    silent: str | None = None


def ask(jobs: Sequence[Job]) -> Queue:
    """Query Slurm for the states of all unfinished jobs, in one call."""
    ids = list[str]()
    for job in jobs:
        states = [state_of(item.directory) for item in job.items] if job.on_slurm else []
        if any(
            state.get("state") not in OVER or is_resubmitted(job, index, state)
            for index, state in enumerate(states)
        ):
            ids += _submitted(job)
    if not ids:
        return Queue({})
    try:
        return Queue(slurm.queue(ids))
    except slurm.SlurmError as error:
        return Queue({}, str(error))


def rows_of(job: Job, queue: Queue, now: float, items: Sequence[int] | None = None) -> list[Row]:
    """Return one row for each item of a job, or for the items with the given indices."""
    if items is None:
        items = range(len(job.items))
    return [_row(job, index, queue, now) for index in items]


def summary(job: Job, rows: Sequence[Row]) -> Row:
    """Summarise an array in one row: the number of items in each state, and the first problem."""
    counts = Counter(row.state for row in rows)
    trouble = next((row for row in rows if row.state in ("lost", "stopped") or row.failures), None)
    message = f"{trouble.name}: {trouble.message}" if trouble and trouble.message else ""
    ids = [row.job_id.partition("_")[0] for row in rows if row.job_id]
    origins = {(row.parent, row.parent_step) for row in rows}
    parent, parent_step = origins.pop() if len(origins) == 1 else (None, None)
    return Row(
        name=job.name,
        directory=job.directory,
        state=", ".join(f"{count} {state}" for state, count in counts.items()),
        active=any(row.active for row in rows),
        job_id=ids[-1] if ids else None,
        failures=sum(row.failures for row in rows),
        since=max((row.since for row in rows if row.since is not None), default=None),
        parent=parent,
        parent_step=parent_step,
        message=message,
    )


def _submitted(job: Job) -> list[str]:
    return [str(line["job_id"]) for line in submissions(job)[-LAST_SUBMISSIONS:]]


def _row(job: Job, index: int, queue: Queue, now: float) -> Row:
    """Return the row of one item."""
    item = job.items[index]
    state = state_of(item.directory)
    job_id = _queued(job, index, queue)
    found = queue.states.get(job_id or "")
    stop = read_json(item.launch / "stop.json")
    again = stop is None and state.get("state") in OVER and is_resubmitted(job, index, state)
    word, message = _word(job, {} if again else state, stop, job_id, queue)
    active = (
        bool(found and found.active) or (word in AT_WORK and found is None) or word.endswith("?")
    )
    numbers = _numbers(item.path, active, word in _STEPPING, now) if job.kind == "run" else {}
    if not job_id and state.get("job_id"):
        job_id = str(state["job_id"])
    if not message and not again:
        message = str(state.get("message") or "")
    return Row(
        name=item.name,
        directory=item.directory,
        state=word,
        active=active,
        job_id=job_id or None,
        queue=found.state if found else None,
        attempt=state.get("attempt"),
        failures=int(state.get("failures") or 0),
        since=state.get("time"),
        message=message,
        **numbers,
    )


def _queued(job: Job, index: int, queue: Queue) -> str | None:
    """Return the job id under which Slurm reports the item, or None.

    Among several ids, prefer an active job, otherwise the last submission.
    """
    submitted = _submitted(job) if job.on_slurm else []
    ids = [f"{one}_{index}" if job.array else one for one in submitted]
    known = [
        job_id for job_id in ids if job_id in queue.states and queue.states[job_id].runs(job.script)
    ]
    return max(
        known, key=lambda job_id: (queue.states[job_id].active, known.index(job_id)), default=None
    )


def _word(
    job: Job,
    state: Mapping[str, Any],
    stop: Mapping[str, Any] | None,
    job_id: str | None,
    queue: Queue,
) -> tuple[str, str]:
    """Return (state in one word, message) of an item.

    state: contents of state.json. stop: contents of stop.json, or None. job_id: the id under which
    Slurm reports the item, or None. The message is empty if the state needs no explanation.
    """
    state_word = state.get("state")
    found = queue.states.get(job_id or "")
    silent = queue.silent
    if state_word == "finished":
        return state_word, ""
    if found is not None and found.active:
        return _in_queue(job, state_word, state, found)
    if state_word in (*AT_WORK, "requeued") and job.on_slurm and silent:
        return f"{state_word}?", ""
    if state_word in AT_WORK and not job.on_slurm:
        if process_of(state) is not None:
            return str(state_word), ""
        if state.get("host") and state["host"] != socket.gethostname():
            return f"{state_word}?", f"on {state['host']}, which is not visible from this host"
    if stop is not None or state_word in OVER:
        why = "cancelled" if "cancelled" in (state_word, (stop or {}).get("why")) else "stopped"
        return why, str((stop or {}).get("message") or "")
    if state_word is not None:
        gone = (
            f"job {job_id}: {found.state}"
            if found
            else f"its supervisor (process {state.get('pid')} on {state.get('host')}) is gone"
        )
        return "lost", f"{gone}; `python -m launch requeue {shlex.quote(job.directory)}` continues"
    if found is not None:
        see = f"python -m launch logs {shlex.quote(job.directory)}"
        # DependencyNeverSatisfied, for a job that waited for one that failed
        why = f" ({found.reason})" if found.reason else ""
        return "lost", f"job {job_id}: {found.state}{why} before the supervisor began; see: {see}"
    return ("unknown?" if silent and _submitted(job) else "new"), ""


def _in_queue(
    job: Job, state_word: str | None, state: Mapping[str, Any], found: slurm.QueueState
) -> tuple[str, str]:
    """Return (state in one word, message) of a job that Slurm lists as active."""
    if found.state == "PENDING":
        prefix = (
            f"{state['message']}; " if state_word == "requeued" and state.get("message") else ""
        )
        if found.reason == "BadConstraints":
            why = (
                "cannot start: too few nodes meet its requirements and are not excluded "
                "(BadConstraints)"
            )
            return (
                "queued",
                (
                    f"{prefix}{why}; `python -m launch requeue {shlex.quote(job.directory)}` reads "
                    "the cordon file again"
                ),
            )
        return "queued", f"{prefix}waits: {found.reason or 'not considered yet'}"
    if found.state == "RUNNING":
        return (str(state_word), "") if state_word in AT_WORK else ("starting", "")
    return found.state.lower(), ""


def _numbers(directory: Path, active: bool, stepping: bool, now: float) -> dict[str, Any]:
    """Return the values of a `Row` that are read from the run's own files.

    stepping: the last attempt has made a step. The time left is included only if ``active`` and
    ``stepping``.
    """
    progress: dict[str, Any] = read_json(directory / "progress.json") or {}
    fork: dict[str, Any] = read_json(directory / "fork.json") or {}
    metrics = directory / "metrics.jsonl"
    lines = list(last_json_lines(metrics))
    step: dict[str, Any] = next((line for line in lines if "loss" in line), {})
    written = metrics.stat().st_mtime if lines else None
    folders = attempts(directory)
    began = started(folders[-1]) if folders else 0.0
    stepped = stepping and written is not None and written > began
    steps = [value for value in (progress.get("step"), step.get("step")) if value is not None]
    done = max(steps, default=0)
    full = progress.get("steps")
    seconds = step.get("step_seconds")
    seconds_left = (
        max(0, full - done) * seconds
        if stepped and steps and full is not None and seconds is not None
        else None
    )
    return {
        "step": done if steps else None,
        "steps": full,
        "loss": step.get("loss"),
        "valid_loss": next((line["valid_loss"] for line in lines if "valid_loss" in line), None),
        "tokens_per_second": step.get("tokens_per_second"),
        "seconds_left": seconds_left,
        "step_age": now - written if active and written is not None else None,
        "parent": fork.get("parent"),
        "parent_step": fork.get("step"),
    }


ROOT = "runs"
DEPTH = 4  # levels below a root
RECENT_SECONDS = 86400.0
HEADER = tuple("NAME,STATE,JOB,ATTEMPT,STEP,LOSS,TOKENS/S,LEFT,LAST STEP,MESSAGE".split(","))
WATCH_SECONDS = 10.0
_NOT_ENTERED = {"attempts", "tasks", "checkpoints", "launch", "__pycache__"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "directories",
        nargs="*",
        metavar="DIR",
        help=f"a job's directory, or a folder with jobs below it (default: {ROOT})",
    )
    parser.add_argument(
        "--all", action="store_true", help="also those that ended more than a day ago"
    )
    parser.add_argument("--items", action="store_true", help="a line for each task of an array")
    parser.add_argument(
        "--watch",
        metavar="S",
        nargs="?",
        type=float,
        const=WATCH_SECONDS,
        help="again every S seconds, until all have ended",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, all items")


def main(arguments: argparse.Namespace) -> int:
    """Print the table, once or repeatedly.

    Raises:
        UserError: a DIR is no job and has none below it.
    """
    if arguments.watch is not None and arguments.watch <= 0:
        raise UserError(f"--watch is {arguments.watch}; it must be more than 0 seconds")
    while True:
        text, active = _board(
            arguments.directories,
            old=arguments.all,
            items=arguments.items,
            as_json=arguments.json,
        )
        live = arguments.watch is not None and sys.stdout.isatty()
        print(f"\x1b[H\x1b[2J{text}" if live else text, flush=True)
        if arguments.watch is None or not active:
            return 0
        try:
            time.sleep(arguments.watch)
        except KeyboardInterrupt:
            return 0


def _board(
    directories: Sequence[str], *, old: bool, items: bool, as_json: bool
) -> tuple[str, bool]:
    """Return (the table as text, True if an item is active).

    old: include jobs that ended more than a day ago. items: a line for each task of an array.
    as_json: return all items as JSON instead.
    """
    now, requested = time.time(), bool(directories)
    # each job with all of its selected items
    once: dict[Path, tuple[Job, set[int]]] = {}
    for directory in directories or [ROOT]:
        for job, indices in _jobs(Path(directory), requested=requested):
            _, selected = once.setdefault(job.path.resolve(), (job, set()))
            selected.update(indices)
    jobs = [(job, sorted(selected)) for job, selected in once.values()]
    queue = ask([job for job, _ in jobs])
    every = [(job, rows_of(job, queue, now, indices)) for job, indices in jobs]
    recent = float("inf") if old or requested else RECENT_SECONDS
    found = [
        (job, rows)
        for job, rows in every
        if any(row.active or now - (row.since or now) < recent for row in rows)
    ]
    hidden = len(every) - len(found)
    active = any(row.active for _, rows in found for row in rows)
    if as_json:
        return json.dumps([asdict(row) for _, rows in found for row in rows], indent=1), active
    lines = list(_lines(found, items=items))
    if lines:
        text = _table([HEADER, *lines])
    elif hidden:
        text = ["all jobs ended more than a day ago"]
    else:
        text = ["no jobs yet"]
    if hidden:
        text.append(f"{hidden} that ended more than a day ago: --all")
    if queue.silent:
        text.append(
            "Slurm does not answer, so states with a ? are the last ones that the supervisors "
            f"wrote: {queue.silent}"
        )
    return "\n".join(text), active


def _jobs(directory: Path, *, requested: bool) -> list[tuple[Job, list[int]]]:
    """Return (job, item indices) for each job in or below a folder, ordered by folder.

    If the user named the folder, it may be the folder of one item: then return its job and only the
    index of that item. Otherwise a folder without jobs gives an empty list.
    """
    found = [job for path in _job_folders(directory, DEPTH) if (job := load_job(path)) is not None]
    if found or not requested:
        return [(job, list(range(len(job.items)))) for job in found]
    return [find_job(directory)]


def _job_folders(directory: Path, depth: int) -> Iterator[Path]:
    """Yield the job folders in or below a folder, at most ``depth`` levels deep."""
    if (directory / "launch" / "job.json").is_file():
        yield directory
        return
    inner = list[str]()
    with suppress(OSError):
        inner = sorted(
            entry.name
            for entry in os.scandir(directory)
            if entry.is_dir() and entry.name not in _NOT_ENTERED
        )
    for name in inner if depth else ():
        if not name.startswith("."):
            yield from _job_folders(directory / name, depth - 1)


def _lines(found: Sequence[tuple[Job, Sequence[Row]]], *, items: bool) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table's lines: a job's line, its items' lines, and its forks' lines.

    items: include a line for each item of an array. A job of one item has only one line.
    Jobs with equal names are shown with their directories.
    """
    heads = [rows[0] if len(rows) == 1 else summary(job, rows) for job, rows in found]
    names = Counter(head.name for head in heads)
    here = f"{Path.cwd()}/"
    done = set[int]()
    numbers = dict[str, int]()  # job number by the directory of the job or of one of its items
    for number, (_, rows) in enumerate(found):
        for row in (heads[number], *rows):
            numbers[str(Path(row.directory).resolve())] = number
    parents = [numbers.get(head.parent or "") for head in heads]

    def tree(number: int, depth: int) -> Iterator[tuple[str, ...]]:
        """Yield a job's lines and its forks' lines, indented by ``depth``."""
        if number in done:  # two forks of each other, after folders were reused
            return
        done.add(number)
        head, rows = heads[number], found[number][1]
        name = head.directory.removeprefix(here) if names[head.name] > 1 else head.name
        if head.parent is not None:
            name += f" from step {head.parent_step}" + (
                "" if depth else f" of {head.parent.removeprefix(here)}"
            )
        yield _cells(head, f"{'  ' * depth}{'└ ' if depth else ''}{name}")
        yield from (
            _cells(row, f"{'  ' * depth}  {row.name}") for row in rows if items and len(rows) > 1
        )
        for child in (other for other, parent in enumerate(parents) if parent == number):
            yield from tree(child, depth + 1)

    for number in sorted(range(len(heads)), key=lambda number: parents[number] is not None):
        yield from tree(number, 0)


def _cells(row: Row, name: str) -> tuple[str, ...]:
    """Return a row's cells for the table."""
    attempt = "-" if row.attempt is None else str(row.attempt)
    steps = "-" if row.step is None else str(row.step)
    if row.steps:
        steps += f"/{row.steps}"
    loss = "-" if row.loss is None else f"{row.loss:.4f}"
    return (
        name,
        row.state,
        row.job_id or "-",
        f"{attempt} ({row.failures} failed)" if row.failures else attempt,
        steps,
        loss if row.valid_loss is None else f"{loss} (valid {row.valid_loss:.4f})",
        "-" if row.tokens_per_second is None else count(row.tokens_per_second),
        "-" if row.seconds_left is None else duration(row.seconds_left),
        "-" if row.step_age is None else f"{duration(row.step_age)} ago",
        row.message,
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as aligned lines, without the columns that are empty in all rows.

    On a terminal, lines are cut to its width.
    """
    used = [
        index
        for index in range(len(rows[0]))
        if any(row[index] not in ("", "-") for row in rows[1:])
    ]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return [line[:limit] for line in aligned([[row[index] for index in used] for row in rows])]
