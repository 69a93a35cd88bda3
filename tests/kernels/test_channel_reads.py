"""Tests of AFT's and the state-space model's read beyond the contract of ``test_cases``.

They cover extreme logits and steps, the contents of a state, chunks, and refused calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.ssm_read.op as reference
from kernels.aft_read import aft_read
from kernels.aft_read.cases import SUITE as AFT
from kernels.check import Inputs, relative, results
from kernels.ssm_read import ssm_read
from kernels.ssm_read.cases import SUITE as SSM
from kernels.time_decay_scan import time_decay_scan

READS: dict[str, Any] = {"aft_read": (aft_read, AFT), "ssm_read": (ssm_read, SSM)}
every_form = pytest.mark.parametrize("implementation", ["reference", "triton"])


def drawn(op: str, dtype: torch.dtype = torch.float32, **size: int) -> Inputs:
    suite = READS[op][1]
    return {name: t.to(dtype) for name, t in suite.cases["normal"]({**suite.small, **size}).items()}


@pytest.mark.parametrize("size", [100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_aft_takes_logits_of_any_size(size: float, dtype: torch.dtype) -> None:
    x = drawn("aft_read", torch.float64, tokens=90)
    # Integers and coarse values make k + beta v exact in both types, so that only the read's
    # rounding differs.
    x["k"] = (
        torch.rand(x["k"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        * 2
        * size
        - size
    ).round()
    x |= {"v": (x["v"] * 100 / 4).round() * 4, "beta": torch.full_like(x["beta"], 2.0)}
    x = {name: t.to(dtype).double() for name, t in x.items()}
    truth = results(AFT.definition, x, torch.float64, "cpu")
    got = results(
        lambda given: AFT.call(given, "reference"), x, dtype, "cpu", weighted_in=torch.float64
    )
    # Rounding of the difference of two log-sum-exps of this size, divided by beta = 2.
    assert (got["output 0"] - truth["output 0"]).abs().max() < 4 * size * torch.finfo(dtype).eps
    # The gradient of beta is F - E_w[v], a difference of two large numbers.
    for name in ("d k", "d v", "d beta"):
        assert got[name].isfinite().all()
        assert relative(got[name], truth[name]) < (1e-10 if dtype == torch.float64 else 1e-4)


@every_form
def test_aft_never_forgets_the_token_that_won(implementation: str) -> None:
    k, v = torch.zeros(1, 1, 9, 1), torch.arange(9.0)[:, None].expand(1, 1, 9, 1)
    k[0, 0, 3] = 1e4
    assert torch.equal(
        aft_read(k, v, implementation=implementation)[0].flatten(),
        torch.tensor([0.0, 0.5, 1.0, *[3.0] * 6]),
    )


def test_ssm_not_normalised_is_the_selective_scan() -> None:
    x = drawn("ssm_read", torch.float64, tokens=70)
    state, expected = torch.zeros(1, 2, 3, 2, dtype=torch.float64), []
    for t in range(70):
        step = x["delta"][:, :, t, :, None]
        state = (-step * x["rate"]).exp() * state + step * x["b_in"][:, :, t, None] * x["v"][
            :, :, t, :, None
        ]
        expected.append((state * x["c_out"][:, :, t, None]).sum(-1))
    o, after = ssm_read(x["delta"], x["rate"], x["b_in"], x["c_out"], x["v"], normalise=False)
    # float64 rounding
    torch.testing.assert_close(o, torch.stack(expected, 2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1e-6, 1e4])
@pytest.mark.parametrize("values", [1.0, 100.0])
def test_ssm_takes_steps_of_any_size(size: float, values: float) -> None:
    x = drawn("ssm_read", tokens=130)
    x |= {"delta": x["delta"] * size, "v": x["v"] * values}
    found = results(lambda given: SSM.call(given, "reference"), x, torch.float32, "cpu")
    assert all(t.isfinite().all() for t in found.values())
    bare: Any = {name: t for name, t in x.items() if name not in ("lam", "gate", "beta")}
    mu, free_energy = ssm_read(**bare)[0], ssm_read(**bare, beta=x["beta"])[0]
    # These steps forget everything except the token itself.
    if size == 1e4 and values == 1.0:
        torch.testing.assert_close(mu, x["v"], rtol=1e-6, atol=0)  # float32 rounding
        # float32 rounding of beta v / beta
        torch.testing.assert_close(free_energy, x["v"], rtol=1e-6, atol=1e-5)
    else:
        assert (free_energy >= mu - 1e-5 * values).all()
        assert (free_energy <= x["v"].cummax(2).values + 1e-5 * values).all()


@every_form
def test_ssm_a_far_past_maximum_fades_without_underflow(implementation: str) -> None:
    """A value 300 above the rest is forgotten step by step without underflow.

    If its maximum did not decay, too, the other values would underflow to 0 in float32.
    """
    tokens, rate = (2001, 1.0) if implementation == "reference" else (41, 10.0)
    v, one = torch.zeros(1, 1, tokens, 1), torch.ones(1, 1, tokens, 1)
    v[:, :, 0] = 300.0
    o, _ = ssm_read(
        one,
        torch.full((1, 1, 1), rate),
        one,
        one,
        v,
        torch.ones(1, 1),
        implementation=implementation,
    )
    decay = rate * torch.arange(tokens, dtype=torch.float64)
    others = (1 - (-decay).exp()) / (1 - torch.tensor(-rate, dtype=torch.float64).exp())
    truth = torch.logaddexp(300 - decay, others.log()) - (others + (-decay).exp()).log()
    # float32's eps times exponents of 300
    torch.testing.assert_close(o.double().flatten(), truth, rtol=0, atol=1e-4)


def test_ssm_states_are_made_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def watched(a: torch.Tensor, x: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
        lengths.append(len(x))
        return time_decay_scan(a, x, initial)

    monkeypatch.setattr(reference, "time_decay_scan", watched)
    results(
        lambda given: SSM.call(given, "reference"),
        drawn("ssm_read", tokens=150),
        torch.float32,
        "cpu",
    )
    assert lengths == [64, 64, 22, 22, 64, 64]  # forward, then again in the backward


@every_form
def test_what_a_state_holds(implementation: str) -> None:
    aft, ssm = drawn("aft_read"), drawn("ssm_read")
    for left_out, rows, columns in ((("beta", "lam"), 3, 4), ((), 7, 10)):
        for read, x, shape in (
            (aft_read, aft, (1, 2, rows, 3)),
            (ssm_read, ssm, (1, 2, 3, columns)),
        ):
            given: Any = {name: t.requires_grad_() for name, t in x.items() if name not in left_out}
            state = read(**given, implementation=implementation)[1]
            assert state is not None and state.shape == shape and not state.requires_grad
            assert read(**given, causal=False)[1] is None


@every_form
@pytest.mark.parametrize("op", READS)
def test_padding_alone_leaves_a_state_as_it_is(op: str, implementation: str) -> None:
    x, read = drawn(op, tokens=5), READS[op][0]
    nobody = torch.zeros(1, 5, dtype=torch.bool)
    _, state = read(**x, valid=nobody, implementation=implementation)
    first, second = (read(**x, state=each, implementation=implementation) for each in (None, state))
    assert state.isfinite().all()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    idle = read(**x, valid=nobody, state=first[1], implementation=implementation)[1]
    torch.testing.assert_close(idle, first[1], rtol=1e-6, atol=1e-6)  # float32 rounding


@pytest.mark.parametrize("op", READS)
def test_gradients_next_to_a_state(op: str) -> None:
    x, (read, _) = drawn(op, tokens=16), READS[op]

    def part(tokens: slice) -> Inputs:
        return {name: t[:, :, tokens] if t.dim() == 4 else t for name, t in x.items()}

    state = read(**part(slice(0, 9)))[1]
    later = part(slice(9, 16))

    def results_of(implementation: str) -> dict[str, Tensor]:
        def call(given: Inputs) -> tuple[Tensor, ...]:
            return read(**given, state=state, implementation=implementation)[:1]

        return results(call, later, torch.float32, "cpu")

    truth = results_of("reference")
    for name, g in results_of("triton").items():
        assert relative(g, truth[name]) < 5e-6, name  # both round in float32
