"""CUDA graphs of a model's layers (train.cuda_graphs): each layer's forward and backward pass is one launch from the host.

``torch.cuda.make_graphed_callables`` captures them, within the first forward pass that trains: by then engine and optimizer have put the
weights where they stay. It is given a layer's weights as inputs, under names of their own: a weight's own node in autograd belongs to the
stream that DDP's hooks were made in, which a capture must not wait for. DDP's hooks run at every replay, as without graphs.

Megatron's own way (``CudaGraphManager``, 0.16.1) captures its TransformerLayer by a record that all models of a process share; it wants the
Transformer Engine or inference's random states, and warms up on zeros.

A replay reads and writes the memory that it was captured with. So a layer has one micro-batch under way, whatever a layer decides on the
host it decides once (``Shape.uncapturable``), and hooks within it would see nothing: a layer whose parts have any runs without its graph,
as it does in an evaluation.
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
    """Have a decoder's layers be captured in its first forward pass that trains, and replayed from then on.

    That pass raises RuntimeError where a layer does what no graph holds.
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
    """Whether a forward pass of the layer, now, is one that a graph may stand for."""
    watched = any(part is not None and part._forward_hooks for part in (layer.mixer, layer.mlp))
    return layer.training and torch.is_grad_enabled() and not watched


def _capture(layers: list[MegatronBlock], x: Tensor) -> None:
    """x [s (/ tensor-parallel size under sequence parallelism), b, D]: the first layer's input, on which all of them are tried."""
    given = [
        (x.detach().clone().requires_grad_(), *map(_alias, layer.parameters())) for layer in layers
    ]
    noted = [
        known[1] for layer in layers for weight in layer.parameters() if (known := known_of(weight))
    ]
    before = [one.clone() for one in noted]
    graphed = platform.captured(map(_as_function, layers), given)
    for one, value in zip(noted, before, strict=True):
        one.copy_(value)  # what was tried was no step
    for layer, run in zip(layers, graphed, strict=True):
        _replay(layer, run)


def _alias(weight: nn.Parameter) -> nn.Parameter:
    """The weight's memory under another name, with all that is known of it."""
    alias = nn.Parameter(weight.detach())
    alias.__dict__.update(weight.__dict__)
    return alias


class _Passes(nn.Module):
    """A layer's own forward pass, without the hooks around it and whatever stands in its place later."""

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
