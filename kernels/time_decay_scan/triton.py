"""Time-decay scan in Triton, forward and backward: associative scans over chunks, the state carried
between them. No autotuning.

The channels are split into blocks and the sequence into segments, enough to fill the device even
with few channels. A first launch computes each segment's summary (the sum of its log-decays, its
last state from a zero state); the main launch joins the summaries before its segment, again by an
associative scan, and processes it chunk by chunk. One segment needs no summary. Log-decays are
stored as powers of two and only their sums are exponentiated. A masked step is the identity, (0,
0). The backward is the same scan from the end: dx_t = ds_t + exp(a_{t+1}) dx_{t+1}, da_t = dx_t
exp(a_t) s_{t-1}.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.implementations import interpreted
from kernels.tiles import LOG2_E

PROGRAMS = 528  # four for each of an H100's multiprocessors
MOST_SEGMENTS = 64  # their summaries are joined in one block
WARPS, STAGES = 8, 1


def scan(a, x, initial, softplus):
    """Return states [t, ...] in float32 from a and x [t, ...], float32 or bfloat16 with any
    strides, and initial [...] in float32 or None.
    """
    steps = x.shape[0]
    first = None if initial is None else initial.reshape(-1)
    return _Scan.apply(a.reshape(steps, -1), x.reshape(steps, -1), first, softplus).view(x.shape)


class _Scan(torch.autograd.Function):
    """Autograd function of the scan in two dimensions, [t, channels]."""

    @staticmethod
    def forward(ctx, a, x, initial, softplus):
        states = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        launch = _Launch(*x.shape, softplus)
        summary = launch.summary(a, x, reverse=False)
        _forward_kernel[launch.grid](
            a, x, initial, summary, states, *a.stride(), *x.stride(), *launch.sizes,
            SEGMENTS=launch.padded, REVERSE=False,
            **launch.constants,
        )  # fmt: skip
        ctx.save_for_backward(a, initial, states)
        ctx.softplus, ctx.x_dtype = softplus, x.dtype
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, d_states):
        a, initial, states = ctx.saved_tensors
        da = torch.empty(a.shape, dtype=a.dtype, device=a.device)
        dx = torch.empty(a.shape, dtype=ctx.x_dtype, device=a.device)
        d_initial = None if initial is None else torch.empty_like(initial)
        launch = _Launch(*a.shape, ctx.softplus)
        summary = launch.summary(a, d_states, reverse=True)
        _backward_kernel[launch.grid](
            a, states, initial, d_states, summary, da, dx, d_initial,
            *a.stride(), *d_states.stride(), *launch.sizes, SEGMENTS=launch.padded,
            **launch.constants,
        )  # fmt: skip
        return da, dx, d_initial, None


class _Launch:
    """Grid and block sizes for [steps, channels]."""

    def __init__(self, steps, channels, softplus):
        block_t, block_c, programs = (16, 8, 6) if interpreted() else (64, 32, PROGRAMS)
        chunks, columns = triton.cdiv(steps, block_t), triton.cdiv(channels, block_c)
        wanted = min(MOST_SEGMENTS, chunks, max(1, programs // columns))
        each = triton.cdiv(chunks, wanted)
        self.segments = triton.cdiv(chunks, each)
        self.padded = triton.next_power_of_2(self.segments)
        self.grid = (columns, self.segments)
        self.sizes = (steps, channels, each)
        self.constants = {
            "SOFTPLUS": softplus,
            "BT": block_t,
            "BC": block_c,
            "num_warps": WARPS,
            "num_stages": STAGES,
        }

    def summary(self, a, x, reverse):
        """Return each segment's sum of log-decays (powers of two) and last state, [segments, 2,
        channels]; None if the sequence has one segment.
        """
        if self.segments == 1:
            return None
        made = torch.empty(self.segments, 2, self.sizes[1], dtype=torch.float32, device=x.device)
        _forward_kernel[self.grid](
            a, x, None, made, None, *a.stride(), *x.stride(), *self.sizes, SEGMENTS=1,
            REVERSE=reverse, **self.constants
        )  # fmt: skip
        return made


@triton.jit
def _join(a1, x1, a2, x2):
    return a1 + a2, tl.exp2(a2) * x1 + x2


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) of float32, correctly rounded: the logarithm of 1 + e by Kahan's
    quotient, which is accurate for small e.
    """
    small = tl.exp2(-tl.abs(x) * LOG2_E)
    one = 1.0 + small
    log1p = tl.where(
        one == 1.0, small, tl.log2(one) * (small / tl.where(one == 1.0, 1.0, one - 1.0)) / LOG2_E
    )
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def _log2_decay(a, SOFTPLUS: tl.constexpr):
    """Return float32 log-decays as powers of two. SOFTPLUS: a contains logits, and the log-decays
    are -softplus(a).
    """
    if SOFTPLUS:
        a = -softplus(a)
    return a * LOG2_E


@triton.jit
def _chunk(
    a, x, sat, sac, sxt, sxc, t, c, steps, channels, SOFTPLUS: tl.constexpr, REVERSE: tl.constexpr
):
    """Load log-decays and inputs of the steps t, and their mask; (0, 0) outside. REVERSE: decays of
    the next step.
    """
    inside = (t >= 0) & (t < steps)
    mask = inside[:, None] & (c < channels)[None, :]
    at = t + 1 if REVERSE else t
    there = ((at < steps) & inside)[:, None] & (c < channels)[None, :]
    decay = tl.load(
        a + at.to(tl.int64)[:, None] * sat + c.to(tl.int64)[None, :] * sac, mask=there, other=0.0
    ).to(tl.float32)
    decay = tl.where(there, _log2_decay(decay, SOFTPLUS), 0.0)
    value = tl.load(
        x + t.to(tl.int64)[:, None] * sxt + c.to(tl.int64)[None, :] * sxc, mask=mask, other=0.0
    ).to(tl.float32)
    return decay, value, mask


@triton.jit
def _last(x, BT: tl.constexpr):
    return tl.sum(tl.where((tl.arange(0, BT) == BT - 1)[:, None], x, 0.0), 0)


@triton.jit
def _carried(summary, start, c, channels, segment, BC: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return the state before ``segment``: the summaries of the segments before it joined with
    ``start``, the initial state.
    """
    if SEGMENTS > 1:
        row = tl.arange(0, SEGMENTS)
        mask = (row < segment)[:, None] & (c < channels)[None, :]
        at = summary + row[:, None] * 2 * channels + c[None, :]
        decay, state = tl.associative_scan(
            (tl.load(at, mask=mask, other=0.0), tl.load(at + channels, mask=mask, other=0.0)),
            0,
            _join,
        )
        start = tl.exp2(_last(decay, SEGMENTS)) * start + _last(state, SEGMENTS)
    return start


@triton.jit
def _forward_kernel(
    a, x, initial, summary, states, sat, sac, sxt, sxc, steps, channels, each,
    SEGMENTS: tl.constexpr, REVERSE: tl.constexpr, SOFTPLUS: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Write the states of a segment. states None: write its summary, without the segments before
    it.
    """
    c, segment = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    carry, total = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    if initial is not None:
        carry = tl.load(initial + c, mask=c < channels, other=0.0)
    carry = _carried(summary, carry, c, channels, segment, BC, SEGMENTS)
    for chunk in range(segment * each, segment * each + each):
        t = chunk * BT + tl.arange(0, BT)
        t = steps - 1 - t if REVERSE else t
        decay, value, mask = _chunk(
            a, x, sat, sac, sxt, sxc, t, c, steps, channels, SOFTPLUS, REVERSE
        )
        decay, value = tl.associative_scan((decay, value), 0, _join)
        value += tl.exp2(decay) * carry[None, :]
        if states is not None:
            tl.store(states + t.to(tl.int64)[:, None] * channels + c[None, :], value, mask=mask)
        carry = _last(value, BT)
        total += _last(decay, BT)
    if states is None:
        at = summary + segment * 2 * channels + c
        tl.store(at, total, mask=c < channels)
        tl.store(at + channels, carry, mask=c < channels)


@triton.jit
def _backward_kernel(
    a, states, initial, d_states, summary, da, dx, d_initial, sat, sac, sgt, sgc, steps, channels,
    each,
    SEGMENTS: tl.constexpr, SOFTPLUS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    c, segment = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    first = tl.zeros((BC,), tl.float32)
    if initial is not None:
        first = tl.load(initial + c, mask=c < channels, other=0.0)
    carry = _carried(summary, tl.zeros((BC,), tl.float32), c, channels, segment, BC, SEGMENTS)
    for chunk in range(segment * each, segment * each + each):
        t = steps - 1 - (chunk * BT + tl.arange(0, BT))
        decay, value, mask = _chunk(
            a, d_states, sat, sac, sgt, sgc, t, c, steps, channels, SOFTPLUS, True
        )
        decay, value = tl.associative_scan((decay, value), 0, _join)
        value += tl.exp2(decay) * carry[None, :]
        carry = _last(value, BT)
        own = tl.load(
            a + t.to(tl.int64)[:, None] * sat + c.to(tl.int64)[None, :] * sac, mask=mask, other=0.0
        ).to(tl.float32)
        at = t.to(tl.int64)[:, None] * channels + c[None, :]
        before = tl.load(states + at - channels, mask=mask & (t > 0)[:, None], other=0.0)
        before = tl.where((t == 0)[:, None], first[None, :], before)
        through = value * tl.exp2(_log2_decay(own, SOFTPLUS))
        if d_initial is not None:
            tl.store(
                d_initial + c[None, :] + t[:, None] * 0, through, mask=mask & (t == 0)[:, None]
            )
        d_own = through * before
        if SOFTPLUS:
            d_own = -d_own / (1.0 + tl.exp2(-own * LOG2_E))
        tl.store(da + at, d_own.to(da.dtype.element_ty), mask=mask)
        tl.store(dx + at, value.to(dx.dtype.element_ty), mask=mask)
