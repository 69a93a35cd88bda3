"""What Muon costs, from the configuration alone: FLOPs of its Newton-Schulz iteration, parameters with one moment. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from fem_common.text import si
from fem_megatron.shape import Weight
from pretrain.config import RunConfig

STEPS = 5
ROUND = 2**26  # elements of whole maps that a rank works on at a time, where no map has more
TENSORS = 6  # of them at once: the directions, whole maps, two in the iteration, its result, what is sent back


def newton_schulz_flops(rows: int, columns: int) -> float:
    """FLOPs of making one map orthogonal: X X^T, its square, and a product with X at each step; a the smaller side, b the larger."""
    a, b = sorted((rows, columns))
    return STEPS * (4.0 * a * a * b + 2.0 * a**3)


def step_flops(weights: Iterable[Weight]) -> float:
    """FLOPs of one optimizer step for all maps of these whole weights."""
    return sum(
        newton_schulz_flops(rows, one.shape[-1])
        for one in weights
        if one.orthogonal
        for _, rows in one.linear_maps()
    )


def told(config: RunConfig, weights: Iterable[Weight], data_parallel: int, training: float) -> str:
    """What Muon does, in a line. training: FLOPs of a step's passes. An optimizer that is not split does its work on each rank."""
    split = (
        config.engine.zero_stage > 0
        if config.engine.name == "deepspeed"
        else config.parallel.use_distributed_optimizer
    )
    muons = [one for one in weights if one.orthogonal]
    maps, flops = (
        sum(len([*one.linear_maps()]) for one in muons),
        step_flops(muons) * (1 if split else data_parallel),
    )
    size = sum(one.size for one in muons)
    return f"Muon: {size:,} parameters in {maps:,} maps, {si(flops)}FLOP a step, {100 * flops / training:.2g}% of training"
