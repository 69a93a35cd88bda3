"""RoPE's rotation in Triton: queries and keys in one launch, forward and backward. No autotuning.

A program rotates some tokens of one head. The backward pass is the same kernel with the opposite
angle, so only cos and sin are stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.implementations import interpreted
from kernels.tiles import padded, rows_of, strides_of

PAIRS, WARPS = 2048, 4  # approximate size of a program


def rotated(q, k, cos, sin):
    """Compute `kernels.rotary.rotary`, which has checked the arguments."""
    return [t for t in _Rotary.apply(cos.contiguous(), sin.contiguous(), q, k) if t is not None]


class _Rotary(torch.autograd.Function):
    """Autograd function that returns q and k rotated; k may be None."""

    @staticmethod
    def forward(ctx, cos, sin, q, k):
        ctx.save_for_backward(cos, sin)
        return _launch(cos, sin, q, k, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return None, None, *_launch(*ctx.saved_tensors, *grads, back=True)


def _launch(cos, sin, q, k, *, back):
    q, k = (None if t is None else rows_of(t) for t in (q, k))
    made = [None if t is None else t.new_empty(t.shape) for t in (q, k)]
    tokens, sequences, half = q.shape[0] * q.shape[1], q.shape[1], q.shape[3] // 2
    heads = q.shape[2] + (0 if k is None else k.shape[2])
    rows = max(1, (64 if interpreted() else PAIRS) // padded(half))
    counts = tokens, q.shape[2], heads, sequences, sequences if cos.shape[1] == 1 else 1
    grid = (triton.cdiv(tokens, rows) * heads,)
    _rotary_kernel[grid](
        q,
        k,
        cos,
        sin,
        *made,
        *strides_of(q, k),
        *counts,
        HALF=half,
        BACK=back,
        ROWS=rows,
        num_warps=WARPS,
    )
    return tuple(made)


@triton.jit
def _rotate(x, out, c, s, column, there, HALF: tl.constexpr):
    """Store the rotated rows of x, which begin at the addresses x, at ``out``."""
    first = tl.load(x + column, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + column, (first * c - second * s).to(out.dtype.element_ty), mask=there)
    tl.store(out + HALF + column, (second * c + first * s).to(out.dtype.element_ty), mask=there)


@triton.jit
def _rotary_kernel(
    q, k, cos, sin, q_out, k_out, qt, qb, qh, kt, kb, kh, tokens, q_heads, heads, batch, share,
    HALF: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of q and of k. The heads of the same tokens are neighbouring programs;
    ``share`` sequences have the same angles.
    """
    token = (tl.program_id(0) // heads * ROWS).to(tl.int64) + tl.arange(0, ROWS)[:, None]
    head = tl.program_id(0) % heads
    column = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    there = (token < tokens) & (column < HALF)
    angle = token // share * HALF + column
    c = tl.load(cos + angle, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=there, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    t, b = token // batch, token % batch
    if head < q_heads:
        _rotate(
            q + t * qt + b * qb + head * qh,
            q_out + (token * q_heads + head) * (2 * HALF),
            c,
            s,
            column,
            there,
            HALF,
        )
    elif k is not None:
        at = head - q_heads
        _rotate(
            k + t * kt + b * kb + at * kh,
            k_out + (token * (heads - q_heads) + at) * (2 * HALF),
            c,
            s,
            column,
            there,
            HALF,
        )
