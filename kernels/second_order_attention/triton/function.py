"""MHA2nd1st's step of `forward`'s two flash passes and of `rows` in Triton, and its backward.

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
work in the frame to which k is rotated; `rows` rotates u and the reads, and multiplies by G and
G^-1.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.arguments import without_autocast
from kernels.rotary import rotary
from kernels.second_order_attention.reference import solve_gram
from kernels.second_order_attention.triton.forward import FLOAT32, SMALL, launch, means, second
from kernels.second_order_attention.triton.rows import after, between, matrix_gradient
from kernels.second_order_attention.triton.rows import gradients as read_gradients
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
    are in q's dtype, sums over keys, r, and products with G and G^-1 in float32.
    """
    return _Step.apply(q, k, gram, temperature, newton, turn, causal, valid, jitter)


class _Step(torch.autograd.Function):
    """`first_order_step` as an autograd function."""

    @staticmethod
    def forward(ctx, q, k, gram, temperature, newton, turn, causal, valid, jitter):
        q, k, gram, newton = rows_of(q), rows_of(k), gram.contiguous(), newton.contiguous()
        turned = q
        if turn is not None:
            cos, sin = turn.permute(2, 0, 1, 3).chunk(2, dim=-1)
            turned = rotary(q.permute(2, 0, 1, 3), None, cos, sin)[0].permute(1, 2, 0, 3)
            turn = rows_of(turn).expand(len(q), -1, -1, -1)
        half = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).square() / 2
        factors = math.log2(math.e) / temperature
        eye = torch.eye(q.shape[3], device=q.device).expand(1, *gram.shape)
        inverse = solve_gram(gram, eye, jitter)[0].contiguous()
        mean, levels = means(turned, k, half, factors, valid, causal)
        u = between(q, mean, gram, turn)
        read, centre = second(turned, k, u, half, factors, mean, levels[0], valid, causal)
        ctx.save_for_backward(
            q, turned, k, half, factors, valid, mean, levels, u, read, centre, gram, inverse,
            newton, turn,
        )  # fmt: skip
        ctx.causal, ctx.jitter = causal, jitter
        return after(q, mean, read, inverse, newton, turn)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, d_out):
        (
            q, turned, k, half, factors, valid, mean, levels, u, read, centre, gram, inverse,
            newton, turn,
        ) = ctx.saved_tensors  # fmt: skip
        d_out = rows_of(d_out)
        pairs, heats = (turned, k, half, factors, valid, mean, levels), torch.empty_like(levels)
        d_q, d_k = q.new_empty(q.shape), empty_as(k)
        g, terms = read_gradients(d_out, read, mean, inverse, newton, turn)
        d_newton = -terms[1].sum((0, 2)) / newton
        d_u = gradients(*pairs, g, terms, u, centre, d_q, d_k, heats[0], ctx.causal)
        g, terms = read_gradients(d_out, d_u, mean, gram, None, turn)
        gradients(*pairs, g, terms, None, None, d_q, d_k, heats[1], ctx.causal)
        d_system = matrix_gradient(d_out, None, read, turn) / newton[:, None, None]
        d_system = inverse @ d_system @ inverse
        jitters = (ctx.jitter * d_system.diagonal(dim1=1, dim2=2).mean(1))[:, None]
        d_gram = matrix_gradient(q, mean, d_u, turn) - d_system
        d_gram -= torch.diag_embed(jitters.expand(-1, q.shape[3]))
        d_q = after(d_out, d_q, d_u, gram, None, turn)
        return d_q, d_k, d_gram, heats.sum((0, 1, 3)), d_newton, None, None, None, None


def gradients(
    q, k, half, factors, valid, mean, levels, g, terms, u, centre, d_q, d_k, heats, causal
):  # fmt: skip
    """Write -dq, dk and the parts of dT for a gradient g of C u, and return du; or, with u and
    centre None, add those for a gradient of kbar to -dq and dk, and return None.

    As q: g, and d_q, contiguous both; terms: g's row terms with kbar and with C u; d_k as k; heats
    [b, h, t]. The other arguments are as in the forward. du is float32.
    """
    (t, d), is_second, (lse, average) = q.shape[2:], u is not None, levels
    d_u, g_read = (torch.empty_like(mean), terms[1]) if is_second else (None, None)
    launch(
        _queries_kernel, queries_blocks(q.dtype, d, is_second, valid is not None), t, q, k, valid,
        causal,
        q, k, u, g, half, factors, valid, mean, lse, average, centre, terms[0], g_read, d_q, d_u,
        heats,
    )  # fmt: skip
    launch(
        _keys_kernel, keys_blocks(q.dtype, d, is_second, valid is not None), k.shape[2], q, k,
        valid, causal,
        q, k, u, g, half, factors, valid, lse, centre, terms[0], g_read, d_k, *d_k.stride()[:3],
    )  # fmt: skip
    return d_u


@triton.jit
def _queries_kernel(
    q, k, u, g, half, factors, valid, mean, lse, average, centre, g_centre, g_read, d_q, d_u, heats,
    heads, t, tk, q_b, q_h, q_t, k_b, k_h, k_t, valid_b,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, OWN: tl.constexpr,
    OTHER: tl.constexpr,
):  # fmt: skip
    """Compute -dq and du of a block of queries, and their part of dT. u None: the pass for kbar,
    which adds to the other's -dq.
    """
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
    made = (q_sum[:, None] * middle - q_found) * inverse
    if u is None:
        made += load_tile(d_q + at, WIDTH, left, OWN, WIDTH, PADDED)
    store_tile(d_q + at, WIDTH, left, made, OWN, WIDTH, PADDED)
    if u is not None:
        store_tile(d_u + at, WIDTH, left, u_found - u_sum[:, None] * middle, OWN, WIDTH, PADDED)


@triton.jit
def _keys_kernel(
    q, k, u, g, half, factors, valid, lse, centre, g_centre, g_read, d_k, d_k_b, d_k_h, d_k_t,
    heads, t, tk, q_b, q_h, q_t, k_b, k_h, k_t, valid_b,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, OWN: tl.constexpr,
    OTHER: tl.constexpr,
):  # fmt: skip
    """Compute dk of a block of keys, over the queries that see them. u None: the pass for kbar,
    which adds to the other's dk.
    """
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
    here = b * d_k_b + h * d_k_h + start.to(tl.int64) * d_k_t
    if u is None:
        found += load_tile(d_k + here, d_k_t, left, OWN, WIDTH, PADDED)
    store_tile(d_k + here, d_k_t, left, found, OWN, WIDTH, PADDED)


def queries_blocks(dtype, width, is_second, padding):
    """Return the block sizes of the kernel over queries."""
    narrow = Blocks(128, 32 if is_second and padding else 64, 8, 2)
    # With another stage, the sums would not fit the registers, for kbar those of sm_80; with fewer
    # rows, Triton 3.6.0 spills in float32.
    return fitting(
        dtype,
        SMALL,
        FLOAT32 if is_second else Blocks(32, 16, 8, 1),
        narrow if padded(width) <= 64 else Blocks(128, 32, 8, 1 if is_second else 2),
    )


def keys_blocks(dtype, width, is_second, padding):
    """Return the block sizes of the kernel over keys."""
    narrow, wide = (FLOAT32, Blocks(128, 64, 8, 2)), (Blocks(16, 16, 8, 1), Blocks(128, 32, 8, 2))
    return fitting(dtype, SMALL, *(narrow if padded(width) <= 64 else wide))


MATRIX = (_queries_kernel, _keys_kernel)  # compiled to wgmma on sm_90
