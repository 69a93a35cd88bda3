"""The free energy as two plain reads under any prior: a stream U beside v, and F - mu from their reads. Nothing here may clip a value.

A constant per (batch, head, channel) cancels out of the free energy. With c the middle of v's range over the sequence (detached) and
x = beta (v - c), a prior that reads [v | U] as [mu | Z] = sum_i p_t(i) [v_i | U_i] gives

    kappa = 0:  U = exp(x)                                        F - mu = log(Z) / beta - (mu - c)
    kappa = 1:  U = exp(x) - 1 - x,  y = beta (mu - c) + Z        F - mu = (log1p(y) - y + Z) / beta

kappa = 1 where beta * range is small: U then carries only what goes beyond the mean, so a small F - mu keeps its digits, above all
in bfloat16.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

MAX_RANGE = 80.0  # of x: |x| <= 40, so p * exp(x) and its gradients, up to exp(80), stay inside float32 and bfloat16
SHIFT_BELOW = 5.0  # kappa = 1 where the range of x is under this
LOWEST_Y = math.expm1(-SHIFT_BELOW / 2)  # y = E[exp(x)] - 1 cannot be less; only rounding can put it there


def compute_type(t: Tensor) -> torch.dtype:
    """float64 for float64, else float32: the type of logs, exponentials and kept sums."""
    return torch.promote_types(t.dtype, torch.float32)


def value_centre_and_range(v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The middle of v's range and the range of beta * v over the sequence, for v [b, h, t, dv] and beta [h, dv].

    Both [b, h, 1, dv], detached, float32 or float64. Source: Free Energy Mixer, the stabilised read; any constant is valid.
    """
    low, high = torch.aminmax(v.detach(), dim=2, keepdim=True)
    low, high = low.to(compute_type(v)), high.to(compute_type(v))
    return (low + high) / 2, beta.detach().to(compute_type(v))[:, None] * (high - low)


class ValueStream(torch.autograd.Function):
    """U [b, h, t, dv] from v, beta and centre [b, h, 1, dv], shifted (kappa = 1 where True); dU/dx = exp(x) - kappa."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, beta: Tensor, centre: Tensor, shifted: Tensor) -> Tensor:
        """U, in v's type (float32 or float64)."""
        x = (v - centre).mul_(beta)
        slope = torch.where(shifted, x.expm1(), x.exp())
        ctx.save_for_backward(x, slope, beta)
        return slope - x * shifted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of v and beta."""
        x, slope, beta = ctx.saved_tensors
        dx = grads[0] * slope
        return dx * beta, (dx * x).sum(2, keepdim=True) / beta, None, None


class FreeEnergyGap(torch.autograd.Function):
    """F - mu >= 0 (Jensen) from the reads mu and Z [b, h, t, dv]. Its two guards undo rounding only, so the gradient ignores them."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, z: Tensor, beta: Tensor, centre: Tensor, shifted: Tensor) -> Tensor:
        """F - mu; beta, centre and shifted as in `ValueStream`."""
        offset = mu - centre
        y = torch.addcmul(z, offset, beta).clamp_(min=LOWEST_Y)
        gap = torch.where(shifted, y.log1p() - y + z, z.log()).div_(beta)
        gap = torch.where(shifted, gap, gap - offset).clamp_(min=0)
        tilt = torch.where(shifted, y / (1 + y), 1)
        ctx.save_for_backward(offset, torch.where(shifted, 1 + y, z) * beta, tilt, gap, beta)
        return gap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of mu, Z and beta."""
        offset, mass, tilt, gap, beta = ctx.saved_tensors
        (d_gap,) = grads
        d_mu = -d_gap * tilt
        d_beta = torch.addcmul(d_mu * offset, d_gap, gap, value=-1).sum(2, keepdim=True) / beta
        return d_mu, d_gap / mass, d_beta, None, None
