"""Decoding's Triton kernels in the interpreter, against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.check import BFLOAT16_FACTOR, BFLOAT16_ROUNDING, FLOAT32_BOUND, poisoned_memory, relative
from kernels.fem_attention import fem_attention
from kernels.fem_attention.triton.decode import decode
from tests.kernels.oracle import NAMES
from tests.kernels.test_fem_attention_exact import Inputs, allowed, definition
from tests.kernels.test_fem_attention_exact import inputs as all_inputs


def inputs(tokens: int, **changed: Any) -> Inputs:
    """One sequence of two heads that read one."""
    return all_inputs(tokens, **{"batch": 1, "heads": 2, "kv_heads": 1, **changed})


def read(
    x: Inputs, dtype: torch.dtype = torch.float32, *, causal: bool = True, keys_valid: Tensor | None = None, splits: int | None = None
) -> Tensor:
    given = [None if x[name] is None else x[name].to(dtype) for name in NAMES]
    with poisoned_memory():
        o: Tensor = decode(*given, causal=causal, scale=x["q"].shape[-1] ** -0.5, keys_valid=keys_valid, splits=splits)
    return o


def truth(x: Inputs, dtype: torch.dtype = torch.float64, *, causal: bool = True, keys_valid: Tensor | None = None) -> Tensor:
    given: Inputs = {name: None if t is None else t.to(dtype) for name, t in x.items()}
    if x["beta"] is None:
        given |= {"beta": torch.ones_like(given["v"][0, :, 0]), "lam": torch.zeros_like(given["q"][..., :1])}
    return definition(given, allowed(given, causal, keys_valid, None), x["q"].shape[-1] ** -0.5)


@pytest.mark.parametrize("queries", [1, 3, 16])
@pytest.mark.parametrize("tokens", [1, 16, 17, 130])
def test_equals_the_definition(tokens: int, queries: int) -> None:
    x = inputs(tokens, queries=min(queries, tokens), reach=80.0)
    expected = truth(x)
    for splits in (1, 100):  # 100: one block of keys each
        assert relative(read(x, splits=splits), expected) < FLOAT32_BOUND


@pytest.mark.parametrize("beta", [0.02, 1.95, 40.0])
@pytest.mark.parametrize("reach", [0.0, 0.1, 0.8, 1.3, 80.0, 500.0])
def test_any_range(reach: float, beta: float) -> None:
    for changed in ({}, {"values": "ramp"}, {"values": "ramp", "sharpness": 30.0}):  # the last: priors that underflow
        x = inputs(40, queries=1, heads=2, reach=reach, beta=beta, **changed)
        assert relative(read(x, splits=2), truth(x)) < FLOAT32_BOUND


def test_the_same_as_the_reference() -> None:
    x = {name: t.float() for name, t in inputs(40, queries=5, heads=1, reach=60.0).items()}
    expected = fem_attention(*(x[name] for name in NAMES), implementation="reference")
    assert relative(read(x), expected) < FLOAT32_BOUND


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (20, 1)], ids=str)
def test_heads_that_share_keys(heads: tuple[int, int]) -> None:
    x = inputs(36, queries=2, batch=2, heads=heads[0], kv_heads=heads[1])
    assert relative(read(x), truth(x)) < FLOAT32_BOUND


@pytest.mark.parametrize("widths", [(40, 48), (64, 200), (80, 16)], ids=str)
def test_widths(widths: tuple[int, int]) -> None:
    x = inputs(33, queries=4, dk=widths[0], dv=widths[1])
    assert relative(read(x), truth(x)) < FLOAT32_BOUND


@pytest.mark.parametrize("without", [("beta", "lam"), ("beta", "lam", "gate"), ("lam",), ("gate",), ("lam", "gate")], ids="+".join)
def test_what_may_be_left_out(without: tuple[str, ...]) -> None:
    x = inputs(36, queries=3) | dict.fromkeys(without)
    assert relative(read(x), truth(x)) < FLOAT32_BOUND


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_padding_is_read_by_its_own_query_alone(causal: bool) -> None:
    x = inputs(40, queries=6, batch=2)
    valid = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) > 0.4
    valid[0, :34], valid[0, 36], valid[1, :18] = False, False, False  # whole parts without a key, and a query's own key
    expected = truth(x, causal=causal, keys_valid=valid)
    for splits in (1, 3):
        assert relative(read(x, causal=causal, keys_valid=valid, splits=splits), expected) < FLOAT32_BOUND
    x["v"][:, :, 36] = torch.where(valid[:, 36, None, None], x["v"][:, :, 36], torch.inf)
    o = read(x, causal=causal, keys_valid=valid)
    assert o[0, :, [0, 1, 3, 4, 5]].isfinite().all() and o[1].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("without", [(), ("lam",)], ids=["", "F alone"])
def test_values_that_are_not_finite_give_what_the_reference_gives(value: float, without: tuple[str, ...]) -> None:
    x = inputs(34, queries=2, heads=1) | dict.fromkeys(without)
    x["v"][:, :, 20, 1] = value
    expected, got = fem_attention(*(x[name] for name in NAMES), implementation="reference"), read(x, splits=2).double()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("reach", [0.3, 200.0])
def test_later_tokens_change_no_bit(reach: float) -> None:
    x = inputs(40, queries=8, reach=reach)
    before = read(x)
    for name in ("k", "v"):
        x[name][:, :, 36:] *= -1e4
    after = read(x)
    assert torch.equal(after[:, :, :4], before[:, :, :4]) and not torch.equal(after[:, :, 4:], before[:, :, 4:])


@pytest.mark.parametrize(
    "case", [{"reach": 8.0}, {"reach": 80.0}, {"values": "ramp", "reach": 500.0}, {"beta": 0.02, "reach": 0.1}], ids=str
)
def test_bfloat16(case: Inputs) -> None:
    x = {name: t.bfloat16().double() for name, t in inputs(70, queries=3, dk=16, dv=16, **case).items()}
    expected = truth(x)
    bound = BFLOAT16_FACTOR * max(relative(truth(x, torch.bfloat16), expected), BFLOAT16_ROUNDING)
    o = read(x, torch.bfloat16)
    assert o.dtype == torch.bfloat16 and relative(o, expected) <= bound


def test_inputs_of_any_strides_and_a_float32_beta() -> None:
    x = {name: t.bfloat16() for name, t in inputs(40, queries=3, batch=2).items()} | {"beta": inputs(40)["beta"].float()}
    turned = {name: t if name == "beta" else t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for name, t in x.items()}
    turned["lam"] = x["lam"].mT.contiguous().mT  # its last dimension is not the innermost
    plain, other = (decode(*(y[name] for name in NAMES), causal=True, scale=0.3) for y in (x, turned))
    assert not turned["k"].is_contiguous() and torch.equal(plain, other)
