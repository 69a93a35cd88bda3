"""CEM's attention forward, one pass over the keys: a tile of them is loaded once, as keys and as values. No gradients here."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.build import Build
from kernels.cem_attention.triton.tiles import (
    LOG2_E,
    Part,
    Sizes,
    bias_tile,
    built,
    fitting,
    padded,
    pair_scores,
    store_tile,
    tile_of,
)


@triton.jit
def _read_tile(
    best, total, read, query, k, k_row, start, keys, bias, bias_row, rows, own, own_valid, valid, slope, alone, scale, edge,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the running maximum [M], sum [M] and read [M, PADDED]. ``bias`` begins at the tile's first row."""
    local = tl.arange(0, N)
    key = start + local
    key_tile = tile_of(k, start, keys, local, k_row, WIDTH, PADDED, ALIGN)
    added = None
    if bias is not None:
        added = bias_tile(bias, bias_row, tl.arange(0, own.shape[0])[:, None], rows, key[None, :], keys)
    products = tl.dot(query, tl.trans(key_tile), added, input_precision="ieee")
    key_valid = None
    if valid is not None:
        key_valid = tl.load(valid + key, mask=key < keys, other=False)[None, :]
    position = key.to(tl.float32)[None, :]
    scores = pair_scores(products, None, own[:, None], position, keys, slope, alone, scale, own_valid, key_valid, edge, CAUSAL)
    highest = tl.maximum(best, tl.max(scores, 1))
    shift = highest
    if valid is not None:  # a row may have seen nothing yet
        shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(best - shift)
    total = total * shrink + tl.sum(weights, 1)
    read = tl.dot(weights.to(key_tile.dtype), key_tile, read * shrink[:, None], input_precision="ieee")
    return highest, total, read


@triton.jit
def _forward_kernel(
    q, k, bias, slopes, alone, valid, out, lse, rows, keys, first, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, bias_batch, bias_head, bias_row, valid_batch, out_batch, out_head, out_row,
    lse_batch, lse_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """out, and lse in base 2, of M rows of a head. Grid: heads (they share C's tiles), row tiles from the last (it sees most), batch.

    ``first`` is row 0's position among the keys.
    """
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    local = tl.arange(0, M)
    position = first + start + local
    own = position.to(tl.float32)
    slope, own_bias = tl.load(slopes + head) * LOG2_E, tl.load(alone) * LOG2_E
    query = tile_of(q + tl.multiple_of(batch * q_batch + head * q_head, ALIGN), start, rows, local, q_row, WIDTH, PADDED, ALIGN)
    k_head_base = k + tl.multiple_of(batch * k_batch + head * k_head, ALIGN)
    bias_base = None
    if bias is not None:
        bias_base = bias + batch * bias_batch + head * bias_head + tl.cast(start, tl.int64) * bias_row
    valid_base = None
    own_valid = None
    if valid is not None:
        valid_base = valid + batch * valid_batch
        own_valid = tl.load(valid_base + position, mask=position < keys, other=False)[:, None]
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    read = tl.zeros([M, PADDED], tl.float32)
    end = keys
    common = 0  # keys before it are seen by all of these rows, and are none's own
    if CAUSAL:
        end = tl.minimum(keys, first + start + M)
        common = first + start
    tl.assume(end > 0)  # in a loop that may not run at all, ptxas lets no product run on beside others
    for n in tl.range(0, end, N, num_stages=STAGES):  # said here, C's tiles are fetched ahead too
        best, total, read = _read_tile(
            best, total, read, query, k_head_base, k_row, n, keys, bias_base, bias_row, rows - start, own, own_valid, valid_base,
            slope, own_bias, scale, n + N > common, WIDTH, PADDED, N, CAUSAL, ALIGN,
        )  # fmt: skip
    if valid is not None:
        total = tl.where(start + local < rows, total, 1.0)  # beyond the rows nothing is seen
    at = out + tl.multiple_of(batch * out_batch + head * out_head, ALIGN)
    store_tile(at, start, rows, local, out_row, read / total[:, None], WIDTH, PADDED, ALIGN)
    tl.store(lse + batch * lse_batch + head * lse_head + start + local, best + tl.log2(total), mask=start + local < rows)


def forward_sizes(dtype: torch.dtype, width: int) -> Sizes:
    """Of the forward's tiles for heads this wide."""
    return fitting(dtype, padded(width), Sizes(128, 64, 8, 3), Sizes(128, 64, 8, 2), Sizes(64, 32, 8, 2))


def attend(part: Part, out: Tensor, lse: Tensor) -> None:
    """Write a part's out [b, heads, rows, r] and lse [b, heads, rows] (base 2, float32)."""
    b, heads, rows, width = part.q.shape
    sizes = forward_sizes(part.q.dtype, width)
    _forward_kernel[(heads, triton.cdiv(rows, sizes.m), b)](
        *part.pointers(), out, lse, *part.numbers(), *part.strides(out), *lse.stride()[:2], **part.constants(sizes, out)
    )


def _build(width: int, what: str = "", *, bias: bool = True, valid: bool = False, causal: bool = True) -> Build:
    label, sizes = f"d {width}{what}", forward_sizes(torch.bfloat16, width)
    outputs = {"out": "*bf16", "lse": "*fp32"}
    return built(label, _forward_kernel, sizes, width, outputs=outputs, bias=bias, valid=valid, causal=causal)


BUILDS: tuple[Build, ...] = (
    *(_build(width) for width in (56, 64, 72, 84, 128)),
    _build(64, ", no diagonal", bias=False),
    _build(84, ", padding", valid=True),
    _build(64, ", full", causal=False),
    _build(256),
)
