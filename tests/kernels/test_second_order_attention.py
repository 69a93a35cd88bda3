"""Tests of second-order attention, the Newton step.

They cover its agreement with autograd's gradient and Hessian of the free energy, its limits,
rotated frames, and systems that have no solution.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.pairs import allowed_pairs
from kernels.second_order_attention import second_order_attention
from kernels.second_order_attention.reference import (
    energy_linear_attention,
    free_energy,
    quadratic_energy,
    rotated,
)

ROUNDING: Any = {"rtol": 1e-10, "atol": 1e-12}  # float64; systems of condition 100 at most
BOTH = pytest.mark.parametrize("exact", [False, True])
NAMES = ("q", "k", "gram", "temperature", "newton_temperature")


def inputs(
    t: int, *, b: int = 2, h: int = 2, d: int = 4, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(t)
    q = torch.randn(b, h, t, d, generator=rng, dtype=torch.float64)
    k = torch.randn(b, h, t, d, generator=rng, dtype=torch.float64)
    w = torch.randn(h, d, 3 * d, generator=rng, dtype=torch.float64)
    heads = torch.linspace(d, 1.5 * d, h, dtype=torch.float64)
    return {
        name: x.to(dtype)
        for name, x in zip(NAMES, (q, k, w @ w.mT / (3 * d), heads, heads + 1.0), strict=True)
    }


def by_newton(x: dict[str, Any], order: Callable[[Tensor], Tensor], causal: bool = True) -> Tensor:
    """Return G^-1 order(H) G g for each token.

    g and H are autograd's gradient and Hessian of the token's free energy with respect to its q; G
    is the Gram matrix.
    """
    q, k, gram, temperature, newton = x.values()
    out = torch.empty_like(q)
    for b, h, t in itertools.product(*map(range, q.shape[:3])):
        keys = k[b, h, : t + 1] if causal else k[b, h]

        def energy(one: Tensor, keys: Tensor = keys, h: int = h) -> Tensor:
            distances = (one - keys).square().sum(-1)
            return -temperature[h] * torch.logsumexp(-distances / (2 * temperature[h]), 0)

        gradient = torch.func.grad(energy)(q[b, h, t])
        hessian = torch.func.hessian(energy)(q[b, h, t])
        # The paper learns T' separately from T: C / T' replaces I - H = C / T.
        eye = torch.eye(len(hessian), dtype=q.dtype)
        hessian = eye - (eye - hessian) * temperature[h] / newton[h]
        out[b, h, t] = torch.linalg.solve(gram[h], order(hessian) @ (gram[h] @ gradient))
    return out


@BOTH
@pytest.mark.parametrize("causal", [True, False])
def test_the_step_is_newtons_by_autograds_hessian(exact: bool, causal: bool) -> None:
    """The step uses the inverse of H if ``exact``, else the first-order form I + (I - H)."""
    x = inputs(5)
    order = (
        torch.linalg.inv
        if exact
        else lambda hessian: 2 * torch.eye(len(hessian), dtype=hessian.dtype) - hessian
    )
    torch.testing.assert_close(
        second_order_attention(*x.values(), exact=exact, causal=causal),
        by_newton(x, order, causal),
        **ROUNDING,
    )


def test_with_orthonormal_rows_it_is_newton_in_the_tokens_own_space() -> None:
    """Equation 27: the step is the pseudoinverse of the Hessian in z times the gradient in z.

    The paper's formula for it requires W_Q W_Q^T = I.
    """
    x = inputs(4, b=1)
    w = torch.linalg.qr(
        torch.randn(11, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )[0].mT.unflatten(0, (2, 4))
    z = torch.randn(4, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x |= {"q": (z @ w.mT)[None], "gram": w @ w.mT, "newton_temperature": x["temperature"]}
    steps = torch.einsum("hde,htd->hte", w, second_order_attention(*x.values(), exact=True)[0])
    for h, t in itertools.product(range(2), range(4)):
        keys, temperature = x["k"][:, h : h + 1, : t + 1], x["temperature"][h : h + 1]

        def energy(
            one: Tensor, w: Tensor = w[h], keys: Tensor = keys, temperature: Tensor = temperature
        ) -> Tensor:
            return free_energy((w @ one)[None, None, None], keys, temperature)[0, 0, 0]

        newton = torch.linalg.pinv(torch.func.hessian(energy)(z[t]), rtol=1e-9) @ torch.func.grad(
            energy
        )(z[t])
        torch.testing.assert_close(steps[h, t], newton, **ROUNDING)


@BOTH
def test_limits(exact: bool) -> None:
    """The step has the right limits.

    The first token steps to its only key. The bias vanishes as 1 / T' for T' to infinity. Repeated
    steps find a minimum.
    """
    x = inputs(6)
    found = second_order_attention(*x.values(), exact=exact)[:, :, 0]
    torch.testing.assert_close(found, x["q"][:, :, 0] - x["k"][:, :, 0], **ROUNDING)
    r = second_order_attention(
        **x | {"newton_temperature": torch.full((2,), torch.inf, dtype=torch.float64)}, exact=exact
    )
    far = (
        second_order_attention(**x | {"newton_temperature": f * x["temperature"]}, exact=exact)
        for f in (1e2, 1e4, 1e6)
    )
    sizes = [float((each - r).abs().max()) for each in far]
    assert sizes[0] < 0.1 and sizes[1] < 0.02 * sizes[0] and sizes[2] < 0.02 * sizes[1]
    x |= {"gram": torch.eye(4, dtype=torch.float64).expand(2, 4, 4)} | dict.fromkeys(
        NAMES[3:], torch.full((2,), 8.0).double()
    )
    seen = allowed_pairs(torch.arange(6), 6, True, None)
    energies = [free_energy(x["q"], x["k"], x["temperature"], seen)]
    for _ in range(6 if exact else 30):  # for C < T, the Newton step converges much faster
        x["q"] = x["q"] - second_order_attention(*x.values(), exact=exact)
        energies.append(free_energy(x["q"], x["k"], x["temperature"], seen))
    assert (energies[1] <= energies[0]).all() and (energies[-1] <= energies[0]).all()
    assert second_order_attention(*x.values(), exact=exact).abs().max() < 1e-9


@pytest.mark.parametrize("temperature", [0.5, 4.0])
def test_free_energy_is_the_definition_and_has_its_bounds(temperature: float) -> None:
    x = inputs(5)
    energies = torch.cdist(x["q"], x["k"]).square() / 2
    found = free_energy(x["q"], x["k"], torch.full((2,), temperature, dtype=torch.float64))
    torch.testing.assert_close(
        found, -temperature * (-energies / temperature).logsumexp(-1), **ROUNDING
    )
    least = energies.amin(-1)
    assert (found <= least).all() and (found >= least - temperature * torch.tensor(5.0).log()).all()


@BOTH
def test_a_turn_is_keys_in_the_query_s_frame(exact: bool) -> None:
    x = inputs(5)
    turns = (
        torch.randn(1, 1, 5, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 3
    )
    turn = torch.cat((turns.cos(), turns.sin()), dim=-1)
    found = second_order_attention(*x.values(), exact=exact, turn=turn)
    for t in range(5):
        own = rotated(x["k"][:, :, : t + 1], turn[:, :, t : t + 1], back=True)
        alone = second_order_attention(**x | {"q": x["q"][:, :, t : t + 1], "k": own}, exact=exact)
        torch.testing.assert_close(found[:, :, t], alone[:, :, 0], **ROUNDING)


def test_jitter_is_relative_and_what_is_no_number_is_not_hidden() -> None:
    x = inputs(3)
    lifted = x["gram"] + torch.diag_embed(
        0.1 * x["gram"].diagonal(dim1=1, dim2=2).mean(1, keepdim=True).expand(2, 4)
    )
    r = second_order_attention(
        **x | {"newton_temperature": torch.full((2,), torch.inf, dtype=torch.float64)}
    )
    b = second_order_attention(**x) - r
    expected = torch.linalg.solve(lifted, x["gram"] @ b.mT).mT
    torch.testing.assert_close(second_order_attention(**x, jitter=0.1) - r, expected, **ROUNDING)
    x = inputs(5, dtype=torch.float32)
    for implementation in ("reference", "triton"):
        for broken in (
            {"gram": x["gram"] * torch.tensor([-1.0, 1.0])[:, None, None]},
            {"temperature": torch.tensor([torch.nan, 4.0])},
        ):
            found = second_order_attention(**x | broken, implementation=implementation)
            assert found[:, 0].isnan().all() and found[:, 1].isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
def test_linear_is_minus_the_gradient_of_its_energy(causal: bool) -> None:
    q, k, *_ = inputs(65).values()
    energy = quadratic_energy(
        q.requires_grad_(), k, allowed_pairs(torch.arange(65), 65, causal, None)
    )
    (gradient,) = torch.autograd.grad(energy.sum(), q)
    torch.testing.assert_close(
        energy_linear_attention(q, k, causal=causal)[0], -gradient, **ROUNDING
    )
