"""The step by its definition (autograd's gradient and Hessian of the free energy), the paper's numbers and limits; linear attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.second_order_attention.reference as reference
from kernels.pairs import allowed_pairs
from kernels.second_order_attention import second_order_attention
from kernels.second_order_attention.reference import energy_linear_attention, free_energy, quadratic_energy, rotated
from tests.kernels.oracle import load, relative

ROUNDING: Any = {"rtol": 1e-10, "atol": 1e-12}  # float64; systems of condition 100 at most
BOTH = pytest.mark.parametrize("exact", [False, True])
NAMES = ("q", "k", "gram", "temperature", "newton_temperature")


def inputs(t: int, *, tk: int | None = None, b: int = 2, h: int = 2, d: int = 4, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(t)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    w = normal(h, d, 3 * d)
    heads = torch.linspace(d, 1.5 * d, h, dtype=torch.float64)
    made = (normal(b, h, t, d), normal(b, h, tk or t, d), w @ w.mT / (3 * d), heads, heads + 1.0)
    return {name: x.to(dtype) for name, x in zip(NAMES, made, strict=True)}


def angles(t: int, d: int) -> Tensor:
    turns = torch.randn(1, 1, t, d // 2, generator=torch.Generator().manual_seed(t), dtype=torch.float64) * 3
    return torch.cat((turns.cos(), turns.sin()), dim=-1)


def by_newton(x: dict[str, Any], order: Callable[[Tensor], Tensor], causal: bool = True) -> Tensor:
    """-(G^-1 order(H) G) applied to minus the gradient, with autograd's gradient and Hessian H of a token's free energy in its q."""
    q, k, gram, temperature, newton = x.values()
    out = torch.empty_like(q)
    for b, h, t in itertools.product(*map(range, q.shape[:3])):
        keys = k[b, h, : t + 1] if causal else k[b, h]

        def energy(one: Tensor, keys: Tensor = keys, h: int = h) -> Tensor:
            distances = (one - keys).square().sum(-1)
            return -temperature[h] * torch.logsumexp(-distances / (2 * temperature[h]), 0)

        gradient = torch.func.grad(energy)(q[b, h, t])
        hessian = torch.func.hessian(energy)(q[b, h, t])
        # The paper learns T' apart from T: I - H is C / T, here C / T'.
        hessian = torch.eye(len(hessian), dtype=q.dtype) - (torch.eye(len(hessian), dtype=q.dtype) - hessian) * temperature[h] / newton[h]
        out[b, h, t] = torch.linalg.solve(gram[h], order(hessian) @ (gram[h] @ gradient))
    return out


@pytest.mark.parametrize("name", ["mha2nd1st", "mha2nd"])
def test_fixture(name: str) -> None:
    stored = load(name)
    leaves = {key: stored[f"in/{key}"].clone().requires_grad_() for key in ("z", "Wq", "Wk", "Wo", "T", "Tb")}
    z, w_q, w_k, w_o, t, t_newton = leaves.values()
    q, k = ((z @ w.mT)[None] for w in (w_q, w_k))
    step = second_order_attention(q, k, w_q @ w_q.mT, t, t_newton, exact=name == "mha2nd")
    y = z + torch.einsum("hde,bhte->td", w_o, step)
    grads = torch.autograd.grad((y * stored["w"]).sum(), tuple(leaves.values()))
    for got, key in ((y, "out/0"), *((grad, f"grad/{key}") for grad, key in zip(grads, leaves, strict=True))):
        torch.testing.assert_close(got, stored[key], rtol=1e-9, atol=1e-9)  # float64 on both sides; the fixtures' own tolerance


@pytest.mark.parametrize("causal", [True, False])
def test_exact_is_the_newton_step_of_autograd_s_hessian(causal: bool) -> None:
    x = inputs(5)
    torch.testing.assert_close(
        second_order_attention(*x.values(), exact=True, causal=causal), by_newton(x, torch.linalg.inv, causal), **ROUNDING
    )


def test_first_order_is_the_neumann_truncation_of_autograd_s_hessian() -> None:
    x = inputs(5)
    expected = by_newton(x, lambda hessian: 2 * torch.eye(len(hessian), dtype=hessian.dtype) - hessian)  # I + (I - H)
    torch.testing.assert_close(second_order_attention(*x.values()), expected, **ROUNDING)


@pytest.mark.parametrize("heads", [1, 2])
def test_with_orthonormal_rows_it_is_newton_in_the_token_s_own_space(heads: int) -> None:
    """Equation 27: the pseudoinverse of the Hessian in z. The paper's formula for it holds where W_Q W_Q^T = I."""
    x, width = inputs(4, b=1, h=heads), 4 * heads + 3
    w = torch.linalg.qr(torch.randn(width, 4 * heads, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0].mT
    w = w.unflatten(0, (heads, 4))
    z = torch.randn(4, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x |= {"q": (z @ w.mT)[None], "gram": w @ w.mT, "newton_temperature": x["temperature"]}
    steps = torch.einsum("hde,htd->hte", w, second_order_attention(*x.values(), exact=True)[0])
    for h, t in itertools.product(range(heads), range(4)):
        keys, temperature = x["k"][:, h : h + 1, : t + 1], x["temperature"][h : h + 1]

        def energy(one: Tensor, w: Tensor = w[h], keys: Tensor = keys, temperature: Tensor = temperature) -> Tensor:
            return free_energy((w @ one)[None, None, None], keys, temperature)[0, 0, 0]

        newton = torch.linalg.pinv(torch.func.hessian(energy)(z[t]), rtol=1e-9) @ torch.func.grad(energy)(z[t])
        torch.testing.assert_close(steps[h, t], newton, **ROUNDING)


def test_bias_is_gone_at_an_infinite_newton_temperature() -> None:
    x = inputs(6)
    p = (-torch.cdist(x["q"], x["k"]).square() / (2 * x["temperature"][:, None, None])).masked_fill(
        ~torch.ones(6, 6).tril().bool(), -torch.inf
    )
    r = x["q"] - p.softmax(-1) @ x["k"]
    for exact in (False, True):
        sizes = []
        for factor in (1e2, 1e4, 1e6):
            found = second_order_attention(**x | {"newton_temperature": factor * x["temperature"]}, exact=exact)
            sizes.append((found - r).abs().max())
        assert sizes[0] < 0.1 and sizes[1] < 0.02 * sizes[0] and sizes[2] < 0.02 * sizes[1]  # falls as 1 / T'


def test_the_first_token_steps_to_its_only_key() -> None:
    x = inputs(3)
    for exact in (False, True):
        found = second_order_attention(*x.values(), exact=exact)[:, :, 0]
        torch.testing.assert_close(found, x["q"][:, :, 0] - x["k"][:, :, 0], **ROUNDING)


@BOTH
def test_repeated_steps_find_a_minimum(exact: bool) -> None:
    """q - (r + b), again and again: a stationary point q = kbar of the free energy; where C < T the Newton step is much the faster."""
    x = inputs(6) | {"gram": torch.eye(4, dtype=torch.float64).expand(2, 4, 4)}
    x |= {"temperature": torch.full((2,), 8.0).double(), "newton_temperature": torch.full((2,), 8.0).double()}
    seen = allowed_pairs(torch.arange(6), 6, True, None)
    energies = [free_energy(x["q"], x["k"], x["temperature"], seen)]
    for _ in range(6 if exact else 30):
        x["q"] = x["q"] - second_order_attention(*x.values(), exact=exact)
        energies.append(free_energy(x["q"], x["k"], x["temperature"], seen))
    assert (energies[1] <= energies[0]).all() and (energies[-1] <= energies[0]).all()
    assert second_order_attention(*x.values(), exact=exact).abs().max() < 1e-9


@pytest.mark.parametrize("temperature", [0.5, 4.0])
def test_free_energy_is_the_definition_and_has_its_bounds(temperature: float) -> None:
    x = inputs(5)
    energies = torch.cdist(x["q"], x["k"]).square() / 2
    t = torch.full((2,), temperature, dtype=torch.float64)
    found = free_energy(x["q"], x["k"], t)
    torch.testing.assert_close(found, -temperature * (-energies / temperature).logsumexp(-1), **ROUNDING)
    least = energies.amin(-1)
    assert (found <= least).all() and (found >= least - temperature * torch.tensor(5.0).log()).all()


@BOTH
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("t", [1, 2, 5])
def test_gradcheck(t: int, turned: bool, exact: bool) -> None:
    x = inputs(t, b=1, d=2)
    x["gram"] = torch.linalg.cholesky(x["gram"])  # G is symmetric: it is varied through its factor
    turn = angles(t, 2) if turned else None

    def step(q: Tensor, k: Tensor, factor: Tensor, temperature: Tensor, newton: Tensor) -> Tensor:
        return second_order_attention(q, k, factor @ factor.mT, temperature, newton, exact=exact, turn=turn, jitter=0.1)

    assert torch.autograd.gradcheck(step, [tensor.requires_grad_() for tensor in x.values()])


@BOTH
def test_a_turn_is_keys_in_the_query_s_frame(exact: bool) -> None:
    x, turn = inputs(5), angles(5, 4)
    found = second_order_attention(*x.values(), exact=exact, turn=turn)
    for t in range(5):
        own = rotated(x["k"][:, :, : t + 1], turn[:, :, t : t + 1], back=True)
        alone = second_order_attention(**x | {"q": x["q"][:, :, t : t + 1], "k": own}, exact=exact)
        torch.testing.assert_close(found[:, :, t], alone[:, :, 0], **ROUNDING)


@BOTH
def test_blocks_change_nothing(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = {name: tensor.requires_grad_() for name, tensor in inputs(7).items()}
    valid = torch.arange(7) >= torch.tensor([[0], [3]])

    def run() -> list[Tensor]:
        o = second_order_attention(**x, exact=exact, valid=valid, turn=angles(7, 4))
        return [o, *torch.autograd.grad(o.square().sum(), tuple(x.values()))]

    whole = run()
    monkeypatch.setattr(reference, "BLOCK_TERMS_CPU", 4 * (32 if exact else 14))
    for got, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(got, expected, **ROUNDING)


@BOTH
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_no_bit_depends_on_later_tokens(at_once: int, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_TERMS_CPU", at_once * 4 * 16)
    x = inputs(9, dtype=torch.float32)
    before = second_order_attention(**x, exact=exact)
    for cut, factor in itertools.product((1, 4, 8), (3.0, 1e15)):
        later = {name: torch.cat((x[name][:, :, :cut], factor * x[name][:, :, cut:]), dim=2) for name in ("q", "k")}
        after = second_order_attention(**x | later, exact=exact)
        assert torch.equal(after[:, :, :cut], before[:, :, :cut])
        assert not torch.equal(after[:, :, cut:], before[:, :, cut:])
    q, k = x["q"].requires_grad_(), x["k"].requires_grad_()
    for grad in torch.autograd.grad(second_order_attention(**x, exact=exact)[:, :, :5].sum(), (q, k)):
        assert (grad[:, :, 5:] == 0).all() and (grad[:, :, :5] != 0).any()


@BOTH
@pytest.mark.parametrize("causal", [True, False])
def test_padding_counts_for_nothing(exact: bool, causal: bool) -> None:
    x = inputs(7)
    valid = torch.tensor([[False, False, True, True, True, True, True], [True, True, False, True, False, True, False]])
    found = second_order_attention(**x, exact=exact, causal=causal, valid=valid)
    assert found.isfinite().all()
    for row in range(2):
        kept = {name: x[name][row : row + 1, :, valid[row]] for name in ("q", "k")}
        alone = second_order_attention(**x | kept, exact=exact, causal=causal)
        torch.testing.assert_close(found[row, :, valid[row]], alone[0], **ROUNDING)


def test_float32_and_bfloat16() -> None:
    for t, exact in ((1, False), (2, True), (301, False)):
        x = inputs(t, d=16)
        truth = second_order_attention(**x, exact=exact)
        single = second_order_attention(**{name: tensor.float() for name, tensor in x.items()}, exact=exact)
        assert single.dtype == torch.float32 and relative(single, truth) < 2e-6  # float32 rounding, some tens of units
        rounded = {name: tensor.bfloat16() if name in "qk" else tensor for name, tensor in x.items()}
        truth = second_order_attention(**{name: tensor.double() for name, tensor in rounded.items()}, exact=exact)
        half = second_order_attention(**rounded, exact=exact)
        assert half.dtype == torch.bfloat16 and relative(half, truth) < 2**-8  # one rounding at the end


def test_jitter_is_relative_and_a_singular_gram_is_not_hidden() -> None:
    x = inputs(3)
    lifted = x["gram"] + torch.diag_embed(0.1 * x["gram"].diagonal(dim1=1, dim2=2).mean(1, keepdim=True).expand(2, 4))
    r = second_order_attention(**x | {"newton_temperature": torch.full((2,), torch.inf, dtype=torch.float64)})
    b = second_order_attention(**x) - r
    expected = torch.linalg.solve(lifted, x["gram"] @ b.mT).mT
    torch.testing.assert_close(second_order_attention(**x, jitter=0.1) - r, expected, **ROUNDING)
    singular = x | {"gram": x["gram"] * torch.tensor([-1.0, 1.0], dtype=torch.float64)[:, None, None]}
    found = second_order_attention(**singular)
    assert found[:, 0].isnan().all() and found[:, 1].isfinite().all()


def test_memory_is_linear_in_the_tokens() -> None:
    """What autograd keeps, counted: no term of tokens squared."""
    kept = []
    for t in (256, 512):
        total = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        x = {name: tensor.requires_grad_() for name, tensor in inputs(t, b=1).items()}
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            second_order_attention(**x)
        kept.append(total)
    assert kept[1] < 2.1 * kept[0] < 2.1 * 256 * 2 * 4 * 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 4)}, "q has shape"),
        ({"q": torch.zeros(2, 2, 3, 4).half()}, "use float64, float32 or bfloat16"),
        ({"k": torch.zeros(2, 2, 2, 4)}, r"expected \[2, 2, 3 or more, 4\]"),
        ({"gram": torch.zeros(2, 4, 3)}, "gram has shape"),
        ({"temperature": torch.ones(())}, "temperature has shape"),
        ({"newton_temperature": torch.ones(3)}, "newton_temperature has shape"),
        ({"valid": torch.ones(2, 3)}, r"expected \[2, 3\] bool"),
        ({"turn": torch.ones(1, 1, 2, 4)}, "turn has shape"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        second_order_attention(**{**inputs(3, dtype=torch.float32), **change})
    assert str(error.value).startswith("second_order_attention: ") and "\n" not in str(error.value)


# --- linear attention ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("t", [1, 2, 63, 64, 65, 200])
def test_linear_is_minus_the_gradient_of_its_energy(t: int, causal: bool) -> None:
    q, k, *_ = inputs(t).values()
    q.requires_grad_()
    energy = quadratic_energy(q, k, allowed_pairs(torch.arange(t), t, causal, None))
    (gradient,) = torch.autograd.grad(energy.sum(), q)
    o, state = energy_linear_attention(q, k, causal=causal)
    torch.testing.assert_close(o, -gradient, **ROUNDING)
    torch.testing.assert_close(state, k.mT @ k, **ROUNDING)


@pytest.mark.parametrize("t", [1, 2, 5])
def test_linear_gradcheck(t: int) -> None:
    q, k, *_ = (x.requires_grad_() for x in inputs(t, b=1, d=2).values())
    past = torch.eye(2, dtype=torch.float64).expand(1, 2, 2, 2).clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: energy_linear_attention(x[0], x[1], state=x[2]), (q, k, past))


def test_linear_in_parts_padded_and_causal() -> None:
    q, k, *_ = inputs(150).values()
    valid = torch.rand(2, 150, generator=torch.Generator().manual_seed(0)) > 0.3
    whole, last = energy_linear_attention(q, k, valid=valid)
    state, parts = None, []
    for piece in (slice(0, 70), slice(70, 71), slice(71, 150)):
        o, state = energy_linear_attention(q[:, :, piece], k[:, :, piece], valid=valid[:, piece], state=state)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, **ROUNDING)
    torch.testing.assert_close(state, last, **ROUNDING)
    for row in range(2):
        alone, _ = energy_linear_attention(q[row : row + 1, :, valid[row]], k[row : row + 1, :, valid[row]])
        torch.testing.assert_close(whole[row, :, valid[row]], alone[0], **ROUNDING)
    for cut, factor in itertools.product((1, 64, 100), (3.0, 1e15)):
        after, _ = energy_linear_attention(q, torch.cat((k[:, :, :cut], factor * k[:, :, cut:]), dim=2), valid=valid)
        assert torch.equal(after[:, :, :cut], whole[:, :, :cut])


def test_linear_float32_and_bfloat16() -> None:
    q, k, *_ = inputs(300).values()
    truth, _ = energy_linear_attention(q, k)
    assert relative(energy_linear_attention(q.float(), k.float())[0], truth) < 1e-6  # float32 rounding of sums of 300 terms
    q, k = q.bfloat16(), k.bfloat16()
    half, state = energy_linear_attention(q, k)
    assert half.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert relative(half, energy_linear_attention(q.double(), k.double())[0]) < 2**-8  # one rounding at the end


@pytest.mark.parametrize(
    ("q", "k", "known", "message"),
    [
        (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), {}, "not empty"),
        (torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4), {}, "both"),
        (torch.zeros(1, 1, 2, 4).half(), torch.zeros(1, 1, 2, 4).half(), {}, "use float64"),
        (torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), {"valid": torch.ones(1, 2)}, "bool"),
        (torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), {"state": torch.zeros(1, 1, 2, 4)}, "state is"),
    ],
)
def test_linear_refuses_bad_arguments_in_one_line(q: Tensor, k: Tensor, known: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        energy_linear_attention(q, k, **known)  # type: ignore[arg-type]
    assert str(error.value).startswith("energy_linear_attention: ") and "\n" not in str(error.value)
