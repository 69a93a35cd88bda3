"""Cases of the residual stream's norms: one norm and two, a stream far from zero, channels of very
different sizes, tokens of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.residual_norm.op import residual_norm

EPS = 1e-5


def _made(
    size: Mapping[str, int],
    *,
    weights: int = 2,
    twice: bool = False,
    mean: float = 0.0,
    spread: float = 1.0,
) -> Inputs:
    draw = Draw(size["channels"])
    made: Inputs = {
        "x": spread * (draw.normal(size["tokens"], size["batch"], size["channels"]) + mean)
    }
    names = ("weight", "second")[:weights]
    return {
        **made,
        **{name: 1 + draw.normal(size["channels"]) / 4 for name in names},
        "twice": twice,
    }


def _uneven(size: Mapping[str, int]) -> Inputs:
    """Draw inputs with one channel 1000 times larger than the others, like trained streams."""
    made = _made(size)
    made["x"][..., 0] *= 1e3
    return made


def _vanishing(size: Mapping[str, int]) -> Inputs:
    """Draw tokens of zeros and tokens of one constant: a norm then divides by sqrt(eps)."""
    made = _made(size)
    made["x"][::3] = 0.0
    made["x"][1::3], made["weight"][:] = 2.0, 1.0
    return made


def _definition(x: Inputs) -> Outputs:
    value = x["x"]
    h = value / (value.square().mean(-1, keepdim=True) + EPS).sqrt() * x.get("weight", 1)
    if x["twice"]:
        return value * 1, h, h / (h.square().mean(-1, keepdim=True) + EPS).sqrt()
    if "second" not in x:
        return value * 1, h
    centred = h - h.mean(-1, keepdim=True)
    return (
        value * 1,
        h,
        centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * x["second"],
    )


def _call(x: Inputs, implementation: str) -> Outputs:
    made = residual_norm(
        x["x"],
        x.get("weight"),
        EPS,
        x.get("second"),
        twice=x["twice"],
        implementation=implementation,
    )
    return tuple(t for t in made if isinstance(t, Tensor))


SUITE = Suite(
    op="residual_norm",
    cases={
        "normal": _made,
        "one norm": lambda size: _made(size, weights=1),
        "no weight": lambda size: _made(size, weights=0),
        "RMSNorm twice": lambda size: _made(size, weights=1, twice=True),
        "far from zero": lambda size: _made(size, mean=5.0),
        "small": lambda size: _made(size, spread=1e-3),
        "uneven": _uneven,
        "vanishing": _vanishing,
        "one token": lambda size: _made({**size, "tokens": 1, "batch": 1}),
    },
    definition=_definition,
    call=_call,
    small={"tokens": 13, "batch": 2, "channels": 37},
    real={"tokens": 4096, "batch": 2, "channels": 2048},
    # A constant token stays constant under RMSNorm: LayerNorm divides the rounding error of its
    # mean, 2^-24, by the root of eps.
    loose={
        ("vanishing", "output 2"): 2 * 2**-24 / EPS**0.5,
        ("vanishing", "d second"): 2 * 2**-24 / EPS**0.5,
    },
)
