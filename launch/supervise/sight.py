"""launch: what a training run's own files say of it: progress.json, metrics.jsonl and checkpoints/. Standard library alone."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.layout import read_json

_CHECKPOINT = re.compile(r"step_(\d{8,})$")
_TAIL = 1 << 14  # bytes; more than two lines of metrics.jsonl


@dataclass(frozen=True)
class Sight:
    """A look at a run's files."""

    state: str | None  # starting | running | complete | stopped | failed; None where nothing is known
    step: int | None  # the last whole step
    checkpoint: int | None  # the newest checkpoint's step
    message: str | None
    writer: tuple[Any, ...]  # who wrote progress.json, and when: tells one attempt's words from another's
    metrics: int  # bytes of metrics.jsonl
    said: int | None = None  # the step in progress.json


def look(directory: Path) -> Sight:
    """How the run in a directory stands, by its own files."""
    progress = read(directory / "progress.json") or {}
    metrics = directory / "metrics.jsonl"
    steps = [step for step in (progress.get("step"), _last_step(metrics)) if isinstance(step, int)]
    message = progress.get("message")
    return Sight(
        state=progress.get("state"),
        step=max(steps, default=None),
        checkpoint=newest_checkpoint(directory),
        message=message if isinstance(message, str) else None,
        writer=(progress.get("host"), progress.get("pid"), progress.get("time")),
        metrics=_size(metrics),
        said=progress.get("step") if isinstance(progress.get("step"), int) else None,
    )


def has_stepped(before: Sight, now: Sight) -> bool:
    """Whether a step was done between two looks: lines of steps that an earlier attempt left do not count."""
    ours = now.writer != before.writer and now.said is not None and now.said > (before.checkpoint or 0)
    return ours or now.metrics != before.metrics


def read(path: Path) -> dict[str, Any] | None:
    """A small JSON file's object; None where there is none, or where the file system does not answer for a moment."""
    try:
        value = read_json(path)
    except OSError:
        return None
    return value if isinstance(value, dict) else None


def newest_checkpoint(directory: Path) -> int | None:
    """The step of the newest complete checkpoint, or None."""
    try:
        names = os.listdir(directory / "checkpoints")
    except OSError:
        return None
    return max((int(match[1]) for match in map(_CHECKPOINT.match, names) if match), default=None)


def _last_step(metrics: Path) -> int | None:
    """The step of the last whole line of a metrics file that has one."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, _size(metrics) - _TAIL))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            step = json.loads(line).get("step")
        except (ValueError, AttributeError):
            continue
        if isinstance(step, int):
            return step
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
