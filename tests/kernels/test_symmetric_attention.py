"""Tests of Hyper-SET's attention beyond the contract of ``test_cases``.

They cover energies and their gradients, measures of spread, and the choice of the implementation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.check import relative
from kernels.symmetric_attention import OP, symmetric_attention, symmetric_linear_attention
from kernels.symmetric_attention.reference import (
    attention_energy,
    effective_rank,
    mean_angle,
    pairwise_attention,
)

KINDS = [
    ("softmax", True),
    ("softmax", False),
    ("bisoftmax", False),
    ("sigmoid", True),
    ("sigmoid", False),
]
# float64 rounding of some hundreds of sums of terms of size 1
ROUNDING: Any = {"rtol": 1e-12, "atol": 1e-12}


def sphere(tokens: int, *, p: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return z with rows of norm 1.1 sqrt(p), close to the layer norm's sqrt(p)."""
    z = torch.randn(
        2, 3, tokens, p, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return (torch.nn.functional.normalize(z, dim=-1) * p**0.5 * 1.1).to(dtype)


@pytest.mark.parametrize(("kind", "causal"), [*KINDS, ("linear", True), ("linear", False)])
def test_is_the_gradient_of_its_energy(kind: str, causal: bool) -> None:
    z = sphere(9).requires_grad_()
    alone = causal or kind == "softmax"  # each token's energy, with the keys held fixed
    energy = attention_energy(z, z.detach() if alone else None, kind=kind, causal=causal)
    if kind == "linear":
        read = symmetric_linear_attention(z, causal=causal)[0]
    else:
        read = symmetric_attention(z, kind=kind, causal=causal)
    torch.testing.assert_close(torch.autograd.grad(energy.sum(), z)[0], read, **ROUNDING)


@pytest.mark.parametrize("valid", [None, torch.arange(9) >= torch.tensor([[4], [0]])])
@pytest.mark.parametrize("causal", [True, False])
def test_softmax_stays_torch_s_own(causal: bool, valid: Tensor | None) -> None:
    z = sphere(9).requires_grad_()
    assert OP.choose("auto", z.device, {"sdpa": None, "triton": "kind softmax"}.get) == "sdpa"
    own = symmetric_attention(z, causal=causal, valid=valid)
    assert torch.equal(
        own, symmetric_attention(z, causal=causal, valid=valid, implementation="sdpa")
    )
    blocked = pairwise_attention(z, z, kind="softmax", causal=causal, valid=valid)
    torch.testing.assert_close(own, blocked, **ROUNDING)
    torch.testing.assert_close(
        *(torch.autograd.grad(each.square().sum(), z)[0] for each in (own, blocked)), **ROUNDING
    )
    if causal and valid is None:
        torch.testing.assert_close(symmetric_attention(z[:, :, 5:], z), own[:, :, 5:], **ROUNDING)
        torch.testing.assert_close(symmetric_attention(z[:, :, 8:], z), own[:, :, 8:], **ROUNDING)


def test_bisoftmax_moves_with_its_tokens() -> None:
    """Bisoftmax is not causal: permuted tokens give permuted outputs."""
    z = sphere(37, p=16, dtype=torch.float32)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    plain, moved = (
        symmetric_attention(x, kind="bisoftmax", causal=False, implementation="triton")
        for x in (z, z[:, :, order])
    )
    # float32 rounding of sums in another order
    torch.testing.assert_close(moved, plain[:, :, order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "causal"), KINDS[2:])
def test_triton_keeps_z_and_a_number_a_row(kind: str, causal: bool) -> None:
    kept: list[int] = []
    z = sphere(48, p=16, dtype=torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t,  # type: ignore[func-returns-value]
        lambda t: t,
    ):
        symmetric_attention(z, kind=kind, causal=causal, implementation="triton")
    assert 0 < sum(kept) <= z.numel() + z[..., 0].numel()


def test_linear_over_4096_tokens() -> None:
    z = torch.randn(1, 1, 4096, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # float32 rounding of 64 chunks of positive terms
    assert (
        relative(symmetric_linear_attention(z.float())[0], symmetric_linear_attention(z)[0]) < 1e-6
    )


def test_measures_of_spread() -> None:
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    share = torch.linalg.svdvals(x)
    share = share / share.sum(-1, keepdim=True)
    torch.testing.assert_close(effective_rank(x), torch.exp(-(share * share.log()).sum(-1)))
    torch.testing.assert_close(
        effective_rank(torch.eye(5, dtype=torch.float64)), torch.tensor(5.0, dtype=torch.float64)
    )
    # Rounding makes the other singular values positive.
    assert float(effective_rank(torch.ones(7, 3, dtype=torch.float64))) == pytest.approx(
        1.0, abs=1e-10
    )
    cosines = [
        torch.cosine_similarity(x[0, i], x[0, j], dim=0) for i in range(6) for j in range(i + 1, 6)
    ]
    torch.testing.assert_close(mean_angle(x[0]), torch.stack(cosines).mean().acos())
