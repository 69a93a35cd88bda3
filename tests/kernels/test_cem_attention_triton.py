"""CEM's attention in Triton's interpreter: the suite's cases, and what the kernels promise beside them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fem_megatron.mixers.cem.layer as cem
import kernels.cem_attention.triton as products
import kernels.cem_attention.triton as triton_form
from fem_megatron.config import ModelConfig
from fem_megatron.mixers.cem.shape import CemAttentionShape, CemConfig
from fem_megatron.parallel import OneProcess
from fem_megatron.state import Context
from kernels.cem_attention import OP, Diagonal, cem_attention
from kernels.cem_attention.cases import SUITE, inputs
from kernels.check import poisoned_memory
from tests.kernels.oracle import relative

SIZE = {"batch": 2, "heads": 2, "tokens": 34, "width": 12}
SCALE = 0.4


@pytest.fixture(autouse=True)
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "STRIP", 16)


def leaves(x: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {name: t.to(dtype).requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in x.items()}


def read(x: dict[str, Any], implementation: str = "triton") -> Tensor:
    diagonal = Diagonal(x["u"], x["h"], x["d"]) if "u" in x else None
    (own, others), known = x["biases"].split(1), {name: x[name] for name in ("scale", "causal", "valid")}
    return cem_attention(x["q"], x["k"], torch.tensor(x["slopes"]), own, others, diagonal, **known, implementation=implementation)


def results(x: dict[str, Any], implementation: str) -> list[Tensor]:
    out = read(x, implementation)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [t for t in x.values() if isinstance(t, Tensor) and t.requires_grad], weights)]


def assert_as_the_reference(x: dict[str, Any]) -> None:
    with poisoned_memory():
        found = results(x, "triton")
    for got, expected in zip(found, results(x, "reference"), strict=True):
        assert float((got - expected).norm()) <= 1e-5 * float(expected.norm()) + 3e-6  # both round in float32


@pytest.mark.parametrize("diagonal", ["none", "shared"])
@pytest.mark.parametrize("tokens", [1, 16, 17, 32, 33])
def test_lengths_around_a_tile(tokens: int, diagonal: str) -> None:
    assert_as_the_reference(leaves(inputs(SIZE | {"batch": 1}, tokens=tokens, diagonal=diagonal)))


@pytest.mark.parametrize("width", [4, 16, 20, 84])
def test_head_widths(width: int) -> None:
    assert_as_the_reference(leaves(inputs(SIZE | {"width": width, "tokens": 18, "batch": 1, "heads": 1})))


@pytest.mark.parametrize("diagonal", ["none", "shared"])
def test_views_as_the_layer_passes_them(diagonal: str) -> None:
    """[s, b, heads r] seen as [b, heads, s, r]; gradients lie as their inputs, so that the layer need not copy them."""
    x = leaves(inputs(SIZE, diagonal=diagonal))
    moved = {
        name: t.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).requires_grad_() for name, t in x.items() if name in "qk"
    }
    moved |= {name: x[name].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for name in ("u", "h") if name in x}
    moved = x | moved
    expected, got = results(x, "triton"), results(moved, "triton")
    assert all(relative(a, b) < 1e-6 for a, b in zip(got, expected, strict=True))  # the vendor's products know strides
    if diagonal == "none":
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert [t.stride() for t in got[:3]] == [moved[name].stride() for name in ("q", "q", "k")]


def test_strides_that_no_kernel_takes() -> None:
    x = leaves(inputs(SIZE | {"batch": 1}))
    x["q"] = torch.stack((x["q"], x["q"]), -1).detach()[..., 0].requires_grad_()
    x["k"] = x["k"].detach().mT.contiguous().mT.requires_grad_()
    assert x["q"].stride(-1) == 2
    assert_as_the_reference(x)
    (alike,) = torch.autograd.grad(read(x).sum(), x["q"])  # an expanded gradient
    (expected,) = torch.autograd.grad(read(x, "reference").sum(), x["q"])
    assert relative(alike, expected) < 3e-6


@pytest.mark.parametrize("diagonal", ["none", "shared", "head"])
def test_no_bit_depends_on_later_tokens(diagonal: str) -> None:
    with torch.no_grad():
        x = inputs(SIZE, diagonal=diagonal, past=5)
        x = leaves(x)
        before = read(x)
        for cut in (1, 16, 20, 33):
            later = {name: t.clone() if isinstance(t, Tensor) else t for name, t in x.items()}
            for name in {"q", "u"} & set(x):
                later[name][..., cut:, :] *= 1e15
            for name in {"k", "h"} & set(x):
                later[name][..., cut + 5 :, :] *= -1e15
            after = read(later)
            assert torch.equal(after[:, :, :cut], before[:, :, :cut])
            assert not torch.equal(after[:, :, cut:], before[:, :, cut:])


@pytest.mark.parametrize(("case", "terms"), [("past", 1), ("padding", 1), ("padding", 1200), ("full, past, padding, a diagonal a head", 1)])
def test_parts_of_the_sequences_and_of_the_rows(case: str, terms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where C has more terms than are held at once: rows by the least number, or sequences one by one."""
    x = leaves(SUITE.cases[case](SIZE))
    held: list[int] = []
    bias = products.diagonal_scores

    def counted(*args: Any) -> Tensor:
        made = bias(*args)
        held.append(made.numel())
        return made

    monkeypatch.setattr(products, "diagonal_scores", counted)
    monkeypatch.setattr(products, "TERMS", terms)
    monkeypatch.setattr(products, "LEAST_ROWS", 20)
    assert_as_the_reference(x)
    rows = 20 * (1 if len(x["d"]) == 1 else 2)
    assert max(held) <= max(terms, rows * x["k"].shape[2])


def test_bfloat16_keeps_no_wide_copy() -> None:
    x = leaves(inputs(SIZE), torch.bfloat16)
    for implementation in ("triton", "reference"):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):  # type: ignore[misc]
            read(x, implementation)
        assert max(t.numel() for t in kept if t.dtype != torch.bfloat16) <= x["q"][..., 0].numel()  # a number a row and head


@pytest.mark.parametrize("diagonal", ["none", "shared", "head"])
def test_steps_of_a_layer_read_the_same_keys(diagonal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """k and h are made once; no step copies, casts or rearranges them, nor the output's gradient."""
    monkeypatch.setattr(cem, "cem_attention", functools.partial(cem_attention, implementation="triton"))
    sizes: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 2, "ffn_hidden_size": 24, "causal": True, "norm_eps": 1e-6}
    model = ModelConfig(**sizes, cem=CemConfig(steps_attention=2, diagonal=diagonal))
    layer = cem.CemAttention(CemAttentionShape.of(model), OneProcess(torch.bfloat16))
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    calls: list[tuple[Tensor, ...]] = []
    kept, back = triton_form.Read.forward, triton_form.Read.backward

    def forward(ctx: Any, q: Tensor, k: Tensor, u: Tensor, h: Tensor, *rest: Any) -> Tensor:
        out = kept(ctx, q, k, u, h, *rest)
        calls.append((k, h, *ctx.to_save[:4]))
        return out

    def backward(ctx: Any, grad: Tensor) -> Any:
        assert grad.stride(-1) == 1
        return back(ctx, grad)

    monkeypatch.setattr(triton_form.Read, "forward", forward)
    monkeypatch.setattr(triton_form.Read, "backward", backward)
    layer(torch.randn(19, 2, 24).bfloat16(), Context()).sum().backward()
    (k, h, _, k_kept, _, h_kept), (k_then, h_then, *_) = calls
    assert k.data_ptr() == k_kept.data_ptr() == k_then.data_ptr()
    if diagonal != "none":
        assert h.data_ptr() == h_kept.data_ptr() == h_then.data_ptr()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in layer.parameters())


def test_types_of_the_gradients_are_the_inputs() -> None:
    x = leaves(inputs(SIZE), torch.bfloat16) | {"d": torch.randn(1, 24).requires_grad_(), "biases": torch.randn(2).requires_grad_()}
    out = read(x)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    leaf = [t for t in x.values() if isinstance(t, Tensor) and t.requires_grad]
    assert all(t.grad is not None and t.grad.dtype == t.dtype for t in leaf)


def test_what_is_not_asked_for_has_no_gradient() -> None:
    x = leaves(inputs(SIZE))
    (alone,) = torch.autograd.grad(read(x | {name: x[name].detach() for name in ("k", "u", "h", "d", "biases")}).sum(), x["q"])
    assert torch.equal(alone, torch.autograd.grad(read(x).sum(), x["q"])[0])


def test_what_does_not_fit_goes_to_the_reference() -> None:
    x = leaves(inputs(SIZE | {"tokens": 3, "width": 260, "batch": 1}))
    with pytest.raises(ValueError, match=r"cannot run: head width 260 is over 256; use auto"):
        read(x)
    x = {name: t.double() if isinstance(t, Tensor) else t for name, t in leaves(inputs(SIZE)).items()}
    with pytest.raises(ValueError, match=r"cannot run: float64; use auto"):
        cem_attention(x["q"], x["k"], torch.ones(2), *x["biases"].split(1), scale=SCALE, implementation="triton")
    with pytest.raises(ValueError, match=r"implementation 'tritn' is not one of auto, triton, reference"):
        read(leaves(inputs(SIZE)), "tritn")
    assert OP.choose("auto", torch.device("cpu")) == "reference"
