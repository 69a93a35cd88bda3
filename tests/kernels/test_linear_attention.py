"""Linear attention with decay against the double loop in float64; decays of any strength; memory linear in the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.linear_attention.reference as reference
from kernels.linear_attention import linear_attention, log_weights
from tests.kernels.oracle import relative

DECAYS = ("none", "head", "channel")
every_decay = pytest.mark.parametrize("decay", DECAYS)


def inputs(
    tokens: int, decay: str, *, strength: float = 1.0, signed: bool = False, dtype: torch.dtype = torch.float64, batch: int = 2
) -> dict[str, Any]:
    """q, k [batch, 2, tokens, 3], v [batch, 2, tokens, 4], log_decay (uniform down to -strength) by name."""
    rng = torch.Generator().manual_seed(tokens)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(batch, 2, tokens, *shape, generator=rng, dtype=torch.float64)

    made = {"q": uniform(3) - 0.5 * signed, "k": uniform(3) - 0.5 * signed, "v": 2 * uniform(4) - 1}
    if decay != "none":
        made["log_decay"] = -strength * (uniform() if decay == "head" else uniform(3))
    return {name: t.to(dtype) for name, t in made.items()}


def loop(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, *, causal: bool = True, normalise: bool = False) -> Tensor:
    """The definition, row by row: the log-decays summed from a key to the row, or the other way."""
    tokens = q.shape[2]
    decay = torch.zeros_like(q) if log_decay is None else (log_decay if log_decay.dim() == 4 else log_decay[..., None])
    rows = []
    for t in range(tokens):
        earlier = decay[:, :, 1 : t + 1].flip(2).cumsum(2).flip(2)
        later = decay[:, :, t + 1 :].cumsum(2)[:, :, : 0 if causal else None]
        between = torch.cat((earlier, torch.zeros_like(decay[:, :, :1]), later), dim=2)
        weights = (q[:, :, t, None] * between.exp() * k[:, :, : between.shape[2]]).sum(-1)
        if normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        rows.append((weights[..., None] * v[:, :, : between.shape[2]]).sum(2))
    return torch.stack(rows, dim=2)


def with_gradients(function: Callable[..., Tensor], x: dict[str, Tensor]) -> list[Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    y = function(**leaves)
    w = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), w.to(y.dtype))]


@every_decay
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "plain"])
@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_equals_the_loop_with_all_gradients(tokens: int, normalise: bool, causal: bool, decay: str) -> None:
    x = inputs(tokens, decay, signed=not normalise, strength=2.0)
    got = with_gradients(lambda **x: linear_attention(**x, causal=causal, normalise=normalise)[0], x)
    expected = with_gradients(lambda **x: loop(**x, causal=causal, normalise=normalise), x)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)  # float64 rounding over sums of 70 terms


@every_decay
@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "plain"])
def test_segments_carry_the_state(decay: str, normalise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four and segments of two chunks: every edge, the odd end, and the gradient of the initial state."""
    monkeypatch.setattr(reference, "CHUNK", 4)
    monkeypatch.setattr(reference, "CHUNK_PER_CHANNEL", 4)
    monkeypatch.setattr(reference, "CHUNKS", 2)
    x = inputs(23, decay)

    def in_two(**given: Any) -> Tensor:
        first, second = ({name: t[:, :, part] for name, t in given.items()} for part in (slice(0, 9), slice(9, 23)))
        y, state = linear_attention(**first, normalise=normalise)
        return torch.cat((y, linear_attention(**second, initial=state, normalise=normalise)[0]), dim=2)

    got = with_gradients(in_two, x)
    for one, other in zip(got, with_gradients(lambda **x: loop(**x, normalise=normalise), x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)  # float64 rounding


@every_decay
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "plain"])
def test_gradcheck(decay: str, causal: bool, normalise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK", 2)
    monkeypatch.setattr(reference, "CHUNK_PER_CHANNEL", 2)
    monkeypatch.setattr(reference, "CHUNKS", 1)
    x = {name: t[:, :1] for name, t in inputs(5, decay, batch=1).items()}
    names = list(x)
    if causal:
        x["initial"] = torch.rand(1, 1, 3, 4 + normalise, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        names.append("initial")

    def both(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return linear_attention(**given, causal=causal, normalise=normalise)

    # fast: one random direction of inputs and outputs; the loop above has every number
    assert torch.autograd.gradcheck(both, tuple(t.requires_grad_() for t in x.values()), fast_mode=True)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strong_decays_do_not_spoil_the_weak_ones_after_them(decay: str) -> None:
    """A difference of cumulated sums would know the small steps after one of -1e6 to 0.1 only."""
    x = inputs(40, decay, dtype=torch.float32, strength=0.1)
    x["log_decay"][:, :, 3] = -1e6
    x["log_decay"][:, :, 20] = -torch.inf
    truth = with_gradients(loop, {name: t.double() for name, t in x.items()})
    for got, expected in zip(with_gradients(lambda **x: linear_attention(**x)[0], x), truth, strict=True):
        assert got.isfinite().all()
        assert relative(got, expected) < 1e-6  # float32 over sums of 20 terms


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "plain"])
def test_no_gradient_is_nan_where_huge_values_were_forgotten(decay: str, normalise: bool) -> None:
    """exp(40) before a hard decay, exp(-40) and faint keys after it, and gradients as large as the free energy's, exp(40)."""
    x = inputs(200, decay, dtype=torch.float32)
    x["log_decay"] = torch.full_like(x["log_decay"], -0.01)
    for at in (30, 64, 100, 150):
        x["log_decay"][:, :, at] = -500.0
        x["k"][:, :, at:] *= 1e-3
    x["v"] = x["v"].abs() * torch.where(torch.arange(200) < 30, 40.0, -40.0).exp()[:, None]
    leaves: dict[str, Any] = {name: t.requires_grad_() for name, t in x.items()}
    y, _ = linear_attention(**leaves, normalise=normalise)
    weights = torch.where(torch.arange(200) < 30, -40.0, 40.0).exp()[:, None].expand_as(y)
    for gradient in torch.autograd.grad(y, list(leaves.values()), weights):
        assert gradient.isfinite().all()


@every_decay
def test_outputs_do_not_move_by_a_bit_when_later_tokens_change(decay: str) -> None:
    x = inputs(150, decay, dtype=torch.float32)
    before = linear_attention(**x, normalise=True)[0]
    for cut in (1, 16, 64, 149):
        changed: dict[str, Any] = {name: torch.cat((t[:, :, :cut], 1e3 * t[:, :, cut:]), dim=2) for name, t in x.items()}
        after = linear_attention(**changed, normalise=True)[0]
        assert torch.equal(after[:, :, :cut], before[:, :, :cut])
        assert not torch.equal(after[:, :, cut:], before[:, :, cut:])


@every_decay
def test_gradients_of_later_tokens_are_exactly_zero(decay: str) -> None:
    x = {name: t.requires_grad_() for name, t in inputs(70, decay).items()}
    gradients = torch.autograd.grad(linear_attention(**x, normalise=True)[0][:, :, :20].square().sum(), list(x.values()))
    for gradient in gradients:
        assert (gradient[:, :, 20:] == 0).all() and (gradient[:, :, 1:20] != 0).any(2).all()


@every_decay
@pytest.mark.parametrize("part", [1, 7])
def test_parts_with_a_carried_state_equal_the_whole(part: int, decay: str) -> None:
    x = inputs(300, decay, dtype=torch.float32)
    whole, last = linear_attention(**x, normalise=True)
    state = None
    for start in range(0, 300, part):
        y, state = linear_attention(**{name: t[:, :, start : start + part] for name, t in x.items()}, initial=state, normalise=True)
        # sums of 300 terms in another order, float32
        torch.testing.assert_close(y, whole[:, :, start : start + part], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)  # likewise; sums up to 100


@every_decay
def test_a_row_that_reads_nothing_gives_its_own_value(decay: str) -> None:
    x = inputs(9, decay)
    x["k"][:, :, :4] = 0
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    for causal in (True, False):
        y, _ = linear_attention(**leaves, causal=causal, normalise=True)
        weights = log_weights(x["q"], x["k"], x.get("log_decay"), 0, 9, causal=causal).softmax(-1)
        torch.testing.assert_close(y, weights @ x["v"], rtol=1e-13, atol=1e-13)  # float64 rounding
        assert not causal or torch.equal(y[:, :, :4], x["v"][:, :, :4])
        for result in (y, weights @ x["v"]):
            assert all(g.isfinite().all() for g in torch.autograd.grad(result.square().sum(), list(leaves.values()), retain_graph=True))


@every_decay
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_log_weights_are_the_weights(decay: str, causal: bool) -> None:
    x = inputs(23, decay, strength=3.0)
    x = {name: t.requires_grad_() for name, t in x.items()}
    rows = torch.cat([log_weights(x["q"], x["k"], x.get("log_decay"), a, b, causal=causal) for a, b in ((0, 7), (7, 23))], dim=2)
    eye = torch.eye(23, dtype=torch.float64).expand(2, 2, 23, 23)
    weights = linear_attention(**x | {"v": eye}, causal=causal)[0]
    torch.testing.assert_close(rows.exp(), weights, rtol=1e-12, atol=1e-14)  # float64 rounding
    names = [name for name in x if name != "v"]
    w = torch.randn(weights.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = (torch.autograd.grad((one * w).sum(), [x[n] for n in names]) for one in (rows.exp(), weights))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)  # float64 rounding


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_log_weights_know_what_float_weights_have_lost(decay: str) -> None:
    x = inputs(50, decay, dtype=torch.float32)
    x["log_decay"] = torch.full_like(x["log_decay"], -20.0)
    rows = log_weights(x["q"], x["k"], x["log_decay"], 49, 50)
    exact = torch.log(x["q"][:, :, 49:].double() @ x["k"].double().mT) - 20.0 * torch.arange(49, -1, -1)
    torch.testing.assert_close(rows.double(), exact, rtol=1e-6, atol=1e-6)  # float32 at up to -980


def saved_bytes(tokens: int, decay: str) -> int:
    """Bytes that the forward keeps for the backward."""
    x = {name: t.requires_grad_() for name, t in inputs(tokens, decay, dtype=torch.float32, strength=0.1, batch=1).items()}
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y, _ = linear_attention(**x, normalise=True)
    loss = y.square().mean()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, list(x.values())))
    return sum(seen.values())


@every_decay
def test_8192_tokens_in_memory_linear_in_them(decay: str) -> None:
    short, long = (saved_bytes(tokens, decay) for tokens in (1024, 8192))
    assert long <= 8 * short
    assert long <= 2 * 8192 * 2 * 4 * (3 + 3 + 4 + 3 + 1)  # at most twice q, k, v and the decays


@every_decay
def test_bfloat16_is_rounded_at_the_end(decay: str) -> None:
    x = inputs(90, decay, dtype=torch.bfloat16)
    y, state = linear_attention(**x, normalise=True)
    exact = linear_attention(**{name: t.double() for name, t in x.items()}, normalise=True)[0]
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (y.double() - exact).abs().max() <= 2**-8  # bfloat16's unit roundoff at size 1


ZEROS = torch.zeros(2, 3, 5, 4)
BAD: dict[str, dict[str, Any]] = {
    r"q has shape \[3, 5, 4\]": {"q": torch.zeros(3, 5, 4)},
    "k has shape": {"k": torch.zeros(2, 3, 5, 3)},
    "v has shape": {"v": torch.zeros(2, 3, 6, 4)},
    "not empty": {"q": torch.zeros(2, 3, 0, 4)},
    "log_decay has shape": {"log_decay": torch.zeros(2, 3, 5, 1)},
    "initial has shape": {"initial": torch.zeros(2, 3, 4, 5)},
    r"initial has shape .* expected \[2, 3, 4, 5\]": {"initial": ZEROS[:, :, :4], "normalise": True},
    "q is torch.float16": {"q": ZEROS.half()},
    "k is torch.float64": {"k": ZEROS.double()},
    "v is torch.float32 on meta": {"v": ZEROS.to("meta")},
    "leave it out": {"initial": ZEROS[:, :, :4], "causal": False},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused_in_one_line(message: str) -> None:
    good: dict[str, Any] = {"q": ZEROS, "k": ZEROS, "v": ZEROS}
    linear_attention(**good)
    with pytest.raises(ValueError, match=message) as error:
        linear_attention(**good | BAD[message])
    assert str(error.value).startswith("linear_attention: ") and "\n" not in str(error.value)
