"""Interface of training engines, which own the gradients, the optimizer and the parallel schedule.

The trainer uses only this interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    # The configuration's checks import this package and need no torch.
    from fem_megatron.megatron.fp8 import Delayed
    from pretrain.data.datasets import Batch
    from pretrain.engines.sharding import Held


@dataclass(frozen=True)
class StepResult:
    """Results of one optimizer step, equal on every rank."""

    loss: float  # mean over the step's tokens, nats
    grad_norm: float  # global, before clipping
    lr: float
    skipped: bool  # not updated: loss or gradient was not finite, or the step was unwanted
    times: StepTimes | None = None  # this rank's times, if requested
    # Sums over the ranks of the additional numbers.
    extra: list[float] = field(default_factory=list)
    mtp: tuple[float, ...] = ()  # loss of each module of multi-token prediction, as `loss`


@dataclass(frozen=True)
class StepTimes:
    """Times of a step on one rank, in seconds: computing, and waiting for other ranks."""

    # Forward and backward passes, until the gradients of all ranks are needed.
    busy: float
    # Reduction of the gradients: waiting for the other ranks, and the transfer.
    waiting: float


ExtraNumbers = Callable[[], Iterable[float]]
Unwanted = Callable[[float, float], bool]
"""True if a step's loss and gradient norm, both finite, forbid its update; equal on every rank."""
AroundUpdate = Callable[[Callable[[], "Iterable[Held]"]], AbstractContextManager[None]]
"""Context around an update. Its argument returns this rank's parts of the parameters, ordered."""


@contextmanager
def unobserved(parts: Callable[[], Iterable[Held]]) -> Iterator[None]:
    """Run the block without observing the update: the default `AroundUpdate`."""
    yield


class Engine(Protocol):
    """A model with its optimizer on this rank's part of the parallel layout.

    around_update: context manager around every update (default: `unobserved`). It is entered when
    the gradients are summed over all ranks. DeepSpeed updates one group of parameters after
    another, so it enters once per group; it does not enter if the gradient is not finite.

    scales: scaling history of the 8-bit maps from earlier steps (train.fp8=delayed), None
    otherwise. Checkpoints store it next to ``sharded_state``.
    """

    around_update: AroundUpdate
    scales: Delayed | None

    def train_step(
        self,
        batches: Iterator[Batch],
        samples_after: int,
        *,
        timed: bool = False,
        extra: ExtraNumbers = tuple,
        unwanted: Unwanted | None = None,
    ) -> StepResult:
        """Take one optimizer step over ``global_batch_size`` sequences.

        The learning rate is the schedule's rate after ``samples_after`` sequences. ``timed``: also
        return this rank's times, for which the host waits for the device; no result changes.
        ``unwanted``: function of loss and gradient norm that returns True to skip the update. The
        remaining callable returns additional numbers, which are summed over the ranks in the loss's
        all-reduce. It is called once, before the update; DeepSpeed without ``unwanted`` calls it
        after the update.
        """

    def evaluate(self, batches: Iterator[Batch], global_batches: int) -> float:
        """Return the mean loss over ``global_batches`` global batches in nats per token.

        Computes no gradients.
        """

    @property
    def models(self) -> list[Any]:
        """This rank's model chunks without wrappers."""

    def sharded_state(self) -> dict[str, Any]:
        """Return model and optimizer as megatron.core.dist_checkpointing's sharded tensors.

        All engines use the same names and shapes.
        """

    def restore(
        self, read: Callable[[dict[str, Any]], dict[str, Any]], *, model_only: bool = False
    ) -> None:
        """Load a checkpoint; with ``model_only`` load only the weights.

        ``read`` fills a dictionary of sharded tensors with their values and returns it. It may be
        called repeatedly.
        """

    def close(self) -> None:
        """Release the references that keep the model and its process groups in memory.

        Call it after the last use of the engine.
        """
