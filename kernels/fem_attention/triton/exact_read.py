"""Exact free-energy read of blocks of channels in Triton: the kernel over rows, and shared helpers.

A few programs share the marked work, blocks of channels of (batch, kv head) pairs, so that a launch
without marks costs almost no time. All quantities are relative to x[t, j], the greatest value that
query t may read. With log p and beta (v - x) in one exponent, the terms that matter are small
numbers, so that no digit is lost however far values spread, and no exponential exceeds 1.
Logarithms are in base 2. Terms are tiles of three dimensions, with the summed dimension first: it
is then inside a thread, and a sum needs no exchange between threads. Do not add a centre, a window
or clipping. This module launches no kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.fem_attention.triton.attention_backward import key_spans
from kernels.tiles import LOG2_E, of_head

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _tile(at, stride, rows, columns, WIDTH: tl.constexpr):
    """Load [rows, columns] as float32, zero beyond WIDTH; every row exists."""
    return tl.load(
        at + rows.to(tl.int64)[:, None] * stride + columns[None, :],
        mask=(columns < WIDTH)[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def _operand(at, stride, rows, count, columns, WIDTH: tl.constexpr):
    """Load [rows, columns] in the tensor's dtype, zero beyond ``count`` rows and WIDTH."""
    mask = (columns < WIDTH)[None, :] & (rows < count)[:, None]
    return tl.load(
        at + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0
    )


@triton.jit
def _finite_or_zero(x):
    return tl.where(tl.abs(x) < INFINITY, x, 0.0)


@triton.jit
def _temperature(beta, kv, channels, CHANNELS: tl.constexpr):
    return tl.load(beta + kv * CHANNELS + channels, mask=channels < CHANNELS, other=1.0).to(
        tl.float32
    )


@triton.jit
def _allowed(keys, position, valid, first, last, tk, CAUSAL: tl.constexpr):
    """Return which rows may read which keys, [keys, rows]."""
    allowed = (keys < tk)[:, None] & (position >= 0)[None, :]
    if CAUSAL:
        allowed = allowed & (keys[:, None] <= position[None, :])
    if valid is not None:
        there = tl.load(valid + keys, mask=keys < tk, other=0).to(tl.int1)
        allowed = allowed & (there[:, None] | (keys[:, None] == position[None, :]))
    if first is not None:
        begin, end = tl.load(first + position), tl.load(last + position)
        allowed = allowed & (keys[:, None] >= begin[None, :]) & (keys[:, None] < end[None, :])
    return allowed


@triton.jit
def _scores(q, k, allowed, scale):
    """Return the scores [keys, rows] in base 2, -inf where a key is not read."""
    return tl.where(allowed, tl.dot(k, tl.trans(q), input_precision="ieee") * scale, -INFINITY)


@triton.jit
def _greatest(
    q, k, v, k_t, v_t, position, channels, columns, valid, first, last, begin, end, tk, scale,
    SUMS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return x [rows, channels] and, with SUMS, the log-sum-exp of the scores [rows]."""
    x = tl.full((ROWS, BLOCK_C), -INFINITY, tl.float32)
    top = tl.full((ROWS,), -INFINITY, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        allowed = _allowed(keys, position, valid, first, last, tk, CAUSAL)
        values = _operand(v, v_t, keys, tk, channels, CHANNELS).to(tl.float32)
        x = tl.maximum(x, tl.max(tl.where(allowed[:, :, None], values[:, None, :], -INFINITY), 0))
        if SUMS:
            scores = _scores(q, _operand(k, k_t, keys, tk, columns, WIDTH), allowed, scale)
            higher = tl.maximum(top, tl.max(scores, 0))
            base = tl.where(higher == -INFINITY, 0.0, higher)
            total = total * tl.exp2(top - base) + tl.sum(tl.exp2(scores - base[None, :]), 0)
            top = higher
    if SUMS:
        top += tl.log2(total)
    return _finite_or_zero(x), top


@triton.jit
def _read(
    q, k, v, k_t, v_t, x, lse, beta, position, channels, columns, valid, first, last, begin, end,
    tk, scale,
    MOMENT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return mu - x, F - x and, with MOMENT, E_w[v - x], each [rows, channels].

    beta: for base 2.
    """
    mean = tl.zeros((ROWS, BLOCK_C), tl.float32)
    top = tl.full((ROWS, BLOCK_C), -INFINITY, tl.float32)
    total = tl.zeros((ROWS, BLOCK_C), tl.float32)
    moment = tl.zeros((ROWS, BLOCK_C), tl.float32)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        allowed = _allowed(keys, position, valid, first, last, tk, CAUSAL)
        log_p = (
            _scores(q, _operand(k, k_t, keys, tk, columns, WIDTH), allowed, scale) - lse[None, :]
        )
        values = _operand(v, v_t, keys, tk, channels, CHANNELS).to(tl.float32)
        below = tl.where(allowed[:, :, None], values[:, None, :] - x[None, :, :], 0.0)
        mean += tl.sum(tl.exp2(log_p)[:, :, None] * below, 0)
        joint = log_p[:, :, None] + beta[None, None, :] * below
        higher = tl.maximum(top, tl.max(joint, 0))
        base = _finite_or_zero(higher)
        fading = tl.exp2(top - base)
        w = tl.exp2(joint - base[None, :, :])
        total = total * fading + tl.sum(w, 0)
        if MOMENT:
            moment = moment * fading + tl.sum(w * below, 0)
        top = higher
    return mean, (_finite_or_zero(top) + tl.log2(total)) / beta[None, :], moment / total


@triton.jit
def _marked(wild, count, MARKS: tl.constexpr, PAIRS: tl.constexpr):
    """Return (how many of the first ``count`` entries up to each are marked [PAIRS], the total).

    An entry consists of MARKS consecutive marks, and is marked if one of them is set.
    """
    at = tl.arange(0, PAIRS)
    found = tl.zeros((PAIRS,), tl.int32)
    for n in tl.static_range(MARKS):
        found |= tl.load(wild + at * MARKS + n, mask=at < count, other=0).to(tl.int32)
    upto = tl.cumsum(found, 0)
    return upto, tl.max(upto, 0)


@triton.jit
def _place(upto, item, each, heads, group, blocks, MARKS: tl.constexpr):
    """Return (batch, head, kv head, block, block of channels) of an item.

    Each mark has ``each`` items, and each (batch, kv head) pair has MARKS marks.
    """
    kv_heads = heads // group
    mark = tl.sum((upto <= item // each).to(tl.int32), 0)
    item = item % each
    batch, kv = (mark // MARKS // kv_heads).to(tl.int64), (mark // MARKS % kv_heads).to(tl.int64)
    return batch, kv * group + item // blocks, kv, item % blocks, mark % MARKS


@triton.jit
def _gradients_of_reads(
    d_o, lam, gate, d_o_t, lam_t, gate_t, rows, tq, channels, CHANNELS: tl.constexpr
):
    """Return the gradients of mu and F, [rows, channels]; zero in rows beyond the last.

    The pointers are already offset to the head.
    """
    d_free = _operand(d_o, d_o_t, rows, tq, channels, CHANNELS).to(tl.float32)
    there = tl.minimum(rows, tq - 1)
    if gate is not None:
        d_free *= _tile(gate, gate_t, there, channels, CHANNELS)
    d_mean = tl.zeros_like(d_free)
    if lam is not None:
        share = _tile(lam, lam_t, there, channels, CHANNELS)
        d_mean = d_free * (1.0 - share)
        d_free *= share
    return d_mean, d_free


@triton.jit
def _put(
    out,
    batch,
    head,
    out_b,
    out_h,
    out_t,
    rows,
    columns,
    made,
    mask,
    marks=None,
    MARKS: tl.constexpr = 1,
):
    """Store a tile [rows, columns] of a head, in the dtype of ``out``.

    With ``marks`` (the head's), add to the existing result if the head has unmarked blocks.
    """
    at = out + batch * out_b + head * out_h + rows.to(tl.int64)[:, None] * out_t + columns[None, :]
    if marks is not None:
        calm = tl.load(marks) == 0
        for n in tl.static_range(1, MARKS):
            calm |= tl.load(marks + n) == 0
        made += tl.load(at, mask=mask & calm, other=0.0).to(tl.float32)
    tl.store(at, made.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rows_kernel(
    q, k, v, beta, lam, gate, wild, valid, first, last, lse, o, d_o, d_lam, d_gate, greatest,
    free_energy, row_term, d_beta,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, lam_b, lam_h, lam_t, gate_b, gate_h, gate_t, o_b,
    o_h, o_t, d_o_b, d_o_h, d_o_t,
    d_lam_b, d_lam_h, d_lam_t, d_gate_b, d_gate_h, d_gate_t, pairs, heads, group, tq, tk, scale,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    MARKS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Compute the forward's results, or the backward's results that sum over keys if o is None.

    Forward: o and the scores' log-sum-exp. Backward: x, F - x, the row terms, the gradients of lam
    and gate, and the rows' part of beta's gradient. Long, because both begin with the same reads.
    """
    blocks = tl.cdiv(tq, ROWS)
    columns = tl.arange(0, BLOCK_W)
    upto, count = _marked(wild, pairs * MARKS, 1, PAIRS)
    each = group * blocks
    for item in range(tl.program_id(0), count * each, tl.num_programs(0)):
        batch, head, kv, block, of_channels = _place(upto, item, each, heads, group, blocks, MARKS)
        bottom = tl.minimum(block * ROWS + ROWS, tq) - 1 + tk - tq
        begin, _, end = key_spans(block * ROWS + tk - tq, bottom, tk, valid, first, last, CAUSAL, 1)
        rows, channels = (
            block * ROWS + tl.arange(0, ROWS),
            of_channels * BLOCK_C + tl.arange(0, BLOCK_C),
        )
        mask = (rows < tq)[:, None] & (channels < CHANNELS)[None, :]
        there = tl.minimum(rows, tq - 1)  # rows past the last repeat it and are not stored
        position = there + (tk - tq)
        valid_here = of_head(valid, batch, 0, tk, 0)
        queries = _operand(q + batch * q_b + head * q_h, q_t, there, tq, columns, WIDTH)
        k_here, v_here = k + batch * k_b + kv * k_h, v + batch * v_b + kv * v_h
        flat = (batch * heads + head) * tq
        x, sums = _greatest(
            queries, k_here, v_here, k_t, v_t, position, channels, columns, valid_here, first, last,
            begin, end, tk, scale,
            o is not None, WIDTH, CHANNELS, CAUSAL, ROWS, KEYS, BLOCK_C,
        )  # fmt: skip
        if o is None:
            sums = tl.load(lse + flat + there)
        beta_1 = _temperature(beta, kv, channels, CHANNELS)
        mean, free, moment = _read(
            queries, k_here, v_here, k_t, v_t, x, sums, beta_1 * LOG2_E, position, channels,
            columns, valid_here, first, last, begin, end,
            tk, scale, o is None, WIDTH, CHANNELS, CAUSAL, ROWS, KEYS, BLOCK_C,
        )  # fmt: skip
        lam_here = of_head(lam, batch, head, lam_b, lam_h)
        gate_here = of_head(gate, batch, head, gate_b, gate_h)
        gap = tl.where(free < mean, 0.0, free - mean)
        out = x + tl.where(free < mean, mean, free)
        if lam is not None:
            out = x + mean + _tile(lam_here, lam_t, there, channels, CHANNELS) * gap
        if o is not None:
            if gate is not None:
                out *= _tile(gate_here, gate_t, there, channels, CHANNELS)
            _put(o, batch, head, o_b, o_h, o_t, rows, channels, out, mask)
            earlier = tl.max(
                tl.where(tl.arange(0, PAIRS) < (batch * (heads // group) + kv) * MARKS, upto, 0), 0
            )
            # Only the pair's first mark stores the sums.
            tl.store(lse + flat + rows, sums, mask=(rows < tq) & (item // each == earlier))
        else:
            d_o_here = d_o + batch * d_o_b + head * d_o_h
            d_mean, d_free = _gradients_of_reads(
                d_o_here, lam_here, gate_here, d_o_t, lam_t, gate_t, rows, tq, channels, CHANNELS
            )
            at = (flat + rows)[:, None] * CHANNELS + channels[None, :]
            tl.store(greatest + at, x.to(greatest.dtype.element_ty), mask=mask)
            tl.store(free_energy + at, free, mask=mask)
            term = tl.sum(tl.where(mask, d_mean * mean + d_free / beta_1[None, :], 0.0), 1)
            tl.store(row_term + flat * MARKS + of_channels * tq + rows, term, mask=rows < tq)
            of_beta = tl.sum(tl.where(mask, d_free * (moment - free), 0.0), 0) / beta_1
            to = ((batch * heads + head) * blocks + block) * CHANNELS + channels
            tl.store(d_beta + to, of_beta, mask=channels < CHANNELS)
            d_out = _operand(d_o_here, d_o_t, rows, tq, channels, CHANNELS).to(tl.float32)
            if gate is not None:
                _put(
                    d_gate,
                    batch,
                    head,
                    d_gate_b,
                    d_gate_h,
                    d_gate_t,
                    rows,
                    channels,
                    d_out * out,
                    mask,
                )
                d_out *= _tile(gate_here, gate_t, there, channels, CHANNELS)
            if lam is not None:
                _put(
                    d_lam, batch, head, d_lam_b, d_lam_h, d_lam_t, rows, channels, d_out * gap, mask
                )
