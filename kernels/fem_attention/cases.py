"""Cases that every implementation of `fem_attention` must compute correctly: any range, grouped
heads, documents, padding, widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.fem_attention.op import fem_attention

Size = Mapping[str, int]
TENSORS = ("q", "k", "v", "beta", "lam", "gate")
KNOWN = ("causal", "keys_valid", "cu_seqlens")


def inputs(
    size: Size,
    *,
    tokens: int | None = None,
    batch: int = 1,
    past: int = 0,
    beta: float = 1.95,
    uniform: float | None = None,
    ramp: float | None = None,
    sharpness: float = 1.0,
    equal_values: bool = False,
    group: int = 1,
    values: float = 1.0,
    present: tuple[str, ...] = TENSORS,
    causal: bool = True,
    padding: bool = False,
    documents: tuple[float, ...] = (),
    widths: tuple[int, int] | None = None,
) -> Inputs:
    """Return random q, k, v, lam, gate.

    uniform: beta * v is uniform over this range; ramp: it rises by this much over the tokens.
    batch: least number of sequences. group: query heads per kv head. values: v's width relative to
    the usual. documents: where each document but the last ends, as a share of the sequence.
    """
    draw = Draw(0)
    normal = draw.normal
    b, h, t = max(batch, 1 if documents else size["batch"]), size["heads"], tokens or size["tokens"]
    dk, dv = widths or (size["dk"], int(size["dv"] * values))
    hk, tk = h // group, t + past

    v = normal(b, hk, tk, dv)
    if uniform is not None:
        v = (draw.uniform(*v.shape) - 0.5) * uniform / beta
    if ramp is not None:
        v = (torch.linspace(-0.5, 0.5, tk, dtype=torch.float64)[:, None] * ramp + 0.5 * v) / beta
    if equal_values:
        # Only in the last sequence. With equal values everywhere, F - mu would be zero, and no
        # number would be left to which an error can be relative.
        v[-1] = -3.5
    made = {
        "q": normal(b, h, t, dk) * sharpness,
        "k": normal(b, hk, tk, dk),
        "v": v,
        "beta": beta * torch.exp(0.1 * normal(hk, dv))
        if beta != 40
        else torch.full((hk, dv), beta, dtype=torch.float64),
        "lam": torch.sigmoid(normal(b, h, t, dv)),
        "gate": torch.nn.functional.softplus(normal(b, h, t, dv)),
    }
    if uniform is not None or ramp is not None:
        made["beta"] = torch.full((hk, dv), beta, dtype=torch.float64)
    x: Inputs = {name: made[name] if name in present else None for name in TENSORS} | {
        "causal": causal
    }
    x["keys_valid"] = torch.ones(b, tk, dtype=torch.bool) if padding else None
    if padding:
        x["keys_valid"][0, : tk // 4] = x["keys_valid"][-1, tk // 3 : tk // 2] = x["keys_valid"][
            -1, -1
        ] = False
    ends = [0, *(int(part * tk) for part in documents), tk]
    return x | {"cu_seqlens": torch.tensor(ends, dtype=torch.int32) if documents else None}


def underflowing(size: Size) -> Inputs:
    """Return inputs with rows whose weights are zero except for a key or two, in float32 too."""
    x = inputs(size)
    x["q"][:, :, size["tokens"] // 2 :: 7] *= 60
    return x


def faint_greatest(size: Size) -> Inputs:
    """Return inputs where a key whose weight is 0 in float32 has the greatest value: p exp(beta v)
    need not be 0.
    """
    x = inputs(size, uniform=140.0)
    x["k"][:, :, 5] *= -60
    x["v"][:, :, 5] = 150.0
    return x


def one_wild_channel(size: Size, **changed: Any) -> Inputs:
    """Return inputs with a range over 80 in one channel of one head of one sequence alone.

    Values have several blocks of channels.
    """
    x = inputs(size, batch=2, widths=(size["dk"], max(size["dv"], 40)), **changed)
    x["v"][0, -1, :, 17] *= 30
    return x


def readable(x: Inputs) -> Tensor:
    """Return which keys are read, by the definition: [b or 1, 1, t, tk] bool."""
    (t, tk), device = (x["q"].shape[2], x["k"].shape[2]), x["q"].device
    i, j = torch.arange(tk - t, tk, device=device)[:, None], torch.arange(tk, device=device)
    seen = (i >= j) if x["causal"] else torch.ones(t, tk, dtype=torch.bool, device=device)
    if x["cu_seqlens"] is not None:
        document = (j[:, None] >= x["cu_seqlens"][1:]).sum(1)
        seen = seen & (document[i] == document)
    seen = seen[None, None]
    return seen if x["keys_valid"] is None else (seen & x["keys_valid"][:, None, None]) | (i == j)


def definition(x: Inputs) -> Outputs:
    """Return the read from mu and F as the paper writes them, all terms [t, i, j] at once."""
    q, group = x["q"], x["q"].shape[1] // x["v"].shape[1]
    k, v = (x[name].repeat_interleave(group, 1) for name in ("k", "v"))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~readable(x), -torch.inf)
    mu = scores.softmax(-1) @ v
    out = mu
    if x["beta"] is not None:
        beta = x["beta"].repeat_interleave(group, 0)
        free_energy = (
            scores.log_softmax(-1)[..., None] + (beta[:, None] * v)[:, :, None]
        ).logsumexp(3) / beta[:, None]
        out = free_energy if x["lam"] is None else (1 - x["lam"]) * mu + x["lam"] * free_energy
    return (out if x["gate"] is None else x["gate"] * out,)


def call(x: Inputs, implementation: str) -> Outputs:
    """Call `fem_attention` with the inputs of a case."""
    return (
        fem_attention(
            *(x[name] for name in TENSORS),
            **{name: x[name] for name in KNOWN},
            implementation=implementation,
        ),
    )


CASES: dict[str, Callable[[Size], Inputs]] = {
    "normal": lambda size: inputs(size, batch=2),
    "range 80": lambda size: inputs(size, uniform=79.0),
    "ramp 140": lambda size: inputs(size, ramp=140.0),
    "one wild channel": one_wild_channel,
    "one wild channel, grouped heads, padding, past": lambda size: one_wild_channel(
        size, group=2, padding=True, past=size["tokens"] // 3
    ),
    "sharp": lambda size: inputs(size, sharpness=8.0),
    "small beta": lambda size: inputs(size, beta=0.02),
    "large beta": lambda size: inputs(size, beta=40.0, uniform=70.0),
    "one token": lambda size: inputs(size, tokens=1),
    "a block of tokens": lambda size: inputs(size, tokens=32),
    "equal values": lambda size: inputs(size, batch=2, equal_values=True),
    "underflow": underflowing,
    "grouped heads": lambda size: inputs(size, group=2),
    "grouped heads, ramp 140": lambda size: inputs(size, group=2, ramp=140.0),
    "full": lambda size: inputs(size, causal=False),
    "padding": lambda size: inputs(size, batch=2, padding=True),
    "full, padding, past": lambda size: inputs(
        size, causal=False, padding=True, past=size["tokens"] // 3
    ),
    "past": lambda size: inputs(size, past=size["tokens"] // 2),
    "documents": lambda size: inputs(size, documents=(0.1, 0.1, 0.7)),
    "documents, grouped heads, ramp 140": lambda size: inputs(
        size, documents=(0.3, 0.9), group=2, ramp=140.0
    ),
    "full, documents, padding": lambda size: inputs(
        size, documents=(0.3, 0.7), causal=False, padding=True
    ),  # no padding at the document boundaries
    "budget (ii)": lambda size: inputs(size, values=2.0),
    "widths 96 and 48": lambda size: inputs(size, widths=(96, 48)),
    "widths 32 and 16": lambda size: inputs(size, widths=(32, 16)),
    "widths 32 and 32, full": lambda size: inputs(size, widths=(32, 32), causal=False),
    "widths 256 and 128": lambda size: inputs(size, widths=(256, 128)),
    "one query over a past": lambda size: inputs(size, tokens=1, past=3 * size["tokens"]),
    "16 queries, grouped heads, a past": lambda size: inputs(
        size, tokens=16, group=2, past=2 * size["tokens"], uniform=79.0
    ),
    "a faint key with the greatest value": faint_greatest,
    "one query, a past, small beta": lambda size: inputs(
        size, tokens=1, past=size["tokens"], beta=0.02
    ),
    "3 queries, a past, free energy alone": lambda size: inputs(
        size, tokens=3, past=30, group=2, present=("q", "k", "v", "beta")
    ),
    "2 queries, a past, mean": lambda size: inputs(
        size, tokens=2, past=30, present=("q", "k", "v", "gate"), equal_values=True, batch=2
    ),
    "3 queries, a past, full, padding": lambda size: inputs(
        size, tokens=3, past=size["tokens"], causal=False, padding=True, batch=2
    ),
    "a past, padding, ramp 500": lambda size: inputs(
        size, tokens=3, past=size["tokens"] // 2, padding=True, ramp=500.0, batch=2
    ),
    "full, padding, ramp 140": lambda size: inputs(
        size, causal=False, padding=True, ramp=140.0, batch=2
    ),
    "sharp, ramp 500": lambda size: inputs(size, sharpness=8.0, ramp=500.0),
    "range 500, beta 40": lambda size: inputs(size, beta=40.0, uniform=500.0),
    "no gate": lambda size: inputs(size, present=("q", "k", "v", "beta", "lam")),
    "no gate, ramp 140": lambda size: inputs(
        size, ramp=140.0, present=("q", "k", "v", "beta", "lam")
    ),
    "free energy alone, ramp 140": lambda size: inputs(
        size, ramp=140.0, present=("q", "k", "v", "beta")
    ),
    "free energy alone": lambda size: inputs(size, present=("q", "k", "v", "beta")),
    "mean": lambda size: inputs(size, present=("q", "k", "v", "gate")),
}

SUITE = Suite(
    op="fem_attention",
    cases=CASES,
    definition=definition,
    call=call,
    small={"batch": 1, "heads": 2, "tokens": 45, "dk": 16, "dv": 8},
    real={"batch": 2, "heads": 2, "tokens": 1021, "dk": 128, "dv": 64},
    # F of one value is that value for any beta, so the float64 gradient is rounding too, and any
    # small number is correct.
    loose={("one token", "d beta"): 1e12},
)
