"""Tests of the Energy Transformer and of NRGPT: numbers from the published energies, gradients of
the energies with rotated heads, padding, and the decrease of the energy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.energy_transformer.shape import EnergyTransformerConfig
from fem_megatron.mixers.nrgpt.shape import NrgptConfig
from fem_megatron.parallel import OneProcess
from fem_megatron.rope import RopeScaling
from fem_megatron.shape import located
from fem_megatron.state import Context
from tests.fem_megatron.conftest import drawn, load_fixture, tokens

ROUNDING: Any = {"rtol": 1e-9, "atol": 1e-9}  # float64 on both sides; that of the other fixtures
NAMES = {
    "energy_transformer": {
        "gamma": "norm.weight",
        "delta": "norm.bias",
        "W_Q": "query.weight",
        "W_K": "key.weight",
        "xi": "memories.weight",
    },
    "nrgpt": {
        "delta": "norm.bias",
        "H": "interaction.weight",
        "P": "rate.weight",
        "c": "scale",
        "W1": "up.weight",
        "b1": "up.bias",
        "W2": "down.weight",
        "b2": "down.bias",
    },
}
YARN = RopeScaling("yarn", 4.0, 24, attention_factor=1.5)
KINDS = ("ff2w", "ff1", "ff2")


def build(mixer: str, *, hidden: int = 8, kind: str = "ff2w", **sizes: Any) -> Any:
    """Return a layer with random weights, also where they start at constants."""
    own: dict[str, Any] = (
        {"nrgpt": NrgptConfig(kind, multiplier=2)}
        if mixer == "nrgpt"
        else {"energy_transformer": EnergyTransformerConfig(multiplier=2)}
    )
    model = ModelConfig(mixer=mixer, hidden_size=hidden, num_attention_heads=2, **own, **sizes)
    shape = model.blocks()[0].mixer
    return drawn(located(shape.layer_class)(shape, OneProcess(torch.float64)))


@pytest.mark.parametrize(
    ("fixture", "sizes"),
    [
        ("energy_transformer_causal", {}),
        ("energy_transformer_bidirectional", {"causal": False}),
        *[(f"nrgpt_{kind}", {"kind": kind}) for kind in KINDS],
    ],
)
def test_the_step_and_its_gradients_are_those_of_the_published_energy(
    fixture: str, sizes: dict[str, Any]
) -> None:
    meta, stored = load_fixture(fixture)
    mixer = "nrgpt" if fixture.startswith("nrgpt") else "energy_transformer"
    layer = build(mixer, rope=False, norm_eps=meta["eps"], **sizes)
    own = dict(layer.named_parameters())
    names = {key: name for key, name in NAMES[mixer].items() if name in own}
    with torch.no_grad():
        for key, name in names.items():
            own[name].copy_(stored[f"param/{key}"].reshape(own[name].shape))
    assert len(names) == len(own)
    x = stored["x"][:, None].requires_grad_()
    y = layer(x, Context(causal=layer.shape.causal))
    torch.testing.assert_close(y, stored["y"][:, None], **ROUNDING)
    grads = torch.autograd.grad((y * stored["w"][:, None]).sum(), (x, *own.values()))
    torch.testing.assert_close(grads[0], stored["dx"][:, None], **ROUNDING)
    for name, grad in zip(own, grads[1:], strict=True):
        key = next(key for key, value in names.items() if value == name)
        torch.testing.assert_close(grad, stored[f"grad/{key}"].reshape(grad.shape), **ROUNDING)


def energy(layer: Any, g: Tensor, keys: Tensor, context: Context) -> Tensor:
    """Return the sum of all tokens' energies, as the diagnostics define them, for given keys."""
    project: Any = layer.project
    layer.project = lambda g, context: (project(g, context)[0], project(keys, context)[1])
    layer.normalise, normalise = (lambda x: x), layer.normalise
    try:
        found = type(layer).diagnose.__wrapped__(layer, g, context, torch.arange(len(g)))
    finally:
        layer.project, layer.normalise = project, normalise
    return sum(value.sum() for name, value in found.items() if name.endswith("energy"))


@pytest.mark.parametrize("sizes", [{}, {"rope_scaling": YARN}, {"rope": False}], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("mixer", ["energy_transformer", "nrgpt"])
def test_the_step_is_a_gradient_of_the_energy_that_is_logged(
    mixer: str, causal: bool, sizes: dict[str, Any]
) -> None:
    """The gradient is exact with rotated heads too: RoPE turns it back into the token's frame."""
    layer, x, context = (
        build(mixer, causal=causal, **sizes),
        tokens(7, hidden=8),
        Context(causal=causal),
    )
    g = layer.normalise(x).detach().requires_grad_()
    # Keys are constants of a conditional energy; those of a bidirectional Energy Transformer vary.
    keys = g if mixer == "energy_transformer" and not causal else g.detach()
    slope = torch.autograd.grad(energy(layer, g, keys, context), g)[0]
    step = (
        layer.shape.switches.alpha * slope if mixer == "energy_transformer" else layer.rate(slope)
    )
    torch.testing.assert_close(layer(x, context), x - step, **ROUNDING)


@torch.no_grad()
def test_no_token_attends_to_itself_in_an_energy_transformer() -> None:
    """A token's key changes later tokens only, and the first token has no attention."""
    layer = build("energy_transformer")
    g = layer.normalise(tokens(5, hidden=8))
    before = layer.attention_descent(g, Context())
    assert not before[0].any()
    project: Any = layer.project
    layer.project = lambda g, context: (
        project(g, context)[0],
        project(g + (torch.arange(5) == 3)[:, None, None], context)[1],
    )
    changed = (layer.attention_descent(g, Context()) != before).flatten(1).any(1)
    assert changed.tolist() == [False, False, False, False, True]


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("mixer", ["energy_transformer", "nrgpt"])
def test_padding_before_a_sequence_changes_nothing(mixer: str, causal: bool) -> None:
    layer, x = build(mixer, causal=causal), tokens(6, b=1, hidden=8)
    padded = torch.cat((torch.full_like(x[:3], 7.0), x))
    context = Context(
        causal=causal,
        positions=(torch.arange(9) - 3).clamp_min(0),
        valid=(torch.arange(9) >= 3)[None],
    )
    torch.testing.assert_close(
        layer(padded, context)[3:], layer(x, Context(causal=causal)), **ROUNDING
    )


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["energy_transformer", "nrgpt"])
def test_small_steps_lower_the_energy(mixer: str) -> None:
    """With a rate of eta I and small steps every token's conditional energy falls."""
    layer, x, context = build(mixer), tokens(12, hidden=8), Context()
    if mixer == "nrgpt":
        layer.rate.weight.copy_(1e-3 * torch.eye(8))
    else:
        layer.shape = layer.shape.__class__(
            **vars(layer.shape) | {"switches": EnergyTransformerConfig(1e-3)}
        )
    keys = layer.normalise(x)
    before, after = (
        energy(layer, layer.normalise(t), keys, context) for t in (x, layer(x, context))
    )
    assert after < before
