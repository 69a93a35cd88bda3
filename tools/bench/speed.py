"""Timing of forward, and of forward + backward, of one operation or of its baseline, at one size.

The caller chooses the operations and their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fem_megatron.megatron import platform
from kernels.implementations import operations
from tools.bench.runner import Timing, measure
from tools.bench.workloads import BASELINES, WORKLOADS, Draw, Inputs, Outputs, Size

MOST_SETS = 8  # maximum sets of inputs, used in turn


@dataclass(frozen=True)
class Speed:
    """Timings, FLOPs and bytes of one implementation at one size.

    forward, both: timings of forward, and of forward + backward.
    flops, bytes: (forward, forward + backward).

    The forward pass reads each input once and writes each result once. The backward pass moves the
    same bytes again, and the gradients.
    """

    forward: Timing
    both: Timing
    flops: tuple[float, float]
    bytes: tuple[float, float]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Speed:
        """Restore a speed from JSON values."""
        return cls(
            Timing(**values["forward"]),
            Timing(**values["both"]),
            (values["flops"][0], values["flops"][1]),
            (values["bytes"][0], values["bytes"][1]),
        )

    @property
    def spread(self) -> float:
        """Larger spread of the two timings."""
        return max(self.forward.spread, self.both.spread)

    def ratios(self, base: Speed) -> tuple[float, float]:
        """Return the time ratios (forward, forward + backward) to ``base``."""
        return (
            self.forward.seconds / base.forward.seconds,
            self.both.seconds / base.both.seconds,
        )


def implementations(op: str, *, automatic: bool = False) -> tuple[str, ...]:
    """Return the names of an operation's implementations, the fastest first.

    An operation with a single implementation returns ("reference",).

    automatic: leave out implementations that run only if they are selected explicitly.
    """
    found = operations().get(op)
    if found is None:
        return ("reference",)
    return tuple(each.name for each in found.implementations if each.automatic or not automatic)


def lacks(op: str, implementation: str, device: torch.device) -> str | None:
    """Return the reason why the implementation cannot run on ``device``, or None if it can."""
    found = operations().get(op)
    if found is None:
        return None
    return next(
        (each.lacks(device) for each in found.implementations if each.name == implementation), None
    )


def time_workload(
    name: str, implementation: str, size: Size, dtype: torch.dtype, budget: float
) -> Speed:
    """Time the workload ``name`` with one implementation of its operation, or with "auto".

    budget: approximate seconds of each timing.

    Raises ValueError if the implementation cannot run the call.
    """
    workload = WORKLOADS[name]
    return _time(
        workload.inputs,
        lambda inputs: workload.call(inputs, implementation),
        workload.flops(size),
        size,
        dtype,
        budget,
    )


def time_baseline(name: str, size: Size, dtype: torch.dtype, budget: float) -> Speed:
    """Time the baseline ``name``. Raises ValueError if it cannot run on this machine.

    budget: approximate seconds of each timing.
    """
    baseline = BASELINES[name]
    reason = baseline.lacks(platform.device())
    if reason is not None:
        raise ValueError(reason)
    return _time(baseline.inputs, baseline.call, baseline.flops(size), size, dtype, budget)


def _time(
    draw_inputs: Callable[[Draw, Size], Inputs],
    call: Callable[[Inputs], Outputs],
    flops: tuple[float, float],
    size: Size,
    dtype: torch.dtype,
    budget: float,
) -> Speed:
    """Time forward without gradients, then forward + backward.

    The calls rotate over several sets of inputs that are together larger than the device's cache.
    """
    device = platform.device()
    sets = [draw_inputs(Draw(device, dtype, 0), size)]
    bytes_of_one = _bytes(sets[0].values())
    needed = math.ceil(2 * platform.device_cache_bytes() / max(1, bytes_of_one))
    sets += [
        draw_inputs(Draw(device, dtype, seed), size) for seed in range(1, min(MOST_SETS, needed))
    ]
    leaves = [_leaves(inputs) for inputs in sets]
    with torch.no_grad():
        outputs = call(sets[0])
    weights = [torch.randn_like(output) for output in outputs]

    def forward(number: int) -> object:
        with torch.no_grad():
            return call(sets[number % len(sets)])

    def both(number: int) -> object:
        which = number % len(sets)
        return torch.autograd.grad(call(sets[which]), leaves[which], weights, allow_unused=True)

    once = bytes_of_one + _bytes(outputs)
    traffic = (float(once), float(2 * once + _bytes(leaves[0])))
    return Speed(measure(forward, budget), measure(both, budget), (flops[0], sum(flops)), traffic)


def _leaves(inputs: Inputs) -> list[Tensor]:
    """Return the inputs with gradients."""
    return [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]


def _bytes(tensors: Iterable[object]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
