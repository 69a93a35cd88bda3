"""The baselines' layers against their definitions, and what every mixer promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fem_megatron.mixers.delta.shape import DeltaConfig, DeltaShape
from fem_megatron.mixers.differential.shape import DifferentialShape, lambda_init
from fem_megatron.mixers.mamba2.shape import Mamba2Config
from fem_megatron.mixers.recurrent import time_steps
from fem_megatron.state import Context
from tests.fem_megatron.baselines import LAYERS, LINEAR, NAMES, ROUNDING, SHAPES, SQUARE, Rank, build, decode, definition, model, tokens


def equals_the_definition(layer: Any, length: int) -> None:
    x, results = tokens(length).requires_grad_(), []
    for function in (layer(x, Context()), definition(layer, x)):
        w = torch.randn(function.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results.append([function, *torch.autograd.grad((function * w).sum(), (x, *layer.parameters()))])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, **ROUNDING)


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition_with_all_gradients(name: str, length: int) -> None:
    equals_the_definition(build(name), length)


@pytest.mark.parametrize("delta", [DeltaConfig(negative_eigenvalues=True), DeltaConfig(heads=4, key_size=8, value_size=12, conv_size=1)])
@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
def test_the_delta_rule_s_settings(name: str, delta: DeltaConfig) -> None:
    equals_the_definition(build(name, delta=delta), 5)


# --- what every mixer promises ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name: str) -> None:
    layer, x = build(name), tokens(3, b=1).requires_grad_()
    names = [key for key, _ in layer.named_parameters()]

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x, Context()))

    assert torch.autograd.gradcheck(function, (x, *layer.parameters()), fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
def test_no_bit_depends_on_later_tokens(name: str) -> None:
    layer, x = build(name, torch.float32), tokens(80, dtype=torch.float32)
    before = layer(x, Context())
    for cut in (1, 30, 70):
        for factor in (-1.0, 1e15):  # whose square is still finite in float32
            after = layer(torch.cat((x[:cut], factor * x[cut:])), Context())
            assert torch.equal(after[:cut], before[:cut])
            assert not torch.equal(after[cut:], before[cut:])
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(layer(leaf, Context())[:30].sum(), leaf)
    assert (grad[30:] == 0).all() and (grad[:30] != 0).any(-1).all()


@pytest.mark.parametrize("name", NAMES)
def test_decoding_equals_the_whole_forward(name: str) -> None:
    layer, x = build(name, torch.float32), tokens(300, dtype=torch.float32)
    whole = layer(x, Context())
    for parts in ([37, 70, *[1] * 193], [1] * 300):
        got, state = decode(layer, x, parts)
        torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-5)  # the contract's bound in float32
        assert all(len(kept) == 2 for kept in state.values())


@pytest.mark.parametrize("name", NAMES)
def test_left_padded_rows_equal_each_row_alone(name: str) -> None:
    layer, x, lengths = build(name), tokens(12, b=3), (12, 7, 1)
    index = torch.arange(12)
    valid = torch.stack([index >= 12 - length for length in lengths])
    positions = torch.stack([(index - (12 - length)).clamp_min(0) for length in lengths], dim=1)
    x = x.masked_fill(~valid.T[..., None], 1e4)
    padded = layer(x, Context(valid=valid, positions=positions))
    streamed, _ = decode(layer, x, [8, 1, 2, 1], valid, positions)
    assert padded.isfinite().all()
    for row, length in enumerate(lengths):
        alone = layer(x[-length:, row : row + 1], Context())
        for got in (padded, streamed):
            torch.testing.assert_close(got[-length:, row : row + 1], alone, **ROUNDING)


@pytest.mark.parametrize("name", LINEAR)
def test_padding_between_tokens_moves_no_matrix(name: str) -> None:
    """The convolution still sees the tokens before it there, so keys and values are not zero."""
    layer, x = build(name), tokens(9)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[:, 6:] = False
    _, before = decode(layer, x[:6], [6])
    for parts in ([9], [6, 3], [4, 4, 1]):
        _, after = decode(layer, x, parts, valid)
        torch.testing.assert_close(after["matrix"], before["matrix"], **ROUNDING)


@pytest.mark.parametrize("element", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_state_bytes(name: str, element: torch.dtype) -> None:
    layer = build(name, element)
    for length in (1, 2, 9):
        _, state = decode(layer, tokens(length, dtype=element), [1] * length)
        kept = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        assert kept == 2 * layer.shape.state_bytes(length, element.itemsize)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name: str) -> None:
    layer, x = build(name, torch.bfloat16), tokens(65, dtype=torch.bfloat16)
    got = layer(x, Context())
    got.sum().backward()
    assert got.dtype == torch.bfloat16 and all(weight.grad.isfinite().all() for weight in layer.parameters())
    exact = build(name)
    exact.load_state_dict(layer.state_dict())
    error = (got.double() - exact(x.double(), Context())).norm() / (exact(x.double(), Context()) - x.double()).norm()
    assert error < 0.05  # bfloat16's 2^-8 through a handful of products


@pytest.mark.parametrize("name", SQUARE)
def test_bidirectional(name: str) -> None:
    layer, x = build(name), tokens(7)
    context = Context(causal=False)
    # Without positions a full mixer does not know the order.
    flat = Context(causal=False, positions=torch.zeros(7))
    order = torch.tensor([3, 1, 6, 0, 2, 5, 4])
    torch.testing.assert_close(layer(x, flat)[order], layer(x[order], flat), **ROUNDING)
    torch.testing.assert_close(layer(x, context)[-1], layer(x, Context())[-1], **ROUNDING)


@pytest.mark.parametrize("name", NAMES)
def test_flops(name: str) -> None:
    layer = build(name, torch.float32)
    length = 128
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the CPU's flash kernel is not counted
        layer(tokens(length, b=1, dtype=torch.float32), Context())
    shape, expected = layer.shape, sum(layer.shape.flops(length, whole_square=True).values()) * length
    if isinstance(shape, DeltaShape):  # the triangular solve, which torch does not count
        expected -= length * 63 * shape.heads * (shape.key_head + shape.value_head)
    if name == "differential":  # on the CPU queries and keys are padded to the values' width
        expected += length * 2.0 * length * shape.heads * 2 * shape.head
    assert counter.get_total_flops() == expected
    assert sum(shape.flops(length).values()) < sum(shape.flops(length, whole_square=True).values())


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_parts_add_up(name: str) -> None:
    whole, x = build(name), tokens(6)
    ranks = [Rank(0), Rank(1)]
    parts = [LAYERS[type(whole.shape)](whole.shape, rank) for rank in ranks]
    for rank, part in enumerate(parts):
        for key, weight in part.named_parameters():
            full, split = whole.get_parameter(key), weight.spec.split  # type: ignore[attr-defined]
            weight.data.copy_(full if split is None else full.chunk(2, split)[rank])
    for part in parts:
        part(x, Context())
    ranks[0].others, ranks[1].others = ranks[1].partial, ranks[0].partial
    got = sum(part(x, Context()) - x for part in parts)
    torch.testing.assert_close(x + got, whole(x, Context()), **ROUNDING)
    assert all(width % 2 == 0 for width in whole.shape.split_widths().values())
    if name != "mamba2":  # where a gradient would have to cross the ranks
        got.square().sum().backward()
        (whole(x, Context()) - x).square().sum().backward()
        for key, weight in whole.named_parameters():
            grads = [part.get_parameter(key).grad for part in parts]
            split = weight.spec.split
            joined = grads[0] + grads[1] if split is None else torch.cat(grads, split)  # type: ignore[operator, arg-type]
            torch.testing.assert_close(joined, weight.grad, **ROUNDING)


# --- sizes ----------------------------------------------------------------------------------------------------------------------------


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
    assert size == pytest.approx(budget, rel=0.06 if name == "mamba2" else 0.015)  # whole heads; norms, convolutions and rates


def test_lambda_init_grows_with_depth() -> None:
    assert [round(lambda_init(layer), 4) for layer in (0, 1, 100)] == [0.2, round(0.8 - 0.6 * math.exp(-0.3), 4), 0.8]
    assert DifferentialShape.of(model(), 0).lambda_init == pytest.approx(0.2)


def test_lambda_starts_around_its_init() -> None:
    weight = SHAPES["differential"]().weights()["lam"]
    assert weight.init.std == 0.1 and weight.split is None  # type: ignore[union-attr]
    layer = build("differential")
    with torch.no_grad():
        layer.lam.zero_()
    assert layer.lam_now().item() == pytest.approx(lambda_init(3))


def test_time_steps_start_in_the_papers_ranges() -> None:
    zero = torch.zeros(16, dtype=torch.float64)
    delta, log_decay = time_steps(zero, zero, zero, (1.0, 16.0), 16, 0)
    rates = -log_decay / delta
    assert 0.001 <= delta.min() < 0.002 and 0.05 < delta.max() <= 0.1 and 1.0 <= rates.min() < 2.0 and 15.0 < rates.max() <= 16.0
    assert abs(float(torch.corrcoef(torch.stack((delta.log(), rates)))[0, 1])) < 0.3
    parts = [torch.stack(time_steps(zero[:8], zero[:8], zero[:8], (1.0, 16.0), 16, first)) for first in (0, 8)]
    torch.testing.assert_close(torch.cat(parts, 1), torch.stack((delta, log_decay)), **ROUNDING)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("attention", {"num_attention_heads": 3}, "model.num_attention_heads=3"),
        ("attention", {"num_attention_heads": 16}, "model.rope"),
        ("grouped", {"num_query_groups": 3}, "model.num_query_groups=3"),
        ("differential", {"num_attention_heads": 3}, "model.num_attention_heads=3"),
        ("differential", {"num_attention_heads": 8}, "model.rope"),
        ("deltanet", {"causal": False}, "model.causal"),
        ("deltanet", {"num_attention_heads": 3}, "model.delta.key_size=16"),
        ("gated_deltanet", {"delta": DeltaConfig(value_size=15)}, "model.delta.value_size=15"),
        ("deltanet", {"delta": DeltaConfig(conv_size=0)}, "model.delta.conv_size=0"),
        ("mamba2", {"causal": False}, "model.causal"),
        ("mamba2", {"mamba2": Mamba2Config(inner_size=17)}, "model.mamba2.inner_size=17"),
        ("mamba2", {"mamba2": Mamba2Config(state_size=0)}, "model.mamba2.state_size=0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(name: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        SHAPES[name](**sizes)
    assert "\n" not in str(error.value)
