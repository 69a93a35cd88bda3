"""Definition of the free-energy read in plain PyTorch, for any device, exact for any finite values.

    mu[t, j] = sum_i p_t(i) v[i, j]
    F[t, j]  = (1 / beta_j) log sum_i exp(log p_t(i) + beta_j v[i, j])

The log-sum-exp of F has a separate maximum for every (t, j). Do not add approximations. The
[t, j, i] terms are computed block by block, so that memory stays bounded. The block boundaries
depend on shapes alone and a masked term is an exact zero in every sum, so that later tokens never
change a bit of an output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.arguments import without_autocast
from kernels.free_energy.op import mix
from kernels.pairs import readable_keys

# Most terms of a block, [heads, queries, channels, keys], of which the backward holds four tensors:
# about a CPU's cache, or enough to fill a device.
BLOCK_TERMS_CPU, BLOCK_TERMS_DEVICE = 1 << 18, 1 << 24

Bounds = tuple[Tensor, Tensor]


class Tensors(NamedTuple):
    """Tensor arguments of `fem_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    lam: Tensor | None
    gate: Tensor | None


@dataclass(frozen=True)
class Reading:
    """Masks and scale of the scores, as in `fem_attention`, with the bounds of the documents in
    addition to cu_seqlens.
    """

    causal: bool
    scale: float
    keys_valid: Tensor | None = None
    cu_seqlens: Tensor | None = None
    bounds: Bounds | None = None

    def masks(self) -> dict[str, Any]:
        """Return the keyword arguments of this package's kernels."""
        return {
            "causal": self.causal,
            "scale": self.scale,
            "keys_valid": self.keys_valid,
            "bounds": self.bounds,
        }

    def mask(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return which keys each query reads, [b or 1, 1, tq, tk] bool, or None if causality alone
        determines it or every key is read.
        """
        tq, tk = q.shape[2], k.shape[2]
        if self.keys_valid is None and self.bounds is None and not (self.causal and 1 < tq < tk):
            return None
        made = readable_keys(
            tq, tk, q.device, causal=self.causal, keys_valid=self.keys_valid, bounds=self.bounds
        )
        return made if made.dim() == 4 else made[None, None]


def reference_attention(x: Tensors, reading: Reading) -> Tensor:
    """Return the read o = gate * (mu + lam * (F - mu)); arguments as in `fem_attention`.

    bfloat16 is computed in float32 and rounded once, in the result.
    """
    q, k, v, beta, lam, gate = x
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    b, h = q.shape[:2]
    heads = [repeat_heads(t.to(compute), 1, h).flatten(0, 1) for t in (q, k, v)]
    temperature = (
        None
        if beta is None
        else repeat_heads(beta.to(compute), 0, h).expand(b, -1, -1).flatten(0, 1)
    )
    valid = None if reading.keys_valid is None else reading.keys_valid.repeat_interleave(h, dim=0)
    mu, free_energy = (
        t.unflatten(0, (b, h))
        for t in _Read.apply(
            *heads, temperature, valid, reading.bounds, reading.causal, reading.scale
        )
    )
    return mix(mu, None if beta is None else free_energy, lam, gate).to(q.dtype)


def repeat_heads(t: Tensor, dim: int, heads: int) -> Tensor:
    """Return t with each of the kv heads along ``dim`` repeated for the query heads that read it; t
    itself if the counts are equal.
    """
    return t if t.shape[dim] == heads else t.repeat_interleave(heads // t.shape[dim], dim=dim)


class _Read(torch.autograd.Function):
    """(mu, F) of q [n, tq, dk], k [n, tk, dk], v [n, tk, dv], beta [n, dv], valid [n, tk].

    F is uninitialised without beta. The backward recomputes the blocks.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        q, k, v, beta, valid, bounds, causal, scale = given
        mu = q.new_empty(*q.shape[:2], v.shape[2])
        free_energy = torch.empty_like(mu)
        for n, rows, keys in _blocks(q, v, causal):
            log_p = _log_prior(
                q[n, rows], k[n, keys], _allowed(q, k, n, rows, keys, valid, bounds, causal), scale
            )
            mu[n, rows] = log_p.exp() @ v[n, keys]
            if beta is not None:
                free_energy[n, rows] = (
                    _joint_logits(log_p, v[n, keys], beta[n]).logsumexp(-1) / beta[n, None]
                )
        ctx.save_for_backward(q, k, v, beta, valid, free_energy, *(bounds or ()))
        ctx.causal, ctx.scale = causal, scale
        return mu, free_energy

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, valid, free_energy, *documents = ctx.saved_tensors
        bounds = (documents[0], documents[1]) if documents else None
        d_mu, d_free = grads
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        d_beta = torch.zeros_like(v[:, 0])
        for n, rows, keys in _blocks(q, v, ctx.causal):
            log_p = _log_prior(
                q[n, rows],
                k[n, keys],
                _allowed(q, k, n, rows, keys, valid, bounds, ctx.causal),
                ctx.scale,
            )
            p = log_p.exp()
            d_log_p = p * (d_mu[n, rows] @ v[n, keys].mT)
            dv[n, keys] += p.mT @ d_mu[n, rows]
            if beta is not None:
                # w = p exp(beta (v - F)) is computed as one softmax: w is at most 1, but its
                # factors alone may overflow.
                w = _joint_logits(log_p, v[n, keys], beta[n]).softmax(-1)
                d_beta[n] += (
                    ((w * v[n, None, keys].mT).sum(-1) - free_energy[n, rows]) * d_free[n, rows]
                ).sum(1)
                w *= d_free[n, rows, :, None]
                dv[n, keys] += w.sum(1).mT
                d_log_p += (beta[n, None, None].reciprocal() @ w).squeeze(2)
            d_scores = d_log_p - p * d_log_p.sum(-1, keepdim=True)
            dq[n, rows] = d_scores @ k[n, keys] * ctx.scale
            dk[n, keys] += d_scores.mT @ q[n, rows] * ctx.scale
        return dq, dk, dv, None if beta is None else d_beta / beta, None, None, None, None


def _blocks(q: Tensor, v: Tensor, causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices (heads, queries, keys) with a bounded number of terms, at least one query of one
    head each.

    Causal keys end at the last query's own position.
    """
    (n, tq), (tk, channels) = q.shape[:2], v.shape[1:]
    terms = BLOCK_TERMS_CPU if q.device.type == "cpu" else BLOCK_TERMS_DEVICE
    heads_at_once = max(1, min(n, terms // (tq * tk * channels)))
    rows_at_once = max(1, min(tq, terms // (tk * channels)))
    for head in range(0, n, heads_at_once):
        for row in range(0, tq, rows_at_once):
            end = min(row + rows_at_once, tq)
            yield (
                slice(head, min(head + heads_at_once, n)),
                slice(row, end),
                slice(0, end + tk - tq if causal else tk),
            )


def _allowed(
    q: Tensor,
    k: Tensor,
    n: slice,
    rows: slice,
    keys: slice,
    valid: Tensor | None,
    bounds: Bounds | None,
    causal: bool,
) -> Tensor | None:
    """Return the keys that the queries of a block may read, [n or 1, t, i] bool; None: all.

    A query that may read no key reads its own.
    """
    if not causal and valid is None and bounds is None:
        return None
    row = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + k.shape[1] - q.shape[1]
    column = torch.arange(keys.stop, device=q.device)
    allowed = (column <= row if causal else torch.ones_like(column <= row))[None]
    if bounds is not None:
        first, last = (bound[row] for bound in bounds)
        allowed = allowed & (first <= column) & (column < last)
    return allowed if valid is None else (allowed & valid[n, None, keys]) | (column == row)


def _log_prior(q: Tensor, k: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Return log p_t(i) of a block: [n, t, i], -inf for keys that are not read."""
    scores = q @ k.mT * scale
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.log_softmax(-1)


def _joint_logits(log_p: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Return log p_t(i) + beta_j v[i, j]: [n, t, j, i]."""
    return log_p[:, :, None] + (beta[:, None] * v).mT[:, None]
