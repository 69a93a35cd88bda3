"""Cases of the free-energy read under linear attention's prior: ranges and betas of the fast form,
ranges beyond it, and faint rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.free_energy.linear import linear_read
from kernels.linear_attention.cases import weights_and_decays


def _random(
    size: Mapping[str, int],
    decay: str = "head",
    *,
    beta: float = 1.95,
    value_range: float | None = None,
) -> Inputs:
    """Return random inputs with features above 0.

    value_range: v is uniform so that beta * v spans about this much.
    """
    draw = Draw(size["tokens"])
    shape = size["batch"], size["heads"], size["tokens"]

    def uniform(*width: int) -> torch.Tensor:
        return draw.uniform(*shape, *width)

    keys, values = size["keys"], size["values"]
    v = draw.normal(*shape, values)
    made: Inputs = {
        "q": uniform(keys) + 1e-3,
        "k": uniform(keys) + 1e-3,
        "v": v if value_range is None else (uniform(values) - 0.5) * value_range / beta,
        "beta": torch.full((size["heads"], values), beta, dtype=torch.float64),
        "lam": uniform(values),
        "gate": 2 * uniform(values),
    }
    if decay != "none":
        made["log_decay"] = -0.3 * uniform(*([keys] if decay == "channel" else []))
    return made


def _ramp(size: Mapping[str, int]) -> Inputs:
    made = _random(size)
    made["v"][:] = torch.linspace(-70, 70, size["tokens"], dtype=torch.float64)[:, None] / 1.95
    return made


def _relu(size: Mapping[str, int]) -> Inputs:
    """Return inputs whose features are relu(x) + 1e-3, with values beyond the fast form's range in
    one channel.
    """
    made = _random(size) | {"eps": 1e-3}
    made["q"] -= 0.5
    made["k"] -= 0.5
    made["v"][..., -1] *= 60
    return made


def _sharp(size: Mapping[str, int]) -> Inputs:
    """Return inputs where few keys matter to a row.

    The logarithms of the features are spread eight times as wide.
    """
    made = _random(size, "none")
    return {**made, "q": made["q"] ** 8 + 1e-6, "k": made["k"] ** 8 + 1e-6}


def _equal(size: Mapping[str, int]) -> Inputs:
    """Return inputs with equal values in one half of the channels.

    With equal values in all channels, the gradients of the weights would be rounding alone.
    """
    made = _random(size)
    made["v"][..., : size["values"] // 2] = 0.75
    return made


def _faint(size: Mapping[str, int]) -> Inputs:
    """Return inputs with some features of 1e-6 alone, as where a ReLU is closed, before and after
    full resets.
    """
    made = _random(size, value_range=40.0)
    tokens = size["tokens"]
    made["k"][:, :, : tokens // 4] = 1e-6
    made["q"][:, :, : tokens // 2] = 1e-6
    made["log_decay"][:, :, tokens // 2] = -torch.inf
    return made


def _forgotten(size: Mapping[str, int]) -> Inputs:
    """Return inputs that forget about exp(30) at a reset, with exp(-30) after it."""
    made = _random(size, "channel")
    tokens = size["tokens"]
    made["v"] = torch.where(torch.arange(tokens) < tokens // 2, 15.0, -15.0)[:, None] + 4 * made[
        "v"
    ].clamp(-1, 1)
    made["log_decay"][:, :, tokens // 2] = -500.0
    return made


def _definition(x: Inputs) -> Outputs:
    """Return the read from all terms at once, as logarithms."""
    beta, v = x["beta"][:, None], x["v"]
    weights, _, _ = weights_and_decays(x)
    read = weights > 0
    logs = torch.where(read, weights, 1).log().masked_fill(~read, -torch.inf).log_softmax(-1)
    mu = logs.exp() @ v
    free_energy = (logs[..., None] + (beta * v)[:, :, None]).logsumexp(3) / beta
    return (x["gate"] * ((1 - x["lam"]) * mu + x["lam"] * free_energy),)


def _call(x: Inputs, implementation: str) -> Outputs:
    """Call `linear_read` with features and decays in the compute dtype."""
    wide = torch.promote_types(x["q"].dtype, torch.float32)
    q, k = x["q"].to(wide), x["k"].to(wide)
    decay = None if "log_decay" not in x else x["log_decay"].to(wide)
    read = (x["v"], decay, x["beta"], x["lam"], x["gate"])
    given: Any = {name: x.get(name) for name in ("eps", "exact")}
    return (linear_read(q, k, *read, **given, implementation=implementation),)


SUITE = Suite(
    op="free_energy",
    cases={
        "linear attention": lambda size: _random(size, "none"),
        "a decay a head": _random,
        "a decay a channel": lambda size: _random(size, "channel"),
        "range 80": lambda size: _random(size, value_range=79.0),
        "range 80, a decay a channel": lambda size: _random(size, "channel", value_range=79.0),
        "ramp 140": _ramp,
        "sharp": _sharp,
        "beta 0.02": lambda size: _random(size, beta=0.02),
        "beta 40": lambda size: _random(size, beta=40.0, value_range=40.0),
        "equal values": _equal,
        "faint tokens": _faint,
        "forgotten": _forgotten,
        "relu": _relu,
        "one token": lambda size: _random({**size, "tokens": 1}),
    },
    definition=_definition,
    call=_call,
    small={"batch": 1, "heads": 1, "tokens": 37, "keys": 12, "values": 10},
    real={"batch": 1, "heads": 2, "tokens": 512, "keys": 64, "values": 32},
    # F of a single token is its value: beta's gradient is 0, and the definition's is rounding.
    loose={("one token", "d beta"): 2.0},
)
