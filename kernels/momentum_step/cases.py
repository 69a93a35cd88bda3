"""Cases of a step with momentum: numbers of several sizes, far from zero, tokens of zeros."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.momentum_step.op import momentum_step

EPS = 1e-5


def _made(size: Mapping[str, int], *, mean: float = 0.0, spread: float = 1.0) -> Inputs:
    draw, rows = Draw(size["channels"]), (size["tokens"], size["batch"])
    return {
        "stream": spread * (draw.normal(*rows, 2 * size["channels"]) + mean),
        "step": spread * (draw.normal(*rows, size["channels"]) + mean),
        "beta": draw.uniform(1),
        "gamma": 1 + draw.uniform(1),
        "weight": 1 + draw.normal(size["channels"]) / 4,
    }


def _vanishing(size: Mapping[str, int]) -> Inputs:
    """Draw tokens of zeros: the norm then divides by sqrt(eps)."""
    made = _made(size)
    made["stream"][::3], made["step"][::3] = 0.0, 0.0
    return made


def _definition(x: Inputs) -> Outputs:
    tokens, v = x["stream"].chunk(2, dim=-1)
    a = x["beta"] * v + x["gamma"] * x["step"]
    centred = a - a.mean(-1, keepdim=True)
    v = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * x["weight"]
    return (torch.cat((tokens + v, v), dim=-1),)


SUITE = Suite(
    op="momentum_step",
    cases={
        "normal": _made,
        "far from zero": lambda size: _made(size, mean=5.0),
        "small": lambda size: _made(size, spread=1e-3),
        "vanishing": _vanishing,
        "one token": lambda size: _made({**size, "tokens": 1, "batch": 1}),
    },
    definition=_definition,
    call=lambda x, implementation: (momentum_step(**x, eps=EPS, implementation=implementation),),
    small={"tokens": 13, "batch": 2, "channels": 37},
    real={"tokens": 4096, "batch": 2, "channels": 2048},
    loose={},
)
