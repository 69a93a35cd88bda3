"""The definition of the free-energy read under any prior, block by block: exact for any finite values. No approximation may come in.

    mu[t, j] = sum_i p_t(i) v[i, j]          F[t, j] = (1 / beta_j) log sum_i exp(log p_t(i) + beta_j v[i, j])

with its own maximum for every (t, j). How blocks are cut depends on shapes alone and an unread key is an exact zero in every sum, so an
output never moves by a bit when later tokens change. Time O(T^2); the backward remakes each block, so memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# [batch, heads, rows, channels, keys] terms of a block: a CPU's cache or so, or enough to fill a device.
BLOCK_TERMS_CPU, BLOCK_TERMS_DEVICE = 1 << 20, 1 << 24


def exact_read(
    v: Tensor, beta: Tensor | None, log_weights: Callable[[int, int], Tensor], *, terms: int = 1
) -> tuple[Tensor, Tensor | None]:
    """(mu, F), each [b, h, t, dv], of v [b, h, t, dv] (float32 or float64) and beta [h, dv]; F is None without beta.

    log_weights(start, stop): log weights [b, h, stop - start, t] of the rows start to stop, -inf for unread keys, at least one of them
    finite; normalised here. terms: numbers that it holds for one weight (for the size of a block).
    """
    b, h, t, dv = v.shape
    budget = BLOCK_TERMS_CPU if v.device.type == "cpu" else BLOCK_TERMS_DEVICE
    size = max(1, min(t, budget // (b * h * t * max(dv, terms))))

    def rows(start: int, stop: int, v: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        log_p = log_weights(start, stop).log_softmax(-1)
        mu = log_p.exp() @ v
        if beta is None:
            return mu, None
        return mu, _FreeEnergy.apply(log_p, v, beta)

    reads = [
        checkpoint(rows, start, min(start + size, t), v, beta, use_reentrant=False, preserve_rng_state=False) for start in range(0, t, size)
    ]
    mu = torch.cat([read[0] for read in reads], dim=2)
    return mu, None if beta is None else torch.cat([read[1] for read in reads], dim=2)


class _FreeEnergy(torch.autograd.Function):
    """F [b, h, rows, dv] of log_p [b, h, rows, t], v and beta. The backward keeps E_w[v] - F together: alone they may be large."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        free_energy = _joint(log_p, v, beta).logsumexp(-1) / beta[:, None]
        ctx.save_for_backward(log_p, v, beta, free_energy)
        return free_energy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        log_p, v, beta, free_energy = ctx.saved_tensors
        (d_free,) = grads
        # w = p exp(beta (v - F)) as one softmax: its factors alone may overflow, w is at most 1.
        w = _joint(log_p, v, beta).softmax(-1)
        d_beta = (((w * v.mT[:, :, None]).sum(-1) - free_energy) * d_free).sum((0, 2)) / beta
        w = w * d_free[..., None]
        return (w / beta[:, None, :, None]).sum(3), w.sum(2).mT, d_beta


def _joint(log_p: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """log p_t(i) + beta_j v[i, j]: [b, h, rows, dv, t]."""
    return log_p[:, :, :, None] + (beta[:, None] * v).mT[:, :, None]
