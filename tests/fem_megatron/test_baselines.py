"""Tests of the baselines' layers against their definitions, token by token, and of their sizes.
Common properties: test_catalogue.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.attention.layer import Attention
from fem_megatron.mixers.attention.shape import AttentionConfig, AttentionShape
from fem_megatron.mixers.delta.layer import DeltaNet
from fem_megatron.mixers.delta.shape import DeltaConfig, DeltaShape
from fem_megatron.mixers.differential.layer import DifferentialAttention
from fem_megatron.mixers.differential.shape import DifferentialShape, lambda_init
from fem_megatron.mixers.fla.shape import FlaConfig
from fem_megatron.mixers.mamba2.layer import Mamba2
from fem_megatron.mixers.mamba2.shape import Mamba2Config, Mamba2Shape
from fem_megatron.mixers.recurrent import time_steps
from fem_megatron.parallel import OneProcess
from fem_megatron.rope import Rope, RopeScaling
from fem_megatron.shape import Shape
from fem_megatron.state import Context, State
from fem_megatron.update import Update, rotate
from tests.fem_megatron.conftest import drawn, tokens

ROUNDING: Any = {"rtol": 1e-10, "atol": 1e-11}  # float64 over a few tens of tokens
EPS = 1e-6


def model(**changed: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_query_groups": None,
        "causal": True,
        "rope": True,
        "rope_base": 10000,
    }
    sections: dict[str, Any] = {
        "attention": AttentionConfig(),
        "delta": DeltaConfig(),
        "mamba2": Mamba2Config(inner_size=16, head_size=4, state_size=6),
        "fla": FlaConfig(),
    }
    return ModelConfig(
        **{**sizes, "norm_eps": EPS, "attention_backend": "auto", **sections, **changed}
    )


SWITCHED: dict[str, Any] = {
    "attention": AttentionConfig(head_dim=6, qkv_bias=True, sliding_window=5),
    "rope_scaling": RopeScaling("llama3", 4.0, 400),
}
SHAPES: dict[str, Callable[..., Shape]] = {
    "attention": lambda **k: AttentionShape.of(model(**k)),
    "grouped": lambda **k: AttentionShape.of(
        model(**{"num_attention_heads": 4, "num_query_groups": 2, **k})
    ),
    # Every switch on, and heads wider than their share of the stream. The window of 5 tokens is
    # shorter than the tests' sequences and longer than some of their chunks.
    "switched": lambda **k: AttentionShape.of(
        model(**{"num_attention_heads": 4, "num_query_groups": 2, **SWITCHED, **k})
    ),
    "normed": lambda **k: AttentionShape.of(
        model(**{"num_attention_heads": 4, "num_query_groups": 2, "qk_norm": True, **k})
    ),
    "differential": lambda **k: DifferentialShape.of(model(**k), 3),
    "differential normed": lambda **k: DifferentialShape.of(model(**{"qk_norm": True, **k}), 3),
    "deltanet": lambda **k: DeltaShape.of(model(**k), 0, gated=False),
    "gated_deltanet": lambda **k: DeltaShape.of(model(**k), 0, gated=True),
    "mamba2": lambda **k: Mamba2Shape.of(model(**k), 0),
}
LAYERS: dict[type[Shape], Callable[[Any, Any], Update]] = {
    AttentionShape: Attention,
    DifferentialShape: DifferentialAttention,
    DeltaShape: DeltaNet,
    Mamba2Shape: Mamba2,
}
NAMES = tuple(SHAPES)
SQUARE = ("attention", "grouped", "differential")
LINEAR = ("deltanet", "gated_deltanet", "mamba2")


def build(name: str, **changed: Any) -> Any:
    """Return a layer with random weights, including those with constant initial values."""
    shape = SHAPES[name](**changed)
    return drawn(LAYERS[type(shape)](shape, OneProcess(torch.float64)), spread=0.4)


# --- the definitions: one sequence, token by token ------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def softmax_read(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Return causal attention for q, k, v [s, d]."""
    seen = [slice(0 if window is None else max(0, t + 1 - window), t + 1) for t in range(len(q))]
    return torch.stack(
        [
            torch.softmax(q[t] @ k[own].T / math.sqrt(q.shape[-1]), -1) @ v[own]
            for t, own in enumerate(seen)
        ]
    )


def turned(x: Tensor) -> Tensor:
    return rotate(x[:, None, None], Context(), Rope(10000))[:, 0, 0]


def turned_slowly(x: Tensor, scaling: RopeScaling) -> Tensor:
    """Apply llama3's RoPE rule as its authors define it, case by case, with complex numbers for
    pairs of channels.
    """
    half = x.shape[-1] // 2
    low = scaling.low_freq_factor
    turned_pairs = []
    for pair in range(half):
        frequency = 10000.0 ** (-pair / half)
        wave = 2 * math.pi / frequency
        if wave > scaling.original_length / scaling.low_freq_factor:
            frequency /= scaling.factor
        elif wave >= scaling.original_length / scaling.high_freq_factor:
            smooth = (scaling.original_length / wave - low) / (scaling.high_freq_factor - low)
            frequency *= (1 - smooth) / scaling.factor + smooth
        angle = torch.arange(len(x), dtype=x.dtype) * frequency
        turned_pairs.append(
            torch.complex(x[:, pair], x[:, pair + half])
            * torch.polar(torch.ones_like(angle), angle)
        )
    pairs = torch.stack(turned_pairs, -1)
    return torch.cat((pairs.real, pairs.imag), -1)


def normed(layer: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    if layer.shape.qk_norm:
        return (norm(q, layer.q_norm.weight), norm(k, layer.k_norm.weight))
    return (q, k)


def attention(layer: Any, h: Tensor) -> Tensor:
    shape, each = layer.shape, layer.shape.heads // layer.shape.groups
    outputs = []
    if shape.bias:
        bias = layer.in_proj.bias
    else:
        bias = torch.zeros(shape.groups * shape.group_width, dtype=h.dtype)
    if shape.rope.scaling.kind is None:
        turn = turned
    else:
        turn = partial(turned_slowly, scaling=shape.rope.scaling)
    for rows, offsets in zip(
        layer.in_proj.weight.chunk(shape.groups), bias.chunk(shape.groups), strict=True
    ):
        *qs, k, v = (
            h @ part.T + offset
            for part, offset in zip(rows.split(shape.head), offsets.split(shape.head), strict=True)
        )
        pairs = [normed(layer, q, k) for q in qs]
        outputs += [softmax_read(turn(q), turn(k), v, shape.window) for q, k in pairs]
        assert len(qs) == each
    return torch.cat(outputs, -1) @ layer.out_proj.weight.T


def differential(layer: Any, h: Tensor) -> Tensor:
    shape = layer.shape
    d = layer.shape.head
    a, b, c, e = layer.lam
    lam = (a @ b).exp() - (c @ e).exp() + 0.8 - 0.6 * math.exp(-0.9)
    outputs = []
    for rows in layer.in_proj.weight.chunk(shape.heads):
        q1, q2, k1, k2, v = (h @ part.T for part in rows.split([d, d, d, d, 2 * d]))
        (q1, k1), (q2, k2) = normed(layer, q1, k1), normed(layer, q2, k2)
        read = softmax_read(turned(q1), turned(k1), v) - lam * softmax_read(
            turned(q2), turned(k2), v
        )
        outputs.append(norm(read, layer.head_norm.weight) * (0.2 + 0.6 * math.exp(-0.9)))
    return torch.cat(outputs, -1) @ layer.out_proj.weight.T


def convolved(x: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    taps = weight.shape[1]
    padded = torch.cat((x.new_zeros(taps - 1, x.shape[1]), x))
    return silu(
        torch.stack([(padded[t : t + taps].T * weight).sum(1) for t in range(len(x))]) + bias
    )


def step_and_rate(layer: Any, raw: Tensor, rates: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return delta and exp(log-decay), [s, heads]."""
    index = torch.arange(layer.shape.heads, dtype=torch.float64) + 0.5
    rate = (rates[0] + (rates[1] - rates[0]) * index / layer.shape.heads) * layer.log_rate.exp()
    start = 0.001 * 100 ** (index * (math.sqrt(5) - 1) / 2 % 1)
    delta = softplus(raw + start.expm1().log() + layer.step_bias)
    return delta, (-rate * delta).exp()


def deltanet(layer: Any, h: Tensor) -> Tensor:
    shape = layer.shape
    dk, dv = shape.key_head, shape.value_head
    raw = (h @ layer.rates.weight.T).unflatten(-1, (shape.heads, -1))
    if shape.gated:
        decay = step_and_rate(layer, raw[..., 1], (0.0, 16.0))[1]
    else:
        decay = torch.ones(len(h), shape.heads, dtype=h.dtype)
    outputs = []
    for i, (rows, taps) in enumerate(
        zip(layer.in_proj.weight.chunk(shape.heads), layer.conv.chunk(shape.heads), strict=True)
    ):
        q, k, v = convolved(h @ rows[: 2 * dk + dv].T, taps).split([dk, dk, dv], -1)
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        state, reads = h.new_zeros(dk, dv), []
        for t in range(len(h)):
            beta = raw[t, i, 0].sigmoid() * (2 if shape.negative_eigenvalues else 1)
            state = decay[t, i] * (
                state - beta * torch.outer(k[t], k[t] @ state)
            ) + beta * torch.outer(k[t], v[t])
            reads.append(q[t] @ state / math.sqrt(dk))
        o = norm(torch.stack(reads), layer.head_norm.weight)
        outputs.append(o * silu(h @ rows[2 * dk + dv :].T) if shape.gated else o)
    return torch.cat(outputs, -1) @ layer.out_proj.weight.T


def mamba2(layer: Any, h: Tensor) -> Tensor:
    shape = layer.shape
    b, c = convolved(h @ layer.bc_proj.weight.T, layer.bc_conv, layer.bc_conv_bias).chunk(2, -1)
    delta, decay = step_and_rate(layer, h @ layer.steps.weight.T, (1.0, 16.0))
    outputs = []
    for i, rows in enumerate(layer.in_proj.weight.chunk(shape.heads)):
        own = slice(i * shape.head, (i + 1) * shape.head)
        u = convolved(h @ rows[: shape.head].T, layer.conv[own], layer.conv_bias[own])
        z = h @ rows[shape.head :].T
        state, reads = h.new_zeros(shape.state, shape.head), []
        for t in range(len(h)):
            state = decay[t, i] * state + delta[t, i] * torch.outer(b[t], u[t])
            reads.append(c[t] @ state + layer.skip[i] * u[t])
        outputs.append(torch.stack(reads) * silu(z))
    return norm(torch.cat(outputs, -1), layer.out_norm.weight) @ layer.out_proj.weight.T


DEFINITIONS = {
    Attention: attention,
    DifferentialAttention: differential,
    DeltaNet: deltanet,
    Mamba2: mamba2,
}


def definition(layer: Any, x: Tensor) -> Tensor:
    steps = [DEFINITIONS[type(layer)](layer, norm(one, layer.norm.weight)) for one in x.unbind(1)]
    return x + torch.stack(steps, 1)


def equals_the_definition(layer: Any, length: int) -> None:
    x, results = tokens(length).requires_grad_(), []
    for function in (layer(x, Context()), definition(layer, x)):
        w = torch.randn(
            function.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        results.append(
            [function, *torch.autograd.grad((function * w).sum(), (x, *layer.parameters()))]
        )
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, **ROUNDING)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition_with_all_gradients(name: str) -> None:
    for length in (1, 2, 9):
        equals_the_definition(build(name), length)
    if "deltanet" in name:
        for delta in (
            DeltaConfig(negative_eigenvalues=True),
            DeltaConfig(heads=4, key_size=8, value_size=12, conv_size=1),
        ):
            equals_the_definition(build(name, delta=delta), 5)
    if name in SQUARE:
        layer = build(name)
        x = tokens(7)
        order = torch.tensor([3, 1, 6, 0, 2, 5, 4])
        # Without a mask and positions, a mixer is equivariant to the order of the tokens.
        flat = Context(causal=False, positions=torch.zeros(7))
        torch.testing.assert_close(layer(x, flat)[order], layer(x[order], flat), **ROUNDING)
        torch.testing.assert_close(
            layer(x, Context(causal=False))[-1], layer(x, Context())[-1], **ROUNDING
        )


@pytest.mark.parametrize("name", LINEAR)
def test_padding_between_tokens_moves_no_matrix(name: str) -> None:
    """The convolution at padding still reads the tokens before it, so keys and values are not
    zero.
    """
    layer, x = build(name), tokens(9)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[:, 6:] = False
    before: State = {}
    layer(x[:6], Context(state=before))
    for parts in ([9], [6, 3], [4, 4, 1]):
        after, past = State(), 0
        for part in x.split(parts):
            layer(part, Context(state=after, past=past, valid=valid[:, : past + len(part)]))
            past += len(part)
        torch.testing.assert_close(after["matrix"], before["matrix"], **ROUNDING)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes", "budget"),
    [
        ("attention", {}, 4.0),
        ("grouped", {"num_attention_heads": 16, "num_query_groups": 4}, 2.5),
        ("differential", {}, 4.0),
        ("deltanet", {}, 4.0),
        ("gated_deltanet", {}, 4.0),
        ("gated_deltanet", {"delta": DeltaConfig(key_size=768)}, 6.0),
        ("mamba2", {"mamba2": Mamba2Config()}, 4.0),
        ("mamba2", {"mamba2": Mamba2Config(inner_size=2048)}, 6.25),
    ],
)
def test_budgets(name: str, sizes: dict[str, Any], budget: float) -> None:
    shape = SHAPES[name](**{"hidden_size": 1024, "num_attention_heads": 8, **sizes})
    size = sum(weight.size for weight in shape.weights().values()) / 1024**2
    # The tolerances cover the rounding to full heads, norms, convolutions and rates.
    assert size == pytest.approx(budget, rel=0.06 if name == "mamba2" else 0.015)


def test_lambda_starts_around_its_init_which_grows_with_depth() -> None:
    assert [round(lambda_init(layer), 4) for layer in (0, 1, 100)] == [
        0.2,
        round(0.8 - 0.6 * math.exp(-0.3), 4),
        0.8,
    ]
    layer = build("differential")
    with torch.no_grad():
        layer.lam.zero_()
    assert layer.lam_now().item() == pytest.approx(lambda_init(3))


def test_time_steps_start_in_the_papers_ranges() -> None:
    zero = torch.zeros(16, dtype=torch.float64)
    delta, log_decay = time_steps(zero, zero, zero, (1.0, 16.0), 16, 0)
    rates = -log_decay / delta
    assert 0.001 <= delta.min() < 0.002
    assert 0.05 < delta.max() <= 0.1
    assert 1.0 <= rates.min() < 2.0
    assert 15.0 < rates.max() <= 16.0
    assert abs(float(torch.corrcoef(torch.stack((delta.log(), rates)))[0, 1])) < 0.3
    parts = [
        torch.stack(time_steps(zero[:8], zero[:8], zero[:8], (1.0, 16.0), 16, first))
        for first in (0, 8)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), torch.stack((delta, log_decay)), **ROUNDING)
