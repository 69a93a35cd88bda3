"""Residual stream's norms in Triton: some tokens in each program, all their channels in registers,
forward and backward. No autotuning.

The backward recomputes h from x, which the residual stores anyway. With n = x r, r = 1 / rms(x), h
= n w, z = (h - mean) / deviation, u = z s, ds' = du s and g the gradient of n:

    g = w (dh + (ds' - mean(ds') - z mean(ds' z)) / deviation)
    dx = r (g - n mean(g n)) + the residual's own gradient
    dw = sum_t (g / w) n      ds = sum_t du z

If the second norm is an RMSNorm, z = h / rms(h), s = 1, and mean(ds') is left out.

Each program writes a partial sum of the weights' gradients; the partial sums are added afterwards,
so every run gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.implementations import interpreted

NUMBERS = 2048  # most of a block that has several tokens
PROGRAMS = 264  # two for each of an H100's multiprocessors, limited by its registers


def fused_norms(x, weight, second, eps, twice):
    """Compute `kernels.residual_norm.residual_norm`, which has checked the arguments."""
    return _Norms.apply(x, weight, second, eps, twice)


class _Norms(torch.autograd.Function):
    """Autograd function (x, h, u or None)."""

    @staticmethod
    def forward(ctx, x, weight, second, eps, twice):
        ctx.set_materialize_grads(False)
        rows, weight, second = (None if t is None else t.contiguous() for t in (x, weight, second))
        h = torch.empty_like(rows)
        u = torch.empty_like(rows) if twice or second is not None else None
        tokens, size = rows.numel() // rows.shape[-1], rows.shape[-1]
        constants = _constants(size)
        _forward_kernel[triton.cdiv(tokens, constants["BT"]),](
            rows, weight, second, h, u, tokens, size, eps, **constants
        )
        ctx.save_for_backward(rows, weight, second)
        ctx.eps = eps
        return x.view_as(x), h, u

    @staticmethod
    @once_differentiable
    def backward(ctx, d_on, d_h, d_u):
        x, weight, second = ctx.saved_tensors
        d_on, d_h, d_u = (None if g is None else g.contiguous() for g in (d_on, d_h, d_u))
        tokens, size = x.numel() // x.shape[-1], x.shape[-1]
        constants = _constants(size)
        blocks = triton.cdiv(tokens, constants["BT"])
        each = triton.cdiv(blocks, 2 if interpreted() else PROGRAMS)
        programs = triton.cdiv(blocks, each)
        d_x = torch.empty_like(x)
        parts = [
            None if t is None else torch.empty(programs, size, dtype=torch.float32, device=x.device)
            for t in (weight, second)
        ]
        _backward_kernel[programs,](
            x, weight, second, d_on, d_h, d_u, d_x, *parts, tokens, size, ctx.eps, each, **constants
        )
        d_weight, d_second = (
            None if part is None else part.sum(0).to(t.dtype)
            for part, t in zip(parts, (weight, second), strict=True)
        )
        return d_x, d_weight, d_second, None, None


def _constants(size):
    padded = triton.next_power_of_2(size)
    tokens = 4 if interpreted() else max(1, NUMBERS // padded)
    return {"BT": tokens, "BN": padded, "num_warps": 16 if padded > NUMBERS else 8, "num_stages": 1}


@triton.jit
def _place(tokens, size, block, BT: tl.constexpr, BN: tl.constexpr):
    """Return channels, offsets of a block's numbers, and the mask of those that exist."""
    t, n = block * BT + tl.arange(0, BT), tl.arange(0, BN)
    return (
        n,
        t.to(tl.int64)[:, None] * size + n[None, :],
        (t < tokens)[:, None] & (n < size)[None, :],
    )


@triton.jit
def _weight(weight, n, size):
    return tl.load(weight + n, mask=n < size, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _mean(x, size):
    return (tl.sum(x, 1) / size)[:, None]


@triton.jit
def _second(h, second, mask, size, eps):
    """Return z of h and the factor 1 / deviation: LayerNorm's, or RMSNorm's without ``second``."""
    if second is not None:
        h = tl.where(mask, h - _mean(h, size), 0.0)
    inverse = 1.0 / tl.sqrt(_mean(h * h, size) + eps)
    return h * inverse, inverse


@triton.jit
def _forward_kernel(x, weight, second, h, u, tokens, size, eps, BT: tl.constexpr, BN: tl.constexpr):
    n, at, mask = _place(tokens, size, tl.program_id(0), BT, BN)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    value *= 1.0 / tl.sqrt(_mean(value * value, size) + eps)
    if weight is not None:
        value *= _weight(weight, n, size)
    made = value.to(h.dtype.element_ty)
    tl.store(h + at, made, mask=mask)
    if u is not None:
        z, _ = _second(made.to(tl.float32), second, mask, size, eps)
        if second is not None:
            z *= _weight(second, n, size)
        tl.store(u + at, z.to(u.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    x, weight, second, d_on, d_h, d_u, d_x, d_weights, d_seconds, tokens, size, eps, each,
    BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    of_weight, of_second = tl.zeros((1, BN), tl.float32), tl.zeros((1, BN), tl.float32)
    for block in range(tl.program_id(0) * each, tl.program_id(0) * each + each):
        n, at, mask = _place(tokens, size, block, BT, BN)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt(_mean(value * value, size) + eps)
        value *= r
        g = tl.zeros((BT, BN), tl.float32)
        if d_h is not None:
            g += tl.load(d_h + at, mask=mask, other=0.0).to(tl.float32)
        if d_u is not None:
            made = value
            if weight is not None:
                made *= _weight(weight, n, size)
            z, inverse = _second(
                made.to(x.dtype.element_ty).to(tl.float32), second, mask, size, eps
            )
            dz = tl.load(d_u + at, mask=mask, other=0.0).to(tl.float32)
            if second is not None:
                of_second += tl.sum(dz * z, 0)[None, :]
                dz *= _weight(second, n, size)
                g -= inverse * _mean(dz, size)
            g += inverse * (dz - z * _mean(dz * z, size))
        g = tl.where(mask, g, 0.0)
        if weight is not None:
            of_weight += tl.sum(g * value, 0)[None, :]
            g *= _weight(weight, n, size)
        dx = r * (g - value * _mean(g * value, size))
        if d_on is not None:
            dx += tl.load(d_on + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_x + at, dx.to(d_x.dtype.element_ty), mask=mask)
    n = tl.arange(0, BN)[None, :]
    to = tl.program_id(0) * size + n
    if d_weights is not None:
        tl.store(d_weights + to, of_weight, mask=n < size)
    if d_seconds is not None:
        tl.store(d_seconds + to, of_second, mask=n < size)
