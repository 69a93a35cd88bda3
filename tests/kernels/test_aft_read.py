"""AFT's read beyond ``test_channel_reads``: logits of any size, a query inside, logits of F's own, bytes of the state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.aft_read import aft_read
from tests.kernels.channel_reads import OPS, definition, inputs, normal
from tests.kernels.oracle import relative

AFT = OPS["aft"]


@pytest.mark.parametrize("size", [100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_of_any_size(size: float, dtype: torch.dtype) -> None:
    prior, rest = inputs(AFT, 90)
    # Whole numbers and coarse values: k + beta v is then exact in both types, so that what differs is the read's own doing.
    k = (torch.rand(prior["k"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2 * size - size).round()
    v = (rest["v"] * 100 / 4).round() * 4
    beta = torch.full_like(rest["beta"], 2.0)
    x = [t.to(dtype).requires_grad_() for t in (k, v, beta, rest["lam"], rest["gate"])]
    o = aft_read(*x)[0]
    wide = [t.detach().double().requires_grad_() for t in x]
    truth = definition(AFT, {"k": wide[0]}, dict(zip(("v", "beta", "lam", "gate"), wide[1:], strict=True)))[2]
    # the difference of two log-sum-exps of this size, halved by beta
    assert (o - truth).abs().max() < 4 * size * torch.finfo(dtype).eps
    for got, expected in zip(torch.autograd.grad(o.sum(), x), torch.autograd.grad(truth.sum(), wide), strict=True):
        assert got.isfinite().all()
        assert relative(got, expected) < (1e-10 if dtype == torch.float64 else 1e-4)  # dbeta: F - E_w[v] as the difference of both


def test_a_single_token_wins_and_is_forgotten_never() -> None:
    k, v = torch.zeros(1, 1, 9, 1), torch.arange(9.0)[:, None].expand(1, 1, 9, 1)
    k[0, 0, 3] = 1e4
    assert torch.equal(aft_read(k, v)[0].flatten(), torch.tensor([0.0, 0.5, 1.0, *[3.0] * 6]))


@pytest.mark.parametrize("causal", [True, False])
def test_logits_of_its_own_for_the_free_energy_and_a_query_inside(causal: bool) -> None:
    prior, rest = inputs(AFT, 33)
    v, beta, lam, gate = rest.values()
    other = {"k": normal(torch.Generator().manual_seed(7), *v.shape)}
    query = torch.rand(*v.shape[:3], 6, generator=torch.Generator().manual_seed(8), dtype=torch.float64) + 0.1
    mu, free_energy = definition(AFT, prior, rest, causal)[0], definition(AFT, other, rest, causal)[1]
    q_mu, q_free = query.split(3, dim=-1)
    wide = torch.cat((prior["k"], other["k"]), dim=-1)

    def mixed(mu: Tensor, free_energy: Tensor) -> Tensor:
        return gate * (mu + lam * (free_energy - mu))

    def check(got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)  # float64 rounding

    check(aft_read(wide, v, beta, lam, gate, causal=causal)[0], mixed(mu, free_energy))
    inside = mixed(q_mu * mu, free_energy + q_free.log() / beta[:, None])
    check(aft_read(wide, v, beta, lam, gate, query=query, causal=causal)[0], inside)
    shared = definition(AFT, prior, rest, causal)[1]
    inside = mixed(q_mu * mu, shared + q_mu.log() / beta[:, None])
    check(aft_read(prior["k"], v, beta, lam, gate, query=q_mu, causal=causal)[0], inside)
    check(aft_read(prior["k"], v, query=q_mu, causal=causal)[0], q_mu * mu)


def test_parts_with_logits_of_its_own_equal_the_whole() -> None:
    prior, rest = inputs(AFT, 40)
    v, beta, lam, gate = rest.values()
    k = torch.cat((prior["k"], prior["k"].flip(2)), dim=-1)
    whole, state = aft_read(k, v, beta, lam, gate)
    assert state is not None and state.shape == (2, 2, 7, 3)
    made, state = [], None
    for part in (slice(0, 13), slice(13, 14), slice(14, 40)):
        o, state = aft_read(k[:, :, part], v[:, :, part], beta, lam[:, :, part], gate[:, :, part], state=state)
        made.append(o)
    torch.testing.assert_close(torch.cat(made, 2), whole, rtol=1e-12, atol=1e-12)  # float64 rounding


def test_the_state_has_three_or_five_rows() -> None:
    prior, rest = inputs(AFT, 4)
    for beta, rows in ((None, 3), (rest["beta"], 5)):
        state = aft_read(prior["k"], rest["v"], beta)[1]
        assert state is not None and state.shape == (2, 2, rows, 3) and not state.requires_grad
    assert aft_read(prior["k"], rest["v"], causal=False)[1] is None


def test_logits_of_another_width_are_refused() -> None:
    v = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"k has shape \[1, 1, 4, 6\], expected \[1, 1, 4, 4\] or \[1, 1, 4, 8\]"):
        aft_read(torch.zeros(1, 1, 4, 6), v)
