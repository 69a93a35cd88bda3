"""Training loop: run steps, validations and saves, and decide when to stop.

It uses engine, data, checkpoints and callbacks only through their interfaces.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fem_common.errors import CommandError
from fem_common.exits import Exit
from fem_megatron.megatron import platform
from pretrain.checkpoint.folder import Progress
from pretrain.checkpoint.manager import Checkpoints
from pretrain.collectives import sum_over_ranks
from pretrain.config import RunConfig
from pretrain.data.datasets import Datasets, batches
from pretrain.data.staging import Staged
from pretrain.engines import Engine, StepTimes
from pretrain.report.loggers import Callback, Watch, alert
from pretrain.report.metrics import Meter, StepRecord
from pretrain.report.profile import Profiler
from pretrain.report.progress_file import ProgressFile
from pretrain.report.stragglers import Stragglers
from pretrain.schedule import Schedule
from pretrain.signals import STOP
from pretrain.spikes import Spikes, carried_over, rewinds_to


class TooManyBadSteps(CommandError):
    """Error: in too many consecutive steps the loss or gradient was non-finite or had a spike."""

    code = Exit.DIVERGED


@dataclass(frozen=True)
class Outcome:
    """Result of the training loop: the last progress, the reason of the end and the last
    checkpoint.
    """

    progress: Progress
    stopped_by: str | None  # a signal's name, or None at the end of the run
    last_checkpoint: Path | None


@dataclass
class Trainer:
    """Training loop that runs from ``progress`` to the end of the schedule, or until a signal."""

    config: RunConfig
    schedule: Schedule
    engine: Engine
    data: Datasets
    checkpoints: Checkpoints
    callbacks: list[Callback]
    meter: Meter
    progress: Progress
    content_keys: dict[str, str]
    watch: Watch
    profiler: Profiler
    stragglers: Stragglers
    progress_file: ProgressFile
    # Returns the data with a training order for the given number of samples, which is longer only
    # if it begins with the present order. All ranks must call it together.
    redraw: Callable[[int], Datasets]
    received: list[int]  # numbers of the stop signals received so far

    def run(self) -> Outcome:
        """Run the training loop and return its outcome.

        A signal received before the loop ends it before the first step. A signal received after the
        last step has no effect.

        Raises:
            TooManyBadSteps: no checkpoint is written in this case, so that every attempt restarts
                from the same checkpoint.
            ConfigError, StorageError: a checkpoint cannot be written.
        """
        if self.progress.passed_over and (short := self._reach_the_end()):
            self._notify(lambda callback: callback.on_message(short))
        stream = self._training()
        self._notify(lambda callback: callback.on_restart(self.progress.step))
        self.meter.restart()
        stopped_by = self._requested_stop(sum_over_ranks(self._extra_numbers()))
        while self.progress.step < self.schedule.steps and stopped_by is None:
            with (
                self.profiler(self.progress.step + 1) as traced,
                self.watch(self.progress.step + 1) as seen,
            ):
                record, sums, spike = self._step(stream)
            self._log_step(record, seen, traced)
            if spike and self._rewound(spike):
                stream, stopped_by = self._training(), self._requested_stop(sums)
                continue
            if self._due(self.config.train.eval_interval):
                self._evaluate()
            stopped_by = self._requested_stop(sums)
            hopeless = self.progress.bad_steps_in_a_row >= self.config.train.max_bad_steps
            due = (
                self._due(self.config.checkpoint.interval)
                or self.progress.step in self.config.checkpoint.keep
            )
            if not hopeless and (due or stopped_by):
                self._save(needed=stopped_by is not None)
            self.checkpoints.complete(blocking=False)
            self._write_progress()
            if hopeless:
                self.checkpoints.close()
                self._write_progress()
                raise TooManyBadSteps(self._hopeless_message(record))
        if stopped_by is None:
            self._save(needed=True)
        self.checkpoints.close()
        if stopped_by is None and self.data.valid is not None:
            self._write_progress()
            self._evaluate()
        self._note_progress()
        done = "complete" if self.schedule.steps >= self.schedule.last_step else "running"
        self.progress_file.write("stopped" if stopped_by else done, signal=stopped_by)
        return Outcome(self.progress, stopped_by, self.checkpoints.last)

    def _step(self, stream: Staged) -> tuple[StepRecord, list[float], str | None]:
        """Run one step and return (record, numbers, spike).

        numbers: the values all-reduced with the loss, which are the stop signals and the peak
        memory of the ranks. spike: description of a spike in this step, or None.
        """
        before = self.progress
        consumed = before.consumed_samples + self.schedule.batch_samples
        spikes, found = Spikes.of(self.config.train), list[str]()

        def unwanted(loss: float, grad_norm: float) -> bool:
            assert spikes is not None
            spike = spikes.found(before.recent, loss, grad_norm)
            found.extend([] if spike is None else [spike])
            return bool(found)

        def extra() -> list[float]:
            # Read ahead while the device computes, unless the next step is timed: its time must
            # include the reading.
            if before.step + 1 < self.schedule.steps and not self.stragglers.due(before.step + 2):
                stream.ahead()
            return self._extra_numbers()

        timed = self.stragglers.due(before.step + 1)
        result = self.engine.train_step(
            stream, consumed, timed=timed, extra=extra, unwanted=unwanted if spikes else None
        )
        recent = before.recent if spikes else ()  # outdated if train.on_spike is set later
        if spikes and not result.skipped:
            recent = spikes.learned(recent, result.loss, result.grad_norm)
        self.progress = replace(
            before,
            step=before.step + 1,
            consumed_samples=consumed,
            skipped_steps=before.skipped_steps + result.skipped,
            bad_steps_in_a_row=before.bad_steps_in_a_row + 1 if result.skipped else 0,
            recent=recent,
        )
        record = StepRecord(
            step=self.progress.step,
            consumed_tokens=consumed * self.schedule.sample_tokens,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            peak_memory_bytes=int(max(result.extra[len(STOP) :])),
            passed_over=before.passed_over,
            mtp_loss=sum(result.mtp) / len(result.mtp) if result.mtp else None,
            **self.meter.measure(self.schedule.last_step - self.progress.step, self._pauses_left()),
        )
        self._note_progress()
        if result.times is not None:
            self._compare_ranks(result.times)
        return record, result.extra, found[0] if found else None

    def _rewound(self, spike: str) -> bool:
        """Handle a spike; return True if training rewound to a checkpoint.

        False means that the step was only skipped. After a rewind, the samples since the checkpoint
        are passed over. Both outcomes are reported. The decision depends only on the steps, so a
        run that is killed before its next checkpoint meets the same spike and decides the same way.
        """
        at, train = self.progress, self.config.train
        times = (
            at.rewound[1] + 1 if at.rewound and at.step <= at.rewound[0] + train.spike_rewind else 1
        )
        last = at.consumed_samples - at.order_begin + at.passed_over - 1
        reason_text = (
            f"a spike: {spike}; its samples are {last + 1 - self.schedule.batch_samples} to "
            f"{last}, its documents: "
        )
        stage = f"{self.config.stages[-1].name}:" if self.config.stages else ""
        of_sample = reason_text + self._lookup_command("--sample", f"{stage}{last}")
        target = (
            rewinds_to(at.step, self.config.checkpoint.interval, train.spike_rewind)
            if train.on_spike == "rewind"
            else 0
        )
        if times > train.max_bad_steps:
            self.checkpoints.close()
            back = (
                f"training has gone back {times - 1} times from about this step: lower "
                "optimizer.lr, or inspect the data"
            )
            raise TooManyBadSteps(f"step {at.step}, {of_sample}; {back}")
        batch_began = max((step for step, _ in at.batch_changes), default=0)
        found = (
            self.checkpoints.rewind(self.engine, target)
            if target > at.begin_step and target >= batch_began
            else None
        )
        if found is None:
            text = f"step {at.step} skipped, {reason_text}{self._lookup_command('--step', at.step)}"
        else:
            kept = found.progress
            passed_over = at.passed_over + at.consumed_samples - kept.consumed_samples
            self.progress = replace(
                kept,
                order_samples=at.order_samples,
                passed_over=passed_over,
                rewound=(at.step, times),
                recent=carried_over(found, self.config),
                batch_changes=at.batch_changes,
            )
            self._write_progress()
            self._notify(lambda callback: callback.on_restart(kept.step))
            text = (
                f"step {at.step}, {of_sample}; back at {found.path}, {passed_over} samples passed "
                "over so far"
            )
            text = "; ".join(filter(None, (text, self._reach_the_end())))
        self._notify(lambda callback: callback.on_message(text))
        alert(self.callbacks, "spike", text)
        self.meter.restart()
        return found is not None

    def _reach_the_end(self) -> str:
        """Extend the data order if samples passed over after spikes make it too short.

        The order is extended only if the longer order begins with the present one. Otherwise the
        last steps read the first samples of the order again. Return a message about this, or "" if
        the order is long enough. All ranks must call it together.
        """
        at = self.progress
        needed = self.schedule.total_samples - at.order_begin + at.passed_over
        if needed > len(self.data.train):
            self.data = self.redraw(needed)
            self.progress = replace(at, order_samples=self.data.train_samples)
        short = needed - len(self.data.train)
        return (
            f"the data order ends {short} samples before the end of the run: the last steps will "
            "read its first samples again" * (short > 0)
        )

    def _compare_ranks(self, times: StepTimes) -> None:
        slowest = self.stragglers.compare(self.progress.step, times)
        values = {"ranks/slowest": float(slowest.rank), "ranks/slowest_ratio": slowest.ratio}
        self._notify(lambda callback: callback.on_values(self.progress.step, values))
        if slowest.ratio > self.stragglers.limit:
            text = f"step {self.progress.step}: {slowest.message(self.stragglers.limit)}"
            self._notify(lambda callback: callback.on_message(text))
        self.meter.restart()

    def _evaluate(self) -> None:
        """Compute and report the mean validation loss, always over the same samples."""
        if self.data.valid is None:
            return
        loss = self.engine.evaluate(
            self._stream(self.data.valid, 0), self.config.train.eval_batches
        )
        self._notify(lambda callback: callback.on_eval(self.progress.step, {"valid_loss": loss}))
        self.meter.restart("validation")

    def _save(self, *, needed: bool) -> None:
        self.checkpoints.save(self.engine, self.progress, self.content_keys, needed=needed)
        self.meter.restart("save")

    def _extra_numbers(self) -> list[float]:
        """Return the numbers that the step's single all-reduce sums in addition to the loss.

        They are one flag per stop signal (1 for the first signal that this rank received), then one
        entry per rank: its peak memory in bytes at this rank's index, 0 elsewhere.
        """
        peaks = [0.0] * torch.distributed.get_world_size()
        peaks[torch.distributed.get_rank()] = float(platform.peak_memory_bytes())
        return [*(float(self.received[:1] == [number]) for number in STOP), *peaks]

    def _requested_stop(self, sums: list[float]) -> str | None:
        """Return the name of a stop signal that any rank has received, or None.

        sums: this step's additional numbers, summed over the ranks; the first are the signal flags.
        After the last step the result is None.
        """
        came = [number for number, count in zip(STOP, sums, strict=False) if count]
        return max(came).name if came and self.progress.step < self.schedule.steps else None

    def _note_progress(self) -> None:
        self.progress_file.at(
            self.progress.step, self.progress.consumed_samples, self.checkpoints.last
        )

    def _write_progress(self) -> None:
        """Write "running" to progress.json if the state or the last checkpoint changed."""
        self._note_progress()
        if self.progress_file.written != ("running", self.checkpoints.last):
            self.progress_file.write("running")

    def _training(self) -> Staged:
        at = self.progress
        return self._stream(self.data.train, at.consumed_samples - at.order_begin + at.passed_over)

    def _stream(self, dataset: Any, first_sample: int) -> Staged:
        size, device = self.config.train.micro_batch_size, platform.device()
        return Staged(
            batches(
                dataset,
                first_sample,
                size,
                device,
                self.data.reader,
                self.data.ends,
                self.config.model.mtp_depth,
            )
        )

    def _due(self, interval: int) -> bool:
        return (
            bool(interval)
            and self.progress.step % interval == 0
            and self.progress.step < self.schedule.steps
        )

    def _pauses_left(self) -> dict[str, int]:
        """Return the number of remaining saves ("save") and validations ("validation").

        Both counts include the pause after the last step. The step just finished is included.
        """
        intervals = {"save": self.config.checkpoint.interval}
        if self.data.valid is not None:
            intervals["validation"] = self.config.train.eval_interval
        before, last = self.progress.step - 1, self.schedule.steps - 1
        return {
            kind: 1 + (last // every - before // every if every else 0)
            for kind, every in intervals.items()
        }

    def _log_step(self, record: StepRecord, seen: dict[str, float], traced: list[str]) -> None:
        self._notify(lambda callback: callback.on_step(record))
        if seen:
            self._notify(lambda callback: callback.on_values(record.step, seen))
        for callback in self.callbacks:
            for text in traced:
                callback.on_message(text)
        if seen or traced:
            self.meter.restart()

    def _notify(self, what: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            what(callback)

    def _hopeless_message(self, record: StepRecord) -> str:
        bad = self.progress.bad_steps_in_a_row
        spike = math.isfinite(record.grad_norm)
        what = (
            "gradient norm was not finite"
            if math.isfinite(record.loss)
            else "loss was over no token, or not finite"
        )
        what = "loss or the gradient norm was a spike, or not finite," if spike else what
        good, last = self.checkpoints.newest_before_bad_steps(), self.checkpoints.last
        back = (
            f"go back to checkpoint {good}, the newest from before them"
            if good
            else "no checkpoint is from before them: start again"
        )
        if last is not None and last != good:
            there = ", in checkpoint.mirror too" if self.config.checkpoint.mirror else ""
            back += f" (remove the later ones, up to {last}{there})"
        first = max(record.step - bad, self.progress.begin_step) + 1
        level = (
            "; if the loss is expected to stay at this level, resume once with train.on_spike=none"
            if spike
            else ""
        )
        return (
            f"the {what} for {bad} steps in a row (up to step {record.step}); {back}, with a "
            f"lower optimizer.lr, or inspect the data from step {first} on: "
            f"{self._lookup_command('--step', first)}{level}"
        )

    def _lookup_command(self, *which: object) -> str:
        """Return the shell command that prints the documents of a step or sample."""
        return shlex.join(
            ["python", "-m", "tools.tokens", str(self.checkpoints.folder.parent), *map(str, which)]
        )
