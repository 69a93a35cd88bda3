"""Tests of the free-energy read.

They cover the laws of every form, the exact form beyond the fast form's range, and the window of
decoding.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kernels.aft_read import aft_read
from kernels.check import Inputs, relative, results
from kernels.fem_attention import fem_attention
from kernels.free_energy import ValueWindow, free_energy_read
from kernels.free_energy.cases import SUITE
from kernels.free_energy.linear import linear_read
from kernels.free_energy.ranges import Ranges
from kernels.linear_attention import linear_attention, log_weights
from kernels.ssm_read import ssm_read
from tests.kernels.operations import Waits

every_decay = pytest.mark.parametrize(
    "case", ["linear attention", "a decay a head", "a decay a channel"]
)
both = pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])


def inputs(
    case: str = "a decay a head",
    dtype: torch.dtype = torch.float64,
    *,
    value_range: float | None = None,
    **size: int,
) -> Inputs:
    """Return the inputs of a case. value_range: range of beta v, or None for the case's values."""
    x = SUITE.cases[case]({**SUITE.small, **size})
    if value_range is not None:
        x["v"] = (
            (
                torch.rand(
                    x["v"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
                )
                - 0.5
            )
            * value_range
            / 1.95
        )
    return {name: t.to(dtype) for name, t in x.items()}


def read(x: Inputs, v: Tensor, *rest: Tensor | None, exact: bool = False) -> Tensor:
    """Return the free-energy read under linear attention's weights. rest: beta, lam, gate."""
    q, k, decay = x["q"], x["k"], x.get("log_decay")
    given: Any = (*rest, None, None, None)[:3]
    known: Any = (
        lambda s: linear_attention(q, k, s, decay, normalise=True)[0],
        lambda a, b: log_weights(q, k, decay, a, b),
    )
    return free_energy_read(v, *given, *known, exact=exact)


def reads() -> dict[str, Callable[..., Tensor]]:
    """Return each free-energy read as a function of (v, beta, lam, gate); other inputs random."""
    rng = torch.Generator().manual_seed(0)
    q, k, delta = (
        torch.rand(1, 1, 40, 3, generator=rng, dtype=torch.float64) + 0.1 for _ in range(3)
    )
    rate = torch.ones(1, 3, 3).double()
    x = {"q": q, "k": k, "log_decay": -delta[..., 0]}
    return {
        "aft_read": lambda v, *rest: aft_read(10 * q, v, *rest)[0],
        "ssm_read": lambda v, *rest: ssm_read(delta, rate, q, k, v, *rest)[0],
        "fem_attention, fused": partial(fem_attention, 4 * q, k, implementation="fused"),
        "fem_attention, reference": partial(fem_attention, 4 * q, k, implementation="reference"),
        "free_energy, fast": lambda v, *rest: read(x, v, *rest),
        "free_energy, exact": lambda v, *rest: read(x, v, *rest, exact=True),
    }


@pytest.mark.parametrize("name", reads())
def test_the_laws_of_the_read(name: str) -> None:
    rng, of = torch.Generator().manual_seed(1), reads()[name]
    v, lam, gate = (torch.randn(1, 1, 40, 3, generator=rng, dtype=torch.float64) for _ in range(3))
    ones, beta = torch.ones_like(v), torch.full((1, 3), 1.95, dtype=torch.float64)
    rounding: Any = {"rtol": 0, "atol": 1e-11}
    torch.testing.assert_close(of(ones), ones, **rounding)  # the weights sum to one
    mu = last = of(v)
    spread = v.cummax(2).values - v.cummin(2).values
    for at in (1e-3, 0.05, 0.5, 2.0, 12.0):  # F rises with beta from the mean to the maximum
        free_energy = of(v, torch.full_like(beta, at))
        assert (free_energy >= last - 1e-12 / at).all()
        # Hoeffding's lemma
        assert (free_energy - mu <= at * spread.square() / 8 + 1e-12 / at).all()
        last = free_energy
    assert (last <= v.cummax(2).values + 1e-12).all() and ((last - mu)[:, :, 5:] > 0.1).any()
    free_energy = of(v, beta)
    torch.testing.assert_close(of(v + 37.5, beta), free_energy + 37.5, **rounding)
    torch.testing.assert_close(of(v, beta, 0 * lam, ones), mu, **rounding)
    torch.testing.assert_close(
        of(v, beta, lam, gate), gate * ((1 - lam) * mu + lam * free_energy), **rounding
    )
    torch.testing.assert_close(of(v, None, None, gate), gate * mu, **rounding)
    torch.testing.assert_close(of(v, beta, None, gate), gate * free_energy, **rounding)


@every_decay
def test_beyond_the_range_the_exact_form_runs_and_reports_it_once(
    case: str, messages: pytest.LogCaptureFixture
) -> None:
    x = {name: t.float().double() for name, t in inputs(case, tokens=64, value_range=400.0).items()}
    truth = results(SUITE.definition, x, torch.float64, "cpu")
    for name, got in results(
        lambda given: SUITE.call(given, "reference"),
        x,
        torch.float32,
        "cpu",
        weighted_in=torch.float64,
    ).items():
        assert relative(got, truth[name]) < 2e-5, name  # float32 rounding of exponents up to 200
    SUITE.call(x, "reference")
    assert messages.text.count("the exact form (slower) runs") == 1


def with_wild_channels(calm: Inputs, *wild: tuple[int, int, int]) -> Inputs:
    """Return the inputs with v scaled to a range of 400 / 1.95 in these (batch, head, channel)."""
    v = calm["v"].detach().clone()
    for at in wild:
        v[at[0], at[1], :, at[2]] *= (
            400 / 1.95 / (v[at[0], at[1], :, at[2]].amax() - v[at[0], at[1], :, at[2]].amin())
        )
    return {**calm, "v": v.requires_grad_(calm["v"].requires_grad)}


@pytest.mark.parametrize("causal", [True, False])
@every_decay
def test_only_a_wild_channel_is_read_again(case: str, causal: bool) -> None:
    """Only wild channels (values beyond the fast form's range) run the exact form.

    The other channels keep every bit. All outputs and gradients equal the definition's, also after
    a full reset and for features that are 0.
    """
    calm = inputs(case, tokens=80, heads=2)
    calm["k"][:, :, 5:9] = 0
    if "log_decay" in calm:
        calm["log_decay"][:, :, 5:9] = 0
        calm["log_decay"][:, :, 70] = -torch.inf
    wide = with_wild_channels(
        {name: t.float().double().requires_grad_() for name, t in calm.items()},
        (0, 0, 3),
        (0, 1, 9),
    )
    x = {name: t.detach().float().requires_grad_() for name, t in wide.items()}
    truth = with_gradients(wide, partial(linear_read, exact=True, causal=causal))
    names = ["o", *(name for name in NAMES if name in x)]
    truth[2][:, :, 5:9] = 0  # a feature that is 0 has no gradient
    for how in ("reference", "triton")[: 1 + causal]:
        found = with_gradients(x, partial(linear_read, implementation=how, causal=causal))
        found[2] = found[2].masked_fill(wide["k"] == 0, 0)
        for name, got, wanted in zip(names, found, truth, strict=True):
            read = wanted.isfinite()
            # float32 rounding of exponents up to 200
            assert relative(got[read], wanted[read]) < 2e-5, name
        fast = with_gradients(
            x, partial(linear_read, exact=False, implementation=how, causal=causal)
        )
        for n in (0, 3):  # o and the gradient of v
            differs = (found[n] != fast[n]).any(2).nonzero().tolist()
            if n == 0 and causal:
                assert differs == [[0, 0, 3], [0, 1, 9]]
            else:
                assert all(at in [[0, 0, 3], [0, 1, 9]] for at in differs)


def test_the_work_of_a_wild_channel_is_its_head_s_and_linear_in_the_length() -> None:
    def exponentials(tokens: int, *wild: tuple[int, int, int]) -> int:
        x = with_wild_channels(
            {
                name: t.float().requires_grad_()
                for name, t in inputs(tokens=tokens, heads=4, batch=2).items()
            },
            *wild,
        )
        with Exponentials() as counted:
            with_gradients(x, linear_read)
        return counted.found

    calm = exponentials(512)
    one = exponentials(512, (1, 0, 3))
    two = exponentials(512, (1, 0, 3), (0, 2, 5))
    four = exponentials(512, *((0, n, 1) for n in range(4)))
    assert two - calm == 2 * (one - calm) and four - calm == 4 * (one - calm)
    assert exponentials(2048, (1, 0, 3)) == pytest.approx(4 * one, rel=0.01)
    tokens, (dk, dv) = 512, (12, 10)
    # Three passes: the forward, its repetition in the backward, and the weights in the backward.
    # Each has chunk * dk exponentials for the pairs, and chunk + 2 dk for each channel and the
    # normaliser.
    assert one - calm < 3.1 * tokens * (64 * dk + (64 + 2 * dk) * (dv + 1))
    # At 2048 tokens, this is less than a third of t^2 exponentials per channel.
    assert 3.1 * (64 * dk + (64 + 2 * dk) * (dv + 1)) < 2048 * dv / 3


@pytest.mark.parametrize("value_range", [3.0, 79.0, 400.0])
def test_streams_in_bfloat16_have_the_bits_of_rounded_ones(value_range: float) -> None:
    """Streams and reads that are exchanged in bfloat16 change no bit of o and its gradients.

    A read that rounds float32 streams and returns float32 gives the same bits.
    """
    x = {
        name: t.to(torch.float32 if name == "beta" else torch.bfloat16).requires_grad_()
        for name, t in inputs(value_range=value_range, heads=2).items()
    }
    types = []

    def of(*given: Any, products: torch.dtype | None) -> Tensor:
        q, k, v, decay, *rest = given

        def reading(streams: Tensor) -> Tensor:
            types.append(streams.dtype)
            y, _ = linear_attention(q, k, streams.to(q.dtype), decay, normalise=True)
            return y.to(streams.dtype)

        how: Any = {"exact": False, "products": products, "implementation": "triton"}
        of_v: Any = (v, *rest, reading, lambda a, b: q)
        return free_energy_read(*of_v, **how)

    narrow, wide = (
        with_gradients(x, partial(of, products=each)) for each in (torch.bfloat16, None)
    )
    assert types == [torch.bfloat16, torch.float32]
    assert all(map(torch.equal, narrow, wide))


@both
@every_decay
def test_keys_of_zeros_are_not_there(case: str, exact: bool) -> None:
    """A key of zeros has zero weight for every value.

    Removing it leaves the other rows equal.
    """
    x = inputs(case, tokens=20)
    x["k"][:, :, 5:9] = 0
    if "log_decay" in x:
        x["log_decay"][:, :, 5:9] = 0
    kept, rest = [*range(5), *range(9, 20)], (x["beta"], x["lam"], x["gate"])
    less = {name: t if name == "beta" else t[:, :, kept] for name, t in x.items()}
    alone = read(less, less["v"], less["beta"], less["lam"], less["gate"], exact=exact)
    x["v"][:, :, 5:9] += 7.0
    # The changed values move the centre of v, which changes the rounding.
    torch.testing.assert_close(
        read(x, x["v"], *rest, exact=exact)[:, :, kept], alone, rtol=1e-11, atol=1e-11
    )


# --- on a device: each call of a layer uses the range of the call before it -----------------------


def of_range(
    value_range: float, dtype: torch.dtype = torch.float32, case: str = "a decay a head"
) -> Inputs:
    """Return differentiable inputs whose largest beta * (max v - min v) is ``value_range``."""
    x = inputs(case, tokens=64)
    x["v"] *= (
        value_range
        / (x["beta"][:, None] * (x["v"].amax(2, keepdim=True) - x["v"].amin(2, keepdim=True))).max()
    )
    return {name: t.to(dtype).requires_grad_() for name, t in x.items()}


class Exponentials(TorchDispatchMode):
    """Counter of the elements that exponential operations read (``found``)."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in (
            "exp",
            "exp_",
            "expm1",
            "logsumexp",
            "logaddexp",
            "softmax",
            "_softmax",
            "_log_softmax",
        ):
            self.found += args[0].numel()
        return func(*args, **(kwargs or {}))


NAMES = ("q", "k", "v", "log_decay", "beta", "lam", "gate")


def with_gradients(x: Inputs, call: Callable[..., Tensor]) -> list[Tensor]:
    leaves = [x[name] for name in NAMES if name in x]
    o = call(*(x.get(name) for name in NAMES))
    return [o, *torch.autograd.grad(o.square().sum(), leaves)]


def forms_of_calls(ranges: Ranges, value_ranges: list[float], how: str = "reference") -> list[int]:
    """Run one call for each range and return the number of heads that took the exact form in each.

    Each output must equal the exact form's bits if that number is positive, else the fast form's.
    Beyond the range, the two forms differ.
    """
    found = []
    for value_range in value_ranges:
        x = of_range(value_range)

        def decided(*given: Tensor, v: Tensor = x["v"]) -> Tensor:
            return linear_read(*given, decision=ranges.decide(v), implementation=how)

        o, *gradients = with_gradients(x, decided)
        assert o.isfinite().all() and all(g.isfinite().all() for g in gradients)
        fast = linear_read(*(x[name] for name in NAMES), exact=False, implementation=how)
        exact = linear_read(*(x[name] for name in NAMES), exact=None, implementation=how)
        assert torch.equal(fast, exact) is (value_range <= 80)
        found.append(ranges.forms()[-1])
        assert torch.equal(o, exact if found[-1] else fast)
    return found


BELOW, BETWEEN, BEYOND = 63.9, 64.1, 80.1


@pytest.mark.parametrize("how", ["reference", "triton"])
def test_a_call_takes_the_form_that_the_range_before_it_requested(
    how: str, messages: pytest.LogCaptureFixture
) -> None:
    given = [BELOW, BETWEEN, BEYOND, BELOW, BELOW, BEYOND, BELOW]
    assert forms_of_calls(Ranges(late=True), given, how) == [0, 0, 1, 1, 0, 0, 1]
    # Only the sixth call jumps, not the third.
    (jump,) = (
        record.getMessage() for record in messages.records if "jumped" in record.getMessage()
    )
    assert jump.startswith(
        "free_energy_read: beta * (max v - min v) jumped from 63.9 to 80.1 within a call of a layer"
    )
    # The first call waits for its own range.
    assert forms_of_calls(Ranges(late=True), [BEYOND, BELOW, BELOW], how) == [1, 1, 0]
    assert pickle.loads(pickle.dumps(Ranges(late=True))).late
    assert copy.deepcopy(Ranges()).late is None


def test_a_call_has_space_for_the_heads_that_passed_in_the_last(
    messages: pytest.LogCaptureFixture,
) -> None:
    """A call reserves the exact form for as many heads as exceeded the range in the previous call.

    The number is rounded up to a power of 2. The device finds the heads, so that they may differ
    from those of the previous call.
    """
    calm = {name: t.float() for name, t in inputs(heads=4, batch=2).items()}
    ranges = Ranges(late=True)
    heads = [(n, m, 1) for n in range(2) for m in range(4)]
    steps = [
        (heads[:0], 0),
        (heads[:3], 0),
        (heads[5:8], 4),
        (heads[2:6], 4),
        (heads[:5], 4),
        (heads, 8),
        (heads[:1], 8),
        (heads[7:], 1),
    ]
    for n, (wild, room) in enumerate(steps):
        x = with_wild_channels(calm, *wild)
        o = linear_read(*(x[name] for name in NAMES), decision=ranges.decide(x["v"]))
        right = torch.equal(o, linear_read(*(x[name] for name in NAMES)))
        assert ranges.forms()[-1] == room and right is (len(wild) <= room), n
    assert messages.text.count("in more heads than it had reserved for the exact form") == 2


def test_every_jump_is_named(messages: pytest.LogCaptureFixture) -> None:
    forms_of_calls(Ranges(late=True), [1.0, 1000.0, 1.0, 1.0, float(2**12), 1.0])
    assert "jumped from 1 to 1000 " in messages.text and "jumped from 1 to 4096 " in messages.text


@pytest.mark.parametrize("value_range", [BELOW, 79.9])
def test_the_fast_form_has_the_exact_one_s_gradients_up_to_the_range(value_range: float) -> None:
    truth = with_gradients(of_range(value_range, torch.float64), partial(linear_read, exact=True))
    for how in ("reference", "triton"):
        found = with_gradients(
            of_range(value_range), partial(linear_read, exact=False, implementation=how)
        )
        # float32 rounding of exponents up to 40
        assert all(relative(got, wanted) < 2e-5 for got, wanted in zip(found, truth, strict=True))


@pytest.mark.parametrize("value_range", [81.0, 200.0, 3000.0])
def test_the_fast_form_beyond_its_range_is_finite_and_loses_only_what_is_far_below_the_greatest(
    value_range: float,
) -> None:
    x, wide = of_range(value_range), of_range(value_range, torch.float64)
    truth = with_gradients(wide, partial(linear_read, exact=True))
    mu = with_gradients(wide | {"lam": 0 * wide["lam"]}, partial(linear_read, exact=True))
    one = with_gradients(x, partial(linear_read, exact=False, implementation="reference"))
    other = with_gradients(x, partial(linear_read, exact=False, implementation="triton"))
    assert all(
        relative(got, wanted) < 1e-5 and got.isfinite().all()
        for got, wanted in zip(other, one, strict=True)
    )
    high = (wide["beta"][:, None] * wide["v"]).amax(2, keepdim=True)
    free_energy = read(wide, wide["v"], wide["beta"], exact=True)
    # The fast form's F is right if beta F is within 80 of the greatest beta v.
    seen = wide["beta"][:, None] * free_energy > high - 80
    assert 0.2 < seen.double().mean() <= 1
    assert relative(one[0][seen], truth[0][seen]) < 2e-5
    low, top = torch.minimum(mu[0], truth[0]), torch.maximum(mu[0], truth[0])
    slack = 1e-5 * truth[0].abs().max()
    # Otherwise, the output is between mu and F.
    assert (one[0] >= low - slack).all() and (one[0] <= top + slack).all()


def test_what_is_computed_again_takes_the_form_that_it_took_first() -> None:
    """A recomputation takes the form of the first computation.

    This is true for several pending calls, both orders of the backward, both kinds of checkpoint,
    and checkpoints within the layer or around it.
    """
    given = [BELOW, BETWEEN, 1000.0, 63.0, 30.0, 10.0]
    for reentrant in (True, False):
        for within in (True, False):
            for order in (1, -1):
                ranges = Ranges(late=True)
                made = []
                xs = [of_range(value_range) for value_range in given]

                def layer(
                    *x: Tensor,
                    ranges: Ranges = ranges,
                    within: bool = within,
                    reentrant: bool = reentrant,
                ) -> Tensor:
                    decision = ranges.decide(x[2])
                    call = partial(linear_read, decision=decision)
                    return checkpoint(call, *x, use_reentrant=reentrant) if within else call(*x)

                for x in xs:
                    arguments = [x[name] for name in NAMES]
                    if within:
                        made.append(layer(*arguments))
                    else:
                        made.append(checkpoint(layer, *arguments, use_reentrant=reentrant))
                forms = ranges.forms()
                assert forms == [0, 0, 1, 1, 0, 0]
                for x, o, form in list(zip(xs, made, forms, strict=True))[::order]:
                    o.square().sum().backward()
                    _, *wanted = with_gradients(
                        x, partial(linear_read, exact=None if form else False)
                    )
                    assert all(
                        torch.equal(x[name].grad, g) for name, g in zip(NAMES, wanted, strict=True)
                    )
                assert ranges.forms() == forms  # a recomputation is not a call


@pytest.mark.parametrize("how", ["reference", "triton"])
@pytest.mark.parametrize("value_range", [10.0, 200.0], ids=["fast", "exact"])
def test_the_host_waits_for_nothing_after_the_first_call(how: str, value_range: float) -> None:
    """After the first call, no operation waits for the device, as a CUDA graph requires.

    A recomputation does not wait either, as long as the forms stay the same.
    """
    ranges, x = Ranges(late=True), of_range(value_range)

    def layer(*given: Tensor) -> Tensor:
        return linear_read(*given, decision=ranges.decide(x["v"]), implementation=how)

    with Waits() as first:
        with_gradients(x, layer)
    with Waits() as steady:
        with_gradients(x, layer)
        with_gradients(x, lambda *given: checkpoint(layer, *given, use_reentrant=False))
    # The first call waits for the range and, beyond it, for the heads.
    assert len(first.found) == 1 + (value_range > 80) and steady.seen > 20 and steady.found == []


# --- the running window of decoding ---------------------------------------------------------------


def decode(x: Inputs, pieces: list[int]) -> Tensor:
    """Return (mu, F), computed in consecutive parts of the sequence with a carried state."""
    sums = state = None
    found = []
    start = 0
    values = x["v"].shape[3]
    for piece in pieces:
        now: Any = {
            name: t[:, :, start : start + piece]
            for name, t in x.items()
            if name in ("q", "k", "v", "log_decay")
        }
        q, k, v, decay = now["q"], now["k"], now["v"], now.get("log_decay")
        window = ValueWindow(v, x["beta"], state)
        if sums is not None:
            of_values, of_streams, mass = sums.split((values, values, 1), dim=-1)
            sums = torch.cat((of_values, of_streams * window.rescale, mass), dim=-1)
        reads, sums = linear_attention(
            q, k, torch.cat((v, window.stream()), dim=-1), decay, sums, normalise=True
        )
        mu, z = reads.chunk(2, dim=-1)
        found.append(torch.stack((mu, mu + window.gap(mu, z))))
        state, start = window.state, start + piece
    return torch.cat(found, dim=3)


def ordered(x: Inputs, order: str) -> Inputs:
    if order == "as they come":
        return x
    return x | {"v": x["v"].sort(dim=2, descending=order == "falling").values}


every_order = pytest.mark.parametrize("order", ["as they come", "rising", "falling"])


@every_decay
@every_order
@pytest.mark.parametrize("pieces", [[1] * 60, [20, 1, 1, 38]], ids=["one by one", "in parts"])
def test_decoding_equals_the_parallel_read(case: str, order: str, pieces: list[int]) -> None:
    x = ordered(inputs(case, torch.float32, tokens=60, value_range=79.0), order)
    wide = {name: t.double() for name, t in x.items()}
    truth = torch.stack(
        (read(wide, wide["v"], exact=True), read(wide, wide["v"], wide["beta"], exact=True))
    )
    # float32 rounding of logarithms of sums, with values up to 20
    torch.testing.assert_close(decode(x, pieces).double(), truth, rtol=1e-5, atol=2e-5)


@every_order
def test_decoding_stays_finite_beyond_the_range(
    order: str, messages: pytest.LogCaptureFixture
) -> None:
    x = ordered(inputs(dtype=torch.float32, tokens=60, value_range=1000.0), order)
    mu, free = decode(x, [1] * 60)
    assert mu.isfinite().all() and free.isfinite().all() and (free >= mu).all()
    assert messages.text.count("are lost to F") == 1
    late = read(
        {name: t.double() for name, t in x.items()}, x["v"].double(), x["beta"].double(), exact=True
    )[:, :, -1]
    # A row that reads the greatest value so far has an F near it; float32 rounding of values up to
    # 300.
    torch.testing.assert_close(free.double()[:, :, -1], late, rtol=1e-5, atol=2e-3)
