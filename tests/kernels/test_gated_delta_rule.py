"""The delta rule against a loop over tokens and against flash-linear-attention's numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus
from torch.utils.flop_counter import FlopCounterMode

import kernels.gated_delta_rule as module
from tests.kernels.oracle import load, relative

ROUNDING: Any = {"rtol": 1e-11, "atol": 1e-12}  # float64 over some tens of tokens
rule: Any = module.gated_delta_rule  # lists of tensors are unpacked into it
NAMES = ("q", "k", "v", "beta", "log_decay", "initial")


def _loop(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]) if initial is None else initial
    outputs = []
    for t in range(q.shape[2]):
        if log_decay is not None:
            state = log_decay[:, :, t, None, None].exp() * state
        error = v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, :, t], k[:, :, t], error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]) / q.shape[-1] ** 0.5)
    return torch.stack(outputs, dim=2), state


loop: Any = _loop


def inputs(
    tokens: int, dtype: torch.dtype = torch.float64, *, b: int = 2, h: int = 2, dk: int = 4, dv: int = 3, slowness: float = 1.0
) -> list[Tensor]:
    """q, k (unit), v, beta in (0, 1), log-decays of about -exp(-slowness), the first state."""
    rng = torch.Generator().manual_seed(tokens)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float64)

    q, k = (normalize(normal(b, h, tokens, dk), dim=-1) for _ in range(2))
    v, beta, log_decay = normal(b, h, tokens, dv), normal(b, h, tokens).sigmoid(), -softplus(normal(b, h, tokens) - slowness)
    return [t.to(dtype) for t in (q, k, v, beta, log_decay, normal(b, h, dk, dv))]


def with_gradients(function: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = function(*leaves, **options)
    rng = torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=rng, dtype=torch.float64).to(o.dtype)).sum() for o in outputs)
    return [*(o.detach() for o in outputs), *torch.autograd.grad(loss, leaves)]  # type: ignore[arg-type]


def test_fixture() -> None:
    stored = load("gated_delta_rule")
    leaves = [stored[f"in/{name}"].requires_grad_() for name in NAMES]
    o, state = rule(*leaves, chunk=16)
    grads = torch.autograd.grad((o * stored["w/o"]).sum() + (state * stored["w/state"]).sum(), leaves)
    expected = [stored["out/o"], stored["out/state"], *(stored[f"grad/{name}"] for name in NAMES)]
    for got, right in zip((o, state, *grads), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)  # float64 on both sides; the fixtures' own tolerance


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 37])
def test_equals_the_loop_with_all_gradients(tokens: int, chunk: int) -> None:
    for count in (4, 5, 6):  # without and with decay, and with a first state
        given = inputs(tokens)[:count]
        for got, expected in zip(with_gradients(rule, given, chunk=chunk), with_gradients(loop, given), strict=True):
            torch.testing.assert_close(got, expected, **ROUNDING)


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_gradcheck(tokens: int) -> None:
    leaves = [t.requires_grad_() for t in inputs(tokens, b=1, h=1, dk=2, dv=2)]
    assert torch.autograd.gradcheck(lambda *given: rule(*given, chunk=3), leaves)


def test_orthonormal_keys_are_remembered_and_overwritten() -> None:
    """beta = 1 and no decay: the state is a table; the last value written under a key is read back."""
    keys = torch.eye(4, dtype=torch.float64)
    written = torch.tensor([0, 1, 2, 3, 1, 2, 1])
    k, v = keys[written][None, None], torch.arange(14, dtype=torch.float64).view(1, 1, 7, 2)
    _, state = rule(k, k, v, torch.ones(1, 1, 7, dtype=torch.float64), chunk=4)
    torch.testing.assert_close(state[0, 0], v[0, 0, [0, 6, 5, 3]], **ROUNDING)


def test_without_erasing_it_is_linear_attention() -> None:
    """Keys orthogonal to each other never meet: sum of decayed writes."""
    q, _, v, beta, g, _ = inputs(4)
    k = torch.eye(4, dtype=torch.float64).expand_as(q)
    o, _ = rule(q, k, v, beta, g)
    c = g.cumsum(-1)
    weights = (q @ k.mT / 2 * (c[..., :, None] - c[..., None, :]).exp() * beta[..., None, :]).tril()
    torch.testing.assert_close(o, weights @ v, **ROUNDING)


@pytest.mark.parametrize("parts", [[1] * 20, [7, 1, 1, 11], [19, 1]])
def test_parts_with_a_carried_state_equal_the_whole(parts: list[int]) -> None:
    *tensors, state = inputs(20)
    whole, last = rule(*tensors, state, chunk=8)
    start = 0
    for size in parts:
        o, state = rule(*(t[:, :, start : start + size] for t in tensors), state, chunk=8)
        torch.testing.assert_close(o, whole[:, :, start : start + size], **ROUNDING)
        start += size
    torch.testing.assert_close(state, last, **ROUNDING)


def test_300_steps_of_float32() -> None:
    *tensors, state = inputs(300, torch.float32, slowness=4.0)
    whole, _ = rule(*tensors, state)
    for t in range(300):
        o, state = rule(*(x[:, :, t : t + 1] for x in tensors), state)
        torch.testing.assert_close(o[:, :, 0], whole[:, :, t], rtol=1e-5, atol=1e-5)  # float32's rounding in another order


@pytest.mark.parametrize("slowness", [-5.0, 0.0, 6.0])
def test_float32_over_1000_tokens(slowness: float) -> None:
    given = inputs(1000, torch.float32, b=1, h=1, slowness=slowness)
    exact = with_gradients(loop, [t.double() for t in given])
    for got, right in zip(with_gradients(rule, given), exact, strict=True):
        assert relative(got, right) < 1e-5  # float32's 6e-8 over chunks of 64 that amplify it by their solve


def test_repeated_keys_and_beta_to_two_stay_bounded() -> None:
    """The hardest triangular systems: one key all along, beta at its ends."""
    q, _, v, _, g, _ = inputs(200, torch.float32)
    k = torch.nn.functional.one_hot(torch.zeros(2, 2, 200, dtype=torch.long), 4).float()
    for beta in (1.0, 1.9, 2.0):
        given = [q, k, v, torch.full_like(g, beta)]
        assert relative(rule(*given)[0], loop(*(t.double() for t in given))[0]) < 1e-4  # 200 sign flips of one direction


def test_strong_and_infinite_decay() -> None:
    tensors = inputs(40, torch.float32)
    tensors[4][:, :, 5:30] = -1e4
    tensors[4][:, :, [7, 33]] = -torch.inf
    results = with_gradients(rule, tensors)
    assert all(t.isfinite().all() for t in results)
    torch.testing.assert_close(results[0], loop(*tensors)[0], rtol=1e-5, atol=1e-6)  # float32's rounding
    after, _ = rule(*(t[:, :, 33:] for t in tensors[:5]))
    torch.testing.assert_close(results[0][:, :, 33:], after, rtol=1e-5, atol=1e-6)  # the reset forgot all


def test_a_small_decay_behind_a_huge_one_keeps_its_digits() -> None:
    *tensors, initial = inputs(64, torch.float32)
    tensors[4][:] = -1e-3
    tensors[4][:, :, 10] = -1e6
    exact, _ = loop(*(t.double() for t in (*tensors, initial)))
    assert relative(rule(*tensors, initial)[0], exact) < 1e-6  # float32's rounding; a difference of long sums is off by 0.06


def test_no_bit_depends_on_later_tokens() -> None:
    *tensors, initial = inputs(150, torch.float32)
    before, _ = rule(*tensors, initial)
    for cut in (1, 63, 64, 100):
        for factor in (-1.0, 1e15):  # products of two stay finite
            factors = (factor, factor, factor, 0.5, abs(factor))
            changed = [torch.cat((t[:, :, :cut], f * t[:, :, cut:]), 2) for t, f in zip(tensors, factors, strict=True)]
            after, _ = rule(*changed, initial)
            assert torch.equal(after[:, :, :cut], before[:, :, :cut])
            assert not torch.equal(after[:, :, cut:], before[:, :, cut:])
    leaves = [t.requires_grad_() for t in tensors]
    for grad in torch.autograd.grad(rule(*leaves, initial)[0][:, :, :70].sum(), leaves):
        assert (grad[:, :, 70:] == 0).all() and grad[:, :, :70].abs().amax((0, 1)).ne(0).any()


def test_bfloat16_is_rounded_once() -> None:
    given = [t.bfloat16() for t in inputs(100)]
    o, state = rule(*given[:3], given[3].float(), given[4].float(), given[5])
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = loop(*(t.double() for t in given))
    assert ((o.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()  # bfloat16's unit roundoff; float32 inside


def test_flops_grow_with_the_tokens() -> None:
    counts = []
    for tokens in (1024, 2048):
        with FlopCounterMode(display=False) as counter:
            rule(*inputs(tokens, torch.float32))
        counts.append(counter.get_total_flops())
    assert counts[1] == 2 * counts[0]


def test_fla_is_given_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: its two entry points replaced by the loop, in their layout and with their names."""

    def entry(
        q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, scale: float, initial_state: Any, output_final_state: bool, g: Any = None
    ) -> Any:
        assert output_final_state and scale == 0.7
        turned = [None if t is None else t.transpose(1, 2) for t in (q * (scale * 2.0), k, v, beta, g)]
        o, state = loop(*turned, initial_state)
        return o.transpose(1, 2), state

    for name in ("fla", "fla.ops", "fla.ops.delta_rule", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla.ops.delta_rule"].chunk_delta_rule = entry  # type: ignore[attr-defined]
    sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = entry  # type: ignore[attr-defined]
    *given, initial = inputs(9, torch.float32)
    by_fla: Any = module._by_fla
    for tensors in (given, [*given[:4], None]):
        expected = rule(*tensors, initial, scale=0.7, implementation="reference")
        for got, right in zip(by_fla(*tensors, initial, 0.7), expected, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)  # float32's rounding


def test_bad_arguments_are_refused_in_one_line() -> None:
    good = dict(zip(NAMES, inputs(3, torch.float32), strict=True))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"implementation": "triton"}, "'triton' is not one of auto, fla, reference"),
        ({"implementation": "fla"}, "needs bfloat16, a GPU"),
        ({"chunk": 0}, "chunk is 0"),
        ({"q": good["q"][0]}, "must be"),
        ({"q": good["q"][:, :, :0]}, "not empty"),
        ({"q": good["q"].half()}, "use float64, float32 or bfloat16"),
        ({"k": good["k"][..., :1]}, r"k has shape \[2, 2, 3, 1\], expected \[2, 2, 3, 4\]"),
        ({"beta": good["beta"][..., :2]}, "beta has shape"),
        ({"log_decay": good["log_decay"][..., None]}, "log_decay has shape"),
        ({"initial": good["initial"].mT}, "initial has shape"),
        ({"v": good["v"].bfloat16()}, "v is torch.bfloat16"),
        ({"beta": good["beta"].double()}, "beta is torch.float64"),
        ({"initial": good["initial"].to("meta")}, "on meta"),
    ]
    for changed, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            rule(**{**good, **changed})
        assert str(error.value).startswith("gated_delta_rule: ") and "\n" not in str(error.value)
