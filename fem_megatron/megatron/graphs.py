"""CUDA graphs of a model's layers (train.cuda_graphs): one host launch per layer and pass.

``torch.cuda.make_graphed_callables`` captures the layers in the first training forward pass, when
engine and optimizer have finished allocating the weights. It receives a layer's weights as inputs,
as aliases: the autograd node of a weight belongs to the stream in which DDP's hooks were created,
and a capture must not wait for that stream. DDP's hooks run at every replay, as without graphs.
Megatron's ``CudaGraphManager`` (0.16.1) is not used: it captures its TransformerLayer with a record
that all models of a process share, requires the Transformer Engine or inference random states, and
warms up on zeros.

A replay reads and writes the memory with which it was captured. Therefore a layer can process only
one micro-batch at a time, decisions on the host are made only once (``Shape.uncapturable``), and
hooks inside a layer would not run. A layer with hooks on its mixer or MLP runs without its graph,
and so does every layer in an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fem_megatron.megatron import platform
from fem_megatron.megatron.fp8 import known_of
from fem_megatron.megatron.specs import MegatronBlock


def graph_layers(decoder: Any) -> None:
    """Capture a decoder's layers in its first training forward pass, and replay them afterwards.

    The first training forward pass raises RuntimeError if a layer does something that a graph
    cannot contain.
    """
    forward = decoder.forward

    @wraps(forward)
    def capturing(hidden_states: Tensor, **named: Any) -> Any:
        if all(map(_replays, decoder.layers)):
            decoder.forward = forward
            _capture(list(decoder.layers), hidden_states)
        return forward(hidden_states, **named)

    decoder.forward = capturing


def _replays(layer: MegatronBlock) -> bool:
    """Return True if a graph may replace the layer's next forward pass."""
    watched = any(part is not None and part._forward_hooks for part in (layer.mixer, layer.mlp))
    return layer.training and torch.is_grad_enabled() and not watched


def _capture(layers: list[MegatronBlock], x: Tensor) -> None:
    """Capture all layers.

    x [s (/ tensor-parallel size under sequence parallelism), b, D]: sample input.
    """
    given = [
        (x.detach().clone().requires_grad_(), *map(_alias, layer.parameters())) for layer in layers
    ]
    noted = [
        known[1] for layer in layers for weight in layer.parameters() if (known := known_of(weight))
    ]
    before = [one.clone() for one in noted]
    graphed = platform.captured(map(_as_function, layers), given)
    for one, value in zip(noted, before, strict=True):
        one.copy_(value)  # trial runs are not steps
    for layer, run in zip(layers, graphed, strict=True):
        _replay(layer, run)


def _alias(weight: nn.Parameter) -> nn.Parameter:
    """Return a parameter that shares the weight's memory and attributes."""
    alias = nn.Parameter(weight.detach())
    alias.__dict__.update(weight.__dict__)
    return alias


class _Passes(nn.Module):
    """Module that runs a layer's original forward pass, without hooks or later replacements."""

    def __init__(self, layer: MegatronBlock) -> None:
        super().__init__()
        self.layer, self.own = layer, layer.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x)[0]


def _as_function(layer: MegatronBlock) -> Callable[..., Tensor]:
    passes = _Passes(layer)
    names = [name for name, _ in passes.named_parameters()]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        out: Tensor = functional_call(passes, dict(zip(names, weights, strict=True)), (x,))
        return out

    return run


def _replay(layer: MegatronBlock, run: Callable[..., Tensor]) -> None:
    forward, weights = layer.forward, list(layer.parameters())

    @wraps(forward)
    def replayed(hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        if not _replays(layer):
            return forward(hidden_states, **named)
        return run(hidden_states, *weights), None

    vars(layer)["forward"] = replayed
