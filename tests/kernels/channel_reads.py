"""The reads with a distribution for each channel, AFT's and the state-space model's, seen alike: inputs, definitions, calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.aft_read import aft_read
from kernels.ssm_read import ssm_read

Tensors = dict[str, Tensor]
Read = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Op:
    """A read: its prior's random inputs, log of its unnormalised weights [b, h, t, i, d], the call, and whether the weights sum to one."""

    prior: Callable[[torch.Generator, int, int, int, int], Tensors]
    log_weights: Callable[[Tensors], Tensor]
    read: Read
    normalised: bool = True
    per_token: tuple[str, ...] = ()


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def aft_prior(rng: torch.Generator, b: int, h: int, t: int, d: int) -> Tensors:
    return {"k": 2 * normal(rng, b, h, t, d)}


def aft_log_weights(x: Tensors) -> Tensor:
    return x["k"][:, :, None].expand(-1, -1, x["k"].shape[2], -1, -1)


def ssm_prior(rng: torch.Generator, b: int, h: int, t: int, d: int, n: int = 3) -> Tensors:
    def positive(*shape: int) -> Tensor:
        return torch.nn.functional.softplus(normal(rng, *shape)) + 1e-3

    return {
        "delta": positive(b, h, t, d),
        "rate": positive(h, d, n),
        "b_in": positive(b, h, t, n),
        "c_out": positive(b, h, t, n),
    }


def ssm_log_weights(x: Tensors) -> Tensor:
    through = x["delta"].cumsum(2)
    before = through - x["delta"]
    future = torch.ones(through.shape[2], through.shape[2], dtype=torch.bool).triu(1)[:, :, None]
    span = torch.where(future, before[:, :, None] - before[:, :, :, None], through[:, :, :, None] - through[:, :, None])
    modes = x["c_out"][:, :, :, None, None].log() + x["b_in"][:, :, None, :, None].log() - span[..., None] * x["rate"][:, None, None]
    return modes.logsumexp(-1) + x["delta"][:, :, None].log()


def call_aft(prior: Tensors, *rest: Tensor | None, **options: object) -> tuple[Tensor, Tensor | None]:
    return aft_read(prior["k"], *rest, **options)  # type: ignore[arg-type]


def call_ssm(prior: Tensors, *rest: Tensor | None, **options: object) -> tuple[Tensor, Tensor | None]:
    return ssm_read(prior["delta"], prior["rate"], prior["b_in"], prior["c_out"], *rest, **options)  # type: ignore[arg-type]


def call_raw_ssm(prior: Tensors, *rest: Tensor | None, **options: object) -> tuple[Tensor, Tensor | None]:
    return call_ssm(prior, *rest, normalise=False, **options)


OPS = {
    "aft": Op(aft_prior, aft_log_weights, call_aft, per_token=("k",)),
    "ssm": Op(ssm_prior, ssm_log_weights, call_ssm, per_token=("delta", "b_in", "c_out")),
    "ssm_not_normalised": Op(ssm_prior, ssm_log_weights, call_raw_ssm, normalised=False, per_token=("delta", "b_in", "c_out")),
}


def inputs(op: Op, tokens: int, batch: int = 2, heads: int = 2, channels: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensors]:
    """[prior, v beta lam gate]."""
    rng = torch.Generator().manual_seed(tokens)
    prior = op.prior(rng, batch, heads, tokens, channels)
    shape = (batch, heads, tokens, channels)
    rest = {
        "v": normal(rng, *shape),
        "beta": torch.rand(heads, channels, generator=rng, dtype=torch.float64) + 1.0,
        "lam": normal(rng, *shape).sigmoid(),
        "gate": torch.nn.functional.softplus(normal(rng, *shape)),
    }
    return [{name: t.to(dtype) for name, t in part.items()} for part in (prior, rest)]


def definition(op: Op, prior: Tensors, rest: Tensors, causal: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(mu, F, o), all weights at once."""
    v, beta = rest["v"], rest["beta"][:, None, None]
    logs = op.log_weights(prior)
    if causal:
        future = torch.ones(v.shape[2], v.shape[2], dtype=torch.bool).triu(1)[:, :, None]
        logs = logs.masked_fill(future, -torch.inf)
    if op.normalised:
        logs = logs.log_softmax(3)
    mu = (logs.exp() * v[:, :, None]).sum(3)
    free_energy = (logs + beta * v[:, :, None]).logsumexp(3) / beta[:, 0]
    return mu, free_energy, rest["gate"] * (mu + rest["lam"] * (free_energy - mu))
