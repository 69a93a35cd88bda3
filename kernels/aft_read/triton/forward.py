"""AFT's read in Triton, forward: segments' summaries where one program a channel block would leave the device idle, then the read.

The summary kernel gives each segment's five rows (maximum, sum and values of exp(k), maximum and sum of exp(k + beta v)), plain reductions.
The main kernel joins those before its segment, goes through its chunks by scans, mixes mu and F, and keeps the rows before each chunk for
the backward: 20 / BT bytes a number of v.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.aft_read.triton.tiles import (
    JOINT_MAXIMUM,
    JOINT_SUM,
    MAXIMUM,
    NOTHING,
    ROWS,
    STAGES,
    SUM,
    VALUES,
    WARPS,
    Launch,
    counted,
    dense,
    exponents,
    falling,
    free_energy,
    load,
    place,
    put_rows,
    readable,
    row,
    tile,
)
from kernels.build import Build


def launch_forward(k, v, beta, lam, gate, query, valid, state, keep):
    """(o, the state behind the last token, rows before each chunk where ``keep``); o lies in memory as [t, b, h, d]."""
    batch, heads, tokens, width = v.shape
    launch = Launch(*v.shape)
    o = torch.empty(tokens, batch, heads, width, dtype=v.dtype, device=v.device).permute(1, 2, 0, 3)
    after = torch.empty(batch, heads, 3 if beta is None else 5, width, dtype=torch.float32, device=v.device)
    kept = torch.empty(batch * heads, launch.chunks, 5, width, dtype=torch.float32, device=v.device) if keep else None
    summary = torch.empty(batch * heads, launch.segments, 5, width, dtype=torch.float32, device=v.device) if launch.segments > 1 else None
    if summary is not None:
        _summary_kernel[launch.grid](
            k, v, beta, valid, summary, *strides(k, v), *valid_stride(valid), *launch.sizes,
            BT=launch.constants["BT"], BC=launch.constants["BC"], **launch.options,
        )  # fmt: skip
    _forward_kernel[launch.grid](
        k, v, beta, lam, gate, query, valid, state, summary, o, after, kept,
        *strides(k, v, lam, gate, query), *valid_stride(valid), *launch.sizes,
        **launch.constants, **launch.options,
    )  # fmt: skip
    return o, after, kept


def strides(*tensors):
    """Batch, head and token strides of each; zeros where there is none."""
    return [s for x in tensors for s in ((0, 0, 0) if x is None else x.stride()[:3])]


def valid_stride(valid):
    """The batch stride of valid [b, t]."""
    return (0,) if valid is None else valid.stride()[:1]


@triton.jit
def _summary_kernel(
    k, v, beta, valid, summary, kb, kh, kt, vb, vh, vt, wb, batch, heads, tokens, width, each, segments, chunks,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    b, h, bh, c, inside = place(heads, width, BC)
    segment = tl.program_id(1)
    top, total, values = tl.full((BC,), NOTHING, tl.float32), tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    joint_top, joint = top, total
    if beta is not None:
        inverse_temperature = tl.load(beta + h * width + c, mask=inside, other=1.0)
    for chunk in range(segment * each, tl.minimum(segment * each + each, chunks)):
        t = chunk * BT + tl.arange(0, BT)
        read = readable(valid, wb, b, t, inside, tokens)
        kk = tl.where(read, load(k, b, h, t, c, kb, kh, kt, read), NOTHING)
        vv = load(v, b, h, t, c, vb, vh, vt, read)
        new = tl.maximum(top, tl.max(kk, 0))
        weight, faded = tl.where(read, tl.exp(kk - new[None, :]), 0.0), falling(top, new)
        top, total, values = new, total * faded + tl.sum(weight, 0), values * faded + tl.sum(weight * vv, 0)
        if beta is not None:
            z, low = exponents(kk, vv, inverse_temperature, read)
            new = tl.maximum(joint_top, tl.max(z, 0))
            joint = joint * falling(joint_top, new) + tl.sum(tl.where(read, tl.exp(z - new[None, :] + low), 0.0), 0)
            joint_top = new
    put_rows(summary + (bh * segments + segment) * ROWS * width + c, width, inside, top, total, values, joint_top, joint)


@triton.jit
def _start(state, summary, bh, c, inside, width, segment, segments, BETA: tl.constexpr, SEGMENTS: tl.constexpr, BC: tl.constexpr):
    """The five rows before a segment: the state given, joined with the summaries of the segments before it."""
    top, total, values = tl.full((BC,), NOTHING, tl.float32), tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    joint_top, joint = top, total
    if state is not None:
        at = state + bh * (ROWS if BETA else 3) * width + c
        total = tl.load(at + SUM * width, mask=inside, other=0.0)
        values = tl.load(at + VALUES * width, mask=inside, other=0.0)
        top = tl.where(total == 0.0, NOTHING, tl.load(at + MAXIMUM * width, mask=inside, other=0.0))
        if BETA:
            joint = tl.load(at + JOINT_SUM * width, mask=inside, other=0.0)
            joint_top = tl.where(joint == 0.0, NOTHING, tl.load(at + JOINT_MAXIMUM * width, mask=inside, other=0.0))
    if SEGMENTS > 1:
        which = tl.arange(0, SEGMENTS)
        mask = (which < segment)[:, None] & inside[None, :]
        at = summary + (bh * segments + which)[:, None] * ROWS * width + c[None, :]
        tops = tl.load(at + MAXIMUM * width, mask=mask, other=NOTHING)
        new = tl.maximum(top, tl.max(tops, 0))
        weight, faded = falling(tops, new[None, :]), falling(top, new)
        total = total * faded + tl.sum(weight * tl.load(at + SUM * width, mask=mask, other=0.0), 0)
        values = values * faded + tl.sum(weight * tl.load(at + VALUES * width, mask=mask, other=0.0), 0)
        top = new
        if BETA:
            tops = tl.load(at + JOINT_MAXIMUM * width, mask=mask, other=NOTHING)
            new = tl.maximum(joint_top, tl.max(tops, 0))
            sums = tl.load(at + JOINT_SUM * width, mask=mask, other=0.0)
            joint = joint * falling(joint_top, new) + tl.sum(falling(tops, new[None, :]) * sums, 0)
            joint_top = new
    return top, total, values, joint_top, joint


@triton.jit
def _forward_kernel(
    k, v, beta, lam, gate, query, valid, state, summary, o, after, kept,
    kb, kh, kt, vb, vh, vt, lb, lh, lt, gb, gh, gt, qb, qh, qt, wb, batch, heads, tokens, width, each, segments, chunks,
    SEGMENTS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    b, h, bh, c, inside = place(heads, width, BC)
    segment = tl.program_id(1)
    BETA: tl.constexpr = beta is not None
    m, s, u, j, i = _start(state, summary, bh, c, inside, width, segment, segments, BETA, SEGMENTS, BC)
    inverse_temperature = m
    if BETA:
        inverse_temperature = tl.load(beta + h * width + c, mask=inside, other=1.0)
    for chunk in range(segment * each, tl.minimum(segment * each + each, chunks)):
        if kept is not None:
            put_rows(kept + (bh * chunks + chunk) * ROWS * width + c, width, inside, m, s, u, j, i)
        t = chunk * BT + tl.arange(0, BT)
        there = (t < tokens)[:, None] & inside[None, :]
        _, _, _, _, _, top, total, values, joint_top, joint = tile(
            k, v, inverse_temperature, valid, kb, kh, kt, vb, vh, vt, wb, b, h, t, c, inside, tokens, m, s, u, j, i, BETA, BT
        )
        made = values / counted(total)
        if query is not None:
            factor = load(query, b, h, t, c, qb, qh, qt, there)
            made *= factor
        if BETA:
            free = free_energy(top, total, joint_top, joint, inverse_temperature)
            if query is not None:
                free += tl.log(tl.where(there, factor, 1.0)) / inverse_temperature[None, :]
            made = made + load(lam, b, h, t, c, lb, lh, lt, there) * (free - made) if lam is not None else free
        if gate is not None:
            made *= load(gate, b, h, t, c, gb, gh, gt, there)
        tl.store(o + dense(b, h, t, c, batch, heads, width), made.to(o.dtype.element_ty), mask=there)
        m, s, u, j, i = (
            row(top, BT - 1, BT), row(total, BT - 1, BT), row(values, BT - 1, BT), row(joint_top, BT - 1, BT), row(joint, BT - 1, BT),
        )  # fmt: skip
    at = after + bh * (ROWS if BETA else 3) * width + c
    last = inside & (segment == segments - 1)
    tl.store(at + MAXIMUM * width, tl.where(s == 0.0, 0.0, m), mask=last)
    tl.store(at + SUM * width, s, mask=last)
    tl.store(at + VALUES * width, u, mask=last)
    if BETA:
        tl.store(at + JOINT_MAXIMUM * width, tl.where(i == 0.0, 0.0, j), mask=last)
        tl.store(at + JOINT_SUM * width, i, mask=last)


def read_types():
    """Triton's types of what both directions take: bfloat16 slices, float32 sums."""
    types = dict.fromkeys(("k", "v", "lam", "gate", "o"), "*bf16")
    types |= dict.fromkeys(("beta", "summary", "after", "kept"), "*fp32")
    types |= dict.fromkeys([x + y for x in "kvlgqd" for y in "bht"] + ["wb"], "i32")
    return types | dict.fromkeys(("batch", "heads", "tokens", "width", "each", "segments", "chunks"), "i32")


ALIGNED = (*(x + y for x in "kvlgqd" for y in "bht"), "tokens", "width", "heads")


def _builds():
    """4096 tokens of 4 x 16 heads of 64 channels, as budget (i) of the 1.3B model has them; with and without the free energy."""
    launch = Launch(4, 16, 4096, 64)
    sizes = {"BT": launch.constants["BT"], "BC": launch.constants["BC"]}
    absent = {"query": None, "valid": None, "state": None}
    found = []
    for label, more in (("mu and F", {}), ("mu", {"beta": None, "lam": None})):
        for name, kernel, given in (
            ("summary", _summary_kernel, sizes | {"valid": None} | {x: more[x] for x in more if x == "beta"}),
            ("forward", _forward_kernel, launch.constants | absent | more),
        ):
            found.append(Build(f"{name}, {label}", kernel, read_types(), given, WARPS, STAGES, aligned=ALIGNED))
    return tuple(found)


BUILDS: tuple[Build, ...] = _builds()
