from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels.time_decay_scan as reference
from kernels.time_decay_scan import time_decay_scan
from tests.kernels.oracle import load, relative


def loop(a: Tensor, x: Tensor, initial: Tensor | None = None) -> Tensor:
    state = torch.zeros_like(x[0]) if initial is None else initial
    states = []
    for a_t, x_t in zip(a, x, strict=True):
        state = a_t.exp() * state + x_t
        states.append(state)
    return torch.stack(states)


def inputs(steps: int, *rest: int, slowness: float = 0.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """a (decays of about exp(-slowness) a step), x, initial."""
    rng = torch.Generator().manual_seed(steps)
    a, x, initial = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((steps, *rest), (steps, *rest), rest))
    return -torch.nn.functional.softplus(a - slowness).to(dtype), x.to(dtype), initial.to(dtype)


def with_gradients(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    states = function(*leaves)
    w = torch.randn(states.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [states.detach(), *torch.autograd.grad(states, leaves, w.to(states.dtype))]


def test_fixture() -> None:
    stored = load("time_decay_scan")
    a, x = stored["in/a"].requires_grad_(), stored["in/x"].requires_grad_()
    states = time_decay_scan(a, x)
    da, dx = torch.autograd.grad((states * stored["w"]).sum(), (a, x))
    for got, key in ((states, "out/0"), (da, "grad/a"), (dx, "grad/x")):
        torch.testing.assert_close(got, stored[key], rtol=1e-9, atol=1e-9)  # float64 on both sides; the fixtures' own tolerance


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8, 31, 257])
def test_equals_the_loop_with_all_gradients(steps: int) -> None:
    tensors = inputs(steps, 2, 3, slowness=3.0)
    for got, expected in zip(with_gradients(time_decay_scan, *tensors), with_gradients(loop, *tensors), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)  # float64 rounding over a memory of some tens of steps


@pytest.mark.parametrize("steps", [1, 2, 7, 8])
def test_gradcheck(steps: int) -> None:
    a, x, initial = (t.requires_grad_() for t in inputs(steps, 2))
    assert torch.autograd.gradcheck(time_decay_scan, (a, x, initial))
    assert torch.autograd.gradcheck(time_decay_scan, (a, x))
    assert torch.autograd.gradcheck(time_decay_scan, (a.detach(), x))


@pytest.mark.parametrize("slowness", [-3.0, 0.0, 4.0, 8.0])
def test_float32_to_4096_steps(slowness: float) -> None:
    a, x, _ = (t.float() for t in inputs(4096, 8, slowness=slowness))
    truth = with_gradients(loop, a.double(), x.double())
    for got, expected in zip(with_gradients(time_decay_scan, a, x), truth, strict=True):
        # the stated bound: 12 rounds of pairing at eps 6e-8, random in sign; a loop of 4096 steps reaches 3e-6
        assert relative(got, expected) < 1.6e-7


def test_infinite_decay_resets_without_nan() -> None:
    a, x, initial = inputs(37, 3)
    a[0] = a[11] = a[20:24] = -torch.inf
    states, da, dx, d_initial = with_gradients(time_decay_scan, a, x, initial)
    torch.testing.assert_close(states, loop(a, x), rtol=1e-12, atol=1e-12)  # float64 rounding; initial is forgotten at step 0
    torch.testing.assert_close(states[11:20], time_decay_scan(a[11:20], x[11:20]), rtol=1e-12, atol=1e-12)
    assert da.isfinite().all() and dx.isfinite().all()
    assert (d_initial == 0).all() and (da[a == -torch.inf] == 0).all()


def test_strong_decay_over_a_long_window_does_not_overflow() -> None:
    a, x = torch.full((2000, 2), -50.0), torch.full((2000, 2), 1e30)
    for result in with_gradients(time_decay_scan, a, x):
        assert result.isfinite().all()
    assert torch.equal(time_decay_scan(torch.zeros(2000, 2), torch.ones(2000, 2))[-1], torch.full((2,), 2000.0))


def test_states_do_not_move_by_a_bit_when_later_steps_change() -> None:
    a, x, initial = inputs(101, 5, dtype=torch.float32)
    before = time_decay_scan(a, x, initial)
    for cut in (1, 50, 64, 100):
        for factor in (3.0, 1e30):
            later_a, later_x = torch.cat((a[:cut], factor * a[cut:])), torch.cat((x[:cut], -factor * x[cut:]))
            after = time_decay_scan(later_a, later_x, initial)
            assert torch.equal(after[:cut], before[:cut])
            assert not torch.equal(after[cut:], before[cut:])


def test_gradients_of_later_steps_are_exactly_zero() -> None:
    a, x, initial = (t.requires_grad_() for t in inputs(50, 3))
    da, dx = torch.autograd.grad(time_decay_scan(a, x, initial)[:21].sum(), (a, x))
    assert (da[21:] == 0).all() and (dx[21:] == 0).all()
    assert (da[:21] != 0).all() and (dx[:21] != 0).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("part", [1, 10])
def test_parts_with_a_carried_state_equal_the_whole(part: int, dtype: torch.dtype, tolerance: float) -> None:
    a, x, state = inputs(50, 3, dtype=dtype)
    whole = time_decay_scan(a, x, state)
    for start in range(0, 50, part):
        states = time_decay_scan(a[start : start + part], x[start : start + part], state)
        # joins in another order: some roundings of states of size 3
        torch.testing.assert_close(states, whole[start : start + part], rtol=tolerance, atol=3 * tolerance)
        state = states[-1]


def test_bfloat16_is_rounded_once() -> None:
    a, x, initial = (t.bfloat16() for t in inputs(300, 4, slowness=4.0))
    states = time_decay_scan(a, x, initial)
    assert states.dtype == torch.bfloat16
    exact = loop(a.double(), x.double(), initial.double())
    # 2^-8 is bfloat16's unit roundoff; 1e-6 for the float32 inside
    assert ((states.double() - exact).abs() <= (2**-8 + 1e-6) * exact.abs() + 1e-6).all()


def test_rounds_grow_with_the_logarithm_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    scan = reference._scan

    def counted(a: Tensor, x: Tensor) -> Tensor:
        calls.append(len(x))
        return scan(a, x)

    monkeypatch.setattr(reference, "_scan", counted)
    time_decay_scan(torch.zeros(4096, 1), torch.ones(4096, 1))
    assert calls == [4096 >> i for i in range(13)]


@pytest.mark.parametrize(
    ("a", "x", "initial", "message"),
    [
        (torch.zeros(3, 2), torch.zeros(4, 2), None, r"a has shape \[3, 2\] and x \[4, 2\]"),
        (torch.zeros(0, 2), torch.zeros(0, 2), None, "not empty"),
        (torch.zeros(()), torch.zeros(()), None, "a has shape"),
        (torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3), r"initial has shape \[3\], expected \[2\]"),
        (torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 2), None, "a is torch.float64"),
        (torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(2, device="meta"), "initial is torch.float32 on meta"),
        (torch.zeros(3, 2).half(), torch.zeros(3, 2).half(), None, "use float64, float32 or bfloat16"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(a: Tensor, x: Tensor, initial: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        time_decay_scan(a, x, initial)
    assert str(error.value).startswith("time_decay_scan: ") and "\n" not in str(error.value)
