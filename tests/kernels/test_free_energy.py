"""The free-energy read over any prior: softmax's against the fixtures, the linear-time ones against the definition; its running window."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.free_energy.streams as exact_form
from kernels.free_energy import ValueWindow, free_energy_read
from kernels.implementations import OncePerMessage
from kernels.linear_attention import linear_attention, log_weights
from tests.kernels.oracle import load, relative

DECAYS = ("none", "head", "channel")
every_decay = pytest.mark.parametrize("decay", DECAYS)
both = pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
NAMES = ("q", "k", "log_decay", "v", "beta", "lam", "gate")


@pytest.fixture(autouse=True)
def messages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Warnings as of a fresh process: nothing said yet."""
    monkeypatch.setattr(logging.getLogger("kernels.free_energy"), "filters", [OncePerMessage()])
    return caplog


def inputs(
    decay: str = "head", tokens: int = 33, *, beta: float = 1.95, value_range: float = 4.0, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """By name: q, k [2, 2, tokens, 3] above 0, log_decay, v whose beta * range is about value_range, beta, lam, gate [..., 4]."""
    rng = torch.Generator().manual_seed(tokens)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    made = {
        "q": uniform(2, 2, tokens, 3) + 1e-3,
        "k": uniform(2, 2, tokens, 3) + 1e-3,
        "log_decay": -0.3 * uniform(2, 2, tokens, 1 if decay == "head" else 3),
        "v": (uniform(2, 2, tokens, 4) - 0.5) * value_range / beta,
        "beta": torch.full((2, 4), beta, dtype=torch.float64),
        "lam": uniform(2, 2, tokens, 4),
        "gate": 2 * uniform(2, 2, tokens, 4),
    }
    if decay == "head":
        made["log_decay"] = made["log_decay"][..., 0]
    if decay == "none":
        del made["log_decay"]
    return {name: t.to(dtype) for name, t in made.items()}


def read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    lam: Tensor | None = None,
    gate: Tensor | None = None,
    log_decay: Tensor | None = None,
    *,
    exact: bool = False,
    causal: bool = True,
) -> Tensor:
    """The read under linear attention's weights."""
    return free_energy_read(
        v,
        beta,
        lam,
        gate,
        lambda streams: linear_attention(q, k, streams, log_decay, causal=causal, normalise=True)[0],
        lambda start, stop: log_weights(q, k, log_decay, start, stop, causal=causal),
        exact=exact,
    )


def definition(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, lam: Tensor, gate: Tensor, log_decay: Tensor | None = None, *, causal: bool = True
) -> Tensor:
    """All terms at once."""
    weights = linear_attention(q, k, torch.eye(q.shape[2], dtype=q.dtype).expand(*q.shape[:3], -1), log_decay, causal=causal)[0]
    log_p = torch.where(weights > 0, weights, 1).log().masked_fill(weights <= 0, -torch.inf).log_softmax(-1)
    mu = log_p.exp() @ v
    free = (log_p[..., None] + (beta[:, None] * v)[:, :, None]).logsumexp(3) / beta[:, None]
    return gate * ((1 - lam) * mu + lam * free)


def mean(x: dict[str, Any], exact: bool) -> Tensor:
    return read(**{**x, "beta": None, "lam": None, "gate": None}, exact=exact)


def free_energy(x: dict[str, Any], exact: bool, **changed: Tensor) -> Tensor:
    return read(**{**x, "lam": None, "gate": None, **changed}, exact=exact)


def with_gradients(function: Callable[..., Tensor], x: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in x.items()}
    o = function(**leaves)
    w = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"o": o.detach()} | dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), w.to(dtype)), strict=True))


@both
@pytest.mark.parametrize("name", ["fem_read_normal", "fem_read_adversarial"])
def test_fixture(name: str, exact: bool, messages: pytest.LogCaptureFixture) -> None:
    """Under softmax's weights; the adversarial values spread over 200, which the fast form hands over."""
    stored = load(name)
    x = {key: stored[f"in/{key}"] for key in ("q", "k", "v", "lam", "g", "beta")}
    x = {key: (t if key == "beta" else t[None])[None].requires_grad_() for key, t in x.items()}
    scores = x["q"] @ x["k"].mT * x["q"].shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    o = free_energy_read(
        x["v"],
        x["beta"],
        x["lam"],
        x["g"],
        lambda streams: scores.softmax(-1) @ streams,
        lambda start, stop: scores[:, :, start:stop] + 7.0,  # up to a constant
        exact=exact,
    )
    gradients = torch.autograd.grad((o[0, 0] * stored["w"]).sum(), list(x.values()))
    results = {"out/0": o} | {f"grad/{key}": gradient for key, gradient in zip(x, gradients, strict=True)}
    for key, got in results.items():
        # float64 on both sides; the fixtures' own tolerance
        torch.testing.assert_close(
            got.reshape(stored[key].shape), stored[key], rtol=1e-9, atol=1e-9 * float(stored[key].abs().max()), msg=key
        )
    assert ("the exact form" in messages.text) == (name == "fem_read_adversarial" and not exact)


@both
@every_decay
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("tokens", "value_range"), [(1, 4.0), (2, 4.0), (33, 4.9), (33, 5.3), (70, 79.0)])
def test_equals_the_definition_with_all_gradients(tokens: int, value_range: float, causal: bool, decay: str, exact: bool) -> None:
    x = inputs(decay, tokens, value_range=value_range)
    got = with_gradients(lambda **x: read(**x, exact=exact, causal=causal), x)
    for name, expected in with_gradients(lambda **x: definition(**x, causal=causal), x).items():
        # float64 rounding (1e-16), amplified by exponents up to 40
        torch.testing.assert_close(got[name], expected, rtol=1e-10, atol=1e-10 * max(1.0, float(expected.abs().max())), msg=name)


@every_decay
@pytest.mark.parametrize(("beta", "value_range"), [(1.95, 4.0), (0.02, 0.1), (1.95, 40.0), (1.95, 79.0)])
def test_float32_results_and_gradients(decay: str, beta: float, value_range: float) -> None:
    x = {name: t.float().double() for name, t in inputs(decay, 128, beta=beta, value_range=value_range).items()}
    truth = with_gradients(definition, x)
    for name, got in with_gradients(read, x, torch.float32).items():
        assert got.isfinite().all()
        assert relative(got, truth[name]) < 1e-5, name  # the stated bound of the fast form: eps 6e-8, sums of 128 terms, exponents to 40


@every_decay
def test_values_spread_over_two_hundred(decay: str, messages: pytest.LogCaptureFixture) -> None:
    x = {name: t.float().double() for name, t in inputs(decay, 64, beta=2.0, value_range=400.0).items()}
    truth = with_gradients(definition, x)
    for name, got in with_gradients(read, x, torch.float32).items():
        assert relative(got, truth[name]) < 2e-5, name  # float32 rounding of exponents up to 200
    read(**x)
    assert messages.text.count("the exact form (slower) runs") == 1


@both
@every_decay
def test_free_energy_lies_between_the_mean_and_the_maximum_and_rises_with_beta(decay: str, exact: bool) -> None:
    for value_range in (1.0, 79.0):
        x = inputs(decay, value_range=value_range)
        mu, rounding = mean(x, exact), 1e-12 * float(x["v"].abs().max())
        reads = [free_energy(x, exact, beta=torch.full_like(x["beta"], beta)) for beta in (1e-3, 0.05, 0.5, 1.95)]
        for lower, higher in zip([mu, *reads], reads, strict=False):
            assert (higher >= lower - 1e3 * rounding).all()  # 1e-16 / beta
        assert (reads[-1] <= x["v"].cummax(2).values + rounding).all()
        spread = x["v"].cummax(2).values - x["v"].cummin(2).values
        assert (reads[0] - mu <= 1e-3 * spread.square() / 8 + 1e3 * rounding).all()  # Hoeffding's lemma


@both
def test_shift_law(exact: bool) -> None:
    x = inputs()
    shift = torch.linspace(-50, 50, 4, dtype=torch.float64)
    # F(v + c) = F(v) + c: float64 rounding at size 50
    torch.testing.assert_close(free_energy(x, exact, v=x["v"] + shift), free_energy(x, exact) + shift, rtol=0, atol=1e-11)


@both
@every_decay
def test_with_closed_gates_it_is_the_prior(decay: str, exact: bool) -> None:
    x = inputs(decay)
    plain = linear_attention(x["q"], x["k"], x["v"], x.get("log_decay"), normalise=True)[0]
    closed = read(**x | {"lam": torch.zeros_like(x["lam"]), "gate": torch.ones_like(x["gate"])}, exact=exact)
    for got in (closed, mean(x, exact)):
        torch.testing.assert_close(got, plain, rtol=1e-13, atol=1e-13)  # float64 rounding


@both
@every_decay
def test_keys_of_zeros_are_not_there(decay: str, exact: bool) -> None:
    """A masked key keeps its zero weight whatever its value is."""
    x = inputs(decay, 20)
    x["k"][:, :, 5:9] = 0
    if decay != "none":
        x["log_decay"][:, :, 5:9] = 0
    kept = [*range(5), *range(9, 20)]
    alone = read(**{name: t if name == "beta" else t[:, :, kept] for name, t in x.items()}, exact=exact)
    x["v"][:, :, 5:9] += 7.0
    torch.testing.assert_close(read(**x, exact=exact)[:, :, kept], alone, rtol=1e-11, atol=1e-11)  # float64 rounding, another centre


@every_decay
@pytest.mark.parametrize("terms", [1, 3000])
@pytest.mark.parametrize("extreme", [3.0, 1e30])
def test_exact_outputs_do_not_move_by_a_bit_when_later_tokens_change(
    decay: str, terms: int, extreme: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_form, "BLOCK_TERMS_CPU", terms)
    x = inputs(decay, dtype=torch.float32)
    before = read(**x, exact=True)
    for cut in (1, 16, 32):
        changed = {name: t.clone() for name, t in x.items()}
        for name in ("q", "k", "v"):
            changed[name][:, :, cut:] *= -extreme if name == "v" else 5.0
        after = read(**changed, exact=True)
        assert torch.equal(after[:, :, :cut], before[:, :, :cut])
        assert not torch.equal(after[:, :, cut:], before[:, :, cut:])


@both
@every_decay
def test_gradients_of_later_tokens_are_exactly_zero(decay: str, exact: bool) -> None:
    x = {name: t.requires_grad_() for name, t in inputs(decay, value_range=40.0).items()}
    names = [name for name in ("q", "k", "v", "log_decay") if name in x]
    gradients = torch.autograd.grad(read(**x, exact=exact)[:, :, :20].square().sum(), [x[name] for name in names])
    for gradient in gradients:
        assert (gradient[:, :, 20:] == 0).all() and gradient[:, :, 1:20].any(2).all()


@pytest.mark.parametrize("present", [("beta", "lam", "gate"), ("beta",), ("gate",), ()], ids="+".join)
@both
def test_gradcheck(present: tuple[str, ...], exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_form, "BLOCK_TERMS_CPU", 40)
    x = inputs("channel", 4, value_range=8.0)
    names = ["q", "k", "v", "log_decay", *present]
    # fast: one random direction; the definition above has every number
    assert torch.autograd.gradcheck(
        lambda *t: read(**dict(zip(names, t, strict=True)), exact=exact), tuple(x[n].requires_grad_() for n in names), fast_mode=True
    )


@both
def test_bfloat16_values_give_bfloat16(exact: bool) -> None:
    x = inputs(dtype=torch.float32)
    narrow = {name: t.bfloat16() if name in ("v", "lam", "gate") else t for name, t in x.items()}
    o = read(**narrow, exact=exact)
    assert o.dtype == torch.bfloat16
    # rounded at the end: 2^-8 of a size of 2 at most
    assert (o.float() - read(**{name: t.float() for name, t in narrow.items()}, exact=exact)).abs().max() <= 2**-7


@every_decay
def test_8192_tokens_stay_finite(decay: str) -> None:
    x = inputs(decay, 8192, value_range=79.0, dtype=torch.float32)
    x = {name: t[:1] if name != "beta" else t for name, t in x.items()}
    assert all(result.isfinite().all() for result in with_gradients(read, x, torch.float32).values())


# --- the running window of decoding ---------------------------------------------------------------------------------------------


def decode(x: dict[str, Any], pieces: list[int]) -> tuple[Tensor, Tensor]:
    """(mu, F) piece by piece with a carried state."""
    sums = state = None
    results, start = [], 0
    for piece in pieces:
        q, k, v = (x[name][:, :, start : start + piece] for name in ("q", "k", "v"))
        decay = x["log_decay"][:, :, start : start + piece] if "log_decay" in x else None
        window = ValueWindow(v, x["beta"], state)
        if sums is not None:
            sums = torch.cat((sums[..., :4], sums[..., 4:8] * window.rescale, sums[..., 8:]), dim=-1)
        both, sums = linear_attention(q, k, torch.cat((v, window.stream()), dim=-1), decay, sums, normalise=True)
        mu, z = both.chunk(2, dim=-1)
        results.append(torch.stack((mu, mu + window.gap(mu, z))))
        state, start = window.state, start + piece
    mu, free = torch.cat(results, dim=3)
    return mu, free


@every_decay
@pytest.mark.parametrize("order", ["as they come", "rising", "falling"])
@pytest.mark.parametrize("pieces", [[1] * 60, [20, 1, 1, 38]], ids=["one by one", "in parts"])
def test_decoding_equals_the_parallel_read(decay: str, order: str, pieces: list[int]) -> None:
    x = inputs(decay, 60, value_range=79.0, dtype=torch.float32)
    if order != "as they come":
        x["v"] = x["v"].sort(dim=2, descending=order == "falling").values
    truth = {name: t.double() for name, t in x.items()}
    mu, free = decode(x, pieces)
    # float32 logs of sums, values up to 20
    torch.testing.assert_close(mu.double(), mean(truth, True), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(free.double(), free_energy(truth, True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["as they come", "rising", "falling"])
def test_decoding_stays_finite_beyond_the_range(order: str, messages: pytest.LogCaptureFixture) -> None:
    x = inputs("head", 60, value_range=1000.0, dtype=torch.float32)
    if order != "as they come":
        x["v"] = x["v"].sort(dim=2, descending=order == "falling").values
    mu, free = decode(x, [1] * 60)
    assert mu.isfinite().all() and free.isfinite().all() and (free >= mu).all()
    assert messages.text.count("are lost to F") == 1
    late = free_energy({name: t.double() for name, t in x.items()}, True)
    # where the greatest value so far is read at all, it rules F; float32 of values up to 300
    torch.testing.assert_close(free.double()[:, :, -1], late[:, :, -1], rtol=1e-5, atol=1e-3)


GOOD = torch.zeros(2, 3, 5, 4)
BAD: dict[str, dict[str, Any]] = {
    "v has shape": {"v": torch.zeros(3, 5, 4)},
    "not empty": {"v": torch.zeros(2, 3, 0, 4)},
    "v is torch.float16": {"v": GOOD.half()},
    "beta has shape": {"beta": torch.ones(4)},
    "lam has shape": {"lam": torch.zeros(2, 3, 4, 4)},
    "gate has shape": {"gate": torch.zeros(2, 3, 5, 1)},
    "needs beta": {"lam": GOOD},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused_in_one_line(message: str) -> None:
    good: dict[str, Any] = {"v": GOOD, "beta": None, "lam": None, "gate": None}
    with pytest.raises(ValueError, match=message) as error:
        free_energy_read(**good | BAD[message], read=lambda streams: streams, log_weights=lambda start, stop: GOOD)
    assert str(error.value).startswith("free_energy_read: ") and "\n" not in str(error.value)
