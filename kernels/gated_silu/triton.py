"""Gate times SiLU in Triton, elementwise, forward and backward. No autotuning.

With s = sigmoid(z), y = gate z s:

    dz = dy gate s (1 + z (1 - s))      dgate = dy z s + the gradient of the gate's later uses
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.implementations import interpreted


def fused(z, gate):
    """Compute `kernels.gated_silu.gated_silu`, which has checked the arguments."""
    return _Gated.apply(z, gate)


class _Gated(torch.autograd.Function):
    """Autograd function (product, gate)."""

    @staticmethod
    def forward(ctx, z, gate):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(z.contiguous(), gate.contiguous())
        y = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        _launch(_forward_kernel, *ctx.to_save, y)
        return y, gate.view_as(gate)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y, d_on):
        if d_y is None:
            return None, d_on
        z, gate = ctx.saved_tensors
        d_z, d_gate = torch.empty_like(z), torch.empty_like(z)
        d_y, d_on = (None if g is None else g.contiguous() for g in (d_y, d_on))
        _launch(_backward_kernel, z, gate, d_y, d_on, d_z, d_gate)
        return d_z, d_gate


def _launch(kernel, z, *others):
    block = 64 if interpreted() else 2048
    kernel[triton.cdiv(z.numel(), block),](z, *others, z.numel(), BLOCK=block, num_warps=8)


@triton.jit
def _loaded(x, count, BLOCK: tl.constexpr):
    """Return a program's numbers of x as float32, their offsets, and which exist."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return tl.load(x + at, mask=at < count, other=0.0).to(tl.float32), at, at < count


@triton.jit
def _forward_kernel(z, gate, y, count, BLOCK: tl.constexpr):
    value, at, mask = _loaded(z, count, BLOCK)
    factor = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, (factor * value * tl.sigmoid(value)).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(z, gate, d_y, d_on, d_z, d_gate, count, BLOCK: tl.constexpr):
    value, at, mask = _loaded(z, count, BLOCK)
    factor = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(d_y + at, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(value)
    slope = grad * factor * s * (1.0 + value * (1.0 - s))
    tl.store(d_z + at, slope.to(d_z.dtype.element_ty), mask=mask)
    of_gate = grad * value * s
    if d_on is not None:
        of_gate += tl.load(d_on + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(d_gate + at, of_gate.to(d_gate.dtype.element_ty), mask=mask)
