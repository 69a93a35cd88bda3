"""Numbers about a run in progress: throughput, utilisation, memory, time left. Measures; prints nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as every logger gets it."""

    step: int
    consumed_tokens: int
    loss: float  # nats a token
    lr: float
    grad_norm: float
    skipped: bool
    step_seconds: float
    tokens_per_second: float
    tflops_per_device: float  # model FLOPs (recompute not counted), per process; by the documents' lengths where these are read apart
    mfu: float | None  # share of the named device's peak; None where no peak is named (CPU)
    peak_memory_bytes: int  # largest over the ranks
    eta_seconds: float
    dense_tflops_per_device: float | None = (
        None  # over whole sequences; None where that is what tflops_per_device counts
    )
    dense_mfu: float | None = None  # as mfu, of that
    passed_over: int = (
        0  # samples before this step's that no step learnt from, going back from spikes
    )

    def as_dict(self) -> dict[str, Any]:
        """For loggers."""
        return asdict(self)


class Meter:
    """Turns step ends into rates, and says how long the rest will take.

    The ETA is the steps left, at a running mean that forgets the slow first ones, and the pauses left ("save", "validation"), each at the
    mean of those of its kind so far, none where none has been seen yet. A pause counts as itself alone: it lengthens no step.
    dense_flops: FLOPs per token over whole sequences, where ``flops_per_token`` is of something else.
    """

    def __init__(
        self,
        *,
        step_tokens: int,
        flops_per_token: float,
        world_size: int,
        peak_tflops: float | None,
        dense_flops: float | None = None,
    ) -> None:
        self.step_tokens, self.flops_per_token, self.dense_flops = (
            step_tokens,
            flops_per_token,
            dense_flops,
        )
        self.world_size, self.peak_tflops = world_size, peak_tflops
        self.last = time.monotonic()
        self.mean: float | None = None
        self.pauses: dict[str, list[float]] = {}

    def restart(self, pause: str | None = None) -> None:
        """Do not count what happened since the last step as a part of the next one, but as a ``pause`` of this kind, or not at all."""
        now = time.monotonic()
        if pause is not None:
            self.pauses.setdefault(pause, []).append(now - self.last)
        self.last = now

    def measure(self, steps_left: int, pauses_left: Mapping[str, int]) -> dict[str, Any]:
        """The record's fields that time gives. pauses_left: how many of each kind are still to come."""
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
        """TFLOP/s of a process at so many tokens a second, and its share of the peak."""
        tflops = rate * flops_per_token / self.world_size / 1e12
        return tflops, tflops / self.peak_tflops if self.peak_tflops else None

    def _pause(self, kind: str) -> float:
        seen = self.pauses.get(kind, [])
        return sum(seen) / max(1, len(seen))
