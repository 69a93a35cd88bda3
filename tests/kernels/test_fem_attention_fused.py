from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.fem_attention import fem_attention
from kernels.implementations import OncePerMessage
from tests.kernels.oracle import NAMES, definition, inputs, mu_and_free_energy, relative, results

CASES: dict[str, dict[str, Any]] = {
    "normal": {},
    "small beta": {"beta": 0.02},
    "large beta": {"beta": 40.0, "value_range": 70.0},
    "range just under the shift's limit": {"value_range": 4.9},
    "range just over the shift's limit": {"value_range": 5.3},
    "range 40": {"value_range": 40.0},
    "range 80": {"value_range": 79.0},
    "small beta, range 80": {"beta": 0.02, "value_range": 79.0},
    "widths that need padding": {"dk": 16, "dv": 16},
}


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Log records as of a fresh process: nothing said yet."""
    monkeypatch.setattr(logging.getLogger("kernels.fem_attention"), "filters", [OncePerMessage()])
    caplog.set_level(logging.INFO, "kernels.fem_attention")
    return caplog


def fused(*tensors: torch.Tensor) -> torch.Tensor:
    return fem_attention(*tensors, implementation="fused")


@pytest.mark.parametrize("case", CASES)
def test_float32_results_and_gradients(case: str, messages: pytest.LogCaptureFixture) -> None:
    x = {name: t.float().double() for name, t in inputs(128, **{"dk": 32, "dv": 16, **CASES[case]}).items()}
    for name, got, truth in zip(("o", *NAMES), results(fused, x, torch.float32), results(definition, x, torch.float64), strict=True):
        # the stated bound of the fused form: eps = 6e-8, amplified by exponents up to 40 and sums of 128 terms; measured up to 4e-6
        assert relative(got, truth) < 1e-5, name
    assert "fem_attention: fused runs" in messages.text and "reference runs" not in messages.text


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_error_is_at_most_that_of_the_definition_in_bfloat16(case: str) -> None:
    x = inputs(128, **{"dk": 32, "dv": 16, **CASES[case]})
    x = {name: t.bfloat16().double() for name, t in x.items()}
    truth, ours, plain = (
        results(read, x, dtype) for read, dtype in ((definition, torch.float64), (fused, torch.bfloat16), (definition, torch.bfloat16))
    )
    for name, expected, got, baseline in zip(("o", *NAMES), truth, ours, plain, strict=True):
        # 1.5 is the kernel contract; the baseline holds every step of the definition in bfloat16
        assert relative(got, expected) <= 1.5 * relative(baseline, expected), name
    # the output's own rounding is half of bfloat16's unit roundoff 2^-8 in the mean; attention's weights and values are rounded too
    assert relative(ours[0], truth[0]) < 2**-8


@pytest.mark.parametrize("beta", [0.02, 0.05])
def test_bfloat16_free_energy_gap_keeps_its_digits_at_small_beta(beta: float) -> None:
    x = {name: t.bfloat16().double() for name, t in inputs(128, beta=beta).items()}
    mu, free_energy = mu_and_free_energy(x["q"], x["k"], x["v"], x["beta"])
    lam = torch.full(mu.shape, 0.5, requires_grad=True)  # float32 beside bfloat16; its gradient is F - mu
    o = fem_attention(x["q"].bfloat16(), x["k"].bfloat16(), x["v"].bfloat16(), x["beta"].float(), lam, implementation="fused")
    (gap,) = torch.autograd.grad(o.float().sum(), lam)
    # F - mu is about beta / 2, 1% of the values; a stream exp(x) - 1 loses 4% to 10% of it, exp(x) all of it; bfloat16's eps is 0.4%
    assert relative(gap, free_energy - mu) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_range", [1.0, 6.0, 70.0])
def test_free_energy_is_never_under_the_mean_whatever_the_rounding(value_range: float, dtype: torch.dtype) -> None:
    x = inputs(64, value_range=value_range, sharpness=8.0, dtype=dtype)
    lam = x["lam"].float().requires_grad_() if dtype == torch.bfloat16 else x["lam"].requires_grad_()
    o = fem_attention(x["q"], x["k"], x["v"], x["beta"], lam, implementation="fused")
    (gap,) = torch.autograd.grad(o.float().sum(), lam)
    assert (gap >= 0).all() and gap.max() > 0.01


def test_bfloat16_gap_is_finite_where_rounding_leaves_the_possible() -> None:
    # three neighbouring bfloat16 numbers: the mean of the first three, 144.33, rounds to 144, as if no value were larger
    v = torch.tensor([144.0, 144.0, 145.0, 146.0])[None, None, :, None].bfloat16().requires_grad_()
    q = torch.zeros(1, 1, 4, 2, dtype=torch.bfloat16)
    beta = torch.full((1, 1), 2.45, dtype=torch.bfloat16, requires_grad=True)
    o = fem_attention(q, q, v, beta, implementation="fused")
    assert o.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(o.float().sum(), (v, beta)))


def test_all_equal_values_and_one_token() -> None:
    for tokens in (1, 9):
        x = inputs(tokens, dtype=torch.float32)
        x["v"] = torch.full_like(x["v"], -3.5)
        leaves = {name: t.requires_grad_() for name, t in x.items()}
        o = fem_attention(leaves["q"], leaves["k"], leaves["v"], leaves["beta"], implementation="fused")
        torch.testing.assert_close(o, torch.full_like(o, -3.5), rtol=1e-6, atol=0)  # a weighted mean of equal float32 numbers
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(o.sum(), [leaves[n] for n in ("q", "k", "v", "beta")]))


@pytest.mark.parametrize("implementation", ["auto", "fused"])
def test_beyond_its_range_the_reference_runs_and_it_is_said_once(implementation: str, messages: pytest.LogCaptureFixture) -> None:
    x = inputs(dtype=torch.float32, value_range=500.0)
    x["v"][0, 0, 3:5, 0] = torch.tensor([-100.0, 100.0])  # beta 1.95: a range of 390 at the least
    truth = results(lambda *t: fem_attention(*t, implementation="reference"), x, torch.float32)
    messages.clear()
    for _ in range(3):
        for got, expected in zip(
            results(lambda *t: fem_attention(*t, implementation=implementation), x, torch.float32), truth, strict=True
        ):
            assert torch.equal(got, expected)
    (record,) = [record for record in messages.records if record.levelname == "WARNING"]
    assert len(messages.records) == 2 and "over 80: the exact reference" in record.getMessage()
    largest = float((x["beta"][:, None] * (x["v"].amax(2, keepdim=True) - x["v"].amin(2, keepdim=True))).max())
    assert f"{largest:.4g}" in record.getMessage() and "\n" not in record.getMessage()


def test_one_channel_out_of_range_or_not_finite_is_enough(messages: pytest.LogCaptureFixture) -> None:
    for value in (81.0, float("inf"), float("nan")):
        messages.clear()
        logging.getLogger("kernels.fem_attention").filters[:] = [OncePerMessage()]
        x = inputs(value_range=1.0)
        x["beta"][:] = 1.0
        x["v"][1, 2, 7, 3] = value
        fem_attention(**x)
        assert "the exact reference" in messages.text


@pytest.mark.parametrize("implementation", ["auto", "fused", "reference"])
def test_the_implementation_that_runs_is_logged_once(implementation: str, messages: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        fem_attention(**inputs(), implementation=implementation)
    (record,) = messages.records
    assert record.levelname == "INFO"
    assert ("reference" if implementation == "reference" else "fused") in record.getMessage()


@pytest.mark.parametrize("queries", [1, 5, 33])
@pytest.mark.parametrize(("dk", "dv"), [(16, 8), (16, 16), (32, 8)])
@pytest.mark.parametrize("with_beta", [True, False])
def test_cpu_runs_the_flash_kernel_whatever_the_widths(dk: int, dv: int, queries: int, with_beta: bool) -> None:
    x = {name: t.requires_grad_() for name, t in inputs(33, queries=queries, dk=dk, dv=dv, dtype=torch.float32).items()}
    arguments = (x["q"], x["k"], x["v"], *((x["beta"], x["lam"]) if with_beta else ()))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where the flash kernel cannot take the call
        fem_attention(*arguments, implementation="fused").sum().backward()
    with pytest.raises(RuntimeError), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        fem_attention(*arguments, implementation="fused")
