"""AFT's Triton kernels in the interpreter: the suite's cases, and what scans in segments with running maxima could get wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.aft_read import aft_read
from kernels.check import results
from tests.kernels.channel_reads import OPS, inputs
from tests.kernels.oracle import relative


def drawn(tokens: int) -> dict[str, Any]:
    prior, rest = inputs(OPS["aft"], tokens, batch=1, heads=1, dtype=torch.float32)
    return {**prior, **rest}


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 37])
def test_equals_the_reference_at_every_edge(tokens: int) -> None:
    x = drawn(tokens)
    wide: dict[str, Any] = {name: t.double() for name, t in x.items()}
    truth = results(lambda given: aft_read(**given)[:1], wide, torch.float64, "cpu")
    for name, got in results(lambda given: aft_read(**given, implementation="triton")[:1], x, torch.float32, "cpu").items():
        assert float((got - truth[name]).norm()) < 3e-6 * max(1.0, float(truth[name].norm())), name  # rounding; one token's dbeta is 0


def test_several_blocks_of_channels() -> None:
    prior, rest = inputs(OPS["aft"], 9, batch=1, heads=2, channels=5)
    wide: dict[str, Any] = {**prior, **rest}
    narrow: dict[str, Any] = {name: t.float() for name, t in wide.items()}
    truth = results(lambda given: aft_read(**given)[:1], wide, torch.float64, "cpu")
    for name, got in results(lambda given: aft_read(**given, implementation="triton")[:1], narrow, torch.float32, "cpu").items():
        assert relative(got, truth[name]) < 3e-6, name


def test_the_state_is_the_references_and_goes_on() -> None:
    x = drawn(26)
    beta = x.pop("beta")
    for mean_alone in (False, True):
        given = {name: t for name, t in x.items() if name != "lam"} if mean_alone else {**x, "beta": beta}
        whole, last = aft_read(**given, implementation="reference")
        state, made = None, []
        for part in (slice(0, 12), slice(12, 13), slice(13, 26)):
            now = {name: t[:, :, part] if t.dim() == 4 else t for name, t in given.items()}
            o, state = aft_read(**now, state=state, implementation="triton")
            made.append(o)
        assert state is not None and last is not None and not state.requires_grad
        torch.testing.assert_close(torch.cat(made, 2), whole, rtol=0, atol=3e-6)  # sums in another order
        torch.testing.assert_close(state, last, rtol=1e-6, atol=3e-6)


def test_gradients_beside_a_state() -> None:
    x = drawn(22)
    _, state = aft_read(**{name: t[:, :, :12] if t.dim() == 4 else t for name, t in x.items()})
    later = {name: t[:, :, 12:].contiguous() if t.dim() == 4 else t for name, t in x.items()}
    truth = results(lambda given: aft_read(**given, state=state, implementation="reference")[:1], later, torch.float32, "cpu")
    for name, got in results(
        lambda given: aft_read(**given, state=state, implementation="triton")[:1], later, torch.float32, "cpu"
    ).items():
        assert relative(got, truth[name]) < 3e-6, name


def test_a_state_of_padding_alone_stands_for_nothing() -> None:
    x = drawn(5)
    nobody = torch.zeros(1, 5, dtype=torch.bool)
    _, state = aft_read(**x, valid=nobody, implementation="triton")
    assert state is not None and (state == 0).all()
    first, second = (aft_read(**x, state=s, implementation="triton") for s in (None, state))
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("cut", [1, 8, 17])
def test_outputs_do_not_move_by_a_bit_when_later_tokens_change(cut: int) -> None:
    x = drawn(19)
    whole = aft_read(**x, implementation="triton")[0]
    for factor in (3.0, 1e4):
        later: dict[str, Any] = {
            name: torch.cat((t[:, :, :cut], factor * t[:, :, cut:]), 2) if t.dim() == 4 else t for name, t in x.items()
        }
        after = aft_read(**later, implementation="triton")[0]
        assert torch.equal(after[:, :, :cut], whole[:, :, :cut])
        assert not torch.equal(after[:, :, cut:], whole[:, :, cut:])


def test_gradients_of_later_tokens_are_exactly_zero() -> None:
    x = {name: t.requires_grad_() for name, t in drawn(20).items()}
    o = aft_read(**x, implementation="triton")[0]
    for name, g in zip(x, torch.autograd.grad(o[:, :, :9].sum(), list(x.values())), strict=True):
        if g.dim() == 4:
            assert (g[:, :, :9] != 0).any() and (g[:, :, 9:] == 0).all(), name


def test_slices_of_a_packed_projection() -> None:
    """[s, b, heads, everything] permuted, as the layer has them."""
    packed = torch.randn(10, 1, 2, 4 * 3, generator=torch.Generator().manual_seed(1))
    k, v, lam, gate = packed.permute(1, 2, 0, 3).split(3, dim=-1)
    beta = torch.ones(2, 3)
    got = aft_read(k, v, beta, lam, gate, implementation="triton")[0]
    plain = aft_read(k.contiguous(), v.contiguous(), beta, lam.contiguous(), gate.contiguous(), implementation="triton")[0]
    assert torch.equal(got, plain)
    assert got.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"k": torch.zeros(1, 1, 4, 4)}, "the free energy has logits of its own"),
        ({"causal": False}, "all tokens read all"),
        ({name: torch.zeros(1, 1, 4, 2, dtype=torch.float64) for name in "kv"}, "float64"),
    ],
)
def test_what_the_kernels_leave_to_the_reference(changed: dict[str, Any], reason: str) -> None:
    given = {"k": torch.zeros(1, 1, 4, 2), "v": torch.zeros(1, 1, 4, 2), **changed}
    with pytest.raises(ValueError, match=f"aft_read: implementation 'triton' cannot run: {reason}; use auto"):
        aft_read(**given, implementation="triton")
    aft_read(**given)
