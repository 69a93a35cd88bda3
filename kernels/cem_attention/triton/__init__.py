"""CEM's attention in Triton kernels: the pairs are made in registers, the diagonal's part of the scores by the vendor's products.

Nothing is kept for the backward but the inputs, as they came, the output and a number a row and head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.cem_attention.triton import diagonal
from kernels.cem_attention.triton.backward import d_keys, d_pairs, d_queries
from kernels.cem_attention.triton.forward import attend
from kernels.cem_attention.triton.tiles import Part


class Read(torch.autograd.Function):
    """`cem_attention` of float32 or bfloat16; alone = b_self - b_cross, of no dimension, and slopes are float32."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        u: Tensor | None,
        h: Tensor | None,
        d: Tensor | None,
        slopes: Tensor,
        alone: Tensor,
        scale: float,
        causal: bool,
        valid: Tensor | None,
    ) -> Tensor:
        q, k = _unit(q), _unit(k)
        ctx.scale, ctx.causal = scale, causal
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for sequences, rows in diagonal.parts(len(q), 0 if d is None else len(d), q.shape[2], k.shape[2]):
            part = _part(ctx, q, k, u, h, d, slopes, alone, valid, sequences, rows)
            attend(part, out[sequences, :, rows], lse[sequences, :, rows])
        ctx.save_for_backward(q, k, u, h, d, slopes, alone, valid, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, u, h, d, slopes, alone, valid, out, lse = ctx.saved_tensors
        (d_out,) = grads
        d_out = _unit(d_out)
        (b, _, t, _), tk = q.shape, k.shape[2]
        pieces = list(diagonal.parts(b, 0 if d is None else len(d), t, tk))
        cut = len({rows.start for _, rows in pieces}) > 1  # several parts then give to the same keys
        dq, row_terms, d_alone = torch.empty_like(q), torch.empty_like(lse), torch.zeros_like(alone)
        dk = torch.zeros_like(k, dtype=torch.float32) if cut else torch.empty_like(k)
        du = dh = dd = None
        if d is not None:
            du, dd = torch.empty_like(u), torch.zeros_like(d, dtype=torch.float32)
            dh = torch.zeros_like(h, dtype=torch.float32) if cut or len(d) > 1 else torch.empty_like(h)
        for sequences, rows in pieces:
            part = _part(ctx, q, k, u, h, d, slopes, alone, valid, sequences, rows)
            end = part.k.shape[2]
            given = d_out[sequences, :, rows], lse[sequences, :, rows], row_terms[sequences, :, rows]
            d_alone += d_queries(part, out[sequences, :, rows], *given, dq[sequences, :, rows])
            d_keys(part, *given, dk[sequences, :, :end], add=cut)
            if du is not None and dh is not None and dd is not None:
                d_bias = d_pairs(part, *given)
                diagonal.gradients(
                    d_bias, u[sequences, rows], h[sequences, :end], d, part.first, ctx.causal,
                    du[sequences, rows], dh[sequences, :end], dd, add=cut,
                )  # fmt: skip
        dh, dd = (None if x is None else x.to(like.dtype) for x, like in ((dh, h), (dd, d)))
        return dq, dk.to(k.dtype), du, dh, dd, None, d_alone, None, None, None


def _part(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    u: Tensor | None,
    h: Tensor | None,
    d: Tensor | None,
    slopes: Tensor,
    alone: Tensor,
    valid: Tensor | None,
    sequences: slice,
    rows: slice,
) -> Part:
    first = rows.start + k.shape[2] - q.shape[2]
    end = first + rows.stop - rows.start if ctx.causal else k.shape[2]
    c = None
    if u is not None and h is not None and d is not None:
        c = diagonal.bias(u[sequences, rows], h[sequences, :end], d, first, ctx.causal)
    seen = None if valid is None else valid[sequences]
    return Part(q[sequences, :, rows], k[sequences, :, :end], c, slopes, alone, seen, first, ctx.scale, ctx.causal)


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
