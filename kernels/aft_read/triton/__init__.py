"""AFT's read in Triton, forward and backward, as one autograd function. The mathematics is in the kernels' files."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from kernels.aft_read.triton.backward import launch_backward
from kernels.aft_read.triton.forward import launch_forward
from kernels.tiles import rows_of


def fused_past(k, v, beta, lam, gate, query, valid, state):
    """(o, state) as `aft_read` says, all [b, h, t, d]; beta float32 or None, state float32 or None, one logit for each value."""
    beta, valid, state = (None if x is None else x.contiguous() for x in (beta, valid, state))
    lam, gate, query = (None if x is None else rows_of(x) for x in (lam, gate, query))
    return _Read.apply(
        rows_of(k),
        rows_of(v),
        beta,
        lam,
        gate,
        query,
        valid,
        state,
    )


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, v, beta, lam, gate, query, valid, state):
        o, after, kept = launch_forward(k, v, beta, lam, gate, query, valid, state, any(ctx.needs_input_grad))
        ctx.save_for_backward(k, v, beta, lam, gate, query, valid, kept)
        ctx.mark_non_differentiable(after)
        return o, after

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, _):
        return *launch_backward(rows_of(d_o), *ctx.saved_tensors), None, None
