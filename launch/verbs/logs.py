"""``logs``: print the output of a run's ranks and supervisor, merged by time.

    logs DIR              the last attempt, all ranks
    logs DIR -f           the last lines, then new ones, over restarts, until the run has ended
    logs DIR --errors     the rank that failed first, its node and traceback, and the ranks that
                          failed after it

Each line has a label of its source. DIR is a job's directory, or that of one task of an array.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fem_common.errors import UserError
from fem_common.text import counted
from launch.job import Item, Job, attempts, read_json
from launch.job.item_state import OVER, find_job, is_resubmitted, state_of, submissions
from launch.node.failures import Failure, failures
from launch.node.logs import (
    Follower,
    Line,
    Source,
    agent_sources,
    merged,
    rank_sources,
    slurm_source,
    supervisor_source,
)

# ranks that failed after the first and are printed; the rest are counted
FOLLOWERS = 8
LAST_LINES = 15  # of a rank without a traceback


def blame(item: Item, wanted: str | None = None) -> Iterator[str]:
    """Yield a text for each selected attempt that failed.

    wanted: None for the last attempt that failed, "all", or the number of an attempt.
    """
    there = attempts(item.path)
    lines = list[str]()
    for attempt in reversed(there) if wanted is None else _chosen(there, wanted):
        text = _attempt(item, attempt)
        if text:
            yield text
            lines.append(text)
            if wanted is None:
                break
    stop = read_json(item.launch / "stop.json")
    if stop and (lines or stop.get("why") == "gave up"):
        message = stop.get("message") or "no reason given"
        if not any(message in text for text in lines):
            yield f"{item.name}: {stop.get('why')}: {message}"


def _attempt(item: Item, attempt: Path) -> str | None:
    """Return a description of an attempt's failure, or None if it did not fail."""
    record = read_json(attempt / "attempt.json") or {}
    failed = failures(attempt, running=not record.get("ended"))
    failure: dict[str, Any] = record.get("failure") or {}
    if not failure and (
        not failed or record.get("outcome") in ("finished", "saved", "cancelled", "busy")
    ):
        return None
    after = f" after step {failure['step']}" if failure.get("step") is not None else ""
    lines = [
        f"{item.name}, attempt {int(attempt.name)} ({record.get('outcome') or 'running'}{after}):"
    ]
    by_rank = bool(failed) and failure.get("kind") not in ("hang", "health")
    if failure and not (by_rank and failure.get("message") == failed[0].message):
        lines.append(f"  {failure.get('kind')}: {failure.get('message')}")
    if by_rank:
        lines += _first(attempt, failed)
    if record.get("removed"):
        lines.append(f"  its logs were removed: {record['removed']}")
    if dumps := list((attempt / "dumps").glob("rank_*.txt")):
        lines.append(f"  stacks of {counted(len(dumps), 'rank')}: {attempt / 'dumps'}")
    if decision := record.get("decision"):
        lines.append(f"  then: {decision['action']}: {decision['reason']}")
    return "\n".join(lines)


def _first(attempt: Path, failed: list[Failure]) -> Iterator[str]:
    """Yield lines about the rank that is the likely cause, and about the ranks that failed later.

    failed: failures, the likely cause first. The rank is described as "first" only if no other
    failure is older, otherwise as "most likely".
    """
    first, *rest = failed
    word = "first" if all(failure.time >= first.time for failure in rest) else "most likely"
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first.time))
    yield f"  {word}: rank {first.rank} on {first.host} at {clock}: {first.message}"
    last = Follower(lambda: rank_sources(attempt, {first.rank}), LAST_LINES)
    shown = first.traceback.splitlines() if first.traceback else [line.text for line in last.read()]
    yield from (f"    {line}" for line in shown)
    for failure in rest[:FOLLOWERS]:
        who, later = f"rank {failure.rank} on {failure.host}", failure.time - first.time
        if later >= 0:
            yield f"  then:  {who}, {later:+.1f} s: {failure.message}"
        else:
            yield f"  also:  {who}: {failure.message}"
    if len(rest) > FOLLOWERS:
        yield f"  and {len(rest) - FOLLOWERS} more"


FOLLOW_SECONDS = 0.5
FOLLOW_LAST = 20  # number of lines at the start of -f
SLURM_LINES = 15  # last lines of Slurm's file, if no other source explains the failure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "directory", metavar="DIR", help="the directory of a run, a job, or a task of an array"
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="print new lines, until the run has ended"
    )
    parser.add_argument(
        "--attempt",
        metavar="N|all",
        help="the attempt to print (default: the last); all: every attempt",
    )
    parser.add_argument("--rank", metavar="R", help="only these ranks: 3, or 0,8-15")
    parser.add_argument("--errors", action="store_true", help="the rank that failed first, and why")
    parser.add_argument(
        "--tail", metavar="N", type=int, help=f"only the last N lines (with -f: {FOLLOW_LAST})"
    )
    parser.add_argument("--time", action="store_true", help="with the time of each line")


def main(arguments: argparse.Namespace) -> int:
    """Print the selected lines of the logs, or with --errors the failures. Return the exit code.

    Raises:
        UserError: the job, item, attempt or rank does not exist.
    """
    job, found = find_job(arguments.directory)
    items = [job.items[index] for index in found]
    if arguments.tail is not None and arguments.tail < 1:
        raise UserError(f"--tail is {arguments.tail}; it must be at least 1")
    for item in items:
        _check_attempt(item.path, arguments.attempt)
    removed = [text for item in items for text in _removed(item, arguments.attempt)]
    if arguments.errors:
        if not sum(_errors(job, item, arguments.attempt) for item in items):
            print(*(removed or [f"{arguments.directory}: no rank failed"]), sep="\n")
        return 0
    ranks = _ranks(arguments.rank, job.world_size)

    def find() -> Iterator[Source]:
        for item in items:
            yield from _sources(job, item, arguments.attempt, ranks, named=len(items) > 1)

    for text in removed:
        print(f"launch: {text}", file=sys.stderr)
    if arguments.follow:
        _follow(job, items, Follower(find, arguments.tail or FOLLOW_LAST), arguments.time)
        return 0
    lines = merged(find()) if arguments.tail is None else Follower(find, arguments.tail).read()
    if not _print(lines, arguments.time) and not removed:
        print(f"launch: {arguments.directory}: no output yet", file=sys.stderr)
    return 0


def _ranks(text: str | None, world_size: int) -> set[int] | None:
    """Parse a list of ranks such as ``0,8-15``. Return None, which means all ranks, for None."""
    if text is None:
        return None
    ranks = set[int]()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise UserError(f"--rank {text}: not a rank; give 3, or 0,8-15")
        ranks |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    if ranks and max(ranks) >= world_size:
        raise UserError(f"--rank {text}: the job has the ranks 0 to {world_size - 1}")
    return ranks


def _check_attempt(item: Path, wanted: str | None) -> None:
    """Raise UserError if the item has no attempt with the number ``wanted``."""
    there = attempts(item)
    if wanted not in (None, "all") and not _chosen(there, wanted):
        numbers = ", ".join(str(int(path.name)) for path in there) or "none yet"
        raise UserError(f"--attempt {wanted}: {item} has the attempts {numbers}")


def _sources(
    job: Job, item: Item, wanted: str | None, ranks: set[int] | None, *, named: bool
) -> Iterator[Source]:
    """Yield the log files that exist now: of the ranks, agents, supervisor and Slurm.

    wanted: number of the attempt, "all", or None for the last one. ranks: ranks to select; None:
    all ranks and the other logs. named: add the item's name to the labels.
    """
    directory = item.path
    there = attempts(directory)
    chosen = _chosen(there, wanted)
    sources = [source for attempt in chosen for source in rank_sources(attempt, ranks)]
    if ranks is None:
        only = chosen[0] if len(chosen) == 1 and (wanted or len(there) > 1) else None
        sources += [source for attempt in chosen for source in agent_sources(attempt)]
        sources += [
            supervisor_source(directory, only),
            *(slurm_source(path, directory, only) for path in _slurm_files(job, item)),
        ]
    for source in sources:
        yield replace(source, label=f"{item.name} {source.label}") if named else source


def _chosen(there: list[Path], wanted: str | None) -> list[Path]:
    """Return the selected attempt folders.

    wanted: "all", the number of an attempt, or None for the last attempt.
    """
    if wanted == "all":
        return there
    if wanted:
        return [path for path in there if str(int(path.name)) == wanted]
    return there[-1:]


def _removed(item: Item, wanted: str | None) -> Iterator[str]:
    """Yield one line of text if `launch.supervise.run_files.prune` removed logs of the attempts."""
    why = {
        int(path.name): (read_json(path / "attempt.json") or {}).get("removed")
        for path in _chosen(attempts(item.path), wanted)
    }
    gone = [number for number, text in why.items() if text]
    if gone:
        which = (
            f"attempt {gone[0]}"
            if len(gone) == 1
            else f"{len(gone)} attempts from {gone[0]} to {gone[-1]}"
        )
        yield f"{item.name}: the logs of {which} were removed: {why[gone[-1]]}"


def _slurm_files(job: Job, item: Item) -> list[Path]:
    """Return the output files of the Slurm jobs that ran, or will run, the item."""
    directory = item.path
    records = [read_json(path / "attempt.json") or {} for path in attempts(directory)]
    task = f"_{job.items.index(item)}" if job.array else ""
    sent = [f"{line['job_id']}{task}" for line in submissions(job)]
    ids = dict.fromkeys(
        [*sent, *(str(record.get("job_id")) for record in (*records, state_of(item.directory)))]
    )
    folder = Path(job.profile.get("logs") or job.launch)
    return [path for job_id in ids if (path := folder / f"slurm-{job_id}.out").is_file()]


def _follow(job: Job, items: list[Item], follower: Follower, with_time: bool) -> None:
    """Print new lines until every item has ended, or until interrupted."""
    try:
        while True:
            over = all(_is_over(job, item) for item in items)  # before the last read
            _print(follower.read(), with_time)
            if over:
                return
            time.sleep(FOLLOW_SECONDS)
    except KeyboardInterrupt:
        return


def _is_over(job: Job, item: Item) -> bool:
    """Return True if no more lines will follow.

    The supervisor has ended, and the item was not submitted again.
    """
    state = state_of(item.directory)
    return state.get("state") in OVER and not is_resubmitted(job, job.items.index(item), state)


def _print(lines: Iterable[Line], with_time: bool) -> int:
    """Print lines and return their number."""
    printed = 0
    for line in lines:
        clock = (
            time.strftime("%m-%d %H:%M:%S", time.localtime(line.time)) + f"{line.time % 1:.3f} "[1:]
            if with_time
            else ""
        )
        sys.stdout.write(f"{clock}{line}\n")
        printed += 1
    sys.stdout.flush()
    return printed


def _errors(job: Job, item: Item, wanted: str | None) -> int:
    """Print why an item's attempts failed, and return the number of printed texts.

    If no attempt began, print the end of Slurm's file. wanted: see `blame`.
    """
    texts = list(blame(item, wanted))
    if not attempts(item.path):
        sources = [slurm_source(path, item.path) for path in _slurm_files(job, item)]
        if lines := [f"    {line.text}" for source in sources for line in source.lines()]:
            texts += [f"{item.name}: no attempt began; Slurm's file ends with:"]
            texts += ["\n".join(lines[-SLURM_LINES:])]
    for text in texts:
        print(text)
    return len(texts)
