"""What AFT's and the state-space model's read have in common: the definition, the read's laws, streaming, padding, causality, memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.channel_reads import OPS, Op, Tensors, definition, inputs, normal
from tests.kernels.oracle import relative

every_op = pytest.mark.parametrize("name", OPS)
every_distribution = pytest.mark.parametrize("name", ["aft", "ssm"])


def both(op: Op, prior: Tensors, v: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return op.read(prior, v, **options)[0], op.read(prior, v, beta, **options)[0]


def leaves(prior: Tensors, rest: Tensors) -> list[Tensor]:
    return [t.requires_grad_() for t in (*prior.values(), *rest.values())]


@every_op
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 3, 33, 67])
def test_equals_the_definition_with_all_gradients(name: str, tokens: int, causal: bool) -> None:
    op = OPS[name]
    prior, rest = inputs(op, tokens)
    at = leaves(prior, rest)
    w = normal(torch.Generator().manual_seed(1), *rest["v"].shape)
    o = op.read(prior, *rest.values(), causal=causal)[0]
    truth = definition(op, prior, rest, causal)[2]
    # float64 rounding of sums of 67 terms
    torch.testing.assert_close(o, truth, rtol=1e-11, atol=1e-11)
    for got, expected in zip(torch.autograd.grad(o, at, w), torch.autograd.grad(truth, at, w), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@every_op
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens", [1, 4])
def test_gradcheck(name: str, causal: bool, tokens: int) -> None:
    op = OPS[name]
    prior, rest = inputs(op, tokens, batch=1, heads=1, channels=2)
    at = leaves(prior, rest)
    assert torch.autograd.gradcheck(
        lambda *x: op.read(dict(zip(prior, x, strict=False)), *x[len(prior) :], causal=causal)[0], at, eps=1e-6, atol=1e-7
    )


@every_distribution
@pytest.mark.parametrize("causal", [True, False])
def test_the_weights_sum_to_one(name: str, causal: bool) -> None:
    op = OPS[name]
    prior, rest = inputs(op, 70)
    ones = torch.ones_like(rest["v"])
    torch.testing.assert_close(op.read(prior, ones, causal=causal)[0], ones, rtol=1e-13, atol=0)  # float64 rounding


@every_distribution
def test_free_energy_is_between_the_mean_and_the_past_maximum(name: str) -> None:
    op = OPS[name]
    prior, rest = inputs(op, 70)
    v = rest["v"]
    last = mu = op.read(prior, v)[0]
    for beta in (0.01, 0.5, 2.0, 20.0, 500.0):
        free_energy = op.read(prior, v, torch.full_like(rest["beta"], beta))[0]
        assert (free_energy >= last - 1e-11).all()  # non-decreasing in beta; rounding / 0.01
        last = free_energy
    assert (last <= v.cummax(2).values + 1e-13).all()
    assert ((last - mu)[:, :, 5:] > 0.01).any()


@every_distribution
def test_small_beta_gives_the_mean_and_values_shift_through(name: str) -> None:
    op = OPS[name]
    prior, rest = inputs(op, 40)
    v, beta = rest["v"], rest["beta"]
    mu = op.read(prior, v)[0]
    # F - mu is beta / 2 times a variance of about 1
    torch.testing.assert_close(op.read(prior, v, torch.full_like(beta, 1e-5))[0], mu, rtol=0, atol=1e-4)
    torch.testing.assert_close(op.read(prior, v + 37.5, beta)[0], op.read(prior, v, beta)[0] + 37.5, rtol=0, atol=1e-12)


@every_op
def test_what_is_left_out_is_neutral(name: str) -> None:
    op = OPS[name]
    prior, rest = inputs(op, 20)
    v, beta, lam, gate = rest.values()
    mu, free_energy = both(op, prior, v, beta)
    one, zero = torch.ones_like(v), torch.zeros_like(v)
    assert torch.equal(op.read(prior, v, beta, zero, one)[0], mu)
    assert torch.equal(op.read(prior, v, None, None, gate)[0], gate * mu)
    assert torch.equal(op.read(prior, v, beta, None, gate)[0], gate * free_energy)
    torch.testing.assert_close(op.read(prior, v, beta, lam)[0], (1 - lam) * mu + lam * free_energy, rtol=1e-14, atol=1e-14)  # rounding


@every_op
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["spread", "rising", "falling", "spikes"])
def test_values_of_any_range(name: str, kind: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    prior, rest = inputs(op, 90, dtype=dtype)
    ramp = torch.linspace(-100, 100, 90, dtype=dtype)[:, None].expand_as(rest["v"])
    rest["v"] = {
        "spread": 60 * rest["v"],
        "rising": ramp,
        "falling": -ramp,
        "spikes": torch.where(rest["v"] > 1.5, 100.0, -100.0).to(dtype),
    }[kind]
    at = leaves(prior, rest)
    o = op.read(prior, *rest.values())[0]
    w = torch.ones_like(o)
    wide = [{key: t.detach().double() for key, t in part.items()} for part in (prior, rest)]
    wide_at = leaves(*wide)
    truth = definition(op, wide[0], wide[1])[2]
    # eps of the type times beta v of 200
    assert relative(o, truth) < (1e-12 if dtype == torch.float64 else 1e-5)
    for got, expected in zip(torch.autograd.grad(o, at, w), torch.autograd.grad(truth, wide_at, w.double()), strict=True):
        assert got.isfinite().all()
        # weights are exponentials of 200 rounded, 200 eps, and their sums cancel
        assert relative(got, expected) < (1e-10 if dtype == torch.float64 else 1e-3)


@every_op
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_with_a_carried_state_equal_the_whole(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    prior, rest = inputs(op, 300, batch=1, dtype=dtype)
    tokens = {**{key: prior[key] for key in op.per_token}, **{key: rest[key] for key in ("v", "lam", "gate")}}
    whole = op.read(prior, *rest.values())[0]
    for sizes in ([300], [100, 150] + 50 * [1], 300 * [1]):
        state, made, start = None, [], 0
        for size in sizes:
            now = {key: t[:, :, start : start + size] for key, t in tokens.items()}
            o, state = op.read(
                {key: now.get(key, prior[key]) for key in prior}, now["v"], rest["beta"], now["lam"], now["gate"], state=state
            )
            assert state is not None and state.dtype == dtype
            made.append(o)
            start += size
        # other joins of the same sums: some roundings
        torch.testing.assert_close(torch.cat(made, 2), whole, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


@every_op
@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_read_by_nobody(name: str, causal: bool) -> None:
    op = OPS[name]
    prior, rest = inputs(op, 75)
    valid = torch.ones(2, 75, dtype=torch.bool)
    valid[0, :70] = False
    valid[1, 3:6] = False
    rest["v"] = rest["v"].masked_fill(~valid[:, None, :, None], 1e6)
    at = leaves(prior, rest)
    o = op.read(prior, *rest.values(), valid=valid, causal=causal)[0]
    assert o.isfinite().all()
    for row in range(2):
        kept = valid[row]
        alone = [{key: t[row : row + 1][:, :, kept] if t.dim() == 4 else t for key, t in part.items()} for part in (prior, rest)]
        expected = op.read(alone[0], *alone[1].values(), causal=causal)[0]
        torch.testing.assert_close(o[row : row + 1][:, :, kept], expected, rtol=1e-12, atol=1e-12)  # float64 rounding
    dv = torch.autograd.grad((o * valid[:, None, :, None]).sum(), at)
    assert all(g.isfinite().all() for g in dv)
    assert (dv[len(prior)].masked_fill(valid[:, None, :, None], 0.0) == 0).all()


@every_op
def test_a_state_of_padding_alone_stands_for_nothing(name: str) -> None:
    op = OPS[name]
    prior, rest = inputs(op, 5, batch=1)
    valid = torch.zeros(1, 5, dtype=torch.bool)
    _, state = op.read(prior, *rest.values(), valid=valid)
    assert state is not None and state.isfinite().all()
    first, second = (op.read(prior, *rest.values(), state=s) for s in (None, state))
    assert torch.equal(first[0], second[0])
    assert first[1] is not None and second[1] is not None and torch.equal(first[1], second[1])
    _, idle = op.read(prior, *rest.values(), valid=valid, state=first[1])
    assert idle is not None
    torch.testing.assert_close(idle, first[1], rtol=1e-14, atol=1e-14)  # rounding


@every_op
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_do_not_move_by_a_bit_when_later_tokens_change(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    prior, rest = inputs(op, 101, dtype=dtype)
    whole = op.read(prior, *rest.values())[0]
    for cut in (1, 50, 64, 100):
        for factor in (3.0, 1e4):
            later_prior, later = (
                {key: torch.cat((t[:, :, :cut], factor * t[:, :, cut:]), 2) if t.dim() == 4 else t for key, t in part.items()}
                for part in (prior, rest)
            )
            after = op.read(later_prior, *later.values())[0]
            assert torch.equal(after[:, :, :cut], whole[:, :, :cut])
            assert not torch.equal(after[:, :, cut:], whole[:, :, cut:])


@every_op
def test_gradients_of_later_tokens_are_exactly_zero(name: str) -> None:
    op = OPS[name]
    prior, rest = inputs(op, 70)
    at = leaves(prior, rest)
    for g in torch.autograd.grad(op.read(prior, *rest.values())[0][:, :, :31].sum(), at):
        if g.dim() == 4:
            assert (g[:, :, :31] != 0).any()
            assert (g[:, :, 31:] == 0).all()


def alive() -> dict[int, int]:
    """Bytes of each storage that a Python object holds, by address; a checkpointed part's inputs are among them."""
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) is Tensor]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def kept_bytes(op: Op, tokens: int) -> tuple[int, list[Tensor]]:
    """Bytes that one read leaves behind (its result and what its graph keeps), and the read's result and gradients."""
    prior, rest = inputs(op, tokens, batch=1, heads=1, channels=4, dtype=torch.float32)
    at = leaves(prior, rest)
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    before = alive()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        o = op.read(prior, *rest.values())[0]
    kept |= alive()
    return sum(size for address, size in kept.items() if address not in before), [o, *torch.autograd.grad(o.sum(), at)]


@every_op
def test_8192_tokens_in_memory_linear_in_the_length(name: str) -> None:
    short, _ = kept_bytes(OPS[name], 2048)
    long, made = kept_bytes(OPS[name], 8192)
    assert all(t.isfinite().all() for t in made)
    assert long < 4.05 * short
    # Numbers of float32 for each one of v [8192, 4]; a chunk's states kept whole would be 6 or 9 more.
    assert long < {"aft": 20, "ssm": 12, "ssm_not_normalised": 9}[name] * 8192 * 4 * 4


@every_op
def test_bfloat16_is_computed_in_float32(name: str) -> None:
    op = OPS[name]
    prior, rest = inputs(op, 130, dtype=torch.bfloat16)
    o, state = op.read(prior, *rest.values())
    assert o.dtype == torch.bfloat16 and state is not None and state.dtype == torch.float32
    wide = [{key: t.double() for key, t in part.items()} for part in (prior, rest)]
    exact = definition(op, wide[0], wide[1])[2]
    assert relative(o, exact) < 2**-8  # bfloat16's unit roundoff, of the result alone


@every_op
def test_bad_arguments_are_refused_in_one_line(name: str) -> None:
    op = OPS[name]
    prior, rest = inputs(op, 4)
    v, beta, lam, _ = rest.values()
    state = op.read(prior, v)[1]
    for arguments, options, message in (
        ((v[:, :, :0],), {}, "none of them 0"),
        ((v, beta[:1]), {}, r"beta has shape \[1, 3\], expected \[2, 3\]"),
        ((v, None, lam), {}, "lam mixes mu"),
        ((v,), {"valid": torch.ones(2, 3, dtype=torch.bool)}, "valid has shape"),
        ((v, beta), {"state": state}, "state has shape"),
        ((v,), {"state": state, "causal": False}, "causal=True"),
        ((v[:1],), {}, "beside v|none of them"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            op.read(prior, *arguments, **options)
        assert "\n" not in str(error.value)
    half = {key: t.half() for key, t in prior.items()}
    with pytest.raises(ValueError, match="use float64, float32 or bfloat16"):
        op.read(half, v.half())
