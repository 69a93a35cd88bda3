"""CEM's attention backward: three kernels that make a tile's weights again, by rows, by keys and by pairs. Nothing is added by atomics.

By rows comes first: it leaves the softmax's row terms to the others. By keys the gradients as values and as keys meet in one sum. By pairs
gives what the scores' additive part C gets, summed over the heads that share it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cem_attention.triton.forward import (
    LOG2_E,
    Part,
    bias_tile,
    head_tile,
    pair_scores,
    sizes_of,
    store_tile,
    tile_of,
)
from kernels.tiles import good_at, of_head


@triton.jit
def _weights(
    a, b, a_grad, b_grad, added, scaled, own, key, keys, slope, alone, scale, own_valid, key_valid, lse, row_term, edge,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """p of a tile and the gradient of its a_ij, p (dp - sum_j p dp). The tile is a b^T: queries and keys, or keys and queries.

    own, key, lse, row_term and the masks broadcast against it.
    """
    products = tl.dot(a, tl.trans(b), added, input_precision="ieee")
    scores = pair_scores(products, scaled, own, key, keys, slope, alone, scale, own_valid, key_valid, edge, CAUSAL)
    weights = tl.exp2(scores - lse)
    return weights, weights * (tl.dot(a_grad, tl.trans(b_grad), input_precision="ieee") - row_term)


@triton.jit
def _rows_kernel(
    q, k, bias, slopes, alone, valid, out, d_out, lse, row_terms, p_own, rows, keys, first, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, bias_batch, bias_head, bias_row, valid_batch, out_batch, out_head, out_row,
    d_out_batch, d_out_head, d_out_row, lse_batch, lse_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Of M rows of a head: o.do, which is the row term but for o's rounding, and p_ii. Grid: heads, tiles of rows, batch.

    row_terms and p_own lie as lse.
    """
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    start, local = tl.program_id(1) * M, tl.arange(0, M)
    there = start + local < rows
    query = head_tile(q, batch, head, q_batch, q_head, start, rows, local, q_row, WIDTH, PADDED, ALIGN).to(tl.float32)
    product = tl.sum(
        query * head_tile(k, batch, head, k_batch, k_head, first + start, keys, local, k_row, WIDTH, PADDED, ALIGN).to(tl.float32), 1
    )
    grad = head_tile(d_out, batch, head, d_out_batch, d_out_head, start, rows, local, d_out_row, WIDTH, PADDED, ALIGN).to(tl.float32)
    row_term = tl.sum(
        grad * head_tile(out, batch, head, out_batch, out_head, start, rows, local, out_row, WIDTH, PADDED, ALIGN).to(tl.float32), 1
    )
    if bias is not None:
        at = bias + batch * bias_batch + head * bias_head + (tl.cast(start, tl.int64) + local) * bias_row + first + start + local
        product += tl.load(at, mask=there, other=0.0).to(tl.float32)
    row = batch * lse_batch + head * lse_head + start + local
    weight = tl.exp2(product * scale + tl.load(alone) * LOG2_E - tl.load(lse + row, mask=there, other=float("inf")))
    tl.store(row_terms + row, row_term, mask=there)
    tl.store(p_own + row, weight, mask=there)


@triton.jit
def _dq_tile(
    dq, missing, d_own, query, grad, k, k_row, start, keys, bias, bias_row, rows, own, own_valid, valid, lse, row_term,
    slope, alone, scale, edge,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One tile of keys into dq / scale [M, PADDED] and, [M] each, the sums over j of the gradients of a_ij, and that of a_ii."""
    local = tl.arange(0, N)
    key = start + local
    key_tile = tile_of(k, start, keys, local, k_row, WIDTH, PADDED, ALIGN)
    added = None
    if bias is not None:
        added = bias_tile(bias, bias_row, tl.arange(0, own.shape[0])[:, None], rows, key[None, :], keys)
    key_valid = good_at(valid, key[None, :], keys)
    position = key.to(tl.float32)[None, :]
    _, d_scores = _weights(
        query, key_tile, grad, key_tile, added, None, own[:, None], position, keys, slope, alone, scale, own_valid, key_valid,
        lse[:, None], row_term[:, None], edge, CAUSAL,
    )  # fmt: skip
    missing += tl.sum(d_scores, 1)
    if edge:
        d_own += tl.sum(tl.where(own[:, None] == position, d_scores, 0.0), 1)
    return tl.dot(d_scores.to(key_tile.dtype), key_tile, dq, input_precision="ieee"), missing, d_own


@triton.jit
def _dq_kernel(
    q, k, bias, slopes, alone, valid, out, d_out, lse, row_terms, p_own, dq, d_alone, rows, keys, first, scale, unit,
    q_batch, q_head, q_row, k_batch, k_head, k_row, bias_batch, bias_head, bias_row, valid_batch, out_batch, out_head, out_row,
    d_out_batch, d_out_head, d_out_row, dq_batch, dq_head, dq_row, lse_batch, lse_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """dq of M rows of a head. Grid as forward's. ``scale`` holds log2(e), ``unit`` does not.

    The gradients of a row's a_ij should sum to zero; what they sum to is what o.do misses of the row term sum_j p dp. It is added to
    row_terms, p_ii of it is taken from the gradient of ``alone`` (one number a program) and, keys being values, o of it from dq.
    """
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    start = block * M
    local = tl.arange(0, M)
    position = first + start + local
    own = position.to(tl.float32)
    slope, own_bias = tl.load(slopes + head) * LOG2_E, tl.load(alone) * LOG2_E
    query = head_tile(q, batch, head, q_batch, q_head, start, rows, local, q_row, WIDTH, PADDED, ALIGN)
    grad = head_tile(d_out, batch, head, d_out_batch, d_out_head, start, rows, local, d_out_row, WIDTH, PADDED, ALIGN)
    row, there = batch * lse_batch + head * lse_head + start + local, start + local < rows
    row_lse = tl.load(lse + row, mask=there, other=float("inf"))
    row_term = tl.load(row_terms + row, mask=there, other=0.0)
    k_base = k + tl.multiple_of(batch * k_batch + head * k_head, ALIGN)
    bias_base = of_head(bias, batch, head, bias_batch, bias_head, tl.cast(start, tl.int64), bias_row)
    valid_base = of_head(valid, batch, 0, valid_batch, 0)
    own_valid = good_at(valid_base, position[:, None], keys)
    total = tl.zeros([M, PADDED], tl.float32)
    missing = tl.zeros([M], tl.float32)
    d_own = tl.zeros([M], tl.float32)
    end = keys
    common = 0
    if CAUSAL:
        end = tl.minimum(keys, first + start + M)
        common = first + start
    tl.assume(end > 0)
    for n in tl.range(0, end, N, num_stages=STAGES):
        total, missing, d_own = _dq_tile(
            total, missing, d_own, query, grad, k_base, k_row, n, keys, bias_base, bias_row, rows - start, own, own_valid,
            valid_base, row_lse, row_term, slope, own_bias, scale, n + N > common, WIDTH, PADDED, N, CAUSAL, ALIGN,
        )  # fmt: skip
    tl.store(row_terms + row, row_term + missing, mask=there)
    program = (batch * tl.num_programs(0) + head) * tl.num_programs(1) + block
    tl.store(d_alone + program, tl.sum(d_own - tl.load(p_own + row, mask=there, other=0.0) * missing, 0))
    total -= missing[:, None] * head_tile(out, batch, head, out_batch, out_head, start, rows, local, out_row, WIDTH, PADDED, ALIGN).to(
        tl.float32
    )
    at = dq + tl.multiple_of(batch * dq_batch + head * dq_head, ALIGN)
    store_tile(at, start, rows, local, dq_row, total * unit, WIDTH, PADDED, ALIGN)


@triton.jit
def _dk_tile(
    dk, key_tile, position, keys, q, q_row, d_out, d_out_row, start, rows, first, bias, bias_row, key, valid, key_valid, lse, row_terms,
    slope, alone, scale, unit, edge,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, CAUSAL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One tile of rows into dk [N, PADDED]: what the keys get as values and in the scores."""
    local = tl.arange(0, M)
    query = tile_of(q, start, rows, local, q_row, WIDTH, PADDED, ALIGN)
    grad = tile_of(d_out, start, rows, local, d_out_row, WIDTH, PADDED, ALIGN)
    there = start + local < rows
    row_lse = tl.load(lse + start + local, mask=there, other=float("inf"))
    row_term = tl.load(row_terms + start + local, mask=there, other=0.0)
    added = None
    if bias is not None:
        added = bias_tile(bias + tl.cast(start, tl.int64) * bias_row, bias_row, local[None, :], rows - start, key[:, None], keys)
    own_valid = good_at(valid, (first + start + local)[None, :], first + rows)
    own = (first + start + local).to(tl.float32)[None, :]
    weights, d_scores = _weights(
        key_tile, query, key_tile, grad, added, None, own, position, keys, slope, alone, scale, own_valid, key_valid,
        row_lse[None, :], row_term[None, :], edge, CAUSAL,
    )  # fmt: skip
    dk = tl.dot(weights.to(grad.dtype), grad, dk, input_precision="ieee")
    return tl.dot((d_scores * unit).to(query.dtype), query, dk, input_precision="ieee")


@triton.jit
def _dk_kernel(
    q, k, bias, slopes, alone, valid, d_out, lse, row_terms, dk, rows, keys, first, scale, unit,
    q_batch, q_head, q_row, k_batch, k_head, k_row, bias_batch, bias_head, bias_row, valid_batch,
    d_out_batch, d_out_head, d_out_row, dk_batch, dk_head, dk_row, lse_batch, lse_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, ADD: tl.constexpr,
    STAGES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """dk of N keys of a head, from these rows. Grid: heads, tiles of keys from the first, which most rows see, batch. ADD: to dk."""
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_key = tl.program_id(1) * N
    local = tl.arange(0, N)
    key = first_key + local
    position = key.to(tl.float32)[:, None]
    slope, own_bias = tl.load(slopes + head) * LOG2_E, tl.load(alone) * LOG2_E
    key_tile = head_tile(k, batch, head, k_batch, k_head, first_key, keys, local, k_row, WIDTH, PADDED, ALIGN)
    q_base = q + tl.multiple_of(batch * q_batch + head * q_head, ALIGN)
    d_out_base = d_out + tl.multiple_of(batch * d_out_batch + head * d_out_head, ALIGN)
    row = batch * lse_batch + head * lse_head
    bias_base = of_head(bias, batch, head, bias_batch, bias_head)
    valid_base = of_head(valid, batch, 0, valid_batch, 0)
    key_valid = good_at(valid_base, key[:, None], keys)
    dk_base = dk + tl.multiple_of(batch * dk_batch + head * dk_head, ALIGN)
    total = tl.zeros([N, PADDED], tl.float32)
    if ADD:
        total = tile_of(dk_base, first_key, keys, local, dk_row, WIDTH, PADDED, ALIGN)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(first_key - first, 0) // M * M
    tl.assume(begin < rows)
    for m in tl.range(begin, rows, M, num_stages=STAGES):
        edge = True
        if CAUSAL:
            edge = first + m < first_key + N
        total = _dk_tile(
            total, key_tile, position, keys, q_base, q_row, d_out_base, d_out_row, m, rows, first, bias_base, bias_row, key, valid_base,
            key_valid, lse + row, row_terms + row, slope, own_bias, scale, unit, edge, WIDTH, PADDED, M, CAUSAL, ALIGN,
        )  # fmt: skip
    store_tile(dk_base, first_key, keys, local, dk_row, total, WIDTH, PADDED, ALIGN)


@triton.jit
def _d_bias_kernel(
    q, k, bias, slopes, alone, valid, d_out, lse, row_terms, d_bias, rows, keys, first, scale, unit, groups, heads,
    q_batch, q_head, q_row, k_batch, k_head, k_row, bias_batch, bias_head, bias_row, valid_batch,
    d_out_batch, d_out_head, d_out_row, lse_batch, lse_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """The gradient of C for M rows and N keys, summed over the ``heads`` heads of a group in their order; zeros where no pair is seen.

    Grid: tiles of keys, tiles of rows, batch x groups. d_bias lies as bias.
    """
    batch, group = (tl.program_id(2) // groups).to(tl.int64), (tl.program_id(2) % groups).to(tl.int64)
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
        scaled = bias_tile(bias + offset, bias_row, local[:, None], rows - start, key[None, :], keys) * scale
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
            query = head_tile(q, batch, head, q_batch, q_head, start, rows, local, q_row, WIDTH, PADDED, ALIGN)
            grad = head_tile(d_out, batch, head, d_out_batch, d_out_head, start, rows, local, d_out_row, WIDTH, PADDED, ALIGN)
            key_tile = head_tile(k, batch, head, k_batch, k_head, first_key, keys, local_key, k_row, WIDTH, PADDED, ALIGN)
            row = batch * lse_batch + head * lse_head + start + local
            row_lse = tl.load(lse + row, mask=there, other=float("inf"))
            row_term = tl.load(row_terms + row, mask=there, other=0.0)
            _, d_scores = _weights(
                query, key_tile, grad, key_tile, None, scaled, position.to(tl.float32)[:, None], key.to(tl.float32)[None, :], keys, slope,
                own_bias, scale, own_valid, key_valid, row_lse[:, None], row_term[:, None], edge, CAUSAL,
            )  # fmt: skip
            total += d_scores
    at = d_bias + offset + local[:, None] * bias_row + key[None, :]
    tl.store(at, (total * unit).to(d_bias.dtype.element_ty), mask=(start + local < rows)[:, None] & (key < keys)[None, :])


def d_queries(part: Part, out: Tensor, d_out: Tensor, lse: Tensor, row_terms: Tensor, dq: Tensor) -> Tensor:
    """Write a part's dq and row terms (as lse); returns the gradient of ``alone``, []. First of the three."""
    b, heads, rows, width = part.q.shape
    p_own = torch.empty_strided(lse.shape, lse.stride(), dtype=lse.dtype, device=lse.device)
    sizes = sizes_of(_rows_kernel, part.q.dtype, width)
    _rows_kernel[(heads, triton.cdiv(rows, sizes.rows), b)](
        *part.pointers(), out, d_out, lse, row_terms, p_own, *part.numbers(), *part.strides(out, d_out), *lse.stride()[:2],
        **part.constants(sizes, out, d_out),
    )  # fmt: skip
    sizes = sizes_of(_dq_kernel, part.q.dtype, width)
    grid = (heads, triton.cdiv(rows, sizes.rows), b)
    d_alone = lse.new_empty(b * heads * grid[1])
    _dq_kernel[grid](
        *part.pointers(), out, d_out, lse, row_terms, p_own, dq, d_alone, *part.numbers(), part.scale, *part.strides(out, d_out, dq),
        *lse.stride()[:2], **part.constants(sizes, out, d_out, dq),
    )  # fmt: skip
    return d_alone.sum()


def d_keys(part: Part, d_out: Tensor, lse: Tensor, row_terms: Tensor, dk: Tensor, *, add: bool) -> None:
    """Write what a part's rows give to dk [b, heads, keys, r], or add it to what is there."""
    b, heads, _, width = part.q.shape
    sizes = sizes_of(_dk_kernel, part.q.dtype, width)
    _dk_kernel[(heads, triton.cdiv(part.k.shape[2], sizes.keys), b)](
        *part.pointers(), d_out, lse, row_terms, dk, *part.numbers(), part.scale, *part.strides(d_out, dk), *lse.stride()[:2],
        ADD=add, **part.constants(sizes, d_out, dk),
    )  # fmt: skip


def d_pairs(part: Part, d_out: Tensor, lse: Tensor, row_terms: Tensor) -> Tensor:
    """The gradient of a part's C, shaped and laid out as it is; zeros where a pair is not seen."""
    assert part.bias is not None
    b, heads, rows, width = part.q.shape
    groups, sizes = part.bias.shape[1], sizes_of(_d_bias_kernel, part.q.dtype, width)
    d_bias = torch.empty_strided(part.bias.shape, part.bias.stride(), dtype=part.bias.dtype, device=part.bias.device)
    _d_bias_kernel[(triton.cdiv(part.k.shape[2], sizes.keys), triton.cdiv(rows, sizes.rows), b * groups)](
        *part.pointers(), d_out, lse, row_terms, d_bias, *part.numbers(), part.scale, groups, heads // groups, *part.strides(d_out),
        *lse.stride()[:2], **part.constants(sizes, d_out),
    )  # fmt: skip
    return d_bias


MATRIX = (_dq_kernel, _dk_kernel, _d_bias_kernel)  # their products are wgmma on sm_90
