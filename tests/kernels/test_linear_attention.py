"""Tests of linear attention beyond the contract of ``test_cases``.

They cover weak decays next to strong ones, forgotten values, exact logarithms, and fla's layout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.check import Inputs, relative, results
from kernels.linear_attention import end_state, linear_attention, log_weights
from kernels.linear_attention.cases import SUITE, weights_and_decays
from kernels.linear_attention.op import Damp

every_decay = pytest.mark.parametrize("decay", ["no decay", "a decay a head", "a decay a channel"])
decaying = pytest.mark.parametrize("decay", ["a decay a head", "a decay a channel"])
every_form = pytest.mark.parametrize("implementation", ["reference", "triton"])


def inputs(tokens: int, decay: str, dtype: torch.dtype = torch.float32, **size: int) -> Inputs:
    made = SUITE.cases[decay]({**SUITE.small, "keys": 3, "values": 4, "tokens": tokens, **size})
    return {name: t.to(dtype) if isinstance(t, Tensor) else t for name, t in made.items()}


@decaying
@every_form
@pytest.mark.parametrize("strong", [-1e6, -torch.inf, -40.0])
def test_a_weak_decay_behind_strong_ones_keeps_its_digits(
    decay: str, strong: float, implementation: str
) -> None:
    """Weak decays after seven strong ones in the same chunk keep float32's precision.

    Differences of cumulative sums in float32 would give the weights to 1e-5 at best.
    """
    x = inputs(16, decay) | {"normalise": False}
    x["log_decay"] = torch.full_like(x["log_decay"], -1e-3)
    x["log_decay"][:, :, :7] = strong
    truth = results(SUITE.definition, x, torch.float64, "cpu", weighted_in=torch.float32)
    for name, got in results(
        lambda given: SUITE.call(given, implementation), x, torch.float32, "cpu"
    ).items():
        assert relative(got, truth[name]) < 1e-6, name  # float32 rounding of short sums


@decaying
@every_form
@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "plain"])
def test_no_gradient_is_nan_where_huge_values_were_forgotten(
    decay: str, normalise: bool, implementation: str
) -> None:
    """Gradients stay finite after a strong decay that forgets huge values.

    Values are about exp(40) before the first strong decay and exp(-40) with small keys after it.
    The output's gradients reach exp(40), as those of the free energy do.
    """
    tokens, places = (
        (200, (30, 64, 100, 150)) if implementation == "reference" else (50, (8, 16, 25, 37))
    )
    x = inputs(tokens, decay)
    x["log_decay"] = torch.full_like(x["log_decay"], -0.01)
    for at in places:
        x["log_decay"][:, :, at] = -500.0
        x["k"][:, :, at:] *= 1e-3
    first = torch.arange(tokens) < places[0]
    x["v"] = x["v"].abs() * torch.where(first, 40.0, -40.0).exp()[:, None]
    leaves: dict[str, Any] = {
        name: x[name].requires_grad_() for name in ("q", "k", "v", "log_decay")
    }
    y, _ = linear_attention(**leaves, normalise=normalise, implementation=implementation)
    weights = torch.where(first, -40.0, 40.0).exp()[:, None].expand_as(y)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y, list(leaves.values()), weights))


@pytest.mark.parametrize("case", SUITE.cases)
def test_a_state_is_what_the_tokens_add_to_what_they_leave_of_the_one_before(case: str) -> None:
    x: dict[str, Any] = {
        name: t.double() if isinstance(t, Tensor) else t
        for name, t in SUITE.cases[case](SUITE.small).items()
    }
    x.setdefault(
        "initial",
        torch.ones(
            *x["k"].shape[:2],
            x["k"].shape[3],
            x["v"].shape[3] + x["normalise"],
            dtype=torch.float64,
        ),
    )
    leaves = [x[name].requires_grad_() for name in ("k", "v", "log_decay", "initial") if name in x]
    _, state = linear_attention(**x)
    given = (x["k"], x["v"], x.get("log_decay"), x["normalise"])
    end, fading = end_state(*given, x.get("eps"))
    made = end + (x["initial"] if fading is None else Damp.apply(x["initial"], fading))
    weights = torch.linspace(-1, 1, state.numel(), dtype=torch.float64).view_as(state)
    found, wanted = ((t.detach(), *torch.autograd.grad(t, leaves, weights)) for t in (made, state))
    # float64 rounding of sums of 37 terms
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@every_decay
def test_a_row_that_reads_nothing_gives_its_own_value(decay: str) -> None:
    x = inputs(9, decay, torch.float64)
    x["k"][:, :, :4] = 0
    leaves = {name: t.requires_grad_() for name, t in x.items() if name != "normalise"}
    for causal in (True, False):
        y, _ = linear_attention(**leaves, causal=causal, normalise=True)
        weights = log_weights(x["q"], x["k"], x.get("log_decay"), 0, 9, causal=causal).softmax(-1)
        torch.testing.assert_close(y, weights @ x["v"], rtol=1e-13, atol=1e-13)  # float64 rounding
        assert not causal or torch.equal(y[:, :, :4], x["v"][:, :, :4])
        for result in (y, weights @ x["v"]):
            gradients = torch.autograd.grad(
                result.square().sum(), list(leaves.values()), retain_graph=True
            )
            assert all(g.isfinite().all() for g in gradients)


@every_decay
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_log_weights_are_the_weights(decay: str, causal: bool) -> None:
    x = {
        name: t.requires_grad_() if isinstance(t, Tensor) else t
        for name, t in inputs(23, decay, torch.float64).items()
    }
    blocks = [
        log_weights(x["q"], x["k"], x.get("log_decay"), a, b, causal=causal)
        for a, b in ((0, 7), (7, 23))
    ]
    rows = torch.cat(blocks, dim=2)
    weights = weights_and_decays(x | {"causal": causal})[0]
    torch.testing.assert_close(rows.exp(), weights, rtol=1e-12, atol=1e-14)  # float64 rounding
    names = [name for name in x if name in ("q", "k", "log_decay")]
    w = torch.randn(weights.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaves = [x[name] for name in names]
    from_rows = torch.autograd.grad((rows.exp() * w).sum(), leaves)
    from_weights = torch.autograd.grad((weights * w).sum(), leaves)
    for one, other in zip(from_rows, from_weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)  # float64 rounding


@decaying
def test_log_weights_know_what_float_weights_have_lost(decay: str) -> None:
    x = inputs(50, decay)
    rows = log_weights(x["q"], x["k"], torch.full_like(x["log_decay"], -20.0), 49, 50)
    exact = torch.log(x["q"][:, :, 49:].double() @ x["k"].double().mT) - 20.0 * torch.arange(
        49, -1, -1
    )
    torch.testing.assert_close(rows.double(), exact, rtol=1e-6, atol=1e-6)  # float32, down to -980


@pytest.mark.parametrize("which", [0, 1])
def test_the_rows_alone_or_the_state_alone_are_differentiated(which: int) -> None:
    x = inputs(20, "a decay a channel, with a state")

    def one(implementation: str) -> dict[str, Tensor]:
        return results(
            lambda given: (SUITE.call(given, implementation)[which],), x, torch.float32, "cpu"
        )

    found = one("triton")
    for name, expected in one("reference").items():
        # float32 rounding of sums up to 20
        torch.testing.assert_close(
            found.get(name, torch.zeros_like(expected)), expected, rtol=1e-5, atol=2e-5
        )


def test_one_key_for_all_heads_and_decays_in_float32_next_to_bfloat16() -> None:
    x = inputs(18, "a decay a head", heads=2)
    shared = x["k"][:, :1]
    spread = linear_attention(**x | {"k": shared.expand(-1, 2, -1, -1)}, implementation="triton")[0]
    copied = linear_attention(**x | {"k": shared.repeat(1, 2, 1, 1)}, implementation="triton")[0]
    assert torch.equal(spread, copied)
    mixed = {name: t.bfloat16() if name in ("q", "k", "v") else t for name, t in x.items()}
    leaf = mixed["log_decay"].clone().requires_grad_()
    grads = []
    for how in ("triton", "reference"):
        y, state = linear_attention(**mixed | {"log_decay": leaf}, implementation=how)
        assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
        grads.append(torch.autograd.grad(y.float().square().sum(), leaf)[0])
    # bfloat16's unit roundoff is 4e-3.
    assert grads[0].dtype == torch.float32 and relative(*grads) < 1e-2
