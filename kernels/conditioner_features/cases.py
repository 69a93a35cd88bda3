"""Cases of the conditioner's features: logits of every size in a packed projection, states far from
zero, a token whose r vanishes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.conditioner_features.op import conditioner_features

EPS = 1e-5


def _random(size: Mapping[str, int], spread: float = 1.0) -> Inputs:
    draw = Draw(size["channels"])
    logits, state = (draw.normal(size["tokens"], size["batch"], size["channels"]) for _ in range(2))
    weight = 1 + draw.normal(size["channels"]) / 4
    return {"logits": spread * logits, "state": state * 3 + 1, "weight": weight}


def _packed(size: Mapping[str, int]) -> Inputs:
    made = _random(size)
    packed = torch.stack(
        (torch.zeros_like(made["logits"]), torch.ones_like(made["logits"]), made["logits"]), -1
    )
    return {**made, "logits": packed.flatten(-2)}


def _vanishing(size: Mapping[str, int]) -> Inputs:
    """Draw inputs with tokens whose r is under eps, and tokens with a constant state, whose
    variance is 0, so that eps dominates.
    """
    made = _random(size)
    made["logits"][::3] = -30.0
    made["state"][1::3] = 2.0
    return made


def _features(logits: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    r = torch.nn.functional.softplus(logits)
    r = r * logits.shape[-1] ** 0.5 / r.square().sum(-1, keepdim=True).sqrt().clamp_min(EPS)
    centred = state - state.mean(-1, keepdim=True)
    return r * weight * centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()


def _parts(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    logits = (
        x["logits"]
        if x["logits"].shape == x["state"].shape
        else x["logits"].unflatten(-1, (-1, 3))[..., 2]
    )
    return logits, x["state"], x["weight"]


def _call(x: Inputs, implementation: str) -> Outputs:
    logits, state, weight = _parts(x)
    state = state.to(torch.promote_types(state.dtype, torch.float32))
    return (conditioner_features(logits, state, weight, EPS, implementation=implementation),)


SUITE = Suite(
    op="conditioner_features",
    cases={
        "normal": _random,
        "packed": _packed,
        "large": lambda size: _random(size, 20.0),
        "vanishing": _vanishing,
        "one token": lambda size: _random({**size, "tokens": 1, "batch": 1}),
    },
    definition=lambda x: (_features(*_parts(x)),),
    call=_call,
    small={"tokens": 13, "batch": 2, "channels": 37},
    real={"tokens": 4096, "batch": 4, "channels": 128},
    loose={},
)
