"""Cases of the state-space read: values of any range, steps and rates small and large, padding,
every optional argument left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import softplus

from kernels.aft_read.cases import (
    half_equal,
    leaping,
    masked,
    moved,
    padded,
    ramped,
    seen,
    two_level_read,
)
from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.ssm_read.op import ssm_read


def _random(
    size: Mapping[str, int], beta: float = 1.95, value_range: float | None = None, step: float = 1.0
) -> Inputs:
    """Draw inputs. value_range: v is uniform, so that beta * v has this range. step: factor of the
    steps.
    """
    draw = Draw(size["tokens"])
    normal = draw.normal

    b, h, t, d, n = (size[name] for name in ("batch", "heads", "tokens", "channels", "states"))
    v, lam, gate = (normal(b, h, t, d) for _ in range(3))
    if value_range is not None:
        v = (draw.uniform(b, h, t, d) - 0.5) * value_range / beta
    return {
        "delta": step * softplus(normal(b, h, t, d) - 1),
        "rate": softplus(normal(h, d, n)) + torch.arange(n),
        "b_in": softplus(normal(b, h, t, n)) + 1e-3,
        "c_out": softplus(normal(b, h, t, n)) + 1e-3,
        "v": v,
        "beta": torch.full((h, d), beta, dtype=torch.float64),
        "lam": lam.sigmoid(),
        "gate": softplus(gate),
    }


def _forgetting(size: Mapping[str, int]) -> Inputs:
    """Draw inputs with a few steps so long that the weights of all earlier tokens underflow."""
    made = _random(size)
    made["delta"][:, :, size["tokens"] // 3 :: 5] += 60
    return made


def _definition(x: Inputs) -> Outputs:
    """Compute all weights at once; masked tokens give 0."""
    through = masked(x["delta"], x).cumsum(2)
    before = through - masked(x["delta"], x)
    span = through[:, :, :, None] - through[:, :, None]
    if not x.get("causal", True):
        later = torch.ones(span.shape[2:4], dtype=torch.bool, device=span.device).triu(1)[..., None]
        span = torch.where(later, before[:, :, None] - before[:, :, :, None], span)
    modes = (
        x["c_out"][:, :, :, None, None].log()
        + x["b_in"][:, :, None, :, None].log()
        - span[..., None] * x["rate"][:, None, None]
    )
    logs = (modes.logsumexp(-1) + x["delta"][:, :, None].log()).masked_fill(~seen(x), -torch.inf)
    logs = logs.log_softmax(3) if x.get("normalise", True) else logs
    return two_level_read(x, logs, logs)


def _call(x: Inputs, implementation: str) -> Outputs:
    return (masked(ssm_read(**x, implementation=implementation)[0], x),)


def _only(size: Mapping[str, int], *left_out: str) -> Inputs:
    return {name: t for name, t in _random(size).items() if name not in left_out}


SUITE = Suite(
    op="ssm_read",
    cases={
        "normal": _random,
        "short steps": lambda size: _random(size, step=0.02),
        "range 80": lambda size: _random(size, value_range=80.0),
        "ramp 140": lambda size: ramped(_random(size, step=0.1)),
        "beta 0.02": lambda size: _random(size, beta=0.02),
        "beta 0.001": lambda size: _random(size, beta=0.001),
        "beta 0.001, far from zero": lambda size: moved(_random(size, beta=0.001), 10.0),
        "beta 0.02, then far": lambda size: leaping(_random(size, beta=0.02), 300.0),
        "beta 40": lambda size: _random(size, beta=40.0),
        "equal values": lambda size: half_equal(_random(size)),
        "forgetting": _forgetting,
        "padded": lambda size: padded(_random, size),
        "one token": lambda size: _random({**size, "tokens": 1}),
        "mu alone": lambda size: _only(size, "beta", "lam"),
        "F alone": lambda size: _only(size, "lam", "gate"),
    },
    definition=_definition,
    call=_call,
    small={"batch": 1, "heads": 2, "tokens": 9, "channels": 3, "states": 2},
    real={"batch": 1, "heads": 2, "tokens": 256, "channels": 64, "states": 16},
    loose={
        # Without exp(x) - 1 - x it is a difference of sums of v and of F, which are thirty times
        # larger: 9e-6, and 1.4e-5 with a GPU's rounding.
        ("ramp 140", "d beta"): 2e-5,
        ("beta 40", "d beta"): 2e-5,
        ("one token", "d beta"): 1e12,  # the truth is 0 up to float64's rounding
    },
)
