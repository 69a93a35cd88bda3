"""Tests of Hyper-SET: the numbers of the released block, its energies, switches and sizes.
Iterations run as in a block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.hyperset.layer import HyperSet, sinusoidal
from fem_megatron.mixers.hyperset.shape import HyperSetConfig, HyperSetShape
from fem_megatron.parallel import OneProcess
from fem_megatron.rope import RopeScaling
from fem_megatron.state import Context
from kernels.symmetric_attention.reference import attention_energy, feed_forward_energy
from tests.fem_megatron.conftest import drawn, load_fixture, tokens

ROUNDING: Any = {"rtol": 1e-10, "atol": 1e-12}  # float64 over a few iterations
CAUSAL, WHOLE = ("softmax", "sigmoid", "linear"), ("bisoftmax", "sigmoid", "linear")
FEED_FORWARDS = ("relu", "softmax", "gated")
UPDATES = ("gradient", "momentum", "rmsprop", "adam")


def shape(
    *, hidden: int = 16, heads: int = 2, causal: bool = True, recurrence: int = 3, **switches: Any
) -> HyperSetShape:
    sizes = {
        key: switches.pop(key) for key in ("norm_eps", "rope", "rope_scaling") if key in switches
    }
    chosen = {
        "multiplier": 2,
        "time_size": 8,
        "attention": "softmax" if causal else "bisoftmax",
        **switches,
    }
    model = ModelConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        causal=causal,
        recurrence=recurrence,
        hyperset=HyperSetConfig(**chosen),
        **sizes,
    )
    return HyperSetShape.of(model)


def build(**sizes: Any) -> HyperSet:
    """Return a layer with random weights, including those initialised with zeros."""
    made: HyperSet = drawn(HyperSet(shape(**sizes), OneProcess(torch.float64)))
    return made


def run(layer: HyperSet, x: Tensor, iterations: int = 3, **known: Any) -> Tensor:
    """Run the iterations of one forward pass with a block's context."""
    context = Context(**{"causal": layer.shape.causal, **known, "origin": x, "memory": {}})
    for iteration in range(iterations):
        x = layer(x, replace(context.within(str(iteration)), iteration=iteration))
    return x


def test_fixture() -> None:
    _, stored = load_fixture("hyperset_block")
    # The epsilon of the released norms is that of float64.
    sizes: dict[str, Any] = {
        "hidden": 48,
        "heads": 4,
        "causal": False,
        "multiplier": 4,
        "rope": False,
        "step_size": "fixed",
    }
    layer = build(**sizes, norm_eps=torch.finfo(torch.float64).eps)
    names = {
        "subspaces": "attn.qkv",
        "subspaces_norm": "attn.ln1",
        "directions": "mlp",
        "directions_norm": "ln2",
    }
    layer.load_state_dict(
        {f"{ours}.weight": stored[f"param/{theirs}.weight"] for ours, theirs in names.items()}
    )
    x = stored["x"].transpose(0, 1).clone().requires_grad_()
    step = stored["step_embedding"].transpose(0, 1).clone().requires_grad_()
    alpha, gamma = step.chunk(2, dim=-1)
    layer.step_sizes = lambda x, context: (alpha, gamma)  # type: ignore[method-assign]
    context = Context(causal=False)
    y = layer(x, context)
    grads = torch.autograd.grad(
        (y * stored["w"].transpose(0, 1)).sum(), (x, step, *layer.parameters())
    )
    attention = layer.attention_gradient(layer.project_heads(x, context), context)
    expected = [stored[key].transpose(0, 1) for key in ("y", "attention_out", "dx", "dstep")]
    expected += [
        stored[f"grad/{names[name.removesuffix('.weight')]}.weight"]
        for name, _ in layer.named_parameters()
    ]
    for got, right in zip((y, attention, *grads), expected, strict=True):
        # float64 on both sides; the tolerance of the fixtures.
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)


# --- energies -------------------------------------------------------------------------------------


def turned(layer: HyperSet, z: Tensor) -> Tensor:
    return layer._turn(z, Context(), forth=True).permute(1, 2, 0, 3)


YARN = RopeScaling("yarn", 4.0, 24, attention_factor=1.5)


@pytest.mark.parametrize(
    "rope", [{}, {"rope": False}, {"rope_scaling": YARN}], ids=["turned", "not", "yarn"]
)
@pytest.mark.parametrize(
    ("attention", "causal"), [(kind, True) for kind in CAUSAL] + [(kind, False) for kind in WHOLE]
)
def test_the_attention_step_is_the_gradient_of_its_energy(
    attention: str, causal: bool, rope: dict[str, Any]
) -> None:
    """yarn's factor 1.5 multiplies scores by 2.25; the energy is that of the sharper scores divided
    by 2.25.
    """
    layer = build(causal=causal, attention=attention, **rope)
    context = Context(causal=causal)
    z = layer.project_heads(tokens(7), context).detach().requires_grad_()
    keys = turned(layer, z.detach()) if causal else None
    energy = attention_energy(turned(layer, z), keys, kind=attention, causal=causal)
    energy = energy / (1.5**2 if "rope_scaling" in rope and attention != "linear" else 1.0)
    # On the sphere z = W^T x, so dE/dx = W dE/dz (the paper's equation 7, where the norm is the
    # constraint).
    expected = torch.autograd.grad(energy.sum(), z)[0].flatten(2) @ layer.subspaces.weight
    torch.testing.assert_close(layer.attention_gradient(z, context), expected, **ROUNDING)
    diagnosed = layer.diagnose(tokens(7), context, torch.arange(7))["attention_energy"]
    torch.testing.assert_close(diagnosed.T, energy.sum(1), **ROUNDING)


@pytest.mark.parametrize("kind", FEED_FORWARDS)
def test_the_feed_forward_step_is_minus_the_gradient_of_its_energy(kind: str) -> None:
    layer = build(feed_forward=kind)
    u = layer.project_directions(tokens(7), Context()).detach().requires_grad_()
    expected = (
        -torch.autograd.grad(feed_forward_energy(u, kind=kind).sum(), u)[0]
        @ layer.directions.weight
    )
    torch.testing.assert_close(layer.feed_forward_descent(u, Context()), expected, **ROUNDING)


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize(
    ("attention", "feed_forward", "size"),
    [
        ("bisoftmax", "relu", 0.02),
        ("sigmoid", "relu", 0.02),
        ("linear", "relu", 0.02),
        ("bisoftmax", "softmax", 0.02),
        ("bisoftmax", "gated", 0.005),
    ],
)
def test_energies_fall_along_the_iterations(
    attention: str, feed_forward: str, size: float, rope: bool
) -> None:
    """Under the paper's condition on the bases: W and D span the space without overlap (in this
    test, orthonormal).
    """
    names: dict[str, Any] = {
        "attention": attention,
        "feed_forward": feed_forward,
        "rope": rope,
        "step_size": "fixed",
        "multiplier": 1,
    }
    for alpha, gamma, watched in (
        (size, 0.0, "attention"),
        (0.0, size, "feed_forward"),
        (size, size, "both"),
    ):
        layer = build(causal=False, alpha=alpha, gamma=gamma, **names)
        with torch.no_grad():
            for weight in layer.parameters():
                weight.copy_(
                    torch.linalg.qr(weight)[0] if weight.ndim == 2 else torch.ones_like(weight)
                )
        x, energies = tokens(9), []
        for iteration in range(8):
            found = layer.diagnose(x, Context(causal=False), torch.arange(9))
            parts = {
                part: float(found[f"{part}_energy"].sum()) for part in ("attention", "feed_forward")
            }
            energies.append(parts.get(watched, sum(parts.values())))
            x = layer(x, Context(causal=False, iteration=iteration, origin=x))
        assert all(after < before for before, after in zip(energies, energies[1:], strict=False)), (
            watched,
            energies,
        )


def test_diagnose() -> None:
    layer, x = build(causal=False), tokens(11)
    found = layer.diagnose(x, Context(causal=False), torch.arange(11))
    z = turned(layer, layer.project_heads(x, Context()))
    torch.testing.assert_close(
        found["attention_energy"].T,
        attention_energy(z, kind="bisoftmax", causal=False).sum(1),
        **ROUNDING,
    )
    some = torch.tensor([0, 4, 7])
    sampled = layer.diagnose(x, Context(causal=False), some)
    for name in ("attention_energy", "feed_forward_energy"):
        assert found[name].shape == (11, 2)
        torch.testing.assert_close(sampled[name], found[name][some], **ROUNDING)
    for name in ("effective_rank", "mean_angle"):
        assert found[name].shape == (2, 2) and found[name].isfinite().all()
    causal = build(attention="sigmoid")
    full, half = (causal.diagnose(part, Context(), torch.arange(5)) for part in (x, x[:6]))
    torch.testing.assert_close(full["attention_energy"], half["attention_energy"], **ROUNDING)


# --- step sizes, updates, adapters ----------------------------------------------------------------


def test_learned_step_sizes_start_at_zero_and_learn() -> None:
    layer = HyperSet(shape(), OneProcess(torch.float64))
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.spec.init == "normal":  # type: ignore[attr-defined]
                weight.normal_(0.0, 0.1)
    x = tokens(5)
    assert torch.equal(run(layer, x), x)
    run(layer, x).square().sum().backward()
    assert all(
        layer.get_parameter(f"step.out.{leaf}").grad.abs().max() > 0  # type: ignore[union-attr]
        for leaf in ("weight", "bias")
    )


@pytest.mark.parametrize(
    "switches", [{}, {"step_norm": False}, {"time_mlp": False}, {"step_condition": "current"}]
)
def test_step_sizes(switches: dict[str, Any]) -> None:
    layer = build(**switches)
    x, origin = tokens(5), tokens(5, seed=1)
    sizes = [layer.step_sizes(x, Context(iteration=t, origin=origin)) for t in (3, 4)]
    assert not torch.equal(sizes[0][0], sizes[1][0])  # type: ignore[arg-type]
    seen = x if switches.get("step_condition") == "current" else origin
    embedding = sinusoidal(4, layer.shape.time_size, x)
    if switches.get("time_mlp", True):
        embedding = layer.step.time_out(torch.nn.functional.gelu(layer.step.time_in(embedding)))
    h = seen + embedding
    if switches.get("step_norm", True):
        h = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.step.norm.weight
    expected = torch.nn.functional.gelu(h) @ layer.step.out.weight.T + layer.step.out.bias
    torch.testing.assert_close(torch.cat(sizes[0], dim=-1), expected, **ROUNDING)  # type: ignore[arg-type]


def test_sinusoidal() -> None:
    frequencies = torch.tensor([1.0, 0.01, 0.0001], dtype=torch.float64)
    embedding = sinusoidal(7, 6, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(
        embedding, torch.cat(((7 * frequencies).sin(), (7 * frequencies).cos()))
    )


def naive(layer: HyperSet, x: Tensor, iterations: int) -> Tensor:
    """Compute the update rules directly, with both halves of the block written out."""
    switches, origin = layer.shape.switches, x
    means = [torch.zeros_like(x), torch.zeros_like(x)]
    squares = [torch.zeros_like(x), torch.zeros_like(x)]
    for t in range(1, iterations + 1):
        context = Context(iteration=t - 1, origin=origin)
        sizes = layer.step_sizes(x, context)
        for half in (0, 1):
            if half == 0:
                g = -layer.attention_gradient(layer.project_heads(x, context), context)
            else:
                g = layer.feed_forward_descent(layer.project_directions(x, context), context)
            if switches.update == "momentum":
                means[half] = switches.beta1 * means[half] + g
                g = means[half]
            elif switches.update == "rmsprop":
                squares[half] = switches.beta2 * squares[half] + (1 - switches.beta2) * g**2
                g = g / (squares[half] + 1e-12).sqrt()
            elif switches.update == "adam":
                means[half] = switches.beta1 * means[half] + (1 - switches.beta1) * g
                squares[half] = switches.beta2 * squares[half] + (1 - switches.beta2) * g**2
                g = (
                    means[half]
                    / (1 - switches.beta1**t)
                    / (squares[half] / (1 - switches.beta2**t) + 1e-12).sqrt()
                )
            x = x + sizes[half] * g
    return x


@pytest.mark.parametrize("update", UPDATES)
def test_updates_equal_a_naive_loop(update: str) -> None:
    for switches in ({}, {"step_size": "fixed"}, {"beta1": 0.5, "beta2": 0.8}):
        layer, x = build(update=update, **switches), tokens(6)
        torch.testing.assert_close(run(layer, x, 4), naive(layer, x, 4), **ROUNDING)
    layer, x = build(update=update), tokens(4).requires_grad_()
    with torch.no_grad():
        layer.subspaces.weight.zero_()
    run(layer, x).sum().backward()  # the gradient at zero must be differentiable
    assert x.grad is not None and x.grad.isfinite().all()
    assert all(
        weight.grad.isfinite().all() for weight in layer.parameters() if weight.grad is not None
    )


def test_adapters() -> None:
    layer = build(lora_rank=2)
    plain = build()
    x = tokens(6)
    plain.load_state_dict(
        {name: value for name, value in layer.state_dict().items() if "lora" not in name}
    )
    weights = {
        name: (layer.get_parameter(f"{name}_lora.a"), layer.get_parameter(f"{name}_lora.b"))
        for name in ("subspaces", "directions")
    }
    expected = x
    for t in range(5):
        adapted = build()
        adapted.load_state_dict(plain.state_dict())
        with torch.no_grad():
            for name, (a, b) in weights.items():
                adapted.get_parameter(f"{name}.weight").add_(4.0 * a[min(t, 2)] @ b[min(t, 2)])
        expected = adapted(expected, Context(iteration=t, origin=x))
    # Iterations beyond the three trained ones use the parameters of the third.
    torch.testing.assert_close(run(layer, x, 5), expected, **ROUNDING)
    with torch.no_grad():
        for a, _ in weights.values():
            a.zero_()
    torch.testing.assert_close(run(layer, x), run(plain, x), **ROUNDING)


def test_more_iterations_than_in_training() -> None:
    layer, x = build(recurrence=2), tokens(6)
    assert run(layer, x, 20).isfinite().all()
    torch.testing.assert_close(run(layer, x, 2), run(build(recurrence=20), x, 2), **ROUNDING)


def test_the_paper_s_parameter_count() -> None:
    """5.20M for Sudoku (table 7): the block and its step network; the rest is embedding, positions
    and head.
    """
    weights = shape(
        hidden=768, heads=12, multiplier=4, time_size=512, step_norm=False, recurrence=24
    ).weights()
    rest = 10 * 768 + 81 * 768 + 768 + 9 * 768
    assert round((sum(weight.size for weight in weights.values()) + rest) / 1e6, 2) == 5.20


@pytest.mark.parametrize("attention", CAUSAL)
def test_where_causal_a_step_lowers_the_token_s_own_energy(attention: str) -> None:
    """Each token moves separately: its energy while the others are fixed."""
    layer = build(attention=attention, step_size="fixed", alpha=0.02, gamma=0.0, recurrence=1)
    with torch.no_grad():
        layer.subspaces.weight.copy_(torch.linalg.qr(layer.subspaces.weight)[0])
        layer.subspaces_norm.weight.fill_(1.0)
    x = tokens(9)
    before = turned(layer, layer.project_heads(x, Context()))
    after = turned(layer, layer.project_heads(layer(x, Context()), Context()))
    energies = [attention_energy(z, before, kind=attention).sum(1) for z in (before, after)]
    # With softmax, the first token attends only to itself: its energy is that of its norm, which
    # the step cannot lower on the sphere.
    first = 1 if attention == "softmax" else 0
    assert (energies[1] < energies[0])[:, first:].all()


@pytest.mark.parametrize("update", ["rmsprop", "adam"])
def test_a_gradient_of_zero_has_a_gradient(update: str) -> None:
    layer, x = build(update=update), tokens(4)
    with torch.no_grad():
        layer.subspaces.weight.zero_()
    x.requires_grad_()
    run(layer, x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert all(
        weight.grad.isfinite().all() for weight in layer.parameters() if weight.grad is not None
    )


def test_a_causal_token_sees_half_the_square() -> None:
    assert shape().flops(9)["attention"] == 4 * 16 * 5
    assert shape(attention="linear").flops(1000)["attention"] == 4 * 16 * (65 / 2 + 8)
    assert shape(causal=False).flops(9)["attention"] == 6 * 16 * 9
