"""AFT's read in Triton, forward, and the code that the backward shares: a tile of tokens by
channels, its running maxima and sums.

If one program for each block of channels would leave the device idle, a first launch computes six
rows for each segment (maximum, sum and values of exp(k), maximum and sum of exp(k + beta v), the
excess: exp(k) times exp(x) - 1 - x). The second launch combines the rows of the earlier segments,
processes its chunks by scans, mixes mu and F, and stores the rows before each chunk for the
backward: 24 / BT bytes for each number of v. An excess of -1 means that a value was too far from c,
and F - mu is computed from the logarithms from that token on.

A sum of exponentials over the past is stored relative to its running maximum m_t, S_t = sum_{i <=
t} exp(z_i - m_t), and is updated by S_t = exp(m_{t-1} - m_t) S_{t-1} + exp(z_t - m_t): a scan of
products at most 1, most of them 1 exactly. m_{t-1} is read by a second load, one token back. Masked
tokens and those outside have weight 0, and their z is the finite number that represents -inf; so is
m before the first unmasked token: differences then stay numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fem_attention.triton.epilogue import free_energy_gap
from kernels.fem_attention.triton.prep import excess
from kernels.free_energy.op import SHIFT_BELOW
from kernels.implementations import interpreted
from kernels.tiles import strides_of

PROGRAMS = 528  # four for each of an H100's multiprocessors
MOST_SEGMENTS = 64  # their summaries are joined in one block
WARPS, STAGES = 4, 1
MAXIMUM = tl.constexpr(0)  # rows of a state, and of the rows stored for each chunk
SUM = tl.constexpr(1)
VALUES = tl.constexpr(2)
JOINT_MAXIMUM = tl.constexpr(3)
JOINT_SUM = tl.constexpr(4)
EXCESS = tl.constexpr(5)
ROWS = tl.constexpr(6)
CENTRE = tl.constexpr(6)  # only in a state
REACH = tl.constexpr(SHIFT_BELOW / 2)
NOTHING = tl.constexpr(-1.0e38)


class Launch:
    """Grid and block sizes for [batch, heads, tokens, width]: one program for each block of
    channels and segment of chunks.
    """

    def __init__(self, batch, heads, tokens, width, narrow=False):
        block_t, block_c, programs = (8, 4, 4) if interpreted() else (32, 32, PROGRAMS)
        block_c = min(block_c // 2 if narrow else block_c, triton.next_power_of_2(width))
        self.columns, self.chunks = triton.cdiv(width, block_c), triton.cdiv(tokens, block_t)
        wanted = min(MOST_SEGMENTS, self.chunks, max(1, programs // (batch * heads * self.columns)))
        each = triton.cdiv(self.chunks, wanted)
        self.segments = triton.cdiv(self.chunks, each)
        self.grid = (batch * heads * self.columns, self.segments)
        self.sizes = (batch, heads, tokens, width, each, self.segments, self.chunks)
        self.constants = {
            "SEGMENTS": triton.next_power_of_2(self.segments),
            "BT": block_t,
            "BC": block_c,
        }
        self.options = {"num_warps": WARPS, "num_stages": STAGES}


@triton.jit
def place(heads, width, BC: tl.constexpr):
    """Return (batch entry, head, index over batch and heads, channels, mask of existing channels)
    of this program.
    """
    columns = tl.cdiv(width, BC)
    bh = (tl.program_id(0) // columns).to(tl.int64)
    c = (tl.program_id(0) % columns) * BC + tl.arange(0, BC)
    return bh // heads, bh % heads, bh, c, c < width


@triton.jit
def load(x, b, h, t, c, sb, sh, st, mask):
    """Load x[b, h, t, c] in float32 for tokens t and channels c. The last stride is 1."""
    at = x + b * sb + h * sh + t.to(tl.int64)[:, None] * st + c[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def dense(b, h, t, c, batch, heads, width):
    """Return the offsets of [b, h, t, c] in an output with the layout [tokens, batch, heads,
    width].
    """
    return ((t.to(tl.int64) * batch + b) * heads + h)[:, None] * width + c[None, :]


@triton.jit
def put_rows(at, width, mask, top, total, values, joint_top, joint, beyond):
    """Store the six rows of a block of channels."""
    tl.store(at + MAXIMUM * width, top, mask=mask)
    tl.store(at + SUM * width, total, mask=mask)
    tl.store(at + VALUES * width, values, mask=mask)
    tl.store(at + JOINT_MAXIMUM * width, joint_top, mask=mask)
    tl.store(at + JOINT_SUM * width, joint, mask=mask)
    tl.store(at + EXCESS * width, beyond, mask=mask)


@triton.jit
def readable(valid, wb, b, t, c_inside, tokens):
    """Return the mask of tokens and channels that exist and are not masked."""
    inside = (t >= 0) & (t < tokens)
    if valid is not None:
        inside = inside & (tl.load(valid + b * wb + t, mask=inside, other=0) != 0)
    return inside[:, None] & c_inside[None, :]


@triton.jit
def exponents(k, v, beta, read):
    """Return k + beta v as the rounded sum and its rounding error, so that weights stay accurate
    for small beta.
    """
    product = beta[None, :] * v
    high = k + product
    back = high - k
    low = (
        (k - (high - back))
        + (product - back)
        + tl.fma(tl.zeros_like(v) + beta[None, :], v, -product)
    )
    return tl.where(read, high, NOTHING), tl.where(read, low, 0.0)


@triton.jit
def falling(low, high):
    """Return exp(low - high) for low <= high."""
    return tl.exp(low - high)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def join_one(d1, x1, d2, x2):
    """Combine two parts of S_t = d_t S_{t-1} + x_t."""
    return d1 * d2, d2 * x1 + x2


@triton.jit
def join_two(d1, x1, y1, d2, x2, y2):
    """Combine two parts of two sums with the same decays."""
    return d1 * d2, d2 * x1 + x2, d2 * y1 + y2


@triton.jit
def join_three(d1, x1, y1, z1, d2, x2, y2, z2):
    """Combine two parts of three sums with the same decays."""
    return d1 * d2, d2 * x1 + x2, d2 * y1 + y2, d2 * z1 + z2


@triton.jit
def row(x, at, BT: tl.constexpr):
    """Return one row of a tile."""
    return tl.sum(tl.where((tl.arange(0, BT) == at)[:, None], x, 0.0), 0)


@triton.jit
def exponents_from(v, beta, centre, read):
    """Return (v - c, x = beta (v - c) with 0 where it exceeds REACH, mask of unmasked tokens where
    it does).
    """
    centred = v - centre[None, :]
    x = centred * beta[None, :]
    far = tl.abs(x) > REACH
    return centred, tl.where(far, 0.0, x), read & far


@triton.jit
def running(
    k,
    before,
    v,
    u,
    past_top,
    past_sum,
    past_values,
    past_beyond,
    BETA: tl.constexpr,
    BT: tl.constexpr,
):
    """Return (m, S, V, Q): running maxima of k, and sums of exp(k - m) times 1, v and u, from the
    previous ones. ``before``: k one token back.
    """
    first = (tl.arange(0, BT) == 0)[:, None]
    top_before = tl.associative_scan(tl.where(first, past_top[None, :], before), 0, _greater)
    top = tl.maximum(top_before, k)
    weight = tl.where(k <= NOTHING, 0.0, tl.exp(k - top))
    beyond = weight
    if BETA:
        decay, total, values, beyond = tl.associative_scan(
            (falling(top_before, top), weight, weight * v, weight * u), 0, join_three
        )
        beyond += decay * past_beyond[None, :]
    else:
        decay, total, values = tl.associative_scan(
            (falling(top_before, top), weight, weight * v), 0, join_two
        )
    return top, total + decay * past_sum[None, :], values + decay * past_values[None, :], beyond


@triton.jit
def running_joint(z, low, before, past_top, past_sum, BT: tl.constexpr):
    """Return (M, S) of the exponents z + low. ``before``: z one token back."""
    first = (tl.arange(0, BT) == 0)[:, None]
    top_before = tl.associative_scan(tl.where(first, past_top[None, :], before), 0, _greater)
    top = tl.maximum(top_before, z)
    weight = tl.where(z <= NOTHING, 0.0, tl.exp(z - top + low))
    decay, total = tl.associative_scan((falling(top_before, top), weight), 0, join_one)
    return top, total + decay * past_sum[None, :]


@triton.jit
def tile(
    k, v, beta, centre, valid, kb, kh, kt, vb, vh, vt, wb, b, h, t, c, inside, tokens, m0, s0, v0,
    j0, i0, e0,
    BETA: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Return (k, v, v - c, z, low, x, read, far, m, S, V, M, J, Q) of a tile, from the rows before
    it; V sums v - c if BETA, else v.

    far: Q has no meaning at this token or at an earlier one. If BETA is False, the entries from z
    to Q have no meaning, except read, m, S and V.
    """
    read = readable(valid, wb, b, t, inside, tokens)
    there = readable(valid, wb, b, t - 1, inside, tokens)
    kk = tl.where(read, load(k, b, h, t, c, kb, kh, kt, read), NOTHING)
    vv = load(v, b, h, t, c, vb, vh, vt, read)
    before = tl.where(there, load(k, b, h, t - 1, c, kb, kh, kt, there), NOTHING)
    centred, x, u, far = vv, vv, vv, read
    if BETA:
        centred, x, far = exponents_from(vv, beta, centre, read)
        far = (tl.cumsum(far.to(tl.int32), 0) > 0) | (e0 < 0.0)[None, :]
        u = excess(x)
    top, total, values, beyond = running(
        kk, before, centred, u, m0, s0, v0, tl.maximum(e0, 0.0), BETA, BT
    )
    z, low, joint_top, joint = kk, vv, top, total
    if BETA:
        z, low = exponents(kk, vv, beta, read)
        z_before, _ = exponents(before, load(v, b, h, t - 1, c, vb, vh, vt, there), beta, there)
        joint_top, joint = running_joint(z, low, z_before, j0, i0, BT)
    return kk, vv, centred, z, low, x, read, far, top, total, values, joint_top, joint, beyond


@triton.jit
def counted(total):
    """Return the sum, or 1 for an empty sum."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def free_energy(offset, top, total, joint_top, joint, beyond, far, beta, centre):
    """Return (F - mu, y) for the mean mu = c + offset: from the sums of exp(k) and exp(k + beta v)
    where ``far``, else from the excess and y.
    """
    gap, _, y = free_energy_gap(offset, beyond / counted(total), beta[None, :], 0.0, far == 0)
    apart = (joint_top - top + tl.log(counted(joint) / counted(total))) / beta[None, :] - (
        offset + centre[None, :]
    )
    return tl.where(far, apart, gap), y


def launch_forward(k, v, beta, centre, lam, gate, query, valid, state, keep):
    """Return (o, the state after the last token, rows before each chunk if ``keep``). The memory
    layout of o is [t, b, h, d].
    """
    batch, heads, tokens, width = v.shape
    launch = Launch(*v.shape)
    o = torch.empty(tokens, batch, heads, width, dtype=v.dtype, device=v.device).permute(1, 2, 0, 3)
    after = torch.empty(
        batch, heads, 3 if beta is None else 7, width, dtype=torch.float32, device=v.device
    )
    kept = (
        torch.empty(batch * heads, launch.chunks, 6, width, dtype=torch.float32, device=v.device)
        if keep
        else None
    )
    summary = (
        torch.empty(batch * heads, launch.segments, 6, width, dtype=torch.float32, device=v.device)
        if launch.segments > 1
        else None
    )
    sizes = (*strides_of(k, v, lam, gate, query), *valid_stride(valid), *launch.sizes)
    blocks = {name: launch.constants[name] for name in ("BT", "BC")}
    if summary is not None:
        _forward_kernel[launch.grid](
            k, v, beta, centre, None, None, None, valid, None, summary, None, None, None, *sizes,
            SEGMENTS=1, **blocks, **launch.options
        )  # fmt: skip
    _forward_kernel[launch.grid](
        k, v, beta, centre, lam, gate, query, valid, state, summary, o, after, kept, *sizes,
        **launch.constants, **launch.options
    )  # fmt: skip
    return o, after, kept


def valid_stride(valid):
    """Return the batch stride of valid [b, t]."""
    return (0,) if valid is None else valid.stride()[:1]


@triton.jit
def _start(
    state,
    summary,
    middle,
    bh,
    c,
    inside,
    width,
    segment,
    segments,
    BETA: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BC: tl.constexpr,
):
    """Return the six rows before a segment: the given state combined with the summaries of the
    earlier segments.
    """
    top, total, values = (
        tl.full((BC,), NOTHING, tl.float32),
        tl.zeros((BC,), tl.float32),
        tl.zeros((BC,), tl.float32),
    )
    joint_top, joint, beyond = top, total, total
    if state is not None:
        at = state + bh * (CENTRE + 1 if BETA else 3) * width + c
        total = tl.load(at + SUM * width, mask=inside, other=0.0)
        values = tl.load(at + VALUES * width, mask=inside, other=0.0)
        top = tl.where(total == 0.0, NOTHING, tl.load(at + MAXIMUM * width, mask=inside, other=0.0))
        if BETA:
            joint = tl.load(at + JOINT_SUM * width, mask=inside, other=0.0)
            joint_top = tl.where(
                joint == 0.0, NOTHING, tl.load(at + JOINT_MAXIMUM * width, mask=inside, other=0.0)
            )
            beyond = tl.load(at + EXCESS * width, mask=inside, other=0.0)
            values -= middle * total
    if SEGMENTS > 1:
        which = tl.arange(0, SEGMENTS)
        mask = (which < segment)[:, None] & inside[None, :]
        at = summary + (bh * segments + which)[:, None] * ROWS * width + c[None, :]
        tops = tl.load(at + MAXIMUM * width, mask=mask, other=NOTHING)
        new = tl.maximum(top, tl.max(tops, 0))
        weight, faded = falling(tops, new[None, :]), falling(top, new)
        total = total * faded + tl.sum(weight * tl.load(at + SUM * width, mask=mask, other=0.0), 0)
        values = values * faded + tl.sum(
            weight * tl.load(at + VALUES * width, mask=mask, other=0.0), 0
        )
        top = new
        if BETA:
            beyonds = tl.load(at + EXCESS * width, mask=mask, other=0.0)
            lost = tl.minimum(beyond, tl.min(beyonds, 0)) < 0.0
            beyond = tl.where(lost, -1.0, beyond * faded + tl.sum(weight * beyonds, 0))
            tops = tl.load(at + JOINT_MAXIMUM * width, mask=mask, other=NOTHING)
            new = tl.maximum(joint_top, tl.max(tops, 0))
            sums = tl.load(at + JOINT_SUM * width, mask=mask, other=0.0)
            joint = joint * falling(joint_top, new) + tl.sum(falling(tops, new[None, :]) * sums, 0)
            joint_top = new
    return top, total, values, joint_top, joint, beyond


@triton.jit
def _forward_kernel(
    k, v, beta, centre, lam, gate, query, valid, state, summary, o, after, kept,
    kb, kh, kt, vb, vh, vt, lb, lh, lt, gb, gh, gt, qb, qh, qt, wb, batch, heads, tokens, width,
    each, segments, chunks,
    SEGMENTS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write o of a segment, and the state after the last one. o None: write the segment's summary,
    without state and SEGMENTS.
    """
    b, h, bh, c, inside = place(heads, width, BC)
    segment = tl.program_id(1)
    BETA: tl.constexpr = beta is not None
    inverse_temperature, middle = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    if BETA:
        inverse_temperature = tl.load(beta + h * width + c, mask=inside, other=1.0)
        middle = tl.load(centre + bh * width + c, mask=inside, other=0.0)
    m, s, u, j, i, e = _start(
        state, summary, middle, bh, c, inside, width, segment, segments, BETA, SEGMENTS, BC
    )
    for chunk in range(segment * each, tl.minimum(segment * each + each, chunks)):
        if kept is not None:
            put_rows(
                kept + (bh * chunks + chunk) * ROWS * width + c, width, inside, m, s, u, j, i, e
            )
        t = chunk * BT + tl.arange(0, BT)
        there = (t < tokens)[:, None] & inside[None, :]
        _, _, _, _, _, _, _, far, top, total, values, joint_top, joint, beyond = tile(
            k,
            v,
            inverse_temperature,
            middle,
            valid,
            kb,
            kh,
            kt,
            vb,
            vh,
            vt,
            wb,
            b,
            h,
            t,
            c,
            inside,
            tokens,
            m,
            s,
            u,
            j,
            i,
            e,
            BETA,
            BT,
        )
        if o is not None:
            made = values / counted(total)
            if BETA:
                gap, _ = free_energy(
                    made, top, total, joint_top, joint, beyond, far, inverse_temperature, middle
                )
                made += middle[None, :]
                if query is not None:
                    factor = load(query, b, h, t, c, qb, qh, qt, there)
                    gap += (
                        made * (1.0 - factor)
                        + tl.log(tl.where(there, factor, 1.0)) / inverse_temperature[None, :]
                    )
                    made *= factor
                made += load(lam, b, h, t, c, lb, lh, lt, there) * gap if lam is not None else gap
            elif query is not None:
                made *= load(query, b, h, t, c, qb, qh, qt, there)
            if gate is not None:
                made *= load(gate, b, h, t, c, gb, gh, gt, there)
            tl.store(
                o + dense(b, h, t, c, batch, heads, width), made.to(o.dtype.element_ty), mask=there
            )
        m, s, u = row(top, BT - 1, BT), row(total, BT - 1, BT), row(values, BT - 1, BT)
        if BETA:
            j, i, e = (
                row(joint_top, BT - 1, BT),
                row(joint, BT - 1, BT),
                row(tl.where(far, -1.0, beyond), BT - 1, BT),
            )
    if o is None:
        put_rows(
            summary + (bh * segments + segment) * ROWS * width + c, width, inside, m, s, u, j, i, e
        )
    else:
        at = after + bh * (CENTRE + 1 if BETA else 3) * width + c
        last = inside & (segment == segments - 1)
        tl.store(at + MAXIMUM * width, tl.where(s == 0.0, 0.0, m), mask=last)
        tl.store(at + SUM * width, s, mask=last)
        tl.store(at + VALUES * width, u + middle * s, mask=last)
        if BETA:
            tl.store(at + JOINT_MAXIMUM * width, tl.where(i == 0.0, 0.0, j), mask=last)
            tl.store(at + JOINT_SUM * width, i, mask=last)
            tl.store(at + EXCESS * width, e, mask=last)
            tl.store(at + CENTRE * width, middle, mask=last)
