"""The operations whose cost is quadratic in the tokens, as their layers call them; each beside standard attention over as many numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kernels.cem_attention import Diagonal, cem_attention
from kernels.fem_attention import fem_attention
from kernels.second_order_attention import second_order_attention
from kernels.symmetric_attention import symmetric_attention
from tools.bench.workloads.base import STANDARD_ATTENTION, Draw, Inputs, Outputs, Size, Workload, per_pair


def gated_read(draw: Draw, size: Size) -> Inputs:
    """v, beta, lambda and gate of the free-energy read."""
    return {
        "v": draw.heads(size, size.value),
        "beta": draw.normal(size.heads, size.value, change=lambda x: softplus(x / 4 + 1.8), wide=True),
        "lam": draw.heads(size, size.value, torch.sigmoid),
        "gate": draw.heads(size, size.value, softplus),
    }


def _fem_inputs(draw: Draw, size: Size) -> Inputs:
    return {"q": draw.heads(size, size.key), "k": draw.heads(size, size.key), **gated_read(draw, size)}


def _fem(inputs: Inputs, implementation: str) -> Outputs:
    return (fem_attention(**inputs, implementation=implementation),)


def _cem_inputs(draw: Draw, size: Size) -> Inputs:
    width = size.heads * size.key
    slopes = 2.0 ** (-8.0 * torch.arange(1, size.heads + 1, device=draw.device) / size.heads)
    return {
        "q": draw.heads(size, size.key),
        "k": draw.heads(size, size.key),
        "slopes": slopes,
        "self_bias": draw.normal(1, wide=True),
        "cross_bias": draw.normal(1, wide=True),
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

    angles = torch.rand(1, 1, size.tokens, size.key // 2, generator=draw.rng, device=draw.device) * 6.28
    return {
        "q": draw.heads(size, size.key),
        "k": draw.heads(size, size.key),
        "gram": draw.normal(size.heads, size.key, size.key, change=positive_definite, wide=True),
        "temperature": draw.normal(size.heads, change=lambda x: size.key + x, wide=True),
        "newton_temperature": draw.normal(size.heads, change=lambda x: size.key + x, wide=True),
        "turn": torch.cat((angles.cos(), angles.sin()), dim=-1),
    }


def _second_order(inputs: Inputs, implementation: str) -> Outputs:
    return (second_order_attention(**inputs, implementation=implementation),)


def _symmetric_inputs(draw: Draw, size: Size) -> Inputs:
    def on_the_sphere(x: Tensor) -> Tensor:
        return x * (x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True))

    return {"z": draw.heads(size, size.key, on_the_sphere)}


def _symmetric(inputs: Inputs, implementation: str) -> Outputs:
    return (symmetric_attention(inputs["z"], implementation=implementation),)


def _bisoftmax(inputs: Inputs, implementation: str) -> Outputs:
    return (symmetric_attention(inputs["z"], kind="bisoftmax", causal=False, implementation=implementation),)


_SAME = dict.fromkeys(STANDARD_ATTENTION, lambda size: Size(size.batch, size.tokens, size.heads, size.key, size.key))
_TWICE = dict.fromkeys(STANDARD_ATTENTION, lambda size: size.wider(2))

READS = (
    Workload(
        name="fem_attention",
        op="fem_attention",
        about="FEM-SM's read at 1.3B",
        inputs=_fem_inputs,
        call=_fem,
        flops=per_pair(lambda size: size.key + 2 * size.value),
        baselines=_TWICE,
    ),
    Workload(
        name="fem_attention, narrow",
        op="fem_attention",
        about="FEM-SM's read at 340M",
        inputs=_fem_inputs,
        call=_fem,
        flops=per_pair(lambda size: size.key + 2 * size.value),
        key=64,
        value=32,
        small=(2, 16, 8),
        baselines=_TWICE,
    ),
    Workload(
        name="cem_attention",
        op="cem_attention",
        about="CEM's attention, the diagonal shared by the heads",
        inputs=_cem_inputs,
        call=_cem,
        # A pair's score and read in each head, and the diagonal's score, as wide as the model, once.
        flops=per_pair(lambda size: 3 * size.key),
        key=64,
        value=64,
        small=(2, 32, 32),
        baselines=_SAME,
    ),
    Workload(
        name="second_order_attention",
        op="second_order_attention",
        about="MHA2nd1st's step at 1.3B",
        inputs=_second_order_inputs,
        call=_second_order,
        flops=per_pair(lambda size: 4 * size.key),
        value=128,
        small=(2, 32, 32),
        baselines=_SAME,
    ),
    Workload(
        name="symmetric_attention",
        op="symmetric_attention",
        about="Hyper-SET's attention, the row softmax (causal)",
        inputs=_symmetric_inputs,
        call=_symmetric,
        flops=per_pair(lambda size: 2 * size.key),
        key=64,
        value=64,
        small=(2, 32, 32),
        baselines=_SAME,
    ),
    Workload(
        name="symmetric_attention, bisoftmax",
        op="symmetric_attention",
        about="Hyper-SET's attention, rows and columns (all pairs: twice a causal mask's)",
        inputs=_symmetric_inputs,
        call=_bisoftmax,
        flops=per_pair(lambda size: 4 * size.key),
        key=64,
        value=64,
        small=(2, 32, 32),
        baselines=_SAME,
    ),
)
