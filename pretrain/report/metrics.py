"""Compute metrics of a run in progress: throughput, utilisation and remaining time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """Record of one optimizer step for the loggers."""

    step: int
    consumed_tokens: int
    loss: float  # nats per token
    lr: float
    grad_norm: float
    skipped: bool
    step_seconds: float
    tokens_per_second: float
    # Model FLOPs per process, without recompute; by document lengths if documents are separate.
    tflops_per_device: float
    mfu: float | None  # share of the device's peak; None if the peak is unknown (CPU)
    peak_memory_bytes: int  # largest over the ranks
    eta_seconds: float
    # Over full sequences; None if tflops_per_device counts full sequences itself.
    dense_tflops_per_device: float | None = None
    dense_mfu: float | None = None  # MFU of dense_tflops_per_device
    # Number of earlier samples that rewinds after spikes have skipped.
    passed_over: int = 0
    # Mean loss of the modules of multi-token prediction, divided by the same tokens as ``loss``.
    mtp_loss: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a dictionary for loggers."""
        return asdict(self)


@dataclass(kw_only=True)
class Meter:
    """Meter that computes rates and the remaining time (ETA) from the times of steps.

    The ETA is the number of remaining steps times a running mean of the step time, plus the
    remaining pauses ("save", "validation") times the mean duration of their kind. In the running
    mean the slow first steps lose weight. A kind of pause that has not occurred yet counts as 0 s.
    Pauses are not part of the step time.

    dense_flops: FLOPs per token over full sequences, if ``flops_per_token`` counts documents
    separately.
    """

    step_tokens: int
    flops_per_token: float
    world_size: int
    peak_tflops: float | None
    dense_flops: float | None = None
    mean: float | None = None  # running mean of the step time
    pauses: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = time.monotonic()

    def restart(self, pause: str | None = None) -> None:
        """Exclude the time since the last step from the next step.

        pause: record the time as a pause of this kind.
        """
        now = time.monotonic()
        if pause is not None:
            self.pauses.setdefault(pause, []).append(now - self.last)
        self.last = now

    def measure(self, steps_left: int, pauses_left: Mapping[str, int]) -> dict[str, Any]:
        """Return the fields of the step's record that depend on time.

        pauses_left: number of remaining pauses of each kind.
        """
        now = time.monotonic()
        seconds, self.last = now - self.last, now
        self.mean = seconds if self.mean is None else 0.9 * self.mean + 0.1 * seconds
        rate = self.step_tokens / seconds
        tflops, mfu = self._spent(rate, self.flops_per_token)
        dense_tflops, dense_mfu = (
            self._spent(rate, self.dense_flops) if self.dense_flops else (None, None)
        )
        return {
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "tflops_per_device": tflops,
            "mfu": mfu,
            "dense_tflops_per_device": dense_tflops,
            "dense_mfu": dense_mfu,
            "eta_seconds": steps_left * self.mean
            + sum(count * self._pause(kind) for kind, count in pauses_left.items()),
        }

    def _spent(self, rate: float, flops_per_token: float) -> tuple[float, float | None]:
        """Return (TFLOP/s per process at ``rate`` tokens/s, share of the device's peak or None)."""
        tflops = rate * flops_per_token / self.world_size / 1e12
        return tflops, tflops / self.peak_tflops if self.peak_tflops else None

    def _pause(self, kind: str) -> float:
        seen = self.pauses.get(kind, [])
        return sum(seen) / max(1, len(seen))
