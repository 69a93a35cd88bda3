"""The page-locked host memory in which a save's tensors wait to be written, packed so that it is little more than their size.

torch rounds the size of every page-locked allocation up to a power of two (CachingHostAllocator.h), so a copy of each tensor by
itself takes up to twice its size. The setting pinned_max_round_threshold_mb is no remedy: torch 2.11 does not know it, and in 2.13
a freed block that was not rounded is given to larger requests of its size class (get_free_block). So blocks whose sizes are powers
of two are allocated here and filled with tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 512  # bytes, as torch aligns tensors on a GPU


def packed(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Blocks for tensors of these bytes, and the block of each tensor with its offset there.

    A block is a power of two: the largest within what is left to place, or where that is less, the first that holds the tensor. The
    largest tensors come first; each goes to the first block that has room. So few bytes of each block stay empty.
    """
    aligned = [(size // _ALIGNMENT + 1) * _ALIGNMENT for size in sizes]
    left, blocks, used = sum(aligned), list[int](), list[int]()
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
    """Copies of a GPU's tensors on the host, which are complete when the GPU is synchronized.

    Each has a storage of its own size, which is what torch saves of a tensor; together they keep their block.
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
