"""The state-space read's Triton kernels in the interpreter: the suite's cases, and what chunks and carried states could get wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.check import results
from kernels.ssm_read import ssm_read
from tests.kernels.channel_reads import OPS, inputs
from tests.kernels.oracle import relative


def drawn(tokens: int) -> dict[str, Any]:
    prior, rest = inputs(OPS["ssm"], tokens, batch=1, heads=1, dtype=torch.float32)
    return {**prior, **rest}


def part_of(x: dict[str, Any], part: slice) -> dict[str, Any]:
    return {name: t[:, :, part] if t.dim() == 4 else t for name, t in x.items()}


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 17])
def test_equals_the_reference_at_every_edge(tokens: int) -> None:
    x = drawn(tokens)
    wide: dict[str, Any] = {name: t.double() for name, t in x.items()}
    truth = results(lambda given: ssm_read(**given)[:1], wide, torch.float64, "cpu")
    for name, got in results(lambda given: ssm_read(**given, implementation="triton")[:1], x, torch.float32, "cpu").items():
        assert float((got - truth[name]).norm()) < 3e-6 * max(1.0, float(truth[name].norm())), name  # rounding; one token's dbeta is 0


def test_several_blocks_of_channels() -> None:
    prior, rest = inputs(OPS["ssm"], 9, batch=1, heads=2, channels=5)
    wide: dict[str, Any] = {**prior, **rest}
    narrow: dict[str, Any] = {name: t.float() for name, t in wide.items()}
    truth = results(lambda given: ssm_read(**given)[:1], wide, torch.float64, "cpu")
    for name, got in results(lambda given: ssm_read(**given, implementation="triton")[:1], narrow, torch.float32, "cpu").items():
        assert relative(got, truth[name]) < 3e-6, name


@pytest.mark.parametrize("mean_alone", [False, True])
def test_the_state_is_the_references_and_goes_on(mean_alone: bool) -> None:
    x = {name: t for name, t in drawn(14).items() if not (mean_alone and name in ("beta", "lam"))}
    whole, last = ssm_read(**x, implementation="reference")
    state, made = None, []
    for part in (slice(0, 6), slice(6, 7), slice(7, 14)):
        o, state = ssm_read(**part_of(x, part), state=state, implementation="triton")
        made.append(o)
    assert state is not None and last is not None and not state.requires_grad
    torch.testing.assert_close(torch.cat(made, 2), whole, rtol=0, atol=3e-6)  # sums in another order
    torch.testing.assert_close(state, last, rtol=1e-5, atol=3e-6)


def test_gradients_beside_a_state() -> None:
    x = drawn(12)
    _, state = ssm_read(**part_of(x, slice(0, 6)))
    later = {name: t.contiguous() for name, t in part_of(x, slice(6, 12)).items()}
    truth = results(lambda given: ssm_read(**given, state=state, implementation="reference")[:1], later, torch.float32, "cpu")
    for name, got in results(
        lambda given: ssm_read(**given, state=state, implementation="triton")[:1], later, torch.float32, "cpu"
    ).items():
        assert relative(got, truth[name]) < 3e-6, name


def test_a_state_of_padding_alone_stands_for_nothing() -> None:
    x = drawn(5)
    _, state = ssm_read(**x, valid=torch.zeros(1, 5, dtype=torch.bool), implementation="triton")
    assert state is not None and (state == 0).all()
    first, second = (ssm_read(**x, state=s, implementation="triton") for s in (None, state))
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_outputs_do_not_move_by_a_bit_when_later_tokens_change(cut: int) -> None:
    x = drawn(11)
    whole = ssm_read(**x, implementation="triton")[0]
    for factor in (3.0, 1e4):
        later: dict[str, Any] = {
            name: torch.cat((t[:, :, :cut], factor * t[:, :, cut:]), 2) if t.dim() == 4 else t for name, t in x.items()
        }
        after = ssm_read(**later, implementation="triton")[0]
        assert torch.equal(after[:, :, :cut], whole[:, :, :cut])
        assert not torch.equal(after[:, :, cut:], whole[:, :, cut:])


def test_gradients_of_later_tokens_are_exactly_zero() -> None:
    x = {name: t.requires_grad_() for name, t in drawn(11).items()}
    o = ssm_read(**x, implementation="triton")[0]
    for name, g in zip(x, torch.autograd.grad(o[:, :, :5].sum(), list(x.values())), strict=True):
        if g.dim() == 4:
            assert (g[:, :, :5] != 0).any() and (g[:, :, 5:] == 0).all(), name


def test_slices_of_a_packed_projection() -> None:
    """[s, b, heads, everything] permuted, as the layer has them."""
    packed = torch.rand(9, 1, 2, 4 * 3 + 2 * 2, generator=torch.Generator().manual_seed(1)) + 0.1
    delta, v, lam, gate, b_in, c_out = packed.permute(1, 2, 0, 3).split([3, 3, 3, 3, 2, 2], dim=-1)
    rate, beta = torch.ones(2, 3, 2), torch.ones(2, 3)
    got = ssm_read(delta, rate, b_in, c_out, v, beta, lam, gate, implementation="triton")[0]
    expected = ssm_read(delta, rate, b_in, c_out, v, beta, lam, gate, implementation="reference")[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert got.permute(2, 0, 1, 3).is_contiguous()


def test_what_the_kernels_leave_to_the_reference() -> None:
    x = drawn(4)
    wide: dict[str, Any] = {name: t.double() for name, t in x.items()}
    for given, reason in (
        ({**x, "causal": False}, "all tokens read all"),
        ({**x, "normalise": False}, "weights that are not normalised"),
        (wide, "float64"),
    ):
        with pytest.raises(ValueError, match=f"ssm_read: implementation 'triton' cannot run: {reason}; use auto"):
            ssm_read(**given, implementation="triton")
        ssm_read(**given)
