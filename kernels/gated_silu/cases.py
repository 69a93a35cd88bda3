"""Cases of a gate times SiLU: a gate used once and twice, large arguments of both signs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.gated_silu.op import gated_silu


def _made(size: Mapping[str, int], *, twice: bool = True, spread: float = 1.0) -> Inputs:
    draw, shape = Draw(size["channels"]), (size["tokens"], size["batch"], size["channels"])
    names = ("z", "gate", "z_then")[: 2 + twice]
    return {name: draw.normal(*shape) * (1.0 if name == "gate" else spread) for name in names}


def _definition(x: Inputs) -> Outputs:
    def product(z: Tensor) -> Tensor:
        return x["gate"] * z / (1 + (-z).exp())

    return tuple(product(x[name]) for name in ("z", "z_then") if name in x)


def _call(x: Inputs, implementation: str) -> Outputs:
    made, gate = gated_silu(x["z"], x["gate"], implementation=implementation)
    if "z_then" not in x:
        return (made,)
    return made, gated_silu(x["z_then"], gate, implementation=implementation)[0]


SUITE = Suite(
    op="gated_silu",
    cases={
        "normal": _made,
        "one use": lambda size: _made(size, twice=False),
        "large": lambda size: _made(size, spread=30.0),
    },
    definition=_definition,
    call=_call,
    small={"tokens": 7, "batch": 2, "channels": 11},
    real={"tokens": 4096, "batch": 2, "channels": 5632},
    loose={},
)
