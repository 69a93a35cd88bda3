"""The state-space read itself, in Triton: one program a chunk and block of channels, one state after the other, scans over the chunk.

Forward it writes o. Backward the same sums are made again and give lam's and gate's gradients and those of the sums: of C S for values,
weights and exponentials, and m beside them (d_sums [4, b h, t, d]; 2 without the free energy), which `gradients` takes from there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.aft_read.triton.tiles import counted, dense, join_one, join_two, load, place
from kernels.build import Build
from kernels.ssm_read.triton.states import ALIGNED, build_launch, shared_types
from kernels.ssm_read.triton.tiles import STAGES, channel, column, maxima


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


def _builds():
    launch = build_launch()
    types = shared_types() | dict.fromkeys(("lam", "gate", "o", "d_o", "d_lam", "d_gate"), "*bf16") | {"d_beta": "*fp32"}
    strides = tuple(x + y for x in "lgo" for y in "bht")
    types |= dict.fromkeys(strides, "i32")
    forward, backward = dict.fromkeys(("d_o", "d_lam", "d_gate", "d_sums", "d_beta")), {"o": None}
    mean = dict.fromkeys(("beta", "lam", "starts", "d_lam", "d_beta"))
    found = []
    for label, less in (("mu and F", {}), ("mu", mean)):
        for name, absent in (("read", forward), ("gradients of the sums", backward)):
            warps = launch.read_options(absent is backward, not less)["num_warps"]
            given = launch.blocks | absent | less
            found.append(Build(f"{name}, {label}", _read_kernel, types, given, warps, STAGES, aligned=(*ALIGNED, *strides)))
    return tuple(found)


BUILDS: tuple[Build, ...] = _builds()
