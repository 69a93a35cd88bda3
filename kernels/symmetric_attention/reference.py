"""Attention of z with itself by its definition, in blocks of rows: plain PyTorch, any device. Memory stays linear in the tokens.

The scores are symmetric, so the log-sum-exp of a column is that of the row of the same number, and softmax over columns is the transpose
P^T of softmax over rows: a block of rows of P gives its own rows of P z, and its share of every row of P^T z, in one pass.
How blocks are cut depends on shapes alone and a masked pair is an exact zero, so no bit of an output depends on later tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.pairs import allowed_pairs

# [b, h, rows, keys] terms held at once: a CPU's cache, or enough to fill a device.
BLOCK_TERMS_CPU, BLOCK_TERMS_DEVICE = 1 << 20, 1 << 26


def pairwise_attention(z: Tensor, keys: Tensor, *, kind: str, causal: bool, valid: Tensor | None) -> Tensor:
    """As `symmetric_attention`, for every kind; the result in z's type, computed in float32 (float64 for float64)."""
    found: Tensor = _Pairs.apply(z, keys, kind, causal, valid)
    return found


class _Pairs(torch.autograd.Function):
    """A(q k^T) k of q [b, h, tq, p], k [b, h, tk, p], plus A^T q for bisoftmax (where q = k); the backward remakes the blocks.

    q and k are kept as they come, and are float32 (float64 for float64) while their blocks are made.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, keys: Tensor, kind: str, causal: bool, valid: Tensor | None) -> Tensor:
        q, k = _wide(z), _wide(keys)
        out = torch.zeros_like(q)
        for rows in _blocks(q, k):
            weights, _ = _weights(q, k, rows, kind, causal, valid)
            seen = k[:, :, : weights.shape[-1]]
            out[:, :, rows] += weights @ seen
            if kind == "bisoftmax":
                out += weights.mT @ q[:, :, rows]
        ctx.save_for_backward(z, keys, valid)
        ctx.kind, ctx.causal = kind, causal
        return out.to(z.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, keys, valid = ctx.saved_tensors
        q, k, d_out = (_wide(x) for x in (z, keys, *grads))
        dq, dk = torch.zeros_like(q), torch.zeros_like(k)
        scale = q.shape[-1] ** -0.5
        for rows in _blocks(q, k):
            weights, scores = _weights(q, k, rows, ctx.kind, ctx.causal, valid)
            seen = slice(0, weights.shape[-1])
            d_weights = d_out[:, :, rows] @ k[:, :, seen].mT
            dk[:, :, seen] += weights.mT @ d_out[:, :, rows]
            if ctx.kind == "bisoftmax":
                d_weights += q[:, :, rows] @ d_out.mT
                dq[:, :, rows] += weights @ d_out
            if ctx.kind == "sigmoid":
                d_scores = d_weights * weights * (-scores / 2).tanh()
            else:
                d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
            dq[:, :, rows] += d_scores @ k[:, :, seen] * scale
            dk[:, :, seen] += d_scores.mT @ q[:, :, rows] * scale
        return dq.to(z.dtype), dk.to(keys.dtype), None, None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Rows of q, in order, as many at a time as the bound on terms allows, at least one."""
    terms = BLOCK_TERMS_CPU if q.device.type == "cpu" else BLOCK_TERMS_DEVICE
    at_once = max(1, terms // (q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], at_once):
        yield slice(start, min(start + at_once, q.shape[2]))


def _weights(q: Tensor, k: Tensor, rows: slice, kind: str, causal: bool, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """(A, s) [b, h, rows, keys] of a block, over the keys that its last row may see; A is zero where a pair is not seen."""
    tq, tk = q.shape[2], k.shape[2]
    end = rows.stop + tk - tq if causal else tk
    scores = q[:, :, rows] @ k[:, :, :end].mT * q.shape[-1] ** -0.5
    seen = allowed_pairs(torch.arange(rows.start, rows.stop, device=q.device) + tk - tq, tk, causal, valid)
    if seen is not None:
        seen = seen[..., :end]
    if kind == "sigmoid":
        weights = scores.sigmoid() * (-scores).sigmoid()
        if seen is not None:
            weights, scores = weights.masked_fill(~seen, 0.0), scores.masked_fill(~seen, 0.0)
        return weights, scores
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1), scores
