"""Gradients of attention on [v | U] in Triton, one kernel for q and one for k and the values.

The module also contains the helpers shared with the forward. Both kernels recompute the weights
from the scores and their log-sum-exp. With [dmu | dZ] the gradient of the reads and D its row term,

    dP = dmu v^T + dZ U^T      dS = P (dP - D), 0 where P is 0      d[v | U] = P^T [dmu | dZ]
    dq = scale dS k            dk = scale dS^T q

The kernel for keys works on transposed scores, so that P^T and dS^T are left operands in registers.
It masks every block, because a second loop without masks would not fit the registers, and iterates
over its query heads itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.implementations import interpreted
from kernels.tiles import Blocks, at_row, load_tile, of_head, padded, place, store_tile

WIDEST = 256  # largest width of a head's queries and keys, and of v
# Without tensor cores, a product's operands are in registers, and larger blocks spill.
FLOAT32 = Blocks(16, 16, 8, 1)


@triton.jit
def key_spans(top, bottom, tk, valid, first, last, CAUSAL: tl.constexpr, KEYS: tl.constexpr):
    """Return (begin, inner, end) of the keys that the queries at positions top to bottom read.

    A mask is needed from inner on. begin and inner are multiples of KEYS. With invalid keys or
    documents every block has a mask: inner is begin.
    """
    begin = 0
    end = tk
    inner = tk // KEYS * KEYS
    if CAUSAL:
        end = bottom + 1
        inner = (top + 1) // KEYS * KEYS
    if first is not None:
        begin = tl.load(first + top) // KEYS * KEYS
        if not CAUSAL:
            end = tl.load(last + bottom)
    if valid is not None or first is not None:
        inner = begin
    # inner is at least begin anyway. The maximum hides its value from the compiler; without it
    # ptxas serialises the products (C7515).
    return begin, tl.maximum(inner, begin), end


@triton.jit
def query_span(top, bottom, past, tq, first, last, CAUSAL: tl.constexpr, ROWS: tl.constexpr):
    """Return (begin, end) of the queries that read the keys at positions top to bottom.

    begin is a multiple of ROWS. past: the number of positions before the first query.
    """
    begin = 0
    end = tq
    if first is not None:
        begin = tl.load(first + top)
        end = tl.load(last + bottom)
    if CAUSAL:
        begin = tl.maximum(top - past, 0)
    return begin // ROWS * ROWS, end


@triton.jit
def last_key(position, there, tk, last, CAUSAL: tl.constexpr):
    """Return the last key that the queries at ``position`` may read."""
    if CAUSAL:
        highest = position
    elif last is not None:
        highest = tl.load(last + position, mask=there, other=0) - 1
    else:
        highest = tl.zeros_like(position) + (tk - 1)
    return highest


@triton.jit
def readable(position, lowest, highest, key, tk, valid):
    """Return whether the queries at ``position`` read ``key``, [queries, keys].

    An invalid key is read only by the query at its own position.
    """
    allowed = key[None, :] <= highest[:, None]
    if lowest is not None:
        allowed &= key[None, :] >= lowest[:, None]
    if valid is not None:
        good = tl.load(valid + key, mask=key < tk, other=0).to(tl.int1)
        allowed &= good[None, :] | (key[None, :] == position[:, None])
    return allowed


@triton.jit
def _queries_span(
    grad, q, d_read, d_more, level, term, k, values, valid, position, lowest, highest, start, stop,
    factor, tk, k_t, values_t,
    MASKED: tl.constexpr, HALVES: tl.constexpr, DK: tl.constexpr, BDK: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr, KEYS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Return ``grad`` plus dS k of the keys from start to stop."""
    for n in range(start, stop, KEYS):
        here = tl.cast(n, tl.int64)
        keys = load_tile(at_row(k, here, k_t, ALIGN), k_t, tk - n, KEYS, DK, BDK, MASKED, ALIGN)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * factor - level[:, None]
        if MASKED:
            allowed = readable(position, lowest, highest, n + tl.arange(0, KEYS), tk, valid)
            scores = tl.where(allowed, scores, float("-inf"))
        weights = tl.exp2(scores)
        value = at_row(values, here, values_t, ALIGN)
        tile = load_tile(value, values_t, tk - n, KEYS, DV, BDV, MASKED, ALIGN)
        d_weights = tl.dot(d_read, tl.trans(tile), input_precision="ieee")
        if HALVES == 2:
            tile = load_tile(value + DV, values_t, tk - n, KEYS, DV, BDV, MASKED, ALIGN)
            d_weights = tl.dot(d_more, tl.trans(tile), d_weights, input_precision="ieee")
        d_scores = tl.where(weights > 0, weights * (d_weights - term[:, None]), 0.0)
        grad = tl.dot(d_scores.to(keys.dtype), keys, grad, input_precision="ieee")
    return grad


@triton.jit
def _queries_kernel(
    q, k, values, valid, first, last, d_reads, row_term, lse, d_q,
    scale, factor, heads, tq, tk,
    q_b, q_h, q_t, k_b, k_h, k_t, values_b, values_h, values_t, d_reads_b, d_reads_h, d_reads_t,
    d_q_b, d_q_h, d_q_t,
    CAUSAL: tl.constexpr, HALVES: tl.constexpr, DK: tl.constexpr, BDK: tl.constexpr,
    DV: tl.constexpr, BDV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries of a head.

    Long, because it reads the keys in up to two spans.
    """
    b, h, head_of_all, top_row = place(heads, tq, ROWS)
    start, left = top_row.to(tl.int64), tq - top_row
    row = tl.arange(0, ROWS)
    position = tk - tq + top_row + row
    k, values = (
        of_head(k, b, h // GROUP, k_b, k_h, ALIGN=ALIGN),
        of_head(values, b, h // GROUP, values_b, values_h, ALIGN=ALIGN),
    )
    valid = of_head(valid, b, 0, tk, 0)
    lowest = None
    if first is not None:
        lowest = tl.load(first + position, mask=row < left, other=0)
    highest = last_key(position, row < left, tk, last, CAUSAL)

    queries = load_tile(
        of_head(q, b, h, q_b, q_h, start, q_t, ALIGN), q_t, left, ROWS, DK, BDK, True, ALIGN
    )
    d_reads = of_head(d_reads, b, h, d_reads_b, d_reads_h, start, d_reads_t, ALIGN)
    d_read = load_tile(d_reads, d_reads_t, left, ROWS, DV, BDV, True, ALIGN)
    d_more = d_read
    if HALVES == 2:
        d_more = load_tile(d_reads + DV, d_reads_t, left, ROWS, DV, BDV, True, ALIGN)
    level = tl.load(lse + head_of_all * tq + start + row, mask=row < left, other=float("inf"))
    term = tl.load(row_term + head_of_all * tq + start + row, mask=row < left, other=0.0)
    grad = tl.zeros([ROWS, BDK], tl.float32)
    bottom = tl.minimum(top_row + ROWS, tq) - 1
    begin, inner, end = key_spans(
        tk - tq + top_row, tk - tq + bottom, tk, valid, first, last, CAUSAL, KEYS
    )
    for MASKED in tl.static_range(0 if valid is None and first is None else 1, 2):
        grad = _queries_span(
            grad, queries, d_read, d_more, level, term, k, values, valid, position, lowest, highest,
            inner if MASKED else begin,
            end if MASKED else inner, factor, tk, k_t, values_t, MASKED, HALVES, DK, BDK, DV, BDV,
            KEYS, ALIGN,
        )  # fmt: skip
    store_tile(
        of_head(d_q, b, h, d_q_b, d_q_h, start, d_q_t, ALIGN),
        d_q_t,
        left,
        grad * scale,
        ROWS,
        DK,
        BDK,
        ALIGN,
    )


@triton.jit
def _keys_kernel(
    q, k, values, valid, first, last, d_reads, row_term, lse, d_k, d_values,
    scale, factor, heads, tq, tk,
    q_b, q_h, q_t, k_b, k_h, k_t, values_b, values_h, values_t, d_reads_b, d_reads_h, d_reads_t,
    d_k_b, d_k_h, d_k_t, d_values_b, d_values_h, d_values_t,
    CAUSAL: tl.constexpr, HALVES: tl.constexpr, DK: tl.constexpr, BDK: tl.constexpr,
    DV: tl.constexpr, BDV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute dk and d[v | U] of a block of keys of a key head, over all its query heads.

    Long, because every tensor has its strides.
    """
    blocks = tl.cdiv(tk, KEYS)
    block = tl.program_id(0) % blocks
    head_of_all = (tl.program_id(0) // blocks).to(tl.int64)
    kv_heads = heads // GROUP
    b, kv = head_of_all // kv_heads, head_of_all % kv_heads
    start = (block * KEYS).to(tl.int64)
    left = tk - block * KEYS
    column = tl.arange(0, KEYS)
    key = block * KEYS + column
    good = None
    if valid is not None:
        good = tl.load(valid + b * tk + key, mask=key < tk, other=0).to(tl.int1)[:, None]
    begin, end = query_span(
        block * KEYS,
        tl.minimum(block * KEYS + KEYS, tk) - 1,
        tk - tq,
        tq,
        first,
        last,
        CAUSAL,
        ROWS,
    )
    # The positions that read a key: from its own position, or from its document's first, to its
    # document's last.
    opened = key[:, None]
    closed = None
    if first is not None:
        closed = tl.load(last + key, mask=key < tk, other=0)[:, None]
        if not CAUSAL:
            opened = tl.load(first + key, mask=key < tk, other=0)[:, None]

    keys = load_tile(
        of_head(k, b, kv, k_b, k_h, start, k_t, ALIGN), k_t, left, KEYS, DK, BDK, True, ALIGN
    )
    values = of_head(values, b, kv, values_b, values_h, start, values_t, ALIGN)
    value = load_tile(values, values_t, left, KEYS, DV, BDV, True, ALIGN)
    more = value
    if HALVES == 2:
        more = load_tile(values + DV, values_t, left, KEYS, DV, BDV, True, ALIGN)
    d_key = tl.zeros([KEYS, BDK], tl.float32)
    d_value = tl.zeros([KEYS, BDV], tl.float32)
    d_more = tl.zeros([KEYS, BDV], tl.float32)
    q = of_head(q, b, kv * GROUP, q_b, q_h, ALIGN=ALIGN)
    d_reads = of_head(d_reads, b, kv * GROUP, d_reads_b, d_reads_h, ALIGN=ALIGN)
    lse += (b * heads + kv * GROUP) * tq
    row_term += (b * heads + kv * GROUP) * tq
    d_k = of_head(d_k, b, kv, d_k_b, d_k_h, start, d_k_t, ALIGN)
    d_values = of_head(d_values, b, kv, d_values_b, d_values_h, start, d_values_t, ALIGN)
    # One loop over all query heads, not two nested ones: with the three accumulators, the values
    # that an inner loop needs in advance would spill.
    count = tl.cdiv(end - begin, ROWS)
    for n in range(count * GROUP):
        m = begin + n * ROWS
        g = tl.zeros([], tl.int64)
        if GROUP > 1:
            g += n // count
            m -= n // count * count * ROWS
        here = tl.cast(m, tl.int64)
        row = m + tl.arange(0, ROWS)
        queries = load_tile(
            at_row(at_row(q, g, q_h, ALIGN), here, q_t, ALIGN),
            q_t,
            tq - m,
            ROWS,
            DK,
            BDK,
            True,
            ALIGN,
        )
        # The weight of queries past the last is exp2(-inf).
        level = tl.load(lse + g * tq + row, mask=row < tq, other=float("inf"))
        scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * factor - level[None, :]
        position = (tk - tq + row)[None, :]
        if CAUSAL or first is not None:
            scores = tl.where(position >= opened, scores, float("-inf"))
        if closed is not None:
            scores = tl.where(position < closed, scores, float("-inf"))
        if valid is not None:
            scores = tl.where(good | (position == key[:, None]), scores, float("-inf"))
        weights = tl.exp2(scores)
        rounded = weights.to(keys.dtype)
        d_at = at_row(at_row(d_reads, g, d_reads_h, ALIGN), here, d_reads_t, ALIGN)
        d_read = load_tile(d_at, d_reads_t, tq - m, ROWS, DV, BDV, True, ALIGN)
        d_value = tl.dot(rounded, d_read, d_value, input_precision="ieee")
        d_weights = tl.dot(value, tl.trans(d_read), input_precision="ieee")
        if HALVES == 2:
            d_read = load_tile(d_at + DV, d_reads_t, tq - m, ROWS, DV, BDV, True, ALIGN)
            d_more = tl.dot(rounded, d_read, d_more, input_precision="ieee")
            d_weights = tl.dot(more, tl.trans(d_read), d_weights, input_precision="ieee")
        term = tl.load(row_term + g * tq + row, mask=row < tq, other=0.0)
        d_scores = tl.where(weights > 0, weights * (d_weights - term[None, :]), 0.0)
        d_key = tl.dot(d_scores.to(keys.dtype), queries, d_key, input_precision="ieee")
    store_tile(d_k, d_k_t, left, d_key * scale, KEYS, DK, BDK, ALIGN)
    store_tile(d_values, d_values_t, left, d_value, KEYS, DV, BDV, ALIGN)
    if HALVES == 2:
        store_tile(d_values + DV, d_values_t, left, d_more, KEYS, DV, BDV, ALIGN)


def forward_blocks(dtype, dk, width):
    """Return the block sizes for a head's widths, of queries and keys and of the values.

    Rows aligned to less than 8 bytes take the smallest.
    """
    if interpreted():
        return Blocks(32, 16, 4, 1)
    if dtype == torch.float32:
        return FLOAT32
    if padded(width) > 256 or dk % 4 or width % 4:
        return Blocks(64, 32, 8, 2)
    if padded(dk) > 128:
        return Blocks(128, 32 if padded(width) > 128 else 64, 8, 2)
    return Blocks(128, 64, 8, 3)


def queries_blocks(dtype, dk, dv, halves):
    """Return the block sizes of dq's kernel for a head's widths."""
    width = WIDEST * 3 if dk % 4 or dv % 4 else padded(dk) + halves * padded(dv)
    if interpreted():
        return Blocks(16, 32, 4, 1)
    if dtype == torch.float32:
        return FLOAT32
    if width > 384:
        return Blocks(64, 32 if width >= 512 else 64, 8, 2)
    return Blocks(128, 32 if padded(dv) > 64 else 64, 8, 2)


def keys_blocks(dtype, dk, dv, halves):
    """Return the block sizes of the kernel of dk and the values' gradient for a head's widths.

    With three accumulators, this kernel fills the registers.
    """
    width = WIDEST * 3 if dk % 4 or dv % 4 else padded(dk) + halves * padded(dv)
    if interpreted():
        return Blocks(16, 32, 4, 1)
    if dtype == torch.float32:
        return FLOAT32
    if width > 384:
        return Blocks(16 if width > 512 else 32, 64, 8, 2)
    return Blocks(64, 64 if width > 256 or padded(dv) > 64 else 128, 8, 2)


MATRIX = (_queries_kernel, _keys_kernel)  # compiled to wgmma on sm_90
