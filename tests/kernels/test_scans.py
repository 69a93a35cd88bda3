"""Tests of the scan, the conditioner's features, RoPE, FEM's projection, and the delta rule.

They go beyond the contract of ``test_cases``: long sequences, resets, saved memory, and layouts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus
from torch.utils.flop_counter import FlopCounterMode

import kernels.gated_delta_rule.op as module
import kernels.time_decay_scan.op as scans
from kernels.check import relative, results
from kernels.conditioner_features import conditioner_features
from kernels.conditioner_features.cases import SUITE as FEATURES
from kernels.fem_projection import fem_projection
from kernels.fem_projection.cases import SUITE as PROJECTION
from kernels.gated_delta_rule.cases import definition as loop
from kernels.rotary import rotary
from kernels.time_decay_scan import time_decay_scan
from kernels.time_decay_scan.cases import SUITE as SCAN

rule: Any = module.gated_delta_rule  # Any: the tests unpack dictionaries into it
every_form = pytest.mark.parametrize("implementation", ["reference", "triton"])

# --- the scan -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["fast", "normal", "slow"])
def test_float32_to_4096_steps(case: str) -> None:
    x = {
        name: t.float()
        for name, t in SCAN.cases[case]({"steps": 4096, "batch": 1, "channels": 8}).items()
    }
    truth = results(SCAN.definition, x, torch.float64, "cpu", weighted_in=torch.float32)
    for name, got in results(
        lambda given: SCAN.call(given, "reference"), x, torch.float32, "cpu"
    ).items():
        # The definition works in float64, so a result is rounded once, by at most 2^-24 = 6e-8. The
        # gradient of a is a product of two such numbers. A float32 loop of 4096 steps reaches 3e-6.
        assert relative(got, truth[name]) < (1.2e-7 if name == "d a" else 6e-8), name


def test_decays_do_not_overflow_and_a_sum_is_exact() -> None:
    a = torch.full((2000, 2), -50.0).requires_grad_()
    x = torch.full((2000, 2), 1e30)
    states = time_decay_scan(a, x)
    assert states.isfinite().all() and torch.autograd.grad(states.sum(), a)[0].isfinite().all()
    assert torch.equal(
        time_decay_scan(torch.zeros(2000, 2), torch.ones(2000, 2))[-1], torch.full((2,), 2000.0)
    )


@every_form
def test_a_logit_of_minus_infinity_keeps_the_state(implementation: str) -> None:
    logits = torch.tensor([1.0, -torch.inf, 0.5, -torch.inf]).requires_grad_()
    x = torch.tensor([2.0, 0.0, 1.0, 0.0])
    states = time_decay_scan(logits, x, softplus=True, implementation=implementation)
    assert states[0] == states[1] and states[2] == states[3]
    (d,) = torch.autograd.grad(states.sum(), logits)
    assert d.isfinite().all() and (d[[1, 3]] == 0).all()


@every_form
def test_decays_close_to_one_keep_their_digits(implementation: str) -> None:
    """softplus(-14) = 8e-7 keeps its digits; log(1 + e) in float32 would be off by a tenth."""
    states = time_decay_scan(
        torch.full((128, 1), -14.0),
        torch.zeros(128, 1),
        torch.ones(1),
        softplus=True,
        implementation=implementation,
    )
    exact = torch.exp(-softplus(torch.tensor(-14.0).double()) * 128)
    assert abs(float(states[-1, 0]) - float(exact)) < 3e-7


def test_rounds_grow_with_the_logarithm_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, scan = [], scans._scan

    def counted(a: Tensor, x: Tensor) -> Tensor:
        calls.append(len(x))
        return scan(a, x)

    monkeypatch.setattr(scans, "_scan", counted)
    time_decay_scan(torch.zeros(4096, 1), torch.ones(4096, 1))
    assert calls == [4096, 256, 16]


# --- the conditioner's features -------------------------------------------------------------------


def test_the_features_weight_may_have_another_type() -> None:
    x = {name: t.float() for name, t in FEATURES.cases["normal"](FEATURES.small).items()}
    weight = x["weight"].bfloat16().requires_grad_()
    plain = conditioner_features(x["logits"], x["state"], weight, 1e-5, implementation="reference")
    fused = conditioner_features(x["logits"], x["state"], weight, 1e-5, implementation="triton")
    assert relative(fused.detach(), plain.detach()) < 1e-6
    assert torch.autograd.grad(fused.square().sum(), weight)[0].dtype == torch.bfloat16


# --- RoPE -----------------------------------------------------------------------------------------


def test_the_rotation_keeps_its_angles_alone_and_takes_gradients_in_their_layout() -> None:
    """The rotation saves only its angles and accepts gradients of any layout.

    Attention's gradients are permuted or expanded, and k may have none.
    """
    rng = torch.Generator().manual_seed(0)
    kept = list[Tensor]()
    found = []
    z = torch.randn(13, 2, 3, 18, generator=rng).requires_grad_()
    angles = torch.rand(13, 2, 1, 3, generator=rng)

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    for implementation in ("reference", "triton"):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            q, k, _ = z.chunk(3, -1)
            q, k = rotary(q, k, angles.cos(), angles.sin(), implementation=implementation)
        q, k = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3)
        found += [
            torch.autograd.grad(loss, z, retain_graph=True)[0]
            for loss in ((q.contiguous() @ k.mT).square().sum(), q.sum())
        ]
    # float32 rounding
    assert all(
        relative(fused, plain) < 1e-6 for plain, fused in zip(found[:2], found[2:], strict=True)
    )
    assert {t.numel() for t in kept} == {angles.numel()} and len(kept) == 2


# --- FEM's projection -----------------------------------------------------------------------------


def test_the_projection_keeps_its_arguments_alone_and_takes_gradients_in_their_layout() -> None:
    """The projection saves only its arguments and accepts gradients of any layout.

    The read has heads first, so that its gradients are permuted, expanded, or strided. Some outputs
    have no gradient.
    """
    x: dict[str, Any] = {
        name: t.float() if isinstance(t, Tensor) else t
        for name, t in PROJECTION.cases["normal"](PROJECTION.small).items()
    }
    z, f, weight = (x[name].requires_grad_() for name in ("z", "f", "wf"))
    found = []
    kept = list[Tensor]()

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    angles = torch.arange(13)[:, None, None, None] * torch.tensor([1.0, 0.1, 0.01])
    for implementation in ("reference", "triton"):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            parts = fem_projection(
                z,
                [(f, weight)],
                (angles.cos(), angles.sin()),
                x["widths"],
                1e-5,
                implementation=implementation,
            )
        q, k, v, lam, gate = (t.permute(1, 2, 0, 3) for t in parts.values())
        scores = q.contiguous() @ k.mT
        loss = (scores @ torch.cat((v, lam), -1)[..., ::2]).square().sum() + gate.sum()
        found.append(torch.autograd.grad(loss, (z, f, weight)))
    assert {t.data_ptr() for t in kept[:3]} == {z.data_ptr(), f.data_ptr(), weight.data_ptr()}
    assert all(t.shape == angles.shape for t in kept[3:])
    # float32 rounding of sums in another order
    assert all(relative(got, plain) < 1e-5 for got, plain in zip(found[1], found[0], strict=True))


# --- the delta rule -------------------------------------------------------------------------------


def inputs(
    tokens: int, dtype: torch.dtype = torch.float32, *, slowness: float = 1.0, b: int = 2
) -> dict[str, Tensor]:
    """Return unit q and k, v, beta in (0, 1), log-decays near -exp(-slowness), and a state."""
    rng = torch.Generator().manual_seed(tokens)

    def normal(*size: int) -> Tensor:
        return torch.randn(b, 2, *size, generator=rng, dtype=torch.float64)

    made = {
        "q": normalize(normal(tokens, 4), dim=-1),
        "k": normalize(normal(tokens, 4), dim=-1),
        "v": normal(tokens, 3),
    }
    made |= {
        "beta": normal(tokens).sigmoid(),
        "log_decay": -softplus(normal(tokens) - slowness),
        "initial": normal(4, 3),
    }
    return {name: t.to(dtype) for name, t in made.items()}


def test_orthonormal_keys_are_remembered_and_overwritten() -> None:
    """With beta = 1 and no decay, the state is a table of the last value written for each key."""
    k = torch.eye(4, dtype=torch.float64)[torch.tensor([0, 1, 2, 3, 1, 2, 1])][None, None]
    v = torch.arange(14, dtype=torch.float64).view(1, 1, 7, 2)
    _, state = rule(k, k, v, torch.ones(1, 1, 7, dtype=torch.float64), chunk=4)
    torch.testing.assert_close(state[0, 0], v[0, 0, [0, 6, 5, 3]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("slowness", [-5.0, 0.0, 6.0])
def test_float32_over_1000_tokens(slowness: float) -> None:
    x = inputs(1000, slowness=slowness, b=1)
    exact = results(loop, x, torch.float64, "cpu", weighted_in=torch.float32)
    for name, got in results(lambda given: rule(**given), x, torch.float32, "cpu").items():
        # float32's eps 6e-8, amplified by the triangular solve in chunks of 64
        assert relative(got, exact[name]) < 1e-5, name


def test_repeated_keys_and_beta_to_two_stay_bounded() -> None:
    """The hardest triangular systems keep the bound: one key for all tokens and beta up to 2."""
    x = inputs(200)
    x["k"] = torch.nn.functional.one_hot(torch.zeros(2, 2, 200, dtype=torch.long), 4).float()
    for beta in (1.0, 1.9, 2.0):
        x["beta"] = torch.full_like(x["beta"], beta)
        # Rounding of 200 sign flips of one direction.
        assert relative(rule(**x)[0], loop({name: t.double() for name, t in x.items()})[0]) < 1e-4


def test_strong_decays_and_resets_keep_the_digits_of_weak_ones() -> None:
    x = inputs(64)
    x["log_decay"][:] = -1e-3
    x["log_decay"][:, :, 10] = -1e6
    exact = loop({name: t.double() for name, t in x.items()})[0]
    # float32 rounding; a difference of long sums would be off by 0.06.
    assert relative(rule(**x)[0], exact) < 1e-6
    x["log_decay"][:, :, 15:30] = -1e4
    x["log_decay"][:, :, [7, 33]] = -torch.inf
    found = results(lambda given: rule(**given), x, torch.float32, "cpu")
    assert all(t.isfinite().all() for t in found.values())
    later = {name: t[:, :, 33:] for name, t in x.items() if name != "initial"}
    # The reset removes all earlier tokens.
    torch.testing.assert_close(found["output 0"][:, :, 33:], rule(**later)[0], rtol=1e-5, atol=1e-6)


def test_flops_grow_with_the_tokens() -> None:
    counts = []
    for tokens in (1024, 2048):
        with FlopCounterMode(display=False) as counter:
            rule(**inputs(tokens))
        counts.append(counter.get_total_flops())
    assert counts[1] == 2 * counts[0]
