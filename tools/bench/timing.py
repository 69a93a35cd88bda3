"""How a call is timed on any device: warmed up, many times, in two passes whose medians must agree. What is timed is not known here."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from fem_megatron.megatron.platform import Moment, synchronize

SLOW = 1.0  # seconds; of such a call fewer are made


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call; spread: how far the medians of the two passes lie apart, as a share of it; calls that were timed."""

    seconds: float
    spread: float
    calls: int


def measure(call: Callable[[int], object], budget: float, most: int = 100) -> Timing:
    """Time ``call(0)``, ``call(1)``, ...: the number lets it rotate its inputs, so that no cache holds them.

    Each call has its own two moments on the device, and none is waited for before all are on their way. About ``budget`` seconds are
    spent on the timed calls, not counting the warm-up, in which kernels may be compiled; at least two calls (of slow ones) or six.
    """
    call(0)
    synchronize()
    began = Moment()
    call(1)
    once = began.seconds_until(Moment())
    if once < SLOW:
        for number in range(2):
            call(number)
    each = max(1 if once >= SLOW else 3, min(most, int(budget / 2 / max(once, 1e-9))))
    passes: list[list[float]] = []
    for _ in range(2):
        synchronize()
        moments = [Moment()]
        for number in range(each):
            call(number)
            moments.append(Moment())
        passes.append([before.seconds_until(after) for before, after in pairwise(moments)])
    middle = statistics.median(passes[0] + passes[1])
    first, second = map(statistics.median, passes)
    return Timing(middle, abs(first - second) / middle, 2 * each)
