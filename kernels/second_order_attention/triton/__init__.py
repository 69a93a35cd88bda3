"""MHA2nd1st's step with its two flash passes in Triton, differentiable; the rest of it is the reference's own. No kernels here.

The passes work in the frame to which k is turned: turning is linear, so q, u and the reads are turned outside them.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable

from kernels.second_order_attention.reference import in_own_frame, residual, rotated, solve_gram
from kernels.second_order_attention.triton.backward import gradients
from kernels.second_order_attention.triton.forward import means, second
from kernels.tiles import rows_of


def first_order_step(q, k, gram, temperature, newton, turn, *, causal, valid, jitter):
    """r + G^-1 (C / T') G r as `reference.step` without exact, q and k float32 or bfloat16, the rest float32: [b, h, t, d] in q's type.

    Products of q, k, u and gradients are in q's type, sums over keys, r, u and the system in float32.
    """
    own = q.to(torch.float32)
    turned, k = rows_of(rotated(own, turn).to(k.dtype)), rows_of(k)
    with torch.no_grad():
        half = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).square() / 2
        factors = math.log2(math.e) / temperature
    mean, levels = _Means.apply(turned, k, temperature, half, factors, valid, causal)
    r, u = residual(own, mean, gram, turn)
    product = _Second.apply(turned, k, u, temperature, half, factors, mean.detach(), levels, valid, causal)
    return (r + solve_gram(gram, in_own_frame(product, newton, turn), jitter)).to(q.dtype)


class _Means(torch.autograd.Function):
    """As `means`; log-sum-exp and mean score have no gradient. Differentiable in q, k and T."""

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
        d_q, d_k, _, d_temperature = gradients(q, k, None, g, half, factors, mean, levels, None, None, valid, ctx.causal)
        return d_q, d_k, d_temperature, None, None, None, None


class _Second(torch.autograd.Function):
    """C u, float32, differentiable in q, k, u and T; kbar and the levels are what the other pass found, and have no gradient here.

    That is exact: C depends on them through q, k and T alone, and its derivative is written in those.
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
        d_q, d_k, d_u, d_temperature = gradients(q, k, u, g, half, factors, mean, levels, read, centre, valid, ctx.causal)
        return d_q, d_k, d_u, d_temperature, None, None, None, None, None, None
