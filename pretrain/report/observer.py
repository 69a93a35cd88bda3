"""Compute layer diagnostics at an interval on all ranks and gather them on rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from megatron.core import parallel_state
from torch import nn

from fem_megatron.block import Block
from fem_megatron.diagnostics import observing
from fem_megatron.megatron.specs import MegatronBlock
from pretrain.report.loggers import Watch

PREFIX = "diagnostics/"


def blocks_of(models: Iterable[nn.Module]) -> dict[int, Block]:
    """Return the blocks of a rank's model chunks by their number (from 0) in the full model."""
    blocks = [
        module
        for model in models
        for module in model.modules()
        if isinstance(module, MegatronBlock)
    ]
    return {block.layer_number - 1: block for block in blocks}


class Observer:
    """Layer diagnostics of the first micro-batch of every ``interval``-th step (0: never).

    It is a `pretrain.report.loggers.Watch`. Only the first data-parallel replica observes. Its
    tensor-parallel ranks compute together, and each pipeline stage observes its own layers.
    """

    def __init__(self, models: Iterable[nn.Module], interval: int) -> None:
        self.blocks, self.interval = blocks_of(models), interval

    @contextmanager
    def __call__(self, step: int) -> Iterator[dict[str, float]]:
        values: dict[str, float] = {}
        if not self.interval or step % self.interval or parallel_state.get_data_parallel_rank():
            yield values
            return
        with observing(self.blocks) as found:
            yield values
        values |= {PREFIX + name: value for name, value in _from_every_stage(found).items()}


def together(*watches: Watch) -> Watch:
    """Return one watch that runs several watches and combines their values in one dictionary."""

    @contextmanager
    def watch(step: int) -> Iterator[dict[str, float]]:
        values: dict[str, float] = {}
        with ExitStack() as stack:
            seen = [stack.enter_context(one(step)) for one in watches]
            yield values
        for found in seen:
            values |= found

    return watch


def _from_every_stage(found: dict[str, float]) -> dict[str, float]:
    """Return the values of all pipeline stages on the first stage, in the order of the layers.

    Other stages return {}. All stages must call it together.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    first = parallel_state.get_pipeline_model_parallel_first_rank()
    here = torch.distributed.get_rank() == first
    everyone: list[dict[str, float]] = [{}] * group.size()
    torch.distributed.gather_object(found, everyone if here else None, dst=first, group=group)
    # Interleaved stages have alternating layers; within a layer the order of values is kept.
    return dict(
        sorted(
            (pair for stage in everyone for pair in stage.items()),
            key=lambda pair: pair[0].split("/")[0],
        )
    )
