"""The gated delta rule in plain PyTorch, any device: chunks of tokens are solved at once (WY form), their states follow one another.

Within a chunk, with Gamma_ij = exp(g_(j+1) + ... + g_i) for j <= i (else 0) and gamma_i = exp(g_1 + ... + g_i):

    (I + strict_lower(diag(beta) K K^T * Gamma)) [U | W] = diag(beta) [V | gamma K]
    N = U - W S;   O = gamma Q S + (Q K^T * Gamma) N;   S <- gamma_C S + (Gamma_C: K)^T N

Only sums of g over windows, <= 0, are exponentiated, so a decay of any strength is exact; no output reads a later token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def chunked_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Outputs [b, h, t, dv] and the last state [b, h, dk, dv]; all of one type, q already scaled, g the log-decay, ``state`` the first."""
    length, chunk = q.shape[2], min(chunk, q.shape[2])
    missing = -length % chunk
    q, k, v = (pad(x, (0, 0, 0, missing)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    beta, g = (pad(x, (0, missing)).unflatten(2, (-1, chunk)) for x in (beta, g))
    decay, from_start = window_decays(g), g.cumsum(-1).exp()[..., None]

    weighted = beta[..., None] * k
    system = (weighted @ k.mT * decay).tril(-1)
    fresh, erased = _solve(system, torch.cat((beta[..., None] * v, from_start * weighted), dim=-1)).split([v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.mT * decay).tril()
    reads, writes = from_start * q, (decay[..., -1, :, None] * k).mT
    total = from_start[..., -1:, :]

    outputs = []
    for n in range(q.shape[2]):
        new = fresh[:, :, n] - erased[:, :, n] @ state
        outputs.append(reads[:, :, n] @ state + scores[:, :, n] @ new)
        state = total[:, :, n] * state + writes[:, :, n] @ new
    return torch.cat(outputs, dim=2)[:, :, :length], state


def window_decays(g: Tensor) -> Tensor:
    """exp(g_(j+1) + ... + g_i) for j <= i, one above the diagonal: g [..., c] -> [..., c, c].

    Every window is summed by itself: a difference of two long sums would lose a small decay's digits behind a large one.
    """
    size = g.shape[-1]
    outside = torch.ones(size, size, dtype=torch.bool, device=g.device).triu()
    return g[..., None].expand(*g.shape, size).masked_fill(outside, 0.0).cumsum(-2).exp()


def _solve(system: Tensor, right: Tensor) -> Tensor:
    if system.shape[-1] == 1:
        return right
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
