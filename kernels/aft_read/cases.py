"""AFT's read's cases: values and logits of any range, every part of the read left out, padding, a query inside."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.aft_read import aft_read
from kernels.check import Inputs, Outputs, Suite


def _random(size: Mapping[str, int], beta: float = 1.95, spread: float = 2.0, value_range: float | None = None) -> Inputs:
    """value_range: v uniform, so that beta * v spans this much."""
    rng = torch.Generator().manual_seed(size["tokens"])
    shape = (size["batch"], size["heads"], size["tokens"], size["channels"])
    k, v, lam, gate = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(4))
    if value_range is not None:
        v = (torch.rand(shape, generator=rng, dtype=torch.float64) - 0.5) * value_range / beta
    temperature = torch.full((size["heads"], size["channels"]), beta, dtype=torch.float64)
    return {"k": spread * k, "v": v, "beta": temperature, "lam": lam.sigmoid(), "gate": torch.nn.functional.softplus(gate)}


def _ramp(size: Mapping[str, int]) -> Inputs:
    made = _random(size)
    ramp = torch.linspace(-70, 70, size["tokens"], dtype=torch.float64)[:, None] / 1.95
    return {**made, "v": torch.where(torch.arange(size["heads"])[:, None, None] % 2 == 0, ramp, -ramp).expand_as(made["v"]).clone()}


def _equal(size: Mapping[str, int]) -> Inputs:
    """Equal values in the first channel, whose gradients of k, beta and lam are then 0; the others keep the norms from being 0."""
    made = _random(size)
    made["v"][..., 0] = 0.75
    return made


def _underflow(size: Mapping[str, int]) -> Inputs:
    """After a third of the tokens the prior keeps that one, and all later ones underflow; in odd channels the last ones take over."""
    made = _random(size)
    made["k"][:, :, size["tokens"] // 3] += 300
    made["k"][:, :, -3:, 1::2] += 600
    return made


def _query(size: Mapping[str, int]) -> Inputs:
    made = _random(size)
    query = torch.rand(made["v"].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1
    return {**made, "query": query}


def _padded(size: Mapping[str, int]) -> Inputs:
    valid = torch.rand(2, size["tokens"], generator=torch.Generator().manual_seed(6)) > 0.3
    valid[0, : size["tokens"] // 2] = False
    return {**_random({**size, "batch": 2, "heads": 1}), "valid": valid}


def _definition(x: Inputs) -> Outputs:
    """All weights at once; tokens that nobody reads give 0."""
    k, v, valid = x["k"], x["v"], x.get("valid")
    tokens = v.shape[2]
    unseen = torch.ones(tokens, tokens, dtype=torch.bool, device=v.device).triu(1)[:, :, None]
    if valid is not None:
        unseen = unseen | ~valid[:, None, None, :, None] & ~torch.eye(tokens, dtype=torch.bool, device=v.device)[:, :, None]
    logs = k[:, :, None].expand(-1, -1, tokens, -1, -1).masked_fill(unseen, -torch.inf).log_softmax(3)
    o = (logs.exp() * v[:, :, None]).sum(3) * x.get("query", 1.0)
    if "beta" in x:
        beta = x["beta"][:, None]
        free_energy = (logs + beta[:, None] * v[:, :, None]).logsumexp(3) / beta
        if "query" in x:
            free_energy = free_energy + x["query"].log() / beta
        o = o + x["lam"] * (free_energy - o) if "lam" in x else free_energy
    return (_kept(o * x.get("gate", 1.0), valid),)


def _kept(o: Tensor, valid: Tensor | None) -> Tensor:
    return o if valid is None else o.masked_fill(~valid[:, None, :, None], 0.0)


def _call(x: Inputs, implementation: str) -> Outputs:
    return (_kept(aft_read(**x, implementation=implementation)[0], x.get("valid")),)


SUITE = Suite(
    op="aft_read",
    cases={
        "normal": _random,
        "range 80": lambda size: _random(size, value_range=80.0),
        "ramp 140": _ramp,
        "sharp": lambda size: _random(size, spread=16.0),
        "beta 0.02": lambda size: _random(size, beta=0.02),
        "beta 40": lambda size: _random(size, beta=40.0),
        "equal values": _equal,
        "underflow": _underflow,
        "padded": _padded,
        "query inside": _query,
        "one token": lambda size: _random({**size, "tokens": 1}),
        "mu alone": lambda size: {name: t for name, t in _random(size).items() if name in ("k", "v", "gate")},
        "F alone": lambda size: {name: t for name, t in _random(size).items() if name in ("k", "v", "beta")},
    },
    definition=_definition,
    call=_call,
    small={"batch": 1, "heads": 2, "tokens": 19, "channels": 3},
    real={"batch": 2, "heads": 4, "tokens": 1024, "channels": 64},
    loose={
        # F = (log sum exp(k + beta v) - log sum exp(k)) / beta rounds at eps / beta, 3e-6 here, beside F - mu of 1e-2.
        ("beta 0.02", "d lam"): 2e-3,
        ("beta 0.02", "d beta"): 2e-3,
        ("one token", "d beta"): 1e12,  # the truth is 0 but for float64's rounding
    },
)
