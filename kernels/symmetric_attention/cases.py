"""Cases of Hyper-SET's attention: z on its sphere, sharper scores, equal tokens, padding, a past,
rows of padding alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kernels.check import Draw, Inputs, Outputs, Suite
from kernels.pairs import allowed_pairs
from kernels.symmetric_attention.op import symmetric_attention

Size = Mapping[str, int]


def _sphere(size: Size, seed: int = 0, times: float = 1.0) -> Tensor:
    """Return z of norm sqrt(p) times ``times``."""
    z = Draw(seed + size["tokens"]).normal(
        size["batch"], size["heads"], size["tokens"], size["width"]
    )
    return torch.nn.functional.normalize(z, dim=-1) * size["width"] ** 0.5 * times


def _made(kind: str, causal: bool, times: float = 1.0) -> Callable[[Size], Inputs]:
    return lambda size: {"z": _sphere(size, times=times), "kind": kind, "causal": causal}


def _one_token(kind: str, causal: bool) -> Callable[[Size], Inputs]:
    return lambda size: {"z": _sphere({**size, "tokens": 1}), "kind": kind, "causal": causal}


def _alike(kind: str, causal: bool) -> Callable[[Size], Inputs]:
    """Return a case where every token has the same z, so that all weights are equal."""
    return lambda size: {
        "z": _sphere(size)[:, :, :1].expand(-1, -1, size["tokens"], -1).clone(),
        "kind": kind,
        "causal": causal,
    }


def _close(kind: str, causal: bool) -> Callable[[Size], Inputs]:
    """Return a case with pairs of tokens of almost one direction, eight times as sharp, so that
    rows have two competing keys.
    """

    def make(size: Size) -> Inputs:
        z = _sphere(size, times=8**0.5)
        z[:, :, 1::2] = z[:, :, : z.shape[2] // 2 * 2 : 2] + 0.05 * _sphere(size, 1)[:, :, 1::2]
        return {"z": z, "kind": kind, "causal": causal}

    return make


def _padding(kind: str, causal: bool) -> Callable[[Size], Inputs]:
    """Return a case with left padding over more than a block, holes, and a sequence that is padding
    only.
    """

    def make(size: Size) -> Inputs:
        z, tokens = _sphere({**size, "batch": 3}), size["tokens"]
        valid = torch.ones(3, tokens, dtype=torch.bool)
        valid[0, : tokens // 2 + 1] = False
        valid[1, [2, tokens // 3, tokens - 1]] = False
        valid[2] = False
        return {"z": z, "valid": valid, "kind": kind, "causal": causal}

    return make


def _past(causal: bool) -> Callable[[Size], Inputs]:
    """Return a case with keys before z's own: the last third of the tokens reads all of them."""

    def make(size: Size) -> Inputs:
        keys = _sphere(size)
        return {
            "z": keys[:, :, 2 * size["tokens"] // 3 :].clone(),
            "keys": keys,
            "kind": "sigmoid",
            "causal": causal,
        }

    return make


def _definition(x: Inputs) -> Outputs:
    """Return the read from all pairs at once, with each softmax computed separately."""
    z: Tensor = x["z"]
    keys: Tensor = {"keys": z, **x}["keys"]
    t, tk = z.shape[2], keys.shape[2]
    seen = allowed_pairs(torch.arange(tk - t, tk, device=z.device), tk, x["causal"], x.get("valid"))
    s = z @ keys.mT / math.sqrt(z.shape[-1])
    if x["kind"] == "sigmoid":
        a = s.sigmoid() * (-s).sigmoid()
        return ((a if seen is None else a.masked_fill(~seen, 0.0)) @ keys,)
    s = s if seen is None else s.masked_fill(~seen, -torch.inf)
    return ((s.softmax(-1) + (s.softmax(-2) if x["kind"] == "bisoftmax" else 0)) @ keys,)


def _call(x: Inputs, implementation: str) -> Outputs:
    return (symmetric_attention(**x, implementation=implementation),)


_KINDS = (("bisoftmax", False), ("sigmoid", True), ("sigmoid", False))
_CASES = {"normal": _made, "one token": _one_token, "alike": _alike, "padding": _padding}

SUITE = Suite(
    op="symmetric_attention",
    cases={
        **{
            f"{kind}{', causal' if causal else ''}: {name}": case(kind, causal)
            for kind, causal in _KINDS
            for name, case in _CASES.items()
        },
        "bisoftmax: sharp x8": _made("bisoftmax", False, 8**0.5),
        "bisoftmax: sharp pairs": _close("bisoftmax", False),
        "sigmoid, causal: sharp x8": _made("sigmoid", True, 8**0.5),
        "sigmoid, causal: past": _past(True),
        "sigmoid: past": _past(False),
    },
    definition=_definition,
    call=_call,
    small={"batch": 2, "heads": 2, "tokens": 37, "width": 20},
    real={"batch": 2, "heads": 4, "tokens": 2041, "width": 64},
    loose={},
)
