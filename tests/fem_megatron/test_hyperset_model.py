"""Hyper-SET as a language model: gradients, causality, decoding, padding; and the sizes that its shape states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fem_megatron.mixers.hyperset.layer import HyperSet
from fem_megatron.state import Context
from tests.fem_megatron.hyperset_parts import CAUSAL, FEED_FORWARDS, ROUNDING, UPDATES, build, run, shape, tokens


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(
    ("causal", "switches"),
    [(True, {"attention": kind, "lora_rank": 1}) for kind in CAUSAL]
    + [(False, {"attention": "bisoftmax", "feed_forward": kind}) for kind in FEED_FORWARDS]
    + [(True, {"update": update}) for update in UPDATES[1:]],
)
def test_gradcheck(causal: bool, switches: dict[str, Any], length: int) -> None:
    layer = build(hidden=4, heads=2, causal=causal, recurrence=2, **{"multiplier": 1, "time_size": 2, **switches})
    x = tokens(length, b=1, hidden=4).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(_Runner(layer), {f"layer.{k}": v for k, v in zip(names, weights, strict=True)}, (x,))

    assert torch.autograd.gradcheck(function, (x, *layer.parameters()), fast_mode=True)


class _Runner(torch.nn.Module):
    def __init__(self, layer: HyperSet) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return run(self.layer, x, 2)


@pytest.mark.parametrize("attention", CAUSAL)
def test_no_bit_depends_on_later_tokens(attention: str) -> None:
    layer, x = build(torch.float32, attention=attention), tokens(80, dtype=torch.float32)
    before = run(layer, x)
    for cut in (1, 30, 70):
        for factor in (-1.0, 1e15):  # whose square is still finite in float32
            after = run(layer, torch.cat((x[:cut], factor * x[cut:])))
            assert torch.equal(after[:cut], before[:cut])
            assert not torch.equal(after[cut:], before[cut:])
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(run(layer, leaf)[:30].sum(), leaf)
    assert (grad[30:] == 0).all() and (grad[:30] != 0).any(-1).all()


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_and_lengths(length: int, dtype: torch.dtype) -> None:
    variants: list[dict[str, Any]] = [{"attention": kind} for kind in CAUSAL]
    variants += [{"feed_forward": kind, "update": "adam"} for kind in FEED_FORWARDS]
    for switches in variants:
        y = run(build(dtype, **switches), tokens(length, dtype=dtype))
        assert (y.dtype, y.shape) == (dtype, (length, 2, 16)) and y.isfinite().all()


def decode(layer: HyperSet, x: Tensor, chunks: list[int], valid: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    state: dict[str, Tensor] = {}
    outs, past = [], 0
    for length in chunks:
        now = past + length
        known: dict[str, Any] = {
            "state": state,
            "past": past,
            "valid": None if valid is None else valid[:, :now],
            "positions": None if positions is None else positions[past:now],
        }
        outs.append(run(layer, x[past:now], **known))
        past = now
    held = sum(value.nbytes for value in state.values()) / x.shape[1]
    assert held == 3 * layer.shape.state_bytes(past, x.element_size())
    return torch.cat(outs)


STREAMS: list[dict[str, Any]] = [{"attention": kind} for kind in CAUSAL] + [{"update": "adam", "lora_rank": 2}, {"rope": False}]


@pytest.mark.parametrize("switches", STREAMS)
@torch.no_grad()
def test_decoding_equals_the_parallel_forward(switches: dict[str, Any]) -> None:
    layer, x = small_steps(torch.float32, **switches), tokens(300, dtype=torch.float32)
    whole = run(layer, x)
    for chunks in ([1] * 300, [130, *[1] * 20, 70, *[1] * 80]):
        # float32: a few roundings of values of size 1 to 10, in another order
        torch.testing.assert_close(decode(layer, x, chunks), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("switches", STREAMS)
@torch.no_grad()
def test_left_padding_equals_each_row_alone(switches: dict[str, Any]) -> None:
    layer, x, pad = build(**switches), tokens(80), 13
    valid = torch.ones(2, 80, dtype=torch.bool)
    valid[0, :pad] = False
    positions = torch.stack((torch.arange(80) - pad, torch.arange(80)), dim=1).clamp(min=0)
    for out in (run(layer, x, valid=valid, positions=positions), decode(layer, x, [40, *[1] * 40], valid, positions)):
        torch.testing.assert_close(out[pad:, :1], run(layer, x[pad:, :1]), **ROUNDING)
        torch.testing.assert_close(out[:, 1:], run(layer, x[:, 1:]), **ROUNDING)
        assert out.isfinite().all()


def small_steps(dtype: torch.dtype, **sizes: Any) -> HyperSet:
    """Steps as a trained model has them: three random ones of size 1 multiply rounding a hundredfold."""
    layer = build(dtype, **sizes)
    with torch.no_grad():
        for leaf in ("weight", "bias"):
            layer.get_parameter(f"step.out.{leaf}").mul_(0.1)
    return layer


# --- the shape -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal", "switches"),
    [
        (True, {}),
        (True, {"lora_rank": 3, "time_mlp": False}),
        (True, {"attention": "sigmoid", "step_size": "fixed"}),
        (True, {"attention": "linear"}),
        (False, {"attention": "linear", "feed_forward": "gated"}),
        (False, {"attention": "bisoftmax", "feed_forward": "softmax"}),
    ],
)
def test_flops_equal_the_counter(causal: bool, switches: dict[str, Any]) -> None:
    layer, length = build(causal=causal, **switches), 64
    # torch's counter does not see the CPU's flash attention; the plain path is matrix products, over the whole square.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        run(layer, tokens(length, b=1), 1)
    assert counter.get_total_flops() == pytest.approx(length * sum(layer.shape.flops(length, whole_square=True).values()), rel=1e-12)


def test_a_causal_token_sees_half_the_square() -> None:
    assert shape().flops(9)["attention"] == 4 * 16 * 5
    assert shape(attention="linear").flops(1000)["attention"] == 4 * 16 * (65 / 2 + 8)
    assert shape(causal=False).flops(9)["attention"] == 6 * 16 * 9


@pytest.mark.parametrize("switches", [{}, {"lora_rank": 2}, {"step_size": "fixed"}, {"time_mlp": False, "step_norm": False}])
def test_parameters_are_those_of_the_shape(switches: dict[str, Any]) -> None:
    layer = build(**switches)
    assert {name: tuple(weight.shape) for name, weight in layer.named_parameters()} == {
        name: weight.shape for name, weight in layer.shape.weights().items()
    }


def test_the_paper_s_parameter_count() -> None:
    """5.20M for Sudoku (table 7): the block and its step network; the rest is embedding, positions and head."""
    weights = shape(hidden=768, heads=12, multiplier=4, time_size=512, step_norm=False, recurrence=24).weights()
    rest = 10 * 768 + 81 * 768 + 768 + 9 * 768
    assert round((sum(weight.size for weight in weights.values()) + rest) / 1e6, 2) == 5.20


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: shape(heads=3), "num_attention_heads"),
        (lambda: shape(hidden=6, heads=2), "model.rope"),
        (lambda: shape(attention="bisoftmax"), "bisoftmax"),
        (lambda: shape(multiplier=0), "multiplier"),
        (lambda: shape(lora_rank=-1), "lora_rank"),
        (lambda: shape(time_size=7), "time_size"),
        (lambda: build(update="adam")(tokens(3), Context(iteration=1, origin=tokens(3))), "memory"),
        (lambda: build()(tokens(3), Context(iteration=1)), "origin"),
    ],
)
def test_refusals(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
