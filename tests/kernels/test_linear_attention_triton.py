"""Linear attention's Triton kernels, interpreted, and the free-energy read over them: the cases, edges of chunks, layouts, resets."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.implementations
import kernels.linear_attention as module
from kernels.linear_attention import linear_attention
from tests.kernels.oracle import relative

every_decay = pytest.mark.parametrize("decay", ["none", "head", "channel"])


def inputs(tokens: int, decay: str, *, batch: int = 1, heads: int = 1, keys: int = 3, values: int = 4) -> dict[str, Any]:
    """float32 q, k, v and log_decay by name."""
    rng = torch.Generator().manual_seed(tokens)
    shape = batch, heads, tokens
    made = {"q": torch.rand(*shape, keys, generator=rng), "k": torch.rand(*shape, keys, generator=rng)}
    made["v"] = 2 * torch.rand(*shape, values, generator=rng) - 1
    if decay != "none":
        made["log_decay"] = -0.2 * torch.rand(*shape, *([keys] if decay == "channel" else []), generator=rng)
    return made


def with_gradients(x: dict[str, Any], implementation: str, **options: Any) -> list[Tensor]:
    """y, the state and every gradient of a random weighting of both."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    results = linear_attention(**leaves, implementation=implementation, **options)
    rng = torch.Generator().manual_seed(1)
    loss = sum((one * torch.randn(one.shape, generator=rng).to(one.dtype)).sum() for one in results)
    return [*(one.detach() for one in results), *torch.autograd.grad(loss, list(leaves.values()))]  # type: ignore[arg-type]


@every_decay
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
def test_every_edge_of_a_chunk(tokens: int, decay: str) -> None:
    x = inputs(tokens, decay) | {"initial": torch.rand(1, 1, 3, 5, generator=torch.Generator().manual_seed(0))}
    for got, expected in zip(*(with_gradients(x, name, normalise=True) for name in ("triton", "reference")), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)  # float32 rounding of sums in another order


@every_decay
def test_several_blocks_of_channels(decay: str) -> None:
    x = inputs(20, decay, keys=36, values=20) | {"initial": torch.rand(1, 1, 36, 21, generator=torch.Generator().manual_seed(0))}
    for got, expected in zip(*(with_gradients(x, name, normalise=True) for name in ("triton", "reference")), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # float32 rounding of sums up to 20


@every_decay
def test_any_layout_that_the_layers_pass(decay: str) -> None:
    """Tokens first, one key for all heads, channels apart, several batches: the numbers are those of contiguous tensors, bit for bit."""
    x = inputs(18, decay, batch=2, heads=2)
    x["k"] = x["k"][:, :1].expand(-1, 2, -1, -1)
    plain = with_gradients({name: t.contiguous() for name, t in x.items()}, "triton")
    turned = {name: t.transpose(0, 2).contiguous().transpose(0, 2) for name, t in x.items()} | {"k": x["k"]}
    turned["v"] = torch.stack((x["v"], x["v"]), dim=-1)[..., 0]
    for got, expected in zip(with_gradients(turned, "triton"), plain, strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(plain, with_gradients(x, "reference"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)  # float32 rounding


@every_decay
def test_outputs_do_not_move_by_a_bit_when_later_tokens_change(decay: str) -> None:
    x = inputs(35, decay)
    before = linear_attention(**x, normalise=True, implementation="triton")[0]
    for cut in (1, 16, 21, 34):
        changed: dict[str, Any] = {name: torch.cat((t[:, :, :cut], 1e3 * t[:, :, cut:]), dim=2) for name, t in x.items()}
        after = linear_attention(**changed, normalise=True, implementation="triton")[0]
        assert torch.equal(after[:, :, :cut], before[:, :, :cut])
        assert not torch.equal(after[:, :, cut:], before[:, :, cut:])


@every_decay
def test_gradients_of_later_tokens_are_exactly_zero(decay: str) -> None:
    x = {name: t.requires_grad_() for name, t in inputs(35, decay).items()}
    y, _ = linear_attention(**x, normalise=True, implementation="triton")
    for gradient in torch.autograd.grad(y[:, :, :20].square().sum(), list(x.values())):
        assert (gradient[:, :, 20:] == 0).all() and (gradient[:, :, 1:20] != 0).any(2).all()


@every_decay
def test_the_state_alone_or_the_rows_alone_are_differentiated(decay: str) -> None:
    x = inputs(20, decay) | {"initial": torch.rand(1, 1, 3, 5)}
    for which in (0, 1):
        results = []
        for name in ("triton", "reference"):
            leaves = {key: t.detach().requires_grad_() for key, t in x.items()}
            loss = linear_attention(**leaves, normalise=True, implementation=name)[which].square().sum()
            results.append(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)  # float32 rounding of sums up to 20


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "plain"])
def test_no_gradient_is_nan_where_huge_values_were_forgotten(decay: str, normalise: bool) -> None:
    """exp(40) before a hard decay, exp(-40) and faint keys after it, and gradients as large as the free energy's, exp(40)."""
    x = inputs(50, decay)
    x["log_decay"] = torch.full_like(x["log_decay"], -0.01)
    for at in (8, 16, 25, 37):
        x["log_decay"][:, :, at] = -500.0
        x["k"][:, :, at:] *= 1e-3
    x["v"] = x["v"].abs() * torch.where(torch.arange(50) < 8, 40.0, -40.0).exp()[:, None]
    leaves: dict[str, Any] = {name: t.requires_grad_() for name, t in x.items()}
    y, _ = linear_attention(**leaves, normalise=normalise, implementation="triton")
    weights = torch.where(torch.arange(50) < 8, -40.0, 40.0).exp()[:, None].expand_as(y)
    for gradient in torch.autograd.grad(y, list(leaves.values()), weights):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("strong", [-1e6, -torch.inf, -40.0])
def test_a_weak_decay_behind_strong_ones_keeps_its_digits(decay: str, strong: float) -> None:
    """Seven strong ones and then weak ones, in one chunk: float32's cumulated sums would know the weights to 1e-5 at best."""
    x = inputs(16, decay)
    x["log_decay"] = torch.full_like(x["log_decay"], -1e-3)
    x["log_decay"][:, :, :7] = strong
    truth = with_gradients({name: t.double() for name, t in x.items()}, "reference")
    for got, expected in zip(with_gradients(x, "triton"), truth, strict=True):
        assert relative(got, expected) < 5e-7  # float32 over sums of some terms


@every_decay
def test_equal_values_are_read_as_they_are(decay: str) -> None:
    x = inputs(35, decay) | {"v": torch.full((1, 1, 35, 4), 0.75)}
    y, _ = linear_attention(**x, normalise=True, implementation="triton")
    torch.testing.assert_close(y, x["v"], rtol=1e-6, atol=0)  # float32 rounding of two sums of the same weights


def test_decays_may_be_float32_beside_bfloat16() -> None:
    x = {name: t if name == "log_decay" else t.bfloat16() for name, t in inputs(20, "head").items()}
    fast, plain = (with_gradients(x, name) for name in ("triton", "reference"))
    assert [t.dtype for t in fast] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 3, torch.float32]
    for got, expected in zip(fast, plain, strict=True):
        assert relative(got, expected) < 1e-2  # bfloat16's unit roundoff is 4e-3


def test_what_does_not_fit_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(3, "none")
    doubled: dict[str, Any] = {name: t.double() for name, t in x.items()}
    refused: list[tuple[dict[str, Any], str]] = [
        ({**doubled, "implementation": "triton"}, "'triton' cannot run: float64; use auto"),
        ({**x, "causal": False, "implementation": "triton"}, "'triton' cannot run: causal=False reads both ways; use auto"),
        ({**x, "implementation": "fast"}, "'fast' is not one of auto, triton, fla, reference"),
        ({**x, "implementation": "fla"}, "'fla' cannot run: "),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message) as error:
            linear_attention(**arguments)
        assert str(error.value).startswith("linear_attention: ") and "\n" not in str(error.value)
    monkeypatch.setattr(kernels.implementations, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="'triton' cannot run: no GPU; use auto"):
        linear_attention(**x, implementation="triton")


def test_fla_is_given_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: its two entry points replaced by the reference, in their layout and with their names."""

    def entry(q: Tensor, k: Tensor, v: Tensor, *, g: Any, scale: float, initial_state: Any, output_final_state: bool) -> Any:
        assert output_final_state and scale == 1.0
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y, state = linear_attention(q, k, v, None if g is None else g.transpose(1, 2), initial_state, implementation="reference")
        return y.transpose(1, 2), state

    for name in ("fla", "fla.ops", "fla.ops.gla", "fla.ops.simple_gla"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla.ops.gla"].chunk_gla = entry  # type: ignore[attr-defined]
    sys.modules["fla.ops.simple_gla"].chunk_simple_gla = entry  # type: ignore[attr-defined]
    by_fla: Any = module._by_fla
    for decay in ("none", "head", "channel"):
        x = inputs(9, decay)
        x["k"][:, :, :2] = 0
        for normalise in (True, False):
            initial = None if normalise else torch.rand(1, 1, 3, 4)
            expected = linear_attention(**x, initial=initial, normalise=normalise)
            got = by_fla(x["q"], x["k"], x["v"], x.get("log_decay"), initial, normalise)
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # float32 rounding
