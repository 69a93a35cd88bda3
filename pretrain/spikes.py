"""Detection of spikes of the loss or the gradient norm, relative to running means of earlier steps.

It uses only numbers that all ranks have. The state is a few numbers, which checkpoints store with
the step (`checkpoint.folder.Progress.recent`), so that a resumed run makes the same decisions as an
uninterrupted run. Skipped steps do not change the state.
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
    """Spike guard (``train.on_spike``) with exponentially weighted means over ``window`` steps.

    It reports no spikes during the first ``window`` steps.
    """

    deviations: float
    window: int

    @classmethod
    def of(cls, train: TrainConfig) -> Spikes | None:
        """Return the guard of a configuration, or None if it has none."""
        return None if train.on_spike == "none" else cls(train.spike_deviations, train.spike_window)

    def found(self, recent: Recent, loss: float, grad_norm: float) -> str | None:
        """Return a description of the spike in a step with a finite ``loss`` (nats) and
        ``grad_norm``, or None.
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
        """Return the state after a step that was not skipped."""
        steps, *moments = recent or (0.0,) * 5
        weight, learned = max(1 / (steps + 1), 1 / self.window), [min(steps + 1, self.window)]
        for value, mean, variance in zip(
            _seen(loss, grad_norm), moments[::2], moments[1::2], strict=True
        ):
            gap = value - mean
            learned += [mean + weight * gap, (1 - weight) * (variance + weight * gap * gap)]
        return tuple(learned)


def carried_over(found: Found, config: RunConfig, *, other_data: bool = False) -> Recent:
    """Return a checkpoint's guard state for training that continues from it.

    The state is () if loss or norm have another distribution under ``config``. The guard then
    reports no spikes for another window.
    """
    recent = found.progress.recent
    changed = any(
        _MEANING.match(change.key) for change in changes(found.manifest["config"], config)
    )
    return () if other_data or changed or not all(map(math.isfinite, recent)) else recent


def check_spikes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield the mistakes in the settings of the guard."""
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
