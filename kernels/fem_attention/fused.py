"""The free-energy read as standard attention on other values: prep -> torch's fused attention -> epilogue. Nothing here may clip a value.

A constant per (batch, head, channel) cancels out of the free energy. With c the middle of v's range over the sequence (detached) and
x = beta (v - c), torch's attention gives [mu | Z] from the values [v | U]:

    kappa = 0:  U = exp(x)                                        F - mu = log(Z) / beta - (mu - c)
    kappa = 1:  U = exp(x) - 1 - x,  y = beta (mu - c) + Z        F - mu = (log1p(y) - y + Z) / beta

kappa = 1 where beta * range is small: U then carries only what goes beyond the mean, so a small F - mu keeps its digits, above all
in bfloat16.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_RANGE = 80.0  # of x: |x| <= 40, so p * exp(x) and its gradients, up to exp(80), stay inside float32 and bfloat16
SHIFT_BELOW = 5.0  # kappa = 1 where the range of x is under this
LOWEST_Y = math.expm1(-SHIFT_BELOW / 2)  # y = E[exp(x)] - 1 cannot be less; only rounding can put it there


def value_centre_and_range(v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The middle of v's range and the range of beta * v over the sequence: [b, h, 1, dv] each, detached, float32 or float64."""
    low, high = torch.aminmax(v.detach(), dim=2, keepdim=True)
    low, high = low.to(_compute_type(v)), high.to(_compute_type(v))
    return (low + high) / 2, beta.detach().to(_compute_type(v))[:, None] * (high - low)


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    gate: Tensor | None,
    centre: Tensor | None,
    spread: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """The read o = gate * (mu + lam * (F - mu)); arguments as in `fem_attention`.

    centre and spread come from `value_centre_and_range` (None without beta); spread must be at most MAX_RANGE, which the caller checks.
    Prep and epilogue run in float32 for float32 and bfloat16 inputs, in float64 for float64; the attention runs in q's type.
    """
    compute = _compute_type(q)
    if beta is None or centre is None or spread is None:
        out = _attend(q, k, v, causal, scale).to(compute)
    else:
        shifted = spread < SHIFT_BELOW
        inverse_temperature = beta.to(compute)[:, None].expand_as(centre)
        stream = _Stream.apply(v.to(compute), inverse_temperature, centre, shifted)
        mu, z = _attend(q, k, torch.cat((v, stream.to(v.dtype)), dim=-1), causal, scale).to(compute).chunk(2, dim=-1)
        gap = _Gap.apply(mu, z, inverse_temperature, centre, shifted)
        out = mu + (gap if lam is None else lam.to(compute) * gap)
    return (out if gate is None else gate.to(compute) * out).to(q.dtype)


class _Stream(torch.autograd.Function):
    """U [b, h, tk, dv] from v, beta and centre [b, h, 1, dv]; dU/dx = exp(x) - kappa."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, beta: Tensor, centre: Tensor, shifted: Tensor) -> Tensor:
        x = (v - centre).mul_(beta)
        slope = torch.where(shifted, x.expm1(), x.exp())
        ctx.save_for_backward(x, slope, beta)
        return slope - x * shifted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, slope, beta = ctx.saved_tensors
        dx = grads[0] * slope
        return dx * beta, (dx * x).sum(2, keepdim=True) / beta, None, None


class _Gap(torch.autograd.Function):
    """F - mu >= 0 (Jensen) from attention's two outputs [b, h, tq, dv]. Its two guards undo rounding only, so the gradient ignores them."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, z: Tensor, beta: Tensor, centre: Tensor, shifted: Tensor) -> Tensor:
        offset = mu - centre
        y = torch.addcmul(z, offset, beta).clamp_(min=LOWEST_Y)
        gap = torch.where(shifted, y.log1p() - y + z, z.log()).div_(beta)
        gap = torch.where(shifted, gap, gap - offset).clamp_(min=0)
        tilt = torch.where(shifted, y / (1 + y), 1)
        ctx.save_for_backward(offset, torch.where(shifted, 1 + y, z) * beta, tilt, gap, beta)
        return gap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        offset, mass, tilt, gap, beta = ctx.saved_tensors
        (d_gap,) = grads
        d_mu = -d_gap * tilt
        d_beta = torch.addcmul(d_mu * offset, d_gap, gap, value=-1).sum(2, keepdim=True) / beta
        return d_mu, d_gap / mass, d_beta, None, None


def _attend(q: Tensor, k: Tensor, values: Tensor, causal: bool, scale: float) -> Tensor:
    """softmax(scale * q k^T) values by torch's scaled_dot_product_attention; the queries are the last positions of the keys."""
    (tq, width), tk, value_width = q.shape[2:], k.shape[2], values.shape[-1]
    mask = None
    if causal and 1 < tq < tk:
        mask = torch.ones(tq, tk, dtype=torch.bool, device=q.device).tril(tk - tq)
    if q.device.type == "cpu" and width != value_width:
        # The CPU's flash kernel wants equal widths, and padded it still beats the unfused path that runs without it.
        common = max(width, value_width)
        q, k, values = F.pad(q, (0, common - width)), F.pad(k, (0, common - width)), F.pad(values, (0, common - value_width))
    out = F.scaled_dot_product_attention(q, k, values, attn_mask=mask, is_causal=causal and tq == tk, scale=scale)
    return out[..., :value_width]


def _compute_type(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32
