"""Verb ``status``: report the progress of a data folder.

    python -m data_prep status OUT [--tasks M]

The verb reads the plan and the unit entries, but no inputs and no shards. The rate is that of the
units finished in the last 15 minutes by any process on any machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path

from data_prep.aliases import Json
from data_prep.options import check_least
from data_prep.prepared.entries import dropped_rows, read_units, shortened, units_done
from data_prep.prepared.layout import Plan, Unit, entry_path, read_plan
from data_prep.prepared.loss_mask import counting
from data_prep.prepared.manifest import read_manifest
from data_prep.prepared.staging import existing_folder
from data_prep.report.progress import tally_of
from data_prep.sources.rows import listed
from data_prep.verbs.merge import is_merged
from fem_common.text import count, counted, duration, ranges, size

RECENT_SECONDS = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder that plan or run wrote")
    parser.add_argument(
        "--tasks", type=int, metavar="M", help="also report the progress of each of M tasks"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(arguments: argparse.Namespace) -> int:
    """Print the progress of a folder. Raises UserError if the folder has no plan."""
    folder = existing_folder(
        arguments.folder, "a folder that python -m data_prep plan or run wrote"
    )
    check_least("tasks", arguments.tasks)
    status, missing = status_of(folder, arguments.tasks or 0, time.time())
    print(
        json.dumps(status, indent=2)
        if arguments.json
        else "\n".join(_lines(folder, status, missing))
    )
    return 0


def status_of(folder: Path, tasks: int, now: float) -> tuple[Json, list[int]]:
    """Return (progress of a folder, numbers of the units that are not done).

    The progress is the dictionary that --json prints. ``text_bytes`` is the approximate size of all
    units. ``rate`` is in bytes of text per second during the 15 minutes before the time ``now``; it
    is None if fewer than two units were finished in them.
    """
    plan = read_plan(folder)
    merged = is_merged(folder, plan)
    if merged:
        entries = read_units(folder, read_manifest(folder))
    else:
        entries, _, _ = units_done(folder, plan)
    found = {plan.units[entry.unit] for entry in entries}
    total = sum(unit.text_bytes for unit in plan.units)
    counts = tally_of(entries)
    done = sum(unit.text_bytes for unit in found)
    rate = None if merged else _rate(folder, found, now)
    masks = [part.mask for entry in entries for part in entry.splits.values() if part.mask]
    status = {
        "merged": merged,
        "units_done": len(found),
        "units": len(plan.units),
        "text_bytes_done": done,
        "text_bytes": total,
        "rows": counts.rows,
        "documents": counts.documents,
        "tokens": counts.tokens,
        "dropped": dropped_rows(entries),
        "bad": counts.bad,
        "rate": rate,
        "seconds_left": (total - done) / rate if rate else None,
        "tasks": [_task_status(plan, found, task, tasks) for task in range(tasks)],
    }
    if masks:
        status["counted"] = sum(mask.counted for mask in masks)
    return status, [unit.number for unit in plan.units if unit not in found]


def _task_status(plan: Plan, done: Container[Unit], task: int, tasks: int) -> Json:
    """Return how many units of one task are done and how many it has."""
    share = [unit for unit in plan.units if unit.number % tasks == task]
    return {"task": task, "units_done": sum(unit in done for unit in share), "units": len(share)}


def _rate(folder: Path, done: Iterable[Unit], now: float) -> float | None:
    """Return the encoding rate of the last 15 minutes in bytes of text per second.

    Return None if fewer than two units were finished in this time.
    """
    ends = sorted((entry_path(folder, unit).stat().st_mtime, unit.text_bytes) for unit in done)
    recent = [(end, text_bytes) for end, text_bytes in ends if end > now - RECENT_SECONDS]
    if len(recent) < 2:
        return None
    return sum(text_bytes for _, text_bytes in recent[1:]) / max(now - recent[0][0], 1e-3)


def _lines(folder: Path, status: Json, missing: Sequence[int]) -> Iterator[str]:
    drops = listed(status["dropped"]) or "none"
    rows = status["rows"]
    documents = status["documents"]
    rate = status["rate"]
    text = f"about {size(status['text_bytes_done'])} of {size(status['text_bytes'])} of text"
    yield f"{folder}: {status['units_done']:,} of {counted(status['units'], 'unit')} done, {text}"
    yield (
        f"  {counted(rows, 'row')} = {counted(documents, 'document')} + {rows - documents:,} "
        f"dropped ({drops})"
    )
    yield f"  {count(status['tokens'])} tokens"
    if "counted" in status:
        yield f"  {counting(status['counted'], status['tokens'])}"
    for task in status["tasks"]:
        yield (
            f"  task {task['task']} of {len(status['tasks'])}: {task['units_done']} of "
            f"{counted(task['units'], 'unit')} done"
        )
    if status["merged"]:
        yield "merged: the data is complete"
    elif not missing:
        yield f"not merged yet; merge with: python -m data_prep merge {folder}"
    else:
        left = (
            f"{rate / 1e6:.1f} MB/s in the last 15 minutes: "
            f"{duration(status['seconds_left'])} left at that rate"
            if rate
            else ""
        )
        yield f"  {left or 'fewer than two units were finished in the last 15 minutes'}"
        yield (
            f"not done: {shortened(ranges(missing))}; continue with: python -m data_prep run "
            f"--out {folder}"
        )
