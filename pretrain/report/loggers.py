"""Loggers: callbacks that write to the console, JSON lines, TensorBoard and Weights & Biases.

They exist only on rank 0. The training loop uses them only through the interface `Callback`.
"""

from __future__ import annotations

import logging
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fem_common.config import plain
from fem_common.errors import ConfigError
from fem_common.files import append_json_line, write_atomically
from fem_common.progress import Progress, print_above
from fem_common.text import count, one_line
from fem_megatron.megatron import platform
from pretrain.config import RunConfig
from pretrain.report.history import METRICS
from pretrain.report.metrics import StepRecord

Log = Callable[[str], None]


class Callback:
    """Interface of loggers: one method per event of the training loop.

    The methods of this class are empty.
    """

    def on_restart(self, step: int) -> None:
        """Called when training continues after ``step``: at the start, a resume or a rewind.

        Records of later steps become invalid.
        """

    def on_step(self, record: StepRecord) -> None:
        """Called after every optimizer step."""

    def on_eval(self, step: int, values: dict[str, float]) -> None:
        """Called after a validation."""

    def on_values(self, step: int, values: dict[str, float]) -> None:
        """Called with further values of a step.

        Names are, for example, ``diagnostics/layer_03/mixer/step_norm`` or ``ranks/slowest_ratio``.
        Values of an evaluation during training, for example ``evaluation/ARC-C``, arrive after the
        records of later steps.
        """

    def on_message(self, text: str) -> None:
        """Called with a message for the user."""

    def on_alert(self, title: str, text: str) -> None:
        """Called with a reason to inspect the run soon.

        Examples are a spike, a failed save, or the error that ends training. The text is also
        printed separately.
        """

    def on_end(self) -> None:
        """Called when the loop has ended for any reason."""


Watch = Callable[[int], AbstractContextManager[dict[str, float]]]
"""Context manager around a step on every rank, given the number of the step.

When it ends, its dictionary contains on rank 0 the values for `on_values`."""


def alert(callbacks: Iterable[Callback], title: str, text: str) -> None:
    """Call every callback's `Callback.on_alert`."""
    for callback in callbacks:
        callback.on_alert(title, text)


@dataclass
class Console(Callback):
    """Logger that prints a line for the first step, every log interval and the last step.

    On a terminal, a live line below them shows every step.
    """

    interval: int
    total_steps: int
    printed: bool = False  # True after the first step of this attempt

    def __post_init__(self) -> None:
        self.live = Progress(self.total_steps, "steps")

    def on_step(self, record: StepRecord) -> None:
        if self.live.live and self.live.due:
            self.live.show(
                f"step {record.step}/{self.total_steps}  loss {record.loss:.4f}  "
                f"{count(record.tokens_per_second)} tok/s  ETA {_duration(record.eta_seconds)}"
            )
        due = record.step % self.interval == 0 or record.step == self.total_steps
        if self.printed and not due and not record.skipped:
            return
        self.printed = True
        note = "  SPIKE" if math.isfinite(record.grad_norm) else "  NOT FINITE"
        note = f"{note}, step skipped" if record.skipped else ""
        print_above(
            f"step {record.step:>{len(str(self.total_steps))}}/{self.total_steps}  tokens "
            f"{count(record.consumed_tokens)}  loss {record.loss:.4f}{_mtp_loss(record)}  lr "
            f"{record.lr:.2e}  grad norm {record.grad_norm:.3f}  "
            f"{count(record.tokens_per_second)} tok/s"
            f"{_utilisation(record)}  peak {record.peak_memory_bytes / 2**30:.2f} GiB  ETA "
            f"{_duration(record.eta_seconds)}{note}"
        )

    def on_eval(self, step: int, values: dict[str, float]) -> None:
        print_above(
            f"step {step}  " + "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        )

    def on_message(self, text: str) -> None:
        print_above(text)

    def on_end(self) -> None:
        self.live.close()


class JsonLines(Callback):
    """Logger that writes one JSON object per step or validation to ``metrics.jsonl``.

    If a step has several lines after a resume, the last line is valid. A number that is not finite
    is null.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / METRICS

    def on_step(self, record: StepRecord) -> None:
        append_json_line(self.file, record.as_dict())

    def on_eval(self, step: int, values: dict[str, float]) -> None:
        append_json_line(self.file, {"step": step, **values})

    on_values = on_eval

    def on_message(self, text: str) -> None:
        append_json_line(self.file, {"message": text})


class TensorBoard(Callback):
    """Logger of scalars to TensorBoard, which discards values of later steps at a restart."""

    def __init__(self, folder: Path, interval: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer, self.interval = SummaryWriter(str(folder / "tensorboard")), interval

    def on_restart(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # SummaryWriter(purge_step=...) writes this event; a rewind needs it within a file.
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
    """Logger to Weights & Biases. The x axis is the metric ``step``.

    If a resume or a rewind repeats a step, both values are kept.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Start or continue the wandb run.

        Raises ConfigError if credentials or settings are invalid.
        """
        import wandb

        settings, id_file = config.log.wandb, folder / "wandb_id"
        if not id_file.exists():  # one id per run directory: a resumed run continues its curves
            write_atomically(id_file, uuid.uuid4().hex[:8])
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
                "Weights & Biases: offline; upload with: wandb sync "
                f"{folder / 'wandb' / 'offline-run-*'}",
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
    """Return the configured loggers; console and JSON lines are always included."""
    callbacks: list[Callback] = [Console(config.log.interval, total_steps), JsonLines(folder)]
    if config.log.tensorboard:
        callbacks.append(TensorBoard(folder, config.log.interval))
    if config.log.wandb.enabled:
        callbacks.append(Wandb(config, folder))
    return callbacks


@contextmanager
def logged_kernels(log: Log) -> Iterator[None]:
    """Print the log records of the kernels during the block with the given function.

    The records name the chosen implementations and the reasons. Without a GPU the choices are the
    same in every run; they are printed only if FEM_KERNELS changes them. Warnings are always
    printed.
    """

    class LogHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            chosen = platform.has_cuda() or os.environ.get("FEM_KERNELS")
            if record.levelno > logging.INFO or chosen:
                log(f"kernels: {self.format(record)}")

    logger = logging.getLogger("kernels")
    handlers, level = logger.handlers, logger.level
    logger.handlers = [LogHandler()]
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
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
    """Return the wandb mode from WANDB_MODE or a wandb settings file.

    Otherwise return "online" if wandb has credentials for its server, else "offline".
    """
    import wandb

    mode = str(wandb.setup().settings.mode)
    if mode != "online" or os.environ.get("WANDB_MODE"):
        return mode
    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def _mtp_loss(record: StepRecord) -> str:
    return "" if record.mtp_loss is None else f"  mtp loss {record.mtp_loss:.4f}"


def _utilisation(record: StepRecord) -> str:
    """Return the TFLOP/s and the MFU of a step for the console; "" on a CPU."""
    if record.mfu is None and not platform.has_cuda():
        return ""
    text = f"  {record.tflops_per_device:.3g} TFLOP/s"
    if record.dense_tflops_per_device is not None:
        text += f" (dense {record.dense_tflops_per_device:.3g})"
    if record.mfu is not None:
        text += f"  MFU {record.mfu:.1%}"
    if record.dense_mfu is not None:
        text += f" (dense {record.dense_mfu:.1%})"
    return text


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
