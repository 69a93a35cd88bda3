"""launch: the cordon file: nodes that no run of ours is to be given, shared by all runs. Standard library alone.

A line is a JSON object {"node", "time", "reason", "run", "until"}; until: unix time, or null for ever. People may add and delete lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.job import Job
from launch.layout import append_json, read_json_lines


@dataclass(frozen=True)
class Entry:
    """Why a node is not to be used."""

    node: str
    time: float  # unix time of the entry
    reason: str
    run: str  # the item's directory
    until: float | None = None  # unix time; None: until someone deletes the line


def cordon_file(job: Job) -> Path:
    """The cordon file that a job heeds: the profile's, else the one of all jobs that were submitted from its working directory."""
    return cordon_path((job.profile.get("paths") or {}).get("cordon"), job.working_directory)


def cordon_path(named: str | None, working_directory: str) -> Path:
    """The cordon file that a profile names, or else that of a working directory."""
    return Path(named) if named else Path(working_directory) / "runs" / "cordon.jsonl"


def cordoned(path: Path | str, now: float | None = None) -> dict[str, Entry]:
    """The entries that hold now, by node, the last one of each; none where there is no file. What is no entry is passed over.

    Raises:
        OSError: the file is there and cannot be read.
    """
    now = time.time() if now is None else now
    entries = (_entry(line) for line in read_json_lines(Path(path)))
    return {entry.node: entry for entry in entries if entry is not None and (entry.until is None or entry.until > now)}


def cordon(path: Path | str, nodes: Iterable[str], reason: str, run: Path | str, until: float | None = None) -> list[str]:
    """Add an entry for each node that has none that holds: the nodes that were added.

    Raises:
        OSError: the file cannot be read or written.
    """
    already = cordoned(path)
    added = [node for node in dict.fromkeys(nodes) if node not in already]
    for node in added:
        append_json(Path(path), asdict(Entry(node, round(time.time(), 3), reason, str(run), until)))
    return added


def _entry(line: object) -> Entry | None:
    """A line of the file as an entry, or None: a person's slip must not stop a run."""
    if not isinstance(line, dict) or not isinstance(line.get("node"), str) or not line["node"]:
        return None
    until, at = line.get("until"), line.get("time")
    return Entry(
        node=line["node"],
        time=float(at) if isinstance(at, int | float) else 0.0,
        reason=str(line.get("reason") or "no reason given"),
        run=str(line.get("run") or ""),
        until=float(until) if isinstance(until, int | float) else None,
    )
