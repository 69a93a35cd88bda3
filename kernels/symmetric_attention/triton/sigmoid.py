"""Sigmoid attention in Triton, causal or full: one pass over the pairs forward and one backward. No softmax here, no autotuning.

w_ij = sigma(s_ij) (1 - sigma(s_ij)) is a function of the pair alone; with g the gradient of out = w k and w' = -w tanh(s / 2),

    dq_i = sum_j w'_ij (g_i.k_j) k_j / sqrt(p)        dk_j = sum_i w_ij g_i + w'_ij (g_i.k_j) q_i / sqrt(p)

Where q and k are one tensor and all pairs count, a program makes both sums for its rows; else there is a launch for each, over the pairs
that it needs. Nothing is shared between programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.tiles import LOG2E, Blocks, Build, build, empty_as, fitting, good_at, load_tile, padded, place, rows_of, seen, store_tile


def sigmoid_attention(z, keys, valid, *, causal):
    """w k of z [b, h, t, p] over keys [b, h, tk, p] (None: z), whose last t positions are z's; valid [b, tk] bool or None.

    Types: float32 or bfloat16. Differentiable in z and keys.
    """
    return _Sigmoid.apply(z, keys, valid, causal)


class _Sigmoid(torch.autograd.Function):
    """Keeps nothing but its inputs."""

    @staticmethod
    def forward(ctx, z, keys, valid, causal):
        z, keys = rows_of(z), None if keys is None else rows_of(keys)
        ctx.save_for_backward(z, keys, valid)
        ctx.causal = causal
        others, out = z if keys is None else keys, empty_as(z)
        (b, h, t, width), tk = z.shape, others.shape[2]
        blocks = read_blocks(z.dtype, width)
        _read_kernel[(triton.cdiv(t, blocks.rows) * b * h,)](
            z, others, valid, out, LOG2E * width**-0.5, h, t, tk, *z.stride()[:3], *others.stride()[:3], *out.stride()[:3],
            0 if valid is None else valid.stride(0), CAUSAL=causal, **_constants(blocks, width),
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        z, keys, valid = ctx.saved_tensors
        d_out = rows_of(d_out)
        if keys is None and not ctx.causal:
            return _gradient(z, z, d_out, valid, False, z.dtype, as_query=True, as_key=True), None, None, None
        others, kind = (z, torch.float32) if keys is None else (keys, z.dtype)
        d_z = _gradient(z, others, d_out, valid, ctx.causal, kind, as_query=True, as_key=False)
        d_keys = _gradient(others, z, d_out, valid, ctx.causal, kind, as_query=False, as_key=True)
        return (d_z.add_(d_keys).to(z.dtype), None, None, None) if keys is None else (d_z, d_keys, None, None)


def _gradient(own, other, d_out, valid, causal, kind, *, as_query, as_key):
    """The gradient of ``own``, in type ``kind``, as queries that read ``other``, as keys that ``other`` read, or both where all is full."""
    (b, h, count, width), others = own.shape, other.shape[2]
    found, positions = empty_as(own, kind), max(count, others)
    blocks = gradient_blocks(own.dtype, width)
    _gradient_kernel[(triton.cdiv(count, blocks.rows) * b * h,)](
        own, other, d_out, valid, found, width**-0.5, LOG2E * width**-0.5, h, count, others, positions,
        *own.stride()[:3], *other.stride()[:3], *d_out.stride()[:3], *found.stride()[:3], 0 if valid is None else valid.stride(0),
        CAUSAL=causal, AS_QUERY=as_query, AS_KEY=as_key, **_constants(blocks, width),
    )  # fmt: skip
    return found


def _constants(blocks, width):
    return {
        "WIDTH": width, "PADDED": padded(width), "ROWS": blocks.rows, "KEYS": blocks.keys,
        "num_warps": blocks.warps, "num_stages": blocks.stages,
    }  # fmt: skip


@triton.jit
def _weights(scores):
    """w, and -tanh(s / 2), of scores s log2(e)."""
    small = tl.exp2(-tl.abs(scores))
    share = 1.0 / (1.0 + small)
    slope = (1.0 - small) * share
    return small * share * share, tl.where(scores > 0, -slope, slope)


@triton.jit
def _read_kernel(
    z, keys, valid, out, factor, heads, t, tk, z_b, z_h, z_t, keys_b, keys_h, keys_t, out_b, out_h, out_t, valid_b,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Keys past the last are zeros, so that whatever they weigh adds nothing; likewise below."""
    b, h, _, start = place(heads, t, ROWS)
    keys += b * keys_b + h * keys_h
    if valid is not None:
        valid += b * valid_b
    position = (tk - t + start + tl.arange(0, ROWS))[:, None]
    good = good_at(valid, position, tk)
    own = load_tile(z + b * z_b + h * z_h + start.to(tl.int64) * z_t, z_t, t - start, ROWS, WIDTH, PADDED)
    read = tl.zeros([ROWS, PADDED], tl.float32)
    end = tk
    if CAUSAL:
        end = tl.minimum(tk, tk - t + start + ROWS)
    for n in range(0, end, KEYS):
        other = load_tile(keys + tl.cast(n, tl.int64) * keys_t, keys_t, tk - n, KEYS, WIDTH, PADDED)
        weights, _slope = _weights(tl.dot(own, tl.trans(other), input_precision="ieee") * factor)
        if CAUSAL or valid is not None:
            key = (n + tl.arange(0, KEYS))[None, :]
            weights = tl.where(seen(position, key, tk, good, good_at(valid, key, tk), CAUSAL), weights, 0.0)
        read = tl.dot(weights.to(other.dtype), other, read, input_precision="ieee")
    store_tile(out + b * out_b + h * out_h + start.to(tl.int64) * out_t, out_t, t - start, read, ROWS, WIDTH, PADDED)


@triton.jit
def _gradient_kernel(
    own, other, d_out, valid, found, scale, factor, heads, count, others, positions,
    own_b, own_h, own_t, other_b, other_h, other_t, d_out_b, d_out_h, d_out_t, found_b, found_h, found_t, valid_b,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    AS_QUERY: tl.constexpr, AS_KEY: tl.constexpr,
):  # fmt: skip
    """A block of own rows, over all others. ``count`` and ``others`` stand at the end of ``positions``."""
    b, h, _, start = place(heads, count, ROWS)
    past = positions - others
    position = (positions - count + start + tl.arange(0, ROWS))[:, None]
    other += b * other_b + h * other_h
    d_out += b * d_out_b + h * d_out_h
    if valid is not None:
        valid += b * valid_b
    good = good_at(valid, position, positions)
    mine = load_tile(own + b * own_b + h * own_h + start.to(tl.int64) * own_t, own_t, count - start, ROWS, WIDTH, PADDED)
    mine_d = mine
    if AS_QUERY:
        mine_d = load_tile(d_out + start.to(tl.int64) * d_out_t, d_out_t, count - start, ROWS, WIDTH, PADDED)
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
                d_weights = tl.where(seen(position, theirs, positions, good, their_good, CAUSAL), d_weights, 0.0)
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
    store_tile(found + b * found_b + h * found_h + start.to(tl.int64) * found_t, found_t, count - start, sums, ROWS, WIDTH, PADDED)


def read_blocks(dtype, width):
    """Block sizes of the forward."""
    return fitting(dtype, Blocks(32, 16, 4, 1), Blocks(32, 32, 4, 1), Blocks(128, 64, 8, 2 if padded(width) > 128 else 3))


def gradient_blocks(dtype, width):
    """Block sizes of the backward."""
    return fitting(
        dtype, Blocks(32, 16, 4, 1), Blocks(32, 32, 4, 1), Blocks(64, 32, 8, 2) if padded(width) > 128 else Blocks(128, 64, 8, 2)
    )


_ALLOWED = {"C7519": "ptxas puts a wait before products whose left operand lies in registers; it serialises nothing"}


def _build(label, kernel, sizes, width, causal, **roles):
    blocks = sizes(torch.bfloat16, width)
    constants = {"WIDTH": width, "PADDED": padded(width), "ROWS": blocks.rows, "KEYS": blocks.keys, "CAUSAL": causal, "valid": None}
    return build(
        f"{label}, p {width}, {'causal' if causal else 'full'}", kernel, constants | roles, blocks.warps, blocks.stages, matrix=True,
        bf16="z keys own other out d_out", kinds={"found": "*fp32" if causal else "*bf16"}, even="t tk count others positions",
        allowed=_ALLOWED,
    )  # fmt: skip


BUILDS: tuple[Build, ...] = tuple(
    built
    for width in (64, 128)
    for built in (
        *(_build("forward", _read_kernel, read_blocks, width, causal) for causal in (True, False)),
        *(
            _build(f"backward, {role}", _gradient_kernel, gradient_blocks, width, causal, AS_QUERY=role != "keys", AS_KEY=role != "queries")
            for role, causal in (("queries", True), ("keys", True), ("both", False))
        ),
    )
)
