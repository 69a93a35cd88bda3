"""The exact read of single heads in Triton, in the interpreter: float64 truth, and the heads that are not asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.check import BFLOAT16_FACTOR, BFLOAT16_ROUNDING, FLOAT32_BOUND, poisoned_memory, relative
from kernels.fem_attention import fem_attention
from kernels.fem_attention.triton.exact import exact_backward_, exact_forward_
from tests.kernels.oracle import NAMES

Inputs = dict[str, Any]


def inputs(
    tokens: int = 37,
    *,
    queries: int | None = None,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    dk: int = 8,
    dv: int = 4,
    beta: float = 1.95,
    values: str = "uniform",
    reach: float = 200.0,
    sharpness: float = 1.0,
    seed: int = 0,
) -> Inputs:
    """float32 numbers in float64; the values span ``reach`` / beta: uniform, or a ramp over the tokens with a little noise."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    queries = tokens if queries is None else queries
    v = torch.rand(batch, kv_heads, tokens, dv, generator=rng, dtype=torch.float64) - 0.5
    if values == "ramp":
        v = torch.linspace(-0.5, 0.5, tokens, dtype=torch.float64)[:, None] + v * 0.02
    made = {
        "q": normal(batch, heads, queries, dk) * sharpness,
        "k": normal(batch, kv_heads, tokens, dk),
        "v": v * reach / beta,
        "beta": torch.full((kv_heads, dv), beta, dtype=torch.float64) * torch.linspace(0.8, 1, kv_heads * dv).view(kv_heads, dv),
        "lam": torch.sigmoid(normal(batch, heads, queries, dv)),
        "gate": torch.nn.functional.softplus(normal(batch, heads, queries, dv)),
    }
    return {name: tensor.float().double() for name, tensor in made.items()}


def allowed(x: Inputs, causal: bool, keys_valid: Tensor | None, bounds: tuple[Tensor, Tensor] | None) -> Tensor:
    tq, tk = x["q"].shape[2], x["k"].shape[2]
    position, key = torch.arange(tk - tq, tk)[:, None], torch.arange(tk)
    mask = (key <= position if causal else key >= 0).expand(tq, tk)[None, None]
    if keys_valid is not None:
        mask = (mask & keys_valid[:, None, None]) | (key == position)
    if bounds is not None:
        mask = mask & (key >= bounds[0][:, None]) & (key < bounds[1][:, None])
    return mask


def definition(x: Inputs, mask: Tensor, scale: float) -> Tensor:
    """The read as its equations say, all terms at once."""
    group = x["q"].shape[1] // x["k"].shape[1]
    k, v = (x[name].repeat_interleave(group, dim=1) for name in "kv")
    beta = x["beta"].repeat_interleave(group, dim=0)
    log_p = (x["q"] @ k.mT * scale).masked_fill(~mask, -torch.inf).log_softmax(-1)
    mu = log_p.exp() @ v
    free = (log_p[..., None] + (beta[:, None] * v)[:, :, None]).logsumexp(3) / beta[:, None]
    o = free if x.get("lam") is None else (1 - x["lam"]) * mu + x["lam"] * free
    return o if x.get("gate") is None else x["gate"] * o


def truth(
    x: Inputs, dtype: torch.dtype = torch.float64, *, causal: bool = True, keys_valid: Any = None, bounds: Any = None
) -> list[Tensor]:
    """o, then the gradients of NAMES that are there; dbeta [b, hk, dv], a batch each, as the kernels give it."""
    batch = x["q"].shape[0]
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in x.items() if t is not None}
    parts = []
    for n in range(batch):
        part = {name: t if name == "beta" else t[n : n + 1] for name, t in leaves.items()}
        mask = allowed(part, causal, None if keys_valid is None else keys_valid[n : n + 1], bounds)
        o = definition(part, mask, x["q"].shape[-1] ** -0.5)
        parts.append([o, *torch.autograd.grad(o, list(part.values()), weights(x).to(dtype)[n : n + 1])])
    names = ["o", *leaves]
    joined = [torch.stack([p[n] for p in parts]) if name == "beta" else torch.cat([p[n] for p in parts]) for n, name in enumerate(names)]
    return [t.detach() for t in joined]


def weights(x: Inputs) -> Tensor:
    shape = (*x["q"].shape[:3], x["v"].shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def kernels(
    x: Inputs, wild: Tensor, dtype: torch.dtype = torch.float32, *, causal: bool = True, keys_valid: Any = None, bounds: Any = None
) -> tuple[list[Tensor], list[Tensor]]:
    """(what the buffers held, what they hold after): o, then the gradients."""
    given = {name: None if x.get(name) is None else x[name].to(dtype) for name in NAMES}
    fixed: dict[str, Any] = {"causal": causal, "scale": x["q"].shape[-1] ** -0.5, "keys_valid": keys_valid, "bounds": bounds}
    rng = torch.Generator().manual_seed(5)
    like = {name: t for name, t in given.items() if t is not None} | {"beta": torch.empty(*wild.shape, x["v"].shape[-1])}
    before = [torch.randn(t.shape, generator=rng).to(t.dtype) for t in (weights(x).to(dtype), *like.values())]
    after = [t.clone() for t in before]
    gradients = dict(zip(like, after[1:], strict=True))
    with poisoned_memory():
        saved = exact_forward_(after[0], **given, wild=wild, **fixed)
        found = {f"d{name}": gradients.get(name) for name in NAMES}
        exact_backward_(saved, weights(x).to(dtype), **given, wild=wild, **found, **fixed)
    return before, after


def rows_of_heads(x: Inputs, wild: Tensor, results: list[Tensor]) -> list[Tensor]:
    """The rows of wild heads of each result."""
    each = wild.repeat_interleave(x["q"].shape[1] // x["k"].shape[1], dim=1)
    return [t[wild if t.shape[1] == wild.shape[1] else each] for t in results]


MIXED = torch.tensor([[True, False], [False, True]])
CASES: dict[str, Inputs] = {
    "range 200": {},
    "range 80": {"reach": 80.0},
    "range 1": {"reach": 1.0},
    "ramp 140": {"values": "ramp", "reach": 140.0},
    "ramp 500": {"values": "ramp", "reach": 500.0},
    "sharp scores, ramp 500": {"values": "ramp", "reach": 500.0, "sharpness": 8.0},
    "beta 0.02": {"beta": 0.02},
    "beta 40": {"beta": 40.0, "reach": 500.0},
    "one token": {"tokens": 1},
    "33 tokens, the last 18 asked": {"tokens": 33, "queries": 18},
    "all equal": {"reach": 0.0},
    "four heads read one": {"kv_heads": 1},
    "no head shares": {"heads": 2},
    "wide": {"tokens": 20, "dk": 48, "dv": 40, "batch": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_wild_heads_are_exact_and_the_others_untouched(case: str) -> None:
    x = inputs(**CASES[case])
    wild = MIXED[: x["q"].shape[0], : x["k"].shape[1]]
    before, after = kernels(x, wild)
    compare(x, wild, before, after, truth(x))


def compare(x: Inputs, wild: Tensor, before: list[Tensor], after: list[Tensor], expected: list[Tensor]) -> None:
    names = ["o", *(name for name in NAMES if x.get(name) is not None)]
    for name, got, right in zip(names, rows_of_heads(x, wild, after), rows_of_heads(x, wild, expected), strict=True):
        assert got.isfinite().all(), name
        # Of one token, q, k and beta have no gradient, and float64's rounding is no size to compare with.
        size = float(right.norm()) if float(right.norm()) > 1e-9 else 1.0
        assert float((got.double() - right).norm()) <= FLOAT32_BOUND * size, name
    for name, was, now in zip(names, rows_of_heads(x, ~wild, before), rows_of_heads(x, ~wild, after), strict=True):
        assert torch.equal(was, now), name


@pytest.mark.parametrize("without", [("lam",), ("gate",), ("lam", "gate")], ids="+".join)
def test_without_lam_or_gate(without: tuple[str, ...]) -> None:
    x = inputs(35, values="ramp", reach=140.0, batch=1) | dict.fromkeys(without)
    compare(x, MIXED[:1], *kernels(x, MIXED[:1]), truth(x))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("queries", [40, 7])
def test_padding_is_read_by_its_own_query_alone(causal: bool, queries: int) -> None:
    x = inputs(40, queries=queries, values="ramp", reach=140.0)
    valid = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) > 0.4
    valid[0, :20], valid[1, 37] = False, False
    given: dict[str, Any] = {"causal": causal, "keys_valid": valid}
    compare(x, MIXED, *kernels(x, MIXED, **given), truth(x, **given))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_documents_read_themselves_alone(causal: bool) -> None:
    x = inputs(45, values="ramp", reach=140.0, batch=1)
    starts = torch.tensor([0, 3, 4, 22, 45])
    lengths = starts.diff()
    bounds = (starts[:-1].repeat_interleave(lengths).int(), starts[1:].repeat_interleave(lengths).int())
    given: dict[str, Any] = {"causal": causal, "bounds": bounds}
    compare(x, MIXED[:1], *kernels(x, MIXED[:1], **given), truth(x, **given))


def test_a_prior_that_underflows_may_hold_the_greatest_value() -> None:
    x = inputs(34, batch=1, heads=2, reach=140.0)
    x["k"][:, :, 5] *= -60  # scores around -100 and under: p is 0 in float32, p exp(beta v) need not be
    x["v"][:, :, 5] = 150.0
    compare(x, MIXED[:1], *kernels(x, MIXED[:1]), truth(x))


def test_no_wild_head_changes_nothing() -> None:
    before, after = kernels(inputs(20), torch.zeros(2, 2, dtype=torch.bool))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_two_runs_are_equal_and_later_tokens_change_no_bit() -> None:
    x, wild = inputs(36, batch=1, heads=2), torch.ones(1, 2, dtype=torch.bool)
    (_, first), (_, again) = kernels(x, wild), kernels(x, wild)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for name in ("q", "k", "v"):
        x[name][:, :, 20:] *= -1e4 if name == "v" else 5.0
    o = kernels(x, wild)[1][0]
    assert torch.equal(o[:, :, :20], first[0][:, :, :20]) and not torch.equal(o[:, :, 20:], first[0][:, :, 20:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("without", [(), ("lam",)], ids=["", "F alone"])
def test_rows_that_read_a_value_that_is_not_finite_give_what_the_reference_gives(value: float, without: tuple[str, ...]) -> None:
    x = inputs(20, batch=1, heads=1, kv_heads=1) | dict.fromkeys(without)
    finite = truth(x)[0]
    x["v"][:, :, 12, 1] = value
    o = kernels(x, torch.ones(1, 1, dtype=torch.bool))[1][0].double()
    expected = fem_attention(*(x[name] for name in NAMES), implementation="reference")
    torch.testing.assert_close(o[:, :, 12:], expected[:, :, 12:], rtol=1e-5, atol=1e-5, equal_nan=True)
    # The reference's zero weights times infinity reach back to rows that cannot read it; here they do not.
    torch.testing.assert_close(o[:, :, :12], finite[:, :, :12], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [{"reach": 140.0}, {"values": "ramp", "reach": 500.0}, {"reach": 8.0, "sharpness": 8.0}], ids=str)
def test_bfloat16(case: Inputs) -> None:
    x = {name: t.bfloat16().double() for name, t in inputs(37, dk=16, dv=16, batch=1, **case).items()}
    wild = torch.ones(1, 2, dtype=torch.bool)
    expected, rough, got = truth(x), truth(x, torch.bfloat16), kernels(x, wild, torch.bfloat16)[1]
    for name, one, own, right in zip(("o", *NAMES), got, rough, expected, strict=True):
        assert one.isfinite().all(), name
        error = relative(own, right)
        assert relative(one, right) <= BFLOAT16_FACTOR * max(error if error < 1 else 1.0, BFLOAT16_ROUNDING), name


def test_inputs_and_outputs_of_any_strides() -> None:
    x = {name: t.float() for name, t in inputs(18, heads=2).items()}
    wild = torch.ones(2, 2, dtype=torch.bool)

    def turn(t: Tensor) -> Tensor:
        return t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)

    runs = []
    for change in (torch.clone, turn):
        given = {name: t.clone() if name == "beta" else change(t) for name, t in x.items()}
        o, d_o = change(torch.zeros(weights(x).shape)), change(weights(x).float())
        fixed: dict[str, Any] = {"causal": True, "scale": 0.3, "keys_valid": None, "bounds": None}
        gradients = {f"d{name}": torch.zeros(2, 2, 4) if name == "beta" else change(torch.zeros_like(t)) for name, t in x.items()}
        saved = exact_forward_(o, **given, wild=wild, **fixed)
        exact_backward_(saved, d_o, **given, wild=wild, **gradients, **fixed)
        runs.append([o, *gradients.values()])
    assert not runs[1][0].is_contiguous() and all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_result_that_cannot_be_written_in_rows_is_refused() -> None:
    x = {name: t.float() for name, t in inputs(4).items()}
    o = torch.zeros(weights(x).shape).mT.contiguous().mT
    with pytest.raises(ValueError, match="last dimension is not contiguous"):
        exact_forward_(o, **x, wild=MIXED, causal=True, scale=1.0, keys_valid=None, bounds=None)
