from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.symmetric_attention import symmetric_linear_attention
from kernels.symmetric_attention.reference import attention_energy
from tests.kernels.oracle import relative

ROUNDING: Any = {"rtol": 1e-12, "atol": 1e-12}  # float64, some hundreds of sums of terms of size 1


def tokens(t: int, *, b: int = 2, h: int = 3, p: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(b, h, t, p, generator=torch.Generator().manual_seed(t), dtype=torch.float64).to(dtype)


def loop(z: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    phi = z.sigmoid()
    sums = torch.zeros(*z.shape[:2], z.shape[3], z.shape[3], dtype=z.dtype) if state is None else state
    outs = []
    for i in range(z.shape[2]):
        sums = sums + phi[:, :, i, :, None] * phi[:, :, i, None, :]
        slope = phi[:, :, i] * (1 - phi[:, :, i])
        outs.append(slope * (phi[:, :, i, None, :] @ sums)[:, :, 0] / z.shape[3] ** 0.5)
    return torch.stack(outs, dim=2), sums


@pytest.mark.parametrize("t", [1, 2, 63, 64, 65, 131])
def test_equals_the_loop_with_all_gradients(t: int) -> None:
    z, state = tokens(t).requires_grad_(), torch.randn(2, 3, 4, 4, dtype=torch.float64).requires_grad_()
    weights = [torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for shape in (z.shape, state.shape)]
    results = []
    for outs in (symmetric_linear_attention(z, state=state), loop(z, state)):
        total = sum((out * w).sum() for out, w in zip(outs, weights, strict=True))
        results.append((*outs, *torch.autograd.grad(total, (z, state))))  # type: ignore[arg-type]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, **ROUNDING)


@pytest.mark.parametrize("causal", [True, False])
def test_gradcheck(causal: bool) -> None:
    z = tokens(5, b=1, h=2, p=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: symmetric_linear_attention(z, causal=causal), (z,))


@pytest.mark.parametrize("causal", [True, False])
def test_is_the_gradient_of_its_energy(causal: bool) -> None:
    z = tokens(9).requires_grad_()
    energy = attention_energy(z, z.detach() if causal else None, kind="linear", causal=causal)
    torch.testing.assert_close(torch.autograd.grad(energy.sum(), z)[0], symmetric_linear_attention(z, causal=causal)[0], **ROUNDING)


def test_the_last_token_sees_what_all_see_without_a_mask() -> None:
    z = tokens(70)
    causal, whole = symmetric_linear_attention(z), symmetric_linear_attention(z, causal=False)
    torch.testing.assert_close(causal[0][:, :, -1], whole[0][:, :, -1], **ROUNDING)
    torch.testing.assert_close(causal[1], whole[1], **ROUNDING)


@pytest.mark.parametrize("part", [1, 50])
def test_parts_with_a_carried_state_equal_the_whole(part: int) -> None:
    z, state = tokens(150), None
    whole, last = symmetric_linear_attention(z)
    for start in range(0, 150, part):
        out, state = symmetric_linear_attention(z[:, :, start : start + part], state=state)
        torch.testing.assert_close(out, whole[:, :, start : start + part], **ROUNDING)
    torch.testing.assert_close(state, last, **ROUNDING)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_counts_as_nothing(causal: bool) -> None:
    z, valid = tokens(80), torch.ones(2, 80, dtype=torch.bool)
    valid[0, :70] = False
    out, state = symmetric_linear_attention(z, causal=causal, valid=valid)
    alone, alone_state = symmetric_linear_attention(z[:1, :, 70:], causal=causal)
    torch.testing.assert_close(out[:1, :, 70:], alone, **ROUNDING)
    torch.testing.assert_close(state[:1], alone_state, **ROUNDING)
    assert out.isfinite().all()


def test_no_bit_depends_on_later_tokens() -> None:
    z = tokens(130, dtype=torch.float32)
    before, _ = symmetric_linear_attention(z)
    for cut in (20, 64, 100):
        for factor in (-1.0, 1e30):
            after, _ = symmetric_linear_attention(torch.cat((z[:, :, :cut], factor * z[:, :, cut:]), dim=2))
            assert torch.equal(after[:, :, :cut], before[:, :, :cut])
            assert not torch.equal(after[:, :, cut:], before[:, :, cut:])
    leaf = z.clone().requires_grad_()
    (grad,) = torch.autograd.grad(symmetric_linear_attention(leaf)[0][:, :, :70].sum(), leaf)
    assert (grad[:, :, 70:] == 0).all() and (grad[:, :, :70] != 0).all()


def test_float32_over_4096_tokens_and_bfloat16() -> None:
    z = tokens(4096, b=1, h=1)
    truth = symmetric_linear_attention(z)[0]
    assert relative(symmetric_linear_attention(z.float())[0], truth) < 1e-6  # float32 sums of positive terms, 64 chunks
    out, state = symmetric_linear_attention(z.bfloat16())
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert relative(out, truth) < 1e-2  # z rounded to 2^-8, then the result


def test_refusals() -> None:
    z = tokens(4)
    for call, words in (
        (lambda: symmetric_linear_attention(z[0]), "expected"),
        (lambda: symmetric_linear_attention(z.half()), "float32"),
        (lambda: symmetric_linear_attention(z, valid=torch.ones(2, 3, dtype=torch.bool)), "expected"),
        (lambda: symmetric_linear_attention(z, state=torch.zeros(2, 3, 4, 4)), "state"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
