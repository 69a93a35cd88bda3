"""Read the history of a run from its run directory: steps, validations and attempts."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS, ATTEMPTS = "metrics.jsonl", "attempts.jsonl"


@dataclass(frozen=True)
class History:
    """Logged steps and validations of one run, in order.

    steps: entries of metrics.jsonl; the last entry of each step.
    validations: (step, validation loss in nats per token).
    returns: (last step, earlier step) for each time when training returned to an earlier
        checkpoint: after a process was killed, or after a spike.
    resumes: the step at which each attempt after the first one continued, in order.
    """

    steps: tuple[dict[str, Any], ...]
    validations: tuple[tuple[int, float], ...]
    returns: tuple[tuple[int, int], ...] = ()
    resumes: tuple[int, ...] = ()

    @classmethod
    def read(cls, run: Path) -> History:
        """Read the history of a run directory; an incomplete line is left out."""
        steps: dict[int, dict[str, Any]] = {}
        validations: dict[int, float] = {}
        returns = []
        last = 0
        for entry in json_lines(run / METRICS):
            if "valid_loss" in entry:
                validations[entry["step"]] = _number(entry["valid_loss"])
            elif "loss" in entry:
                step = entry["step"]
                if step <= last:
                    returns.append((last, step - 1))
                last = step
                steps[step] = entry | {"loss": _number(entry["loss"])}
        attempts = [entry.get("step") for entry in json_lines(run / ATTEMPTS)]
        return cls(
            tuple(steps[step] for step in sorted(steps)),
            tuple(sorted(validations.items())),
            tuple(returns),
            tuple(step for step in attempts[1:] if step is not None),
        )

    @property
    def last_step(self) -> int:
        """Number of the last step; 0 before the first."""
        return self.steps[-1]["step"] if self.steps else 0

    def losses(self) -> dict[int, float]:
        """Return step -> training loss, in nats per token."""
        return {entry["step"]: entry["loss"] for entry in self.steps}

    def part(self, after: int) -> History:
        """Return the steps after ``after``, with all validations."""
        kept = tuple(entry for entry in self.steps if entry["step"] > after)
        return History(kept, self.validations)

    def tokens_per_second(self) -> float:
        """Return the median of the tokens per second over the steps."""
        return statistics.median(entry["tokens_per_second"] for entry in self.steps)


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file, none if it does not exist.

    A line that is not a JSON object is skipped: an attempt that is killed while it writes leaves an
    incomplete line.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def _number(value: float | None) -> float:
    """Return a loss of metrics.jsonl as a float; null, which means not finite, becomes NaN."""
    return math.nan if value is None else value
