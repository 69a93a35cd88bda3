"""The state-space read itself, in Triton: one program a chunk and block of channels, one state after the other, scans over the chunk.

Forward it writes o. Backward the same sums are made again and give lam's and gate's gradients and those of the sums: of C S for values,
weights and exponentials, and m beside them (d_sums [4, b h, t, d]; 2 without the free energy), which `_gradients_kernel` takes from there.

Its mathematics: with S_t = d_t S_{t-1} + x_t and G_t the gradient of S_t, D_t = d_t S_{t-1} and K_t = d_{t+1} G_{t+1} are the scans
D_t = d_t (x_{t-1} + D_{t-1}), K_t = d_{t+1} (C_{t+1} dy_{t+1} + K_{t+1}); then S = D + x, G = C dy + K, and the gradient of log d_t is
G_t D_t: a product, where S - x would leave the rounding of x. dB and dC are sums over a block of channels, the rates' over a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.aft_read.triton.forward import counted, dense, join_one, join_two, load, place, row
from kernels.ssm_read.triton.states import build_launch, built, channel, column, exponent, maxima
from kernels.tiles import Build


@triton.jit
def _read_kernel(
    delta, v, b_in, c_out, rate, slow, beta, lam, gate, states_of, starts, o, d_o, d_lam, d_gate, d_sums, d_beta,
    db, dh, dt, vb, vh, vt, lb, lh, lt, gb, gh, gt, ob, oh, ot, batch, heads, tokens, width, states, chunks,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    b, h, bh, c, inside = place(heads, width, BC)
    chunk = tl.program_id(1)
    BETA: tl.constexpr = beta is not None
    STREAMS: tl.constexpr = 3 if BETA else 2
    t = chunk * BT + tl.arange(0, BT)
    mask = (t < tokens)[:, None] & inside[None, :]
    step, value = load(delta, b, h, t, c, db, dh, dt, mask), load(v, b, h, t, c, vb, vh, vt, mask)
    slowest = channel(slow, h, width, c, inside)
    slow_decay = tl.exp(-slowest[None, :] * step)
    top, weight, fade = step, step, step
    if BETA:
        inverse_temperature = tl.load(beta + h * width + c, mask=inside, other=1.0)
        start = tl.load(starts + (bh * (chunks + 1) + chunk) * width + c, mask=inside, other=0.0)
        top, weight, fade = maxima(step, value, inverse_temperature, slowest, start, BT, BC)
    values, total, joint = tl.zeros((BT, BC), tl.float32), tl.zeros((BT, BC), tl.float32), tl.zeros((BT, BC), tl.float32)
    for n in range(states):
        relative = tl.load(rate + (h * states + n) * width + c, mask=inside, other=0.0) - slowest
        decay = tl.exp(-relative[None, :] * step)
        taken = column(b_in, bh, n, t, states, tokens, t < tokens)[:, None]
        given = column(c_out, bh, n, t, states, tokens, t < tokens)[:, None]
        before = states_of + (((bh * chunks + chunk) * STREAMS) * states + n) * width + c
        intake = step * taken
        through, s_weights, s_values = tl.associative_scan((decay * slow_decay, intake, intake * value), 0, join_two)
        values += given * (s_values + through * tl.load(before, mask=inside, other=0.0)[None, :])
        total += given * (s_weights + through * tl.load(before + states * width, mask=inside, other=0.0)[None, :])
        if BETA:
            through, s_joint = tl.associative_scan((decay * fade, weight * taken), 0, join_one)
            joint += given * (s_joint + through * tl.load(before + 2 * states * width, mask=inside, other=0.0)[None, :])
    mu = values / counted(total)
    free, mixed = mu, mu
    if BETA:
        nothing = joint == 0.0
        free = (tl.where(nothing, 0.0, top) + tl.log(counted(joint) / counted(total))) / inverse_temperature[None, :]
    made = free
    if lam is not None:
        mixed = load(lam, b, h, t, c, lb, lh, lt, mask)
        made = mu + mixed * (free - mu)
    at = dense(b, h, t, c, batch, heads, width)
    if o is not None:
        if gate is not None:
            made *= load(gate, b, h, t, c, gb, gh, gt, mask)
        tl.store(o + at, made.to(o.dtype.element_ty), mask=mask)
    else:
        g = load(d_o, b, h, t, c, ob, oh, ot, mask)
        if gate is not None:
            tl.store(d_gate + at, (g * made).to(d_gate.dtype.element_ty), mask=mask)
            g *= load(gate, b, h, t, c, gb, gh, gt, mask)
        d_mu, d_free = g, g
        if lam is not None:
            tl.store(d_lam + at, (g * (free - mu)).to(d_lam.dtype.element_ty), mask=mask)
            d_mu, d_free = g * (1.0 - mixed), g * mixed
        elif BETA:
            d_mu = tl.zeros_like(g)
        at = (bh * tokens + t)[:, None] * width + c[None, :]
        plane = batch * heads * tl.cast(tokens, tl.int64) * width
        tl.store(d_sums + at, d_mu / counted(total), mask=mask)
        d_total = d_mu * mu
        if BETA:
            tl.store(d_sums + 3 * plane + at, top, mask=mask)
            tl.store(d_sums + 2 * plane + at, tl.where(nothing, 0.0, d_free / (inverse_temperature[None, :] * counted(joint))), mask=mask)
            d_total += d_free / inverse_temperature[None, :]
            d_own = -tl.sum(d_free * free, 0) / inverse_temperature
            tl.store(d_beta + (bh * chunks + chunk) * width + c, d_own, mask=inside)
        tl.store(d_sums + plane + at, tl.where(total == 0.0, 0.0, -d_total / counted(total)), mask=mask)


@triton.jit
def _row_or(is_row, given, otherwise):
    return tl.where(is_row[:, None], given[None, :], otherwise)


@triton.jit
def _weight(delta, v, beta, top):
    z, low = exponent(delta, v, beta)
    return tl.where(delta > 0.0, tl.exp(z - top + low), 0.0)


@triton.jit
def _gradients_kernel(
    delta, v, b_in, c_out, rate, slow, beta, states_of, gradients, starts, d_sums, d_delta, dv, d_b_in, d_c_out, d_rate, d_beta,
    db, dh, dt, vb, vh, vt, batch, heads, tokens, width, states, chunks,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Long, because one pass over the states gives the gradients of all inputs."""
    b, h, bh, c, inside = place(heads, width, BC)
    chunk = tl.program_id(1)
    block = tl.program_id(0) % tl.cdiv(width, BC)
    BETA: tl.constexpr = beta is not None
    STREAMS: tl.constexpr = 3 if BETA else 2
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
    slow_decay, next_slow_decay = tl.exp(-slowest[None, :] * step), tl.exp(-slowest[None, :] * next_step)
    token = (bh * tokens + t)[:, None] * width + c[None, :]
    plane = batch * heads * tl.cast(tokens, tl.int64) * width
    dy_v, dy_w = tl.load(d_sums + token, mask=mask, other=0.0), tl.load(d_sums + plane + token, mask=mask, other=0.0)
    next_dy_v = tl.load(d_sums + token + width, mask=ahead, other=0.0)
    next_dy_w = tl.load(d_sums + plane + token + width, mask=ahead, other=0.0)
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
        # The next chunk's gradient is relative to the maximum that the states were carried with, a rounding away from the last token's.
        end = tl.load(starts + (bh * (chunks + 1) + chunk + 1) * width + c, mask=inside, other=0.0)
        to_last = tl.exp(row(tl.where(mask, top, end[None, :]), BT - 1, BT) - end)
        dy_e = tl.load(d_sums + 2 * plane + token, mask=mask, other=0.0)
        next_dy_e = tl.load(d_sums + 2 * plane + token + width, mask=ahead, other=0.0)
        d_weight = tl.zeros((BT, BC), tl.float32)
    d_step, d_value = tl.zeros((BT, BC), tl.float32), tl.zeros((BT, BC), tl.float32)
    for n in range(states):
        r = tl.load(rate + (h * states + n) * width + c, mask=inside, other=0.0)
        decay, next_decay = tl.exp(-(r - slowest)[None, :] * step), tl.exp(-(r - slowest)[None, :] * next_step)
        taken = column(b_in, bh, n, t, states, tokens, t < tokens)[:, None]
        taken_before = column(b_in, bh, n, t - 1, states, tokens, (t < tokens) & (at > 0))[:, None]
        given = column(c_out, bh, n, t, states, tokens, t < tokens)[:, None]
        next_given = column(c_out, bh, n, t + 1, states, tokens, (t + 1 < tokens) & (at < BT - 1))[:, None]
        of_state = (((bh * chunks + chunk) * STREAMS) * states + n) * width + c
        s_v, s_w = (
            tl.load(states_of + of_state, mask=inside, other=0.0),
            tl.load(states_of + of_state + states * width, mask=inside, other=0.0),
        )
        g_v, g_w = (
            tl.load(gradients + of_state, mask=inside, other=0.0),
            tl.load(gradients + of_state + states * width, mask=inside, other=0.0),
        )
        d, next_d = decay * slow_decay, next_decay * next_slow_decay
        x_before = step_before * taken_before
        _, d_w, d_v = tl.associative_scan(
            (d, d * _row_or(first, s_w, x_before), d * _row_or(first, s_v, x_before * value_before)), 0, join_two
        )
        _, k_w, k_v = tl.associative_scan(
            (next_d, _row_or(last, g_w, next_d * next_given * next_dy_w), _row_or(last, g_v, next_d * next_given * next_dy_v)),
            0, join_two, reverse=True,
        )  # fmt: skip
        k_w, k_v = k_w + given * dy_w, k_v + given * dy_v
        of_log_decay = k_w * d_w + k_v * d_v
        intake = k_w + k_v * value
        of_given = dy_w * (d_w + step * taken) + dy_v * (d_v + step * taken * value)
        of_taken = step * intake
        d_value += k_v * step * taken
        if BETA:
            s_e = tl.load(states_of + of_state + 2 * states * width, mask=inside, other=0.0)
            g_e = tl.load(gradients + of_state + 2 * states * width, mask=inside, other=0.0) * to_last
            d, next_d = decay * fade, next_decay * next_fade
            _, d_e = tl.associative_scan((d, d * _row_or(first, s_e, weight_before * taken_before)), 0, join_one)
            _, k_e = tl.associative_scan((next_d, _row_or(last, g_e, next_d * next_given * next_dy_e)), 0, join_one, reverse=True)
            k_e += given * dy_e
            of_log_decay += k_e * d_e
            of_given += dy_e * (d_e + weight * taken)
            of_taken += k_e * weight
            d_weight += k_e * taken
        d_step += intake * taken - r[None, :] * of_log_decay
        of_token = ((block * batch * heads + bh) * states + n) * tokens + t
        tl.store(d_c_out + of_token, tl.sum(tl.where(mask, of_given, 0.0), 1), mask=t < tokens)
        tl.store(d_b_in + of_token, tl.sum(tl.where(mask, of_taken, 0.0), 1), mask=t < tokens)
        tl.store(d_rate + ((bh * chunks + chunk) * states + n) * width + c, -tl.sum(step * of_log_decay, 0), mask=inside)
    if BETA:
        d_exponent = weight * d_weight
        d_step += tl.where(step > 0.0, d_exponent / tl.where(step > 0.0, step, 1.0), 0.0)
        d_value += inverse_temperature[None, :] * d_exponent
        tl.store(d_beta + (bh * chunks + chunk) * width + c, tl.sum(d_exponent * value, 0), mask=inside)
    out = dense(b, h, t, c, batch, heads, width)
    tl.store(d_delta + out, d_step.to(d_delta.dtype.element_ty), mask=mask)
    tl.store(dv + out, d_value.to(dv.dtype.element_ty), mask=mask)


def _builds():
    launch = build_launch()
    forward, backward = dict.fromkeys(("d_o", "d_lam", "d_gate", "d_sums", "d_beta")), {"o": None}
    mean = dict.fromkeys(("beta", "lam", "starts", "d_lam", "d_beta"))
    found = []
    for label, less in (("mu and F", {}), ("mu", mean)):
        for name, absent in (("read", forward), ("gradients of the sums", backward)):
            warps = launch.read_options(absent is backward, not less)["num_warps"]
            found.append(built(f"{name}, {label}", _read_kernel, launch.blocks | absent | less, warps))
    found.append(built("gradients, mu and F", _gradients_kernel, launch.blocks, launch.wide_options["num_warps"]))
    return tuple(found)


BUILDS: tuple[Build, ...] = _builds()
