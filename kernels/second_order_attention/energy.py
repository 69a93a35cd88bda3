"""The free energies that attention's steps descend, token by token. Pure functions for diagnostics and tests; no parameters here."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.second_order_attention.reference import log_weights


def free_energy(q: Tensor, k: Tensor, temperature: Tensor, seen: Tensor | None = None) -> Tensor:
    """F = -T log sum_i exp(-|q - k_i|^2 / 2T) of any tokens' q among the keys that they see.

    Its gradient in q is r = q - kbar, its Hessian I - C / T: `second_order_attention` has the symbols.
    Shapes: q [b, h, n, d] (turned to its position where k is), k [b, h, tk, d], temperature T [h] > 0, seen bool [n, tk] or [b, 1, n, tk]
    (`reference.allowed_pairs`; None: all). Returns [b, h, n], float32 or wider. n tk terms are held: pass a sample of the tokens.
    Source: Transformers as Intrinsic Optimizers, theorem 2 (its F is the mean over heads).
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    q, k, temperature = q.to(compute), k.to(compute), temperature.to(compute)
    return q.square().sum(-1) / 2 - temperature[:, None] * log_weights(q, k, temperature, seen).logsumexp(-1)


def quadratic_energy(q: Tensor, k: Tensor, seen: Tensor | None = None) -> Tensor:
    """F = -1/2 sum_i (q.k_i)^2, linear attention's energy at T = 1, of any tokens' q among the keys that they see; shapes as `free_energy`.

    Its gradient in q is -sum_i (q.k_i) k_i, minus what `linear.energy_linear_attention` reads. Source: the same paper, theorem 3.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    squares = (q.to(compute) @ k.to(compute).mT).square()
    return -(squares if seen is None else squares.masked_fill(~seen, 0.0)).sum(-1) / 2
