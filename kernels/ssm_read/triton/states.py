"""State-space read's states and their gradients at the chunks' ends, in Triton, and the code that
all its kernels share. No tokens' outputs.

First, each chunk separately: the state at its end from a zero state, or the gradient of the state
at its start from a zero gradient, plain sums over its tokens. Then they are carried from chunk to
chunk, forward or backward, by one program for each block of states, in place: a chunk's entry
becomes the state before it, or the gradient of the state after it.

The order of the streams is the state's: values minus c, weights, exponentials, and under the
weights' decays u = exp(x) - 1 - x, x = beta (v - c), until a value is too far from c. The
exponentials are stored relative to m_t, the largest log(delta_i) + beta v_i of the past, faded with
the channel's slowest rate; its decay is exp(-(rate - slowest) delta_t) exp(m_{t-1} - m_t - slowest
delta_t), both at most 1. m is a constant to the gradient, because it cancels. A masked token has
delta = 0; m before the first unmasked token is the constant for -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.aft_read.triton.forward import (
    NOTHING,
    _greater,
    exponents,
    exponents_from,
    load,
    place,
)
from kernels.fem_attention.triton.prep import excess
from kernels.implementations import interpreted

STAGES = 1


class Launch:
    """Grids and block sizes for [batch, heads, tokens, width] and states."""

    def __init__(self, batch, heads, tokens, width, states, streams):
        block_t, block_c, block_n = (4, 4, 1) if interpreted() else (64, 16, 32)
        self.block_n, self.streams = min(block_n, triton.next_power_of_2(states)), streams
        block_c = min(block_c, triton.next_power_of_2(width))
        self.columns, self.chunks = triton.cdiv(width, block_c), triton.cdiv(tokens, block_t)
        self.grid = (batch * heads * self.columns, self.chunks)
        self.carry_grid = (batch * heads * self.columns, triton.cdiv(states, self.block_n))
        self.sizes = (batch, heads, tokens, width, states, self.chunks)
        self.blocks = {"BT": block_t, "BC": block_c}
        # The tokens' gradients need the most registers: too many for a block of all channels.
        self.gradient_blocks = {"BT": block_t, "BC": max(1, block_c // 2)}
        self.gradient_columns = triton.cdiv(width, self.gradient_blocks["BC"])
        self.gradient_grid = (batch * heads * self.gradient_columns, self.chunks)
        self.options = {"num_warps": 4, "num_stages": STAGES}
        self.wide_options = {"num_warps": 8, "num_stages": STAGES}


@triton.jit
def shifted(x, first, BT: tl.constexpr, BC: tl.constexpr):
    """Return each row one token later; ``first`` becomes the first row."""
    at = tl.arange(0, BT)
    moved = tl.gather(x, tl.zeros((BT, BC), tl.int32) + tl.maximum(at - 1, 0)[:, None], 0)
    return tl.where((at == 0)[:, None], first, moved)


@triton.jit
def exponent(delta, v, beta):
    """Return z = log(delta) + beta v at unmasked tokens: the rounded sum and its error."""
    read = delta > 0.0
    return exponents(tl.log(tl.where(read, delta, 1.0)), v, beta, read)


@triton.jit
def maxima(delta, v, beta, slow, start, BT: tl.constexpr, BC: tl.constexpr):
    """Return (m, weight, fade): m_t from m before the tile, exp(z - m), and exp(m_{t-1} - m_t -
    slow delta_t).
    """
    z, low = exponent(delta, v, beta)
    through = slow[None, :] * tl.cumsum(delta, 0)
    highest = tl.associative_scan(tl.where(z <= NOTHING, NOTHING, z + through), 0, _greater)
    top = tl.maximum(highest, start[None, :]) - through
    weight = tl.where(z <= NOTHING, 0.0, tl.exp(z - top + low))
    return top, weight, tl.exp(shifted(top, start[None, :], BT, BC) - top - slow[None, :] * delta)


@triton.jit
def channel(x, h, width, c, inside):
    """Load x[h, c] of [heads, width]."""
    return tl.load(x + h * width + c, mask=inside, other=0.0)


@triton.jit
def column(x, bh, n, t, states, tokens, mask):
    """Load x[b, h, n, t] of the tokens t."""
    return tl.load(x + (bh * states + n) * tokens + t, mask=mask, other=0.0)


@triton.jit
def _states_kernel(
    delta, v, b_in, rate, slow, beta, centre, states_out, tops, lost, spans,
    db, dh, dt, vb, vh, vt, batch, heads, tokens, width, states, chunks,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write each chunk's last state from a zero state, its m, a flag for a value too far from c,
    and the sum of its steps.
    """
    b, h, bh, c, inside = place(heads, width, BC)
    chunk = tl.program_id(1)
    BETA: tl.constexpr = beta is not None
    at = tl.arange(0, BT)
    t = chunk * BT + at
    mask = (t < tokens)[:, None] & inside[None, :]
    step, value = load(delta, b, h, t, c, db, dh, dt, mask), load(v, b, h, t, c, vb, vh, vt, mask)
    slowest = channel(slow, h, width, c, inside)
    # Summed from the end, so that small decays are not a difference of two large sums.
    later = tl.cumsum(
        load(
            delta,
            b,
            h,
            t + 1,
            c,
            db,
            dh,
            dt,
            mask & (t + 1 < tokens)[:, None] & (at < BT - 1)[:, None],
        ),
        0,
        reverse=True,
    )
    faded = tl.exp(-slowest[None, :] * later)
    per_chunk = (bh * chunks + chunk) * width + c
    tl.store(spans + per_chunk, tl.sum(step, 0), mask=inside)
    if BETA:
        z, low = exponent(step, value, channel(beta, h, width, c, inside))
        top = tl.max(tl.where(z <= NOTHING, NOTHING, z - slowest[None, :] * later), 0)
        # The two large numbers first: their difference is exact.
        weight = tl.where(
            z <= NOTHING, 0.0, tl.exp(z - top[None, :] - slowest[None, :] * later + low)
        )
        tl.store(tops + per_chunk, top, mask=inside)
        value, x, far = exponents_from(
            value,
            channel(beta, h, width, c, inside),
            tl.load(centre + bh * width + c, mask=inside, other=0.0),
            step > 0.0,
        )
        beyond = excess(x)
        tl.store(lost + per_chunk, tl.sum(far.to(tl.float32), 0), mask=inside)
    STREAMS: tl.constexpr = 4 if BETA else 2
    for n in range(states):
        relative = tl.load(rate + (h * states + n) * width + c, mask=inside, other=0.0) - slowest
        taken = (
            tl.exp(-relative[None, :] * later)
            * column(b_in, bh, n, t, states, tokens, t < tokens)[:, None]
        )
        into = states_out + (((bh * chunks + chunk) * STREAMS) * states + n) * width + c
        tl.store(into, tl.sum(taken * faded * step * value, 0), mask=inside)
        tl.store(into + states * width, tl.sum(taken * faded * step, 0), mask=inside)
        if BETA:
            tl.store(into + 2 * states * width, tl.sum(taken * weight, 0), mask=inside)
            tl.store(
                into + 3 * states * width, tl.sum(taken * faded * step * beyond, 0), mask=inside
            )


@triton.jit
def _gradient_states_kernel(
    delta, c_out, rate, slow, beta, starts, d_sums, gradients, db, dh, dt, batch, heads, tokens,
    width, states, chunks,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write, for each chunk, its own tokens' part of the gradient of the state before it."""
    b, h, bh, c, inside = place(heads, width, BC)
    chunk = tl.program_id(1)
    BETA: tl.constexpr = beta is not None
    t = chunk * BT + tl.arange(0, BT)
    mask = (t < tokens)[:, None] & inside[None, :]
    step = load(delta, b, h, t, c, db, dh, dt, mask)
    slowest = channel(slow, h, width, c, inside)
    through = tl.cumsum(step, 0)
    faded = tl.exp(-slowest[None, :] * through)
    at = (bh * tokens + t)[:, None] * width + c[None, :]
    plane = batch * heads * tl.cast(tokens, tl.int64) * width
    d_values, d_weights = (
        tl.load(d_sums + at, mask=mask, other=0.0),
        tl.load(d_sums + plane + at, mask=mask, other=0.0),
    )
    if BETA:
        start = tl.load(starts + (bh * (chunks + 1) + chunk) * width + c, mask=inside, other=0.0)
        top = tl.load(d_sums + 3 * plane + at, mask=mask, other=0.0)
        d_joint = tl.load(d_sums + 2 * plane + at, mask=mask, other=0.0)
        d_joint *= tl.exp(tl.where(mask, start[None, :] - top - slowest[None, :] * through, 0.0))
        d_beyond = tl.load(d_sums + 4 * plane + at, mask=mask, other=0.0)
    STREAMS: tl.constexpr = 4 if BETA else 2
    for n in range(states):
        relative = tl.load(rate + (h * states + n) * width + c, mask=inside, other=0.0) - slowest
        given = (
            tl.exp(-relative[None, :] * through)
            * column(c_out, bh, n, t, states, tokens, t < tokens)[:, None]
        )
        into = gradients + (((bh * chunks + chunk) * STREAMS) * states + n) * width + c
        tl.store(into, tl.sum(given * faded * d_values, 0), mask=inside)
        tl.store(into + states * width, tl.sum(given * faded * d_weights, 0), mask=inside)
        if BETA:
            tl.store(into + 2 * states * width, tl.sum(given * d_joint, 0), mask=inside)
            tl.store(into + 3 * states * width, tl.sum(given * faded * d_beyond, 0), mask=inside)


@triton.jit
def _carried(at, mask, decay, total):
    """Store total at ``at`` and return total decayed plus the previous value. One layout for both:
    each thread accesses its own numbers.
    """
    new = tl.load(at, mask=mask, other=0.0)
    tl.store(at, total, mask=mask)
    return total * decay + new


@triton.jit
def _carry_kernel(
    states_of, tops, lost, spans, rate, slow, given, given_top, centre, starts, left, after, heads,
    width, states, chunks,
    BETA: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Carry forward: each chunk's entry becomes the state before it.

    starts, left [b h, chunks + 1, d]: m, and a positive number if a value was too far from c.
    after: the state that `ssm_read` returns.
    """
    _, h, bh, c, inside = place(heads, width, BC)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (n < states)[:, None] & inside[None, :]
    STREAMS: tl.constexpr = 4 if BETA else 2
    columns = STREAMS * states + (2 if BETA else 0)
    slowest = channel(slow, h, width, c, inside)
    rates = tl.load(rate + (h * states + n)[:, None] * width + c[None, :], mask=mask, other=0.0)
    relative = tl.maximum(rates - slowest[None, :], 0.0)
    of_state = (bh * width + c)[None, :] * columns + n[:, None]
    values, weights, joint = (
        tl.zeros((BN, BC), tl.float32),
        tl.zeros((BN, BC), tl.float32),
        tl.zeros((BN, BC), tl.float32),
    )
    beyond, gone = tl.zeros((BN, BC), tl.float32), tl.zeros((BC,), tl.float32)
    top = tl.full((BC,), NOTHING, tl.float32)
    first, middle = inside & (tl.program_id(1) == 0), tl.zeros((BC,), tl.float32)
    if BETA:
        middle = tl.load(centre + bh * width + c, mask=inside, other=0.0)
    if given is not None:
        values = tl.load(given + of_state, mask=mask, other=0.0)
        weights = tl.load(given + of_state + states, mask=mask, other=0.0)
        if BETA:
            joint = tl.load(given + of_state + 2 * states, mask=mask, other=0.0)
            values -= middle[None, :] * weights
            beyond = tl.load(given + of_state + 3 * states, mask=mask, other=0.0)
            gone = tl.max(tl.where(beyond < 0.0, 1.0, 0.0), 0)
            beyond = tl.maximum(beyond, 0.0)
            top = tl.load(given_top + bh * width + c, mask=inside, other=0.0)
    for chunk in range(chunks):
        per_chunk = (bh * chunks + chunk) * width + c
        at = (
            states_of + ((bh * chunks + chunk) * STREAMS * states + n)[:, None] * width + c[None, :]
        )
        span = tl.load(spans + per_chunk, mask=inside, other=0.0)
        decay = tl.exp(-rates * span[None, :])
        values = _carried(at, mask, decay, values)
        weights = _carried(at + states * width, mask, decay, weights)
        if BETA:
            own = tl.load(tops + per_chunk, mask=inside, other=NOTHING)
            before_chunk = (bh * (chunks + 1) + chunk) * width + c
            tl.store(starts + before_chunk, top, mask=first)
            tl.store(left + before_chunk, gone, mask=first)
            gone += tl.load(lost + per_chunk, mask=inside, other=0.0)
            before = top
            top = tl.maximum(tl.where(before <= NOTHING, NOTHING, before - slowest * span), own)
            new = tl.load(at + 2 * states * width, mask=mask, other=0.0)
            tl.store(at + 2 * states * width, joint, mask=mask)
            joint = (
                joint
                * tl.exp(-relative * span[None, :])
                * tl.exp(before - top - slowest * span)[None, :]
            )
            joint += new * tl.exp(own - top)[None, :]
            beyond = _carried(at + 3 * states * width, mask, decay, beyond)
    tl.store(after + of_state, values + middle[None, :] * weights, mask=mask)
    tl.store(after + of_state + states, weights, mask=mask)
    if BETA:
        tl.store(after + of_state + 2 * states, joint, mask=mask)
        tl.store(
            after + of_state + 3 * states, tl.where((gone > 0.0)[None, :], -1.0, beyond), mask=mask
        )
        behind = (bh * (chunks + 1) + chunks) * width + c
        tl.store(starts + behind, top, mask=first)
        tl.store(left + behind, gone, mask=first)
        last = after + (bh * width + c) * columns + columns
        tl.store(last - 2, middle, mask=first)
        tl.store(last - 1, tl.where(top <= NOTHING, 0.0, top), mask=first)


@triton.jit
def _carry_back_kernel(
    gradients, spans, rate, slow, starts, heads, width, states, chunks,
    BETA: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Carry backward: each chunk's entry becomes the gradient of the state after it."""
    _, h, bh, c, inside = place(heads, width, BC)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (n < states)[:, None] & inside[None, :]
    STREAMS: tl.constexpr = 4 if BETA else 2
    slowest = channel(slow, h, width, c, inside)
    rates = tl.load(rate + (h * states + n)[:, None] * width + c[None, :], mask=mask, other=0.0)
    relative = tl.maximum(rates - slowest[None, :], 0.0)
    values, weights = tl.zeros((BN, BC), tl.float32), tl.zeros((BN, BC), tl.float32)
    joint, beyond = tl.zeros((BN, BC), tl.float32), tl.zeros((BN, BC), tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        at = (
            gradients + ((bh * chunks + chunk) * STREAMS * states + n)[:, None] * width + c[None, :]
        )
        span = tl.load(spans + (bh * chunks + chunk) * width + c, mask=inside, other=0.0)
        decay = tl.exp(-rates * span[None, :])
        values = _carried(at, mask, decay, values)
        weights = _carried(at + states * width, mask, decay, weights)
        if BETA:
            top = starts + (bh * (chunks + 1) + chunk) * width + c
            before, after = (
                tl.load(top, mask=inside, other=0.0),
                tl.load(top + width, mask=inside, other=0.0),
            )
            joint_decay = (
                tl.exp(-relative * span[None, :]) * tl.exp(before - after - slowest * span)[None, :]
            )
            joint = _carried(at + 2 * states * width, mask, joint_decay, joint)
            beyond = _carried(at + 3 * states * width, mask, decay, beyond)
