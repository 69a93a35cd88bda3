"""Tests of CEM's attention beyond the contract of ``test_cases``.

They cover its energy, the tensors that a layer's steps share, blocks of the diagonal's scores,
types, and refused calls.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fem_megatron.mixers.cem.layer as cem
import kernels.cem_attention.triton.function as products
from fem_megatron.config import ModelConfig
from fem_megatron.mixers.cem.shape import CemAttentionShape, CemConfig
from fem_megatron.parallel import OneProcess
from fem_megatron.state import Context
from kernels.cem_attention import Diagonal, cem_attention
from kernels.cem_attention.cases import SUITE, call, inputs
from kernels.cem_attention.reference import interaction_energy, interaction_scores
from kernels.check import Inputs, results

SIZE = {"batch": 2, "heads": 2, "tokens": 34, "width": 12}
every_diagonal = pytest.mark.parametrize("diagonal", ["none", "shared", "head"])


@pytest.fixture(autouse=True)
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "STRIP", 16)


def floats(x: Inputs, dtype: torch.dtype, leaves: bool = True) -> Inputs:
    return {
        name: t.to(dtype).requires_grad_(leaves)
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
        for name, t in x.items()
    }


@every_diagonal
def test_the_energy_and_its_gradient(diagonal: str) -> None:
    x = floats(inputs({**SIZE, "tokens": 9}, diagonal=diagonal), torch.float64)
    own = torch.arange(9)
    biases: Any = (torch.tensor(x["slopes"]).double(), *x["biases"].split(1))

    def interaction(*given: Any, own: Tensor, scale: float) -> Tensor:
        return interaction_energy(interaction_scores(*given, own=own, scale=scale), scale)

    parts = Diagonal(x["u"], x["h"], x["d"]) if "u" in x else None
    energy = interaction(x["q"], x["k"], *biases, parts, own=own, scale=x["scale"])
    a = torch.einsum("bhir,bhjr->bhij", x["q"], x["k"])
    if parts is not None:
        a = a + torch.einsum("bjd,hd,bid->bhij", x["h"], x["d"].expand(2, -1), x["u"])
    distance = own[:, None] - own
    a = (
        a * x["scale"]
        - biases[0][:, None, None] * distance.abs()
        + torch.where(distance == 0, *x["biases"])
    )
    expected = -a.masked_fill(distance < 0, -torch.inf).logsumexp(-1).sum(1) / x["scale"]
    # float64 rounding
    torch.testing.assert_close(energy, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(energy.sum(), x["q"])
    torch.testing.assert_close(call(x, "reference")[0], -gradient, rtol=1e-12, atol=1e-12)
    some = torch.tensor([1, 6])
    parts = None if parts is None else parts._replace(u=x["u"][:, some])
    sampled = interaction(x["q"][:, :, some], x["k"], *biases, parts, own=some, scale=x["scale"])
    torch.testing.assert_close(sampled, energy[:, some], rtol=1e-12, atol=1e-12)


def test_without_biases_and_diagonal_it_is_attention_with_keys_for_values() -> None:
    x = inputs(SIZE, diagonal="none", biases=(0.0, 0.0), steepness=0.0)
    expected = scaled_dot_product_attention(
        x["q"], x["k"], x["k"], is_causal=True, scale=x["scale"]
    )
    torch.testing.assert_close(
        call(x, "reference")[0], expected, rtol=1e-12, atol=1e-12
    )  # float64 rounding


@pytest.mark.parametrize(
    ("case", "terms"),
    [("past", 1), ("padding", 1200), ("full, past, padding, a diagonal a head", 1)],
)
def test_parts_of_the_sequences_and_of_the_rows(
    case: str, terms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If C exceeds the term limit, it is computed in groups of rows or one sequence at a time."""
    x = floats(SUITE.cases[case](SIZE), torch.float32, leaves=False)
    held: list[int] = []
    bias = products.diagonal_scores

    def counted(*args: Any) -> Tensor:
        made = bias(*args)
        held.append(made.numel())
        return made

    monkeypatch.setattr(products, "diagonal_scores", counted)
    monkeypatch.setattr(products, "TERMS", terms)
    monkeypatch.setattr(products, "LEAST_ROWS", 20)
    truth = results(functools.partial(call, implementation="reference"), x, torch.float32, "cpu")
    got = results(functools.partial(call, implementation="triton"), x, torch.float32, "cpu")
    # Both implementations round in float32. The biases' gradient, 0.02, is the sum of 136 rows'
    # terms of both signs that nearly cancel. Each term of about 10 rounds by 6e-8 of itself, at
    # random 7e-6 in sum.
    errors = {
        name: (float((got[name] - t).norm()), 1e-5 * float(t.norm()) + 1e-5)
        for name, t in truth.items()
    }
    assert all(error <= bound for error, bound in errors.values()), errors
    assert max(held) <= max(terms, 20 * len(x["d"]) * x["k"].shape[2])


def test_bfloat16_keeps_no_wide_copy() -> None:
    x = floats(inputs(SIZE), torch.bfloat16)
    for implementation in ("triton", "reference"):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t) or t,  # type: ignore[misc]
            lambda t: t,
        ):
            call(x, implementation)
        # The largest wide tensor has one number per row and head.
        assert max(t.numel() for t in kept if t.dtype != torch.bfloat16) <= x["q"][..., 0].numel()


@every_diagonal
def test_steps_of_a_layer_read_the_same_keys(
    diagonal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer makes k and h once, and no step copies, casts, or rearranges them.

    The same is true for the gradient of the output.
    """
    monkeypatch.setattr(
        cem, "cem_attention", functools.partial(cem_attention, implementation="triton")
    )
    sizes: dict[str, Any] = {
        "hidden_size": 24,
        "num_attention_heads": 2,
        "ffn_hidden_size": 24,
        "causal": True,
        "norm_eps": 1e-6,
    }
    model = ModelConfig(**sizes, cem=CemConfig(steps_attention=2, diagonal=diagonal))
    layer = cem.CemAttention(CemAttentionShape.of(model), OneProcess(torch.bfloat16))
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    calls: list[tuple[Tensor, ...]] = []
    kept, back = products.Read.forward, products.Read.backward

    def forward(ctx: Any, q: Tensor, k: Tensor, u: Tensor, h: Tensor, *rest: Any) -> Tensor:
        out = kept(ctx, q, k, u, h, *rest)
        calls.append((k, h, *ctx.to_save[:4]))
        return out

    def backward(ctx: Any, grad: Tensor) -> Any:
        assert grad.stride(-1) == 1
        return back(ctx, grad)

    monkeypatch.setattr(products.Read, "forward", forward)
    monkeypatch.setattr(products.Read, "backward", backward)
    layer(torch.randn(19, 2, 24).bfloat16(), Context()).sum().backward()
    (k, h, _, k_kept, _, h_kept), (k_then, h_then, *_) = calls
    assert k.data_ptr() == k_kept.data_ptr() == k_then.data_ptr()
    assert diagonal == "none" or h.data_ptr() == h_kept.data_ptr() == h_then.data_ptr()
    assert all(
        weight.grad is not None and weight.grad.isfinite().all() for weight in layer.parameters()
    )


def test_gradients_have_their_inputs_types_and_order_in_memory() -> None:
    x = floats(inputs(SIZE), torch.bfloat16) | {
        "d": torch.randn(1, 24).requires_grad_(),
        "biases": torch.randn(2).requires_grad_(),
    }
    x |= {
        name: x[name].detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).requires_grad_()
        for name in "qk"
    }
    out = call(x, "triton")[0]
    leaf = [t for t in x.values() if isinstance(t, Tensor) and t.requires_grad]
    found = torch.autograd.grad(out.sum(), leaf)
    assert out.dtype == torch.bfloat16 and [g.dtype for g in found] == [t.dtype for t in leaf]
    # With these strides, the layer needs no copy.
    assert [t.stride() for t in (out, *found[:2])] == [x[name].stride() for name in ("q", "q", "k")]
