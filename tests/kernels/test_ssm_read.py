"""The state-space read beyond ``test_channel_reads``: the recurrence it names, extreme steps, the state's columns, chunks."""

from __future__ import annotations

import pytest
import torch

import kernels.ssm_read.reference as reference
from kernels.ssm_read import ssm_read
from kernels.time_decay_scan import time_decay_scan
from tests.kernels.channel_reads import OPS, call_ssm, inputs


def test_not_normalised_mu_is_the_selective_scan() -> None:
    prior, rest = inputs(OPS["ssm"], 70)
    delta, rate, b_in, c_out = prior.values()
    state = torch.zeros(2, 2, 3, 3, dtype=torch.float64)
    expected = []
    for t in range(70):
        step = delta[:, :, t, :, None]
        state = (-step * rate).exp() * state + step * b_in[:, :, t, None] * rest["v"][:, :, t, :, None]
        expected.append((state * c_out[:, :, t, None]).sum(-1))
    o, after = call_ssm(prior, rest["v"], normalise=False)
    torch.testing.assert_close(o, torch.stack(expected, 2), rtol=1e-12, atol=1e-12)  # float64 rounding
    assert after is not None
    torch.testing.assert_close(after, state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1e-6, 1e4])
@pytest.mark.parametrize("values", [1.0, 100.0])
def test_steps_of_any_size(size: float, values: float) -> None:
    prior, rest = inputs(OPS["ssm"], 130, dtype=torch.float32)
    prior["delta"] = prior["delta"] * size
    rest["v"] = rest["v"] * values
    x = [t.requires_grad_() for t in (*prior.values(), *rest.values())]
    o = call_ssm(prior, *rest.values())[0]
    assert all(t.isfinite().all() for t in (o, *torch.autograd.grad(o.sum(), x)))
    mu, free_energy = call_ssm(prior, rest["v"])[0], call_ssm(prior, rest["v"], rest["beta"])[0]
    if size == 1e4 and values == 1.0:  # everything but the token itself is forgotten
        torch.testing.assert_close(mu, rest["v"], rtol=1e-6, atol=0)  # float32 rounding
        torch.testing.assert_close(free_energy, rest["v"], rtol=1e-6, atol=1e-5)  # float32 rounding of beta v / beta
    else:
        assert (free_energy >= mu - 1e-5 * values).all() and (free_energy <= rest["v"].cummax(2).values + 1e-5 * values).all()


def test_a_far_past_maximum_fades_without_underflow() -> None:
    """A value 300 above the others, then 2000 steps that forget it: a maximum that did not fade would leave the others 0 in float32."""
    v = torch.zeros(1, 1, 2001, 1)
    v[:, :, 0] = 300.0
    one = torch.ones(1, 1, 2001, 1)
    o, _ = ssm_read(one, torch.ones(1, 1, 1), one, one, v, torch.ones(1, 1))
    decay = torch.arange(2001, dtype=torch.float64)
    others = (1 - (-decay).exp()) / (1 - torch.tensor(-1.0, dtype=torch.float64).exp())
    truth = torch.logaddexp(300 - decay, others.log()) - (others + (-decay).exp()).log()
    torch.testing.assert_close(o.double().flatten(), truth, rtol=0, atol=1e-4)  # eps times exponents of 300


def test_the_states_columns() -> None:
    prior, rest = inputs(OPS["ssm"], 5)
    for beta, normalise, columns in ((None, False, 3), (None, True, 6), (rest["beta"], False, 7), (rest["beta"], True, 10)):
        state = call_ssm(prior, rest["v"], beta, normalise=normalise)[1]
        assert state is not None and state.shape == (2, 2, 3, columns) and not state.requires_grad
    assert call_ssm(prior, rest["v"], causal=False)[1] is None


def test_states_are_made_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def watched(a: torch.Tensor, x: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
        lengths.append(len(x))
        return time_decay_scan(a, x, initial)

    monkeypatch.setattr(reference, "time_decay_scan", watched)
    prior, rest = inputs(OPS["ssm"], 150)
    for t in (*prior.values(), *rest.values()):
        t.requires_grad_()
    call_ssm(prior, *rest.values())[0].sum().backward()
    assert lengths == [64, 64, 22, 22, 64, 64]  # forward, then once more in the backward


def test_rates_of_another_shape_are_refused() -> None:
    prior, rest = inputs(OPS["ssm"], 4)
    with pytest.raises(ValueError, match=r"rate has shape \[1, 3, 3\], expected \[2, 3, states\]"):
        ssm_read(prior["delta"], prior["rate"][:1], prior["b_in"], prior["c_out"], rest["v"])
    with pytest.raises(ValueError, match="c_out has shape"):
        ssm_read(prior["delta"], prior["rate"], prior["b_in"], prior["c_out"][..., :2], rest["v"])
