"""The FEM over the priors of one linear-attention scan: the released numbers, the plain priors, streaming, padding, cost. One process."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import relu, softplus
from torch.utils.flop_counter import FlopCounterMode

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.fem import priors as scan
from fem_megatron.mixers.fem.layer import FemMixer
from fem_megatron.mixers.fem.prior_shapes import CHUNK, CHUNK_PER_CHANNEL, DecayShape, LinearShape, PriorShape
from fem_megatron.mixers.fem.shape import FemConfig, FemShape
from fem_megatron.parallel import OneProcess
from fem_megatron.state import Context, State
from fem_megatron.update import rms_norm, rotate
from kernels.linear_attention import reference
from tests.fem_megatron.test_fem_mixer import Arrays, _inverse_temperature, load_fixture, pack, read_alone

NAMES = ("linear", "gla", "gla_channel", "lrnn_decay")
every_prior = pytest.mark.parametrize("name", NAMES)
OFF = FemConfig(conditioner=False, free_energy=False, temperature=False, gate=False)


def shape_of(name: str, fem_config: FemConfig | None = None, **changes: Any) -> FemShape:
    """The shape that ``name`` asks for: width 32, 2 heads, budget (i), RoPE, unless said otherwise."""
    config = fem_config or FemConfig(conditioner_size=4)
    model = ModelConfig(**{"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 8, "fem": config, **changes})
    shape = FemShape.of(model, "softmax")
    width, causal = shape.prior.slices()["k"], model.causal
    prior: PriorShape
    if name == "lrnn_decay":
        prior = DecayShape.of(causal=causal)
    elif name == "linear":
        prior = LinearShape.linear(width, rope=model.rope, causal=causal)
    else:
        prior = LinearShape.gla(width, decay="head" if name == "gla" else "channel", rope=model.rope, causal=causal)
    return replace(shape, prior=prior)


def build(shape: FemShape, dtype: torch.dtype = torch.float64) -> FemMixer:
    """The mixer with every weight drawn anew, so that none is trivial."""
    layer = FemMixer(shape, OneProcess(dtype))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3)
    return layer


def stream(tokens: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(tokens, batch, 32, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64).to(dtype)


# --- the released numbers --------------------------------------------------------------------------------------------------------


def place_scan(arrays: Arrays, heads: int, kind: str, *, decay: bool) -> Arrays:
    """The fixture's parameters or gradients by our names and packing. Its conditioner leaves the decay alone: our rows for it are 0."""
    names = ["q", "k", *["decay"] * decay, "v", "lambda", "gate"]
    rows = {name: arrays[f"{kind}/W_{name}.weight"] for name in names}
    tdc = {key.removeprefix(f"{kind}/tdc.fwd."): value for key, value in arrays.items() if key.startswith(f"{kind}/tdc.fwd.")}
    order = ["v", "q", "k", "lambda", "gate", *["decay"] * decay]
    phi = dict(zip(order, tdc["out_proj"].T.split([len(rows[name]) for name in order]), strict=True))
    if decay and kind == "grad":
        assert not phi["decay"].any()
    if decay:
        phi["decay"] = torch.zeros_like(phi["decay"])
    return {
        "norm.weight": torch.ones(arrays["x"].shape[-1], dtype=torch.float64),
        "in_proj.weight": pack(heads, *rows.values()),
        "beta": _inverse_temperature(arrays["param/_beta_param"]) if kind == "param" else arrays["grad/_beta_param"],
        "tdc.norm.weight": tdc["norm.weight"],
        "tdc.in_proj.weight": torch.stack([tdc["in_f.weight"], tdc["x_f.weight"], tdc["shortcut.weight"]], dim=1).flatten(0, 1),
        "tdc.state_norm.weight": tdc["ln.weight"],
        "tdc.out_proj.weight": pack(heads, *(phi[name] for name in names)),
        "out_proj.weight": arrays[f"{kind}/W_o.weight"],
    }


def released_read(
    v: Tensor, beta: Tensor, lam: Tensor, gate: Tensor, read: Any, log_weights: Callable[[int, int], Tensor], **_: Any
) -> Tensor:
    """The read with the released GLA's 1e-5 in the denominator, so that p sums to a little less than one."""
    logs = log_weights(0, v.shape[2])
    log_p = logs - (logs.exp().sum(-1, keepdim=True) + 1e-5).log()
    mu = log_p.exp() @ v
    free = (log_p[..., None] + (beta[:, None] * v)[:, :, None]).logsumexp(3) / beta[:, None]
    return gate * (mu + lam * (free - mu))


@pytest.mark.parametrize(
    ("fixture", "backend", "denominator", "tolerance"),
    [
        # The fixtures add 1e-6 to the gate (of order one), to beta and to the conditioner's norm; ours adds nothing there.
        ("fem_linear_full", "fused", "exact", 1e-5),
        ("fem_linear_full", "reference", "exact", 1e-5),
        ("fem_gla_full", "fused", "released", 1e-5),
        # What the released denominator's 1e-5 is worth where the weights are small (tokens that fit q badly).
        ("fem_gla_full", "fused", "exact", 5e-4),
    ],
)
def test_reproduces_the_fixture(fixture: str, backend: str, denominator: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, arrays = load_fixture(fixture)
    if denominator == "released":
        monkeypatch.setattr(scan, "free_energy_read", released_read)
    config = FemConfig(value_size=meta["fem_dim"], conditioner_size=4)
    name, sizes = meta["prior"], {"hidden_size": meta["D"], "num_attention_heads": meta["H"]}
    mixer = build(shape_of(name, config, rope=False, norm_eps=0.0, attention_backend=backend, **sizes))
    mixer.tdc.eps = 1e-5
    mixer.load_state_dict(place_scan(arrays, meta["H"], "param", decay=name == "gla"))
    x = arrays["x"].transpose(0, 1).clone().requires_grad_()
    y = read_alone(mixer, x)
    (y * arrays["w"].transpose(0, 1)).sum().backward()

    def close(got: Tensor | None, wanted: Tensor, tolerance: float = tolerance) -> None:
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * wanted.abs().max().item())

    close(y, arrays["y"].transpose(0, 1))
    close(x.grad, arrays["dx"].transpose(0, 1))
    for key, wanted in place_scan(arrays, meta["H"], "grad", decay=name == "gla").items():
        got = mixer.get_parameter(key).grad
        if key == "norm.weight":  # the fixture has none
            continue
        assert got is not None
        if key == "tdc.out_proj.weight" and name == "gla":  # its decay's rows have no gradient, ours have
            got, wanted = (t.unflatten(0, (meta["H"], -1))[:, [*range(32), *range(33, 57)]] for t in (got, wanted))
        # The conditioner sees them through two more norms.
        close(got, wanted, 5 * tolerance if key.startswith("tdc") else tolerance)


# --- the plain priors ------------------------------------------------------------------------------------------------------------


def by_head(mixer: FemMixer, x: Tensor) -> dict[str, Tensor]:
    """The packed projection's slices of the normalised x, [s, b, h, width]."""
    return mixer._split_heads(rms_norm(x, mixer.norm.weight, mixer.shape.norm_eps) @ mixer.in_proj.weight.T)


@every_prior
@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_with_all_switches_off_it_is_the_plain_prior(name: str, backend: str, causal: bool) -> None:
    """Linear attention, GLA and a forgetting mean, token by token and pair by pair; RoPE before the features."""
    mixer = build(shape_of(name, OFF, causal=causal, attention_backend=backend))
    x = stream(11)
    parts = by_head(mixer, x)
    one = torch.ones(11, 2, 2, 1, dtype=torch.float64)
    q, k = (relu(rotate(parts[n], Context(), 10000)) + 1e-6 if n in parts else one for n in "qk")
    decay = torch.zeros_like(q)
    if name != "linear":
        decay = decay - (softplus(parts["decay"]) if name == "lrnn_decay" else relu(parts["decay"]) + 1e-6)
    reads = []
    for t in range(11):
        keys = range(t + 1 if causal else 11)
        weights = torch.stack([(q[t] * decay[min(t, i) + 1 : max(t, i) + 1].sum(0).exp() * k[i]).sum(-1) for i in keys])
        reads.append((weights[..., None] * parts["v"][: len(keys)]).sum(0) / weights.sum(0)[..., None])
    expected = x + torch.stack(reads).flatten(2) @ mixer.out_proj.weight.T
    torch.testing.assert_close(mixer(x, Context(causal=causal)), expected, rtol=1e-11, atol=1e-11)  # float64 rounding


@every_prior
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_fast_form_equals_the_exact_one(name: str, causal: bool) -> None:
    fast, exact = (build(shape_of(name, causal=causal, attention_backend=backend)) for backend in ("fused", "reference"))
    for tokens in (1, 2, 75):
        results = []
        for mixer in (fast, exact):
            x = stream(tokens).requires_grad_()
            mixer.zero_grad()
            y = mixer(x, Context(causal=causal))
            y.square().sum().backward()
            results.append([y, x.grad, *(p.grad for p in mixer.parameters())])
        for one, other in zip(*results, strict=True):
            # float64 rounding, relative to the largest; gradients pass through many sums
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9 * max(1.0, other.detach().abs().max().item()))


@every_prior
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
        rows[:, start] *= 3  # phi's row for the decay
        assert not torch.equal(plain(x, Context()), before)


# --- decoding --------------------------------------------------------------------------------------------------------------------


def decode(mixer: FemMixer, x: Tensor, sizes: list[int], valid: Tensor | None = None, state: State | None = None) -> Tensor:
    state = {} if state is None else state
    made, past = [], 0
    for size in sizes:
        seen = None if valid is None else valid[:, : past + size]
        positions = None if seen is None else (seen.long().cumsum(1) - 1).clamp_min(0).T[past:]
        made.append(mixer(x[past : past + size], Context(positions, seen, state=state, past=past)))
        past += size
    return torch.cat(made)


@every_prior
@pytest.mark.parametrize("config", [None, OFF], ids=["all", "plain"])
def test_token_by_token_and_in_parts_it_equals_the_whole(name: str, config: FemConfig | None) -> None:
    shape = shape_of(name, config)
    mixer, x = build(shape, torch.float32), stream(300, dtype=torch.float32)
    with torch.no_grad():
        whole = mixer(x, Context())
        for sizes in ([37, 63, *[1] * 200], [1] * 300):
            state: State = {}
            torch.testing.assert_close(decode(mixer, x, sizes, state=state), whole, rtol=0, atol=1e-5)  # float32 sums in another order
            assert sum(t.numel() * t.element_size() for t in state.values()) == 2 * shape.state_bytes(300, 4)  # of 2 sequences


@every_prior
def test_rows_of_unequal_length_equal_each_alone(name: str) -> None:
    mixer, x = build(shape_of(name)), stream(20)
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[0, :7] = False
    x = torch.where(valid.T[..., None], x, 50.0)
    with torch.no_grad():
        alone, full = mixer(x[7:, :1], Context()), mixer(x[:, 1:], Context())
        expected = torch.cat((torch.cat((x[:7, :1], alone)), full), dim=1)
        for sizes in ([20], [10, 1, 9], [5] * 4):
            o = decode(mixer, x, sizes, valid)
            assert o.isfinite().all()
            torch.testing.assert_close(o[valid.T], expected[valid.T], rtol=1e-11, atol=1e-11)  # float64 rounding


@every_prior
def test_padding_in_training_leaves_no_nan(name: str) -> None:
    mixer = build(shape_of(name, attention_backend="fused"))
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[0, :7] = valid[1, 12:] = False
    x = stream(20).requires_grad_()
    o = mixer(x, Context((valid.long().cumsum(1) - 1).clamp_min(0).T, valid))
    (o * valid.T[..., None]).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and not x.grad[~valid.T].any()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())


# --- causality, switches, precision, cost ----------------------------------------------------------------------------------------


@every_prior
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_nothing_comes_from_later_tokens(name: str, tokens: int) -> None:
    mixer = build(shape_of(name, attention_backend="reference"))
    x = stream(tokens + 5).requires_grad_()
    o = mixer(x, Context())
    (dx,) = torch.autograd.grad(o[:tokens].sum(), x)
    assert (dx[tokens:] == 0).all() and (dx[:tokens] != 0).all()
    for later in (3.0, 1e4):
        changed = torch.cat((x[:tokens], later * x[tokens:]))
        assert torch.equal(mixer(changed, Context())[:tokens], o[:tokens])


@every_prior
@pytest.mark.parametrize("off", ["conditioner", "free_energy", "temperature", "gate"])
def test_every_switch_by_itself(name: str, off: str) -> None:
    config = FemConfig(**{**vars(FemConfig(conditioner_size=4)), off: False})
    shape = shape_of(name, config)
    mixer = build(shape)
    state: State = {}
    o = mixer(stream(7), Context(state=state))
    torch.testing.assert_close(o, mixer(stream(7), Context()), rtol=1e-10, atol=1e-10)  # float64 rounding
    mixer(stream(7), Context()).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
    assert sum(t.numel() * t.element_size() for t in state.values()) == 2 * shape.state_bytes(7, 8)


@every_prior
def test_bfloat16(name: str) -> None:
    exact, rounded = (build(shape_of(name), dtype) for dtype in (torch.float32, torch.bfloat16))
    x = stream(40, dtype=torch.bfloat16)
    o = rounded(x, Context())
    o.sum().backward()
    assert o.dtype == torch.bfloat16 and all(p.grad is not None and p.grad.isfinite().all() for p in rounded.parameters())
    truth = exact(x.float(), Context())
    assert float((o.float() - truth).detach().norm() / truth.detach().norm()) < 0.02  # a handful of roundings of 2^-8


@every_prior
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("length", [10, 150])
def test_flops_are_those_that_torch_counts(name: str, causal: bool, length: int) -> None:
    shape = shape_of(name, causal=causal)
    mixer = build(shape, torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mixer(stream(length, batch=3, dtype=torch.float32), Context(causal=causal))
    planned = shape.flops(length, whole_square=True)
    assert counter.get_total_flops() == pytest.approx(3 * length * sum(planned.values()), rel=1e-12)  # float64 rounding
    assert sum(shape.flops(length).values()) <= sum(planned.values())


@every_prior
def test_8192_tokens_in_memory_linear_in_them(name: str) -> None:
    mixer = build(shape_of(name, attention_backend="fused"), torch.float32)

    def kept(tokens: int) -> int:
        """Bytes that the forward keeps for the backward; every result is finite."""
        seen: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x = stream(tokens, batch=1, dtype=torch.float32).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = mixer(x, Context())
        y.square().mean().backward()
        assert x.grad is not None and x.grad.isfinite().all() and y.isfinite().all()
        return sum(seen.values())

    short, long = kept(1024), kept(8192)
    assert long < 8.01 * short


def test_the_planned_chunks_are_the_kernels() -> None:
    assert (CHUNK, CHUNK_PER_CHANNEL) == (reference.CHUNK, reference.CHUNK_PER_CHANNEL)


def test_the_state_does_not_grow() -> None:
    shape = shape_of("gla")
    assert shape.state_bytes(1, 2) == shape.state_bytes(8192, 2)
    # d_k = 16, d_v = 8, 2 heads: sums over [v, U, 1] and two ends of the values, fp32; the conditioner's four
    assert shape.state_bytes(1, 2) == 4 * (2 * (16 * 17 + 2 * 8) + 4)


@pytest.mark.parametrize("name", ["linear", "gla"])
def test_the_budget_is_four_times_the_width_squared(name: str) -> None:
    for config in (FemConfig(conditioner=False), OFF):
        shape = shape_of(name, config, hidden_size=768, num_attention_heads=8)
        size = sum(weight.size for key, weight in shape.weights().items() if key.endswith(".weight") and len(weight.shape) == 2)
        assert size == 4 * 768**2 + (8 * 768 if name == "gla" else 0)  # and a row a head for the decay


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("model.fem.gla_decay='token' is not one of head, channel")):
        LinearShape.gla(8, decay="token", rope=True)
    with pytest.raises(ValueError, match=re.escape("model.fem.feature_eps=0 is not above 0")):
        LinearShape.linear(8, rope=True, eps=0.0)


@pytest.mark.parametrize("name", ["linear", "gla", "lrnn_decay"])
def test_products_in_bfloat16_as_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan's products in bfloat16 beside float32 decays: its own rounding, 2^-9, through the read and the output projection."""
    mixer = build(shape_of(name, attention_backend="fused"), torch.float32)
    x = torch.randn(33, 2, mixer.shape.hidden, generator=torch.Generator().manual_seed(3))
    plain = mixer.step(x, Context()).detach()
    monkeypatch.setattr("fem_megatron.mixers.fem.priors.product_type", lambda t: torch.bfloat16)
    narrow = mixer.step(x, Context()).detach()
    error = float((narrow - plain).norm() / plain.norm())
    assert 1e-5 < error < 1e-2
