"""MHA2nd1st's step in Triton, interpreted: the suite's cases, blocks' edges, strides, causality, and what runs where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.second_order_attention import second_order_attention
from tests.kernels.oracle import relative
from tests.kernels.test_second_order_attention import angles, inputs


def with_gradients(x: dict[str, Any], implementation: str, **switches: Any) -> list[Tensor]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in x.items()}
    out = second_order_attention(**leaves, **switches, implementation=implementation)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tuple(leaves.values()))]


@pytest.mark.parametrize(("t", "tk", "d"), [(1, 1, 16), (1, 33, 64), (31, 31, 5), (32, 32, 16), (33, 33, 16), (3, 65, 34)])
@pytest.mark.parametrize("causal", [True, False])
def test_every_edge(t: int, tk: int, d: int, causal: bool) -> None:
    x = inputs(t, tk=tk, b=1, h=1, d=d, dtype=torch.float32)
    switches: dict[str, Any] = {"causal": causal, "jitter": 0.1}
    truth = with_gradients({name: tensor.double() for name, tensor in x.items()}, "reference", **switches)
    for got, expected in zip(with_gradients(x, "triton", **switches), truth, strict=True):
        # One token in float32; what a single key leaves zero comes to a rounding.
        assert relative(got, expected) < 1e-5 or float((got - expected).abs().max()) < 1e-6


def test_inputs_of_any_strides() -> None:
    """As a layer passes them: [t, b, h, d] turned, and with channels that do not lie beside each other."""
    x = inputs(35, d=16, dtype=torch.float32)
    plain = with_gradients(x, "triton")
    for turned in (lambda z: z.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), lambda z: z.mT.contiguous().mT):
        strided = x | {name: turned(x[name]) for name in ("q", "k")}
        assert not strided["q"].is_contiguous()
        for got, expected in zip(with_gradients(strided, "triton"), plain, strict=True):
            assert relative(got, expected.double()) < 1e-6  # torch's products of other strides


def test_no_bit_depends_on_later_tokens() -> None:
    x = inputs(37, b=1, d=16, dtype=torch.float32)
    switches: dict[str, Any] = {"turn": angles(37, 16).float(), "implementation": "triton"}
    before = second_order_attention(**x, **switches)
    for cut, factor in ((1, 3.0), (20, 1e15), (32, -1.0)):
        later = {name: torch.cat((x[name][:, :, :cut], factor * x[name][:, :, cut:]), dim=2) for name in ("q", "k")}
        after = second_order_attention(**x | later, **switches)
        assert torch.equal(after[:, :, :cut], before[:, :, :cut])
        assert not torch.equal(after[:, :, cut:], before[:, :, cut:])
    q, k = (torch.cat((x[name][:, :, :20], 1e8 * x[name][:, :, 20:]), dim=2).requires_grad_() for name in ("q", "k"))
    for grad in torch.autograd.grad(second_order_attention(**x | {"q": q, "k": k}, **switches)[:, :, :20].sum(), (q, k)):
        assert (grad[:, :, 20:] == 0).all() and grad.isfinite().all() and (grad[:, :, :20] != 0).any()


def test_memory_is_linear_in_the_tokens() -> None:
    """What autograd keeps, counted: no term of tokens squared."""
    kept = []
    for t in (33, 66):
        total = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        x = {name: tensor.requires_grad_() for name, tensor in inputs(t, b=1, d=16, dtype=torch.float32).items()}
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            second_order_attention(**x, implementation="triton")
        kept.append(total)
    assert kept[1] < 2.05 * kept[0]


def test_a_temperature_that_is_no_number_is_not_hidden() -> None:
    x = inputs(5, d=16, dtype=torch.float32)
    x["temperature"][0] = torch.nan
    found = second_order_attention(**x, implementation="triton")
    assert found[:, 0].isnan().all() and found[:, 1].isfinite().all()


def test_what_cannot_run_says_why() -> None:
    x = inputs(3, dtype=torch.float32)
    wide = inputs(1, b=1, h=1, d=258, dtype=torch.float32)
    for given, reason in (
        (inputs(3), "float64"),
        (x | {"exact": True}, "the exact step solves a system for each token"),
        (wide, "head width 258 is over 256"),
    ):
        with pytest.raises(ValueError, match=f"second_order_attention: implementation 'triton' cannot run: {reason}; use auto"):
            second_order_attention(**given, implementation="triton")
    with pytest.raises(ValueError, match="implementation 'flash' is not one of auto, triton, reference"):
        second_order_attention(**x, implementation="flash")
