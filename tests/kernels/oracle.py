"""The read written as its definition, all terms at once, and what the tests of this room share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = ("q", "k", "v", "beta", "lam", "gate")


def load(name: str) -> dict[str, Tensor]:
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files if key != "meta"}


def mu_and_free_energy(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    tq, tk = q.shape[2], k.shape[2]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(tq, tk, dtype=torch.bool).triu(1 + tk - tq), -torch.inf)
    joint = scores.log_softmax(-1)[..., None] + (beta[:, None] * v)[:, :, None]
    return scores.softmax(-1) @ v, joint.logsumexp(3) / beta[:, None]


def definition(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, lam: Tensor, gate: Tensor) -> Tensor:
    mu, free_energy = mu_and_free_energy(q, k, v, beta)
    return gate * ((1 - lam) * mu + lam * free_energy)


def inputs(
    tokens: int = 33,
    *,
    queries: int | None = None,
    batch: int = 2,
    heads: int = 3,
    dk: int = 8,
    dv: int = 4,
    beta: float = 1.95,
    value_range: float | None = None,
    sharpness: float = 1.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    """Random q, k, v, beta, lam, gate by name; value_range: v uniform so that beta * v spans about this much."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    queries = tokens if queries is None else queries
    v = normal(batch, heads, tokens, dv)
    if value_range is not None:
        v = (torch.rand(v.shape, generator=rng, dtype=torch.float64) - 0.5) * value_range / beta
    made = {
        "q": normal(batch, heads, queries, dk) * sharpness,
        "k": normal(batch, heads, tokens, dk),
        "v": v,
        "beta": torch.full((heads, dv), beta, dtype=torch.float64),
        "lam": torch.sigmoid(normal(batch, heads, queries, dv)),
        "gate": torch.nn.functional.softplus(normal(batch, heads, queries, dv)),
    }
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def relative(got: Tensor, truth: Tensor) -> float:
    """Norm-wise relative error."""
    got, truth = got.detach(), truth.detach()
    return float((got.double() - truth.double()).norm() / truth.double().norm())


def results(read: Callable[..., Tensor], x: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """The read of x in dtype and its gradients (of a random weighting) with respect to each entry of x."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in x.values()]
    o = read(*leaves)
    w = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [o.detach(), *torch.autograd.grad(o, leaves, w.to(dtype))]
