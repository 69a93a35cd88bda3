"""The state-space read in Triton as one autograd function, forward and backward, and the read itself.

One program a chunk and block of channels, one state after the other, scans over the chunk. Forward it writes o. Backward the same sums
are made again and give lam's and gate's gradients and those of the sums: of C S for values,
weights and exponentials, and m beside them (d_sums [4, b h, t, d]; 2 without the free energy), which `_gradients_kernel` takes from there.

Its mathematics: with S_t = d_t S_{t-1} + x_t and G_t the gradient of S_t, D_t = d_t S_{t-1} and K_t = d_{t+1} G_{t+1} are the scans
D_t = d_t (x_{t-1} + D_{t-1}), K_t = d_{t+1} (C_{t+1} dy_{t+1} + K_{t+1}); then S = D + x, G = C dy + K, and the gradient of log d_t is
G_t D_t: a product, where S - x would leave the rounding of x. dB and dC are sums over a block of channels, the rates' over a chunk.

The launches: forward the chunks' states, those carried, the read. Backward the states again, the sums' gradients, the states' gradients,
those carried from the end, the tokens' gradients. Nothing but the inputs is kept in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.aft_read.triton.forward import NOTHING, counted, dense, join_one, join_two, load, place, row
from kernels.ssm_read.triton.states import (
    Launch,
    _carry_back_kernel,
    _carry_kernel,
    _gradient_states_kernel,
    _states_kernel,
    build_launch,
    built,
    channel,
    column,
    exponent,
    maxima,
)
from kernels.tiles import Build, rows_of, strides_of


def fused_past(delta, rate, b_in, c_out, v, beta, lam, gate, valid, state):
    """(o, state) as `ssm_read` says, normalised; rate, beta and state float32, delta, b_in, c_out too."""
    if valid is not None:
        delta, v = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (delta, v))
    delta, v, lam, gate = (None if x is None else rows_of(x) for x in (delta, v, lam, gate))
    # States after channels, tokens after states: what a program reads lies together.
    by_channel, by_token = rate.transpose(1, 2).contiguous(), [x.transpose(2, 3).contiguous() for x in (b_in, c_out)]
    beta = None if beta is None else beta.contiguous()
    return _Read.apply(delta, by_channel, *by_token, v, beta, lam, gate, state)


class _Read(torch.autograd.Function):
    """rate [h, n, d], b_in and c_out [b, h, n, t]; the others as `ssm_read` has them."""

    @staticmethod
    def forward(ctx, delta, rate, b_in, c_out, v, beta, lam, gate, state):
        call = _Call(delta, rate, b_in, c_out, v, beta, lam, gate, state)
        states, after = call.states()
        o = call.time_first(v.dtype)
        call.read(states, o, None, None, None, None, None)
        ctx.save_for_backward(delta, rate, b_in, c_out, v, beta, lam, gate, state)
        ctx.mark_non_differentiable(after)
        return o, after

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, _):
        call = _Call(*ctx.saved_tensors)
        return *call.gradients(rows_of(d_o)), None


class _Call:
    """A call's tensors and sizes, and its launches."""

    def __init__(self, delta, rate, b_in, c_out, v, beta, lam, gate, state):
        self.delta, self.rate, self.b_in, self.c_out, self.v = delta, rate, b_in, c_out, v
        self.beta, self.lam, self.gate, self.state = beta, lam, gate, state
        self.shape, self.number = v.shape, rate.shape[1]
        self.streams = 2 if beta is None else 3
        self.launch = Launch(*v.shape, self.number, self.streams)
        self.rows, self.width = v.shape[0] * v.shape[1], v.shape[3]
        self.slow = rate.amin(1)
        self.tokens = strides_of(delta, v)
        self.starts = None

    def empty(self, *shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=self.v.device)

    def time_first(self, dtype):
        """[b, h, t, d] that lies in memory as [t, b, h, d]."""
        batch, heads, tokens, width = self.shape
        return self.empty(tokens, batch, heads, width, dtype=dtype).permute(1, 2, 0, 3)

    def per_chunk(self, *more):
        return self.empty(self.rows, self.launch.chunks, *more, self.width)

    def states(self):
        """The states before each chunk [b h, chunks, streams, n, d], and the one behind the last token; m before each in ``starts``."""
        launch, beta = self.launch, self.beta
        made, spans = self.per_chunk(self.streams, self.number), self.per_chunk()
        tops, given_top = None, None
        if beta is not None:
            tops, self.starts = self.per_chunk(), self.empty(self.rows, launch.chunks + 1, self.width)
            if self.state is not None:
                sums = self.state[..., 2 * self.number : -1]
                given_top = self.state[..., -1].masked_fill((sums == 0).all(-1), NOTHING.value).contiguous()
        _states_kernel[launch.grid](
            self.delta, self.v, self.b_in, self.rate, self.slow, beta, made, tops, spans,
            *self.tokens, *launch.sizes, **launch.blocks, **launch.options,
        )  # fmt: skip
        columns = self.streams * self.number + (beta is not None)
        after = self.empty(*self.shape[:2], self.width, columns)
        _carry_kernel[launch.carry_grid](
            made, tops, spans, self.rate, self.slow, self.state, given_top, self.starts, after, *self.carried(),
            BETA=beta is not None, BC=launch.blocks["BC"], BN=launch.block_n, **launch.options,
        )  # fmt: skip
        self.spans = spans
        return made, after

    def carried(self):
        return self.shape[1], self.width, self.number, self.launch.chunks

    def read(self, states, o, d_o, d_lam, d_gate, d_sums, d_beta):
        launch = self.launch
        _read_kernel[launch.grid](
            self.delta, self.v, self.b_in, self.c_out, self.rate, self.slow, self.beta, self.lam, self.gate, states, self.starts,
            o, d_o, d_lam, d_gate, d_sums, d_beta, *self.tokens, *strides_of(self.lam, self.gate, d_o), *launch.sizes,
            **launch.blocks, **launch.read_options(o is None, self.beta is not None),
        )  # fmt: skip

    def gradients(self, d_o):
        """Those of delta, rate, b_in, c_out, v, beta, lam, gate."""
        launch, beta = self.launch, self.beta
        batch, heads, tokens, width = self.shape
        states, _ = self.states()
        d_lam, d_gate = (None if x is None else self.time_first(x.dtype) for x in (self.lam, self.gate))
        d_sums = self.empty(2 if beta is None else 4, self.rows, tokens, width)
        of_free, of_values = (None if beta is None else self.per_chunk() for _ in range(2))
        self.read(states, None, d_o, d_lam, d_gate, d_sums, of_free)
        gradients = torch.empty_like(states)
        _gradient_states_kernel[launch.grid](
            self.delta, self.c_out, self.rate, self.slow, beta, self.starts, d_sums, gradients,
            *self.tokens[:3], *launch.sizes, **launch.blocks, **launch.options,
        )  # fmt: skip
        _carry_back_kernel[launch.carry_grid](
            gradients, self.spans, self.rate, self.slow, self.starts, *self.carried(),
            BETA=beta is not None, BC=launch.blocks["BC"], BN=launch.block_n, **launch.options,
        )  # fmt: skip
        d_delta, dv = self.time_first(self.delta.dtype), self.time_first(self.v.dtype)
        d_b_in, d_c_out = (self.empty(launch.columns, batch, heads, self.number, tokens) for _ in range(2))
        d_rate = self.per_chunk(self.number)
        _gradients_kernel[launch.grid](
            self.delta, self.v, self.b_in, self.c_out, self.rate, self.slow, beta, states, gradients, self.starts, d_sums,
            d_delta, dv, d_b_in, d_c_out, d_rate, of_values, *self.tokens, *launch.sizes, **launch.blocks, **launch.wide_options,
        )  # fmt: skip
        d_rate = d_rate.view(batch, heads, launch.chunks, self.number, width).sum((0, 2))
        d_beta = None if beta is None else (of_free + of_values).view(batch, heads, launch.chunks, width).sum((0, 2))
        return d_delta, d_rate, d_b_in.sum(0), d_c_out.sum(0), dv, d_beta, d_lam, d_gate


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
