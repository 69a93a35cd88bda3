"""Parts shared by recurrent mixers (Mamba-2, DeltaNet): short convolution and time steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu, softplus

from fem_megatron.state import Context


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, context: Context, name: str
) -> Tensor:
    """Return silu(sum_i weight[:, i] x_(t - K + 1 + i) + bias), [s, b, c].

    x [s, b, c], weight [c, K], bias [c]. Padding, and tokens before the first, count as zero. The
    decoding state stores the last K - 1 inputs under ``name``, [b, K - 1, c].
    """

    def read(valid: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _convolved(x, weight, bias, valid, context, name)

    return context.per_document(read, x, each=(weight, bias), passes=True, batch=1, time=0, heads=2)


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    context: Context,
    name: str,
) -> Tensor:
    length = x.shape[0]
    valid = None if valid is None else valid[:, -length:].T
    if valid is not None:
        x = x.masked_fill(~valid[..., None], 0)
    past = context.recall(name)
    before = (
        context.tokens_before(x, weight.shape[1] - 1)
        if past is None
        else past.to(x.dtype).transpose(0, 1)
    )
    x = torch.cat((before, x))
    context.keep(name, x[length:].transpose(0, 1).clone(memory_format=torch.contiguous_format))
    y: Tensor = _Correlation.apply(x, weight.to(x.dtype))
    return silu(y if bias is None else y + bias.to(x.dtype))


class _Correlation(torch.autograd.Function):
    """The sum over i of weight[:, i] x_(t + i): x [s + K - 1, b, c], weight [c, K] -> [s, b, c].

    The gradient of x is a sum of the same form over the result's gradient. Autograd would instead
    create a zero-filled gradient for each of the K filter taps and add them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _correlation(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        taps = weight.shape[1]
        around = dy.new_zeros(taps - 1, *dy.shape[1:])
        dx = _correlation(torch.cat((around, dy, around)), weight.flip(1))
        dw = torch.stack([(x[tap : tap + dy.shape[0]] * dy).sum((0, 1)) for tap in range(taps)], 1)
        return dx, dw


def _correlation(x: Tensor, weight: Tensor) -> Tensor:
    taps = weight.shape[1]
    length = x.shape[0] - taps + 1
    y = x[:length] * weight[:, 0]
    for tap in range(1, taps):
        y = torch.addcmul(y, x[tap : tap + length], weight[:, tap])
    return y


SLOWEST, FASTEST = 0.001, 0.1
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def time_steps(
    raw: Tensor,
    log_rate: Tensor,
    step_bias: Tensor,
    rates: tuple[float, float],
    heads: int,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Return (delta, -A delta) with delta = softplus(raw + b) and A > 0, fp32 or wider.

    raw is [..., local heads], the values of consecutive heads from head ``first`` of ``heads`` on.
    log A = log A_0 + log_rate and b = b_0 + step_bias, with learnable offsets that start at zero.
    The papers sample A_0 uniformly from ``rates`` and softplus(b_0) log-uniformly from 0.001 to
    0.1. This function instead assigns evenly spaced quantiles of both distributions to the heads,
    the second in golden-ratio order. The spread is the same, deterministic and independent of the
    layout.
    """
    wide = torch.promote_types(raw.dtype, torch.float32)
    index = torch.arange(first, first + raw.shape[-1], dtype=torch.float64, device=raw.device)
    low, high = rates
    rate = low + (high - low) * (index + 0.5) / heads
    step = SLOWEST * (FASTEST / SLOWEST) ** ((index + 0.5) * GOLDEN % 1.0)
    bias = step + (-(-step).expm1()).log()
    delta = softplus(raw.to(wide) + (bias.to(wide) + step_bias.to(wide)))
    return delta, -delta * (rate.log().to(wide) + log_rate.to(wide)).exp()
