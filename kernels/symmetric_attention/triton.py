"""Bi-softmax and sigmoid attention in Triton, forward and backward.

Programs share no data, no pair is stored, no kernel is autotuned.

Bi-softmax takes two passes over the pairs, forward and backward. s = z z^T / sqrt(p) is symmetric,
and so is the mask, so that a column's log-sum-exp is the row's. With P_ij = exp(s_ij - L_i), A = P
+ P^T and g the gradient of out = A z, dP_ij and dP_ji are both M_ij = g_i.z_j + z_i.g_j. With
D_i = sum_j P_ij M_ij, the sum over all roles of z is

    dz_i = sum_j A_ij g_j + (A_ij M_ij - P_ij D_i - P_ji D_j) z_j / sqrt(p)

Sigmoid takes one pass, forward and backward, causal or full. w_ij = sigma(s_ij) (1 - sigma(s_ij))
is a function of the pair alone. With g the gradient of out = w k and w' = -w tanh(s / 2),

    dq_i = sum_j w'_ij (g_i.k_j) k_j / sqrt(p)
    dk_j = sum_i w_ij g_i + w'_ij (g_i.k_j) q_i / sqrt(p)

If q and k are one tensor and all pairs count, a program computes both sums for its rows. Otherwise
each sum has its own launch, over the pairs that it needs. Keys past the last are zeros, so that
they add zero whatever their weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.tiles import (
    LOG2E,
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
)  # fmt: skip


def bisoftmax_attention(z, valid):
    """Return (softmax of rows + softmax of columns) z for z [b, h, t, p], float32 or bfloat16.

    valid [b, t] bool or None. Differentiable in z.
    """
    return _Bisoftmax.apply(z, valid)


def sigmoid_attention(z, keys, valid, *, causal):
    """Return w k of z [b, h, t, p] over keys [b, h, tk, p] (None: z), whose last t positions are
    z's.

    valid [b, tk] bool or None.
    Dtypes: float32 or bfloat16. Differentiable in z and keys.
    """
    return _Sigmoid.apply(z, keys, valid, causal)


class _Bisoftmax(torch.autograd.Function):
    """Bi-softmax attention that saves z and the log-sum-exp of each row, in base 2, float32."""

    @staticmethod
    def forward(ctx, z, valid):
        z = rows_of(z)
        out = empty_as(z)
        lse = torch.empty(z.shape[:3], dtype=torch.float32, device=z.device)
        given = (LOG2E * z.shape[3] ** -0.5, *z.shape[1:3], *z.stride()[:3])
        _launch(_log_sum_kernel, z, valid, z, valid, lse, *given)
        _launch(_bisoftmax_kernel, z, valid, z, valid, lse, out, *given, *out.stride()[:3])
        ctx.save_for_backward(z, valid, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        z, valid, lse = ctx.saved_tensors
        d_out = rows_of(d_out)
        d_z, terms = empty_as(z), torch.empty_like(lse)
        scale = z.shape[3] ** -0.5
        given = (LOG2E * scale, *z.shape[1:3], *z.stride()[:3], *d_out.stride()[:3])
        _launch(_terms_kernel, z, valid, z, valid, lse, d_out, terms, *given)
        _launch(
            _bisoftmax_gradient_kernel,
            z,
            valid,
            z,
            valid,
            lse,
            d_out,
            terms,
            d_z,
            scale,
            *given,
            *d_z.stride()[:3],
        )
        return d_z, None


class _Sigmoid(torch.autograd.Function):
    """Sigmoid attention that saves its inputs only."""

    @staticmethod
    def forward(ctx, z, keys, valid, causal):
        z, keys = rows_of(z), None if keys is None else rows_of(keys)
        ctx.save_for_backward(z, keys, valid)
        ctx.causal = causal
        others, out = z if keys is None else keys, empty_as(z)
        sizes = (LOG2E * z.shape[3] ** -0.5, *z.shape[1:3], others.shape[2])
        strides = (*z.stride()[:3], *others.stride()[:3], *out.stride()[:3])
        _launch(_sigmoid_kernel, z, valid, z, others, valid, out, *sizes, *strides, CAUSAL=causal)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        z, keys, valid = ctx.saved_tensors
        d_out = rows_of(d_out)
        if keys is None and not ctx.causal:
            return (
                _gradient(z, z, d_out, valid, False, z.dtype, as_query=True, as_key=True),
                None,
                None,
                None,
            )
        others, kind = (z, torch.float32) if keys is None else (keys, z.dtype)
        d_z = _gradient(z, others, d_out, valid, ctx.causal, kind, as_query=True, as_key=False)
        d_keys = _gradient(others, z, d_out, valid, ctx.causal, kind, as_query=False, as_key=True)
        return (
            (d_z.add_(d_keys).to(z.dtype), None, None, None)
            if keys is None
            else (d_z, d_keys, None, None)
        )


def _gradient(own, other, d_out, valid, causal, kind, *, as_query, as_key):
    """Return the gradient of ``own``, in dtype ``kind``, as queries that read ``other``, as keys
    that ``other`` read, or as both.

    Both at once requires that every row sees every key, except for padding.
    """
    (heads, count, width), others, found = own.shape[1:], other.shape[2], empty_as(own, kind)
    sizes = (width**-0.5, LOG2E * width**-0.5, heads, count, others, max(count, others))
    strides = (n for t in (own, other, d_out, found) for n in t.stride()[:3])
    roles = {"CAUSAL": causal, "AS_QUERY": as_query, "AS_KEY": as_key}
    _launch(
        _sigmoid_gradient_kernel,
        own,
        valid,
        own,
        other,
        d_out,
        valid,
        found,
        *sizes,
        *strides,
        **roles,
    )
    return found


def _launch(kernel, own, valid, *arguments, **constants):
    """Launch a kernel on each block of every head's rows of ``own``.

    The arguments end with the strides, and valid's stride is appended.
    """
    b, h, count, width = own.shape
    wide = padded(width) > (64 if kernel is _sigmoid_gradient_kernel and valid is not None else 128)
    blocks = fitting(own.dtype, Blocks(32, 16, 4, 1), Blocks(32, 32, 8, 1), BLOCKS[kernel][wide])
    kernel[(triton.cdiv(count, blocks.rows) * b * h,)](
        *arguments,
        0 if valid is None else valid.stride(0),
        **constants,
        WIDTH=width,
        PADDED=padded(width),
        **blocks.given(),
    )


@triton.jit
def _masked(scores, row, key, t, valid, b, valid_b):
    """Return the scores; if the batch has padding, -inf where a row does not see a key."""
    if valid is not None:
        valid += b * valid_b
        row, key = row[:, None], key[None, :]
        scores = tl.where(
            seen(row, key, t, good_at(valid, row, t), good_at(valid, key, t), False),
            scores,
            float("-inf"),
        )
    return scores


@triton.jit
def _own(z, heads, t, z_b, z_h, z_t, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Return (sequence, head, head of all, first row, pointer to z of that head, rows, z of these
    rows).
    """
    b, h, head_of_all, start = place(heads, t, ROWS)
    z = of_head(z, b, h, z_b, z_h)
    own = load_tile(z + start.to(tl.int64) * z_t, z_t, t - start, ROWS, WIDTH, PADDED)
    return b, h, head_of_all, start, z, start + tl.arange(0, ROWS), own


@triton.jit
def _log_sum_kernel(
    z, valid, lse, factor, heads, t, z_b, z_h, z_t, valid_b,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    b, _h, head_of_all, _start, z, row, own = _own(z, heads, t, z_b, z_h, z_t, WIDTH, PADDED, ROWS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for n in range(0, t, KEYS):
        other = load_tile(z + tl.cast(n, tl.int64) * z_t, z_t, t - n, KEYS, WIDTH, PADDED)
        scores = tl.dot(own, tl.trans(other), input_precision="ieee") * factor
        key = n + tl.arange(0, KEYS)
        scores = tl.where(
            (key < t)[None, :], _masked(scores, row, key, t, valid, b, valid_b), float("-inf")
        )
        new = tl.maximum(top, tl.max(scores, 1))
        level = new
        if valid is not None:  # a row may not have seen any key yet
            level = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(top - level) + tl.sum(tl.exp2(scores - level[:, None]), 1)
        top = new
    tl.store(lse + head_of_all * t + row, top + tl.log2(total), mask=row < t)


@triton.jit
def _bisoftmax_kernel(
    z, valid, lse, out, factor, heads, t, z_b, z_h, z_t, out_b, out_h, out_t, valid_b,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    b, h, head_of_all, start, z, row, own = _own(z, heads, t, z_b, z_h, z_t, WIDTH, PADDED, ROWS)
    lse += head_of_all * t
    level = tl.load(lse + row, mask=row < t, other=0.0)
    read = tl.zeros([ROWS, PADDED], tl.float32)
    for n in range(0, t, KEYS):
        other = load_tile(z + tl.cast(n, tl.int64) * z_t, z_t, t - n, KEYS, WIDTH, PADDED)
        key = n + tl.arange(0, KEYS)
        other_level = tl.load(lse + key, mask=key < t, other=0.0)
        scores = _masked(
            tl.dot(own, tl.trans(other), input_precision="ieee") * factor,
            row,
            key,
            t,
            valid,
            b,
            valid_b,
        )
        weights = probabilities(scores, level[:, None]) + probabilities(
            scores, other_level[None, :]
        )
        read = tl.dot(weights.to(other.dtype), other, read, input_precision="ieee")
    store_tile(
        out + b * out_b + h * out_h + start.to(tl.int64) * out_t,
        out_t,
        t - start,
        read,
        ROWS,
        WIDTH,
        PADDED,
    )


@triton.jit
def _terms_kernel(
    z, valid, lse, d_out, terms, factor, heads, t, z_b, z_h, z_t, d_out_b, d_out_h, d_out_t,
    valid_b,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute D_i = sum_j P_ij (g_i.z_j + z_i.g_j)."""
    b, h, head_of_all, start, z, row, own = _own(z, heads, t, z_b, z_h, z_t, WIDTH, PADDED, ROWS)
    d_out += b * d_out_b + h * d_out_h
    own_d = load_tile(d_out + start.to(tl.int64) * d_out_t, d_out_t, t - start, ROWS, WIDTH, PADDED)
    level = tl.load(lse + head_of_all * t + row, mask=row < t, other=0.0)
    term = tl.zeros([ROWS], tl.float32)
    for n in range(0, t, KEYS):
        other = load_tile(z + tl.cast(n, tl.int64) * z_t, z_t, t - n, KEYS, WIDTH, PADDED)
        other_d = load_tile(
            d_out + tl.cast(n, tl.int64) * d_out_t, d_out_t, t - n, KEYS, WIDTH, PADDED
        )
        scores = tl.dot(own, tl.trans(other), input_precision="ieee") * factor
        weights = probabilities(
            _masked(scores, row, n + tl.arange(0, KEYS), t, valid, b, valid_b), level[:, None]
        )
        d_weights = tl.dot(own_d, tl.trans(other), input_precision="ieee")
        d_weights = tl.dot(own, tl.trans(other_d), d_weights, input_precision="ieee")
        term += tl.sum(tl.where(weights > 0, weights * d_weights, 0.0), 1)
    tl.store(terms + head_of_all * t + row, term, mask=row < t)


@triton.jit
def _bisoftmax_gradient_kernel(
    z, valid, lse, d_out, terms, d_z, scale, factor, heads, t, z_b, z_h, z_t, d_out_b, d_out_h,
    d_out_t, d_z_b, d_z_h, d_z_t, valid_b,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    b, h, head_of_all, start, z, row, own = _own(z, heads, t, z_b, z_h, z_t, WIDTH, PADDED, ROWS)
    d_out += b * d_out_b + h * d_out_h
    lse += head_of_all * t
    terms += head_of_all * t
    own_d = load_tile(d_out + start.to(tl.int64) * d_out_t, d_out_t, t - start, ROWS, WIDTH, PADDED)
    level = tl.load(lse + row, mask=row < t, other=0.0)
    term = tl.load(terms + row, mask=row < t, other=0.0)
    found = tl.zeros([ROWS, PADDED], tl.float32)
    for n in range(0, t, KEYS):
        other = load_tile(z + tl.cast(n, tl.int64) * z_t, z_t, t - n, KEYS, WIDTH, PADDED)
        other_d = load_tile(
            d_out + tl.cast(n, tl.int64) * d_out_t, d_out_t, t - n, KEYS, WIDTH, PADDED
        )
        key = n + tl.arange(0, KEYS)
        other_level = tl.load(lse + key, mask=key < t, other=0.0)
        other_term = tl.load(terms + key, mask=key < t, other=0.0)
        scores = _masked(
            tl.dot(own, tl.trans(other), input_precision="ieee") * factor,
            row,
            key,
            t,
            valid,
            b,
            valid_b,
        )
        by_row = probabilities(scores, level[:, None])
        by_column = probabilities(scores, other_level[None, :])
        d_weights = tl.dot(own_d, tl.trans(other), input_precision="ieee")
        d_weights = tl.dot(own, tl.trans(other_d), d_weights, input_precision="ieee")
        weights = by_row + by_column
        d_scores = by_row * (d_weights - term[:, None]) + by_column * (
            d_weights - other_term[None, :]
        )
        d_scores = tl.where(weights > 0, d_scores * scale, 0.0)
        found = tl.dot(weights.to(other.dtype), other_d, found, input_precision="ieee")
        found = tl.dot(d_scores.to(other.dtype), other, found, input_precision="ieee")
    store_tile(
        d_z + b * d_z_b + h * d_z_h + start.to(tl.int64) * d_z_t,
        d_z_t,
        t - start,
        found,
        ROWS,
        WIDTH,
        PADDED,
    )


@triton.jit
def _weights(scores):
    """w, and -tanh(s / 2), of scores s log2(e)."""
    small = tl.exp2(-tl.abs(scores))
    share = 1.0 / (1.0 + small)
    slope = (1.0 - small) * share
    return small * share * share, tl.where(scores > 0, -slope, slope)


@triton.jit
def _sigmoid_kernel(
    z, keys, valid, out, factor, heads, t, tk, z_b, z_h, z_t, keys_b, keys_h, keys_t, out_b, out_h,
    out_t, valid_b,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    b, h, _, start = place(heads, t, ROWS)
    keys += b * keys_b + h * keys_h
    valid = of_head(valid, b, 0, valid_b, 0)
    position = (tk - t + start + tl.arange(0, ROWS))[:, None]
    good = good_at(valid, position, tk)
    own = load_tile(
        z + b * z_b + h * z_h + start.to(tl.int64) * z_t, z_t, t - start, ROWS, WIDTH, PADDED
    )
    read = tl.zeros([ROWS, PADDED], tl.float32)
    end = tk
    if CAUSAL:
        end = tl.minimum(tk, tk - t + start + ROWS)
    for n in range(0, end, KEYS):
        other = load_tile(keys + tl.cast(n, tl.int64) * keys_t, keys_t, tk - n, KEYS, WIDTH, PADDED)
        weights, _slope = _weights(tl.dot(own, tl.trans(other), input_precision="ieee") * factor)
        if CAUSAL or valid is not None:
            key = (n + tl.arange(0, KEYS))[None, :]
            weights = tl.where(
                seen(position, key, tk, good, good_at(valid, key, tk), CAUSAL), weights, 0.0
            )
        read = tl.dot(weights.to(other.dtype), other, read, input_precision="ieee")
    store_tile(
        out + b * out_b + h * out_h + start.to(tl.int64) * out_t,
        out_t,
        t - start,
        read,
        ROWS,
        WIDTH,
        PADDED,
    )


@triton.jit
def _sigmoid_gradient_kernel(
    own, other, d_out, valid, found, scale, factor, heads, count, others, positions,
    own_b, own_h, own_t, other_b, other_h, other_t, d_out_b, d_out_h, d_out_t, found_b, found_h,
    found_t, valid_b,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    AS_QUERY: tl.constexpr, AS_KEY: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of own rows, over all rows of ``other``.

    The ``count`` own rows and the ``others`` rows are the last ones of ``positions``.
    """
    b, h, _, start = place(heads, count, ROWS)
    past = positions - others
    position = (positions - count + start + tl.arange(0, ROWS))[:, None]
    other += b * other_b + h * other_h
    d_out += b * d_out_b + h * d_out_h
    valid = of_head(valid, b, 0, valid_b, 0)
    good = good_at(valid, position, positions)
    mine = load_tile(
        own + b * own_b + h * own_h + start.to(tl.int64) * own_t,
        own_t,
        count - start,
        ROWS,
        WIDTH,
        PADDED,
    )
    mine_d = mine
    if AS_QUERY:
        mine_d = load_tile(
            d_out + start.to(tl.int64) * d_out_t, d_out_t, count - start, ROWS, WIDTH, PADDED
        )
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    first = positions - count + start - past
    begin = 0
    end = others
    if CAUSAL and AS_QUERY:
        end = tl.minimum(first + ROWS, others)
    if CAUSAL and AS_KEY:
        begin = tl.maximum(first, 0) // KEYS * KEYS
    for n in range(begin, end, KEYS):
        here = tl.cast(n, tl.int64)
        tile = load_tile(other + here * other_t, other_t, others - n, KEYS, WIDTH, PADDED)
        weights, slope = _weights(tl.dot(mine, tl.trans(tile), input_precision="ieee") * factor)
        slope *= weights * scale
        theirs = (past + n + tl.arange(0, KEYS))[None, :]
        their_good = good_at(valid, theirs, positions)
        if AS_QUERY:
            d_weights = tl.dot(mine_d, tl.trans(tile), input_precision="ieee")
            if CAUSAL or valid is not None:
                d_weights = tl.where(
                    seen(position, theirs, positions, good, their_good, CAUSAL), d_weights, 0.0
                )
            d_scores = d_weights
        if AS_KEY:
            tile_d = load_tile(d_out + here * d_out_t, d_out_t, others - n, KEYS, WIDTH, PADDED)
            d_weights = tl.dot(mine, tl.trans(tile_d), input_precision="ieee")
            if CAUSAL or valid is not None:
                allowed = seen(theirs, position, positions, their_good, good, CAUSAL)
                d_weights = tl.where(allowed, d_weights, 0.0)
                weights = tl.where(allowed, weights, 0.0)
            d_scores = d_scores + d_weights if AS_QUERY else d_weights
        d_scores = tl.where(slope == 0, 0.0, d_scores * slope)
        if AS_KEY:
            sums = tl.dot(weights.to(tile.dtype), tile_d, sums, input_precision="ieee")
        sums = tl.dot(d_scores.to(tile.dtype), tile, sums, input_precision="ieee")
    store_tile(
        found + b * found_b + h * found_h + start.to(tl.int64) * found_t,
        found_t,
        count - start,
        sums,
        ROWS,
        WIDTH,
        PADDED,
    )


# Block sizes of each kernel in bfloat16: for heads up to 128 wide, and for wider ones. Sigmoid
# takes no wider heads; its gradient uses the second sizes for heads over 64 with padding, whose
# mask would spill.
BLOCKS = {
    _log_sum_kernel: (Blocks(128, 128, 8, 3), Blocks(128, 64, 8, 2)),
    _bisoftmax_kernel: (Blocks(128, 64, 8, 3), Blocks(64, 64, 8, 2)),
    _terms_kernel: (Blocks(128, 64, 8, 2), Blocks(64, 32, 8, 2)),
    _bisoftmax_gradient_kernel: (Blocks(128, 64, 8, 2), Blocks(128, 16, 8, 2)),
    _sigmoid_kernel: (Blocks(128, 64, 8, 3),),
    _sigmoid_gradient_kernel: (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2)),
}
MATRIX = tuple(BLOCKS)  # compiled to wgmma on sm_90
