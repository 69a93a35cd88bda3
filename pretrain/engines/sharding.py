"""Express this rank's part of an optimizer as Megatron's sharded tensors.

The parts are written without gathering and read in place.

Both optimizers that are split over data-parallel ranks (Megatron's distributed optimizer and
DeepSpeed's ZeRO) give a rank ranges of flattened parameters. A range of a tensor of n dimensions
consists of at most 2n - 1 boxes: the rest of a row, complete rows, the beginning of another row.
Each box is contiguous in memory and is written as a shard of the full fp32 tensor
``optimizer.state.<one of STATE>.<weight's name>``.

The names and shapes are therefore those of the model. Any engine at any layout can read the
checkpoint: from every tensor it reads the shards that overlap its own boxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = ("param", *MOMENTS)  # Megatron's names of the fp32 weight and of Adam's moments
Item = TypeVar("Item")
# Names layer by layer in the checkpoint for any pipeline split; optimizer state in the model's own
# shapes.
SHARDING = {"non_homogeneous_layers": True, "distrib_optim_sharding_type": "fully_reshardable"}

# Every rank that needs some of a shard reads all of it, to compare its checksum, so a shard is
# small compared to a rank's part. It is not small compared to its overhead in a save: a thousand
# bytes of archive and a thousand Python instructions.
_PARTS_OF_A_RANK = 64
_SMALLEST_PART = 2**20  # elements
# Returns a dictionary of sharded tensors with their values.
Read = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Held:
    """This rank's part of a parameter, with its optimizer tensors.

    It consists of ``numel`` elements of the flattened parameter from ``start`` on.

    place: location of the parameter in the checkpoint, with the replica id of this part. tensors:
    the optimizer's existing tensors by their names in STATE. They are flat fp32 views of the
    optimizer's own, at least ``numel`` long. gradient: a tensor of the same form during an update,
    already multiplied by ``clipped``; None otherwise.
    """

    place: ShardedTensor
    start: int
    numel: int
    tensors: Mapping[str, torch.Tensor]
    gradient: torch.Tensor | None = None
    clipped: float = 1.0

    @classmethod
    def of(
        cls,
        place: ShardedTensor,
        flat: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        gradient: torch.Tensor | None,
        start: int = 0,
        numel: int | None = None,
        offset: int = 0,
    ) -> Held:
        """Return the part that begins at element ``offset`` of the optimizer's tensor ``flat``.

        state, gradient: the optimizer's state and the gradient of ``flat``. numel: None for all
        elements of ``flat``.
        """
        size = flat.numel() if numel is None else numel

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().view(-1).narrow(0, offset, size)

        moments = {name: own(state[name]) for name in MOMENTS if name in state}
        tensors = {"param": own(flat), **moments}
        return cls(place, start, size, tensors, None if gradient is None else own(gradient))


def data_parallel_group() -> torch.distributed.ProcessGroup:
    """Return the ranks that have the same weights, which differ in data or context parallelism."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def places(model: GPTModel) -> dict[torch.nn.Parameter, ShardedTensor]:
    """Return each parameter's location in the checkpoint: a sharded tensor without values.

    Call it before the parameters are sharded.
    """
    found = {}
    for entry in model.sharded_state_dict(metadata=sharding_metadata()).values():
        if isinstance(entry, ShardedTensor):
            found[entry.data] = replace(entry, data=None)
    missing = [name for name, parameter in model.named_parameters() if parameter not in found]
    assert not missing and len(found) == len(list(model.parameters())), missing
    return found


def sharding_metadata() -> dict[str, Any]:
    """Return the settings for Megatron's functions that return sharded tensors."""
    return {**SHARDING, "dp_cp_group": data_parallel_group()}


def only_here(place: ShardedTensor) -> ShardedTensor:
    """Return the location with replica id 0, for data that only this data-parallel rank has."""
    return (
        replace(place, replica_id=(*place.replica_id[:-1], 0))
        if isinstance(place.replica_id, tuple)
        else place
    )


def optimizer_state(held: Iterable[Held], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the optimizer section of a checkpoint.

    It contains the parts ``held`` of this rank as shards to write, and the parameter groups without
    their parameters.
    """
    held = list(held)
    largest = largest_part(held)
    return {
        "optimizer": {"param_groups": groups},
        "param_state": {number: _state(one, largest) for number, one in enumerate(held)},
        "param_state_sharding_type": SHARDING["distrib_optim_sharding_type"],
    }


@torch.no_grad()
def read_optimizer(
    read: Read, held: Iterable[Held], common: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Read the optimizer of a checkpoint into the parts ``held`` of this rank, in place.

    Return everything that was read, including the groups (`optimizer_state`). The last argument
    contains further entries to read in the same call.
    """
    requested = {number: _state(one, one.numel) for number, one in enumerate(held)}
    targets = []  # (part, name, shard, tensor), taken before the read
    for number, one in requested.items():
        for name, shards in one.items():
            for n, shard in shards.items():
                targets.append((number, name, n, shard.data))
    given = read({**(common or {}), "optimizer": {"param_state": requested}})
    for number, name, n, target in targets:
        value = given["optimizer"]["param_state"][number][name][n]
        # If several ranks hold a shard, one of them has read it.
        if value.data_ptr() != target.data_ptr():
            target.copy_(value)
    return given


def largest_part(held: Iterable[Held]) -> int:
    """Return the largest number of elements that one shard of a rank's parts may have."""
    return max(_SMALLEST_PART, sum(one.numel for one in held) // _PARTS_OF_A_RANK)


def _state(held: Held, largest: int) -> dict[str, dict[int, ShardedTensor]]:
    """Return name -> shards of each optimizer tensor of a part.

    No shard has more than ``largest`` elements.
    """
    named = {
        name: replace(held.place, key=f"optimizer.state.{name}.{held.place.key}")
        for name in held.tensors
    }
    return {
        name: parts(place, held.start, held.tensors[name][: held.numel], largest)
        for name, place in named.items()
    }


def parts(
    place: ShardedTensor, start: int, flat: torch.Tensor, largest: int
) -> dict[int, ShardedTensor]:
    """Return the elements of ``flat`` as shards of the tensor at ``place``.

    start: position of the first element in the flattened tensor. The shards are views into
    ``flat``, each with at most ``largest`` elements.
    """
    assert not place.prepend_axis_num
    found, position = {}, 0
    for number, (offset, shape) in enumerate(
        boxes(tuple(place.local_shape), start, start + flat.numel(), largest)
    ):
        numel = math.prod(shape)
        found[number] = replace(
            place,
            data=flat[position : position + numel].view(shape),
            dtype=flat.dtype,
            local_shape=shape,
            global_offset=tuple(a + b for a, b in zip(place.global_offset, offset, strict=True)),
            axis_fragmentations=None,
        )
        position += numel
    return found


def in_rounds(sizes: Iterable[tuple[Item, int]], capacity: int) -> Iterator[list[Item]]:
    """Yield items in their order: together at most ``capacity`` elements, or one larger item.

    sizes: pairs of an item and its number of elements.
    """
    found, left = list[Item](), capacity
    for item, numel in sizes:
        if found and left < numel:
            yield found
            found, left = [], capacity
        found.append(item)
        left -= numel
    if found:
        yield found


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, size


def boxes(shape: tuple[int, ...], start: int, end: int, largest: int) -> Iterator[Box]:
    """Yield the elements [start, end) of a flattened tensor as boxes in the order of memory.

    No box has more than ``largest`` elements. Without that limit n dimensions give at most 2n - 1
    boxes. A row of a matrix is cut by the same rule.
    """
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # the complete rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start, end, largest)
        return
    yield from _in_row(shape, first - 1, start, first * row, largest)
    if row > largest:
        for index in range(first, last):
            yield from _in_row(shape, index, index * row, (index + 1) * row, largest)
    else:
        rows = largest // row
        for index in range(first, last, rows):
            yield (index, *(0 for _ in shape[1:])), (min(rows, last - index), *shape[1:])
    yield from _in_row(shape, last, last * row, end, largest)


def _in_row(
    shape: tuple[int, ...], index: int, start: int, end: int, largest: int
) -> Iterator[Box]:
    begin = index * math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - begin, end - begin, largest):
        yield (index, *offset), (1, *size)
