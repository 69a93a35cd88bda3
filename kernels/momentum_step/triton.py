"""Step with momentum in Triton: some tokens in each program, all their channels in registers,
forward and backward. No autotuning.

The backward recomputes a = beta v + gamma f. With z = (a - mean) / deviation, v' = z w, and the
gradient g = dx' + dv' of v':

    da = (g w - mean(g w) - z mean(g w z)) / deviation      dw = sum_t g z
    dx = dx'    dv = beta da    df = gamma da    dbeta = sum da v    dgamma = sum da f

Each program writes a partial sum of the gradients of w, beta and gamma; the partial sums are added
afterwards, so every run gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.residual_norm.triton import channel_weight, launch_of, loaded, mean, normalised, place


def fused(stream, step, beta, gamma, weight, eps):
    """Compute `kernels.momentum_step.momentum_step`, which has checked the arguments."""
    return _Step.apply(stream, step, beta, gamma, weight, eps)


class _Step(torch.autograd.Function):
    """Autograd function of [x' | v']."""

    @staticmethod
    def forward(ctx, stream, step, beta, gamma, weight, eps):
        ctx.save_for_backward(*(t.contiguous() for t in (stream, step, beta, gamma, weight)))
        ctx.eps = eps
        stream, step, *_ = ctx.to_save
        out = torch.empty_like(stream)
        blocks, _, sizes = launch_of(step)
        _forward_kernel[blocks,](*ctx.to_save, out, eps=eps, **sizes)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        stream, step, beta, gamma, weight = ctx.saved_tensors
        size = step.shape[-1]
        blocks, each, sizes = launch_of(step)
        programs = triton.cdiv(blocks, each)
        d_stream, d_step = torch.empty_like(stream), torch.empty_like(step)
        parts = torch.empty(programs, size + 2, dtype=torch.float32, device=step.device)
        _backward_kernel[programs,](
            stream.view(-1, 2 * size)[:, size:], step, beta, gamma, weight, d_out.contiguous(),
            d_stream, d_step, parts, eps=ctx.eps, each=each, **sizes,
        )  # fmt: skip
        sums = zip(parts.sum(0).split([1, 1, size]), (beta, gamma, weight), strict=True)
        return d_stream, d_step, *(each.to(t.dtype) for each, t in sums), None


@triton.jit
def _forward_kernel(
    packed, step, beta, gamma, weight, out, tokens, size, eps, BT: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    n, at, mask = place(tokens, size, tl.program_id(0), BT, BN)
    _, wide, _ = place(tokens, size, tl.program_id(0), BT, BN, 2)
    a = tl.load(beta).to(tl.float32) * loaded(packed + size, wide, mask)
    a += tl.load(gamma).to(tl.float32) * loaded(step, at, mask)
    z, _ = normalised(a, weight, mask, size, eps)
    v = (z * channel_weight(weight, n, size)).to(out.dtype.element_ty)
    x = loaded(packed, wide, mask) + v.to(tl.float32)
    tl.store(out + wide, x.to(out.dtype.element_ty), mask=mask)
    tl.store(out + size + wide, v, mask=mask)


@triton.jit
def _backward_kernel(
    velocity, step, beta, gamma, weight, d_out, d_stream, d_step, parts, tokens, size, eps, each,
    BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    of_weight, of_beta = tl.zeros((1, BN), tl.float32), tl.zeros((1, BN), tl.float32)
    of_gamma = tl.zeros((1, BN), tl.float32)
    share, gain = tl.load(beta).to(tl.float32), tl.load(gamma).to(tl.float32)
    for block in range(tl.program_id(0) * each, tl.program_id(0) * each + each):
        n, at, mask = place(tokens, size, block, BT, BN)
        _, wide, _ = place(tokens, size, block, BT, BN, 2)
        v, f = loaded(velocity, wide, mask), loaded(step, at, mask)
        z, inverse = normalised(share * v + gain * f, weight, mask, size, eps)
        d_x = loaded(d_out, wide, mask)
        tl.store(d_stream + wide, d_x.to(d_stream.dtype.element_ty), mask=mask)
        g = d_x + loaded(d_out + size, wide, mask)
        of_weight += tl.sum(g * z, 0)[None, :]
        g *= channel_weight(weight, n, size)
        da = inverse * (g - mean(g, size) - z * mean(g * z, size))
        of_beta += tl.sum(da * v, 0)[None, :]
        of_gamma += tl.sum(da * f, 0)[None, :]
        tl.store(d_stream + size + wide, (share * da).to(d_stream.dtype.element_ty), mask=mask)
        tl.store(d_step + at, (gain * da).to(d_step.dtype.element_ty), mask=mask)
    n = tl.arange(0, BN)[None, :]
    to = parts + tl.program_id(0) * (size + 2)
    tl.store(to, tl.sum(of_beta))
    tl.store(to + 1, tl.sum(of_gamma))
    tl.store(to + 2 + n, of_weight, mask=n < size)
