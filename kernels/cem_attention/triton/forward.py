"""Forward pass of CEM's attention (Causal Energy Minimization) in Triton, one pass over the keys.

The module also contains the helpers shared with the backward pass: tiles, scores, block sizes. Keys
are also the values, so a tile of keys is loaded once for both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.tiles import (
    LOG2_E,
    LOG2E,
    Blocks,
    alignment,
    at_row,
    fitting,
    good_at,
    load_tile,
    of_head,
    padded,
    store_tile,
)


class Part(NamedTuple):
    """Arguments of a kernel launch: some query rows of some sequences, and their keys.

    The last dimension has unit stride.
    q: [b, heads, rows, r]; its first row is at position ``first`` among the keys.
    k: [b, heads, keys, r], keys and values.
    bias: C [b, 1 or heads, rows, keys], added to q.k before the scale, or None.
    slopes: ALiBi's slopes [heads], float32.
    alone: b_self - b_cross, a float32 scalar added to the score of a token with itself.
    valid: [b, at least keys] bool, False at padding, or None.
    """

    q: Tensor
    k: Tensor
    bias: Tensor | None
    slopes: Tensor
    alone: Tensor
    valid: Tensor | None
    first: int
    scale: float
    causal: bool

    def pointers(self) -> tuple[Tensor | None, ...]:
        """Return the tensor arguments with which every kernel's signature begins."""
        return self.q, self.k, self.bias, self.slopes, self.alone, self.valid

    def numbers(self) -> tuple[int | float, ...]:
        """Return the scalar arguments: rows, keys, ``first``, and scale times log2(e)."""
        return self.q.shape[2], self.k.shape[2], self.first, self.scale * LOG2E

    def strides(self, *others: Tensor) -> tuple[int, ...]:
        """Return the strides of q, k, C, valid and the other tensors, three for each but valid.

        C has stride 0 between heads if they share one C.
        """
        bias = (0, 0, 0)
        if self.bias is not None:
            bias = (
                self.bias.stride(0),
                self.bias.stride(1) if self.bias.shape[1] > 1 else 0,
                self.bias.stride(2),
            )
        valid = 0 if self.valid is None else self.valid.stride(0)
        return (
            *self.q.stride()[:3],
            *self.k.stride()[:3],
            *bias,
            valid,
            *(n for other in others for n in other.stride()[:3]),
        )

    def constants(self, sizes: Blocks, *others: Tensor) -> dict[str, int | bool]:
        """Return the compile-time arguments and launch options that all kernels have in common."""
        width = self.q.shape[3]
        tiles = {
            "WIDTH": width,
            "PADDED": padded(width),
            "M": sizes.rows,
            "N": sizes.keys,
            "CAUSAL": self.causal,
        }
        return tiles | {
            "STAGES": sizes.stages,
            "ALIGN": alignment(width, self.q, self.k, *others),
            "num_warps": sizes.warps,
            "num_stages": sizes.stages,
        }


# Block sizes of each kernel in bfloat16, for heads up to 64, 128 and 256 wide.
BLOCKS = {
    "_forward_kernel": (Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(64, 32, 8, 2)),
    "_dq_kernel": (Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 3), Blocks(64, 32, 8, 1)),
    "_dk_kernel": (Blocks(32, 128, 8, 2), Blocks(32, 128, 8, 3), Blocks(64, 16, 8, 1)),
    "_d_bias_kernel": (Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(64, 32, 8, 2)),
}


def sizes_of(kernel: Any, dtype: torch.dtype, width: int) -> Blocks:
    """Return the block sizes of a kernel for heads of this width.

    In Triton's interpreter they are small, so that a test has many blocks. In float32 they are
    small because float32 multiplies without tensor cores.
    """
    wide = padded(width)
    alone = Blocks(32, 32, 8, 1) if wide <= 64 else Blocks(16, 16, 8, 1)
    halves = BLOCKS[kernel.fn.__name__][(wide > 64) + (wide > 128)]
    return fitting(dtype, Blocks(32, 16, 4, 1), alone, halves)


@triton.jit
def row_tile(
    x,
    x_t,
    start,
    count,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Load [ROWS, PADDED] of x, from row ``start``; zero from row ``count`` on.

    WIDTH and ALIGN: see `load_tile`.
    """
    return load_tile(
        at_row(x, tl.cast(start, tl.int64), x_t, ALIGN),
        x_t,
        count - start,
        ROWS,
        WIDTH,
        PADDED,
        True,
        ALIGN,
    )


@triton.jit
def head_tile(
    x, b, h, x_b, x_h, x_t, start, count, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Load a `row_tile` of head h of sequence b of x."""
    return row_tile(
        of_head(x, b, h, x_b, x_h, ALIGN=ALIGN), x_t, start, count, ROWS, WIDTH, PADDED, ALIGN
    )


@triton.jit
def pair_scores(
    products,
    scaled,
    own,
    key,
    keys,
    slope,
    alone,
    scale,
    own_valid,
    key_valid,
    edge,
    CAUSAL: tl.constexpr,
):
    """Return a tile of scores a_ij times log2(e), for queries i and keys j.

    a_ij is defined in `cem_attention`; b_cross is left out, because a softmax ignores it. The
    score is -inf where i does not see j.
    products: q_i.k_j + C_ij if ``scaled`` is None; otherwise q_i.k_j, and ``scaled`` is C_ij
    times scale.
    own, key: positions of queries and keys as float32 (exact to 2^24) that broadcast against
    each other; ``keys`` is the number of keys. slope, alone and scale include log2(e).
    own_valid, key_valid: None, or masks of unpadded tokens that broadcast likewise.
    edge: True if the tile may contain i <= j or j >= keys.
    """
    distance = own - key
    if not CAUSAL:
        distance = tl.abs(distance)
    scores = products * scale if scaled is None else products * scale + scaled
    scores -= slope * distance
    if own_valid is not None:
        scores = tl.where(own == key, scores + alone, scores)
        seen = own_valid & key_valid
        if CAUSAL:
            seen = seen & (key <= own)
        scores = tl.where(seen | (own == key), scores, float("-inf"))
    elif edge:
        scores = tl.where(own == key, scores + alone, scores)
        seen = key <= own if CAUSAL else key < keys
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def bias_tile(bias, row_stride, row, rows, key, keys):
    """Load a tile of C_ij as float32; zeros outside C.

    row, key: indices that broadcast against each other; ``bias`` points to row 0. In a causal read,
    values above the diagonal may be arbitrary, because these pairs are masked.
    """
    return tl.load(bias + (row * row_stride + key), mask=(row < rows) & (key < keys), other=0.0).to(
        tl.float32
    )


@triton.jit
def _forward_kernel(
    q, k, bias, slopes, alone, valid, out, lse, rows, keys, first, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, bias_batch, bias_head, bias_row, valid_batch,
    out_batch, out_head, out_row,
    lse_batch, lse_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute the output, and the log-sum-exp in base 2, of M rows of a head.

    Grid: heads (they share C's tiles), row tiles in reverse order (the last one sees the most
    keys), batch. ``first`` is row 0's position among the keys.
    """
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    local = tl.arange(0, M)
    position = first + start + local
    own = position.to(tl.float32)
    slope, own_bias = tl.load(slopes + head) * LOG2_E, tl.load(alone) * LOG2_E
    row = tl.cast(start, tl.int64)
    query = head_tile(q, batch, head, q_batch, q_head, q_row, start, rows, M, WIDTH, PADDED, ALIGN)
    k = of_head(k, batch, head, k_batch, k_head, ALIGN=ALIGN)
    bias = of_head(bias, batch, head, bias_batch, bias_head, row, bias_row)
    valid = of_head(valid, batch, 0, valid_batch, 0)
    own_valid = good_at(valid, position[:, None], keys)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    read = tl.zeros([M, PADDED], tl.float32)
    end = keys
    # All of these rows see the keys before ``common``, and none of those keys is a row's own.
    common = 0
    if CAUSAL:
        end = tl.minimum(keys, first + start + M)
        common = first + start
    # If a loop may run zero times, ptxas does not overlap its products.
    tl.assume(end > 0)
    # With num_stages on the loop, C's tiles are prefetched too.
    for n in tl.range(0, end, N, num_stages=STAGES):
        key = n + tl.arange(0, N)
        key_tile = row_tile(k, k_row, n, keys, N, WIDTH, PADDED, ALIGN)
        added = None
        if bias is not None:
            added = bias_tile(bias, bias_row, local[:, None], rows - start, key[None, :], keys)
        products = tl.dot(query, tl.trans(key_tile), added, input_precision="ieee")
        scores = pair_scores(
            products, None, own[:, None], key.to(tl.float32)[None, :], keys, slope, own_bias, scale,
            own_valid,
            good_at(valid, key[None, :], keys), n + N > common, CAUSAL,
        )  # fmt: skip
        highest = tl.maximum(best, tl.max(scores, 1))
        shift = highest
        if valid is not None:  # a row may not have seen any key yet
            shift = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(best - shift)
        total = total * shrink + tl.sum(weights, 1)
        read = tl.dot(
            weights.to(key_tile.dtype), key_tile, read * shrink[:, None], input_precision="ieee"
        )
        best = highest
    if valid is not None:
        total = tl.where(start + local < rows, total, 1.0)  # rows past the last see no key
    at = of_head(out, batch, head, out_batch, out_head, row, out_row, ALIGN)
    store_tile(at, out_row, rows - start, read / total[:, None], M, WIDTH, PADDED, ALIGN)
    tl.store(
        lse + batch * lse_batch + head * lse_head + start + local,
        best + tl.log2(total),
        mask=start + local < rows,
    )


def attend(part: Part, out: Tensor, lse: Tensor) -> None:
    """Compute a part's attention: fill out [b, heads, rows, r] and lse [b, heads, rows].

    lse is the log-sum-exp of the scores in base 2, float32.
    """
    b, heads, rows, width = part.q.shape
    sizes = sizes_of(_forward_kernel, part.q.dtype, width)
    _forward_kernel[(heads, triton.cdiv(rows, sizes.rows), b)](
        *part.pointers(),
        out,
        lse,
        *part.numbers(),
        *part.strides(out),
        *lse.stride()[:2],
        **part.constants(sizes, out),
    )


MATRIX = (_forward_kernel,)  # compiled to wgmma on sm_90
