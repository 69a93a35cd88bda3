"""Cases of the time-decay scan: decays of every strength, resets, logits in a packed projection, a
state before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.time_decay_scan.op import time_decay_scan


def _random(size: Mapping[str, int], slowness: float = 3.0) -> Inputs:
    """Draw log-decays of about -exp(-slowness) for each step."""
    draw = Draw(size["steps"])
    a, x = (draw.normal(size["steps"], size["batch"], size["channels"]) for _ in range(2))
    return {"a": -torch.nn.functional.softplus(a - slowness), "x": x}


def _with_state(size: Mapping[str, int]) -> Inputs:
    initial = torch.linspace(-2, 2, size["batch"] * size["channels"], dtype=torch.float64).view(
        size["batch"], -1
    )
    return {**_random(size), "initial": initial}


def _resets(size: Mapping[str, int]) -> Inputs:
    made = _with_state(size)
    made["a"][[0, size["steps"] // 2, -1]] = -torch.inf
    made["a"][size["steps"] // 3 :, 0] = -torch.inf
    return made


def _logits(size: Mapping[str, int]) -> Inputs:
    made = _with_state(size)
    return {**made, "a": Draw(2).normal(*made["x"].shape) * 5 - 4, "softplus": True}


def _packed(size: Mapping[str, int]) -> Inputs:
    """Draw a packed tensor of which a is every third number, like the conditioner's projection; a
    logit of -inf keeps the state.
    """
    packed = Draw(4).normal(size["steps"], size["batch"], 3 * size["channels"])
    packed[size["steps"] // 2, :, ::3] = -torch.inf
    return {"packed": packed}


def _parts(x: Inputs) -> Inputs:
    if "packed" not in x:
        return x
    a, values, _ = x["packed"].unflatten(-1, (-1, 3)).unbind(-1)
    return {"a": a, "x": values, "softplus": True}


def _definition(given: Inputs) -> Outputs:
    x = _parts(given)
    kind = torch.promote_types(x["x"].dtype, torch.float32) if x.get("softplus") else x["x"].dtype
    decay = -torch.nn.functional.softplus(x["a"]) if x.get("softplus") else x["a"]
    state: Tensor = x.get("initial", torch.zeros_like(x["x"][0])).to(x["x"].dtype)
    states = []
    for a_t, x_t in zip(decay, x["x"], strict=True):
        state = a_t.exp() * state + x_t
        states.append(state)
    return (torch.stack(states).to(kind),)


def _call(given: Inputs, implementation: str) -> Outputs:
    x = _parts(given)
    initial = x.get("initial")
    if initial is not None and x.get("softplus"):
        initial = initial.to(torch.promote_types(initial.dtype, torch.float32))
    return (
        time_decay_scan(
            x["a"],
            x["x"],
            initial,
            softplus=x.get("softplus", False),
            implementation=implementation,
        ),
    )


def _one(size: Mapping[str, int]) -> Inputs:
    return _with_state({**size, "steps": 1})


SUITE = Suite(
    op="time_decay_scan",
    cases={
        "normal": _random,
        "slow": lambda size: _random(size, 8.0),
        "fast": lambda size: _random(size, -4.0),
        "strong": lambda size: {
            "a": torch.full_like(_random(size)["a"], -50.0),
            "x": _random(size)["x"] * 1e30,
        },
        "no decay": lambda size: {
            "a": torch.zeros_like(_random(size)["a"]),
            "x": _random(size)["x"],
        },
        "a state before": _with_state,
        "resets": _resets,
        "logits": _logits,
        "packed logits": _packed,
        "one step": _one,
    },
    definition=_definition,
    call=_call,
    small={"steps": 41, "batch": 2, "channels": 5},
    real={"steps": 4096, "batch": 4, "channels": 128},
    loose={},
)
