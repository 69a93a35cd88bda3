"""Whether a step's loss or gradient norm is a spike: against running means of those before it. Pure arithmetic of numbers all ranks know.

The state is a few numbers, which a checkpoint keeps with the step (`checkpoint.folder.Progress.recent`), so that a resumed run decides as
one never stopped. A step that was not taken is not learned from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pretrain.checkpoint.folder import Found
from pretrain.checkpoint.resume import changes
from pretrain.config import RunConfig, TrainConfig

Recent = tuple[float, ...]
"""() or (steps seen, the loss's mean and variance, the mean and variance of the norm's logarithm)."""

# Deviations are no less: of the loss in nats, of the norm's logarithm. Smaller ones are of no harm, however rare.
_LEAST = (0.02, 0.2)

# Keys that decide what a step's loss is a mean of, or what its gradient descends: another value gives loss or norm another distribution.
# Rates, precision and layout are left out: a jump after a change of these is a spike, or rounding.
_MEANING = re.compile(
    r"data\.(train\..*weight|seq_length|packing|documents|reset_positions|eod_loss)$"
    r"|train\.(global_batch_size|z_loss)$|model\.rope_scaling\b"
)


@dataclass(frozen=True)
class Spikes:
    """The guard ``train.on_spike``: exponentially weighted over ``window`` steps, and silent until it has seen so many."""

    deviations: float
    window: int

    @classmethod
    def of(cls, train: TrainConfig) -> Spikes | None:
        """None where there is no guard."""
        return None if train.on_spike == "none" else cls(train.spike_deviations, train.spike_window)

    def found(self, recent: Recent, loss: float, grad_norm: float) -> str | None:
        """What stands out of a step with a finite ``loss`` (nats) and ``grad_norm``, in words; None: nothing."""
        if not recent or recent[0] < self.window:
            return None
        for name, value, seen, mean, variance, least in zip(
            ("loss", "gradient norm"),
            _seen(loss, grad_norm),
            (loss, grad_norm),
            recent[1::2],
            recent[2::2],
            _LEAST,
            strict=True,
        ):
            beyond = (value - mean) / max(math.sqrt(variance), least)
            if beyond > self.deviations:
                usual = mean if name == "loss" else math.exp(mean)
                return f"{name} {seen:.4g}, {beyond:.1f} deviations above the last {self.window} steps' {usual:.4g}"
        return None

    def learned(self, recent: Recent, loss: float, grad_norm: float) -> Recent:
        """The state after a step that was taken."""
        steps, *moments = recent or (0.0,) * 5
        weight, learned = max(1 / (steps + 1), 1 / self.window), [min(steps + 1, self.window)]
        for value, mean, variance in zip(
            _seen(loss, grad_norm), moments[::2], moments[1::2], strict=True
        ):
            gap = value - mean
            learned += [mean + weight * gap, (1 - weight) * (variance + weight * gap * gap)]
        return tuple(learned)


def carried_over(found: Found, config: RunConfig, *, other_data: bool = False) -> Recent:
    """A checkpoint's state for training that continues from it: () where loss or norm have another distribution under ``config``.

    The guard is then silent for another window.
    """
    recent = found.progress.recent
    changed = any(
        _MEANING.match(change.key) for change in changes(found.manifest["config"], config)
    )
    return () if other_data or changed or not all(map(math.isfinite, recent)) else recent


def check_spikes(config: RunConfig, world_size: int) -> Iterator[str]:
    """What is wrong with the guard's settings."""
    if config.train.on_spike == "rewind" and not config.checkpoint.interval:
        yield "train.on_spike = rewind goes back to a checkpoint, but checkpoint.interval = 0; set one, or on_spike=skip"


def rewinds_to(step: int, interval: int, back: int) -> int:
    """The step of the checkpoint that a spike at ``step`` goes back to: the last of every ``interval``-th that is ``back`` steps before.

    Checkpoints that signals had a run write are none of these: a run that was stopped goes back as far as one that was not.
    """
    return max(0, step - back) // interval * interval


def _seen(loss: float, grad_norm: float) -> tuple[float, float]:
    return loss, math.log(max(grad_norm, 1e-30))
