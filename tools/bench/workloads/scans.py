"""Workloads with a cost linear in the tokens.

Their baselines are flash-linear-attention's counterparts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.fem.prior_shapes import GlaShape
from fem_megatron.mixers.fem.priors import LinearPrior, Values
from fem_megatron.mixers.fem.shape import FemShape
from fem_megatron.rope import Rope
from fem_megatron.state import Context
from fem_megatron.update import rotations
from kernels.aft_read import aft_read
from kernels.conditioner_features import conditioner_features
from kernels.fem_projection import fem_projection
from kernels.gated_delta_rule import gated_delta_rule
from kernels.gated_silu import gated_silu
from kernels.implementations import VARIABLE
from kernels.linear_attention import linear_attention
from kernels.momentum_step import momentum_step
from kernels.residual_norm import residual_norm
from kernels.rotary import rotary
from kernels.ssm_read import ssm_read
from kernels.symmetric_attention import symmetric_linear_attention
from kernels.time_decay_scan import time_decay_scan
from tools.bench.workloads.base import (
    FLA_GLA,
    FLA_HGRN,
    Baseline,
    Draw,
    Inputs,
    Outputs,
    Size,
    Workload,
    by_name,
    decaying_inputs,
    per_token,
)
from tools.bench.workloads.reads import gated_read


def _fem_gla_inputs(draw: Draw, size: Size) -> Inputs:
    """Return the inputs of the FEM-GLA layer's prior.

    These are q, k and decay, slices of the layer's projection with tokens first, and the inputs of
    the gated read.
    """
    shape = (size.tokens, size.batch, size.heads)
    return {
        "q": draw.normal(*shape, size.key),
        "k": draw.normal(*shape, size.key),
        "decay": draw.normal(*shape, 1),
        **gated_read(draw, size),
    }


def _fem_gla(inputs: Inputs, implementation: str) -> Outputs:
    """Call the prior of the FEM-GLA layer.

    The prior computes the features and selects the implementation of its operation itself.
    """
    given = dict(inputs)
    parts = {name: given.pop(name) for name in ("q", "k", "decay")}
    heads, key = parts["q"].shape[2:]
    model = ModelConfig(mixer="fem_gla", hidden_size=heads * key, num_attention_heads=heads)
    prior = LinearPrior(FemShape.of(model, GlaShape))
    with selecting("linear_attention", implementation):
        return (prior(parts, Values(**given), Context()),)


def _plain_gla_inputs(draw: Draw, size: Size) -> Inputs:
    given = _fem_gla_inputs(draw, size)
    return {name: given[name] for name in ("q", "k", "decay", "v")}


@contextmanager
def selecting(op: str, implementation: str) -> Iterator[None]:
    """Select an operation's implementation with the variable ``FEM_KERNELS`` inside the context.

    It applies to calls that a layer makes, which have no argument for the implementation.
    """
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


def _ssm_inputs(draw: Draw, size: Size) -> Inputs:
    states = size.key
    rates = torch.arange(1, states + 1, device=draw.device)
    return {
        "delta": draw.heads(size, size.value, lambda x: softplus(x - 4), wide=True),
        "rate": draw.normal(
            size.heads, size.value, states, change=lambda x: softplus(x / 4 + rates), wide=True
        ),
        "b_in": draw.heads(size, states, softplus, wide=True),
        "c_out": draw.heads(size, states, softplus, wide=True),
        **gated_read(draw, size),
    }


def _scan_inputs(draw: Draw, size: Size) -> Inputs:
    a, x, _ = draw.packed(size.tokens, size.batch, size.heads * size.value, parts=3)
    return {"a": a, "x": x}


def _features_inputs(draw: Draw, size: Size) -> Inputs:
    channels = size.heads * size.value
    *_, logits = draw.packed(size.tokens, size.batch, channels, parts=3)
    return {
        "logits": logits,
        "state": draw.normal(size.tokens, size.batch, channels, wide=True),
        "weight": draw.normal(channels),
        "eps": 1e-6,
    }


def _norm_inputs(draw: Draw, size: Size) -> Inputs:
    channels = size.heads * size.value
    return {
        "x": draw.normal(size.tokens, size.batch, channels),
        "weight": draw.normal(channels),
        "eps": 1e-6,
        "second": draw.normal(channels),
    }


def _norms(inputs: Inputs, implementation: str) -> Outputs:
    _, h, u = residual_norm(**inputs, implementation=implementation)
    assert u is not None
    return h, u


def _momentum_inputs(draw: Draw, size: Size) -> Inputs:
    channels = size.heads * size.value
    return {
        "stream": draw.normal(size.tokens, size.batch, 2 * channels),
        "step": draw.normal(size.tokens, size.batch, channels),
        "beta": draw.normal(1),
        "gamma": draw.normal(1),
        "weight": draw.normal(channels),
        "eps": 1e-6,
    }


def _gated_inputs(draw: Draw, size: Size) -> Inputs:
    shape = (size.tokens, size.batch, size.heads * size.value)
    return {"z": draw.normal(*shape), "gate": draw.normal(*shape)}


def _gated(inputs: Inputs, implementation: str) -> Outputs:
    return gated_silu(**inputs, implementation=implementation)


def _projection_inputs(draw: Draw, size: Size) -> Inputs:
    """Return the inputs for FEM over a softmax prior.

    z contains [q | k | v | lambda's logit | g's logit] of every head (g: the gate). The features
    are those of the conditioner.
    """
    widths = {"q": size.key, "k": size.key} | dict.fromkeys(("v", "lam", "gate"), size.value)
    z = draw.normal(size.tokens, size.batch, size.heads * sum(widths.values()))
    n = max(4, size.heads * size.value // 16)
    cos, sin = rotations(z, size.key, Context(), Rope(10000.0))
    features = draw.normal(size.tokens, size.batch, n)
    weight = draw.normal(z.shape[2], n, change=lambda x: x / 50)
    return {
        "z": z,
        "features": features,
        "weight": weight,
        "cos": cos,
        "sin": sin,
        "widths": widths,
    }


def _projection(inputs: Inputs, implementation: str) -> Outputs:
    z, features, weight, cos, sin, widths = inputs.values()
    return tuple(
        fem_projection(
            z, [(features, weight)], (cos, sin), widths, 1e-6, implementation=implementation
        ).values()
    )


def _rotary_inputs(draw: Draw, size: Size) -> Inputs:
    """Return the inputs of the Transformer's projection: z, and the rotary embedding's cos and sin.

    z contains [q | k | v] of every head.
    """
    z = draw.normal(size.tokens, size.batch, size.heads, 3 * size.key)
    cos, sin = (t.to(z.dtype) for t in rotations(z, size.key, Context(), Rope(10000.0)))
    return {"z": z, "cos": cos, "sin": sin}


def _rotary(inputs: Inputs, implementation: str) -> Outputs:
    q, k, _ = inputs["z"].chunk(3, dim=-1)
    return tuple(rotary(q, k, inputs["cos"], inputs["sin"], implementation=implementation))


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


_ONCE = per_token(lambda size: 2 * size.key * size.value)
_BOTH = per_token(lambda size: 4 * size.key * size.value)
_WIDER = dict.fromkeys((PLAIN_GLA.name, FLA_GLA), lambda size: size.wider(2))

SCANS = (
    # FEM-GLA's read at 1.3B, with its features.
    Workload(
        "FEM-GLA's read", "linear_attention", _fem_gla_inputs, _fem_gla, _BOTH, baselines=_WIDER
    ),
    # Gated linear attention with one decay per head.
    Workload(
        name="linear_attention",
        op="linear_attention",
        inputs=decaying_inputs,
        call=by_name(linear_attention),
        flops=_ONCE,
        value=128,
        small=(2, 32, 32),
        baselines={FLA_GLA: lambda size: size},
    ),
    # FEM-AFT's read at 1.3B, and FEM-Mamba's of 96 states.
    Workload(
        "aft_read",
        "aft_read",
        _aft_inputs,
        by_name(aft_read),
        value=85,
        small=(2, 32, 21),
    ),
    Workload(
        "ssm_read",
        "ssm_read",
        _ssm_inputs,
        by_name(ssm_read),
        key=96,
        small=(2, 8, 16),
    ),
    # The conditioner's scan at 1.3B, and the features of its state.
    Workload(
        name="time_decay_scan",
        op="time_decay_scan",
        inputs=_scan_inputs,
        call=by_name(partial(time_decay_scan, softplus=True)),
        value=4,
        small=(2, 32, 4),
        baselines={FLA_HGRN: lambda size: size},
    ),
    Workload(
        name="conditioner_features",
        op="conditioner_features",
        inputs=_features_inputs,
        call=by_name(conditioner_features),
        value=4,
        small=(2, 32, 4),
    ),
    Workload(
        name="residual_norm",
        op="residual_norm",
        inputs=_norm_inputs,
        call=_norms,
        value=128,
        small=(2, 32, 4),
    ),
    Workload(
        name="momentum_step",
        op="momentum_step",
        inputs=_momentum_inputs,
        call=by_name(momentum_step),
        value=128,
        small=(2, 32, 4),
    ),
    Workload(
        name="gated_silu",
        op="gated_silu",
        inputs=_gated_inputs,
        call=_gated,
        small=(2, 32, 4),
    ),
    Workload(
        name="fem_projection",
        op="fem_projection",
        inputs=_projection_inputs,
        call=_projection,
        flops=per_token(
            lambda size: size.heads * size.value // 16 * (2 * size.key + 3 * size.value)
        ),
        small=(2, 32, 16),
    ),
    Workload(
        name="rotary",
        op="rotary",
        inputs=_rotary_inputs,
        call=_rotary,
        small=(2, 32, 16),
    ),
    # Hyper-SET's attention in linear time, which has one implementation.
    Workload(
        name="symmetric_linear_attention",
        op="symmetric_linear_attention",
        inputs=lambda draw, size: {"z": draw.heads(size, size.key)},
        call=lambda inputs, implementation: (symmetric_linear_attention(inputs["z"])[0],),
        flops=per_token(lambda size: 2 * size.key * size.key),
        key=64,
        value=64,
        small=(2, 32, 32),
    ),
    # Gated DeltaNet's recurrence at 1.3B.
    Workload(
        name="gated_delta_rule",
        op="gated_delta_rule",
        inputs=_delta_inputs,
        call=by_name(gated_delta_rule),
        flops=per_token(lambda size: 3 * size.key * size.value),
        key=64,
        value=128,
        small=(2, 16, 32),
    ),
)
