"""The exact free-energy read of single heads in Triton: the forward kernel and what the backward's kernels share with it. No launching.

A few programs share the blocks of all marked (batch, kv head) pairs, so that a launch without marks costs next to nothing. Everything is
kept relative to x[t, j], the greatest value that query t may read: with log p and beta (v - x) in one exponent, the terms that matter are
small numbers, so no digit is lost however far values spread, and no exponential exceeds 1. Logarithms are powers of two. Terms are tiles
of three dimensions, and the one that is summed over comes first: it then lies inside a thread, and a sum needs no exchange. No centre, no
window and no clipping may come in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.tiles import of_head

LOG2_E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _tile(at, stride, rows, columns, WIDTH: tl.constexpr):
    """[rows, columns] in float32, zero beyond WIDTH; every row exists."""
    return tl.load(at + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=(columns < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _operand(at, stride, rows, count, columns, WIDTH: tl.constexpr):
    """[rows, columns] in the tensor's type, zero beyond ``count`` rows and WIDTH."""
    mask = (columns < WIDTH)[None, :] & (rows < count)[:, None]
    return tl.load(at + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _finite_or_zero(x):
    return tl.where(tl.abs(x) < INFINITY, x, 0.0)


@triton.jit
def _temperature(beta, kv, channels, CHANNELS: tl.constexpr):
    return tl.load(beta + kv * CHANNELS + channels, mask=channels < CHANNELS, other=1.0).to(tl.float32)


@triton.jit
def _allowed(keys, position, valid, first, last, tk, CAUSAL: tl.constexpr):
    """[keys, rows]: who may read whom."""
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
    """[keys, rows], powers of two, -inf where a key is not read."""
    return tl.where(allowed, tl.dot(k, tl.trans(q), input_precision="ieee") * scale, -INFINITY)


@triton.jit
def _keys_of(row, tq, tk, first, last, CAUSAL: tl.constexpr, ROWS: tl.constexpr):
    """The keys [begin, end) that the ROWS rows from ``row`` may read."""
    past = tk - tq
    final = tl.minimum(row + ROWS, tq) - 1 + past
    begin, end = 0, tk
    if CAUSAL:
        end = final + 1
    if first is not None:
        begin = tl.load(first + row + past)
        end = tl.minimum(end, tl.load(last + final))
    return begin, end


@triton.jit
def _rows_of(key, tq, tk, first, last, CAUSAL: tl.constexpr, KEYS: tl.constexpr):
    """The rows [begin, end) that may read the KEYS keys from ``key``."""
    past = tk - tq
    begin, end = 0, tq
    if CAUSAL:
        begin = tl.maximum(key - past, 0)
    if first is not None:
        begin = tl.maximum(begin, tl.load(first + key) - past)
        end = tl.load(last + tl.minimum(key + KEYS, tk) - 1) - past
    return begin, end


@triton.jit
def _greatest(
    q, k, v, k_t, v_t, position, channels, columns, valid, first, last, begin, end, tk, scale,
    SUMS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x [rows, channels] and, with SUMS, the log-sum-exp of the scores [rows]."""
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
    q, k, v, k_t, v_t, x, lse, beta, position, channels, columns, valid, first, last, begin, end, tk, scale,
    MOMENT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """mu - x, F - x and, with MOMENT, E_w[v - x], each [rows, channels]. beta: of a power of two."""
    mean = tl.zeros((ROWS, BLOCK_C), tl.float32)
    top = tl.full((ROWS, BLOCK_C), -INFINITY, tl.float32)
    total = tl.zeros((ROWS, BLOCK_C), tl.float32)
    moment = tl.zeros((ROWS, BLOCK_C), tl.float32)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        allowed = _allowed(keys, position, valid, first, last, tk, CAUSAL)
        log_p = _scores(q, _operand(k, k_t, keys, tk, columns, WIDTH), allowed, scale) - lse[None, :]
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
def _marked(wild, pairs, PAIRS: tl.constexpr):
    """(how many of the (batch, kv head) pairs up to each are marked [PAIRS], how many of all)."""
    pair = tl.arange(0, PAIRS)
    upto = tl.cumsum(tl.load(wild + pair, mask=pair < pairs, other=0).to(tl.int32), 0)
    return upto, tl.max(upto, 0)


@triton.jit
def _place(upto, item, each, heads, group, blocks, channel_blocks):
    """(batch, head, kv head, block, block of channels) of an item, ``each`` of a marked pair; channels innermost, heads outermost."""
    kv_heads = heads // group
    pair = tl.sum((upto <= item // each).to(tl.int32), 0)
    item = item % each
    batch, kv = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    head = kv * group + item // (blocks * channel_blocks)
    return batch, head, kv, item // channel_blocks % blocks, item % channel_blocks


@triton.jit
def _forward_kernel(
    q, k, v, beta, lam, gate, wild, valid, first, last, o, lse,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, lam_b, lam_h, lam_t, gate_b, gate_h, gate_t, o_b, o_h, o_t,
    pairs, heads, group, tq, tk, scale,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    blocks, channel_blocks = tl.cdiv(tq, ROWS), tl.cdiv(CHANNELS, BLOCK_C)
    columns = tl.arange(0, BLOCK_W)
    upto, count = _marked(wild, pairs, PAIRS)
    each = group * blocks * channel_blocks
    for item in range(tl.program_id(0), count * each, tl.num_programs(0)):
        batch, head, kv, block, of_channels = _place(upto, item, each, heads, group, blocks, channel_blocks)
        begin, end = _keys_of(block * ROWS, tq, tk, first, last, CAUSAL, ROWS)
        rows, channels = block * ROWS + tl.arange(0, ROWS), of_channels * BLOCK_C + tl.arange(0, BLOCK_C)
        there = tl.minimum(rows, tq - 1)  # rows beyond the last repeat it, and are not stored
        position = there + (tk - tq)
        valid_here = of_head(valid, batch, 0, tk, 0)
        queries = _operand(q + batch * q_b + head * q_h, q_t, there, tq, columns, WIDTH)
        k_here, v_here = k + batch * k_b + kv * k_h, v + batch * v_b + kv * v_h
        x, sums = _greatest(
            queries, k_here, v_here, k_t, v_t, position, channels, columns, valid_here, first, last, begin, end, tk, scale,
            True, WIDTH, CHANNELS, CAUSAL, ROWS, KEYS, BLOCK_C,
        )  # fmt: skip
        beta_2 = _temperature(beta, kv, channels, CHANNELS) * LOG2_E
        mean, free, _ = _read(
            queries, k_here, v_here, k_t, v_t, x, sums, beta_2, position, channels, columns, valid_here, first, last, begin, end,
            tk, scale, False, WIDTH, CHANNELS, CAUSAL, ROWS, KEYS, BLOCK_C,
        )  # fmt: skip
        out = x + tl.where(free < mean, mean, free)
        if lam is not None:
            share = _tile(lam + batch * lam_b + head * lam_h, lam_t, there, channels, CHANNELS)
            out = x + mean + share * tl.where(free < mean, 0.0, free - mean)
        if gate is not None:
            out *= _tile(gate + batch * gate_b + head * gate_h, gate_t, there, channels, CHANNELS)
        at = o + batch * o_b + head * o_h + rows.to(tl.int64)[:, None] * o_t + channels[None, :]
        tl.store(at, out.to(o.dtype.element_ty), mask=(rows < tq)[:, None] & (channels < CHANNELS)[None, :])
        tl.store(lse + (batch * heads + head) * tq + rows, sums, mask=(rows < tq) & (of_channels == 0))
