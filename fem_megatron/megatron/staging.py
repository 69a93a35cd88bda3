"""Page-locked host memory for the copies of GPU tensors that a checkpoint save makes.

Tensors are packed, so that little more than their size is allocated. torch rounds the
size of every page-locked allocation up to a power of two (CachingHostAllocator.h), so
separate copies take up to twice their size. The setting pinned_max_round_threshold_mb
does not help: torch 2.11 does not support it, and in 2.13 a freed unrounded block is
given to larger requests of its size class (get_free_block). Therefore this module
allocates blocks whose sizes are powers of two and fills them with tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 512  # bytes, as torch aligns tensors on a GPU


def packed(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return block sizes for tensors of these byte sizes, and the (block, offset) of each tensor.

    Tensors are placed in order of decreasing size, each in the first block with enough free bytes.
    If no block has enough, a new one is added. Its size is the largest power of two within the
    bytes that remain to be placed, or the smallest power of two that fits the tensor if that is
    larger.
    """
    aligned = [(size // _ALIGNMENT + 1) * _ALIGNMENT for size in sizes]
    left = sum(aligned)
    blocks = list[int]()
    used = list[int]()
    places = [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=aligned.__getitem__, reverse=True):
        size = aligned[index]
        block = next((n for n, taken in enumerate(used) if blocks[n] - taken >= size), len(blocks))
        if block == len(blocks):
            blocks.append(max(1 << (size - 1).bit_length(), 1 << (left.bit_length() - 1)))
            used.append(0)
        places[index] = block, used[block]
        used[block] += size
        left -= size
    return blocks, places


def staged(tensors: Sequence[Tensor], *, pinned: bool = True) -> list[Tensor]:
    """Return host copies of GPU tensors. Their contents are valid after a GPU synchronization.

    Each copy is a view into a shared block but has a storage of exactly its size, because
    torch.save writes complete storages. A block is freed when none of its copies is alive.

    pinned: page-lock the blocks.
    """
    sizes, places = packed([tensor.nbytes for tensor in tensors])
    blocks = [
        torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage() for size in sizes
    ]
    copies = []
    for tensor, (block, offset) in zip(tensors, places, strict=True):
        storage = blocks[block][offset : offset + tensor.nbytes]
        copies.append(
            torch.empty(0, dtype=tensor.dtype)
            .set_(storage)
            .view(tensor.shape)
            .copy_(tensor, non_blocking=True)
        )
    return copies
