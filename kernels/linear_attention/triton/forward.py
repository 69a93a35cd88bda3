"""Linear attention's forward kernels: cumulative decays of each chunk, the states at its edges, the
pairs' weights, the rows' reads.

The last three also run backward in time, for gradients. Only exponents <= 0 (up to rounding) are
exponentiated.

A window sum of log-decays is a difference of two cumulative sums. In float32 that would lose a weak
decay after a strong one, so sums are computed in float64 and stored as two numbers, high + low,
high in float32 and low in float16 (it is under 3e-4, with an error of 6e-8): the difference (high -
high') + (low - low') is accurate to float32's rounding of the difference itself. A decay under
`FLOOR` is replaced by `FLOOR`: exp of either is 0 in float32, and so is exp of any window that
contains it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.linear_attention.triton import plan as plans

FLOOR = tl.constexpr(-128.0)
NONE, HEAD, CHANNEL = (
    tl.constexpr(plans.NONE),
    tl.constexpr(plans.HEAD),
    tl.constexpr(plans.CHANNEL),
)  # values of DECAY


@triton.jit
def cumulate_kernel(
    a, high, low, T, N, H, a_b, a_h, a_t, W: tl.constexpr, BW: tl.constexpr, C: tl.constexpr
):
    """Write the sums of a [b, h, t, W], any type, from each chunk's start as high float32 and low
    float16 [b h, N C, W].

    Tokens after the last one are not included.
    """
    bh, n = tl.program_id(0).to(tl.int64) // N, tl.program_id(0).to(tl.int64) % N
    row, column = tl.arange(0, C), tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (n * C + row < T)[:, None] & (column < W)[None, :]
    at = a + (bh // H) * a_b + (bh % H) * a_h + n * C * a_t + (row[:, None] * a_t + column[None, :])
    step = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    step = tl.where(step < FLOOR, FLOOR, step)
    total = tl.cumsum(step.to(tl.float64), axis=0)
    upper = total.to(tl.float32)
    to = (bh * N + n) * C * W + (row[:, None] * W + column[None, :])
    tl.store(high + to, upper, mask=(column < W)[None, :])
    tl.store(low + to, (total - upper.to(tl.float64)).to(tl.float16), mask=(column < W)[None, :])


@triton.jit
def window(high, low, before_high, before_low):
    """Return the sum of the log-decays after one place up to another place of the chunk."""
    return (high - before_high) + (low.to(tl.float32) - before_low.to(tl.float32))


@triton.jit
def damp(x, factor):
    """Return x * factor for a factor in [0, 1], and 0 where the factor is 0 for any x: a forgotten
    value may have overflowed.
    """
    return tl.where(factor > 0, x * factor, 0.0)


@triton.jit
def feature(x, known, RAGGED: tl.constexpr, EPS: tl.constexpr):
    """Return relu(x) + EPS in x's type, or x if EPS is None. RAGGED: 0 in channels that are not
    ``known``. Tokens after the last one have the feature EPS; callers multiply it by 0 or do not
    store the product.
    """
    if EPS is not None:
        positive = tl.where(x.to(tl.float32) < 0, 0.0, x)  # NaN stays NaN
        x = (positive.to(tl.float32) + EPS).to(x.dtype)
        if RAGGED:
            x = tl.where(known, x, 0.0)
    return x


@triton.jit
def states_kernel(
    x, v, high, low, share, weight, first, states, masses, last, T, N, H,
    x_b, x_h, x_t, v_b, v_h, v_t,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, NORMALISE: tl.constexpr, REVERSE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Write the states S [dk, dv] at each chunk's start, S <- exp(chunk's decay) S + sum_i
    exp(decay after i) x_i v_i, chunk by chunk.

    x: keys [b, h, t, dk]; v: values [b, h, t, dv]; first [b h, dk, dv + NORMALISE] float32 or None;
    states [b h, N, dk, dv] in v's type; last has first's shape. NORMALISE: also the sums over ones,
    masses [b h, N, dk] float32. REVERSE: gradients of the states at each chunk's end, from the last
    chunk to the first: x is q times share [b h, t], v is dy, the decay is the one up to each token,
    and ones become weight [b h, t], the gradients of the rows' masses.
    """
    bh = tl.program_id(0).to(tl.int64)
    block_k, block_v = tl.program_id(1) // tl.cdiv(DV, BV), tl.program_id(1) % tl.cdiv(DV, BV)
    row, d, j = tl.arange(0, C), block_k * BK + tl.arange(0, BK), block_v * BV + tl.arange(0, BV)
    x += (bh // H) * x_b + (bh % H) * x_h
    v += (bh // H) * v_b + (bh % H) * v_h
    W: tl.constexpr = DV + NORMALISE
    state = tl.zeros((BK, BV), tl.float32)
    mass = tl.zeros((BK,), tl.float32)
    inside = (d < DK)[:, None] & (j < DV)[None, :]
    if first is not None:
        state += tl.load(first + (bh * DK + d[:, None]) * W + j[None, :], mask=inside, other=0.0)
        if NORMALISE:
            mass += tl.load(first + (bh * DK + d) * W + DV, mask=d < DK, other=0.0)
    for step in range(N):
        n = tl.cast(N - 1 - step if REVERSE else step, tl.int64)
        tl.store(
            states + ((bh * N + n) * DK + d[:, None]) * DV + j[None, :],
            state.to(states.dtype.element_ty),
            mask=inside,
        )
        if NORMALISE and block_v == 0:
            tl.store(masses + (bh * N + n) * DK + d, mass, mask=d < DK)
        here = n * C + row < T
        keys = tl.load(
            x + n * C * x_t + row[None, :] * x_t + d[:, None],
            mask=here[None, :] & (d < DK)[:, None],
            other=0.0,
        )
        keys = feature(keys, (d < DK)[:, None], DK % BK > 0, EPS)
        values = tl.load(
            v + n * C * v_t + row[:, None] * v_t + j[None, :],
            mask=here[:, None] & (j < DV)[None, :],
            other=0.0,
        )
        keys = keys.to(tl.float32)
        if NORMALISE and REVERSE:
            keys *= tl.load(share + bh * T + n * C + row, mask=here, other=0.0)[None, :]
        elif EPS is not None:
            keys = tl.where(here[None, :], keys, 0.0)
        if DECAY == HEAD:
            at = (bh * N + n) * C
            high_here, high_end = tl.load(high + at + row), tl.load(high + at + C - 1)
            low_here, low_end = tl.load(low + at + row), tl.load(low + at + C - 1)
            state = damp(state, tl.exp(high_end))
            mass = damp(mass, tl.exp(high_end))
            if REVERSE:
                keys *= tl.exp(high_here)[None, :]
            else:
                keys *= tl.exp(window(high_end, low_end, high_here, low_here))[None, :]
        if DECAY == CHANNEL:
            at = (bh * N + n) * C * DK + d
            high_here = tl.load(
                high + at[:, None] + row[None, :] * DK, mask=(d < DK)[:, None], other=0.0
            )
            high_end = tl.load(high + at + (C - 1) * DK, mask=d < DK, other=0.0)
            state = damp(state, tl.exp(high_end)[:, None])
            mass = damp(mass, tl.exp(high_end))
            if REVERSE:
                keys *= tl.exp(high_here)
            else:
                low_here = tl.load(
                    low + at[:, None] + row[None, :] * DK, mask=(d < DK)[:, None], other=0.0
                )
                low_end = tl.load(low + at + (C - 1) * DK, mask=d < DK, other=0.0)
                keys *= tl.exp(window(high_end[:, None], low_end[:, None], high_here, low_here))
        if NORMALISE:
            if REVERSE:
                mass += tl.sum(
                    keys * tl.load(weight + bh * T + n * C + row, mask=here, other=0.0)[None, :],
                    axis=1,
                )
            else:
                mass += tl.sum(keys, axis=1)
        state += tl.dot(keys.to(values.dtype), values, input_precision="ieee")
    tl.store(last + (bh * DK + d[:, None]) * W + j[None, :], state, mask=inside)
    if NORMALISE and block_v == 0:
        tl.store(last + (bh * DK + d) * W + DV, mass, mask=d < DK)


LARGEST = tl.constexpr(3e38)  # limit of the reciprocal of a tiny mass in float32


@triton.jit
def level_terms(high, low, row, d, shift, DK: tl.constexpr):
    """Return (upper, factor) of one level of a chunk's binary splitting. high and low: the chunk's,
    as `cumulate_kernel` writes them.

    Tokens i < t separate at the highest bit in which their places in the chunk differ, bit number
    ``shift``: t has it (it is upper), i has not. Between them is the edge where t's block of
    2^shift tokens starts and i's ends, so exp(c_t - c_i) = factor_t factor_i with factor_t =
    exp(c_t - c_edge) and factor_i = exp(c_edge - c_i), both at most 1. Every pair belongs to one
    level.
    """
    block = row >> shift
    upper = block % 2 == 1
    edge = tl.where(upper, block << shift, (block + 1) << shift) - 1
    known = (d < DK)[None, :]
    at_row, at_edge = row[:, None] * DK + d[None, :], edge[:, None] * DK + d[None, :]
    high_row, high_edge = (
        tl.load(high + at_row, mask=known, other=0.0),
        tl.load(high + at_edge, mask=known, other=0.0),
    )
    low_row, low_edge = (
        tl.load(low + at_row, mask=known, other=0.0),
        tl.load(low + at_edge, mask=known, other=0.0),
    )
    return upper, tl.exp(-tl.abs(window(high_row, low_row, high_edge, low_edge)))


@triton.jit
def pairs_kernel(
    q, k, high, low, pairs, T, N, H, q_b, q_h, q_t, k_b, k_h, k_t,
    DK: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Write the weights (q_t * exp(c_t - c_i)) . k_i of a chunk's pairs to pairs [b h, N C, C] in
    q's type, 0 where i > t.

    Used for a decay for each channel; C is 2^LEVELS.
    """
    bh, n = tl.program_id(0).to(tl.int64) // N, tl.program_id(0).to(tl.int64) % N
    row = tl.arange(0, C)
    here = n * C + row < T
    q += (bh // H) * q_b + (bh % H) * q_h + n * C * q_t
    k += (bh // H) * k_b + (bh % H) * k_h + n * C * k_t
    high += (bh * N + n) * C * DK
    low += (bh * N + n) * C * DK
    weights = tl.zeros((C, C), tl.float32)
    for kb in range(0, DK, BK):
        d = kb + tl.arange(0, BK)
        inside = here[:, None] & (d < DK)[None, :]
        queries = tl.load(q + row[:, None] * q_t + d[None, :], mask=inside, other=0.0)
        keys = tl.load(k + row[:, None] * k_t + d[None, :], mask=inside, other=0.0)
        queries = feature(queries, (d < DK)[None, :], DK % BK > 0, EPS)
        keys = feature(keys, (d < DK)[None, :], DK % BK > 0, EPS)
        own = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), axis=1)
        weights += tl.where(row[:, None] == row[None, :], own[:, None], 0.0)
        for shift in range(LEVELS):
            upper, factor = level_terms(high, low, row, d, shift, DK)
            both = (tl.where(upper[:, None], queries, keys).to(tl.float32) * factor).to(
                queries.dtype
            )
            products = tl.dot(both, tl.trans(both), input_precision="ieee")
            block = row >> shift
            weights += tl.where(
                upper[:, None] & (block[:, None] == (block + 1)[None, :]), products, 0.0
            )
    to = pairs + (bh * N + n) * C * C + (row[:, None] * C + row[None, :])
    tl.store(to, weights.to(pairs.dtype.element_ty))


@triton.jit
def read_kernel(
    x, y, v, high, low, pairs, states, masses, share, out, T, N, H,
    x_b, x_h, x_t, y_b, y_h, y_t, v_b, v_h, v_t,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, NORMALISE: tl.constexpr, REVERSE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Write out [b h, t, dv]: the read of the rows x from the columns y of their chunk, with values
    v, and from the state.

    Each program writes one block of values. Forward: x is q, y is k, and share [b h, t], 1 / the
    mass of a row or 0 if that is not above 0, is written if NORMALISE. REVERSE: dv: x is k, y is q
    times share, v is dy, states are the gradients of those at the chunks' ends. Long, because three
    kinds of decay, both directions and the normaliser share its reads and products.
    """
    bh, n = tl.program_id(0).to(tl.int64) // N, tl.program_id(0).to(tl.int64) % N
    block_v = tl.program_id(1)
    row, j = tl.arange(0, C), block_v * BV + tl.arange(0, BV)
    here = n * C + row < T
    x += (bh // H) * x_b + (bh % H) * x_h + n * C * x_t
    y += (bh // H) * y_b + (bh % H) * y_h + n * C * y_t
    v += (bh // H) * v_b + (bh % H) * v_h + n * C * v_t
    states += (bh * N + n) * DK * DV
    W: tl.constexpr = DK if DECAY == CHANNEL else 1
    if DECAY != NONE:
        high += (bh * N + n) * C * W
        low += (bh * N + n) * C * W
    read = tl.zeros((C, BV), tl.float32)
    weights = tl.zeros((C, C), tl.float32)
    mass = tl.zeros((C,), tl.float32)
    for kb in range(0, DK, BK):
        d = kb + tl.arange(0, BK)
        rows = tl.load(
            x + row[:, None] * x_t + d[None, :], mask=here[:, None] & (d < DK)[None, :], other=0.0
        )
        rows = feature(rows, (d < DK)[None, :], DK % BK > 0, EPS)
        if DECAY != CHANNEL:
            columns = tl.load(
                y + row[None, :] * y_t + d[:, None],
                mask=here[None, :] & (d < DK)[:, None],
                other=0.0,
            )
            columns = feature(columns, (d < DK)[:, None], DK % BK > 0, EPS)
            weights += tl.dot(rows, columns, input_precision="ieee")
        else:
            at = row[:, None] * DK + d[None, :]
            since = tl.load(high + at, mask=(d < DK)[None, :], other=0.0)
            if REVERSE:
                high_end = tl.load(high + (C - 1) * DK + d, mask=d < DK, other=0.0)
                low_end = tl.load(low + (C - 1) * DK + d, mask=d < DK, other=0.0)
                low_row = tl.load(low + at, mask=(d < DK)[None, :], other=0.0)
                since = window(high_end[None, :], low_end[None, :], since, low_row)
            rows = (rows.to(tl.float32) * tl.exp(since)).to(rows.dtype)
        state = tl.load(
            states + (d[:, None] * DV + j[None, :]),
            mask=(d < DK)[:, None] & (j < DV)[None, :],
            other=0.0,
        )
        read += tl.dot(rows, state, input_precision="ieee")
        if NORMALISE and not REVERSE:
            sums = tl.load(masses + (bh * N + n) * DK + d, mask=d < DK, other=0.0)
            mass += tl.sum(rows.to(tl.float32) * sums[None, :], axis=1)
    if NORMALISE and REVERSE:
        shares = tl.load(share + bh * T + n * C + row, mask=here, other=0.0)
    if DECAY == CHANNEL:
        at = pairs + (bh * N + n) * C * C
        if REVERSE:
            weights += tl.load(at + row[None, :] * C + row[:, None]).to(tl.float32)
        else:
            weights += tl.load(at + row[:, None] * C + row[None, :]).to(tl.float32)
    else:
        seen = row[:, None] <= row[None, :] if REVERSE else row[:, None] >= row[None, :]
        if DECAY == HEAD:
            high_row, low_row = tl.load(high + row), tl.load(low + row)
            between = tl.abs(
                window(high_row[:, None], low_row[:, None], high_row[None, :], low_row[None, :])
            )
            weights *= tl.exp(-between)
            since = high_row
            if REVERSE:
                since = window(tl.load(high + C - 1), tl.load(low + C - 1), high_row, low_row)
            read = damp(read, tl.exp(since)[:, None])
            mass = damp(mass, tl.exp(since))
        weights = tl.where(seen, weights, 0.0)
    if NORMALISE and REVERSE:
        weights *= shares[None, :]
    values = tl.load(
        v + row[:, None] * v_t + j[None, :], mask=here[:, None] & (j < DV)[None, :], other=0.0
    )
    read += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    if NORMALISE:
        if REVERSE:
            read += tl.where((shares == 0)[:, None], values.to(tl.float32), 0.0)
        else:
            mass += tl.sum(weights, axis=1)
            empty = mass <= 0
            mass = tl.where(empty, 1.0, mass)
            read = tl.where(empty[:, None], values.to(tl.float32), read / mass[:, None])
            if block_v == 0:
                tl.store(
                    share + bh * T + n * C + row,
                    tl.where(empty, 0.0, tl.minimum(1.0 / mass, LARGEST)),
                    mask=here,
                )
    to = out + (bh * T + n * C) * DV + (row[:, None] * DV + j[None, :])
    tl.store(to, read.to(out.dtype.element_ty), mask=here[:, None] & (j < DV)[None, :])


MATRIX = (states_kernel, read_kernel, pairs_kernel)  # their products are wgmma on sm_90
