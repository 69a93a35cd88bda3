"""The fused Triton attention on [v | U], in Triton's interpreter, against its definition in float64: outputs and every gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.check import Inputs, Suite, check
from kernels.fem_attention.triton.attention import attend, attend_read
from kernels.free_energy.streams import SHIFT_BELOW, ValueStream, value_centre_and_range

Case = Callable[[Mapping[str, int]], Inputs]
DTYPES = [torch.float32, torch.bfloat16]


def allowed(x: Inputs) -> Tensor:
    """[b, 1, tq, tk] or [1, 1, tq, tk] bool, from causal, keys_valid and bounds."""
    tq, tk = x["q"].shape[2], x["k"].shape[2]
    position, key = torch.arange(tk - tq, tk)[:, None], torch.arange(tk)
    read = (key <= position) if x["causal"] else torch.ones(tq, tk, dtype=torch.bool)
    if x["first"] is not None:
        read = read & (key >= x["first"][-tq:, None]) & (key < x["last"][-tq:, None])
    read = read[None, None]
    return read if x["keys_valid"] is None else (read & x["keys_valid"][:, None, None]) | (position == key)


def prior(x: Inputs) -> tuple[Tensor, Tensor]:
    """(log p, v) of every query head."""
    group = x["q"].shape[1] // x["k"].shape[1]
    k, v = (x[name].repeat_interleave(group, 1) for name in ("k", "v"))
    return (x["q"] @ k.mT * x["scale"]).masked_fill(~allowed(x), -math.inf).log_softmax(-1), v


def attention(x: Inputs) -> tuple[Tensor]:
    log_p, v = prior(x)
    return (log_p.exp() @ v,)


def free_energy_read(x: Inputs) -> tuple[Tensor]:
    log_p, v = prior(x)
    beta = x["beta"].repeat_interleave(v.shape[1] // x["beta"].shape[0], 0)[:, None]
    mu = log_p.exp() @ v
    free_energy = (log_p[..., None] + (beta * v)[:, :, None]).logsumexp(3) / beta
    o = free_energy if x["lam"] is None else mu + x["lam"] * (free_energy - mu)
    return (o if x["gate"] is None else x["gate"] * o,)


def how(x: Inputs) -> dict[str, Any]:
    bounds = None if x["first"] is None else (x["first"], x["last"])
    return {"causal": x["causal"], "scale": x["scale"], "keys_valid": x["keys_valid"], "bounds": bounds}


def call_attend(x: Inputs, implementation: str) -> tuple[Tensor]:
    return (attend(x["q"], x["k"], x["v"], **how(x)),)


def call_read(x: Inputs, implementation: str) -> tuple[Tensor]:
    v, beta = x["v"].float(), x["beta"].float()
    centre, spread = value_centre_and_range(v, beta)
    shifted = spread < SHIFT_BELOW
    stream = ValueStream.apply(v, beta[:, None].expand_as(centre), centre, shifted)
    values = torch.cat((x["v"], stream.to(x["v"].dtype)), dim=-1)
    return (attend_read(x["q"], x["k"], values, beta, centre, shifted, x["lam"], x["gate"], **how(x)),)


def case(
    *,
    tokens: int | None = None,
    queries: int | None = None,
    batch: int = 1,
    heads: int = 1,
    group: int = 1,
    dk: int = 24,
    dv: int = 12,
    beta: float | None = 1.95,
    value_range: float | None = None,
    ramp: bool = False,
    equal: bool = False,
    sharp: float = 1.0,
    causal: bool = True,
    lam: bool = True,
    gate: bool = True,
    padding: bool = False,
    documents: tuple[int, ...] = (),
) -> Case:
    """A case: value_range is beta * (max v - min v). Without beta, v alone is read, 2 dv channels wide."""

    def made(size: Mapping[str, int]) -> Inputs:
        rng = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        tk = tokens or size.get("tokens", 37)
        tq = queries or tk
        width = 2 * dv if beta is None else dv
        v = normal(batch, heads // group, tk, width)
        if value_range is not None and beta is not None:
            v = (torch.rand(v.shape, generator=rng, dtype=torch.float64) - 0.5) * value_range / beta
            v = torch.linspace(-0.5, 0.5, tk, dtype=torch.float64)[:, None].expand_as(v) * value_range / beta if ramp else v
        v = torch.full_like(v, 0.75) if equal else v
        ends = torch.tensor([*documents, tk])
        index = torch.bucketize(torch.arange(tk), ends, right=True)
        starts = torch.tensor([0, *documents])
        x: Inputs = {
            "q": normal(batch, heads, tq, dk) * sharp,
            "k": normal(batch, heads // group, tk, dk),
            "v": v,
            "causal": causal,
            "scale": dk**-0.5,
            "keys_valid": torch.rand(batch, tk, generator=rng) > 0.4 if padding else None,
            "first": starts[index].int() if documents else None,
            "last": ends[index].int() if documents else None,
        }
        if beta is not None:
            x["beta"] = beta * (1 + 0.02 * torch.rand(heads // group, dv, generator=rng, dtype=torch.float64))
            x["lam"] = torch.sigmoid(normal(batch, heads, tq, dv)) if lam else None
            x["gate"] = torch.nn.functional.softplus(normal(batch, heads, tq, dv)) if gate else None
        return x

    return made


SIZE = {"tokens": 37}
ATTEND = Suite(
    "attend",
    {
        "causal": case(beta=None),
        "full": case(beta=None, causal=False),
        "an odd number of channels, sharp": case(beta=None, dk=33, dv=40, sharp=8),
        "four query heads a key head": case(beta=None, heads=4, group=4, causal=False),
        "the last queries": case(beta=None, queries=19, heads=4, group=2, dk=16, dv=9),
        "the last queries, full, padding": case(beta=None, queries=19, causal=False, padding=True, batch=2),
        "padding": case(beta=None, padding=True, batch=2),
        "documents": case(beta=None, documents=(1, 17, 30)),
        "documents, full": case(beta=None, documents=(5, 6, 34), causal=False, heads=4, group=2),
    },
    attention,
    call_attend,
    SIZE,
    SIZE,
    {},
)
READ = Suite(
    "attend_read",
    {
        "kappa 0": case(value_range=9),
        "kappa 1": case(value_range=4, heads=2, batch=2),
        "either": case(),
        "no lam": case(lam=False),
        "no gate": case(gate=False, causal=False),
        "neither, as wide as keys": case(lam=False, gate=False, dv=24),
        "range 79, beta 1.95": case(value_range=77),
        "ramp over range 79": case(value_range=77, ramp=True),
        "range 79, sharp": case(value_range=77, sharp=8),
        "beta 0.02": case(beta=0.02),
        "beta 40": case(beta=40.0, value_range=60),
        "sharp": case(sharp=8),
        "a prior that underflows": case(value_range=20, sharp=40),
        "four query heads a key head": case(heads=4, group=4),
        "the last queries, full": case(queries=19, heads=4, group=2, causal=False),
        "padding": case(padding=True, batch=2, heads=2),
        "documents": case(documents=(1, 17, 30)),
        "wide channels": case(dk=40, dv=72),
    },
    free_energy_read,
    call_read,
    SIZE,
    SIZE,
    {},
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("suite", "name"), [pytest.param(s, name, id=f"{s.op}, {name}") for s in (ATTEND, READ) for name in s.cases])
def test_against_float64(suite: Suite, name: str, dtype: torch.dtype) -> None:
    assert [found for found in check(suite, name, "triton", dtype) if not found.good] == []


def leaves(x: Inputs, dtype: torch.dtype = torch.float32) -> Inputs:
    """x with its floats in dtype, differentiated."""
    return {name: t.to(dtype).requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in x.items()}


def gradients(o: Tensor, x: Inputs) -> dict[str, Tensor]:
    weights = torch.cos(torch.arange(o.numel())).view(o.shape).to(o)
    names = [name for name, t in x.items() if isinstance(t, Tensor) and t.requires_grad]
    return dict(zip(names, torch.autograd.grad(o, [x[name] for name in names], weights), strict=True))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32, 33])
def test_lengths_around_a_block(tokens: int) -> None:
    for causal in (True, False):
        x = case(beta=None, tokens=tokens, causal=causal)({})
        got, truth = leaves(x), leaves(x, torch.float64)
        o, expected = call_attend(got, "triton")[0], attention(truth)[0]
        torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-6)
        found = gradients(o, got)
        for name, gradient in gradients(expected, truth).items():
            torch.testing.assert_close(found[name].double(), gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [case(tokens=1), case(beta=0.02, equal=True), case(beta=40.0, equal=True)])
def test_nothing_but_the_mean_where_values_agree(given: Case, dtype: torch.dtype) -> None:
    """F is mu and beta has no gradient: exactly so where the weights add up to one."""
    x = leaves(given({}), dtype)
    o = call_read(x, "triton")[0]
    v = x["v"][:, :, :1].expand(o.shape)
    torch.testing.assert_close(o, (x["gate"].float() * v.float()).to(dtype), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
    found = gradients(o, x)
    for name in ("q", "k", "beta", "lam"):
        assert found[name].abs().max() < 1e-4, name


@pytest.mark.parametrize("call", [call_attend, call_read])
def test_later_tokens_do_not_move_an_output_by_a_bit(call: Callable[[Inputs, str], tuple[Tensor]]) -> None:
    x = leaves(case(beta=None if call is call_attend else 1.95, tokens=40)({}), torch.bfloat16)
    before = call(x, "triton")[0].detach()
    changed = dict(x)
    for name in ("q", "k", "v", *(("lam", "gate") if "lam" in x else ())):
        changed[name] = torch.cat((x[name][:, :, :21], x[name][:, :, 21:].flip(2)), dim=2)  # the range of v stays
    after = call(changed, "triton")[0].detach()
    assert torch.equal(before[:, :, :21], after[:, :, :21])
    assert not torch.equal(before[:, :, 21:], after[:, :, 21:])


def test_strided_inputs_give_the_same_bits_and_gradients_in_their_order() -> None:
    x = leaves(case(heads=2, group=2, batch=2, tokens=20)({}))
    expected = call_read(x, "triton")[0]
    strided = dict(x)
    for name in ("q", "k", "v", "lam", "gate"):
        strided[name] = x[name].detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).requires_grad_()
    o = call_read(strided, "triton")[0]
    assert torch.equal(o, expected)
    assert o.permute(2, 0, 1, 3).is_contiguous()
    found = gradients(o, strided)
    for name, gradient in gradients(expected, x).items():
        assert torch.equal(found[name], gradient), name
    assert found["q"].permute(2, 0, 1, 3).is_contiguous()
    columns = {name: t.detach().mT.contiguous().mT if name in ("q", "k", "v", "lam", "gate") else t for name, t in x.items()}
    assert torch.equal(call_read(columns, "triton")[0], expected)
    broadcast = x | {"gate": x["gate"][:, :, :1].expand_as(x["gate"])}
    copied = x | {"gate": broadcast["gate"].contiguous()}
    assert torch.equal(call_read(broadcast, "triton")[0], call_read(copied, "triton")[0])


@pytest.mark.parametrize(("dk", "n", "scale"), [(300, 32, 0.1), (32, 600, 0.1), (32, 32, -0.1)])
def test_what_the_kernels_do_not_take(dk: int, n: int, scale: float) -> None:
    q, k, values = torch.zeros(1, 1, 4, dk), torch.zeros(1, 1, 4, dk), torch.zeros(1, 1, 4, n)
    with pytest.raises(ValueError, match=r"at most 256 and 512, and scale >= 0"):
        attend(q, k, values, causal=True, scale=scale)
