"""What a run of ``pretrain`` left behind, read from its metrics.jsonl and its checkpoints folder. Reads; draws and judges nothing."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.demo.shell import DemoError


@dataclass(frozen=True)
class History:
    """The steps and validations of one run, each step once (the last line of a step counts), in order."""

    steps: tuple[dict[str, Any], ...]
    validations: tuple[tuple[int, float], ...]

    @classmethod
    def read(cls, run: Path) -> History:
        """From a run directory; a line that is being written is left out."""
        steps: dict[int, dict[str, Any]] = {}
        validations: dict[int, float] = {}
        file = run / "metrics.jsonl"
        for line in file.read_text().splitlines() if file.is_file() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if "valid_loss" in entry:
                validations[entry["step"]] = entry["valid_loss"]
            elif "loss" in entry:
                steps[entry["step"]] = entry
        return cls(tuple(steps[step] for step in sorted(steps)), tuple(sorted(validations.items())))

    @property
    def last_step(self) -> int:
        """0 before the first."""
        return self.steps[-1]["step"] if self.steps else 0

    def losses(self) -> dict[int, float]:
        """Step -> training loss, nats a token."""
        return {entry["step"]: entry["loss"] for entry in self.steps}

    def part(self, after: int = 0, up_to: int | None = None) -> History:
        """Its steps ``after`` < step <= ``up_to``, with all validations."""
        end = self.last_step if up_to is None else up_to
        return History(tuple(entry for entry in self.steps if after < entry["step"] <= end), self.validations)

    def tokens_per_second(self) -> float:
        """Median over the steps."""
        return statistics.median(entry["tokens_per_second"] for entry in self.steps)

    def peak_memory_bytes(self) -> int:
        """Largest over steps and ranks."""
        return max(entry["peak_memory_bytes"] for entry in self.steps)


def checkpoint_step(run: Path) -> int:
    """The step of a run's newest checkpoint.

    Raises:
        DemoError: the run has none.
    """
    latest = run / "checkpoints" / "latest"
    if not latest.is_file():
        raise DemoError(f"{run}: no checkpoint there, the file checkpoints/latest is missing")
    return int(latest.read_text().strip().removeprefix("step_"))


def largest_difference(ours: dict[int, float], theirs: dict[int, float]) -> tuple[int, float]:
    """(number of steps in both, largest relative difference of their losses).

    Raises:
        DemoError: they have no step in common.
    """
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise DemoError("the two runs have no step in common, so there is nothing to compare")
    return len(shared), max(abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in shared)
