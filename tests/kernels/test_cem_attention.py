from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kernels.cem_attention.reference as reference
from kernels.cem_attention import Diagonal, cem_attention
from kernels.cem_attention.reference import interaction_energy

SCALE = 0.4
DIAGONALS = ("none", "shared", "head")
Inputs = dict[str, Tensor]


def inputs(t: int, tk: int | None = None, *, diagonal: str = "shared", dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """q, k, slopes, biases and the diagonal's parts of 2 sequences and 3 heads of 4, in a stream of 6."""
    rng = torch.Generator().manual_seed(seed)
    tk = t if tk is None else tk
    shapes = {"q": (2, 3, t, 4), "k": (2, 3, tk, 4), "self_bias": (1,), "cross_bias": (1,)}
    if diagonal != "none":
        shapes |= {"u": (2, t, 6), "h": (2, tk, 6), "d": (1 if diagonal == "shared" else 3, 6)}
    made = {name: torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
    return made | {"slopes": torch.tensor([0.5, 0.25, 0.0], dtype=torch.float32 if dtype == torch.bfloat16 else dtype)}


def read(x: Inputs, **known: Any) -> Tensor:
    diagonal = Diagonal(x["u"], x["h"], x["d"]) if "u" in x else None
    return cem_attention(x["q"], x["k"], x["slopes"], x["self_bias"], x["cross_bias"], diagonal, **{"scale": SCALE, **known})


def scores(x: Inputs, causal: bool = True, valid: Tensor | None = None, scale: float = SCALE) -> Tensor:
    """a_ij as the paper writes it, all at once."""
    t, tk = x["q"].shape[2], x["k"].shape[2]
    a = torch.einsum("bhir,bhjr->bhij", x["q"], x["k"])
    if "u" in x:
        a = a + torch.einsum("bjd,hd,bid->bhij", x["h"], x["d"].expand(3, -1), x["u"])
    i, j = torch.arange(tk - t, tk)[:, None], torch.arange(tk)
    a = a * scale - x["slopes"][:, None, None] * (i - j).abs() + torch.where(i == j, x["self_bias"], x["cross_bias"])
    seen = (i >= j) if causal else torch.ones(t, tk, dtype=torch.bool)
    if valid is not None:
        seen = (seen & valid[:, None, None, :] & valid[:, None, tk - t :, None]) | (i == j)
    return a.masked_fill(~seen, -torch.inf)


def definition(x: Inputs, **known: Any) -> Tensor:
    return scores(x, **known).softmax(-1) @ x["k"]


def results(function: Any, x: Inputs, **known: Any) -> list[Tensor]:
    leaves = {name: t.detach().clone().requires_grad_(name != "slopes") for name, t in x.items()}
    out = function(leaves, **known)
    w = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, [t for t in leaves.values() if t.requires_grad], w.to(out.dtype))]


@pytest.mark.parametrize("terms", [1, 300, 1 << 20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_equals_the_definition_with_all_gradients(diagonal: str, causal: bool, terms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_TERMS_CPU", terms)  # blocks of one row, of a few, and one block
    valid = torch.ones(2, 13, dtype=torch.bool)
    valid[0, :4] = valid[1, 7] = False
    for t, tk, mask in ((1, 1, None), (2, 2, None), (13, 13, None), (5, 13, None), (13, 13, valid), (5, 13, valid)):
        x = inputs(t, tk, diagonal=diagonal)
        pairs = zip(results(read, x, causal=causal, valid=mask), results(definition, x, causal=causal, valid=mask), strict=True)
        for got, expected in pairs:
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)  # float64 rounding over 13 keys


@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_gradcheck(diagonal: str) -> None:
    x = inputs(3, 5, diagonal=diagonal)
    names = [name for name in x if name != "slopes"]

    def function(*leaves: Tensor) -> Tensor:
        return read(dict(zip(names, leaves, strict=True)) | {"slopes": x["slopes"]})

    assert torch.autograd.gradcheck(function, [x[name].requires_grad_() for name in names])


def test_without_biases_and_diagonal_it_is_attention_with_keys_for_values() -> None:
    x = inputs(9, diagonal="none")
    x["slopes"], x["self_bias"] = torch.zeros_like(x["slopes"]), x["cross_bias"]
    expected = scaled_dot_product_attention(x["q"], x["k"], x["k"], is_causal=True, scale=SCALE)
    torch.testing.assert_close(read(x), expected, rtol=1e-12, atol=1e-12)  # float64 rounding


def test_one_diagonal_for_all_heads_is_that_of_each_head() -> None:
    x = inputs(9)
    torch.testing.assert_close(read(x), read(x | {"d": x["d"].expand(3, -1)}), rtol=1e-12, atol=1e-12)  # float64 rounding


@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_the_energy_and_its_gradient(diagonal: str) -> None:
    x = inputs(9, diagonal=diagonal)
    x["q"].requires_grad_()
    own = torch.arange(9)
    parts = Diagonal(x["u"], x["h"], x["d"]) if "u" in x else None
    biases = (x["slopes"], x["self_bias"], x["cross_bias"])
    energy = interaction_energy(x["q"], x["k"], *biases, parts, own=own, scale=SCALE)
    torch.testing.assert_close(energy, -scores(x).logsumexp(-1).sum(1) / SCALE, rtol=1e-12, atol=1e-12)  # float64 rounding
    (gradient,) = torch.autograd.grad(energy.sum(), x["q"])
    torch.testing.assert_close(read(x), -gradient, rtol=1e-12, atol=1e-12)  # float64 rounding
    some = torch.tensor([1, 6])
    parts = None if parts is None else parts._replace(u=x["u"][:, some])
    sampled = interaction_energy(x["q"][:, :, some], x["k"], *biases, parts, own=some, scale=SCALE)
    torch.testing.assert_close(sampled, energy[:, some], rtol=1e-12, atol=1e-12)  # float64 rounding


@pytest.mark.parametrize("diagonal", DIAGONALS)
@pytest.mark.parametrize("terms", [300, 1 << 20])
def test_no_bit_depends_on_later_tokens(diagonal: str, terms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_TERMS_CPU", terms)
    x = inputs(33, diagonal=diagonal, dtype=torch.float32)
    before = read(x)
    for cut in (1, 16, 32):
        for factor in (-1.0, 1e15):
            later = {name: t.clone() for name, t in x.items()}
            for name in {"q", "k", "u", "h"} & set(x):
                later[name][..., cut:, :] *= factor
            after = read(later)
            assert torch.equal(after[:, :, :cut], before[:, :, :cut])
            assert not torch.equal(after[:, :, cut:], before[:, :, cut:])
    leaves = {name: t.clone().requires_grad_(name in ("q", "k", "u", "h")) for name, t in x.items()}
    names = [name for name, t in leaves.items() if t.requires_grad]
    for grad in torch.autograd.grad(read(leaves)[:, :, :11].sum(), [leaves[name] for name in names]):
        assert (grad[..., 11:, :] == 0).all() and (grad[..., :11, :] != 0).any()


def test_terms_held_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    pair_scores = reference.pair_scores

    def counted(*args: Any) -> Tensor:
        held.append(pair_scores(*args).numel())
        return pair_scores(*args)

    monkeypatch.setattr(reference, "pair_scores", counted)
    monkeypatch.setattr(reference, "BLOCK_TERMS_CPU", 5000)
    results(read, inputs(300))
    assert max(held) <= 5000 < 2 * 3 * 300 * 300 / 2
    assert sum(held) < 2 * (2 * 3 * 300 * 300) * 0.6  # forward and backward, each little more than the triangle


@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_bfloat16_is_rounded_once(diagonal: str) -> None:
    x = inputs(40, diagonal=diagonal, dtype=torch.bfloat16)
    out = read(x)
    assert out.dtype == torch.bfloat16
    exact = definition({name: t.double() for name, t in x.items()})
    # 2^-8 is bfloat16's unit roundoff; 1e-5 for the float32 inside
    assert ((out.double() - exact).abs() <= (2**-8 + 1e-5) * exact.abs() + 1e-5).all()
    assert all(grad.isfinite().all() for grad in results(read, x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 5, 4)}, r"q has shape \[3, 5, 4\]"),
        ({"q": torch.zeros(2, 3, 5, 4).half()}, "use float64, float32 or bfloat16"),
        ({"k": torch.zeros(2, 3, 5, 3)}, r"k is \[2, 3, 5, 3\]"),
        ({"k": torch.zeros(2, 3, 4, 4), "h": torch.zeros(2, 4, 6)}, "4 keys for 5 tokens"),
        ({"h": torch.zeros(2, 5, 7)}, r"diagonal.h is \[2, 5, 7\]"),
        ({"u": torch.zeros(2, 5, 6).double()}, "diagonal.u is"),
        ({"d": torch.zeros(2, 6)}, r"expected \[1, 6\] or \[3, 6\]"),
        ({"slopes": torch.zeros(2)}, r"expected \[3\]"),
        ({"valid": torch.zeros(2, 5)}, "valid is"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(change: Inputs, message: str) -> None:
    valid = change.pop("valid", None)
    with pytest.raises(ValueError, match=message) as error:
        read(inputs(5, dtype=torch.float32) | change, valid=valid)
    assert str(error.value).startswith("cem_attention: ") and "\n" not in str(error.value)
