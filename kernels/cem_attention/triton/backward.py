"""Backward of CEM's attention: kernels that recompute a tile's weights, by rows, by keys and by
pairs. No atomics.

The kernel by rows runs first: it computes dq and stores the softmax's row terms for the others. The
kernel by keys adds the gradients as values and as keys in one sum. The kernel by pairs computes the
gradient of the scores' additive part C, summed over the heads that share it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cem_attention.triton.forward import (
    Part,
    bias_tile,
    head_tile,
    pair_scores,
    row_tile,
    sizes_of,
)
from kernels.tiles import LOG2_E, good_at, load_tile, of_head, store_tile


@triton.jit
def _weights(
    a, b, a_grad, b_grad, added, scaled, own, key, keys, slope, alone, scale, own_valid, key_valid,
    lse, row_term, edge,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return p of a tile and the gradient of its a_ij, p (dp - sum_j p dp).

    The tile is a b^T: queries and keys, or keys and queries. own, key, lse, row_term and the masks
    broadcast against it.
    """
    products = tl.dot(a, tl.trans(b), added, input_precision="ieee")
    scores = pair_scores(
        products, scaled, own, key, keys, slope, alone, scale, own_valid, key_valid, edge, CAUSAL
    )
    weights = tl.exp2(scores - lse)
    return weights, weights * (tl.dot(a_grad, tl.trans(b_grad), input_precision="ieee") - row_term)


@triton.jit
def _dq_kernel(
    q, k, bias, slopes, alone, valid, out, d_out, lse, row_terms, dq, rows, keys, first,
    scale, unit,
    q_batch, q_head, q_row, k_batch, k_head, k_row, bias_batch, bias_head, bias_row, valid_batch,
    out_batch, out_head, out_row,
    d_out_batch, d_out_head, d_out_row, dq_batch, dq_head, dq_row, lse_batch, lse_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute dq and the row terms of M rows of a head.

    Grid: heads, tiles of rows (the last ones first), batch. ``scale`` includes log2(e), ``unit``
    does not.

    The exact row term is sum_j p_ij dp_ij, which is stored; o.do, which is known before, differs by
    rounding. dq computed with o.do is corrected by o times the difference, because sum_j p_ij k_j =
    o (keys are values).
    """
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    local = tl.arange(0, M)
    position = first + start + local
    own = position.to(tl.float32)
    slope, own_bias = tl.load(slopes + head) * LOG2_E, tl.load(alone) * LOG2_E
    query = head_tile(q, batch, head, q_batch, q_head, q_row, start, rows, M, WIDTH, PADDED, ALIGN)
    grad = head_tile(
        d_out, batch, head, d_out_batch, d_out_head, d_out_row, start, rows, M, WIDTH, PADDED, ALIGN
    )
    row, there = batch * lse_batch + head * lse_head + start + local, start + local < rows
    row_lse = tl.load(lse + row, mask=there, other=float("inf"))
    out = of_head(out, batch, head, out_batch, out_head, tl.cast(start, tl.int64), out_row, ALIGN)
    made = load_tile(out, out_row, rows - start, M, WIDTH, PADDED, True, ALIGN)
    row_term = tl.sum(grad.to(tl.float32) * made.to(tl.float32), 1)
    k = of_head(k, batch, head, k_batch, k_head, ALIGN=ALIGN)
    bias = of_head(bias, batch, head, bias_batch, bias_head, tl.cast(start, tl.int64), bias_row)
    valid = of_head(valid, batch, 0, valid_batch, 0)
    own_valid = good_at(valid, position[:, None], keys)
    total = tl.zeros([M, PADDED], tl.float32)
    missing = tl.zeros([M], tl.float32)
    end = keys
    common = 0
    if CAUSAL:
        end = tl.minimum(keys, first + start + M)
        common = first + start
    tl.assume(end > 0)
    for n in tl.range(0, end, N, num_stages=STAGES):
        key = n + tl.arange(0, N)
        key_tile = row_tile(k, k_row, n, keys, N, WIDTH, PADDED, ALIGN)
        added = None
        if bias is not None:
            added = bias_tile(bias, bias_row, local[:, None], rows - start, key[None, :], keys)
        _, d_scores = _weights(
            query, key_tile, grad, key_tile, added, None, own[:, None],
            key.to(tl.float32)[None, :], keys, slope, own_bias, scale, own_valid,
            good_at(valid, key[None, :], keys), row_lse[:, None], row_term[:, None],
            n + N > common, CAUSAL,
        )  # fmt: skip
        missing += tl.sum(d_scores, 1)
        total = tl.dot(d_scores.to(key_tile.dtype), key_tile, total, input_precision="ieee")
    tl.store(row_terms + row, row_term + missing, mask=there)
    made = load_tile(out, out_row, rows - start, M, WIDTH, PADDED, True, ALIGN)
    total -= missing[:, None] * made.to(tl.float32)
    at = of_head(dq, batch, head, dq_batch, dq_head, tl.cast(start, tl.int64), dq_row, ALIGN)
    store_tile(at, dq_row, rows - start, total * unit, M, WIDTH, PADDED, ALIGN)


@triton.jit
def _dk_kernel(
    q, k, bias, slopes, alone, valid, d_out, lse, row_terms, dk, d_alone, rows, keys, first, scale,
    unit,
    q_batch, q_head, q_row, k_batch, k_head, k_row, bias_batch, bias_head, bias_row, valid_batch,
    d_out_batch, d_out_head, d_out_row, dk_batch, dk_head, dk_row, lse_batch, lse_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, ADD: tl.constexpr,
    STAGES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute the part of dk of N keys of a head that these rows give; ADD: add it to dk. Also
    compute their part of ``alone``'s gradient, one number per program.

    Grid: heads, tiles of keys from the first, which most rows see, batch.
    """
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_key = tl.program_id(1) * N
    local = tl.arange(0, N)
    key = first_key + local
    position = key.to(tl.float32)[:, None]
    slope, own_bias = tl.load(slopes + head) * LOG2_E, tl.load(alone) * LOG2_E
    key_tile = head_tile(
        k, batch, head, k_batch, k_head, k_row, first_key, keys, N, WIDTH, PADDED, ALIGN
    )
    q = of_head(q, batch, head, q_batch, q_head, ALIGN=ALIGN)
    d_out = of_head(d_out, batch, head, d_out_batch, d_out_head, ALIGN=ALIGN)
    lse += batch * lse_batch + head * lse_head
    row_terms += batch * lse_batch + head * lse_head
    bias = of_head(bias, batch, head, bias_batch, bias_head)
    valid = of_head(valid, batch, 0, valid_batch, 0)
    key_valid = good_at(valid, key[:, None], keys)
    dk = of_head(dk, batch, head, dk_batch, dk_head, tl.cast(first_key, tl.int64), dk_row, ALIGN)
    d_own = tl.zeros([N], tl.float32)
    total = tl.zeros([N, PADDED], tl.float32)
    if ADD:
        total = load_tile(dk, dk_row, keys - first_key, N, WIDTH, PADDED, True, ALIGN)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(first_key - first, 0) // M * M
    tl.assume(begin < rows)
    for m in tl.range(begin, rows, M, num_stages=STAGES):
        edge = True
        if CAUSAL:
            edge = first + m < first_key + N
        start, row = tl.cast(m, tl.int64), m + tl.arange(0, M)
        query = row_tile(q, q_row, m, rows, M, WIDTH, PADDED, ALIGN)
        grad = row_tile(d_out, d_out_row, m, rows, M, WIDTH, PADDED, ALIGN)
        row_lse = tl.load(lse + row, mask=row < rows, other=float("inf"))
        row_term = tl.load(row_terms + row, mask=row < rows, other=0.0)
        added = None
        if bias is not None:
            added = bias_tile(
                bias + start * bias_row,
                bias_row,
                tl.arange(0, M)[None, :],
                rows - m,
                key[:, None],
                keys,
            )
        own_valid = good_at(valid, (first + row)[None, :], first + rows)
        own = (first + row).to(tl.float32)[None, :]
        weights, d_scores = _weights(
            key_tile, query, key_tile, grad, added, None, own, position, keys, slope, own_bias,
            scale, own_valid, key_valid, row_lse[None, :], row_term[None, :], edge, CAUSAL,
        )  # fmt: skip
        if edge:
            d_own += tl.sum(tl.where(own == position, d_scores, 0.0), 1)
        total = tl.dot(weights.to(grad.dtype), grad, total, input_precision="ieee")
        total = tl.dot((d_scores * unit).to(query.dtype), query, total, input_precision="ieee")
    store_tile(dk, dk_row, keys - first_key, total, N, WIDTH, PADDED, ALIGN)
    program = (batch * tl.num_programs(0) + head) * tl.num_programs(1) + tl.program_id(1)
    tl.store(d_alone + program, tl.sum(d_own, 0))


@triton.jit
def _d_bias_kernel(
    q, k, bias, slopes, alone, valid, d_out, lse, row_terms, d_bias, rows, keys, first, scale, unit,
    groups, heads,
    q_batch, q_head, q_row, k_batch, k_head, k_row, bias_batch, bias_head, bias_row, valid_batch,
    d_out_batch, d_out_head, d_out_row, lse_batch, lse_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of C for M rows and N keys, summed over the ``heads`` heads of a group
    in their order; zeros where no pair is seen.

    Grid: tiles of keys, tiles of rows, batch x groups. d_bias has the layout of bias.
    """
    batch, group = (
        (tl.program_id(2) // groups).to(tl.int64),
        (tl.program_id(2) % groups).to(tl.int64),
    )
    start, first_key = tl.program_id(1) * M, tl.program_id(0) * N
    local, local_key = tl.arange(0, M), tl.arange(0, N)
    key, position = first_key + local_key, first + start + local
    offset = batch * bias_batch + group * bias_head + tl.cast(start, tl.int64) * bias_row
    total = tl.zeros([M, N], tl.float32)
    seen = first_key < keys
    if CAUSAL:
        seen = first_key < first + start + M
    if seen:
        there = start + local < rows
        scaled = (
            bias_tile(bias + offset, bias_row, local[:, None], rows - start, key[None, :], keys)
            * scale
        )
        valid_base = of_head(valid, batch, 0, valid_batch, 0)
        own_valid = good_at(valid_base, position[:, None], first + rows)
        key_valid = good_at(valid_base, key[None, :], keys)
        own_bias = tl.load(alone) * LOG2_E
        edge = True
        if CAUSAL:
            edge = first + start < first_key + N
        for n in tl.range(0, heads, num_stages=STAGES):
            head = group * heads + n
            slope = tl.load(slopes + head) * LOG2_E
            query = head_tile(
                q, batch, head, q_batch, q_head, q_row, start, rows, M, WIDTH, PADDED, ALIGN
            )
            grad = head_tile(
                d_out,
                batch,
                head,
                d_out_batch,
                d_out_head,
                d_out_row,
                start,
                rows,
                M,
                WIDTH,
                PADDED,
                ALIGN,
            )
            key_tile = head_tile(
                k, batch, head, k_batch, k_head, k_row, first_key, keys, N, WIDTH, PADDED, ALIGN
            )
            row = batch * lse_batch + head * lse_head + start + local
            row_lse = tl.load(lse + row, mask=there, other=float("inf"))
            row_term = tl.load(row_terms + row, mask=there, other=0.0)
            _, d_scores = _weights(
                query, key_tile, grad, key_tile, None, scaled, position.to(tl.float32)[:, None],
                key.to(tl.float32)[None, :], keys, slope,
                own_bias, scale, own_valid, key_valid, row_lse[:, None], row_term[:, None], edge,
                CAUSAL,
            )  # fmt: skip
            total += d_scores
    at = d_bias + offset + local[:, None] * bias_row + key[None, :]
    tl.store(
        at,
        (total * unit).to(d_bias.dtype.element_ty),
        mask=(start + local < rows)[:, None] & (key < keys)[None, :],
    )


def d_queries(
    part: Part, out: Tensor, d_out: Tensor, lse: Tensor, row_terms: Tensor, dq: Tensor
) -> None:
    """Write a part's dq and row terms (layout of lse). Call it before `d_keys` and `d_pairs`."""
    b, heads, rows, width = part.q.shape
    sizes = sizes_of(_dq_kernel, part.q.dtype, width)
    _dq_kernel[(heads, triton.cdiv(rows, sizes.rows), b)](
        *part.pointers(), out, d_out, lse, row_terms, dq, *part.numbers(), part.scale,
        *part.strides(out, d_out, dq), *lse.stride()[:2], **part.constants(sizes, out, d_out, dq),
    )  # fmt: skip


def d_keys(
    part: Part, d_out: Tensor, lse: Tensor, row_terms: Tensor, dk: Tensor, *, add: bool
) -> Tensor:
    """Write the part of dk [b, heads, keys, r] that a part's rows give, or add it to dk. Return
    their part of the gradient of ``alone``, [].
    """
    b, heads, _, width = part.q.shape
    sizes = sizes_of(_dk_kernel, part.q.dtype, width)
    grid = (heads, triton.cdiv(part.k.shape[2], sizes.keys), b)
    d_alone = lse.new_empty(b * heads * grid[1])
    _dk_kernel[grid](
        *part.pointers(), d_out, lse, row_terms, dk, d_alone, *part.numbers(), part.scale,
        *part.strides(d_out, dk), *lse.stride()[:2],
        ADD=add, **part.constants(sizes, d_out, dk),
    )  # fmt: skip
    return d_alone.sum()


def d_pairs(part: Part, d_out: Tensor, lse: Tensor, row_terms: Tensor) -> Tensor:
    """Return the gradient of a part's C, in its shape and layout.

    It is zero where a pair is not seen.
    """
    assert part.bias is not None
    b, heads, rows, width = part.q.shape
    groups, sizes = part.bias.shape[1], sizes_of(_d_bias_kernel, part.q.dtype, width)
    d_bias = torch.empty_strided(
        part.bias.shape, part.bias.stride(), dtype=part.bias.dtype, device=part.bias.device
    )
    _d_bias_kernel[(triton.cdiv(part.k.shape[2], sizes.keys), triton.cdiv(rows, sizes.rows),
    b * groups)](
        *part.pointers(), d_out, lse, row_terms, d_bias, *part.numbers(), part.scale, groups,
        heads // groups, *part.strides(d_out),
        *lse.stride()[:2], **part.constants(sizes, d_out),
    )  # fmt: skip
    return d_bias


MATRIX = (_dq_kernel, _dk_kernel, _d_bias_kernel)  # compiled to wgmma on sm_90
