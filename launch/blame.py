"""launch: why an item failed, for people: the rank that failed first, where, with its traceback, who followed, and what was decided."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.failures import Failure, failures
from launch.follow import Tail, rank_sources
from launch.job import Item
from launch.layout import attempts, launch_folder, read_json

FOLLOWERS = 8  # ranks that failed after the first are told of, one by one; the rest are counted
LAST_LINES = 15  # of a rank that gave no traceback


def blame(item: Item, wanted: str | None = None) -> Iterator[str]:
    """A text for each attempt that failed: of the last one that did; of all (``all``); of one (``3``). Nothing where none failed."""
    directory = Path(item.directory)
    there = attempts(directory)
    if wanted not in (None, "all"):
        there = [path for path in there if str(int(path.name)) == wanted]
    told = list[str]()
    for attempt in reversed(there) if wanted is None else there:
        text = _attempt(item, attempt)
        if text:
            yield text
            told.append(text)
            if wanted is None:
                break
    stop = read_json(launch_folder(directory) / "stop.json")
    if isinstance(stop, dict) and (told or stop.get("why") == "gave up"):
        message = stop.get("message") or "no reason given"
        if not any(message in text for text in told):
            yield f"{item.name}: {stop.get('why')}: {message}"


def _attempt(item: Item, attempt: Path) -> str | None:
    """What went wrong in an attempt, or None where nothing did."""
    record = read_json(attempt / "attempt.json") or {}
    failed = failures(attempt, running=not record.get("ended"))
    told: dict[str, Any] = record.get("failure") or {}
    if not told and (not failed or record.get("outcome") in ("finished", "saved", "cancelled", "busy")):
        return None
    lines = [_title(item, attempt, record)]
    by_rank = bool(failed) and told.get("kind") not in ("hang", "health")
    if told and not (by_rank and told.get("message") == failed[0].message):
        lines.append(f"  {told.get('kind')}: {told.get('message')}")
    if by_rank:
        lines += _first(attempt, failed)
    dumps = sorted((attempt / "dumps").glob("rank_*.txt"))
    if dumps:
        lines.append(f"  stacks of {len(dumps)} rank{'s' * (len(dumps) != 1)}: {attempt / 'dumps'}")
    decision = record.get("decision")
    if isinstance(decision, dict):
        lines.append(f"  then: {decision.get('action')}: {decision.get('reason')}")
    return "\n".join(lines)


def _title(item: Item, attempt: Path, record: dict[str, Any]) -> str:
    step = (record.get("failure") or {}).get("step")
    after = f" after step {step}" if step is not None else ""
    outcome = record.get("outcome") or "goes on"
    return f"{item.name}, attempt {int(attempt.name)} ({outcome}{after}):"


def _first(attempt: Path, failed: list[Failure]) -> Iterator[str]:
    """The rank that is the likely cause, which failed first where no other's word is older, and the others."""
    first, *rest = failed
    word = "first" if all(failure.time >= first.time for failure in rest) else "most likely"
    yield f"  {word}: rank {first.rank} on {first.host} at {_clock(first.time)}: {first.message}"
    said = first.traceback.splitlines() if first.traceback else _last_lines(attempt, first.rank)
    yield from (f"    {line}" for line in said)
    for failure in rest[:FOLLOWERS]:
        after = failure.time - first.time
        when = (
            f"then:  rank {failure.rank} on {failure.host}, {after:+.1f} s"
            if after >= 0
            else f"also:  rank {failure.rank} on {failure.host}"
        )
        yield f"  {when}: {failure.message}"
    if len(rest) > FOLLOWERS:
        yield f"  and {len(rest) - FOLLOWERS} more"


def _last_lines(attempt: Path, rank: int) -> list[str]:
    """The end of a rank's log."""
    lines: list[str] = []
    for source in rank_sources(attempt, {rank}):
        tail = Tail(source)
        tail.skip_to_last(LAST_LINES)
        lines += [line.text for line in tail.read()]
    return lines


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
