"""Flash attention on [v | U] in Triton, with or without the free energy in its last step; `attention_backward` has its gradients.

One pass over the keys with a running maximum; the two halves of the values have an accumulator each. The weights are summed as they are
multiplied, rounded to the inputs' type, so that they add up to one and Jensen's inequality holds between the reads. Keys that every query
of a block reads are gone through without a mask. Nothing is autotuned and nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.fem_attention.triton.attention_backward import (
    FLOAT32,
    FORMS,
    WIDEST,
    attention_gradients,
    built,
    key_spans,
    last_key,
    readable,
)  # fmt: skip
from kernels.fem_attention.triton.epilogue import epilogue_gradients, free_energy_gap, load_channels, row_term
from kernels.implementations import interpreted
from kernels.tiles import LOG2E, Blocks, empty_as, load_tile, of_head, padded, place, rows_of, store_tile, strides_of


def attend(q, k, values, *, causal, scale, keys_valid=None, bounds=None):
    """softmax(scale q k^T) values, differentiable in q, k and values: [b, h, tq, n] in q's type.

    Shapes: q [b, h, tq, dk], k [b, hk, tk, dk], values [b, hk, tk, n]; hk divides h, and query head i reads head i // (h // hk). The
    queries are the last tq of the tk positions. keys_valid [b, tk] bool: a False key is read by the query at its own position alone.
    bounds: (first, last), int32 [tk]: the token at position i reads first[i] <= j < last[i], its document's tokens (b = 1, tq = tk).
    Types: float32 or bfloat16. Raises ValueError for dk over 256, n over 512 or a negative scale.
    """
    return _Attend.apply(q, k, values, keys_valid, bounds, causal, scale)


def attend_read(q, k, values, beta, centre, shifted, wild, lam, gate, *, causal, scale, keys_valid=None, bounds=None):
    """The free-energy read o = gate (mu + lam (F - mu)) of attention on values = [v | U]: [b, h, tq, dv] in q's type.

    As `attend`, with n = 2 dv; beta [hk, dv], centre [b, hk, 1, dv] float32 and shifted [b, hk, 1, dv] bool as in
    `kernels.free_energy`, lam and gate [b, h, tq, dv] or None (1); a head that
    is wild [b, hk] has no gradients. Differentiable in q, k, values, beta, lam and gate; beta's
    gradient is the epilogue's own part, at fixed values. Equations: Free Energy Mixer, the two-level gated read.
    """
    return _AttendRead.apply(q, k, values, beta, centre, shifted, wild, lam, gate, keys_valid, bounds, causal, scale)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, values, keys_valid, bounds, causal, scale):
        q, k, values = rows_of(q), rows_of(k), rows_of(values)
        masks = _masks(keys_valid, bounds)
        out, lse, _ = _attention(q, k, values, masks, causal, scale)
        ctx.save_for_backward(q, k, values, *masks, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, values, keys_valid, first, last, out, lse = ctx.saved_tensors
        d_out = rows_of(d_out)
        # In two halves where they are equal: one accumulator of all channels would spill.
        d_q, d_k, d_values = attention_gradients(
            q, k, values, keys_valid, first, last, d_out, row_term(d_out, out), lse,
            causal=ctx.causal, scale=ctx.scale, halves=2 - values.shape[-1] % 2,
        )  # fmt: skip
        return d_q, d_k, d_values, None, None, None, None


class _AttendRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, values, beta, centre, shifted, wild, lam, gate, keys_valid, bounds, causal, scale):
        q, k, values = rows_of(q), rows_of(k), rows_of(values)
        masks = _masks(keys_valid, bounds)
        epilogue = (
            beta.contiguous(), centre.contiguous(), shifted.contiguous(),
            None if lam is None else rows_of(lam), None if gate is None else rows_of(gate),
        )  # fmt: skip
        out, lse, reads = _attention(q, k, values, masks, causal, scale, epilogue)
        ctx.save_for_backward(q, k, values, *masks, lse, reads, *epilogue[:3], wild, *epilogue[3:])
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, values, keys_valid, first, last, lse, reads, *epilogue = ctx.saved_tensors
        d_reads, term, d_lam, d_gate, d_beta = epilogue_gradients(d_out, reads, *epilogue, terms=True)
        d_q, d_k, d_values = attention_gradients(
            q, k, values, keys_valid, first, last, d_reads, term, lse, causal=ctx.causal, scale=ctx.scale, halves=2
        )
        return d_q, d_k, d_values, d_beta, None, None, None, d_lam, d_gate, None, None, None, None


def _masks(keys_valid, bounds):
    """(keys_valid, first, last), contiguous or None."""
    return tuple(None if t is None else t.contiguous() for t in (keys_valid, *(bounds or (None, None))))


def _attention(q, k, values, masks, causal, scale, epilogue=None):
    """(o, log-sum-exp [b, h, tq] in powers of two, float32 [mu | Z] [b, h, tq, 2 dv] or None)."""
    b, h, tq, dk = q.shape
    hk, tk, n = values.shape[1:]
    halves = 1 if epilogue is None else 2
    dv = n // halves
    if dk > WIDEST or n > 2 * WIDEST or scale < 0:
        raise ValueError(f"attention: widths {dk} and {n} with scale {scale:g}; use at most {WIDEST} and {2 * WIDEST}, and scale >= 0")
    beta, centre, shifted, lam, gate = epilogue or (None,) * 5
    out = empty_as(q, width=dv)
    lse = torch.empty(b, h, tq, dtype=torch.float32, device=q.device)
    reads = None if epilogue is None else torch.empty(b, h, tq, n, dtype=torch.float32, device=q.device)
    blocks = forward_blocks(q.dtype, dk, dv, halves)
    strides = strides_of(q, k, values, out, lam, gate)
    _forward_kernel[(triton.cdiv(tq, blocks.rows) * b * h,)](
        q, k, values, *masks, out, lse, reads, beta, centre, shifted, lam, gate,
        scale * LOG2E, h, tq, tk, *strides,
        CAUSAL=causal, HALVES=halves, DK=dk, BDK=padded(dk), DV=dv, BDV=padded(dv), ROWS=blocks.rows, KEYS=blocks.keys, GROUP=h // hk,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return out, lse, reads


@triton.jit
def _span(
    top, total, read, more, q, k, values, valid, position, lowest, highest, start, stop, factor, tk, k_t, values_t,
    MASKED: tl.constexpr, HALVES: tl.constexpr, DK: tl.constexpr, BDK: tl.constexpr, DV: tl.constexpr,
    BDV: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The keys from start to stop: running maximum (in powers of two), sum of weights, reads of the one or two halves."""
    for n in range(start, stop, KEYS):
        here = tl.cast(n, tl.int64)
        keys = load_tile(k + here * k_t, k_t, tk - n, KEYS, DK, BDK, MASKED)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if MASKED:
            allowed = readable(position, lowest, highest, n + tl.arange(0, KEYS), tk, valid)
            scores = tl.where(allowed, scores * factor, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            # Rows that have read nothing yet: -inf - -inf is no number.
            level = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - level[:, None])
            kept = tl.exp2(top - level)
        else:
            new = tl.maximum(top, tl.max(scores, 1) * factor)
            weights = tl.exp2(scores * factor - new[:, None])
            kept = tl.exp2(top - new)
        weights = weights.to(values.dtype.element_ty)
        total = total * kept + tl.sum(weights.to(tl.float32), 1)
        tile = load_tile(values + here * values_t, values_t, tk - n, KEYS, DV, BDV, MASKED)
        read = tl.dot(weights, tile, read * kept[:, None], input_precision="ieee")
        if HALVES == 2:
            tile = load_tile(values + here * values_t + DV, values_t, tk - n, KEYS, DV, BDV, MASKED)
            more = tl.dot(weights, tile, more * kept[:, None], input_precision="ieee")
        top = new
    return top, total, read, more


@triton.jit
def _forward_kernel(
    q, k, values, valid, first, last, out, lse, reads, beta, centre, shifted, lam, gate,
    factor, heads, tq, tk,
    q_b, q_h, q_t, k_b, k_h, k_t, values_b, values_h, values_t, out_b, out_h, out_t, lam_b, lam_h, lam_t, gate_b, gate_h, gate_t,
    CAUSAL: tl.constexpr, HALVES: tl.constexpr, DK: tl.constexpr, BDK: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A block of queries of a head. Long, because it goes over the keys in up to two spans and ends with the free energy."""
    b, h, head_of_all, top_row = place(heads, tq, ROWS)
    kv = h // GROUP
    start, left = top_row.to(tl.int64), tq - top_row
    row = tl.arange(0, ROWS)
    position = tk - tq + top_row + row
    k += b * k_b + kv * k_h
    values += b * values_b + kv * values_h
    valid = of_head(valid, b, 0, tk, 0)
    lowest = None
    if first is not None:
        lowest = tl.load(first + position, mask=row < left, other=0)
    highest = last_key(position, row < left, tk, last, CAUSAL)

    queries = load_tile(q + b * q_b + h * q_h + start * q_t, q_t, left, ROWS, DK, BDK, True)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    read = tl.zeros([ROWS, BDV], tl.float32)
    more = tl.zeros([ROWS, BDV], tl.float32)
    bottom = tl.minimum(top_row + ROWS, tq) - 1
    begin, inner, end = key_spans(tk - tq + top_row, tk - tq + bottom, tk, valid, first, last, CAUSAL, KEYS)
    if valid is None and first is None:
        top, total, read, more = _span(
            top, total, read, more, queries, k, values, valid, position, lowest, highest, begin, inner, factor, tk, k_t, values_t,
            False, HALVES, DK, BDK, DV, BDV, KEYS,
        )  # fmt: skip
    top, total, read, more = _span(
        top, total, read, more, queries, k, values, valid, position, lowest, highest, inner, end, factor, tk, k_t, values_t,
        True, HALVES, DK, BDK, DV, BDV, KEYS,
    )  # fmt: skip

    # Only rows past the last query have read nothing.
    total = tl.where(total > 0, total, 1.0)
    tl.store(lse + head_of_all * tq + start + row, top + tl.log2(total), mask=row < left)
    read /= total[:, None]
    if HALVES == 1:
        store_tile(out + b * out_b + h * out_h + start * out_t, out_t, left, read, ROWS, DV, BDV)
    else:
        more /= total[:, None]
        out += b * out_b + h * out_h + start * out_t
        reads += (head_of_all * tq + start) * 2 * DV
        beta += kv * DV
        centre += (b * (heads // GROUP) + kv) * DV
        shifted += (b * (heads // GROUP) + kv) * DV
        if lam is not None:
            lam += b * lam_b + h * lam_h + start * lam_t
        if gate is not None:
            gate += b * gate_b + h * gate_h + start * gate_t
        if BDV <= 64:
            _finish(read, more, out, reads, beta, centre, shifted, lam, gate, out_t, lam_t, gate_t, left, 0, ROWS, DV, BDV)
        else:
            # The epilogue of so many channels does not fit the registers: it takes them back from memory, some at a time.
            store_tile(reads, 2 * DV, left, read, ROWS, DV, BDV)
            store_tile(reads + DV, 2 * DV, left, more, ROWS, DV, BDV)
            tl.debug_barrier()
            for c in range(0, DV, 32):
                _finish(None, None, out, reads, beta, centre, shifted, lam, gate, out_t, lam_t, gate_t, left, c, ROWS, DV, 32)


@triton.jit
def _finish(
    mu, z, out, reads, beta, centre, shifted, lam, gate, out_t, lam_t, gate_t, left, begin,
    ROWS: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """o of WIDTH channels from ``begin`` on; mu and Z are kept in ``reads``, or taken from there where they are None."""
    row = tl.arange(0, ROWS)[:, None]
    channel = begin + tl.arange(0, WIDTH)[None, :]
    there = (row < left) & (channel < DV)
    kept = reads + row * (2 * DV) + channel
    if mu is None:
        mu = tl.load(kept, mask=there, other=0.0)
        z = tl.load(kept + DV, mask=there, other=1.0)
    else:
        tl.store(kept, mu, mask=there)
        tl.store(kept + DV, z, mask=there)
    slope, middle, near = load_channels(beta, centre, shifted, channel, DV)
    gap, _, _ = free_energy_gap(mu, z, slope, middle, near)
    if lam is not None:
        gap *= tl.load(lam + row * lam_t + channel, mask=there, other=0.0).to(tl.float32)
    o = mu + gap
    if gate is not None:
        o *= tl.load(gate + row * gate_t + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * out_t + channel, o.to(out.dtype.element_ty), mask=there)


def forward_blocks(dtype, dk, dv, halves):
    """Block sizes for a head's widths."""
    if interpreted():
        return Blocks(32, 16, 4, 1)
    if dtype == torch.float32:
        return FLOAT32
    if halves * padded(dv) > 256:
        return Blocks(64, 32, 8, 2)
    return Blocks(128, 64, 8, 2 if padded(dk) > 128 else 3)


BUILDS = (
    *built(_forward_kernel, forward_blocks, "free energy, ", forms=FORMS | {", no lam, no gate": dict.fromkeys(("lam", "gate"))}),
    *built(
        _forward_kernel, forward_blocks, "attention, ", ((128, 128), (256, 256)), {}, HALVES=1,
        **dict.fromkeys(("reads", "beta", "centre", "shifted", "lam", "gate")),
    ),
)  # fmt: skip
