"""Checks and cost of a run's 8-bit matrix products (train.fp8), from its configuration alone.

The module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fem_common.text import counted, size
from fem_megatron.config import ModelConfig
from fem_megatron.shape import WIDE, BlockShape, Weights
from pretrain.config import RunConfig
from pretrain.plan.placement import blocks_by_mixer

TILE = 16  # every size of a GPU's 8-bit product must be a multiple of this


def check_fp8(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield an error text for each setting that prevents 8-bit products.

    Examples are a model without suitable products, or a size that is not a multiple of TILE.
    """
    layout = config.parallel
    train = config.train
    key = f"train.fp8 = {config.train.fp8}"
    if train.fp8 == "none":
        return
    blocks, found = blocks_by_mixer(config.model), False
    for name, block in blocks.items():
        for weight, one in eight_bit(block).items():
            rows, columns = math.prod(one.shape[:-1]), one.shape[-1]
            if one.split == len(one.shape) - 1:
                columns //= layout.tensor_model_parallel_size
            else:
                rows //= layout.tensor_model_parallel_size
            if rows % TILE or columns % TILE:
                yield (
                    f"{key} needs sizes that are multiples of {TILE}, but {weight} of {name} is "
                    f"{rows} x {columns} on a rank; take other widths (model.*, "
                    "parallel.tensor_model_parallel_size), or set train.fp8=none"
                )
                return
            found = True
    if not found:
        yield (
            f"{key}: no layer of {', '.join(blocks)} has a linear map that supports "
            "8-bit floats; set train.fp8=none"
        )
    own = config.data.seq_length // layout.context_parallel_size
    if train.micro_batch_size * own % TILE:
        needed = TILE // math.gcd(TILE, own)
        near = max(1, round(train.micro_batch_size / needed)) * needed
        yield (
            f"{key} needs sizes that are multiples of {TILE}, but train.micro_batch_size = "
            f"{train.micro_batch_size} sequences have {train.micro_batch_size * own} tokens on a "
            f"rank; the nearest: train.micro_batch_size={near}"
        )


def eight_bit(block: BlockShape) -> Weights:
    """Return the weights of a block whose products use 8-bit floats under train.fp8."""
    return {name: weight for name, weight in block.weights().items() if weight.eight_bit}


def forward_flops(model: ModelConfig) -> float:
    """Return the FLOPs per token of the forward pass that are 8-bit products.

    A linear map counts once for each application of its mixer or MLP.
    """
    return sum(
        2.0 * count * block.times(name.partition(".")[0]) * weight.size
        for block, count in model.trained_kinds
        for name, weight in eight_bit(block).items()
    )


def line(config: RunConfig, forward: float) -> str:
    """Return the plan's line about 8-bit products.

    It contains their share of the ``forward`` FLOPs, and the memory of delayed scaling.
    """
    model, train = config.model, config.train
    share = (
        f"{100 * forward_flops(model) / forward:.1f}% of them with 8-bit floats; the MFU uses the "
        "peak of 16-bit floats"
    )
    if train.fp8 != "delayed":
        return share
    maps = sum(count * len(eight_bit(block)) for block, count in model.trained_kinds)
    return (
        f"{share}; scales from the largest magnitudes of {counted(train.fp8_history, 'step')}, "
        f"{size(3 * WIDE * maps * train.fp8_history)}"
    )
