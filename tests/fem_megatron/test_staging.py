"""Tests of packing a save's tensors on the host."""

from __future__ import annotations

import gc
import io
import random

import pytest
import torch

from fem_megatron.megatron import platform
from fem_megatron.megatron.staging import packed, staged


@pytest.mark.parametrize("most", [1, 10**4, 10**8])
def test_blocks_are_powers_of_two_little_larger_than_what_they_hold(most: int) -> None:
    sizes = [random.Random(most).randrange(most) for _ in range(300)]
    blocks, places = packed(sizes)
    assert all(block & (block - 1) == 0 for block in blocks)
    ends = [0] * len(blocks)
    for size, (block, offset) in sorted(
        zip(sizes, places, strict=True), key=lambda entry: entry[1]
    ):
        assert offset >= ends[block] and offset % 512 == 0  # no overlap
        ends[block] = offset + size
        assert ends[block] <= blocks[block]
    # Alignment takes up to 512 bytes per tensor. The 3%: small tensors fill the space that large
    # ones leave in a block.
    assert sum(blocks) <= 1.03 * (sum(sizes) + 512 * len(sizes))


def test_few_tensors_and_none() -> None:
    assert packed([]) == ([], [])
    assert packed([0]) == ([512], [(0, 0)])
    # Aligned to 1024, 3584 and 512 bytes, 5120 in total: the largest power of two within that is
    # 4096, and the smallest tensor fills its remainder.
    assert packed([1000, 3583, 500]) == ([4096, 1024], [(1, 0), (0, 0), (0, 3584)])


def test_copies_have_storages_of_their_own_size_and_keep_their_memory() -> None:
    tensors = [
        torch.randn(7, 300),
        torch.randn(()),
        torch.arange(5),
        torch.randn(64, 64).bfloat16(),
        torch.empty(0, 3),
    ]
    copies = staged(tensors, pinned=False)
    gc.collect()
    torch.full((2**14,), torch.nan)  # would overwrite the copies if their memory were free
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor) and copy.is_contiguous()
        assert platform.stored(copy).nbytes == tensor.nbytes
        written = io.BytesIO()
        torch.save(copy, written)
        # The file does not contain the entire block.
        assert len(written.getvalue()) < tensor.nbytes + 2000
        assert torch.equal(torch.load(io.BytesIO(written.getvalue()), weights_only=True), tensor)
