"""Engines: who owns gradients, optimizer and the parallel schedule. The trainer knows this interface and no engine's insides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # the configuration's checks are here too, and need no torch
    from fem_megatron.megatron.fp8 import Delayed
    from pretrain.data.datasets import Batch
    from pretrain.engines.sharding import Held


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, equal on every rank."""

    loss: float  # mean over the step's tokens, nats
    grad_norm: float  # global, before clipping
    lr: float
    skipped: bool  # loss or gradient was not finite, or unwanted: nothing was updated
    times: StepTimes | None = None  # this rank's, where they were asked for
    beside: list[float] = field(
        default_factory=list
    )  # sums over the ranks of what was to be summed beside the loss


@dataclass(frozen=True)
class StepTimes:
    """Where a step's time went on one rank, in seconds."""

    busy: float  # forward and backward passes, up to the moment when the gradients of all ranks are needed
    waiting: float  # reducing the gradients: waiting for the other ranks, and the transfer


Beside = Callable[[], Iterable[float]]
Unwanted = Callable[[float, float], bool]
"""A step's loss and gradient norm, both finite -> whether it is to update nothing; the same on every rank."""
AroundUpdate = Callable[[Callable[[], "Iterable[Held]"]], AbstractContextManager[None]]
"""What an engine puts around an update of what it can be asked for: this rank's parts of the parameters, in the same order every time."""


@contextmanager
def unobserved(parts: Callable[[], Iterable[Held]]) -> Iterator[None]:
    """An `AroundUpdate` that does nothing."""
    yield


class Engine(Protocol):
    """A model, its optimizer and its layout.

    around_update: put around every update, the gradients of all ranks summed (`unobserved`: nothing is). DeepSpeed updates one group of
    parameters after another, each an update of its own here, and nothing where the gradient is not finite.
    scales: what maps of 8-bit floats remember of earlier steps, which checkpoints have beside ``sharded_state`` (train.fp8=delayed).
    """

    around_update: AroundUpdate
    scales: Delayed | None

    def train_step(
        self,
        batches: Iterator[Batch],
        samples_after: int,
        *,
        timed: bool = False,
        beside: Beside = tuple,
        unwanted: Unwanted | None = None,
    ) -> StepResult:
        """One optimizer step over ``global_batch_size`` sequences; the learning rate is the schedule's at ``samples_after``.

        ``timed``: tell this rank's times, too; that waits for the device and changes no number. ``beside``: asked once
        for numbers that are summed over the ranks in the loss's all-reduce: before the update, but after it under DeepSpeed without
        ``unwanted``.
        """

    def evaluate(self, batches: Iterator[Batch], global_batches: int) -> float:
        """Mean loss over ``global_batches`` global batches, nats a token; no gradients."""

    @property
    def models(self) -> list[Any]:
        """This rank's bare model chunks."""

    def sharded_state(self) -> dict[str, Any]:
        """Model and optimizer as megatron.core.dist_checkpointing's sharded tensors: the same names and shapes from every engine."""

    def restore(
        self, read: Callable[[dict[str, Any]], dict[str, Any]], *, model_only: bool = False
    ) -> None:
        """Take over a checkpoint; ``read`` gives a dictionary of sharded tensors back with their values, as often as it is called."""

    def close(self) -> None:
        """After the last use: gives up what would keep the model, and with it its process groups and their threads, alive."""
