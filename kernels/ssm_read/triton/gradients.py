"""State-space read's gradients of all tokens, in Triton, from those of the states' sums and of the
states beyond each chunk.

With S_t = d_t S_{t-1} + x_t and G_t the gradient of S_t, D_t = d_t S_{t-1} and K_t = d_{t+1}
G_{t+1} are the scans

    D_t = d_t (x_{t-1} + D_{t-1})      K_t = d_{t+1} (C_{t+1} dy_{t+1} + K_{t+1})

Then S = D + x, G = C dy + K, and the gradient of log d_t is G_t D_t: a product, whereas S - x would
contain the rounding error of x. dB and dC are sums over a block of channels, the rates' gradients
are sums over a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.aft_read.triton.forward import (
    dense,
    exponents_from,
    join_one,
    join_two,
    load,
    place,
    row,
)
from kernels.fem_attention.triton.prep import excess
from kernels.ssm_read.triton.states import channel, column, exponent


@triton.jit
def _row_or(is_row, given, otherwise):
    return tl.where(is_row[:, None], given[None, :], otherwise)


@triton.jit
def _weight(delta, v, beta, top):
    z, low = exponent(delta, v, beta)
    return tl.where(delta > 0.0, tl.exp(z - top + low), 0.0)


@triton.jit
def _pair(at, width, mask, ahead):
    """Load the values at ``at`` and at the next token."""
    return tl.load(at, mask=mask, other=0.0), tl.load(at + width, mask=ahead, other=0.0)


@triton.jit
def _stream(d, next_d, before, onward, own, state_at, gradient_at, factor, first, last, inside):
    """Return (D, G) of a stream, with this module's symbols. ``before``: x one token back, own: C
    dy, onward: d C dy one token on.
    """
    s, g = (
        tl.load(state_at, mask=inside, other=0.0),
        tl.load(gradient_at, mask=inside, other=0.0) * factor,
    )
    _, kept = tl.associative_scan((d, d * _row_or(first, s, before)), 0, join_one)
    _, later = tl.associative_scan((next_d, _row_or(last, g, onward)), 0, join_one, reverse=True)
    return kept, later + own


@triton.jit
def _gradients_kernel(
    delta, v, b_in, c_out, rate, slow, beta, centre, states_of, gradients, starts, d_sums, d_delta,
    dv, d_b_in, d_c_out, d_rate, d_beta,
    db, dh, dt, vb, vh, vt, batch, heads, tokens, width, states, chunks,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the gradients of all inputs but lam and gate.

    Long, because one pass over the states gives the gradients of all inputs.
    """
    b, h, bh, c, inside = place(heads, width, BC)
    chunk = tl.program_id(1)
    block = tl.program_id(0) % tl.cdiv(width, BC)
    BETA: tl.constexpr = beta is not None
    STREAMS: tl.constexpr = 4 if BETA else 2
    at = tl.arange(0, BT)
    t = chunk * BT + at
    mask = (t < tokens)[:, None] & inside[None, :]
    ahead = mask & (t + 1 < tokens)[:, None] & (at < BT - 1)[:, None]
    behind = mask & (at > 0)[:, None]
    first, last = at == 0, at == BT - 1
    step, value = load(delta, b, h, t, c, db, dh, dt, mask), load(v, b, h, t, c, vb, vh, vt, mask)
    next_step = load(delta, b, h, t + 1, c, db, dh, dt, ahead)
    step_before = load(delta, b, h, t - 1, c, db, dh, dt, behind)
    value_before = load(v, b, h, t - 1, c, vb, vh, vt, behind)
    slowest = channel(slow, h, width, c, inside)
    token = (bh * tokens + t)[:, None] * width + c[None, :]
    plane = batch * heads * tl.cast(tokens, tl.int64) * width
    if BETA:
        inverse_temperature = tl.load(beta + h * width + c, mask=inside, other=1.0)
        start = tl.load(starts + (bh * (chunks + 1) + chunk) * width + c, mask=inside, other=0.0)
        top = tl.load(d_sums + 3 * plane + token, mask=mask, other=0.0)
        weight = _weight(step, value, inverse_temperature, top)
        top_before = tl.load(d_sums + 3 * plane + token - width, mask=behind, other=0.0)
        weight_before = _weight(step_before, value_before, inverse_temperature, top_before)
        fade = tl.exp(_row_or(first, start, top_before) - top - slowest[None, :] * step)
        next_top = tl.load(d_sums + 3 * plane + token + width, mask=ahead, other=0.0)
        next_fade = tl.exp(tl.where(ahead, top - next_top - slowest[None, :] * next_step, 0.0))
        # The next chunk's gradient is relative to the maximum used for carrying the states, which
        # differs from the last token's by rounding.
        end = tl.load(starts + (bh * (chunks + 1) + chunk + 1) * width + c, mask=inside, other=0.0)
        to_last = tl.exp(row(tl.where(mask, top, end[None, :]), BT - 1, BT) - end)
        d_weight = tl.zeros((BT, BC), tl.float32)
        middle = tl.load(centre + bh * width + c, mask=inside, other=0.0)
        value, x, _far = exponents_from(value, inverse_temperature, middle, mask)
        value_before, x_before, _far = exponents_from(
            value_before, inverse_temperature, middle, mask
        )
        u, u_before = excess(x), excess(x_before)
        d_beyond = tl.zeros((BT, BC), tl.float32)
    d_step, d_value = tl.zeros((BT, BC), tl.float32), tl.zeros((BT, BC), tl.float32)
    dy_v, next_dy_v = _pair(d_sums + token, width, mask, ahead)
    dy_w, next_dy_w = _pair(d_sums + plane + token, width, mask, ahead)
    if BETA:
        dy_u, next_dy_u = _pair(d_sums + 4 * plane + token, width, mask, ahead)
        dy_e, next_dy_e = _pair(d_sums + 2 * plane + token, width, mask, ahead)
    for n in range(states):
        r = tl.load(rate + (h * states + n) * width + c, mask=inside, other=0.0)
        taken = column(b_in, bh, n, t, states, tokens, t < tokens)[:, None]
        taken_before = column(b_in, bh, n, t - 1, states, tokens, (t < tokens) & (at > 0))[:, None]
        given = column(c_out, bh, n, t, states, tokens, t < tokens)[:, None]
        next_given = column(c_out, bh, n, t + 1, states, tokens, (t + 1 < tokens) & (at < BT - 1))[
            :, None
        ]
        of_state = (((bh * chunks + chunk) * STREAMS) * states + n) * width + c
        below = of_state + states * width
        s_v, s_w = (
            tl.load(states_of + of_state, mask=inside, other=0.0),
            tl.load(states_of + below, mask=inside, other=0.0),
        )
        g_v, g_w = (
            tl.load(gradients + of_state, mask=inside, other=0.0),
            tl.load(gradients + below, mask=inside, other=0.0),
        )
        d, next_d = tl.exp(-r[None, :] * step), tl.exp(-r[None, :] * next_step)
        intake_before = step_before * taken_before
        onward = next_d * next_given
        _, d_w, d_v = tl.associative_scan(
            (
                d,
                d * _row_or(first, s_w, intake_before),
                d * _row_or(first, s_v, intake_before * value_before),
            ),
            0,
            join_two,
        )
        _, k_w, k_v = tl.associative_scan(
            (
                next_d,
                _row_or(last, g_w, onward * next_dy_w),
                _row_or(last, g_v, onward * next_dy_v),
            ),
            0,
            join_two,
            reverse=True,
        )
        k_w, k_v = k_w + given * dy_w, k_v + given * dy_v
        of_log_decay = k_w * d_w + k_v * d_v
        intake = k_w + k_v * value
        of_given = dy_w * (d_w + step * taken) + dy_v * (d_v + step * taken * value)
        d_value += k_v * step * taken
        of_taken = step * intake
        if BETA:
            # A separate scan: four streams at once need more registers than exist.
            at_u, at_e = of_state + 3 * states * width, of_state + 2 * states * width
            d_u, k_u = _stream(
                d, next_d, intake_before * u_before, onward * next_dy_u, given * dy_u,
                states_of + at_u, gradients + at_u, 1.0, first, last,
                inside,
            )  # fmt: skip
            of_log_decay += k_u * d_u
            intake += k_u * u
            of_given += dy_u * (d_u + step * taken * u)
            of_taken += step * k_u * u
            d_beyond += k_u * taken
            relative = (slowest - r)[None, :]
            d, next_d = tl.exp(relative * step) * fade, tl.exp(relative * next_step) * next_fade
            d_e, k_e = _stream(
                d, next_d, weight_before * taken_before, next_d * next_given * next_dy_e,
                given * dy_e, states_of + at_e, gradients + at_e,
                to_last, first, last, inside,
            )  # fmt: skip
            of_log_decay += k_e * d_e
            of_given += dy_e * (d_e + weight * taken)
            of_taken += k_e * weight
            d_weight += k_e * taken
        d_step += intake * taken - r[None, :] * of_log_decay
        of_token = ((block * batch * heads + bh) * states + n) * tokens + t
        tl.store(d_c_out + of_token, tl.sum(tl.where(mask, of_given, 0.0), 1), mask=t < tokens)
        tl.store(d_b_in + of_token, tl.sum(tl.where(mask, of_taken, 0.0), 1), mask=t < tokens)
        tl.store(
            d_rate + ((bh * chunks + chunk) * states + n) * width + c,
            -tl.sum(step * of_log_decay, 0),
            mask=inside,
        )
    if BETA:
        d_exponent = weight * d_weight
        d_step += tl.where(step > 0.0, d_exponent / tl.where(step > 0.0, step, 1.0), 0.0)
        d_excess = (
            step
            * d_beyond
            * (u + exponents_from(value + middle[None, :], inverse_temperature, middle, mask)[1])
        )
        d_value += inverse_temperature[None, :] * (d_exponent + d_excess)
        of_beta = d_exponent * (value + middle[None, :]) + d_excess * value
        tl.store(d_beta + (bh * chunks + chunk) * width + c, tl.sum(of_beta, 0), mask=inside)
    out = dense(b, h, t, c, batch, heads, width)
    tl.store(d_delta + out, d_step.to(d_delta.dtype.element_ty), mask=mask)
    tl.store(dv + out, d_value.to(dv.dtype.element_ty), mask=mask)
