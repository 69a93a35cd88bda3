"""Samples that each step of a run reads, computed from the run's records.

The batch size may have changed between attempts. An attempt is one start of the run.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fem_common.errors import ConfigError
from pretrain.checkpoint.folder import Found, Progress, newest_good
from pretrain.config import load_run
from pretrain.report.history import ATTEMPTS, METRICS, json_lines
from pretrain.report.progress_file import read_progress
from pretrain.run_directory import read_fork
from pretrain.training_stages import Part, parts_of


@dataclass(frozen=True)
class Steps:
    """Mapping between an order's samples and the steps that read them.

    points: (step, number of the order's samples that were consumed at its end), ascending, from
        the order's beginning to its end.
    batches: all batch sizes that the run has had, in samples.
    done: the last completed step.

    If training returned to an earlier checkpoint after a loss spike, a step occurs twice in
    ``points``; the second entry includes the samples that were skipped.
    """

    points: list[tuple[int, int]]
    batches: set[int]
    done: int

    @property
    def seen(self) -> int:
        """Number of samples that were read, which is the first sample that no step has read yet."""
        return dict(self.points)[self.done]

    @property
    def end(self) -> int:
        """Number of the order's samples that the run reads until its end."""
        return self.points[-1][1]

    @property
    def numbers(self) -> range:
        """Numbers of the steps that read the order."""
        return range(self.points[0][0] + 1, self.points[-1][0] + 1)

    def samples(self, step: int) -> range:
        """Return the positions of the samples that a step reads in the order.

        Raises ConfigError if the run's records do not determine them.
        """
        at = bisect_left(self.points, (step, 0))
        (before, first), (after, end) = self.points[at - 1 : at + 1]
        batch = self._batch(at)
        if batch is None:
            between = (
                f"the batch size changed between steps {before} and {after}, "
                "and metrics.jsonl does not contain the exact step"
            )
            raise ConfigError(
                f"--step {step}: {between}; the samples are among {first} to {end - 1} (--sample)"
            )
        first += (step - before - 1) * batch
        return range(first, first + batch)

    def of(self, sample: int) -> int | None:
        """Return the step that reads a sample, or None if the run's records do not determine it."""
        at = bisect_right(self.points, sample, key=lambda point: point[1])
        batch = self._batch(at)
        if not batch:
            return batch
        step, first = self.points[at - 1]
        return step + (sample - first) // batch + 1

    def _batch(self, at: int) -> int | None:
        (before, first), (after, end) = self.points[at - 1 : at + 1]
        if after == before:  # skipped samples
            return None
        batch, rest = divmod(end - first, after - before)
        if after - before == 1:
            return batch
        return batch if not rest and batch in self.batches else None


@dataclass(frozen=True)
class RunRecord:
    """Records of a run about one order of samples.

    A run has one order for each stage, or a single one without stages.

    parts: stages up to and including the stage of this order; without stages, the run.
    order_samples: number of samples of the order.
    contents_key: identifier of the data; None without a checkpoint.
    """

    parts: list[Part]
    steps: Steps
    order_samples: int
    contents_key: str | None

    @property
    def name(self) -> str:
        """Name of the stage; empty without stages."""
        return self.parts[-1].name


def read_run(run_dir: Path) -> list[RunRecord]:
    """Return the records of a run, one for each stage, in the order of the stages.

    Raises:
        ConfigError: the folder contains no run, its configuration cannot be read, or no record
        contains the beginning of its order.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir}: not the directory of a run (no config.yaml)")
    config = load_run(run_dir / "config.yaml")
    checkpoint = newest_good(run_dir / "checkpoints", {})
    parts, lines = parts_of(config), _recorded_steps(run_dir)
    begin = _beginning(run_dir, parts[0], checkpoint, lines)
    records = list[RunRecord]()
    for number, part in enumerate(parts):
        if number:
            before = parts[number - 1]
            done = replace(
                begin, step=before.end_step, consumed_samples=begin.order_begin + before.samples
            )
            begin = part.entered(done, before.config.data.seq_length, "")
        own = checkpoint
        if checkpoint and part.name and checkpoint.progress.stage != number:
            own = None
        records.append(_record(run_dir, parts[: number + 1], begin, own, lines))
    return records


def _beginning(
    run_dir: Path, part: Part, checkpoint: Found | None, lines: Sequence[tuple[int, int, int]]
) -> Progress:
    """Return the progress at which the run's first order of samples begins.

    This is step 0. A run that was forked from another run with a new order begins at the fork's
    first step.
    """
    fork = read_fork(run_dir)
    if not fork or not fork["order_begin"]:
        return Progress(0, 0, 0)
    if checkpoint:
        consumed = checkpoint.progress.begin_samples
    elif lines:
        consumed = lines[0][1] // part.config.data.seq_length - part.config.train.global_batch_size
    else:
        raise ConfigError(f"{run_dir}: the fork has not begun to train")
    begin = Progress(fork["step"], consumed, 0, begin_step=fork["step"], begin_samples=consumed)
    return replace(
        begin, order_begin=fork["order_begin"], batch_changes=((fork["step"], consumed),)
    )


def _record(
    run_dir: Path,
    parts: list[Part],
    begin: Progress,
    checkpoint: Found | None,
    all_signalled: Sequence[tuple[int, int, int]],
) -> RunRecord:
    """Return the record of the last stage's order.

    parts: stages up to and including that stage.
    begin: progress at which the order begins.
    checkpoint: the newest checkpoint; None if it belongs to another stage.

    The last argument contains (step, tokens consumed, samples skipped) for each step of
    metrics.jsonl.
    """
    part = parts[-1]
    schedule = part.schedule(part.resumed(checkpoint.progress) if checkpoint else begin)
    length = schedule.sample_tokens
    last = schedule.steps
    before = begin.order_begin
    points: dict[int, int] = {}  # step -> samples of the order up to this step
    batches = {schedule.batch_samples}
    order, key = schedule.total_samples - before, None
    if checkpoint:
        at = checkpoint.progress
        if not at.passed_over:
            points.update((step, samples - before) for step, samples in at.batch_changes)
        points[at.step] = at.consumed_samples + at.passed_over - before
        batches.add(checkpoint.manifest["config"]["train"]["global_batch_size"])
        order = max(order, at.order_samples)
        key = checkpoint.manifest["data"]
    progress = read_progress(run_dir)
    if progress and "consumed_tokens" in progress:
        step = progress["step"]
        if not part.name or begin.step < step < last:
            points[step] = progress["consumed_tokens"] // length - before
    lines = [line for line in all_signalled if not part.name or begin.step < line[0] <= last]
    jumps: dict[int, int] = {}  # step -> samples of the order after those skipped at this step
    points.update(
        (step, tokens // length - before + passed_over) for step, tokens, passed_over in lines
    )
    for (step, tokens, was), (_, _, now) in itertools.pairwise(lines):
        if now > was:
            jumps[step] = tokens // length - before + now
    for attempt in json_lines(run_dir / ATTEMPTS):
        changed = attempt.get("changed")
        values = changed.get("train.global_batch_size") if isinstance(changed, dict) else None
        if isinstance(values, list):
            batches.update(value for value in values if type(value) is int and value > 0)
    line = [(begin.step, begin.consumed_samples - before)]
    for step, samples in sorted(points.items()):
        last_step, last_samples = line[-1]
        if step > last_step and samples > last_samples:
            line.append((step, samples))
        if step in jumps:
            line.append((step, jumps[step]))
    done, consumed = line[-1]
    if last > done:
        line.append((last, consumed + (last - done) * schedule.batch_samples))
    return RunRecord(parts, Steps(line, batches, done), order, key)


def _recorded_steps(run_dir: Path) -> list[tuple[int, int, int]]:
    """Return (step, tokens consumed, samples skipped) for each step of metrics.jsonl.

    An attempt that resumed at an earlier checkpoint replaces the entries of the later steps.
    """
    lines: list[tuple[int, int, int]] = []
    for record in json_lines(run_dir / METRICS):
        if all(type(record.get(key)) is int for key in ("step", "consumed_tokens")):
            while lines and lines[-1][0] >= record["step"]:
                lines.pop()
            lines.append((record["step"], record["consumed_tokens"], record.get("passed_over", 0)))
    return lines
