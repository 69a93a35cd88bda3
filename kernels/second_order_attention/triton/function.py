"""MHA2nd1st's step around `forward`'s two flash passes in Triton, and their backward.

For each pass, one kernel runs over blocks of queries and one over blocks of keys. With g the
gradient of kbar, or of C u, e_i = g.c_i and w_i = u.c_i (`forward` defines the symbols), and sums
over the pairs:

    kbar:   da_i = p_i e_i                   dk_i += p_i g
    C u:    da_i = p_i (e_i w_i - g.C u)     dk_i += p_i (e_i u + w_i g)
            du = C g = sum_i p_i e_i c_i
    both:   dq = sum_i da_i c_i / T          dk_i += da_i (q - k_i) / T
            dT = -sum_i da_i (a_i - mean a) / T

This holds because the derivative of p is da, and those of kbar inside c cancel: sum p c = 0.
Likewise sum da = 0, so that c can replace k, and the score less its mean under p can replace the
score: for a large T, the result dT is small compared with its terms. For rounded weights, the sum
of the rounded ones is subtracted, as in the forward. dT is a partial sum per query. All kernels
work in the frame to which k is rotated: the rotation is linear, so q, u and the reads are rotated
outside the kernels.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.fem_attention.triton.epilogue import row_term
from kernels.second_order_attention.reference import in_own_frame, residual, rotated, solve_gram
from kernels.second_order_attention.triton.forward import FLOAT32, SMALL, launch, means, second
from kernels.tiles import (
    Blocks,
    empty_as,
    fitting,
    good_at,
    load_tile,
    of_head,
    padded,
    place,
    probabilities,
    rows_of,
    seen,
    store_tile,
)

LN_2 = tl.constexpr(0.6931471805599453)


def first_order_step(q, k, gram, temperature, newton, turn, *, causal, valid, jitter):
    """Return r + G^-1 (C / T') G r as `reference.step` without exact: [b, h, t, d] in q's dtype.

    q and k are float32 or bfloat16, the other tensors float32. Products of q, k, u and gradients
    are in q's dtype, sums over keys, r, u and the system in float32.
    """
    own = q.to(torch.float32)
    turned, k = rows_of(rotated(own, turn).to(k.dtype)), rows_of(k)
    with torch.no_grad():
        half = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).square() / 2
        factors = math.log2(math.e) / temperature
    mean, levels = _Means.apply(turned, k, temperature, half, factors, valid, causal)
    r, u = residual(own, mean, gram, turn)
    product = _Second.apply(
        turned, k, u, temperature, half, factors, mean.detach(), levels, valid, causal
    )
    return (r + solve_gram(gram, in_own_frame(product, newton, turn), jitter)).to(q.dtype)


class _Means(torch.autograd.Function):
    """`means` as an autograd function, differentiable in q, k and T.

    log-sum-exp and mean score have no gradient.
    """

    @staticmethod
    def forward(ctx, q, k, temperature, half, factors, valid, causal):
        mean, levels = means(q, k, half, factors, valid, causal)
        ctx.save_for_backward(q, k, half, factors, mean, levels, valid)
        ctx.causal = causal
        ctx.mark_non_differentiable(levels)
        return mean, levels

    @staticmethod
    @once_differentiable
    def backward(ctx, d_mean, _):
        q, k, half, factors, mean, levels, valid = ctx.saved_tensors
        g = d_mean.to(q.dtype).contiguous()
        d_q, d_k, _, d_temperature = gradients(
            q, k, None, g, half, factors, mean, levels, None, None, valid, ctx.causal
        )
        return d_q, d_k, d_temperature, None, None, None, None


class _Second(torch.autograd.Function):
    """C u, float32, differentiable in q, k, u and T.

    kbar and the levels are results of the other pass and get no gradient. That is exact: C depends
    on them through q, k and T alone, and its derivative is expressed in those.
    """

    @staticmethod
    def forward(ctx, q, k, u, temperature, half, factors, mean, levels, valid, causal):
        u = u.to(q.dtype).contiguous()
        read, centre = second(q, k, u, half, factors, mean, levels[0], valid, causal)
        ctx.save_for_backward(q, k, u, half, factors, mean, levels, read, centre, valid)
        ctx.causal = causal
        return read

    @staticmethod
    @once_differentiable
    def backward(ctx, d_read):
        q, k, u, half, factors, mean, levels, read, centre, valid = ctx.saved_tensors
        g = d_read.to(q.dtype).contiguous()
        d_q, d_k, d_u, d_temperature = gradients(
            q, k, u, g, half, factors, mean, levels, read, centre, valid, ctx.causal
        )
        return d_q, d_k, d_u, d_temperature, None, None, None, None, None, None


def gradients(q, k, u, g, half, factors, mean, levels, read, centre, valid, causal):
    """Return (dq, dk, du, dT) for a gradient g [b, h, t, d] of C u, or of kbar.

    For kbar, u, read and centre are None, and du is None. g has q's dtype and is contiguous.
    read, centre: the forward's results; the other arguments as in the forward. du is float32, dT
    [h] float32.
    """
    t, d = q.shape[2:]
    is_second = u is not None
    d_q, d_k = empty_as(q), empty_as(k)
    d_u = torch.empty_like(mean) if is_second else None
    blocks = queries_blocks(q.dtype, d, is_second, valid is not None)
    lse, average = levels
    heats, g_centre = torch.empty_like(lse), row_term(g, mean)
    g_read = None if read is None else row_term(g, read)
    launch(
        _queries_kernel, blocks, t, q, k, valid, causal,
        q, k, u, g, half, factors, valid, mean, lse, average, centre, g_centre, g_read, d_q, d_u,
        heats, *d_q.stride()[:3],
    )  # fmt: skip
    launch(
        _keys_kernel, keys_blocks(q.dtype, d, is_second, valid is not None), k.shape[2], q, k,
        valid, causal,
        q, k, u, g, half, factors, valid, lse, centre, g_centre, g_read, d_k, *d_k.stride()[:3],
    )  # fmt: skip
    return d_q, d_k, d_u, heats.sum((0, 2))


@triton.jit
def _queries_kernel(
    q, k, u, g, half, factors, valid, mean, lse, average, centre, g_centre, g_read, d_q, d_u, heats,
    d_q_b, d_q_h, d_q_t,
    heads, t, tk, q_b, q_h, q_t, k_b, k_h, k_t, valid_b,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, OWN: tl.constexpr,
    OTHER: tl.constexpr,
):  # fmt: skip
    """Compute dq and du of a block of queries, and their part of dT. u None: the pass for kbar."""
    b, h, head_of_all, start = place(heads, t, OWN)
    k += b * k_b + h * k_h
    half += head_of_all * tk
    first = head_of_all * t + start
    at = first * WIDTH
    left = t - start
    valid = of_head(valid, b, 0, valid_b, 0)
    local = tl.arange(0, OWN)
    position = tk - t + start + local[:, None]
    good = good_at(valid, position, tk)
    factor = tl.load(factors + h)
    level = tl.load(lse + first + local, mask=local < left, other=0.0)[:, None]
    average_score = tl.load(average + first + local, mask=local < left, other=0.0)[:, None]
    queries = load_tile(
        q + b * q_b + h * q_h + start.to(tl.int64) * q_t, q_t, left, OWN, WIDTH, PADDED
    )
    gradient = load_tile(g + at, WIDTH, left, OWN, WIDTH, PADDED)
    offset = tl.load(g_centre + first + local, mask=local < left, other=0.0)
    if u is not None:
        along = load_tile(u + at, WIDTH, left, OWN, WIDTH, PADDED)
        along_offset = tl.load(centre + first + local, mask=local < left, other=0.0)
        term = tl.load(g_read + first + local, mask=local < left, other=0.0)
        u_sum = tl.zeros([OWN], tl.float32)
        u_found = tl.zeros([OWN, PADDED], tl.float32)
    q_sum = tl.zeros([OWN], tl.float32)
    q_found = tl.zeros([OWN, PADDED], tl.float32)
    heat = tl.zeros([OWN], tl.float32)
    end = tk
    if CAUSAL:
        end = tl.minimum(tk, tk - t + start + OWN)
    for n in range(0, end, OTHER):
        keys = load_tile(k + tl.cast(n, tl.int64) * k_t, k_t, tk - n, OTHER, WIDTH, PADDED)
        key = n + tl.arange(0, OTHER)[None, :]
        norm = tl.load(half + key, mask=key < tk, other=0.0)
        scores = (tl.dot(queries, tl.trans(keys), input_precision="ieee") - norm) * factor
        weights = tl.where(
            seen(position, key, tk, good, good_at(valid, key, tk), CAUSAL),
            probabilities(scores, level),
            0.0,
        )
        slope = tl.dot(gradient, tl.trans(keys), input_precision="ieee") - offset[:, None]
        if u is None:
            d_scores = tl.where(weights > 0, weights * slope, 0.0)
        else:
            step = tl.dot(along, tl.trans(keys), input_precision="ieee") - along_offset[:, None]
            d_scores = tl.where(weights > 0, weights * (slope * step - term[:, None]), 0.0)
            d_u_weights = tl.where(weights > 0, weights * slope, 0.0).to(keys.dtype)
        heat += tl.sum(tl.where(weights > 0, d_scores * (scores - average_score), 0.0), 1)
        d_scores = d_scores.to(keys.dtype)
        q_sum += tl.sum(d_scores.to(tl.float32), 1)
        q_found = tl.dot(d_scores, keys, q_found, input_precision="ieee")
        if u is not None:
            u_sum += tl.sum(d_u_weights.to(tl.float32), 1)
            u_found = tl.dot(d_u_weights, keys, u_found, input_precision="ieee")
    inverse = factor * LN_2
    tl.store(heats + first + local, heat * (-LN_2 * inverse), mask=local < left)
    middle = load_tile(mean + at, WIDTH, left, OWN, WIDTH, PADDED)
    made = (q_found - q_sum[:, None] * middle) * inverse
    store_tile(
        d_q + b * d_q_b + h * d_q_h + start.to(tl.int64) * d_q_t,
        d_q_t,
        left,
        made,
        OWN,
        WIDTH,
        PADDED,
    )
    if u is not None:
        store_tile(d_u + at, WIDTH, left, u_found - u_sum[:, None] * middle, OWN, WIDTH, PADDED)


@triton.jit
def _keys_kernel(
    q, k, u, g, half, factors, valid, lse, centre, g_centre, g_read, d_k, d_k_b, d_k_h, d_k_t,
    heads, t, tk, q_b, q_h, q_t, k_b, k_h, k_t, valid_b,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, OWN: tl.constexpr,
    OTHER: tl.constexpr,
):  # fmt: skip
    """Compute dk of a block of keys, over the queries that see them. u None: the pass for kbar."""
    blocks = tl.cdiv(tk, OWN)
    head_of_all = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head_of_all // heads, head_of_all % heads
    start = tl.program_id(0) % blocks * OWN
    left = tk - start
    first = head_of_all * t
    q += b * q_b + h * q_h
    valid = of_head(valid, b, 0, valid_b, 0)
    key = start + tl.arange(0, OWN)[:, None]
    good = good_at(valid, key, tk)
    factor = tl.load(factors + h)
    norm = tl.load(half + head_of_all * tk + key, mask=key < tk, other=0.0)
    keys = load_tile(
        k + b * k_b + h * k_h + start.to(tl.int64) * k_t, k_t, left, OWN, WIDTH, PADDED
    )
    total = tl.zeros([OWN], tl.float32)
    found = tl.zeros([OWN, PADDED], tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(start - (tk - t), 0) // OTHER * OTHER
    for m in range(begin, t, OTHER):
        here = tl.cast(m, tl.int64)
        row = m + tl.arange(0, OTHER)[None, :]
        queries = load_tile(q + here * q_t, q_t, t - m, OTHER, WIDTH, PADDED)
        gradient = load_tile(g + (first + here) * WIDTH, WIDTH, t - m, OTHER, WIDTH, PADDED)
        # The weight of a query past the last is exp2(-inf).
        level = tl.load(lse + first + row, mask=row < t, other=float("inf"))
        scores = (tl.dot(keys, tl.trans(queries), input_precision="ieee") - norm) * factor
        position = tk - t + row
        weights = tl.where(
            seen(position, key, tk, good_at(valid, position, tk), good, CAUSAL),
            probabilities(scores, level),
            0.0,
        )
        slope = tl.dot(keys, tl.trans(gradient), input_precision="ieee") - tl.load(
            g_centre + first + row, mask=row < t, other=0.0
        )
        if u is None:
            d_scores = tl.where(weights > 0, weights * slope, 0.0)
        else:
            along = load_tile(u + (first + here) * WIDTH, WIDTH, t - m, OTHER, WIDTH, PADDED)
            rounded = tl.where(weights > 0, weights * slope, 0.0).to(keys.dtype)
            found = tl.dot(rounded, along, found, input_precision="ieee")
            step = tl.dot(keys, tl.trans(along), input_precision="ieee") - tl.load(
                centre + first + row, mask=row < t, other=0.0
            )
            slope = slope * step - tl.load(g_read + first + row, mask=row < t, other=0.0)
            d_scores = tl.where(weights > 0, weights * slope, 0.0)
            weights = tl.where(weights > 0, weights * step, 0.0)
        found = tl.dot(weights.to(keys.dtype), gradient, found, input_precision="ieee")
        rounded = (d_scores * (factor * LN_2)).to(keys.dtype)
        total += tl.sum(rounded.to(tl.float32), 1)
        found = tl.dot(rounded, queries, found, input_precision="ieee")
    found -= total[:, None] * keys.to(tl.float32)
    store_tile(
        d_k + b * d_k_b + h * d_k_h + start.to(tl.int64) * d_k_t,
        d_k_t,
        left,
        found,
        OWN,
        WIDTH,
        PADDED,
    )


def queries_blocks(dtype, width, is_second, padding):
    """Return the block sizes of the kernel over queries."""
    narrow = Blocks(128, 32 if is_second and padding else 64, 8, 2)
    # With a second stage, the two sums of C u would not fit the registers.
    return fitting(
        dtype,
        SMALL,
        FLOAT32,
        narrow if padded(width) <= 64 else Blocks(128, 32, 8, 1 if is_second else 3),
    )


def keys_blocks(dtype, width, is_second, padding):
    """Return the block sizes of the kernel over keys."""
    narrow, wide = (FLOAT32, Blocks(128, 64, 8, 2)), (Blocks(16, 16, 8, 1), Blocks(128, 32, 8, 2))
    return fitting(dtype, SMALL, *(narrow if padded(width) <= 64 else wide))


MATRIX = (_queries_kernel, _keys_kernel)  # compiled to wgmma on sm_90
