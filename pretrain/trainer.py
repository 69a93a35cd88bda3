"""The loop. It knows an engine, data, checkpoints and callbacks by their interfaces, and when to stop."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fem_megatron import platform
from pretrain.checkpoint import Checkpoints, Progress
from pretrain.config import RunConfig
from pretrain.data import Datasets, batches
from pretrain.engines import Engine
from pretrain.loggers import Callback, Watch
from pretrain.metrics import Meter, StepRecord, peak_memory_over_ranks
from pretrain.schedule import Schedule


class TooManyBadSteps(RuntimeError):
    """The loss or the gradient was not finite for too many steps in a row."""


@dataclass(frozen=True)
class Outcome:
    """How the loop ended."""

    progress: Progress
    stopped_by: str | None  # a signal's name, or None at the end of the run
    last_checkpoint: Path | None


@dataclass
class Trainer:
    """Trains from ``progress`` to the end of the schedule, or to a signal."""

    config: RunConfig
    schedule: Schedule
    engine: Engine
    data: Datasets
    checkpoints: Checkpoints
    callbacks: list[Callback]
    meter: Meter
    progress: Progress
    content_key: str
    watch: Watch

    def run(self) -> Outcome:
        """The whole loop.

        Raises:
            TooManyBadSteps: after a checkpoint was written.
        """
        stream = self._stream(self.data.train, self.progress.consumed_samples)
        saved: Path | None = None
        with _signals() as received:
            self.meter.restart()
            while self.progress.step < self.schedule.steps:
                with self.watch(self.progress.step + 1) as seen:
                    record = self._step(stream)
                self._tell_step(record, seen)
                if self._due(self.config.train.eval_interval):
                    self._evaluate()
                stopped_by = _agree(received)
                hopeless = self.progress.bad_steps_in_a_row >= self.config.train.max_bad_steps
                if self._due(self.config.checkpoint.interval) or stopped_by or hopeless:
                    saved = self._save()
                self.checkpoints.complete(blocking=False)
                if hopeless:
                    self.checkpoints.close()
                    raise TooManyBadSteps(self._hopeless_message(record, saved))
                if stopped_by:
                    self.checkpoints.close()
                    return Outcome(self.progress, stopped_by, saved)
            saved = self._save()
            self.checkpoints.close()
            if self.data.valid is not None:
                self._evaluate()
        return Outcome(self.progress, None, saved)

    def _step(self, stream: Iterator[Any]) -> StepRecord:
        before = self.progress
        consumed = before.consumed_samples + self.schedule.batch_samples
        result = self.engine.train_step(stream, consumed)
        self.progress = replace(
            before,
            step=before.step + 1,
            consumed_samples=consumed,
            skipped_steps=before.skipped_steps + result.skipped,
            bad_steps_in_a_row=before.bad_steps_in_a_row + 1 if result.skipped else 0,
        )
        return StepRecord(
            step=self.progress.step,
            consumed_tokens=consumed * self.schedule.sample_tokens,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            peak_memory_bytes=peak_memory_over_ranks(),
            **self.meter.measure(self.schedule.steps - self.progress.step),
        )

    def _evaluate(self) -> None:
        """Mean validation loss, always over the same samples."""
        if self.data.valid is None:
            return
        loss = self.engine.evaluate(self._stream(self.data.valid, 0), self.config.train.eval_batches)
        self._tell(lambda callback: callback.on_eval(self.progress.step, {"valid_loss": loss}))
        self.meter.restart()

    def _save(self) -> Path:
        path = self.checkpoints.save(self.engine, self.progress, self.content_key)
        self.meter.restart()
        return path

    def _stream(self, dataset: Any, first_sample: int) -> Iterator[Any]:
        return batches(dataset, first_sample, self.config.train.micro_batch_size, platform.device())

    def _due(self, interval: int) -> bool:
        return bool(interval) and self.progress.step % interval == 0 and self.progress.step < self.schedule.steps

    def _tell_step(self, record: StepRecord, seen: dict[str, float]) -> None:
        self._tell(lambda callback: callback.on_step(record))
        if seen:
            self._tell(lambda callback: callback.on_layers(record.step, seen))
            self.meter.restart()

    def _tell(self, what: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            what(callback)

    def _hopeless_message(self, record: StepRecord, saved: Path | None) -> str:
        what = "loss" if not math.isfinite(record.loss) else "gradient norm"
        return (
            f"the {what} was not finite for {self.progress.bad_steps_in_a_row} steps in a row (up to step {record.step}); "
            f"checkpoint {saved}; lower optimizer.lr, or look at the data from sample {self.progress.consumed_samples} on"
        )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGTERM and SIGUSR1 are noted, not obeyed: the step ends first. They may come twice."""
    received: list[int] = []
    handlers = {number: signal.signal(number, lambda n, _: received.append(n)) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _agree(received: list[int]) -> str | None:
    """The signal that any rank received, or None; every rank gets the same answer."""
    flag = torch.tensor([received[0] if received else 0], device=platform.device())
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    number = int(flag.item())
    return signal.Signals(number).name if number else None
