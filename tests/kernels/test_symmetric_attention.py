from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.symmetric_attention.reference as reference
from kernels.symmetric_attention import symmetric_attention
from kernels.symmetric_attention.reference import attention_energy, effective_rank, feed_forward_energy, mean_angle
from tests.kernels.oracle import relative

KINDS = [("softmax", True), ("softmax", False), ("bisoftmax", False), ("sigmoid", True), ("sigmoid", False)]
ROUNDING: Any = {"rtol": 1e-12, "atol": 1e-12}  # float64, some hundreds of sums of terms of size 1


def sphere(tokens: int, *, b: int = 2, h: int = 3, p: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """z of norm about sqrt(p), as the layer's norm leaves it."""
    z = torch.randn(b, h, tokens, p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (torch.nn.functional.normalize(z, dim=-1) * p**0.5 * 1.1).to(dtype)


def definition(z: Tensor, kind: str, causal: bool, valid: Tensor | None = None) -> Tensor:
    """All pairs at once, every softmax on its own."""
    t = z.shape[2]
    s = z @ z.mT / math.sqrt(z.shape[-1])
    seen = torch.ones(t, t, dtype=torch.bool).tril() if causal else torch.ones(t, t, dtype=torch.bool)
    if valid is not None:
        seen = seen & valid[:, None, None, :] & valid[:, None, :, None] | torch.eye(t, dtype=torch.bool)
    masked = s.masked_fill(~seen, -torch.inf)
    if kind == "softmax":
        a = masked.softmax(-1)
    elif kind == "bisoftmax":
        a = masked.softmax(-1) + masked.softmax(-2)
    else:
        a = (s.sigmoid() * (1 - s.sigmoid())).masked_fill(~seen, 0.0)
    return a @ z


@pytest.fixture(params=[1 << 20, 50], ids=["one block", "many blocks"])
def block_terms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(reference, "BLOCK_TERMS_CPU", request.param)
    return int(request.param)


@pytest.mark.parametrize("tokens", [1, 2, 13])
@pytest.mark.parametrize(("kind", "causal"), KINDS)
def test_equals_the_definition_with_its_gradient(kind: str, causal: bool, tokens: int, block_terms: int) -> None:
    z, w = sphere(tokens).requires_grad_(), sphere(tokens, seed=1)
    got, expected = symmetric_attention(z, kind=kind, causal=causal), definition(z, kind, causal)
    torch.testing.assert_close(got, expected, **ROUNDING)
    pairs = [torch.autograd.grad((out * w).sum(), z)[0] for out in (got, expected)]
    torch.testing.assert_close(*pairs, **ROUNDING)
    # The blocked form of the kind that torch's own attention runs.
    torch.testing.assert_close(reference.pairwise_attention(z, z, kind=kind, causal=causal, valid=None), expected, **ROUNDING)


@pytest.mark.parametrize(("kind", "causal"), KINDS)
def test_padding(kind: str, causal: bool, block_terms: int) -> None:
    z, valid = sphere(9), torch.ones(2, 9, dtype=torch.bool)
    valid[0, :4] = False
    out = symmetric_attention(z, kind=kind, causal=causal, valid=valid)
    torch.testing.assert_close(out, definition(z, kind, causal, valid), **ROUNDING)
    torch.testing.assert_close(out[:1, :, 4:], symmetric_attention(z[:1, :, 4:], kind=kind, causal=causal), **ROUNDING)
    blocked = reference.pairwise_attention(z, z, kind=kind, causal=causal, valid=valid)
    torch.testing.assert_close(blocked, out, **ROUNDING)


@pytest.mark.parametrize(("kind", "causal"), KINDS)
def test_gradcheck(kind: str, causal: bool, block_terms: int) -> None:
    z = sphere(5, b=1, h=2, p=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: symmetric_attention(z, kind=kind, causal=causal), (z,))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_gradcheck_of_the_last_tokens_among_earlier_keys(kind: str) -> None:
    z, keys = sphere(2, b=1, h=2, p=3).requires_grad_(), sphere(5, b=1, h=2, p=3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda z, k: symmetric_attention(z, k, kind=kind), (z, keys))


@pytest.mark.parametrize(("kind", "causal"), KINDS)
def test_is_the_gradient_of_its_energy(kind: str, causal: bool) -> None:
    z = sphere(7).requires_grad_()
    alone = causal or kind == "softmax"  # each token's own energy, the keys held fixed
    energy = attention_energy(z, z.detach() if alone else None, kind=kind, causal=causal)
    torch.testing.assert_close(torch.autograd.grad(energy.sum(), z)[0], symmetric_attention(z, kind=kind, causal=causal), **ROUNDING)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("part", [1, 4])
def test_parts_with_the_past_as_keys_equal_the_whole(kind: str, part: int) -> None:
    z = sphere(13)
    whole = symmetric_attention(z, kind=kind)
    for start in range(0, 13, part):
        stop = min(start + part, 13)
        out = symmetric_attention(z[:, :, start:stop], z[:, :, :stop], kind=kind)
        torch.testing.assert_close(out, whole[:, :, start:stop], **ROUNDING)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_no_bit_depends_on_later_tokens(kind: str, block_terms: int) -> None:
    z = sphere(33, dtype=torch.float32)
    before = symmetric_attention(z, kind=kind)
    for factor in (-1.0, 1e30):
        after = symmetric_attention(torch.cat((z[:, :, :20], factor * z[:, :, 20:]), dim=2), kind=kind)
        assert torch.equal(after[:, :, :20], before[:, :, :20])
        assert not torch.equal(after[:, :, 20:], before[:, :, 20:])
    leaf = z.clone().requires_grad_()
    (grad,) = torch.autograd.grad(symmetric_attention(leaf, kind=kind)[:, :, :20].sum(), leaf)
    assert (grad[:, :, 20:] == 0).all() and (grad[:, :, :20] != 0).all()


@pytest.mark.parametrize(("kind", "causal"), KINDS)
def test_bfloat16(kind: str, causal: bool) -> None:
    z = sphere(40, p=16, dtype=torch.bfloat16)
    out = symmetric_attention(z, kind=kind, causal=causal)
    assert out.dtype == torch.bfloat16
    assert relative(out, definition(z.double(), kind, causal)) < 1e-2  # 2^-8, where torch's attention rounds its weights too


def test_blocks_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_TERMS_CPU", 2 * 3 * 40 * 8)
    z = sphere(40)
    assert [rows.stop - rows.start for rows in reference._blocks(z, z)] == [8] * 5


def test_refusals() -> None:
    z = sphere(4)
    for call, words in (
        (lambda: symmetric_attention(z, kind="bisoftmax"), "no causal form"),
        (lambda: symmetric_attention(z, kind="hard"), "not one of"),
        (lambda: symmetric_attention(z[0]), "expected"),
        (lambda: symmetric_attention(z, z[:, :, :2]), "4 or more"),
        (lambda: symmetric_attention(z, valid=torch.ones(2, 4)), "bool"),
        (lambda: symmetric_attention(z.half()), "float32"),
        (lambda: attention_energy(z, kind="hard"), "not one of"),
        (lambda: feed_forward_energy(z, kind="hard"), "not one of"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_effective_rank() -> None:
    torch.testing.assert_close(effective_rank(torch.eye(5, dtype=torch.float64)), torch.tensor(5.0, dtype=torch.float64))
    assert float(effective_rank(torch.ones(7, 3, dtype=torch.float64))) == pytest.approx(1.0, abs=1e-10)  # rounding's singular values
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    share = torch.linalg.svdvals(x)
    share = share / share.sum(-1, keepdim=True)
    torch.testing.assert_close(effective_rank(x), torch.exp(-(share * share.log()).sum(-1)))


def test_mean_angle_equals_the_double_loop() -> None:
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cosines = [torch.cosine_similarity(x[i], x[j], dim=0) for i in range(6) for j in range(i + 1, 6)]
    torch.testing.assert_close(mean_angle(x), torch.stack(cosines).mean().acos())
