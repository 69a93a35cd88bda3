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
        blocks, _, sizes = launch_of(rows)
        _forward_kernel[blocks,](rows, weight, second, h, u, eps=eps, **sizes)
        ctx.save_for_backward(rows, weight, second)
        ctx.eps = eps
        return x.view_as(x), h, u

    @staticmethod
    @once_differentiable
    def backward(ctx, d_on, d_h, d_u):
        x, weight, second = ctx.saved_tensors
        d_on, d_h, d_u = (None if g is None else g.contiguous() for g in (d_on, d_h, d_u))
        blocks, each, sizes = launch_of(x)
        programs = triton.cdiv(blocks, each)
        d_x = torch.empty_like(x)
        parts = [
            None
            if t is None
            else torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
            for t in (weight, second)
        ]
        _backward_kernel[programs,](
            x, weight, second, d_on, d_h, d_u, d_x, *parts, eps=ctx.eps, each=each, **sizes
        )
        d_weight, d_second = (
            None if part is None else part.sum(0).to(t.dtype)
            for part, t in zip(parts, (weight, second), strict=True)
        )
        return d_x, d_weight, d_second, None, None


def launch_of(rows):
    """Return the number of blocks of the tokens [..., n], the blocks of each program of a backward,
    and the arguments of both launches.
    """
    size = rows.shape[-1]
    tokens, padded = rows.numel() // size, triton.next_power_of_2(size)
    together = 4 if interpreted() else max(1, NUMBERS // padded)
    blocks = triton.cdiv(tokens, together)
    sizes = {"tokens": tokens, "size": size, "BT": together, "BN": padded}
    options = {"num_warps": 16 if padded > NUMBERS else 8, "num_stages": 1}
    return blocks, triton.cdiv(blocks, 2 if interpreted() else PROGRAMS), sizes | options


@triton.jit
def place(tokens, size, block, BT: tl.constexpr, BN: tl.constexpr, WIDTHS: tl.constexpr = 1):
    """Return channels, offsets of a block's numbers in rows of WIDTHS times as many, and the mask
    of those that exist.
    """
    t, n = block * BT + tl.arange(0, BT), tl.arange(0, BN)
    return (
        n,
        t.to(tl.int64)[:, None] * (size * WIDTHS) + n[None, :],
        (t < tokens)[:, None] & (n < size)[None, :],
    )


@triton.jit
def loaded(x, at, mask):
    """Return x's numbers at these offsets as float32, 0 outside the mask."""
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def channel_weight(weight, n, size):
    """Return the weights [1, BN] of the channels n."""
    return loaded(weight, n, n < size)[None, :]


@triton.jit
def mean(x, size):
    """Return the means [BT, 1] over ``size`` channels of x, which is 0 in the others."""
    return (tl.sum(x, 1) / size)[:, None]


@triton.jit
def normalised(h, second, mask, size, eps):
    """Return z of h and the factor 1 / deviation: LayerNorm's, or RMSNorm's without ``second``."""
    if second is not None:
        h = tl.where(mask, h - mean(h, size), 0.0)
    inverse = 1.0 / tl.sqrt(mean(h * h, size) + eps)
    return h * inverse, inverse


@triton.jit
def _forward_kernel(x, weight, second, h, u, tokens, size, eps, BT: tl.constexpr, BN: tl.constexpr):
    n, at, mask = place(tokens, size, tl.program_id(0), BT, BN)
    value = loaded(x, at, mask)
    value *= 1.0 / tl.sqrt(mean(value * value, size) + eps)
    if weight is not None:
        value *= channel_weight(weight, n, size)
    made = value.to(h.dtype.element_ty)
    tl.store(h + at, made, mask=mask)
    if u is not None:
        z, _ = normalised(made.to(tl.float32), second, mask, size, eps)
        if second is not None:
            z *= channel_weight(second, n, size)
        tl.store(u + at, z.to(u.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    x, weight, second, d_on, d_h, d_u, d_x, d_weights, d_seconds, tokens, size, eps, each,
    BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    of_weight, of_second = tl.zeros((1, BN), tl.float32), tl.zeros((1, BN), tl.float32)
    for block in range(tl.program_id(0) * each, tl.program_id(0) * each + each):
        n, at, mask = place(tokens, size, block, BT, BN)
        value = loaded(x, at, mask)
        r = 1.0 / tl.sqrt(mean(value * value, size) + eps)
        value *= r
        g = tl.zeros((BT, BN), tl.float32)
        if d_h is not None:
            g += loaded(d_h, at, mask)
        if d_u is not None:
            made = value
            if weight is not None:
                made *= channel_weight(weight, n, size)
            z, inverse = normalised(
                made.to(x.dtype.element_ty).to(tl.float32), second, mask, size, eps
            )
            dz = loaded(d_u, at, mask)
            if second is not None:
                of_second += tl.sum(dz * z, 0)[None, :]
                dz *= channel_weight(second, n, size)
                g -= inverse * mean(dz, size)
            g += inverse * (dz - z * mean(dz * z, size))
        g = tl.where(mask, g, 0.0)
        if weight is not None:
            of_weight += tl.sum(g * value, 0)[None, :]
            g *= channel_weight(weight, n, size)
        dx = r * (g - value * mean(g * value, size))
        if d_on is not None:
            dx += loaded(d_on, at, mask)
        tl.store(d_x + at, dx.to(d_x.dtype.element_ty), mask=mask)
    n = tl.arange(0, BN)[None, :]
    to = tl.program_id(0) * size + n
    if d_weights is not None:
        tl.store(d_weights + to, of_weight, mask=n < size)
    if d_seconds is not None:
        tl.store(d_seconds + to, of_second, mask=n < size)
