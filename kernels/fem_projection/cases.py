"""Cases of FEM's projection: every switch off, other priors' slices, packed documents, gates fully
open and closed, a factor of 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.fem_projection.op import fem_projection
from kernels.rotary.cases import angles, by_matrix, places

EPS = 1e-5
ALL = ("q", "k", "v", "lam", "gate")


def _made(
    size: Mapping[str, int],
    slices: tuple[str, ...] = ALL,
    *,
    conditioners: int = 1,
    rope: bool = True,
    packed: bool = False,
    spread: float = 1.0,
) -> Inputs:
    """Return random inputs with slices as wide as the values, except q and k, and a decay of one
    channel.

    packed: each sequence has its own documents.
    """
    draw, tokens, batch = Draw(size["tokens"]), size["tokens"], size["batch"]
    widths = {
        name: {"q": size["dk"], "k": size["dk"], "decay": 1}.get(name, size["dv"])
        for name in slices
    }
    shape = (tokens, batch, size["heads"] * sum(widths.values()))
    made: Inputs = {"z": spread * draw.normal(*shape), "widths": widths, "positions": None}
    for name, n in zip("fh", (size["n"], 3)[:conditioners], strict=False):
        made |= {
            name: draw.normal(tokens, batch, n),
            f"w{name}": draw.normal(shape[2], n) / n**0.5 / 2,
        }
    if rope:
        made["positions"] = places(tokens, batch, packed=packed)
    return made


def _extreme(size: Mapping[str, int]) -> Inputs:
    """Return inputs with tokens whose gates are closed, so that eps is the divisor, or fully open,
    and tokens whose factor is 0.
    """
    made = _made(size)
    made["z"][::4] = -9.0
    made["z"][1::4] = 25.0
    made["f"][2::4] = 0.0
    made["f"][2::4, :, 0], made["wf"][:, 0] = -1.0, 1.0
    return made


def _definition(x: Inputs) -> Outputs:
    """Return the slices by the equations; q and k are rotated by a matrix for each token."""
    outputs, widths = [], x["widths"]
    phi = sum(torch.einsum("sbn,pn->sbp", x[name], x[f"w{name}"]) for name in "fh" if name in x)
    heads = (x["z"] + x["z"] * phi).unflatten(-1, (-1, sum(widths.values())))
    for name, part in zip(widths, heads.split(list(widths.values()), -1), strict=True):
        if name in ("q", "k") and x["positions"] is not None:
            part = by_matrix(part, x["positions"])
        elif name == "lam":
            part = 1 / (1 + (-part).exp())
        elif name == "gate":
            part = torch.logaddexp(part, torch.zeros_like(part))
            part = part / (part.square().mean(-1, keepdim=True) + EPS).sqrt()
        outputs.append(part)
    return tuple(outputs)


def _call(x: Inputs, implementation: str) -> Outputs:
    z, pairs = x["z"], [(x[name], x[f"w{name}"]) for name in "fh" if name in x]
    wide = torch.promote_types(z.dtype, torch.float32)
    turn = (
        None if x["positions"] is None else angles(x["positions"], x["widths"]["q"], wide, z.device)
    )
    return tuple(
        fem_projection(z, pairs, turn, x["widths"], EPS, implementation=implementation).values()
    )


SUITE = Suite(
    op="fem_projection",
    cases={
        "normal": _made,
        "packed documents": lambda size: _made(size, packed=True),
        "no conditioner": lambda size: _made(size, conditioners=0),
        "both ways": lambda size: _made(size, conditioners=2),
        "no temperature": lambda size: _made(size, ("q", "k", "v", "gate")),
        "no gate": lambda size: _made(size, ("q", "k", "v", "lam")),
        "rope alone": lambda size: _made(size, ("q", "k", "v"), conditioners=0, packed=True),
        "conditioner alone": lambda size: _made(size, ("q", "k", "v"), rope=False),
        "no rope": lambda size: _made(size, rope=False),
        "gated linear attention": lambda size: _made(size, ("q", "k", "decay", "v", "lam", "gate")),
        "selective scan": lambda size: _made(
            size, ("delta", "b", "c", "v", "lam", "gate"), rope=False
        ),
        "large": lambda size: _made(size, spread=20.0),
        "extreme": _extreme,
        "one token": lambda size: _made({**size, "tokens": 1, "batch": 1, "heads": 16}),
    },
    definition=_definition,
    call=_call,
    small={"tokens": 13, "batch": 2, "heads": 3, "dk": 6, "dv": 5, "n": 4},
    real={"tokens": 1021, "batch": 2, "heads": 4, "dk": 128, "dv": 64, "n": 64},
    loose={},
)
