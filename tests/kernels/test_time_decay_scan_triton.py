"""The scan's Triton kernels in the interpreter: the suite's cases, and what a scan in segments and chunks could get wrong."""

from __future__ import annotations

import pytest
import torch

from kernels.time_decay_scan import time_decay_scan
from tests.kernels.oracle import relative
from tests.kernels.test_time_decay_scan import inputs, with_gradients


def scan(*tensors: torch.Tensor) -> torch.Tensor:
    return time_decay_scan(*tensors, implementation="triton")


@pytest.mark.parametrize("steps", [1, 15, 16, 17, 65])
@pytest.mark.parametrize("channels", [1, 9])
def test_equals_the_reference_at_every_edge(steps: int, channels: int) -> None:
    tensors = inputs(steps, channels, slowness=3.0, dtype=torch.float32)
    truth = with_gradients(lambda *x: time_decay_scan(*x, implementation="reference"), *(t.double() for t in tensors))
    for got, expected in zip(with_gradients(scan, *tensors), truth, strict=True):
        assert relative(got, expected) < 1e-6  # a few roundings of float32, of one number here and there


def test_inputs_of_any_strides() -> None:
    a, x, initial = inputs(40, 3, 5, dtype=torch.float32)
    plain = with_gradients(scan, a, x, initial)
    a_turned, x_turned = a.transpose(1, 2).contiguous().transpose(1, 2), torch.stack((x, x), -1)[..., 1]
    states = scan(a_turned, x_turned, initial)
    assert not a_turned.is_contiguous() and not x_turned.is_contiguous()
    assert torch.equal(states, plain[0])
    spread = scan(a[:, :1].expand_as(x), x)
    assert torch.equal(spread, scan(a[:, :1].expand_as(x).contiguous(), x))


@pytest.mark.parametrize("cut", [1, 16, 30, 48, 69])
def test_states_do_not_move_by_a_bit_when_later_steps_change(cut: int) -> None:
    a, x, initial = inputs(70, 5, dtype=torch.float32)
    before = scan(a, x, initial)
    later_a, later_x = torch.cat((a[:cut], 3 * a[cut:])), torch.cat((x[:cut], -1e30 * x[cut:]))
    after = scan(later_a, later_x, initial)
    assert torch.equal(after[:cut], before[:cut])
    assert not torch.equal(after[cut:], before[cut:])


def test_gradients_of_later_steps_are_exactly_zero() -> None:
    a, x, initial = (t.requires_grad_() for t in inputs(50, 3, dtype=torch.float32))
    da, dx = torch.autograd.grad(scan(a, x, initial)[:21].sum(), (a, x))
    assert (da[21:] == 0).all() and (dx[21:] == 0).all()
    assert (da[:21] != 0).all() and (dx[:21] != 0).all()


def test_parts_with_a_carried_state_equal_the_whole() -> None:
    a, x, state = inputs(50, 3, dtype=torch.float32)
    whole = scan(a, x, state)
    for start in range(0, 50, 10):
        states = scan(a[start : start + 10], x[start : start + 10], state)
        torch.testing.assert_close(states, whole[start : start + 10], rtol=1e-6, atol=3e-6)  # joins in another order
        state = states[-1]


def test_a_logit_of_minus_infinity_keeps_the_state() -> None:
    logits = torch.tensor([1.0, -torch.inf, 0.5, -torch.inf]).requires_grad_()
    x = torch.tensor([2.0, 0.0, 1.0, 0.0])
    for implementation in ("triton", "reference"):
        states = time_decay_scan(logits, x, softplus=True, implementation=implementation)
        assert states[0] == states[1] and states[2] == states[3]
        (d,) = torch.autograd.grad(states.sum(), logits)
        assert d.isfinite().all() and (d[[1, 3]] == 0).all()


def test_decays_close_to_one_keep_their_digits() -> None:
    """softplus of -14 is 8e-7: taken as log(1 + e) in float32 it would be wrong by a tenth."""
    logits, x = torch.full((128, 1), -14.0), torch.zeros(128, 1)
    states = time_decay_scan(logits, x, torch.ones(1), softplus=True, implementation="triton")
    exact = torch.exp(-torch.nn.functional.softplus(torch.tensor(-14.0).double()) * 128)
    assert abs(float(states[-1, 0]) - float(exact)) < 3e-7


def test_what_cannot_run_says_why() -> None:
    a, x, _ = inputs(4, 2)
    with pytest.raises(ValueError, match="time_decay_scan: implementation 'triton' cannot run: float64; use auto"):
        time_decay_scan(a, x, implementation="triton")
    with pytest.raises(ValueError, match=r"initial is torch.bfloat16 on cpu, expected torch.float32 on cpu, x is torch.bfloat16"):
        time_decay_scan(a.bfloat16(), x.bfloat16(), x[0].bfloat16(), softplus=True)
