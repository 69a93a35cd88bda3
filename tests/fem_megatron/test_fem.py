"""Tests of the Free Energy Mixer over every prior: the released numbers, the plain priors, sizes.
Common properties: test_catalogue.py.

Long, because the five priors share one way of reading the released fixtures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import relu, softplus

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.fem.layer import FemMixer
from fem_megatron.mixers.fem.prior_shapes import (
    CHUNK,
    CHUNK_PER_CHANNEL,
    AftShape,
    DecayShape,
    GlaShape,
    LinearShape,
    MambaShape,
    PriorShape,
    SoftmaxShape,
)
from fem_megatron.mixers.fem.priors import AftPrior, MambaPrior
from fem_megatron.mixers.fem.shape import FemConfig, FemShape
from fem_megatron.parallel import OneProcess
from fem_megatron.rope import Rope
from fem_megatron.state import Context
from fem_megatron.update import rms_norm, rotate
from kernels.aft_read import aft_read
from kernels.conditioner_features import conditioner_features
from kernels.fem_projection import op as fem_projection
from kernels.fem_projection import split_heads
from kernels.free_energy import linear as free_energy_linear
from kernels.linear_attention import op as linear
from tests.fem_megatron.conftest import drawn, load_fixture, tokens


def stream(tokens: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        tokens, batch, 32, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64
    ).to(dtype)


Arrays = dict[str, Tensor]
PRIORS: dict[str, type[PriorShape]] = {
    "softmax": SoftmaxShape,
    "linear": LinearShape,
    "gla": GlaShape,
    "gla_channel": GlaShape,
    "lrnn_decay": DecayShape,
    "aft": AftShape,
    "aft_inside": AftShape,
    "mamba": MambaShape,
    "mamba_not_normalised": MambaShape,
}
SCANS = ("linear", "gla", "gla_channel", "lrnn_decay")
every_scan = pytest.mark.parametrize("name", SCANS)
OFF = FemConfig(conditioner=False, free_energy=False, temperature=False, gate=False)


def shape_of(name: str, config: FemConfig | None = None, **changes: Any) -> FemShape:
    """Return the shape for ``name``: by default width 32, 2 heads, budget (i), RoPE."""
    config = replace(
        config or FemConfig(conditioner_size=4),
        gla_decay="channel" if name == "gla_channel" else "head",
        aft_query="inside" if name == "aft_inside" else "after",
        mamba_normalise=name != "mamba_not_normalised",
    )
    model = ModelConfig(
        **{"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 8, "fem": config, **changes}
    )
    return FemShape.of(model, PRIORS[name])


def build(shape: FemShape, dtype: torch.dtype = torch.float64) -> FemMixer:
    """Return the mixer with random weights, so that none is trivial."""
    made: FemMixer = drawn(FemMixer(shape, OneProcess(dtype)))
    return made


def pack(heads: int, *parts: Tensor) -> Tensor:
    """Return the rows of the projection's parts, head after head, as in the packed projection."""
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)


def _inverse_temperature(released: Tensor) -> Tensor:
    """Convert beta: the fixture's is softplus(parameter) + 1e-6, ours is softplus(b + 1.8)."""
    beta = softplus(released) + 1e-6
    return beta + torch.log(-torch.expm1(-beta)) - 1.8


def place(arrays: Arrays, heads: int, kind: str, *, decay: bool = False) -> Arrays:
    """Return the fixture's parameters (``param``) or gradients (``grad``) with our names and
    packing.

    In the fixture phi's slices are v, q, k, lambda, g; ours follow the projection. Its conditioner
    does not act on a decay: our rows for it are 0.
    """
    names = ["q", "k", *["decay"] * decay, "v", "lambda", "gate"]
    rows = {name: arrays[f"{kind}/W_{name}.weight"] for name in names}
    placed = {
        "norm.weight": torch.ones(arrays["x"].shape[-1], dtype=torch.float64),
        "in_proj.weight": pack(heads, *rows.values()),
        "beta": _inverse_temperature(arrays["param/_beta_param"])
        if kind == "param"
        else arrays["grad/_beta_param"],
        "out_proj.weight": arrays[f"{kind}/W_o.weight"],
    }
    tdc = {
        key.removeprefix(f"{kind}/tdc.fwd."): value
        for key, value in arrays.items()
        if key.startswith(f"{kind}/tdc.fwd.")
    }
    if "out_proj" in tdc:
        order = ["v", "q", "k", "lambda", "gate", *["decay"] * decay]
        phi = dict(
            zip(order, tdc["out_proj"].T.split([len(rows[name]) for name in order]), strict=True)
        )
        if decay:
            assert kind == "param" or not phi["decay"].any()
            phi["decay"] = torch.zeros_like(phi["decay"])
        placed |= {
            "tdc.norm.weight": tdc["norm.weight"],
            # Rows a, f, r of each channel.
            "tdc.in_proj.weight": torch.stack(
                [tdc["in_f.weight"], tdc["x_f.weight"], tdc["shortcut.weight"]], dim=1
            ).flatten(0, 1),
            "tdc.state_norm.weight": tdc["ln.weight"],
            "tdc.out_proj.weight": pack(heads, *(phi[name] for name in names)),
        }
    return placed


def run_fixture(
    mixer: FemMixer, meta: dict[str, Any], arrays: Arrays, *, decay: bool = False
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return name -> (ours, the fixture's) for the output and every gradient; the mixer without its
    norm and residual, as in the fixture.
    """
    if meta["C"]:
        mixer.tdc.eps = 1e-5
    placed = place(arrays, meta["H"], "param", decay=decay)
    assert placed.keys() == dict(mixer.named_parameters()).keys()
    mixer.load_state_dict(placed)
    x = arrays["x"].transpose(0, 1).clone().requires_grad_()
    y = mixer.step(x, Context(causal=mixer.shape.causal))
    (y * arrays["w"].transpose(0, 1)).sum().backward()
    found: dict[str, Any] = {
        "y": (y, arrays["y"].transpose(0, 1)),
        "x": (x.grad, arrays["dx"].transpose(0, 1)),
    }
    for key, wanted in place(arrays, meta["H"], "grad", decay=decay).items():
        if key != "norm.weight":  # the fixture has no norm weight
            found[key] = mixer.get_parameter(key).grad, wanted
    return found


def close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * wanted.abs().max().item())


# --- the released numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize(
    "name", ["fem_softmax_full", "fem_softmax_no_conv", "fem_softmax_bidirectional"]
)
def test_the_softmax_prior_reproduces_the_fixture(name: str, backend: str) -> None:
    meta, arrays = load_fixture(name)
    config = FemConfig(
        conditioner=meta["C"],
        budget="ii" if meta["d_k"] == meta["d_v"] else "i",
        value_size=meta["fem_dim"],
    )
    sizes = {
        "hidden_size": meta["D"],
        "num_attention_heads": meta["H"],
        "rope": False,
        "norm_eps": 0.0,
        "causal": meta["causal"],
    }
    config = replace(config, conditioner_size=4 if meta["C"] else None)
    mixer = build(shape_of("softmax", config, attention_backend=backend, **sizes))
    # The fixture adds 1e-6 to the gate (of order one) before it normalises it; the layer does
    # not. All other numbers agree up to rounding.
    for got, wanted in run_fixture(mixer, meta, arrays).values():
        close(got, wanted, 3e-6)


def test_queries_and_keys_are_normed_between_the_conditioner_and_rope() -> None:
    """With weights of one: the queries and keys of the mixer without the norm, divided by their
    root mean square, which RoPE preserves.

    With weights w: rotated after the norm. Float64, 1e-12 for numbers of size one.
    """
    plain, normed = (build(shape_of("softmax", qk_norm=on, norm_eps=1e-30)) for on in (False, True))
    normed.load_state_dict(plain.state_dict(), strict=False)
    weights = {part: normed.prior.get_parameter(f"{part}_norm.weight") for part in "qk"}
    x = tokens(9, hidden=32)

    def given(mixer: FemMixer, at: Context) -> dict[str, Tensor]:
        seen: list[dict[str, Tensor]] = []
        with (
            mixer.prior.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0])),
            torch.no_grad(),
        ):
            mixer(x, at)
        return seen[0]

    with torch.no_grad():
        for weight in weights.values():
            weight.fill_(1.0)
    bare, got = given(plain, Context()), given(normed, Context())
    for part in "qk":
        torch.testing.assert_close(got[part], rms_norm(bare[part], None, 1e-30), rtol=0, atol=1e-12)
    with torch.no_grad():
        for weight in weights.values():
            weight.copy_(torch.arange(len(weight)) / 4 + 0.5)
    got, flat = given(normed, Context()), given(plain, Context(positions=torch.zeros(9)))
    for part, weight in weights.items():
        wanted = rotate(rms_norm(flat[part], weight, 1e-30), Context(), Rope(10000))
        torch.testing.assert_close(got[part], wanted, rtol=0, atol=1e-12)


def released_read(
    v: Tensor,
    beta: Tensor,
    lam: Tensor,
    gate: Tensor,
    read: Any,
    log_weights: Callable[[int, int], Tensor],
    **_: Any,
) -> Tensor:
    """Read with the released GLA's 1e-5 in the denominator, so that p sums to slightly less than
    one.
    """
    logs = log_weights(0, v.shape[2])
    log_p = logs - (logs.exp().sum(-1, keepdim=True) + 1e-5).log()
    mu = log_p.exp() @ v
    free = (log_p[..., None] + (beta[:, None] * v)[:, :, None]).logsumexp(3) / beta[:, None]
    return gate * (mu + lam * (free - mu))


@pytest.mark.parametrize(
    ("fixture", "backend", "denominator", "tolerance"),
    [
        # The fixtures add 1e-6 to the gate (of order one), to beta and to the conditioner's norm;
        # the layer does not.
        ("fem_linear_full", "fused", "exact", 1e-5),
        ("fem_linear_full", "reference", "exact", 1e-5),
        ("fem_gla_full", "fused", "released", 1e-5),
        # Effect of the released denominator's 1e-5 where the weights are small (tokens that match q
        # badly).
        ("fem_gla_full", "fused", "exact", 5e-4),
    ],
)
def test_scans_reproduce_the_fixture(
    fixture: str, backend: str, denominator: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta, arrays = load_fixture(fixture)
    if denominator == "released":
        monkeypatch.setattr(free_energy_linear, "free_energy_read", released_read)
    config = FemConfig(value_size=meta["fem_dim"], conditioner_size=4)
    name = meta["prior"]
    sizes = {"hidden_size": meta["D"], "num_attention_heads": meta["H"]}
    mixer = build(
        shape_of(name, config, rope=False, norm_eps=0.0, attention_backend=backend, **sizes)
    )
    for key, (got, wanted) in run_fixture(mixer, meta, arrays, decay=name == "gla").items():
        # The fixture has no gradient for the rows of the decay, the layer has one.
        if key == "tdc.out_proj.weight" and name == "gla":
            got, wanted = (
                t.unflatten(0, (meta["H"], -1))[:, [*range(32), *range(33, 57)]]
                for t in (got, wanted)
            )
        # The errors pass through two more norms before the conditioner.
        close(got, wanted, 5 * tolerance if key.startswith("tdc") else tolerance)


def put_in_the_released_epsilons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the epsilons of the released code: 1e-6 to gate and query before their norm and to each
    exp(k - max k), 1e-8 and 1e-12 in C.
    """

    def gate(logit: Tensor, eps: float) -> Tensor:
        return rms_norm(softplus(logit) + 1e-6, None, 0.0)

    def query(prior: AftPrior, q: Tensor) -> Tensor:
        return gate(q, 0.0)

    def read(k: Tensor, *rest: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        return aft_read(((k - k.amax(2, keepdim=True)).exp() + 1e-6).log(), *rest, **options)

    def shortcut(logits: Tensor, *rest: Any) -> Tensor:
        return conditioner_features((softplus(logits) + 1e-8).expm1().log(), *rest)

    def scan(logits: Tensor, x: Tensor, initial: Tensor | None, **options: bool) -> Tensor:
        decay = (-softplus(logits)).cumsum(0).exp()
        return decay * (x / (decay + 1e-12)).cumsum(0)

    monkeypatch.setattr(fem_projection, "outer_gate", gate)
    monkeypatch.setattr(AftPrior, "_positive", query)
    monkeypatch.setattr("fem_megatron.mixers.fem.priors.aft_read", read)
    monkeypatch.setattr("fem_megatron.context_parallel.scans.time_decay_scan", scan)
    monkeypatch.setattr("fem_megatron.mixers.fem.layer.conditioner_features", shortcut)


@pytest.mark.parametrize("with_epsilons", [True, False])
def test_aft_inside_reproduces_the_released_code(
    with_epsilons: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_epsilons:
        put_in_the_released_epsilons(monkeypatch)
    meta, arrays = load_fixture("fem_aft_full")
    config = FemConfig(value_size=meta["fem_dim"], conditioner_size=4)
    shape = shape_of(
        "aft_inside", config, hidden_size=meta["D"], num_attention_heads=meta["H"], norm_eps=0.0
    )
    assert shape.prior == AftShape(meta["d_k"], "inside", own_logits=True)
    mixer = build(shape)
    found = run_fixture(mixer, meta, arrays)
    # beta is softplus(parameter) + 1e-6 in the fixture and softplus(parameter + 1.8) in the layer:
    # d beta / d parameter = 1 - exp(-softplus).
    slope = torch.sigmoid(mixer.beta + 1.8).detach() / torch.sigmoid(arrays["param/_beta_param"])
    found["beta"] = found["beta"][0], found["beta"][1] * slope
    # With the released epsilons the difference is rounding; without them it is 1e-6 relative to
    # numbers of order one, and up to twenty times as much in gradients.
    for got, wanted in found.values():
        close(got, wanted, 1e-9 if with_epsilons else 2e-5)


# --- the plain priors -----------------------------------------------------------------------------


def by_head(mixer: FemMixer, x: Tensor) -> dict[str, Tensor]:
    """Return the slices of the packed projection for the normalised x, [s, b, h, width]."""
    return split_heads(
        rms_norm(x, mixer.norm.weight, mixer.shape.norm_eps) @ mixer.in_proj.weight.T,
        mixer.shape.slices,
    )


@every_scan
@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_with_all_switches_off_it_is_the_plain_prior(name: str, backend: str, causal: bool) -> None:
    """Linear attention, GLA and a decaying mean, token by token and pair by pair; RoPE before the
    features.
    """
    mixer = build(shape_of(name, OFF, causal=causal, attention_backend=backend))
    x = tokens(11, hidden=32)
    parts = by_head(mixer, x)
    one = torch.ones(11, 2, 2, 1, dtype=torch.float64)
    q, k = (
        relu(rotate(parts[n], Context(), Rope(10000))) + 1e-6 if n in parts else one for n in "qk"
    )
    decay = torch.zeros_like(q)
    if name == "lrnn_decay":
        decay = decay - softplus(parts["decay"])
    elif name != "linear":
        decay = decay - (relu(parts["decay"]) + 1e-6)
    reads = []
    for t in range(11):
        keys = range(t + 1 if causal else 11)
        rows = []
        for i in keys:
            between = decay[min(t, i) + 1 : max(t, i) + 1].sum(0).exp()
            rows.append((q[t] * between * k[i]).sum(-1))
        weights = torch.stack(rows)
        weighted = (weights[..., None] * parts["v"][: len(keys)]).sum(0)
        reads.append(weighted / weights.sum(0)[..., None])
    expected = x + torch.stack(reads).flatten(2) @ mixer.out_proj.weight.T
    # float64 rounding.
    torch.testing.assert_close(mixer(x, Context(causal=causal)), expected, rtol=1e-11, atol=1e-11)


@every_scan
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_fast_form_equals_the_exact_one(name: str, causal: bool) -> None:
    fast = build(shape_of(name, causal=causal, attention_backend="fused"))
    exact = build(shape_of(name, causal=causal, attention_backend="reference"))
    for length in (1, 2, 75):
        results = []
        for mixer in (fast, exact):
            x = tokens(length, hidden=32).requires_grad_()
            mixer.zero_grad()
            y = mixer(x, Context(causal=causal))
            y.square().sum().backward()
            results.append([y, x.grad, *(p.grad for p in mixer.parameters())])
        for one, other in zip(*results, strict=True):
            # float64 rounding, relative to the largest value; gradients pass through many sums.
            torch.testing.assert_close(
                one, other, rtol=0, atol=1e-9 * max(1.0, other.detach().abs().max().item())
            )


@pytest.mark.parametrize("name", ["linear", "gla", "lrnn_decay"])
def test_products_in_bfloat16_as_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan's products in bfloat16 with float32 decays: their rounding, 2^-9, through the read
    and the output projection.
    """
    mixer = build(shape_of(name, attention_backend="fused"), torch.float32)
    x = torch.randn(33, 2, mixer.shape.hidden, generator=torch.Generator().manual_seed(3))
    plain = mixer.step(x, Context()).detach()
    monkeypatch.setattr("fem_megatron.mixers.fem.priors.product_type", lambda t: torch.bfloat16)
    narrow = mixer.step(x, Context()).detach()
    error = float((narrow - plain).norm() / plain.norm())
    assert 1e-5 < error < 1e-2


def test_the_query_gates_after_the_read() -> None:
    mixer = build(shape_of("aft", FemConfig(budget="ii", value_size=16, conditioner=False)))
    x = tokens(11, hidden=32)
    parts, beta = by_head(mixer, x), mixer.inverse_temperature(x)
    weights = parts["k"].exp()
    total = weights.cumsum(0)
    assert beta is not None
    mu = (weights * parts["v"]).cumsum(0) / total
    free_energy = ((weights * (beta * parts["v"]).exp()).cumsum(0) / total).log() / beta
    lam = parts["lam"].sigmoid()
    gate = fem_projection.outer_gate(parts["gate"], mixer.shape.norm_eps)
    read = parts["q"].sigmoid() * gate * ((1 - lam) * mu + lam * free_energy)
    torch.testing.assert_close(
        mixer(x, Context()), x + read.flatten(2) @ mixer.out_proj.weight.T, rtol=1e-12, atol=1e-12
    )  # rounding


@pytest.mark.parametrize("normalise", [True, False])
def test_with_all_switches_off_it_is_the_selective_scan(normalise: bool) -> None:
    mixer = build(shape_of("mamba" if normalise else "mamba_not_normalised", OFF))
    x = tokens(11, hidden=32)
    parts, width = by_head(mixer, x), mixer.shape.value_head
    steps = torch.logspace(-3, -1, width, dtype=torch.float64)
    delta = softplus(parts["delta"] + steps.expm1().log() + mixer.prior.delta_bias.view(2, width))
    states = parts["b"].shape[-1]
    rate = softplus(
        mixer.prior.rate.view(2, width, states) + torch.arange(1, states + 1).double().expm1().log()
    )
    numerator = denominator = torch.zeros(2, 2, width, states, dtype=torch.float64)
    reads = []
    for t in range(11):
        decay = (-delta[t, ..., None] * rate).exp()
        intake = delta[t, ..., None] * (softplus(parts["b"][t]) + 1e-6)[..., None, :]
        numerator = decay * numerator + intake * parts["v"][t, ..., None]
        denominator = decay * denominator + intake
        c_out = (softplus(parts["c"][t]) + 1e-6)[..., None, :]
        read = (c_out * numerator).sum(-1)
        reads.append(read / (c_out * denominator).sum(-1) if normalise else read)
    expected = x + torch.stack(reads).flatten(2) @ mixer.out_proj.weight.T
    # float64 rounding.
    torch.testing.assert_close(mixer(x, Context()), expected, rtol=1e-12, atol=1e-12)


def test_the_first_steps_and_rates_are_mambas() -> None:
    prior = FemMixer(shape_of("mamba"), OneProcess()).prior
    assert isinstance(prior, MambaPrior)
    steps = softplus(prior._step_logit(torch.float32))
    rates = prior._rate(torch.float32)
    # float32 through log and softplus.
    torch.testing.assert_close(steps[0, 0, [0, -1]], torch.tensor([1e-3, 1e-1]), rtol=1e-4, atol=0)
    torch.testing.assert_close(
        rates[1, 3], torch.arange(1.0, rates.shape[-1] + 1), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("name", ["aft", "aft_inside", "mamba", "mamba_not_normalised"])
def test_without_a_mask_every_token_matters_and_the_reversed_sequence_gives_the_reversed_read(
    name: str,
) -> None:
    mixer = build(
        shape_of(
            name, replace(FemConfig(budget="ii", value_size=16), conditioner=False), causal=False
        )
    )
    x = tokens(9, hidden=32).requires_grad_()
    o = mixer(x, Context(causal=False))
    (dx,) = torch.autograd.grad(o[3].sum(), x)
    assert (dx != 0).all()
    # The steps of the state-space model act before a token in one direction and after it in the
    # other direction.
    if name.startswith("aft"):
        torch.testing.assert_close(
            mixer(x.flip(0), Context(causal=False)).flip(0), o, rtol=1e-12, atol=1e-12
        )  # float64 rounding


# --- sizes ----------------------------------------------------------------------------------------


def test_the_planned_chunks_are_the_kernels() -> None:
    assert (CHUNK, CHUNK_PER_CHANNEL) == (linear.CHUNK, linear.CHUNK_PER_CHANNEL)


@pytest.mark.parametrize("budget", ["i", "ii"])
@pytest.mark.parametrize("name", ["linear", "gla", "aft", "aft_inside", "mamba"])
def test_the_budget_is_four_times_the_width_squared(name: str, budget: str) -> None:
    for config in (FemConfig(conditioner=False), OFF):
        shape = shape_of(
            name, replace(config, budget=budget), hidden_size=768, num_attention_heads=8
        )
        size = sum(
            weight.size
            for key, weight in shape.weights().items()
            if key.endswith(".weight") and len(weight.shape) == 2
        )
        # Plus one row per head for the decay.
        assert size == 4 * 768**2 + (8 * 768 if name == "gla" else 0)


@every_scan
def test_rope_and_the_conditioner_reach_the_prior(name: str) -> None:
    x = stream(9)
    plain = build(shape_of(name, rope=False))
    turned = build(shape_of(name, rope=True))
    assert torch.equal(turned.in_proj.weight, plain.in_proj.weight)
    assert torch.equal(turned(x, Context()), plain(x, Context())) == (name == "lrnn_decay")
    if name != "linear":
        before = plain(x, Context())
        rows = plain.tdc.out_proj.weight.data.unflatten(0, (2, -1))
        start = plain.shape.head_width - sum(list(plain.shape.slices.values())[-3:]) - 1
        rows[:, start] *= 3  # the row of phi for the decay
        assert not torch.equal(plain(x, Context()), before)


def test_with_all_switches_off_it_is_aft() -> None:
    mixer = build(shape_of("aft", OFF))
    x = stream(11)
    parts = by_head(mixer, x)
    weights = parts["k"].exp()
    read = parts["q"].sigmoid() * (weights * parts["v"]).cumsum(0) / weights.cumsum(0)
    expected = x + read.flatten(2) @ mixer.out_proj.weight.T
    # float64 rounding.
    torch.testing.assert_close(mixer(x, Context()), expected, rtol=1e-12, atol=1e-12)


def test_the_state_does_not_grow() -> None:
    shape = shape_of("gla")
    assert shape.state_bytes(1, 2) == shape.state_bytes(8192, 2)
    # d_k = 16, d_v = 8, 2 heads: fp32 sums over [v, U, 1] and two limits of the values, plus four
    # numbers of the conditioner.
    assert shape.state_bytes(1, 2) == 4 * (2 * (16 * 17 + 2 * 8) + 4)
