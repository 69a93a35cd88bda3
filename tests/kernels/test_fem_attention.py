from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.fem_attention.reference as reference
from kernels.fem_attention import fem_attention
from tests.kernels.oracle import NAMES, definition, inputs, load, mu_and_free_energy, relative, results

IMPLEMENTATIONS = ("fused", "reference")
SWITCHES = [("beta", "lam", "gate"), ("beta", "lam"), ("beta", "gate"), ("beta",), ("gate",), ()]

both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def free_energy(x: dict[str, Any], implementation: str, **changed: Tensor) -> Tensor:
    x = x | changed
    return fem_attention(x["q"], x["k"], x["v"], x["beta"], implementation=implementation)


def expectation(x: dict[str, Any], implementation: str) -> Tensor:
    return fem_attention(x["q"], x["k"], x["v"], implementation=implementation)


@both
@pytest.mark.parametrize("name", ["fem_read_normal", "fem_read_adversarial"])
def test_fixture(name: str, implementation: str) -> None:
    stored = load(name)
    x: dict[str, Any] = {key: stored[f"in/{'g' if key == 'gate' else key}"] for key in NAMES}
    x = {key: (t if key == "beta" else t[None])[None].requires_grad_() for key, t in x.items()}
    o = fem_attention(**x, implementation=implementation)
    gradients = torch.autograd.grad((o[0, 0] * stored["w"]).sum(), list(x.values()))
    results = {"out/0": o, "out/1": expectation(x, implementation), "out/2": free_energy(x, implementation)}
    results |= {f"grad/{'g' if key == 'gate' else key}": gradient for key, gradient in zip(x, gradients, strict=True)}
    for key, got in results.items():
        # float64 on both sides; the fixtures' own tolerance
        torch.testing.assert_close(
            got.reshape(stored[key].shape), stored[key], rtol=1e-9, atol=1e-9 * float(stored[key].abs().max()), msg=key
        )


@both
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("present", SWITCHES, ids="+".join)
def test_gradcheck(present: tuple[str, ...], causal: bool, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_TERMS_CPU", 16)  # two queries of one head a block: block edges are differentiated too
    for queries, value_range in ((4, 3.0), (2, 20.0)):  # kappa = 1 and kappa = 0; decoding in the second
        x = inputs(4, queries=queries, batch=1, heads=2, dk=3, dv=2, value_range=value_range)
        names = ("q", "k", "v", *present)

        def read(*tensors: Tensor, names: tuple[str, ...] = names) -> Tensor:
            given: dict[str, Any] = dict(zip(names, tensors, strict=True))
            return fem_attention(**given, causal=causal, implementation=implementation)

        assert torch.autograd.gradcheck(read, tuple(x[name].requires_grad_() for name in names))


@both
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("tokens", "queries"), [(1, 1), (2, 2), (2, 1), (7, 7), (37, 37), (37, 5), (64, 64)])
def test_equals_the_definition(tokens: int, queries: int, causal: bool, implementation: str) -> None:
    x = inputs(tokens, queries=queries)
    mu, free = mu_and_free_energy(x["q"], x["k"], x["v"], x["beta"], causal)
    got = fem_attention(**x, causal=causal, implementation=implementation)
    # float64 rounding (1e-16) times the few hundred terms of a sum
    torch.testing.assert_close(got, x["gate"] * (mu + x["lam"] * (free - mu)), rtol=1e-12, atol=1e-12)


@both
def test_free_energy_lies_between_mean_and_maximum_and_is_a_divergence(implementation: str) -> None:
    for beta, value_range in ((0.02, None), (1.95, None), (40.0, None), (1.0, 79.0)):
        x = inputs(beta=beta, value_range=value_range)
        mu, free = expectation(x, implementation), free_energy(x, implementation)
        rounding = 1e-12 * float(x["v"].abs().max())  # float64
        assert (free >= mu - rounding).all()
        assert (free <= x["v"].cummax(2).values + rounding).all()
        log_p = (x["q"] @ x["k"].mT * 8**-0.5).masked_fill(torch.ones(33, 33, dtype=torch.bool).triu(1), -torch.inf).log_softmax(-1)
        log_ratio = beta * (free[:, :, :, None] - x["v"][:, :, None])  # log p - log of the posterior q = p exp(beta (v - F))
        divergence = (log_p.exp()[..., None] * log_ratio).sum(3)
        # F - mu = KL(p || q) / beta; the log loses digits by its division through a small beta
        torch.testing.assert_close(free - mu, divergence / beta, rtol=1e-9, atol=1e-13 / beta + rounding)


@both
def test_free_energy_rises_with_beta_and_starts_at_the_mean(implementation: str) -> None:
    x = inputs()
    mu = expectation(x, implementation)
    reads = [free_energy(x, implementation, beta=torch.full_like(x["beta"], beta)) for beta in (1e-3, 0.05, 0.5, 2.0, 10.0, 80.0)]
    for lower, higher in zip(reads, reads[1:], strict=False):
        assert (higher >= lower - 1e-12).all()  # equal where a row has one token; float64 rounding there
    assert (reads[-1] - reads[0]).max() > 0.5
    spread = x["v"].cummax(2).values - x["v"].cummin(2).values
    # Hoeffding's lemma: F - mu <= beta range^2 / 8; the log's rounding is 1e-16 / beta
    assert (reads[0] - mu <= 1e-3 * spread.square() / 8 + 1e-12).all()


@both
def test_lambda_is_a_temperature_between_none_and_beta(implementation: str) -> None:
    """(1 - lam) mu + lam F(beta) is F at an inverse temperature between 0 and beta that rises with lam (the paper's hidden temperature)."""
    x = inputs(tokens=9, heads=1, batch=1)
    log_p = (x["q"] @ x["k"].mT * 8**-0.5).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf).log_softmax(-1)

    def at(temperature: Tensor) -> Tensor:  # [b, h, t, dv]: one for each token and channel
        return (log_p[..., None] + temperature[:, :, :, None] * x["v"][:, :, None]).logsumexp(3) / temperature

    def hidden(lam: float) -> Tensor:
        mixed = fem_attention(x["q"], x["k"], x["v"], x["beta"], torch.full_like(x["lam"], lam), implementation=implementation)
        low, high = torch.full_like(mixed, 1e-9), x["beta"][:, None].expand_as(mixed)
        for _ in range(60):
            middle = (low + high) / 2
            under = at(middle) < mixed
            low, high = torch.where(under, middle, low), torch.where(under, high, middle)
        return low[:, :, 1:]  # the first token has one key: every temperature gives its value

    found = [hidden(lam) for lam in (0.05, 0.3, 0.6, 0.95)]
    # 1e-3: far under the steps, far over what 60 bisections leave.
    assert all((higher - lower > 1e-3).all() for lower, higher in zip(found, found[1:], strict=False))
    assert (found[0] > 0).all() and (found[-1] < x["beta"].max()).all()


@both
def test_shift_law(implementation: str) -> None:
    x = inputs()
    shift = torch.linspace(-50, 50, 4, dtype=torch.float64)
    # F(v + c) = F(v) + c: float64 rounding at size 50
    torch.testing.assert_close(free_energy(x, implementation, v=x["v"] + shift), free_energy(x, implementation) + shift, rtol=0, atol=1e-11)


@both
def test_without_temperature_and_gate_it_is_standard_attention(implementation: str) -> None:
    x = inputs(dtype=torch.float32)
    standard = F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True)
    closed = fem_attention(**x | {"lam": torch.zeros_like(x["lam"]), "gate": torch.ones_like(x["gate"])}, implementation=implementation)
    # sums of 33 terms of size 1 in float32 (eps 6e-8), in two orders
    torch.testing.assert_close(closed, standard, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(expectation(x, implementation), standard, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("terms", [1, 500, 1 << 18])
@pytest.mark.parametrize("extreme", [3.0, 1e4, 1e30])
def test_reference_outputs_do_not_move_by_a_bit_when_later_tokens_change(
    terms: int, extreme: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "BLOCK_TERMS_CPU", terms)
    x = inputs(dtype=torch.float32)
    before = fem_attention(**x, implementation="reference")
    for cut in (1, 16, 32):
        changed = {name: t.clone() for name, t in x.items()}
        for name in ("q", "k", "v"):
            changed[name][:, :, cut:] *= -extreme if name == "v" else 5.0
        after = fem_attention(**changed, implementation="reference")
        assert torch.equal(after[:, :, :cut], before[:, :, :cut])
        assert not torch.equal(after[:, :, cut:], before[:, :, cut:])


def test_fused_outputs_move_by_rounding_when_later_tokens_change() -> None:
    x = inputs(dtype=torch.float32)
    before = fem_attention(**x, implementation="fused")
    for cut in (1, 16, 32):
        changed = x | {name: torch.cat((x[name][:, :, :cut], -6 * x[name][:, :, cut:]), 2) for name in ("q", "k", "v")}
        after = fem_attention(**changed, implementation="fused")
        # the centre moves with later values, so float32 rounding of outputs of size 1 does
        torch.testing.assert_close(after[:, :, :cut], before[:, :, :cut], rtol=1e-6, atol=1e-6)
        assert not torch.allclose(after[:, :, cut:], before[:, :, cut:], atol=1e-2)


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_later_tokens_are_exactly_zero(implementation: str, dtype: torch.dtype) -> None:
    x = {name: t.requires_grad_() for name, t in inputs(value_range=40.0, dtype=dtype).items()}
    gradients = torch.autograd.grad(
        fem_attention(**x, implementation=implementation)[:, :, :20].square().sum(), [x[n] for n in ("q", "k", "v")]
    )
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert (gradient[:, :, 20:] == 0).all()
        assert (gradient[:, :, :20] != 0).any(-1).sum() >= 19 * 6  # the first row's q and k cannot matter


@both
@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_decoding_equals_the_parallel_forward(implementation: str, step: int, dtype: torch.dtype, tolerance: float) -> None:
    x = inputs(33, value_range=30.0, dtype=dtype)
    parallel = fem_attention(**x, implementation=implementation)
    for end in range(1, 34, step):
        rows = slice(max(0, end - step), end)
        part = {name: t if name == "beta" else t[:, :, : end if name in "kv" else None] for name, t in x.items()}
        part |= {name: x[name][:, :, rows] for name in ("q", "lam", "gate")}
        # another centre and other sums: rounding of values up to 8 (float64 1e-16, float32 1e-7 each), a few dozen terms
        torch.testing.assert_close(
            fem_attention(**part, implementation=implementation), parallel[:, :, rows], rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("terms", [1, 100, 1000])
def test_reference_blocks_change_nothing_but_memory(terms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> list[Tensor]:
        x = {name: t.requires_grad_() for name, t in inputs(23, queries=19, value_range=300.0).items()}
        o = fem_attention(**x, implementation="reference")
        return [o, *torch.autograd.grad(o.square().sum(), list(x.values()))]

    whole = read()
    monkeypatch.setattr(reference, "BLOCK_TERMS_CPU", terms)
    for got, expected in zip(read(), whole, strict=True):
        assert relative(got, expected) < 1e-13  # float64 sums in another order


@pytest.mark.parametrize(("n", "tq", "tk", "dv"), [(8, 2048, 2048, 64), (24, 256, 256, 16), (2, 1, 9000, 64), (5, 7, 7, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_reference_blocks_are_bounded_and_cover_every_query_once(n: int, tq: int, tk: int, dv: int, causal: bool) -> None:
    seen = torch.zeros(n, tq, dtype=torch.int32)
    for heads, rows, keys in reference._blocks(torch.empty(n, tq, 1), torch.empty(n, tk, dv), causal):
        terms = (heads.stop - heads.start) * (rows.stop - rows.start) * keys.stop * dv
        assert terms <= max(reference.BLOCK_TERMS_CPU, tk * dv)
        assert keys.stop == (rows.stop + tk - tq if causal else tk)
        seen[heads, rows] += 1
    assert (seen == 1).all()


def test_values_over_two_hundred_stay_exact_in_float32() -> None:
    x = inputs(beta=2.0, value_range=400.0)
    x = {name: t.float().double() for name, t in x.items()}
    truth, w = results(definition, x, torch.float64), results(reference_read, x, torch.float32)
    for name, got, expected in zip(("o", *NAMES), w, truth, strict=True):
        # float32 rounding of exponents up to 200 (1e-5 of the posterior at the worst term)
        assert relative(got, expected) < 1e-5, name


def reference_read(*tensors: Tensor) -> Tensor:
    return fem_attention(*tensors, implementation="reference")


@both
def test_grouped_heads_are_repeated_heads(implementation: str) -> None:
    x = inputs(heads=2)
    queries = inputs(heads=6, seed=1)
    grouped = x | {name: queries[name] for name in ("q", "lam", "gate")}
    repeated = grouped | {name: x[name].repeat_interleave(3, 0 if name == "beta" else 1) for name in ("k", "v", "beta")}
    o, same = (fem_attention(**given, implementation=implementation) for given in (grouped, repeated))
    torch.testing.assert_close(o, same, rtol=1e-13, atol=1e-13)  # float64 rounding


@both
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_documents_are_read_apart(implementation: str, causal: bool) -> None:
    x = inputs(23, batch=1)
    o = fem_attention(**x, causal=causal, cu_seqlens=torch.tensor([0, 4, 4, 17, 23]), implementation=implementation)
    for start, end in ((0, 4), (4, 17), (17, 23)):
        alone = {name: t if name == "beta" else t[:, :, start:end] for name, t in x.items()}
        expected = fem_attention(**alone, causal=causal, implementation=implementation)
        torch.testing.assert_close(o[:, :, start:end], expected, rtol=1e-12, atol=1e-12)  # float64 rounding, another centre


@both
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("queries", [12, 5])
def test_padding_keys_are_not_there(implementation: str, causal: bool, queries: int) -> None:
    x = inputs(12, queries=queries, batch=1)
    valid = torch.ones(1, 12, dtype=torch.bool)
    valid[:, [0, 1, 8]] = False
    kept = valid[0].nonzero().flatten()
    rows = kept[kept >= 12 - queries] - (12 - queries)
    alone = {name: t if name == "beta" else t[:, :, kept if name in "kv" else rows] for name, t in x.items()}
    x["v"][:, :, ~valid[0]] = 20.0
    leaves = [t.requires_grad_() for t in x.values()]
    o = fem_attention(**x, causal=causal, keys_valid=valid, implementation=implementation)
    # float64 rounding, exponents up to 40 where padding widens the range
    torch.testing.assert_close(o[:, :, rows], fem_attention(**alone, causal=causal, implementation=implementation), rtol=1e-10, atol=1e-10)
    assert o.isfinite().all()
    gradients = torch.autograd.grad(o[:, :, rows].square().sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all((gradients[place][:, :, ~valid[0]] == 0).all() for place in (1, 2))  # k and v


BAD: dict[str, dict[str, Any]] = {
    "q has shape": {"q": torch.zeros(3, 5, 8)},
    "k has shape": {"k": torch.zeros(2, 3, 5, 9)},
    "v has shape": {"v": torch.zeros(1, 3, 5, 4)},
    "3 query heads are not a multiple of v's 2 heads": {"v": torch.zeros(2, 2, 5, 4)},
    "beta has shape": {"beta": torch.ones(4)},
    "lam has shape": {"lam": torch.zeros(2, 3, 4, 4)},
    "gate has shape": {"gate": torch.zeros(2, 3, 5, 1)},
    "needs beta": {"beta": None},
    "empty dimension": {"q": torch.zeros(2, 3, 0, 8), "lam": None, "gate": None},
    "6 queries but 5 keys": {"q": torch.zeros(2, 3, 6, 8), "lam": None, "gate": None},
    "q is torch.float16": {"q": torch.zeros(2, 3, 5, 8, dtype=torch.float16)},
    "v is torch.bfloat16": {"v": torch.zeros(2, 3, 5, 4, dtype=torch.bfloat16)},
    "lam is torch.float64": {"lam": torch.zeros(2, 3, 5, 4, dtype=torch.float64)},
    "k is on meta": {"k": torch.zeros(2, 3, 5, 8, device="meta")},
    "keys_valid is torch.bool": {"keys_valid": torch.ones(2, 4, dtype=torch.bool)},
    "keys_valid is torch.float32": {"keys_valid": torch.ones(2, 5)},
    "'fast' is not one of auto, decode, .*triton, .*fused, reference": {"implementation": "fast"},
    "'cudnn' cannot run: no GPU; use auto": {"implementation": "cudnn"},
    "cu_seqlens is torch.float32": {"cu_seqlens": torch.tensor([0.0, 5.0])},
    "cu_seqlens is torch.int32": {"cu_seqlens": torch.tensor([5], dtype=torch.int32)},
    "cu_seqlens needs a batch of 1": {"cu_seqlens": torch.tensor([0, 5])},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused_in_one_line(message: str) -> None:
    good = inputs(5, dtype=torch.float32)
    fem_attention(**good)
    with pytest.raises(ValueError, match=message) as error:
        fem_attention(**good | BAD[message])
    assert str(error.value).startswith("fem_attention: ") and "\n" not in str(error.value)


def test_scale_is_applied_and_defaults_to_the_query_width() -> None:
    x = inputs()
    for implementation in IMPLEMENTATIONS:
        assert torch.equal(
            fem_attention(**x, implementation=implementation), fem_attention(**x, scale=8**-0.5, implementation=implementation)
        )
        twice = fem_attention(**x | {"q": 2 * x["q"]}, scale=8**-0.5 / 2, implementation=implementation)
        torch.testing.assert_close(twice, fem_attention(**x, implementation=implementation), rtol=1e-13, atol=1e-13)  # float64 rounding
    assert inspect.signature(fem_attention).parameters["scale"].default is None
