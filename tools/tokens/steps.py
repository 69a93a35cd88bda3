"""Which samples a run's steps took and will take, by what the run recorded of itself; the batch size may have changed between attempts."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError
from pretrain.checkpoint.folder import newest_good
from pretrain.config import RunConfig, load_run
from pretrain.report.progress_file import read_progress
from pretrain.run_directory import read_fork
from pretrain.schedule import Schedule


@dataclass(frozen=True)
class Steps:
    """``points``: steps and the samples that were consumed when they were done, ascending, from the beginning (0, 0) to the run's end.

    Where training went back from a spike, a step stands twice, also with the samples that were passed over then.

    ``batches``: the batch sizes that the run has had; ``done``: the last step that is done.
    """

    points: list[tuple[int, int]]
    batches: set[int]
    done: int

    @property
    def seen(self) -> int:
        """The first sample that no step has taken so far."""
        return dict(self.points)[self.done]

    @property
    def end(self) -> int:
        """The first sample that the run will not take."""
        return self.points[-1][1]

    def samples(self, step: int) -> range:
        """The samples of a step, from 1 on. Raises ConfigError where the run has no such step, or does not say which samples it took."""
        last = self.points[-1][0]
        if not 1 <= step <= last:
            raise ConfigError(f"--step {step}: the run's steps are 1 to {last}")
        at = bisect_left(self.points, (step, 0))
        (before, first), (after, end) = self.points[at - 1 : at + 1]
        batch = self._batch(at)
        if batch is None:
            between = f"the batch size changed between steps {before} and {after}, and metrics.jsonl does not say at which"
            raise ConfigError(f"--step {step}: {between}; the samples are among {first} to {end - 1} (--sample)")
        first += (step - before - 1) * batch
        return range(first, first + batch)

    def of(self, sample: int) -> int | None:
        """The step that takes a sample, None where the run does not say."""
        at = bisect_right(self.points, sample, key=lambda point: point[1])
        batch = self._batch(at)
        return batch and self.points[at - 1][0] + (sample - self.points[at - 1][1]) // batch + 1

    def _batch(self, at: int) -> int | None:
        (before, first), (after, end) = self.points[at - 1 : at + 1]
        if after == before:  # passed over
            return None
        batch, rest = divmod(end - first, after - before)
        return batch if after - before == 1 or (not rest and batch in self.batches) else None


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says: configuration, steps, samples its order was drawn for, the key of its data (None: no checkpoint)."""

    config: RunConfig
    steps: Steps
    order_samples: int
    contents_key: str | None


def read_run(run_dir: Path) -> RunRecord:
    """What a run recorded. Raises ConfigError where there is no run, or its configuration cannot be read."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir}: no run has begun there (no config.yaml)")
    config = load_run(run_dir / "config.yaml")
    if config.stages:
        raise ConfigError(f"{run_dir} is a run of stages, whose samples are not told yet")
    fork = read_fork(run_dir)
    if fork and fork["order_begin"]:
        raise ConfigError(f"{run_dir} is a fork with other data than its parent's, whose samples are not told yet")
    schedule, length = Schedule.of(config), config.data.seq_length
    points, batches = dict[int, int](), {schedule.batch_samples}
    order, key = schedule.total_samples, None
    checkpoint = newest_good(run_dir / "checkpoints", {})
    if checkpoint:
        points[checkpoint.progress.step] = checkpoint.progress.consumed_samples + checkpoint.progress.passed_over
        batches.add(checkpoint.manifest["config"]["train"]["global_batch_size"])
        order, key = max(order, checkpoint.progress.order_samples), checkpoint.manifest["data"]
    progress = read_progress(run_dir)
    if progress:
        points[progress["step"]] = progress["consumed_tokens"] // length
    told, jumps = _steps_told(run_dir), dict[int, int]()
    points.update((step, tokens // length + passed_over) for step, tokens, passed_over in told)
    for (step, tokens, before), (_, _, after) in itertools.pairwise(told):
        if after > before:
            jumps[step] = tokens // length + after
    for attempt in _lines(run_dir / "attempts.jsonl"):
        batches.update(attempt.get("changed", {}).get("train.global_batch_size", ()))
    line = [(0, 0)]
    for point in sorted(points.items()):
        if point[0] > line[-1][0] and point[1] > line[-1][1]:
            line.append(point)
        if point[0] in jumps:
            line.append((point[0], jumps[point[0]]))
    done, consumed = line[-1]
    if schedule.steps > done:
        line.append((schedule.steps, consumed + (schedule.steps - done) * schedule.batch_samples))
    return RunRecord(config, Steps(line, batches, done), order, key)


def _steps_told(run_dir: Path) -> list[tuple[int, int, int]]:
    """(step, tokens consumed, samples passed over) of metrics.jsonl; what began at an earlier checkpoint takes back what came after it."""
    told: list[tuple[int, int, int]] = []
    for record in _lines(run_dir / "metrics.jsonl"):
        if "consumed_tokens" in record:
            while told and told[-1][0] >= record["step"]:
                told.pop()
            told.append((record["step"], record["consumed_tokens"], record.get("passed_over", 0)))
    return told


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; one that a kill cut off is none."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
