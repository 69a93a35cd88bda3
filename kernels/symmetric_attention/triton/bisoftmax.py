"""Bi-softmax attention in Triton: two passes over the pairs forward, two backward. No other kind of attention here, no autotuning.

s = z z^T / sqrt(p) is symmetric, and so is what sees what; a column's log-sum-exp is the row's. With P_ij = exp(s_ij - L_i), A = P + P^T
and g the gradient of out = A z, dP_ij and dP_ji are both M_ij = g_i.z_j + z_i.g_j. With D_i = sum_j P_ij M_ij, all roles of z at once,

    dz_i = sum_j A_ij g_j + (A_ij M_ij - P_ij D_i - P_ji D_j) z_j / sqrt(p)

so that a program gives its own rows from all others: nothing is shared between programs, and no pair is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.tiles import (
    LOG2E,
    Blocks,
    Build,
    build,
    empty_as,
    fitting,
    good_at,
    load_tile,
    padded,
    place,
    probabilities,
    rows_of,
    seen,
    store_tile,
)


def bisoftmax_attention(z, valid):
    """(softmax of rows + softmax of columns) z for z [b, h, t, p], float32 or bfloat16; valid [b, t] bool or None. Differentiable in z."""
    return _Bisoftmax.apply(z, valid)


class _Bisoftmax(torch.autograd.Function):
    """Keeps z and the log-sum-exp of each row, in powers of two, float32."""

    @staticmethod
    def forward(ctx, z, valid):
        z = rows_of(z)
        out = empty_as(z)
        lse = torch.empty(z.shape[:3], dtype=torch.float32, device=z.device)
        given = (LOG2E * z.shape[3] ** -0.5, *z.shape[1:3], *z.stride()[:3])
        _launch(_log_sum_kernel, log_sum_blocks, z, valid, z, valid, lse, *given)
        _launch(_read_kernel, read_blocks, z, valid, z, valid, lse, out, *given, *out.stride()[:3])
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
        _launch(_terms_kernel, terms_blocks, z, valid, z, valid, lse, d_out, terms, *given)
        _launch(_gradient_kernel, gradient_blocks, z, valid, z, valid, lse, d_out, terms, d_z, scale, *given, *d_z.stride()[:3])
        return d_z, None


def _launch(kernel, sizes, z, valid, *arguments):
    b, h, t, width = z.shape
    blocks = sizes(z.dtype, width)
    kernel[(triton.cdiv(t, blocks.rows) * b * h,)](
        *arguments, 0 if valid is None else valid.stride(0), WIDTH=width, PADDED=padded(width), ROWS=blocks.rows, KEYS=blocks.keys,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


@triton.jit
def _masked(scores, row, key, t, good, valid):
    """scores, -inf where a row does not see a key, if there is padding."""
    if valid is not None:
        scores = tl.where(seen(row[:, None], key[None, :], t, good, good_at(valid, key[None, :], t), False), scores, float("-inf"))
    return scores


@triton.jit
def _log_sum_kernel(
    z, valid, lse, factor, heads, t, z_b, z_h, z_t, valid_b,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    b, h, head_of_all, start = place(heads, t, ROWS)
    z += b * z_b + h * z_h
    if valid is not None:
        valid += b * valid_b
    row = start + tl.arange(0, ROWS)
    good = good_at(valid, row[:, None], t)
    own = load_tile(z + start.to(tl.int64) * z_t, z_t, t - start, ROWS, WIDTH, PADDED)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for n in range(0, t, KEYS):
        other = load_tile(z + tl.cast(n, tl.int64) * z_t, z_t, t - n, KEYS, WIDTH, PADDED)
        scores = tl.dot(own, tl.trans(other), input_precision="ieee") * factor
        key = n + tl.arange(0, KEYS)
        scores = tl.where((key < t)[None, :], _masked(scores, row, key, t, good, valid), float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        level = new
        if valid is not None:  # a row may have seen nothing yet
            level = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(top - level) + tl.sum(tl.exp2(scores - level[:, None]), 1)
        top = new
    tl.store(lse + head_of_all * t + row, top + tl.log2(total), mask=row < t)


@triton.jit
def _read_kernel(
    z, valid, lse, out, factor, heads, t, z_b, z_h, z_t, out_b, out_h, out_t, valid_b,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Keys past the last are zeros, so that whatever they weigh adds nothing; likewise in the kernels below."""
    b, h, head_of_all, start = place(heads, t, ROWS)
    z += b * z_b + h * z_h
    lse += head_of_all * t
    if valid is not None:
        valid += b * valid_b
    row = start + tl.arange(0, ROWS)
    good = good_at(valid, row[:, None], t)
    own = load_tile(z + start.to(tl.int64) * z_t, z_t, t - start, ROWS, WIDTH, PADDED)
    level = tl.load(lse + row, mask=row < t, other=0.0)
    read = tl.zeros([ROWS, PADDED], tl.float32)
    for n in range(0, t, KEYS):
        other = load_tile(z + tl.cast(n, tl.int64) * z_t, z_t, t - n, KEYS, WIDTH, PADDED)
        key = n + tl.arange(0, KEYS)
        other_level = tl.load(lse + key, mask=key < t, other=0.0)
        scores = _masked(tl.dot(own, tl.trans(other), input_precision="ieee") * factor, row, key, t, good, valid)
        weights = probabilities(scores, level[:, None]) + probabilities(scores, other_level[None, :])
        read = tl.dot(weights.to(other.dtype), other, read, input_precision="ieee")
    store_tile(out + b * out_b + h * out_h + start.to(tl.int64) * out_t, out_t, t - start, read, ROWS, WIDTH, PADDED)


@triton.jit
def _terms_kernel(
    z, valid, lse, d_out, terms, factor, heads, t, z_b, z_h, z_t, d_out_b, d_out_h, d_out_t, valid_b,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """D_i = sum_j P_ij (g_i.z_j + z_i.g_j)."""
    b, h, head_of_all, start = place(heads, t, ROWS)
    z += b * z_b + h * z_h
    d_out += b * d_out_b + h * d_out_h
    if valid is not None:
        valid += b * valid_b
    row = start + tl.arange(0, ROWS)
    good = good_at(valid, row[:, None], t)
    own = load_tile(z + start.to(tl.int64) * z_t, z_t, t - start, ROWS, WIDTH, PADDED)
    own_d = load_tile(d_out + start.to(tl.int64) * d_out_t, d_out_t, t - start, ROWS, WIDTH, PADDED)
    level = tl.load(lse + head_of_all * t + row, mask=row < t, other=0.0)
    term = tl.zeros([ROWS], tl.float32)
    for n in range(0, t, KEYS):
        other = load_tile(z + tl.cast(n, tl.int64) * z_t, z_t, t - n, KEYS, WIDTH, PADDED)
        other_d = load_tile(d_out + tl.cast(n, tl.int64) * d_out_t, d_out_t, t - n, KEYS, WIDTH, PADDED)
        scores = tl.dot(own, tl.trans(other), input_precision="ieee") * factor
        weights = probabilities(_masked(scores, row, n + tl.arange(0, KEYS), t, good, valid), level[:, None])
        d_weights = tl.dot(own_d, tl.trans(other), input_precision="ieee")
        d_weights = tl.dot(own, tl.trans(other_d), d_weights, input_precision="ieee")
        term += tl.sum(tl.where(weights > 0, weights * d_weights, 0.0), 1)
    tl.store(terms + head_of_all * t + row, term, mask=row < t)


@triton.jit
def _gradient_kernel(
    z, valid, lse, d_out, terms, d_z, scale, factor, heads, t, z_b, z_h, z_t, d_out_b, d_out_h, d_out_t, d_z_b, d_z_h, d_z_t, valid_b,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    b, h, head_of_all, start = place(heads, t, ROWS)
    z += b * z_b + h * z_h
    d_out += b * d_out_b + h * d_out_h
    lse += head_of_all * t
    terms += head_of_all * t
    if valid is not None:
        valid += b * valid_b
    row = start + tl.arange(0, ROWS)
    good = good_at(valid, row[:, None], t)
    own = load_tile(z + start.to(tl.int64) * z_t, z_t, t - start, ROWS, WIDTH, PADDED)
    own_d = load_tile(d_out + start.to(tl.int64) * d_out_t, d_out_t, t - start, ROWS, WIDTH, PADDED)
    level = tl.load(lse + row, mask=row < t, other=0.0)
    term = tl.load(terms + row, mask=row < t, other=0.0)
    found = tl.zeros([ROWS, PADDED], tl.float32)
    for n in range(0, t, KEYS):
        other = load_tile(z + tl.cast(n, tl.int64) * z_t, z_t, t - n, KEYS, WIDTH, PADDED)
        other_d = load_tile(d_out + tl.cast(n, tl.int64) * d_out_t, d_out_t, t - n, KEYS, WIDTH, PADDED)
        key = n + tl.arange(0, KEYS)
        other_level = tl.load(lse + key, mask=key < t, other=0.0)
        other_term = tl.load(terms + key, mask=key < t, other=0.0)
        scores = _masked(tl.dot(own, tl.trans(other), input_precision="ieee") * factor, row, key, t, good, valid)
        by_row = probabilities(scores, level[:, None])
        by_column = probabilities(scores, other_level[None, :])
        d_weights = tl.dot(own_d, tl.trans(other), input_precision="ieee")
        d_weights = tl.dot(own, tl.trans(other_d), d_weights, input_precision="ieee")
        weights = by_row + by_column
        d_scores = by_row * (d_weights - term[:, None]) + by_column * (d_weights - other_term[None, :])
        d_scores = tl.where(weights > 0, d_scores * scale, 0.0)
        found = tl.dot(weights.to(other.dtype), other_d, found, input_precision="ieee")
        found = tl.dot(d_scores.to(other.dtype), other, found, input_precision="ieee")
    store_tile(d_z + b * d_z_b + h * d_z_h + start.to(tl.int64) * d_z_t, d_z_t, t - start, found, ROWS, WIDTH, PADDED)


def _blocks(dtype, wide, narrow, broad):
    return fitting(dtype, Blocks(32, 16, 4, 1), Blocks(32, 32, 4, 1), broad if wide > 128 else narrow)


def log_sum_blocks(dtype, width):
    """Block sizes of the pass for L."""
    return _blocks(dtype, padded(width), Blocks(128, 128, 8, 3), Blocks(128, 64, 8, 2))


def read_blocks(dtype, width):
    """Block sizes of the pass for the output."""
    return _blocks(dtype, padded(width), Blocks(128, 64, 8, 3), Blocks(64, 64, 8, 2))


def terms_blocks(dtype, width):
    """Block sizes of the backward's pass for D."""
    return _blocks(dtype, padded(width), Blocks(128, 64, 8, 2), Blocks(64, 32, 8, 2))


def gradient_blocks(dtype, width):
    """Block sizes of the backward's pass for dz."""
    return _blocks(dtype, padded(width), Blocks(128, 64, 8, 2), Blocks(128, 16, 8, 2))


def _build(label, kernel, sizes, width, valid=False, inner=True):
    blocks = sizes(torch.bfloat16, width)
    constants = {"WIDTH": width, "PADDED": padded(width), "ROWS": blocks.rows, "KEYS": blocks.keys} | ({} if valid else {"valid": None})
    return build(
        f"{label}, p {width}{', padding' if valid else ''}", kernel, constants, blocks.warps, blocks.stages, matrix=True, even="t",
        bf16="z out d_out d_z", fp32="lse terms",
    )  # fmt: skip


_PASSES = (
    ("log-sum-exp", _log_sum_kernel, log_sum_blocks), ("output", _read_kernel, read_blocks),
    ("backward, row terms", _terms_kernel, terms_blocks), ("backward, gradient", _gradient_kernel, gradient_blocks),
)  # fmt: skip
BUILDS: tuple[Build, ...] = (
    *(_build(*given, width) for width in (64, 128) for given in _PASSES),
    *(_build(*given, 64, True) for given in _PASSES),
)
