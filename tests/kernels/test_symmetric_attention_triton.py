"""Hyper-SET's attention in Triton, interpreted: the suite's cases, blocks' edges, strides, causality, and what runs where."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from kernels.symmetric_attention import OP, symmetric_attention
from tests.kernels.oracle import relative
from tests.kernels.test_symmetric_attention import sphere

KINDS = pytest.mark.parametrize(("kind", "causal"), [("bisoftmax", False), ("sigmoid", True), ("sigmoid", False)])


def with_gradient(z: Tensor, implementation: str, kind: str, causal: bool) -> tuple[Tensor, Tensor]:
    z = z.detach().requires_grad_()
    out = symmetric_attention(z, kind=kind, causal=causal, implementation=implementation)
    return out.detach(), torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), z)[0]


@KINDS
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (15, 64), (16, 5), (17, 33), (31, 16), (32, 16), (33, 128)])
def test_every_edge(tokens: int, width: int, kind: str, causal: bool) -> None:
    z = sphere(tokens, b=1, h=2, p=width, dtype=torch.float32)
    for got, expected in zip(with_gradient(z, "triton", kind, causal), with_gradient(z, "reference", kind, causal), strict=True):
        assert relative(got, expected.double()) < 3e-6  # float32 on both sides


@KINDS
def test_inputs_of_any_strides(kind: str, causal: bool) -> None:
    """As a layer passes them: [t, b, h, p] turned, and with channels that do not lie beside each other."""
    z = sphere(35, h=2, p=16, dtype=torch.float32)
    plain = with_gradient(z, "triton", kind, causal)
    for turned in (z.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), z.mT.contiguous().mT):
        assert not turned.is_contiguous()
        for got, expected in zip(with_gradient(turned, "triton", kind, causal), plain, strict=True):
            assert torch.equal(got, expected)


def test_no_bit_depends_on_later_tokens() -> None:
    z = sphere(37, p=16, dtype=torch.float32)
    before = symmetric_attention(z, kind="sigmoid", implementation="triton")
    for factor in (-1.0, 1e15):
        after = symmetric_attention(torch.cat((z[:, :, :20], factor * z[:, :, 20:]), dim=2), kind="sigmoid", implementation="triton")
        assert torch.equal(after[:, :, :20], before[:, :, :20])
        assert not torch.equal(after[:, :, 20:], before[:, :, 20:])
    leaf = torch.cat((z[:, :, :20], 1e15 * z[:, :, 20:]), dim=2).requires_grad_()
    (grad,) = torch.autograd.grad(symmetric_attention(leaf, kind="sigmoid", implementation="triton")[:, :, :20].sum(), leaf)
    assert (grad[:, :, 20:] == 0).all() and grad.isfinite().all() and (grad[:, :, :20] != 0).any()


def test_bisoftmax_moves_with_its_tokens() -> None:
    """It is full: tokens in another order give the outputs in that order."""
    z = sphere(37, p=16, dtype=torch.float32)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    plain, moved = (symmetric_attention(x, kind="bisoftmax", causal=False, implementation="triton") for x in (z, z[:, :, order]))
    torch.testing.assert_close(moved, plain[:, :, order], rtol=1e-6, atol=1e-6)  # sums in another order


@KINDS
def test_memory_is_linear_in_the_tokens(kind: str, causal: bool) -> None:
    """What autograd keeps, counted: z, a number a row, no term of tokens squared."""
    kept = []

    def count(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    z = sphere(48, b=1, h=1, p=16, dtype=torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        symmetric_attention(z, kind=kind, causal=causal, implementation="triton")
    assert 0 < sum(kept) <= z.numel() + 48


def test_softmax_stays_torch_s_own() -> None:
    z = sphere(5, dtype=torch.float32)
    assert OP.choose("auto", z.device, {"sdpa": None, "triton": "kind softmax"}) == "sdpa"
    assert torch.equal(symmetric_attention(z), symmetric_attention(z, implementation="sdpa"))
    assert relative(symmetric_attention(z, implementation="reference"), symmetric_attention(z).double()) < 1e-6  # float32


def test_what_cannot_run_says_why(caplog: pytest.LogCaptureFixture) -> None:
    z = sphere(4, dtype=torch.float32)
    for given, reason in (
        ({"z": z.double(), "kind": "sigmoid"}, "float64"),
        ({"z": z}, "kind softmax"),
        ({"z": sphere(2, p=257, dtype=torch.float32), "kind": "sigmoid"}, "head width 257 is over 256"),
        ({"z": z, "keys": z.clone(), "kind": "bisoftmax", "causal": False}, "bisoftmax with keys of their own"),
    ):
        with pytest.raises(ValueError, match=f"symmetric_attention: implementation 'triton' cannot run: {reason}; use auto"):
            symmetric_attention(**given, implementation="triton")
    with pytest.raises(ValueError, match="implementation 'sdpa' cannot run: kind sigmoid"):
        symmetric_attention(z, kind="sigmoid", implementation="sdpa")
    for filtered in OP.log.filters:
        OP.log.removeFilter(filtered)
    with caplog.at_level(logging.INFO, logger=OP.log.name):
        symmetric_attention(z, kind="sigmoid")
    assert caplog.messages == ["symmetric_attention: reference runs (sdpa does not: kind sigmoid; triton does not: no GPU)"]
