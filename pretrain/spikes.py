"""Detect spikes of the loss or the gradient norm, relative to running means of earlier steps.

Detection uses only numbers that are equal on all ranks. Its state is a few numbers, which
checkpoints store with the step (`checkpoint.folder.Progress.recent`), so that a resumed run makes
the same decisions as an uninterrupted run. Skipped steps do not change the state.
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
"""() or (steps, mean and variance of the loss, mean and variance of the norm's logarithm)."""

# Minimum standard deviations of the loss in nats and of the norm's logarithm. Deviations from the
# mean that are small in absolute terms are harmless, even if they are rare.
_LEAST = (0.02, 0.2)

# Keys that determine the averaged tokens or the objective of a step: a changed value changes the
# distribution of loss or norm. Rates, precision and layout are not listed: a jump after a change of
# these is a spike, or rounding.
_MEANING = re.compile(
    r"data\.(train\..*weight|seq_length|packing|documents|reset_positions|eod_loss)$"
    r"|train\.(global_batch_size|z_loss)$|model\.rope_scaling\b"
)


@dataclass(frozen=True)
class Spikes:
    """Spike detector (``train.on_spike``) with exponentially weighted means over ``window`` steps.

    A value is a spike if it exceeds the mean by more than ``deviations`` standard deviations. No
    spikes are reported during the first ``window`` steps.
    """

    deviations: float
    window: int

    @classmethod
    def of(cls, train: TrainConfig) -> Spikes | None:
        """Return the detector of a configuration, or None if ``on_spike`` is none."""
        return None if train.on_spike == "none" else cls(train.spike_deviations, train.spike_window)

    def found(self, recent: Recent, loss: float, grad_norm: float) -> str | None:
        """Return a description of the spike in a step, or None if the step has no spike.

        recent: state before the step. loss, grad_norm: finite values of the step, the loss in nats.
        """
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
                return (
                    f"{name} {seen:.4g}, {beyond:.1f} deviations above the last {self.window} "
                    f"steps' {usual:.4g}"
                )
        return None

    def learned(self, recent: Recent, loss: float, grad_norm: float) -> Recent:
        """Return the detector's state after a step that was not skipped.

        recent: state before the step. The state is () or (steps, mean and variance of the loss,
        mean and variance of the logarithm of the gradient norm).
        """
        steps, *moments = recent or (0.0,) * 5
        weight, learned = max(1 / (steps + 1), 1 / self.window), [min(steps + 1, self.window)]
        for value, mean, variance in zip(
            _seen(loss, grad_norm), moments[::2], moments[1::2], strict=True
        ):
            gap = value - mean
            learned += [mean + weight * gap, (1 - weight) * (variance + weight * gap * gap)]
        return tuple(learned)


def carried_over(found: Found, config: RunConfig, *, other_data: bool = False) -> Recent:
    """Return the state of a checkpoint's spike detector for training that continues from it.

    Return () if loss or gradient norm may have another distribution: the data is other data, a
    relevant setting of ``config`` has changed, or the state is not finite. No spikes are then
    reported for another window.
    """
    recent = found.progress.recent
    changed = any(
        _MEANING.match(change.key) for change in changes(found.manifest["config"], config)
    )
    return () if other_data or changed or not all(map(math.isfinite, recent)) else recent


def check_spikes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield an error text for each mistake in the settings of the spike detector."""
    if config.train.on_spike == "rewind" and not config.checkpoint.interval:
        yield (
            "train.on_spike = rewind goes back to a checkpoint, but checkpoint.interval = 0; set "
            "an interval, or on_spike=skip"
        )


def rewinds_to(step: int, interval: int, back: int) -> int:
    """Return the step of the checkpoint to which a spike at ``step`` rewinds.

    It is the last multiple of ``interval`` that is at least ``back`` steps before ``step``.
    Checkpoints written because of signals are not used, so that an interrupted run rewinds to the
    same step as an uninterrupted run.
    """
    return max(0, step - back) // interval * interval


def _seen(loss: float, grad_norm: float) -> tuple[float, float]:
    return loss, math.log(max(grad_norm, 1e-30))
