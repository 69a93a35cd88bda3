"""Callbacks that write what the loop tells: console, JSON lines, TensorBoard, Weights & Biases. The loop knows none by name.

They exist on rank 0 alone.
"""

from __future__ import annotations

import logging
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from fem_common.config import plain
from fem_common.errors import ConfigError
from fem_common.files import append_json_line, write_whole
from fem_common.text import count, one_line
from fem_megatron.megatron import platform
from pretrain.config import RunConfig
from pretrain.report.metrics import StepRecord

Say = Callable[[str], None]


class Callback:
    """What the loop tells; who does not care about something leaves it out."""

    def on_restart(self, step: int) -> None:
        """Training goes on after ``step``: at the start, after a resume and after a rewind. Records of later steps are void."""

    def on_step(self, record: StepRecord) -> None:
        """After every optimizer step."""

    def on_eval(self, step: int, values: dict[str, float]) -> None:
        """After a validation."""

    def on_values(self, step: int, values: dict[str, float]) -> None:
        """After a step that was looked at closely: ``diagnostics/layer_03/mixer/step_norm``, ``ranks/slowest_ratio`` -> value.

        ``evaluation/ARC-C``, of an evaluation beside training, comes when later steps have been told.
        """

    def on_message(self, text: str) -> None:
        """Something a person should know."""

    def on_alert(self, title: str, text: str) -> None:
        """A reason to look at the run soon: a spike, a failed save, the error that ends training. It is printed in any case."""

    def on_end(self) -> None:
        """The loop is over, whatever ended it."""


Watch = Callable[[int], AbstractContextManager[dict[str, float]]]
"""What the loop puts around a step, given its number, on every rank: when it ends its dictionary has, on rank 0, what `on_values` tells."""


def alert(callbacks: Iterable[Callback], title: str, text: str) -> None:
    """Call every callback's `Callback.on_alert`."""
    for callback in callbacks:
        callback.on_alert(title, text)


class Console(Callback):
    """A line every log interval."""

    def __init__(self, interval: int, total_steps: int) -> None:
        self.interval, self.total_steps = interval, total_steps

    def on_step(self, record: StepRecord) -> None:
        for handler in logging.getLogger("kernels").handlers:
            handler.flush()
        if record.step % self.interval and record.step != self.total_steps and not record.skipped:
            return
        mfu = f"  MFU {record.mfu:.1%}" if record.mfu is not None else ""
        mfu += f" (dense {record.dense_mfu:.1%})" if record.dense_mfu is not None else ""
        dense = (
            f" (dense {record.dense_tflops_per_device:.3g})"
            if record.dense_tflops_per_device is not None
            else ""
        )
        note = "  SPIKE" if math.isfinite(record.grad_norm) else "  NOT FINITE"
        note = f"{note}, step skipped" if record.skipped else ""
        print(
            f"step {record.step:>{len(str(self.total_steps))}}/{self.total_steps}  tokens {count(record.consumed_tokens)}"
            f"  loss {record.loss:.4f}  lr {record.lr:.2e}  grad norm {record.grad_norm:.3f}"
            f"  {count(record.tokens_per_second)} tok/s  {record.tflops_per_device:.3g} TFLOP/s{dense}{mfu}"
            f"  peak {record.peak_memory_bytes / 2**30:.2f} GiB  ETA {_duration(record.eta_seconds)}{note}",
            flush=True,
        )

    def on_eval(self, step: int, values: dict[str, float]) -> None:
        print(
            f"step {step}  " + "  ".join(f"{name} {value:.4f}" for name, value in values.items()),
            flush=True,
        )

    def on_message(self, text: str) -> None:
        print(text, flush=True)


class JsonLines(Callback):
    """Every step and validation, one JSON object a line, in ``metrics.jsonl``. After a resume the last line of a step counts.

    A number that is not finite is null.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "metrics.jsonl"

    def on_step(self, record: StepRecord) -> None:
        append_json_line(self.file, record.as_dict())

    def on_eval(self, step: int, values: dict[str, float]) -> None:
        append_json_line(self.file, {"step": step, **values})

    on_values = on_eval

    def on_message(self, text: str) -> None:
        append_json_line(self.file, {"message": text})


class TensorBoard(Callback):
    """Scalars over steps, each step once: TensorBoard drops what was written of later steps before a restart."""

    def __init__(self, folder: Path, interval: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer, self.interval = SummaryWriter(str(folder / "tensorboard")), interval

    def on_restart(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # What SummaryWriter(purge_step=...) writes, which a rewind needs in the middle of a file.
        self.writer._get_file_writer().add_event(
            Event(session_log=SessionLog(status=SessionLog.START)), step + 1
        )

    def on_step(self, record: StepRecord) -> None:
        if record.step % self.interval == 0:
            for name, value in _scalars(record).items():
                self.writer.add_scalar(name, value, record.step)

    def on_eval(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    on_values = on_eval

    def on_message(self, text: str) -> None:
        self.writer.add_text("message", text)

    def on_end(self) -> None:
        self.writer.close()


class Wandb(Callback):
    """Weights & Biases. The x axis is the metric ``step``: of a step that a resume or a rewind repeats, both values are kept."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Raises ConfigError where the credentials or the settings are not valid."""
        import wandb

        settings, id_file = config.log.wandb, folder / "wandb_id"
        if not id_file.exists():  # one id a run directory: a resumed run continues the same curves
            write_whole(id_file, uuid.uuid4().hex[:8])
        try:
            self.run = wandb.init(
                entity=settings.entity,
                project=settings.project,
                group=settings.group,
                job_type=settings.job_type,
                tags=settings.tags or None,
                name=config.name,
                dir=str(folder),
                config=plain(config),
                mode=_wandb_mode(),  # type: ignore[arg-type]
                id=id_file.read_text(),
                resume="allow",
            )
        except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
            raise ConfigError(f"log.wandb: {one_line(str(error))}") from None
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        self.interval = config.log.interval
        if self.run.offline:
            print(
                f"Weights & Biases: offline; upload with: wandb sync {folder / 'wandb' / 'offline-run-*'}",
                flush=True,
            )
        elif not self.run.disabled:
            print(f"Weights & Biases: online, {self.run.url}", flush=True)

    def on_step(self, record: StepRecord) -> None:
        if record.step % self.interval == 0:
            self.on_eval(record.step, _scalars(record))

    def on_eval(self, step: int, values: dict[str, float]) -> None:
        self.run.log({"step": step, **values})

    on_values = on_eval

    def on_alert(self, title: str, text: str) -> None:
        self.run.alert(title, text, "WARN")

    def on_end(self) -> None:
        self.run.finish()


def make_callbacks(config: RunConfig, folder: Path, total_steps: int) -> list[Callback]:
    """The callbacks that the configuration asks for; console and JSON lines always."""
    callbacks: list[Callback] = [Console(config.log.interval, total_steps), JsonLines(folder)]
    if config.log.tensorboard:
        callbacks.append(TensorBoard(folder, config.log.interval))
    if config.log.wandb.enabled:
        callbacks.append(Wandb(config, folder))
    return callbacks


@contextmanager
def kernels_told(say: Say) -> Iterator[None]:
    """Passes on what the kernels log meanwhile: which implementation of an operation runs, and why not a faster one.

    Without a GPU the reasons are all the same: the choices of a step are one line, without them, each implementation named once.
    """
    chosen: dict[str, list[str]] = {}

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno > logging.INFO or platform.has_cuda():
                say(f"kernels: {self.format(record)}")
            else:
                operation, _, choice = self.format(record).partition(" (")[0].partition(": ")
                chosen.setdefault(choice, []).append(operation)

        def flush(self) -> None:
            if chosen:
                said = [
                    f"{choice} for {', '.join(operations)}" for choice, operations in chosen.items()
                ]
                say(f"kernels: {'; '.join(said)}")
                chosen.clear()

    logger = logging.getLogger("kernels")
    handlers, level = logger.handlers, logger.level
    logger.handlers = [Told()]
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers[0].flush()
        logger.handlers = handlers
        logger.setLevel(level)


def _scalars(record: StepRecord) -> dict[str, Any]:
    values = record.as_dict()
    return {
        name: value
        for name, value in values.items()
        if name not in ("step", "skipped", "passed_over") and value is not None
    }


def _wandb_mode() -> str:
    """The mode that WANDB_MODE or a settings file of wandb names; else online where wandb has credentials for its server, or offline."""
    import wandb

    mode = str(wandb.setup().settings.mode)
    if mode != "online" or os.environ.get("WANDB_MODE"):
        return mode
    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
