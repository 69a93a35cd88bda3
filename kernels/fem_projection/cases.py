"""FEM's projection's cases: every switch off, other priors' slices, packed documents, gates far open and shut, a factor of 0."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.fem_projection import fem_projection

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
    """Slices as wide as the values, but q and k, and a decay of one channel. packed: each sequence has documents of its own."""
    draw, tokens, batch = Draw(size["tokens"]), size["tokens"], size["batch"]
    widths = {name: {"q": size["dk"], "k": size["dk"], "decay": 1}.get(name, size["dv"]) for name in slices}
    shape = (tokens, batch, size["heads"] * sum(widths.values()))
    made: Inputs = {"z": spread * draw.normal(*shape), "widths": widths, "positions": None}
    for name, n in zip("fh", (size["n"], 3)[:conditioners], strict=False):
        made |= {name: draw.normal(tokens, batch, n), f"w{name}": draw.normal(shape[2], n) / n**0.5 / 2}
    if rope:
        place = torch.arange(tokens)
        made["positions"] = torch.stack([place % (5 + 7 * n) for n in range(batch)], 1) if packed else place
    return made


def _extreme(size: Mapping[str, int]) -> Inputs:
    """Tokens whose gates are shut, so that eps is what they are divided by, and wide open; and ones whose factor is 0."""
    made = _made(size)
    made["z"][::4] = -9.0
    made["z"][1::4] = 25.0
    made["f"][2::4] = 0.0
    made["f"][2::4, :, 0], made["wf"][:, 0] = -1.0, 1.0
    return made


def _turn(x: Inputs, kind: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """cos and sin [s, 1 or b, 1, d / 2]."""
    if x["positions"] is None:
        return None
    half = x["widths"]["q"] // 2
    speed = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x["z"].device) / half)
    angles = (x["positions"].double()[..., None] * speed).view(len(x["z"]), -1, 1, half)
    return angles.cos().to(kind), angles.sin().to(kind)


def _definition(x: Inputs) -> Outputs:
    """By the equations; q and k turned by a matrix for each token."""
    outputs, widths = [], x["widths"]
    phi = sum(torch.einsum("sbn,pn->sbp", x[name], x[f"w{name}"]) for name in "fh" if name in x)
    heads = (x["z"] + x["z"] * phi).unflatten(-1, (-1, sum(widths.values())))
    for name, part in zip(widths, heads.split(list(widths.values()), -1), strict=True):
        turn = _turn(x, part.dtype)
        if name in ("q", "k") and turn is not None:
            c, s = (torch.diag_embed(t) for t in turn)
            part = (torch.cat((torch.cat((c, -s), -1), torch.cat((s, c), -1)), -2) @ part[..., None])[..., 0]
        elif name == "lam":
            part = 1 / (1 + (-part).exp())
        elif name == "gate":
            part = torch.logaddexp(part, torch.zeros_like(part))
            part = part / (part.square().mean(-1, keepdim=True) + EPS).sqrt()
        outputs.append(part)
    return tuple(outputs)


def _call(x: Inputs, implementation: str) -> Outputs:
    turn, pairs = _turn(x, torch.promote_types(x["z"].dtype, torch.float32)), [(x[name], x[f"w{name}"]) for name in "fh" if name in x]
    return tuple(fem_projection(x["z"], pairs, turn, x["widths"], EPS, implementation=implementation).values())


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
        "selective scan": lambda size: _made(size, ("delta", "b", "c", "v", "lam", "gate"), rope=False),
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
