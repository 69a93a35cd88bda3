"""Plan and check the context parallelism of a run: communication scheme and bytes sent.

All values are derived from the configuration alone. The module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fem_common.text import gib
from fem_megatron.catalogue import describe, mixer_names
from fem_megatron.context_parallel.shape import Crossing, SplitKinds, split_kinds
from fem_megatron.shape import Shape
from pretrain.config import RunConfig
from pretrain.plan.placement import Placement, blocks_by_mixer


def split_kinds_of(config: RunConfig) -> dict[str, SplitKinds]:
    """Return mixer -> communication scheme of its reads across context-parallel ranks.

    The result is {} without context parallelism.

    Raises:
        ValueError: a mixer cannot be split; the message names the width.
    """
    layout, separate = config.parallel, config.data.documents == "separate"
    if layout.context_parallel_size == 1:
        return {}
    return {
        name: split_kinds(
            block.mixer,
            tensor=layout.tensor_model_parallel_size,
            context=layout.context_parallel_size,
            requested=layout.context_parallel_kind,
            separate=separate,
        )
        for name, block in blocks_by_mixer(config.model).items()
    }


def exchanged_bytes(placement: Placement, *, overlapped: bool = False) -> float:
    """Return the bytes that one rank sends to its context-parallel group in a step.

    The sum is over all layers and micro-batches, forward and backward. The last argument restricts
    it to the transfers that overlap with attention.
    """
    config, kinds = placement.config, split_kinds_of(placement.config)
    count = Crossing.overlapped if overlapped else Crossing.sent
    training, again = placement.training, config.train.recompute == "full"
    layers = 0.0
    for name, block, number in config.model.mixers:
        crossing = block.mixer.exchanged_bytes(training, kinds[name])
        layers += number * block.times("mixer") * count(crossing, training, again=again)
    return layers * placement.micro_batches / config.parallel.pipeline_model_parallel_size


def lines(placement: Placement) -> Iterator[str]:
    """Yield the plan's lines about context parallelism; without it, yield no lines."""
    config = placement.config
    kinds, size = split_kinds_of(config), config.parallel.context_parallel_size
    if kinds:
        reads = ", ".join(
            f"{name}: {_kinds_named(block.mixer, kinds[name])}"
            for name, block in blocks_by_mixer(config.model).items()
        )
        sent = gib(int(exchanged_bytes(placement)))
        yield f"  each rank has {config.data.seq_length // size:,} tokens of a sequence ({reads})"
        yield f"  and sends {sent} to the other {size - 1} of its group in a step"


def finer_splits(config: RunConfig, world_size: int) -> Iterator[tuple[RunConfig, int]]:
    """Yield (configuration, number of processes) with 2, 4, ... times the context-parallel size.

    The number of processes stays the same if possible; otherwise it grows by the same factor.
    """
    layout, length = config.parallel, config.data.seq_length
    for times in (2**n for n in range(1, length.bit_length())):
        cut = replace(
            layout, world_size=None, context_parallel_size=layout.context_parallel_size * times
        )
        world = world_size if world_size % cut.model_parallel == 0 else world_size * times
        sequences = config.train.micro_batch_size * world // cut.model_parallel
        made = replace(config, parallel=cut)
        if (
            length % (2 * cut.context_parallel_size * layout.tensor_model_parallel_size)
            or config.train.global_batch_size % sequences
        ):
            continue
        if not _cuts(made):
            return
        yield made, world


def check_split(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield an error text for each mistake in the run's context parallelism.

    Each text names the nearest valid value.
    """
    layout, length = config.parallel, config.data.seq_length
    size = layout.context_parallel_size
    kind, key = layout.context_parallel_kind, f"parallel.context_parallel_size = {size}"
    if size == 1:
        if kind is not None:
            yield (
                f"parallel.context_parallel_kind = {kind} needs parallel.context_parallel_size of "
                "2 or more"
            )
        return
    if kind in ("all_gather", "ring") and config.data.documents == "separate":
        yield (
            f"parallel.context_parallel_kind = {kind} does not support data.documents = separate, "
            "which reads complete heads; leave it out"
        )
        return
    uncut = next(
        (name for name in mixer_names(config.model) if "CP" not in describe(name).layouts.split()),
        None,
    )
    if uncut is not None:
        yield f"{key}: {uncut} does not support context parallelism; set it to 1"
        return
    part = math.lcm(2, layout.tensor_model_parallel_size if layout.sequence_parallel else 1)
    if length % (size * part):
        near = max(1, round(length / (size * part))) * size * part
        what = f"{size} x {part}: chunks and slices of parallel.sequence_parallel"
        if part == 2:
            what = f"2 x {size} chunks"
        yield (
            f"data.seq_length = {length} is not a multiple of {what} ({key}); the nearest that "
            f"is: {near}"
        )
    try:
        found = split_kinds_of(config).values()
    except ValueError as error:
        others = layout.model_parallel // size
        fit = []
        for count in range(1, world_size + 1):
            fills = world_size % (count * others) == 0 or world_size % layout.model_parallel
            changed = replace(config, parallel=replace(layout, context_parallel_size=count))
            if fills and _cuts(changed):
                fit.append(count)
        yield f"{error}; the nearest that does: {min(fit, key=lambda count: abs(count - size))}"
        return
    wanted = {"all_gather": "gathers", "ring": "ring"}.get(kind or "")
    if wanted and not any(getattr(each, wanted) for each in found):
        yield f"parallel.context_parallel_kind = {kind}: no layer supports it; leave it out"


def _cuts(config: RunConfig) -> bool:
    try:
        split_kinds_of(config)
    except ValueError:
        return False
    return True


def _kinds_named(mixer: Shape, kinds: SplitKinds) -> str:
    widths = mixer.cut_widths()
    used = {
        "all_to_all": widths.always
        or (widths.keyed and not kinds.gathers)
        or (widths.scanned and not kinds.states),
        "all_gather": widths.keyed and kinds.gathers and not kinds.ring,
        "ring": kinds.ring,
        "states": widths.scanned and kinds.states,
    }
    return " and ".join(name for name, holds in used.items() if holds)
