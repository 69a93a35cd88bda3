"""What Muon costs, from the configuration alone: FLOPs of its Newton-Schulz iteration, parameters with one moment. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from fem_megatron.shape import Weight

STEPS = 5


def newton_schulz_flops(rows: int, columns: int) -> float:
    """FLOPs of making one map orthogonal: X X^T, its square, and a product with X at each step; a the smaller side, b the larger."""
    a, b = sorted((rows, columns))
    return STEPS * (4.0 * a * a * b + 2.0 * a**3)


def step_flops(weights: Iterable[Weight]) -> float:
    """FLOPs of one optimizer step for all maps of these whole weights."""
    return sum(newton_schulz_flops(rows, one.shape[-1]) for one in weights if one.orthogonal for _, rows in one.linear_maps())
