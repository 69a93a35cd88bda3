"""Tests of YuriiFormer's steps against the published equations, and of layers without momentum
between its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fem_megatron.block import Block
from fem_megatron.config import ModelConfig
from fem_megatron.parallel import OneProcess
from fem_megatron.state import Context
from tests.fem_megatron.conftest import drawn, tokens
from tests.fem_megatron.test_baselines import EPS, ROUNDING, attention, norm

MODEL = ModelConfig(
    mixer="yuriiformer",
    hidden_size=16,
    num_attention_heads=2,
    num_layers=2,
    ffn_hidden_size=24,
    norm_eps=EPS,
)


def block(model: ModelConfig = MODEL) -> Any:
    return drawn(Block(model.blocks()[0], OneProcess(torch.float64)), spread=0.4)


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return norm(centred, weight)


def swiglu(layer: Any, h: Tensor) -> Tensor:
    gate, up = layer.gate_up
    g = h @ gate.T
    return (g * torch.sigmoid(g) * (h @ up.T)) @ layer.down.weight.T


@torch.no_grad()
def test_a_layer_is_two_steps_of_nesterovs_method() -> None:
    made, stream = block(), tokens(9, b=1, hidden=32)
    x, v = stream[:, 0].split(16, dim=-1)
    for layer, step in ((made.mixer, attention), (made.mlp, swiglu)):
        mu = 1 / (1 + torch.exp(-layer.mu))
        beta = 1 / (1 + torch.exp(-layer.beta))
        gamma = torch.log1p(torch.exp(layer.gamma))
        f = step(layer, norm(x + mu * v, layer.norm.weight))
        v = layer_norm(beta * v + gamma * f, layer.velocity_norm.weight)
        x = x + v
    torch.testing.assert_close(made(stream, Context())[:, 0], torch.cat((x, v), -1), **ROUNDING)


@torch.no_grad()
def test_training_starts_with_much_of_the_velocity_and_all_of_the_step() -> None:
    weights = MODEL.blocks()[0].weights()
    for part in ("mixer", "mlp"):
        mu, beta, gamma = (
            torch.tensor(weights[f"{part}.{name}"].init) for name in ("mu", "beta", "gamma")
        )
        assert [float(mu.sigmoid()), float(beta.sigmoid())] == pytest.approx([0.9, 0.9])
        assert float(torch.nn.functional.softplus(gamma)) == pytest.approx(1.0)


@torch.no_grad()
def test_without_momentum_no_velocity_is_read() -> None:
    made = block()
    for layer in (made.mixer, made.mlp):
        layer.mu.fill_(-1000.0)
        layer.beta.fill_(-1000.0)
    stream = tokens(9, hidden=32)
    other = torch.cat((stream[..., :16], torch.full_like(stream[..., 16:], 1e3)), -1)
    assert torch.equal(made(stream, Context()), made(other, Context()))


@torch.no_grad()
@pytest.mark.parametrize(
    "settings", [{"mixer": "transformer"}, {"mixer": "hyperset", "recurrence": 3}, {"mixer": "cem"}]
)
def test_a_layer_without_momentum_hands_the_velocity_on(settings: dict[str, Any]) -> None:
    made, stream = block(replace(MODEL, **settings)), tokens(9, hidden=32)
    plain = made(stream[..., :16].contiguous(), Context())
    # 1e-12: float64; `plain` reads a contiguous copy of the slice.
    torch.testing.assert_close(
        made(stream, Context()), torch.cat((plain, stream[..., 16:]), -1), rtol=1e-12, atol=1e-12
    )


def test_one_layer_with_momentum_makes_the_streams_of_all_twice_as_wide() -> None:
    hybrid = replace(MODEL, mixer="fem_softmax", pattern=("fem_softmax", "yuriiformer"))
    assert (MODEL.stream_size, hybrid.stream_size, replace(hybrid, pattern=None).stream_size) == (
        32,
        32,
        16,
    )
    assert (
        replace(MODEL, mlp="swiglu").stream_size
        == replace(MODEL, mixer="fem_gla", mlp="yuriiformer").stream_size
        == 32
    )
