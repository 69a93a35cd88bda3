"""Compute the cost of Muon, the FLOPs of its Newton-Schulz iteration, from the configuration.

The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from fem_common.text import si
from fem_megatron.shape import Weight
from pretrain.plan.placement import Placement

STEPS = 5
# Elements of unsharded maps that a rank processes at a time, unless one map has more.
ROUND = 2**26
# Tensors of that size at once: the directions, the unsharded maps, two in the iteration, its
# result, and the returned updates.
TENSORS = 6


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Return the FLOPs of orthogonalizing one [rows, columns] map.

    Each of the STEPS iterations computes X X^T, its square, and a product with X. With a the
    smaller and b the larger side, this is 4 a^2 b + 2 a^3 per iteration.
    """
    a, b = sorted((rows, columns))
    return STEPS * (4.0 * a * a * b + 2.0 * a**3)


def step_flops(weights: Iterable[Weight]) -> float:
    """Return the FLOPs of one optimizer step for all linear maps of these unsharded weights."""
    return sum(
        newton_schulz_flops(rows, one.shape[-1])
        for one in weights
        if one.orthogonal
        for _, rows in one.linear_maps()
    )


def line(placement: Placement, weights: Iterable[Weight], training: float) -> str:
    """Return the plan's line about Muon.

    training: FLOPs of the forward and backward passes of a step. If the optimizer is not split,
    every data-parallel rank repeats all of Muon's work, and the line counts every repetition.
    """
    orthogonal = [one for one in weights if one.orthogonal]
    maps = sum(len([*one.linear_maps()]) for one in orthogonal)
    repeated = 1 if placement.splits_optimizer else placement.data_parallel
    flops = step_flops(orthogonal) * repeated
    size = sum(one.size for one in orthogonal)
    return (
        f"Muon: {size:,} parameters in {maps:,} maps, {si(flops)}FLOP a step, "
        f"{100 * flops / training:.2g}% of training"
    )
