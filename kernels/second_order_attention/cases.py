"""Cases of MHA2nd1st's step: positions, a past, padding, temperatures of every size, keys that are
equal or far from zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.pairs import allowed_pairs
from kernels.second_order_attention.op import second_order_attention

Size = Mapping[str, int]


def _made(
    size: Size,
    *,
    times: float = 1.0,
    heat: float = 1.0,
    turned: bool = False,
    queries: int = 0,
    **switches: Any,
) -> Inputs:
    """Return q and k of about ``times`` per channel, T about ``heat`` d.

    G = factor factor^T, with condition number 10. The last ``queries`` tokens have q (0: all).
    """
    b, h, tk, d = size["batch"], size["heads"], size["tokens"], size["width"]
    t = queries or tk
    normal = Draw(tk).normal

    heads = torch.linspace(0.9, 1.1, h, dtype=torch.float64) * heat * d
    made = {
        "q": times * normal(b, h, t, d),
        "k": times * normal(b, h, tk, d),
        "factor": torch.eye(d, dtype=torch.float64) + normal(h, d, d) / (4 * d**0.5),
        "temperature": heads,
        "newton_temperature": heads.flip(0) * 1.25,
        "jitter": 1e-3,
    }
    if turned:
        angles = 3 * normal(1, 1, t, d // 2)
        made["turn"] = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return made | switches


def _padding(size: Size, causal: bool) -> Inputs:
    """Return inputs with left padding, holes and padding at the end.

    The second sequence is padding only.
    """
    tokens, valid = size["tokens"], torch.ones(2, size["tokens"], dtype=torch.bool)
    valid[0, : tokens // 3] = False
    valid[0, [tokens // 2, tokens - 2, tokens - 1]] = False
    valid[1] = False
    return _made({**size, "batch": 2}, turned=True, valid=valid, causal=causal)


def _alike(size: Size) -> Inputs:
    """Return inputs with a sequence whose keys are all the same: C is zero, and so is the effect of
    T.
    """
    made = _made({**size, "batch": 2})
    made["k"][0] = made["k"][0, :, :1]
    return made


def _far(size: Size) -> Inputs:
    """Return q and k around a point at three times their spread from zero: the covariance is a
    tenth of the second moment.
    """
    made = _made(size)
    middle = 3 * torch.randn(
        size["width"], generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return {**made, "q": made["q"] + middle, "k": made["k"] + middle}


def _steep(size: Size) -> Inputs:
    """Return inputs with some keys so long that their weights are negligible, at most exp(-200)."""
    made = _made(size)
    made["k"][:, :, 3::5] *= 20.0
    return made


def _gram(x: Inputs) -> Tensor:
    gram: Tensor = x["factor"] @ x["factor"].mT
    return gram


def _turned(x: Tensor, turn: Tensor | None, way: int) -> Tensor:
    """Return x with its pairs (first half, second half) rotated by (cos | sin), or rotated back if
    ``way`` is -1.
    """
    if turn is None:
        return x
    (cos, sin), (first, second) = turn.chunk(2, dim=-1), x.chunk(2, dim=-1)
    return torch.cat((first * cos - way * second * sin, way * first * sin + second * cos), dim=-1)


def _definition(x: Inputs) -> Outputs:
    """Return the step by equations 28 to 31, all pairs at once.

    LAPACK has no bfloat16, so that the system alone is solved in float32 for bfloat16.
    """
    q, k, turn = x["q"], x["k"], x.get("turn")
    temperature, newton = (x[name][:, None, None] for name in ("temperature", "newton_temperature"))
    t, tk, kind = q.shape[2], k.shape[2], q.dtype
    turn = None if turn is None else turn.detach().to(kind)
    seen = allowed_pairs(
        torch.arange(tk - t, tk, device=q.device), tk, x.get("causal", True), x.get("valid")
    )
    scores = (_turned(q, turn, 1) @ k.mT - k.square().sum(-1)[:, :, None] / 2) / temperature
    p = (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1)
    mean, gram = p @ k, _gram(x)
    r = q - _turned(mean, turn, -1)
    u = _turned(r @ gram, turn, 1)
    if x.get("exact"):
        covariance = (
            torch.einsum("bhti,bhid,bhie->bhtde", p, k, k) - mean[..., :, None] * mean[..., None, :]
        )
        hessian = torch.eye(k.shape[3], dtype=kind) - covariance / newton[..., None]
        r, product = 0.0, newton * torch.linalg.solve(hessian, u[..., None])[..., 0]
    else:
        product = (p * (u @ k.mT)) @ k - mean * (mean * u).sum(-1, keepdim=True)
    wide = torch.promote_types(kind, torch.float32)
    lifted = gram + torch.diag_embed(
        (x["jitter"] * gram.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)).expand(gram.shape[:2])
    )
    b = torch.linalg.solve(lifted.to(wide), _turned(product / newton, turn, -1).to(wide).mT).mT
    return (r + b.to(kind),)


def _call(x: Inputs, implementation: str) -> Outputs:
    given = {name: value for name, value in x.items() if name != "factor"}
    # The layer's G is float32 or wider, whatever the dtype of its weights.
    wide = torch.promote_types(x["q"].dtype, torch.float32)
    gram = x["factor"].to(wide) @ x["factor"].to(wide).mT
    if "turn" in given:
        given["turn"] = given["turn"].to(wide)
    return (second_order_attention(**given, gram=gram, implementation=implementation),)


SUITE = Suite(
    op="second_order_attention",
    cases={
        "normal": _made,
        "full": lambda size: _made(size, causal=False),
        "turned": lambda size: _made(size, turned=True),
        "one token": lambda size: _made({**size, "tokens": 3}, queries=1, turned=True),
        "past": lambda size: _made(size, queries=size["tokens"] // 3, turned=True),
        "past, full": lambda size: _made(size, queries=size["tokens"] // 3, causal=False),
        "padding": lambda size: _padding(size, True),
        "padding, full": lambda size: _padding(size, False),
        "sharp x8": lambda size: _made(size, times=8**0.5),
        "T = 0.05 d": lambda size: _made(size, heat=0.05),
        "T = 40 d": lambda size: _made(size, heat=40.0),
        "keys alike": _alike,
        "far from zero": _far,
        "underflow": _steep,
    },
    definition=_definition,
    call=_call,
    small={"batch": 1, "heads": 3, "tokens": 37, "width": 20},
    real={"batch": 1, "heads": 8, "tokens": 2041, "width": 64},
    loose={},
)
