"""What passes between chunks: cumulated decays within each, and the states at every chunk's edge, forward or backward in time.

No pairs of tokens are weighed here. Only exponents <= 0 (up to rounding) are exponentiated.

A window sum of log-decays is a difference of two cumulated sums. In float32 that would lose a weak decay behind a strong one, so sums
are built in float64 and kept as two numbers, high + low, high in float32 and low in float16 (it is under 3e-4, known to 6e-8): the
difference (high - high') + (low - low') is right to float32's rounding of the difference itself. A decay under `FLOOR` weighs as one of
`FLOOR`: exp of either is 0 in float32, and so is exp of any window with such a one in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.linear_attention.triton import plan as plans

FLOOR = tl.constexpr(-128.0)
NONE, HEAD, CHANNEL = tl.constexpr(plans.NONE), tl.constexpr(plans.HEAD), tl.constexpr(plans.CHANNEL)  # what DECAY is


@triton.jit
def cumulate_kernel(a, high, low, T, N, H, a_b, a_h, a_t, W: tl.constexpr, BW: tl.constexpr, C: tl.constexpr):
    """a [b, h, t, W], any type -> high float32, low float16 [b h, N C, W]: its sums from each chunk's start; none past the last token."""
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
    """The sum of log-decays after one place, up to another of the chunk."""
    return (high - before_high) + (low.to(tl.float32) - before_low.to(tl.float32))


@triton.jit
def damp(x, factor):
    """x * factor for a factor in [0, 1], 0 where the factor is 0 whatever x is: what was forgotten may have overflowed."""
    return tl.where(factor > 0, x * factor, 0.0)


@triton.jit
def states_kernel(
    x, v, high, low, share, weight, first, states, masses, last, T, N, H,
    x_b, x_h, x_t, v_b, v_h, v_t,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, NORMALISE: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """States S [dk, dv] at each chunk's start, S <- exp(chunk's decay) S + sum_i exp(decay after i) x_i v_i, chunk by chunk.

    x: keys [b, h, t, dk]; v: values [b, h, t, dv]; first [b h, dk, dv + NORMALISE] float32 or None; states [b h, N, dk, dv] in v's type;
    last like first. NORMALISE: also the sums over ones, masses [b h, N, dk] float32.
    REVERSE: gradients of the states at each chunk's end, from the last chunk to the first: x is q times share [b h, t], v is dy, the decay
    is the one up to each token, and ones become weight [b h, t], the gradients of the rows' masses.
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
        tl.store(states + ((bh * N + n) * DK + d[:, None]) * DV + j[None, :], state.to(states.dtype.element_ty), mask=inside)
        if NORMALISE and block_v == 0:
            tl.store(masses + (bh * N + n) * DK + d, mass, mask=d < DK)
        here = n * C + row < T
        keys = tl.load(x + n * C * x_t + row[None, :] * x_t + d[:, None], mask=here[None, :] & (d < DK)[:, None], other=0.0)
        values = tl.load(v + n * C * v_t + row[:, None] * v_t + j[None, :], mask=here[:, None] & (j < DV)[None, :], other=0.0)
        keys = keys.to(tl.float32)
        if NORMALISE and REVERSE:
            keys *= tl.load(share + bh * T + n * C + row, mask=here, other=0.0)[None, :]
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
            high_here = tl.load(high + at[:, None] + row[None, :] * DK, mask=(d < DK)[:, None], other=0.0)
            high_end = tl.load(high + at + (C - 1) * DK, mask=d < DK, other=0.0)
            state = damp(state, tl.exp(high_end)[:, None])
            mass = damp(mass, tl.exp(high_end))
            if REVERSE:
                keys *= tl.exp(high_here)
            else:
                low_here = tl.load(low + at[:, None] + row[None, :] * DK, mask=(d < DK)[:, None], other=0.0)
                low_end = tl.load(low + at + (C - 1) * DK, mask=d < DK, other=0.0)
                keys *= tl.exp(window(high_end[:, None], low_end[:, None], high_here, low_here))
        if NORMALISE:
            if REVERSE:
                mass += tl.sum(keys * tl.load(weight + bh * T + n * C + row, mask=here, other=0.0)[None, :], axis=1)
            else:
                mass += tl.sum(keys, axis=1)
        state += tl.dot(keys.to(values.dtype), values, input_precision="ieee")
    tl.store(last + (bh * DK + d[:, None]) * W + j[None, :], state, mask=inside)
    if NORMALISE and block_v == 0:
        tl.store(last + (bh * DK + d) * W + DV, mass, mask=d < DK)


BUILDS = tuple(
    plans.build(
        label,
        states_kernel,
        plan,
        {**plan.constants(), "REVERSE": reverse},
        data="x v states",
        floats="share weight first masses last",
        strides="x v",
        options=plans.STATES,
    )
    for label, plan, reverse in plans.BOTH_WAYS
) + tuple(
    plans.build(label, cumulate_kernel, plan, plan.cumulating(), data="a", strides="a", options=plans.OTHERS, matrix=False)
    for label, plan in plans.PRODUCTION.items()
    if plan.decay and plan.key_width == 64
)
