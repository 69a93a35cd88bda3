"""Cases of AFT's read: values and logits of any range, every optional argument left out, padding,
and a query inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kernels.aft_read.op import aft_read
from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.pairs import readable_keys


def _random(
    size: Mapping[str, int],
    beta: float = 1.95,
    spread: float = 2.0,
    value_range: float | None = None,
) -> Inputs:
    """Draw random inputs. value_range: v is uniform, so that beta * v has this range."""
    draw = Draw(size["tokens"])
    shape = (size["batch"], size["heads"], size["tokens"], size["channels"])
    k, v, lam, gate = (draw.normal(*shape) for _ in range(4))
    if value_range is not None:
        v = (draw.uniform(*shape) - 0.5) * value_range / beta
    temperature = torch.full((size["heads"], size["channels"]), beta, dtype=torch.float64)
    return {
        "k": spread * k,
        "v": v,
        "beta": temperature,
        "lam": lam.sigmoid(),
        "gate": torch.nn.functional.softplus(gate),
    }


def ramped(made: Inputs) -> Inputs:
    """Set values that cover a range of 140 / beta, rising over the tokens in even heads and falling
    in odd heads.
    """
    heads, tokens = made["v"].shape[1:3]
    ramp = torch.linspace(-70, 70, tokens, dtype=torch.float64)[:, None] / 1.95
    return {
        **made,
        "v": torch.where(torch.arange(heads)[:, None, None] % 2 == 0, ramp, -ramp)
        .expand_as(made["v"])
        .clone(),
    }


def moved(made: Inputs, by: float) -> Inputs:
    """Shift all values by ``by``."""
    return {**made, "v": made["v"] + by}


def leaping(made: Inputs, by: float) -> Inputs:
    """Raise the values by ``by`` in the last third of the tokens and in odd channels, so that the
    logarithms are used from that token on.
    """
    made["v"][:, :, 2 * made["v"].shape[2] // 3 :, 1::2] += by
    return made


def half_equal(made: Inputs) -> Inputs:
    """Set equal values in the first channel, whose gradients of lam and beta are then 0. The other
    channels keep the norms above 0.
    """
    made["v"][..., 0] = 0.75
    return made


def _underflow(size: Mapping[str, int]) -> Inputs:
    """Draw inputs whose prior concentrates on the token at one third, so that all later weights
    underflow; in odd channels the last tokens dominate.
    """
    made = _random(size)
    made["k"][:, :, size["tokens"] // 3] += 300
    made["k"][:, :, -3:, 1::2] += 600
    return made


def _query(size: Mapping[str, int]) -> Inputs:
    made = _random(size)
    return {**made, "query": Draw(5).uniform(*made["v"].shape) + 0.1}


def padded(random: Callable[..., Inputs], size: Mapping[str, int]) -> Inputs:
    """Draw two sequences: half of the first and a third of the remaining tokens are padding."""
    valid = torch.rand(2, size["tokens"], generator=torch.Generator().manual_seed(6)) > 0.3
    valid[0, : size["tokens"] // 2] = False
    return {**random({**size, "batch": 2, "heads": 1}), "valid": valid}


def seen(x: Inputs) -> Tensor:
    """Return the mask of the pairs that are read, bool [t, i, 1] or [b, 1, t, i, 1]; a masked token
    reads itself.
    """
    tokens, device = x["v"].shape[2], x["v"].device
    return readable_keys(
        tokens, tokens, device, causal=x.get("causal", True), keys_valid=x.get("valid"), bounds=None
    )[..., None]


def two_level_read(x: Inputs, logs: Tensor, logs_of_free: Tensor) -> Outputs:
    """Return o from the logarithms of the weights of mu and of F, [b, h, t, i, d]. Masked tokens
    give 0.
    """
    v, query = x["v"], x.get("query")
    o = (logs.exp() * v[:, :, None]).sum(3)
    o = o if query is None else o * query[..., : v.shape[3]]
    if "beta" in x:
        beta = x["beta"][:, None]
        free_energy = (logs_of_free + beta[:, None] * v[:, :, None]).logsumexp(3) / beta
        free_energy = (
            free_energy if query is None else free_energy + query[..., -v.shape[3] :].log() / beta
        )
        o = o + x["lam"] * (free_energy - o) if "lam" in x else free_energy
    return (masked(o * x.get("gate", 1.0), x),)


def masked(o: Tensor, x: Inputs) -> Tensor:
    """Return o with 0 at masked tokens."""
    return o.masked_fill(~x["valid"][:, None, :, None], 0.0) if "valid" in x else o


def _definition(x: Inputs) -> Outputs:
    """Compute all weights at once. F's separate logits are the second half of k's channels."""
    tokens, width = x["v"].shape[2:]
    logs = (
        x["k"][:, :, None]
        .expand(-1, -1, tokens, -1, -1)
        .masked_fill(~seen(x), -torch.inf)
        .log_softmax(3)
    )
    return two_level_read(x, logs[..., :width], logs[..., -width:])


def _call(x: Inputs, implementation: str) -> Outputs:
    return (masked(aft_read(**x, implementation=implementation)[0], x),)


SUITE = Suite(
    op="aft_read",
    cases={
        "normal": _random,
        "range 80": lambda size: _random(size, value_range=80.0),
        "ramp 140": lambda size: ramped(_random(size)),
        "sharp": lambda size: _random(size, spread=16.0),
        "beta 0.02": lambda size: _random(size, beta=0.02),
        "beta 0.001": lambda size: _random(size, beta=0.001),
        "beta 0.001, far from zero": lambda size: moved(_random(size, beta=0.001), 10.0),
        "beta 0.02, then far": lambda size: leaping(_random(size, beta=0.02), 300.0),
        "beta 40": lambda size: _random(size, beta=40.0),
        "equal values": lambda size: half_equal(_random(size)),
        "underflow": _underflow,
        "padded": lambda size: padded(_random, size),
        "query inside": _query,
        "one token": lambda size: _random({**size, "tokens": 1}),
        "mu alone": lambda size: {
            name: t for name, t in _random(size).items() if name in ("k", "v", "gate")
        },
        "F alone": lambda size: {
            name: t for name, t in _random(size).items() if name in ("k", "v", "beta")
        },
    },
    definition=_definition,
    call=_call,
    small={"batch": 1, "heads": 2, "tokens": 19, "channels": 3},
    real={"batch": 2, "heads": 4, "tokens": 1024, "channels": 64},
    loose={
        ("one token", "d beta"): 1e12,  # the truth is 0 up to float64's rounding
    },
)
