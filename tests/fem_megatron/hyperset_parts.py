"""What the tests of Hyper-SET share: small layers with random weights, and the iterations as a block runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.hyperset.layer import HyperSet
from fem_megatron.mixers.hyperset.shape import HyperSetConfig, HyperSetShape
from fem_megatron.parallel import OneProcess
from fem_megatron.state import Context

ROUNDING: Any = {"rtol": 1e-10, "atol": 1e-12}  # float64 over a few iterations
CAUSAL, WHOLE = ("softmax", "sigmoid", "linear"), ("bisoftmax", "sigmoid", "linear")
FEED_FORWARDS = ("relu", "softmax", "gated")
UPDATES = ("gradient", "momentum", "rmsprop", "adam")


def shape(*, hidden: int = 16, heads: int = 2, causal: bool = True, recurrence: int = 3, **switches: Any) -> HyperSetShape:
    sizes = {key: switches.pop(key) for key in ("norm_eps", "rope") if key in switches}
    chosen = {"multiplier": 2, "time_size": 8, "attention": "softmax" if causal else "bisoftmax", **switches}
    model = ModelConfig(
        hidden_size=hidden, num_attention_heads=heads, causal=causal, recurrence=recurrence, hyperset=HyperSetConfig(**chosen), **sizes
    )
    return HyperSetShape.of(model)


def build(dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: Any) -> HyperSet:
    """A layer with random weights, the zeros of its start too."""
    layer = HyperSet(shape(**sizes), OneProcess(dtype))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=rng, dtype=torch.float64) * 0.3 + ("norm" in name))
    return layer


def tokens(length: int, *, b: int = 2, hidden: int = 16, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(length, b, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run(layer: HyperSet, x: Tensor, iterations: int = 3, **known: Any) -> Tensor:
    """The iterations of one forward pass, with the context that a block gives them."""
    context = Context(**{"causal": layer.shape.causal, **known, "origin": x, "memory": {}})
    for iteration in range(iterations):
        x = layer(x, replace(context.within(str(iteration)), iteration=iteration))
    return x
