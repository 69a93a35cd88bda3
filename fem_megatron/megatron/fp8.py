"""Linear maps that multiply 8-bit floats (train.fp8): y = x W^T and both products of its backward pass.

An operand Q(t) is t / scale rounded to e4m3 (inputs and weights) or e5m2 (gradients). The scale is the smallest power of two that brings
the largest magnitude of the tensor that a rank holds below the type's largest number (``tensorwise``, dynamic). A power of two moves no
mantissa: cuts of one tensor that are scaled apart, by rank or micro-batch, round to the same numbers, but for those below 2^-13 (e4m3) or
2^-28 (e5m2) of the largest. So no rank asks another for a maximum, nothing is kept from step to step, and no checkpoint knows of it.

On a GPU torch's own product of 8-bit operands runs (``torch._scaled_mm``). Elsewhere the same operands are multiplied in fp32: the same
numbers up to the order of sums. Weights stay as they are; a forward pass keeps its input in 8 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_MANTISSA = 23  # bits of an fp32's


class Fp8Linear(nn.Linear):
    """A linear map, its bias in the model's type."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], x's type."""
        y = linear(x, self.weight)
        return y if self.bias is None else y + self.bias


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Q(x) Q(weight)^T: x [..., in], weight [out, in] -> [..., out], x's type. A GPU wants tokens, in and out to be multiples of 16."""
    y: Tensor = _Linear.apply(x, weight)
    return y


class _Linear(torch.autograd.Function):
    """y = Q(x) Q(W)^T, dx = Q(dy) Q(W), dW = Q(dy)^T Q(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows, scale = quantised(x.flatten(0, -2), FORWARD)
        ctx.save_for_backward(rows, scale, weight)
        return product(rows, scale, *quantised(weight, FORWARD), x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, scale, weight = ctx.saved_tensors
        (dy,) = grads
        gradient, own = quantised(dy.flatten(0, -2), BACKWARD)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            narrow, its = quantised(weight, FORWARD)
            dx = product(gradient, own, narrow.t().contiguous(), its, dy.dtype).view(*dy.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            dw = product(gradient.t().contiguous(), own, rows.t().contiguous(), scale, weight.dtype)
        return dx, dw


def quantised(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """t / scale in ``dtype``, and the scale, an fp32 of no dimension. Where t is not finite that is NaN: e4m3 has no infinity."""
    largest = torch.linalg.vector_norm(t, torch.inf, dtype=torch.promote_types(t.dtype, torch.float32)).float()
    # The exponent's bits, one more: the power of two above. 0 and what is denormal have 2^-126.
    exponent = ((largest / torch.finfo(dtype).max).view(torch.int32) >> _MANTISSA) + 1
    scale = (exponent << _MANTISSA).view(torch.float32) + (largest - largest)
    return (t * scale.reciprocal()).to(dtype).contiguous(), scale


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T times both scales: a [m, k], b [n, k], both contiguous 8-bit floats, not both e5m2 -> [m, n] of ``dtype``."""
    if a.is_cuda:
        out: Tensor = torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype)
        return out
    wide = torch.promote_types(dtype, torch.float32)
    return (a.to(wide) @ b.to(wide).t() * a_scale * b_scale).to(dtype)
