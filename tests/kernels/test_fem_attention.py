"""Tests of fem_attention beyond the contract of ``test_cases``.

They cover the choice of the form, the rounding of the fast forms, wild heads (heads whose values
exceed the fast form's range), autograd's graph, and decoding.
"""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from kernels.check import relative, results
from kernels.fem_attention import accelerated, fem_attention
from kernels.fem_attention.cases import KNOWN, TENSORS, definition
from kernels.fem_attention.cases import inputs as made
from kernels.fem_attention.triton.decode import decode
from kernels.implementations import OncePerMessage
from tests.kernels.operations import Waits

SIZE = {"batch": 2, "heads": 2, "tokens": 21, "dk": 16, "dv": 8}
engines = pytest.mark.parametrize("engine", ["sdpa", "triton"])
fast_and_exact = pytest.mark.parametrize("implementation", ["fused", "reference", "sdpa", "triton"])


def inputs(dtype: torch.dtype = torch.float32, **changed: Any) -> dict[str, Any]:
    """Return q, k, v, beta, lam, and gate in ``dtype``, all differentiable."""
    x = made(
        {**SIZE, **{name: changed.pop(name) for name in (*SIZE,) if name in changed}}, **changed
    )
    return {name: x[name].to(dtype).requires_grad_() for name in TENSORS if x[name] is not None}


def copied(x: dict[str, Tensor]) -> dict[str, Any]:
    return {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in x.items()}


def total(o: Tensor) -> Tensor:
    return (o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum()


def gradients(x: dict[str, Any], **arguments: Any) -> dict[str, Tensor]:
    o = fem_attention(**x, **arguments)
    names = [name for name in x if x[name].requires_grad]
    return {
        "o": o.detach(),
        **dict(zip(names, torch.autograd.grad(total(o), [x[name] for name in names]), strict=True)),
    }


# --- choice of the form ---------------------------------------------------------------------------


@fast_and_exact
def test_without_temperature_and_gate_it_is_standard_attention(implementation: str) -> None:
    x = inputs()
    standard = F.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True)
    closed = x | {"lam": torch.zeros_like(x["lam"]), "gate": torch.ones_like(x["gate"])}
    # The tolerance is for sums of 21 terms of size 1 in two orders.
    for given in (closed, {name: x[name] for name in ("q", "k", "v")}):
        torch.testing.assert_close(
            fem_attention(**given, implementation=implementation), standard, rtol=2e-6, atol=2e-6
        )
    twice = fem_attention(
        **x | {"q": 2 * x["q"]}, scale=16**-0.5 / 2, implementation=implementation
    )
    torch.testing.assert_close(
        twice, fem_attention(**x, implementation=implementation), rtol=1e-5, atol=1e-6
    )


def weighed(x: dict[str, Tensor]) -> Tensor:
    """Return the logarithms of the prior, the causal softmax weights, [b, h, queries, keys]."""
    scores = x["q"] @ x["k"].mT * x["q"].shape[-1] ** -0.5
    return scores.masked_fill(
        torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf
    ).log_softmax(-1)


@fast_and_exact
@pytest.mark.parametrize(("beta", "uniform"), [(0.02, 2.0), (1.95, 2.0), (40.0, 0.9), (1.0, 39.0)])
def test_the_gap_is_a_divergence_and_the_free_energy_shifts_with_its_values(
    implementation: str, beta: float, uniform: float
) -> None:
    """The gap is a divergence: F - mu = KL(p || q) / beta with the posterior q.

    q = p exp(beta (v - F)); mu <= F <= the greatest value; F(v + c) = F(v) + c.
    """
    dtype = torch.float32 if implementation in ("sdpa", "triton") else torch.float64
    x = {name: t.detach() for name, t in inputs(dtype, beta=beta, uniform=uniform).items()}
    ones = torch.ones_like(x["v"])
    mu = fem_attention(x["q"], x["k"], x["v"], x["beta"], 0 * ones, implementation=implementation)
    free = fem_attention(x["q"], x["k"], x["v"], x["beta"], ones, implementation=implementation)
    # Rounding of sums over 21 tokens of the values' size, and of a logarithm divided by beta.
    rounding = 20 * torch.finfo(dtype).eps * (uniform + 1 / beta)
    assert (free >= mu - rounding).all() and (free <= x["v"].cummax(2).values + rounding).all()
    log_p = weighed(x)
    divergence = (log_p.exp()[..., None] * beta * (free[:, :, :, None] - x["v"][:, :, None])).sum(3)
    torch.testing.assert_close(free - mu, divergence / beta, rtol=0, atol=3 * rounding)
    posterior = (log_p[..., None] + beta * (x["v"][:, :, None] - free[:, :, :, None])).logsumexp(3)
    torch.testing.assert_close(posterior, torch.zeros_like(free), rtol=0, atol=3 * rounding * beta)
    shift = torch.linspace(-8, 8, ones.shape[-1], dtype=dtype)
    shifted = fem_attention(
        x["q"], x["k"], x["v"] + shift, x["beta"], ones, implementation=implementation
    )
    torch.testing.assert_close(
        shifted, free + shift, rtol=0, atol=3 * rounding + 8 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_lambda_is_a_temperature_between_none_and_beta(implementation: str) -> None:
    """Each lam corresponds to an inverse temperature, the paper's hidden temperature.

    (1 - lam) mu + lam F(beta) equals F at an inverse temperature between 0 and beta that rises with
    lam.
    """
    x = {name: t.detach() for name, t in inputs(torch.float64, tokens=9, heads=1, batch=1).items()}
    log_p = weighed(x)

    # temperature: [b, h, t, dv], one for each token and channel
    def at(temperature: Tensor) -> Tensor:
        return (log_p[..., None] + temperature[:, :, :, None] * x["v"][:, :, None]).logsumexp(
            3
        ) / temperature

    def hidden(lam: float) -> Tensor:
        mixed = fem_attention(
            x["q"],
            x["k"],
            x["v"],
            x["beta"],
            torch.full_like(x["lam"], lam),
            implementation=implementation,
        )
        low = torch.full_like(mixed, 1e-9)
        high = x["beta"][:, None].expand_as(mixed)
        for _ in range(60):
            middle = (low + high) / 2
            under = at(middle) < mixed
            low = torch.where(under, middle, low)
            high = torch.where(under, high, middle)
        # The first token has one key, so that every temperature gives the same value.
        return low[:, :, 1:]

    found = [hidden(lam) for lam in (0.05, 0.3, 0.6, 0.95)]
    # 1e-3 is far below the steps and far above the error of 60 bisections.
    assert all(
        (higher - lower > 1e-3).all() for lower, higher in zip(found, found[1:], strict=False)
    )
    assert (found[0] > 0).all() and (found[-1] < x["beta"].max()).all()


@fast_and_exact
def test_an_output_moves_by_rounding_at_most_when_later_tokens_change(implementation: str) -> None:
    x = inputs()
    later = x.copy()
    for name, t in x.items():
        if name != "beta":
            later[name] = torch.cat((t[:, :, :13], 1.5 * t[:, :, 13:].flip(2)), 2)
    with torch.no_grad():
        o, moved = (fem_attention(**given, implementation=implementation) for given in (x, later))
    # The later tokens move the values' centre, which changes float32's rounding.
    torch.testing.assert_close(moved[:, :, :13], o[:, :, :13], rtol=1e-5, atol=1e-6)
    assert (o[:, :, 13:] - moved[:, :, 13:]).abs().max() > 0.01
    for gradient in torch.autograd.grad(
        fem_attention(**x, implementation=implementation)[:, :, :13].sum(), [x[n] for n in "qkv"]
    ):
        assert (gradient[:, :, 13:] == 0).all() and (gradient[:, :, :13] != 0).any()


@pytest.mark.parametrize("implementation", ["auto", "fused"])
def test_beyond_its_range_the_reference_runs_and_it_is_reported_once(
    implementation: str, messages: pytest.LogCaptureFixture
) -> None:
    x = inputs(uniform=50.0)
    with torch.no_grad():
        x["v"][0, 0, 3:5, 0] = torch.tensor([-100.0, 100.0])
    truth = gradients(x, implementation="reference")
    messages.clear()
    for _ in range(2):
        assert all(
            torch.equal(got, truth[name])
            for name, got in gradients(x, implementation=implementation).items()
        )
    (record,) = [record for record in messages.records if record.levelname == "WARNING"]
    assert len(messages.records) == 2
    assert "over 80: the exact reference" in record.getMessage()
    assert "\n" not in record.getMessage()
    ranges = x["v"].amax(2, keepdim=True) - x["v"].amin(2, keepdim=True)
    assert f"{float((x['beta'][:, None] * ranges).max()):.4g}" in record.getMessage()
    for value in (81.0, float("inf"), float("nan")):  # one channel is enough
        logging.getLogger("kernels.fem_attention").filters[:] = [OncePerMessage()]
        messages.clear()
        wild = inputs(torch.float64, uniform=1.0, beta=1.0)
        with torch.no_grad():
            wild["v"][1, 1, 7, 3] = value
        fem_attention(**wild)
        assert "the exact reference" in messages.text


@pytest.mark.parametrize("beta", [0.02, 0.05])
def test_bfloat16_free_energy_gap_keeps_its_digits_at_small_beta(beta: float) -> None:
    x = {name: t.detach().bfloat16() for name, t in inputs(beta=beta, tokens=128).items()}
    wide = {name: x[name].double() for name in ("q", "k", "v", "beta")}
    others: dict[str, Any] = dict.fromkeys((*TENSORS, *KNOWN[1:])) | {"causal": True}
    mu = definition(others | wide | {"beta": None})[0]
    free_energy = definition(others | wide)[0]
    # lam is float32 with bfloat16 inputs; its gradient is F - mu.
    lam = torch.full(mu.shape, 0.5, requires_grad=True)
    o = fem_attention(x["q"], x["k"], x["v"], x["beta"].float(), lam, implementation="fused")
    # F - mu is about beta / 2, 1% of the values. Reading exp(x) - 1 in bfloat16 would lose 4% to
    # 10% of it, and exp(x) all of it. bfloat16's eps is 0.4%.
    assert relative(torch.autograd.grad(o.float().sum(), lam)[0], free_energy - mu) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_range", [1.0, 6.0, 70.0])
def test_free_energy_is_never_under_the_mean_whatever_the_rounding(
    value_range: float, dtype: torch.dtype
) -> None:
    x = inputs(dtype, uniform=value_range, sharpness=8.0, tokens=64)
    lam = x["lam"].detach().float().requires_grad_()
    (gap,) = torch.autograd.grad(
        fem_attention(x["q"], x["k"], x["v"], x["beta"], lam, implementation="fused").float().sum(),
        lam,
    )
    assert (gap >= 0).all() and gap.max() > 0.01
    # Neighbouring bfloat16 numbers: the mean of the first three values, 144.33, rounds to 144, as
    # if no value were larger.
    v = torch.tensor([144.0, 144.0, 145.0, 146.0], dtype=torch.bfloat16)[
        None, None, :, None
    ].requires_grad_()
    q = torch.zeros(1, 1, 4, 2, dtype=torch.bfloat16)
    beta = torch.full((1, 1), 2.45, dtype=torch.bfloat16, requires_grad=True)
    o = fem_attention(q, q, v, beta, implementation="fused")
    assert all(t.isfinite().all() for t in (o, *torch.autograd.grad(o.float().sum(), (v, beta))))


@pytest.mark.parametrize(
    ("dv", "past", "beta"), [(8, 0, True), (16, 5, True), (16, 32, False), (8, 32, True)]
)
def test_cpu_runs_the_flash_kernel_whatever_the_widths(dv: int, past: int, beta: bool) -> None:
    x = inputs(dv=dv, tokens=33 - past, past=past)
    arguments = (x["q"], x["k"], x["v"], *((x["beta"], x["lam"]) if beta else ()))
    # The context raises RuntimeError if the flash kernel cannot take the call.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fem_attention(*arguments, implementation="fused").sum().backward()
    with pytest.raises(RuntimeError), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        fem_attention(*arguments, implementation="fused")


# --- code around an engine ------------------------------------------------------------------------


@engines
def test_a_wild_channel_leaves_other_heads_and_blocks_as_they_were_to_the_bit(engine: str) -> None:
    calm = inputs(dv=24)
    wild = copied(calm)
    with torch.no_grad():
        wild["v"][1, 0, :, 3] *= 100
    before, after = gradients(calm, implementation=engine), gradients(wild, implementation=engine)
    assert all(
        torch.equal(again, after[name])
        for name, again in gradients(wild, implementation=engine).items()
    )
    exact = gradients(wild, implementation="reference")
    for name, got in after.items():
        assert relative(got, exact[name]) < 1e-5, name  # documented bound of float32
        if name != "beta":
            assert torch.equal(got[0], before[name][0])
            assert torch.equal(got[1, 1], before[name][1, 1])
            assert not torch.equal(got[1, 0], before[name][1, 0])
            assert name in "qk" or torch.equal(got[1, 0, :, 16:], before[name][1, 0, :, 16:])
    later: Any = {
        name: t if name == "beta" else torch.cat((t[:, :, :13], -5 * t[:, :, 13:]), 2)
        for name, t in wild.items()
    }
    # The exact form's rows do not depend on later tokens, bit for bit.
    assert torch.equal(
        fem_attention(**later, implementation=engine)[1, 0, :13, :16], after["o"][1, 0, :13, :16]
    )


def test_one_wild_channel_costs_one_blocks_exact_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wild channel costs the exact computation of one block of channels.

    The cost is the number of exponentials in forward and backward. The kernels before and after the
    engine compute the same number of them for all values.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    own, found = InterpreterBuilder.create_exp2, 0

    def create_exp2(builder: Any, x: Any) -> Any:
        nonlocal found
        found += x.data.size
        return own(builder, x)

    def exponentials(*channels: int) -> int:
        nonlocal found
        x = inputs(batch=1, heads=1, dv=64)
        with torch.no_grad():
            x["v"][..., list(channels)] *= 100
        found = 0
        gradients(x, implementation="sdpa")
        return found

    monkeypatch.setattr(InterpreterBuilder, "create_exp2", create_exp2)
    calm, one = exponentials(), exponentials(17)
    assert exponentials(16, 23, 31) == one > calm
    # Four blocks cost four times as much as one, except for the pairs' probabilities, which dq and
    # dk need only once: 1 exponential per pair in addition to 16 per block.
    assert 4 * (one - calm) < 1.05 * (exponentials(0, 17, 40, 63) - calm)


def not_finite() -> list[Any]:
    """Return (name of the argument left out, value) parameters; every other one is slow."""
    made = []
    for without, values in (
        ("", ("inf", "-inf", "1e30", "nan")),
        ("lam", ("-inf", "inf", "nan", "1e30")),
    ):
        for n, value in enumerate(values):
            marks = [pytest.mark.slow] if n % 2 else []
            made.append(pytest.param(without, float(value), id=f"{without}-{value}", marks=marks))
    return made


@engines
@pytest.mark.parametrize(("without", "value"), not_finite())
def test_a_value_that_is_not_finite_stays_in_its_head(
    engine: str, value: float, without: str
) -> None:
    x = inputs(dv=20)
    x = {name: t for name, t in x.items() if name != without}
    with torch.no_grad():
        x["v"][1, 0, 9, 3] = value
    got = gradients(x, implementation=engine)
    expected = fem_attention(**x, implementation="reference")
    torch.testing.assert_close(
        got["o"][:, :, 9:], expected[:, :, 9:], rtol=1e-5, atol=1e-5, equal_nan=True
    )
    with torch.no_grad():
        x["v"][1, 0, 9:, 3] = 0
    for name in set(got) - {"beta"}:
        assert got[name][0].isfinite().all() and got[name][1, 1].isfinite().all()
    truth = gradients(x, implementation="reference")
    # These rows do not read the value.
    assert all(relative(got[name][:, :, :9], truth[name][:, :, :9]) < 1e-5 for name in "oq")


@engines
def test_calls_without_gradients_and_gradients_of_some_inputs_give_the_same_bits(
    engine: str,
) -> None:
    x = inputs()
    full = gradients(x, implementation=engine)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(fem_attention(**x, implementation=engine), full["o"])
    for requested in (("v",), ("q", "beta", "gate")):
        given = {name: t if name in requested else t.detach() for name, t in x.items()}
        assert all(
            torch.equal(got, full[name])
            for name, got in gradients(given, implementation=engine).items()
        )


def test_float32_gates_next_to_bfloat16() -> None:
    x = inputs(torch.bfloat16)
    mixed = {
        name: t.detach().float().requires_grad_() if name in ("beta", "lam", "gate") else t
        for name, t in x.items()
    }
    got, expected = (gradients(copied(mixed), implementation=how) for how in ("sdpa", "fused"))
    assert {name: t.dtype for name, t in got.items()} == {
        name: t.dtype for name, t in mixed.items()
    } | {"o": torch.bfloat16}
    # bfloat16 rounding in two implementations of the same attention
    assert all(relative(got[name], expected[name]) < 0.01 for name in got)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_remakes_a_block_once_with_the_same_gradients(reentrant: bool) -> None:
    """A checkpoint recomputes a block only once.

    The backward of the inner graph is a second autograd task. Unpacking its saved tensors must not
    make the checkpoint recompute again.
    """
    x = inputs()
    direct = gradients(inputs(), implementation="sdpa")
    forwards = 0

    def block(*tensors: Tensor) -> Tensor:
        nonlocal forwards
        forwards += 1
        outputs = (
            fem_attention(*(t * 1.0 for t in tensors), implementation="sdpa") for _ in range(2)
        )
        return sum(outputs, torch.zeros(()))

    total(checkpoint(block, *x.values(), use_reentrant=reentrant)).backward()
    assert forwards == 2 and all(torch.equal(x[name].grad, 2 * direct[name]) for name in x)


class Graft(torch.autograd.Function):
    """Identity that makes a tensor an inner node of a graph without copying its memory."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, t: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].sum(), None


def test_what_is_saved_goes_through_the_hooks_and_nothing_else_is_held() -> None:
    """Offloading or recomputing activations frees their memory: the inner graph holds no input."""
    anchor = torch.zeros((), requires_grad=True)
    memory = {name: t.detach().numpy().copy() for name, t in inputs().items()}
    offloaded: list[Tensor] = []

    def pack(t: Tensor) -> int:
        offloaded.append(t.clone())
        return len(offloaded) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda n: offloaded[n]):
        o = fem_attention(
            **{
                name: Graft.apply(anchor, torch.from_numpy(array)) for name, array in memory.items()
            },
            implementation="sdpa",
        )
    held = {name: weakref.ref(array) for name, array in memory.items()}
    del memory
    gc.collect()
    assert [name for name, array in held.items() if array() is not None] == []
    (gradient,) = torch.autograd.grad(total(o), anchor, retain_graph=True)
    full = gradients(inputs(), implementation="sdpa")
    expected = sum((g.sum() for name, g in full.items() if name != "o"), torch.zeros(()))
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)  # float32 sums
    with pytest.raises(
        RuntimeError, match="fem_attention: a second backward through the same call"
    ):
        total(o).backward()


@engines
def test_the_host_waits_for_nothing(engine: str) -> None:
    x = inputs(batch=1)
    with Waits() as waits:
        gradients(x, implementation=engine, cu_seqlens=torch.tensor([0, 5, 21]))
    assert waits.seen > 20 and waits.found == []


def test_the_largest_range_is_reported_once_by_a_later_call(
    messages: pytest.LogCaptureFixture,
) -> None:
    accelerated.watch.cache_clear()
    calm, wild = inputs(), inputs()
    with torch.no_grad():
        wild["v"][0, 1, 2, 3] = 1000
        for x in (calm, wild):
            fem_attention(**x, implementation="sdpa")
        assert [record.getMessage() for record in messages.records] == [
            "fem_attention: sdpa runs (requested)"
        ]
        for _ in range(3):
            fem_attention(**calm, implementation="sdpa")
    largest = float(
        (
            wild["beta"][:, None]
            * (wild["v"].amax(2, keepdim=True) - wild["v"].amin(2, keepdim=True))
        ).max()
    )
    (record,) = messages.records[1:]
    assert record.levelname == "WARNING"
    assert f"has reached {largest:.4g}, over 80" in record.getMessage()
    accelerated.watch.cache_clear()


# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 3, 16])
@pytest.mark.parametrize("tokens", [16, 17, 70])
def test_decoding_in_one_part_or_many(tokens: int, queries: int) -> None:
    x = made({**SIZE, "batch": 1}, tokens=queries, past=tokens - queries, uniform=79.0, group=2)
    given = [x[name].float() for name in TENSORS]
    truth = results(definition, x, torch.float64, "cpu", gradients=False)["output 0"]
    # With 100 splits, each has one block of keys.
    for splits in (1, 100, None):
        # documented bound of float32
        assert relative(decode(*given, causal=True, scale=16**-0.5, splits=splits), truth) < 1e-5
    if tokens == 70:
        before = fem_attention(*given, implementation="decode")
        given[1][:, :, -1:] *= -1e4
        given[2][:, :, -1:] *= -1e4
        after = fem_attention(*given, implementation="decode")
        assert torch.equal(after[:, :, :-1], before[:, :, :-1])
        assert not torch.equal(after[:, :, -1:], before[:, :, -1:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("without", ["", "lam"], ids=["", "F alone"])
def test_decoding_values_that_are_not_finite_gives_what_the_reference_gives(
    value: float, without: str
) -> None:
    x = made({**SIZE, "heads": 1}, tokens=2, past=32)
    given = {name: x[name].float() for name in TENSORS if name != without}
    given["v"][:, :, 20, 1] = value
    got, expected = (fem_attention(**given, implementation=how) for how in ("decode", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    valid = torch.ones(2, 34, dtype=torch.bool)
    valid[:, 20] = False
    assert fem_attention(**given, keys_valid=valid, implementation="decode").isfinite().all()
    with pytest.raises(ValueError, match="'decode' cannot run: 21 queries"):
        fem_attention(**{name: t.detach() for name, t in inputs().items()}, implementation="decode")
