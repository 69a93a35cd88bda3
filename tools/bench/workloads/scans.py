"""The operations whose cost is linear in the tokens, as their layers call them; beside them what flash-linear-attention has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.fem.prior_shapes import GlaShape
from fem_megatron.mixers.fem.priors import LinearPrior
from fem_megatron.mixers.fem.shape import FemShape
from fem_megatron.parallel import OneProcess
from fem_megatron.state import Context
from kernels.aft_read import aft_read
from kernels.conditioner_features import conditioner_features
from kernels.gated_delta_rule import gated_delta_rule
from kernels.implementations import VARIABLE
from kernels.linear_attention import linear_attention
from kernels.ssm_read import ssm_read
from kernels.symmetric_attention import symmetric_linear_attention
from kernels.time_decay_scan import time_decay_scan
from tools.bench.workloads.base import Baseline, Draw, Inputs, Outputs, Size, Workload, decaying_inputs, no_products, per_token
from tools.bench.workloads.reads import gated_read


def _gla(inputs: Inputs, implementation: str) -> Outputs:
    return (linear_attention(**inputs, implementation=implementation)[0],)


def _fem_gla_inputs(draw: Draw, size: Size) -> Inputs:
    """The projection's slices as the layer has them, tokens first, and the gated read's."""
    shape = (size.tokens, size.batch, size.heads)
    return {
        "q": draw.normal(*shape, size.key),
        "k": draw.normal(*shape, size.key),
        "decay": draw.normal(*shape, 1),
        **gated_read(draw, size),
    }


def _fem_gla(inputs: Inputs, implementation: str) -> Outputs:
    """Through the layer's prior, features and RoPE included, which chooses the operation by itself."""
    given = dict(inputs)
    parts = {name: given.pop(name) for name in ("q", "k", "decay")}
    heads, key = parts["q"].shape[2:]
    model = ModelConfig(mixer="fem_gla", hidden_size=heads * key, num_attention_heads=heads)
    prior = LinearPrior(FemShape.of(model, GlaShape), OneProcess())
    with asked_for("linear_attention", implementation):
        return (prior(parts, given["v"], given.get("beta"), given.get("lam"), given.get("gate"), Context()),)


def _plain_gla_inputs(draw: Draw, size: Size) -> Inputs:
    given = _fem_gla_inputs(draw, size)
    return {name: given[name] for name in ("q", "k", "decay", "v")}


@contextmanager
def asked_for(op: str, implementation: str) -> Iterator[None]:
    """``FEM_KERNELS`` asks for an implementation where a layer makes the call."""
    before = os.environ.get(VARIABLE)
    if implementation != "auto":
        os.environ[VARIABLE] = f"{op}={implementation}"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


PLAIN_GLA = Baseline(
    "ours: GLA's read by the same engine",
    _plain_gla_inputs,
    lambda inputs: _fem_gla(inputs, "auto"),
    per_token(lambda size: 2 * size.key * size.value),
    engine="auto",
)


def _aft_inputs(draw: Draw, size: Size) -> Inputs:
    return {"k": draw.heads(size, size.value), **gated_read(draw, size)}


def _aft(inputs: Inputs, implementation: str) -> Outputs:
    return (aft_read(**inputs, implementation=implementation)[0],)


def _ssm_inputs(draw: Draw, size: Size) -> Inputs:
    states = size.key
    rates = torch.arange(1, states + 1, device=draw.device)
    return {
        "delta": draw.heads(size, size.value, lambda x: softplus(x - 4), wide=True),
        "rate": draw.normal(size.heads, size.value, states, change=lambda x: softplus(x / 4 + rates), wide=True),
        "b_in": draw.heads(size, states, softplus, wide=True),
        "c_out": draw.heads(size, states, softplus, wide=True),
        **gated_read(draw, size),
    }


def _ssm(inputs: Inputs, implementation: str) -> Outputs:
    return (ssm_read(**inputs, implementation=implementation)[0],)


def _scan_inputs(draw: Draw, size: Size) -> Inputs:
    a, x, _ = draw.packed(size.tokens, size.batch, size.heads * size.value, parts=3)
    return {"a": a, "x": x}


def _scan(inputs: Inputs, implementation: str) -> Outputs:
    return (time_decay_scan(**inputs, softplus=True, implementation=implementation),)


def _features_inputs(draw: Draw, size: Size) -> Inputs:
    channels = size.heads * size.value
    *_, logits = draw.packed(size.tokens, size.batch, channels, parts=3)
    return {
        "logits": logits,
        "state": draw.normal(size.tokens, size.batch, channels, wide=True),
        "weight": draw.normal(channels),
        "eps": 1e-6,
    }


def _features(inputs: Inputs, implementation: str) -> Outputs:
    return (conditioner_features(**inputs, implementation=implementation),)


def _symmetric_inputs(draw: Draw, size: Size) -> Inputs:
    return {"z": draw.heads(size, size.key)}


def _symmetric(inputs: Inputs, implementation: str) -> Outputs:
    return (symmetric_linear_attention(inputs["z"])[0],)  # it has one implementation


def _delta_inputs(draw: Draw, size: Size) -> Inputs:
    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    return {
        "q": draw.heads(size, size.key, unit),
        "k": draw.heads(size, size.key, unit),
        "v": draw.heads(size, size.value),
        "beta": draw.steps(size, torch.sigmoid, wide=True),
        "log_decay": draw.steps(size, lambda x: logsigmoid(x + 4), wide=True),
    }


def _delta(inputs: Inputs, implementation: str) -> Outputs:
    return (gated_delta_rule(**inputs, implementation=implementation)[0],)


SCANS = (
    Workload(
        name="FEM-GLA's read",
        op="linear_attention",
        about="FEM-GLA's read at 1.3B, with its features",
        inputs=_fem_gla_inputs,
        call=_fem_gla,
        flops=per_token(lambda size: 4 * size.key * size.value),
        baselines={PLAIN_GLA.name: lambda size: size.wider(2), "fla: chunk_simple_gla": lambda size: size.wider(2)},
    ),
    Workload(
        name="linear_attention",
        op="linear_attention",
        about="gated linear attention, a decay a head",
        inputs=decaying_inputs,
        call=_gla,
        flops=per_token(lambda size: 2 * size.key * size.value),
        value=128,
        small=(2, 32, 32),
        baselines={"fla: chunk_simple_gla": lambda size: size},
    ),
    Workload(
        name="aft_read",
        op="aft_read",
        about="FEM-AFT's read at 1.3B",
        inputs=_aft_inputs,
        call=_aft,
        flops=no_products,
        value=85,
        small=(2, 32, 21),
    ),
    Workload(
        name="ssm_read",
        op="ssm_read",
        about="FEM-Mamba's read at 1.3B, 96 states",
        inputs=_ssm_inputs,
        call=_ssm,
        flops=no_products,
        key=96,
        small=(2, 8, 16),
    ),
    Workload(
        name="time_decay_scan",
        op="time_decay_scan",
        about="the conditioner's scan at 1.3B",
        inputs=_scan_inputs,
        call=_scan,
        flops=no_products,
        value=4,
        small=(2, 32, 4),
        baselines={"fla: chunk_hgrn": lambda size: size},
    ),
    Workload(
        name="conditioner_features",
        op="conditioner_features",
        about="what the conditioner reads off its state, at 1.3B",
        inputs=_features_inputs,
        call=_features,
        flops=no_products,
        value=4,
        small=(2, 32, 4),
    ),
    Workload(
        name="symmetric_linear_attention",
        op="symmetric_linear_attention",
        about="Hyper-SET's attention in linear time",
        inputs=_symmetric_inputs,
        call=_symmetric,
        flops=per_token(lambda size: 2 * size.key * size.key),
        key=64,
        value=64,
        small=(2, 32, 32),
    ),
    Workload(
        name="gated_delta_rule",
        op="gated_delta_rule",
        about="Gated DeltaNet's recurrence at 1.3B",
        inputs=_delta_inputs,
        call=_delta,
        flops=per_token(lambda size: 3 * size.key * size.value),
        key=64,
        value=128,
        small=(2, 16, 32),
    ),
)
