"""Workloads with a cost quadratic in the tokens.

Their baseline is standard attention of the same data size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kernels.cem_attention import Diagonal, cem_attention
from kernels.fem_attention import fem_attention
from kernels.second_order_attention import second_order_attention
from kernels.symmetric_attention import symmetric_attention
from tools.bench.workloads.base import (
    STANDARD_ATTENTION,
    Draw,
    Inputs,
    Outputs,
    Size,
    Workload,
    by_name,
    per_pair,
    queries_and_keys,
)


def gated_read(draw: Draw, size: Size) -> Inputs:
    """Return v, beta, lambda and gate of the free-energy read."""
    return {
        "v": draw.heads(size, size.value),
        "beta": draw.normal(
            size.heads, size.value, change=lambda x: softplus(x / 4 + 1.8), wide=True
        ),
        "lam": draw.heads(size, size.value, torch.sigmoid),
        "gate": draw.heads(size, size.value, softplus),
    }


def _fem_inputs(draw: Draw, size: Size) -> Inputs:
    return {**queries_and_keys(draw, size), **gated_read(draw, size)}


def _cem_inputs(draw: Draw, size: Size) -> Inputs:
    width = size.heads * size.key
    slopes = 2.0 ** (-8.0 * torch.arange(1, size.heads + 1, device=draw.device) / size.heads)
    return {
        **queries_and_keys(draw, size),
        "slopes": slopes,
        "own_bias": draw.normal(1, wide=True),
        "u": draw.normal(size.batch, size.tokens, width),
        "h": draw.normal(size.batch, size.tokens, width),
        "d": draw.normal(1, width, change=lambda x: 0.01 * x),
        "scale": size.key**-0.5,
    }


def _cem(inputs: Inputs, implementation: str) -> Outputs:
    given = dict(inputs)
    diagonal = Diagonal(given.pop("u"), given.pop("h"), given.pop("d"))
    return (cem_attention(**given, diagonal=diagonal, implementation=implementation),)


def _second_order_inputs(draw: Draw, size: Size) -> Inputs:
    def positive_definite(x: Tensor) -> Tensor:
        return x @ x.mT / x.shape[-1] + torch.eye(x.shape[-1], device=x.device)

    angles = (
        torch.rand(1, 1, size.tokens, size.key // 2, generator=draw.rng, device=draw.device) * 6.28
    )
    return {
        **queries_and_keys(draw, size),
        "gram": draw.normal(size.heads, size.key, size.key, change=positive_definite, wide=True),
        "temperature": draw.normal(size.heads, change=lambda x: size.key + x, wide=True),
        "newton_temperature": draw.normal(size.heads, change=lambda x: size.key + x, wide=True),
        "turn": torch.cat((angles.cos(), angles.sin()), dim=-1),
    }


def _symmetric_inputs(draw: Draw, size: Size) -> Inputs:
    def on_the_sphere(x: Tensor) -> Tensor:
        return x * (x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True))

    return {"z": draw.heads(size, size.key, on_the_sphere)}


_bisoftmax = by_name(partial(symmetric_attention, kind="bisoftmax", causal=False))
FEM_READ = per_pair(lambda size: size.key + 2 * size.value)
_SAME = dict.fromkeys(
    STANDARD_ATTENTION, lambda size: Size(size.batch, size.tokens, size.heads, size.key, size.key)
)
_TWICE = dict.fromkeys(STANDARD_ATTENTION, lambda size: size.wider(2))


def _fem_read(name: str, *, key: int, value: int, small: tuple[int, int, int]) -> Workload:
    return Workload(
        name,
        "fem_attention",
        _fem_inputs,
        by_name(fem_attention),
        FEM_READ,
        16,
        key,
        value,
        small,
        _TWICE,
    )


SMALL = (2, 32, 32)
HYPERSET: dict[str, Any] = {
    "op": "symmetric_attention",
    "inputs": _symmetric_inputs,
    "key": 64,
    "value": 64,
    "small": SMALL,
    "baselines": _SAME,
}

READS = (
    # FEM-SM's read at 1.3B and at 340M.
    _fem_read("fem_attention", key=128, value=64, small=(2, 32, 16)),
    _fem_read("fem_attention, narrow", key=64, value=32, small=(2, 16, 8)),
    # CEM's attention with the diagonal shared by the heads: a score and a read per pair and head,
    # and the diagonal's score once, as wide as the model.
    Workload(
        "cem_attention",
        "cem_attention",
        _cem_inputs,
        _cem,
        per_pair(lambda size: 3 * size.key),
        16,
        64,
        64,
        SMALL,
        _SAME,
    ),
    # MHA2nd1st's step at 1.3B.
    Workload(
        name="second_order_attention",
        op="second_order_attention",
        inputs=_second_order_inputs,
        call=by_name(second_order_attention),
        flops=per_pair(lambda size: 4 * size.key),
        value=128,
        small=SMALL,
        baselines=_SAME,
    ),
    # Hyper-SET's attention: the row softmax (causal), and the softmax over rows and columns (all
    # pairs, twice those of a causal mask).
    Workload(
        name="symmetric_attention",
        call=by_name(symmetric_attention),
        flops=per_pair(lambda size: 2 * size.key),
        **HYPERSET,
    ),
    Workload(
        name="symmetric_attention, bisoftmax",
        call=_bisoftmax,
        flops=per_pair(lambda size: 4 * size.key),
        **HYPERSET,
    ),
)
