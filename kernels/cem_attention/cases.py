"""Cases that every implementation of `cem_attention` must compute correctly."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kernels.cem_attention.op import cem_attention
from kernels.cem_attention.reference import Diagonal
from kernels.check import Draw, Inputs, Outputs, Suite

Size = Mapping[str, int]


def inputs(
    size: Size,
    *,
    diagonal: str = "shared",
    tokens: int | None = None,
    past: int = 0,
    causal: bool = True,
    padding: bool = False,
    sharpness: float = 1.0,
    steepness: float = 1.0,
    biases: tuple[float, float] = (0.7, -0.4),
    equal_keys: bool = False,
) -> Inputs:
    """Return random tokens.

    diagonal: none, shared, head, or "in h", where h is already multiplied by a shared one.
    biases: of a token on itself and on other tokens; one tensor, so that their error depends less
    on chance.
    steepness: factor on ALiBi's slopes 2^(-8 k / heads).
    sharpness: factor on all scores but ALiBi's.
    equal_keys: the last sequence has equal keys. The gradients of its scores are zero, so that it
    needs another sequence to which an error can be relative.
    """
    normal = Draw(0).normal
    b, heads, r, t = size["batch"], size["heads"], size["width"], tokens or size["tokens"]
    hidden, tk = heads * r, t + past

    made: Inputs = {"q": normal(b, heads, t, r), "k": normal(b, heads, tk, r)}
    if equal_keys:
        made["k"][-1] = made["k"][-1, :, :1]
    if diagonal != "none":
        made |= {
            "u": normal(b, t, hidden),
            "h": normal(b, tk, hidden),
            "d": normal(heads if diagonal == "head" else 1, hidden) * 0.5,
        }
        if diagonal == "in h":
            made["h"] *= made.pop("d")
    made["biases"] = torch.tensor(biases, dtype=torch.float64)
    made["valid"] = torch.ones(b, tk, dtype=torch.bool) if padding else None
    if padding:
        # Before, between and after the tokens.
        made["valid"][0, : tk // 4] = made["valid"][-1, tk // 3 : tk // 2] = made["valid"][
            -1, -1
        ] = False
    # Not a tensor, because the slopes have no gradient.
    made["slopes"] = tuple(steepness * 2.0 ** (-8 * (n + 1) / heads) for n in range(heads))
    return made | {"scale": sharpness * r**-0.5, "causal": causal}


def definition(x: Inputs) -> Outputs:
    """Return the read from a_ij as the paper writes it, all pairs at once."""
    q, k, (t, tk) = x["q"], x["k"], (x["q"].shape[2], x["k"].shape[2])
    a = torch.einsum("bhir,bhjr->bhij", q, k)
    if "u" in x:
        d = x.get("d", torch.ones_like(x["u"][0, :1]))
        a = a + torch.einsum("bjd,hd,bid->bhij", x["h"], d.expand(q.shape[1], -1), x["u"])
    i, j = torch.arange(tk - t, tk, device=q.device)[:, None], torch.arange(tk, device=q.device)
    slopes = torch.tensor(x["slopes"], dtype=q.dtype, device=q.device)[:, None, None]
    a = a * x["scale"] - slopes * (i - j).abs() + torch.where(i == j, *x["biases"])
    seen = i >= j if x["causal"] else torch.ones(t, tk, dtype=torch.bool, device=q.device)
    if x["valid"] is not None:
        seen = (seen & x["valid"][:, None, None, :] & x["valid"][:, None, tk - t :, None]) | (
            i == j
        )
    return (a.masked_fill(~seen, -torch.inf).softmax(-1) @ k,)


def call(x: Inputs, implementation: str) -> Outputs:
    """Call `cem_attention` with the inputs of a case."""
    diagonal = Diagonal(x["u"], x["h"], x.get("d")) if "u" in x else None
    slopes = torch.tensor(
        x["slopes"], dtype=torch.promote_types(x["q"].dtype, torch.float32), device=x["q"].device
    )
    own, others = x["biases"].to(slopes.dtype).split(1)
    known = {name: x[name] for name in ("scale", "causal", "valid")}
    return (
        cem_attention(
            x["q"], x["k"], slopes, own - others, diagonal, **known, implementation=implementation
        ),
    )


CASES: dict[str, Callable[[Size], Inputs]] = {
    "normal": inputs,
    "no diagonal": lambda size: inputs(size, diagonal="none"),
    "a diagonal a head": lambda size: inputs(size, diagonal="head"),
    "a diagonal in h": lambda size: inputs(size, diagonal="in h"),
    "one token": lambda size: inputs(size, tokens=1),
    "sharp": lambda size: inputs(size, sharpness=8.0),
    "a large bias on itself": lambda size: inputs(size, biases=(5.0, -3.0)),
    "a large bias on others": lambda size: inputs(size, biases=(-5.0, 3.0)),
    "steep slopes": lambda size: inputs(size, steepness=1000.0),
    "equal keys": lambda size: inputs(size, equal_keys=True),
    "padding": lambda size: inputs(size, padding=True),
    "past": lambda size: inputs(size, past=size["tokens"] // 2),
    "past, padding, no diagonal": lambda size: inputs(
        size, past=size["tokens"] // 3, padding=True, diagonal="none"
    ),
    "full": lambda size: inputs(size, causal=False),
    "full, past, padding, a diagonal a head": lambda size: inputs(
        size, causal=False, past=5, padding=True, diagonal="head"
    ),
}

SUITE = Suite(
    op="cem_attention",
    cases=CASES,
    definition=definition,
    call=call,
    small={"batch": 2, "heads": 2, "tokens": 41, "width": 12},
    real={"batch": 2, "heads": 4, "tokens": 2047, "width": 84},
    loose={},
)
