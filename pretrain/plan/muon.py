"""Compute the cost of Muon, the FLOPs of its Newton-Schulz iteration, from the configuration.

The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from fem_common.text import si
from fem_megatron.shape import Weight
from pretrain.config import RunConfig

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


def told(config: RunConfig, weights: Iterable[Weight], data_parallel: int, training: float) -> str:
    """Return the plan's line about Muon.

    training: FLOPs of the forward and backward passes of a step. If the optimizer is not split,
    every data-parallel rank repeats all of Muon's work, and the line counts every repetition.
    """
    split = (
        config.engine.zero_stage > 0
        if config.engine.name == "deepspeed"
        else config.parallel.use_distributed_optimizer
    )
    muons = [one for one in weights if one.orthogonal]
    maps = sum(len([*one.linear_maps()]) for one in muons)
    flops = step_flops(muons) * (1 if split else data_parallel)
    size = sum(one.size for one in muons)
    return (
        f"Muon: {size:,} parameters in {maps:,} maps, {si(flops)}FLOP a step, "
        f"{100 * flops / training:.2g}% of training"
    )
