"""The FEM over AFT's prior and over the state-space prior: released numbers, plain priors, streaming, padding, budgets. One process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.flop_counter import FlopCounterMode

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.fem import layer as fem
from fem_megatron.mixers.fem.layer import FemMixer
from fem_megatron.mixers.fem.prior_shapes import AftShape, MambaShape
from fem_megatron.mixers.fem.priors import AftPrior, MambaPrior
from fem_megatron.mixers.fem.shape import FemConfig, FemShape
from fem_megatron.parallel import OneProcess
from fem_megatron.state import Context, State
from fem_megatron.update import rms_norm
from kernels.aft_read import aft_read
from kernels.conditioner_features import conditioner_features
from tests.fem_megatron.test_fem_mixer import load_fixture, place, read_alone

NAMES = ("aft", "aft_inside", "mamba", "mamba_not_normalised")
every_prior = pytest.mark.parametrize("name", NAMES)
OFF = FemConfig(conditioner=False, free_energy=False, temperature=False, gate=False)


def shape_of(name: str, config: FemConfig | None = None, **changes: Any) -> FemShape:
    """The shape that ``name`` asks for: width 32, 2 heads, budget (ii) unless said otherwise."""
    config = replace(
        config or FemConfig(budget="ii", value_size=16, conditioner_size=4),
        aft_query="inside" if name == "aft_inside" else "after",
        mamba_normalise=name == "mamba",
    )
    model = ModelConfig(**{"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 8, "fem": config, **changes})
    return FemShape.of(model, name.split("_")[0])


def build(shape: FemShape, dtype: torch.dtype = torch.float64) -> FemMixer:
    """The mixer with every weight drawn anew, so that none is trivial."""
    layer = FemMixer(shape, OneProcess(dtype))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3)
    return layer


def stream(tokens: int, batch: int = 2, dtype: torch.dtype = torch.float64, width: int = 32) -> Tensor:
    return torch.randn(tokens, batch, width, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64).to(dtype)


def put_in_the_released_epsilons(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the released code adds: 1e-6 to gate and query before their norm and to each exp(k - max k), 1e-8 and 1e-12 in C."""

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

    monkeypatch.setattr(fem, "outer_gate", gate)
    monkeypatch.setattr(AftPrior, "_positive", query)
    monkeypatch.setattr("fem_megatron.mixers.fem.priors.aft_read", read)
    monkeypatch.setattr("fem_megatron.mixers.fem.layer.time_decay_scan", scan)
    monkeypatch.setattr("fem_megatron.mixers.fem.layer.conditioner_features", shortcut)


@pytest.mark.parametrize("with_epsilons", [True, False])
def test_aft_inside_reproduces_the_released_code(with_epsilons: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_epsilons:
        put_in_the_released_epsilons(monkeypatch)
    meta, arrays = load_fixture("fem_aft_full")
    config = FemConfig(value_size=meta["fem_dim"], conditioner_size=4)
    shape = shape_of("aft_inside", config, hidden_size=meta["D"], num_attention_heads=meta["H"], norm_eps=0.0)
    assert shape.prior == AftShape(meta["d_k"], "inside", own_logits=True)
    mixer = build(shape)
    mixer.tdc.eps = 1e-5
    mixer.load_state_dict(place(mixer, arrays, meta["H"], "param"))
    x = arrays["x"].transpose(0, 1).clone().requires_grad_()
    y = read_alone(mixer, x)
    (y * arrays["w"].transpose(0, 1)).sum().backward()

    # With the released epsilons it is rounding; without, 1e-6 beside numbers of order one, up to twenty times that in gradients.
    def close(got: Tensor | None, wanted: Tensor) -> None:
        torch.testing.assert_close(got, wanted, rtol=0, atol=(1e-9 if with_epsilons else 2e-5) * wanted.abs().max().item())

    close(y, arrays["y"].transpose(0, 1))
    close(x.grad, arrays["dx"].transpose(0, 1))
    gradients = place(mixer, arrays, meta["H"], "grad")
    # beta = softplus(parameter) + 1e-6 there, softplus(parameter + 1.8) here: d beta / d parameter = 1 - exp(-softplus).
    gradients["beta"] = gradients["beta"] * torch.sigmoid(mixer.beta + 1.8).detach() / torch.sigmoid(arrays["param/_beta_param"])
    for key, wanted in gradients.items():
        if key != "norm.weight":  # the fixture has none
            close(mixer.get_parameter(key).grad, wanted)


def by_head(mixer: FemMixer, x: Tensor) -> dict[str, Tensor]:
    """The packed projection's slices of the normalised x, [s, b, h, width]."""
    return mixer._split_heads(rms_norm(x, mixer.norm.weight, mixer.shape.norm_eps) @ mixer.in_proj.weight.T)


def test_with_all_switches_off_it_is_aft() -> None:
    mixer = build(shape_of("aft", OFF))
    x = stream(11)
    parts = by_head(mixer, x)
    weights = parts["k"].exp()
    read = parts["q"].sigmoid() * (weights * parts["v"]).cumsum(0) / weights.cumsum(0)
    expected = x + read.flatten(2) @ mixer.out_proj.weight.T
    torch.testing.assert_close(mixer(x, Context()), expected, rtol=1e-12, atol=1e-12)  # float64 rounding


def test_the_query_gates_after_the_read() -> None:
    mixer = build(shape_of("aft", FemConfig(budget="ii", value_size=16, conditioner=False)))
    x = stream(11)
    parts, beta = by_head(mixer, x), mixer.inverse_temperature()
    weights = parts["k"].exp()
    total = weights.cumsum(0)
    assert beta is not None
    mu = (weights * parts["v"]).cumsum(0) / total
    free_energy = ((weights * (beta * parts["v"]).exp()).cumsum(0) / total).log() / beta
    lam, gate = parts["lam"].sigmoid(), fem.outer_gate(parts["gate"], mixer.shape.norm_eps)
    read = parts["q"].sigmoid() * gate * ((1 - lam) * mu + lam * free_energy)
    torch.testing.assert_close(mixer(x, Context()), x + read.flatten(2) @ mixer.out_proj.weight.T, rtol=1e-12, atol=1e-12)  # rounding


@pytest.mark.parametrize("normalise", [True, False])
def test_with_all_switches_off_it_is_the_selective_scan(normalise: bool) -> None:
    mixer = build(shape_of("mamba" if normalise else "mamba_not_normalised", OFF))
    x = stream(11)
    parts, width = by_head(mixer, x), mixer.shape.value_head
    steps = torch.logspace(-3, -1, width, dtype=torch.float64)
    delta = softplus(parts["delta"] + steps.expm1().log() + mixer.prior.delta_bias.view(2, width))
    states = parts["b"].shape[-1]
    rate = softplus(mixer.prior.rate.view(2, width, states) + torch.arange(1, states + 1).double().expm1().log())
    numerator = denominator = torch.zeros(2, 2, width, states, dtype=torch.float64)
    reads = []
    for t in range(11):
        decay, intake = (-delta[t, ..., None] * rate).exp(), delta[t, ..., None] * (softplus(parts["b"][t]) + 1e-6)[..., None, :]
        numerator, denominator = decay * numerator + intake * parts["v"][t, ..., None], decay * denominator + intake
        c_out = (softplus(parts["c"][t]) + 1e-6)[..., None, :]
        read = (c_out * numerator).sum(-1)
        reads.append(read / (c_out * denominator).sum(-1) if normalise else read)
    expected = x + torch.stack(reads).flatten(2) @ mixer.out_proj.weight.T
    torch.testing.assert_close(mixer(x, Context()), expected, rtol=1e-12, atol=1e-12)  # float64 rounding


def test_the_first_steps_and_rates_are_mambas() -> None:
    prior = FemMixer(shape_of("mamba"), OneProcess()).prior
    assert isinstance(prior, MambaPrior)
    steps, rates = softplus(prior._step_logit(torch.float32)), prior._rate(torch.float32)
    torch.testing.assert_close(steps[0, 0, [0, -1]], torch.tensor([1e-3, 1e-1]), rtol=1e-4, atol=0)  # float32 through log and softplus
    torch.testing.assert_close(rates[1, 3], torch.arange(1.0, rates.shape[-1] + 1), rtol=1e-5, atol=0)


@every_prior
def test_token_by_token_and_in_parts_it_equals_the_whole(name: str) -> None:
    shape = shape_of(name)
    mixer = build(shape, torch.float32)
    x = stream(300, dtype=torch.float32)
    with torch.no_grad():
        whole = mixer(x, Context())
        for sizes in ([37, 63, *[1] * 200], [1] * 300):
            state: State = {}
            made, past = [], 0
            for size in sizes:
                made.append(mixer(x[past : past + size], Context(state=state, past=past)))
                past += size
            torch.testing.assert_close(torch.cat(made), whole, rtol=0, atol=1e-5)  # float32 sums in another order
            kept = sum(t.numel() * t.element_size() for t in state.values())
            assert kept == 2 * shape.state_bytes(300, 4)  # of 2 sequences


@every_prior
def test_rows_of_unequal_length_equal_each_alone(name: str) -> None:
    mixer = build(shape_of(name))
    x = stream(20)
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[0, :7] = False
    with torch.no_grad():
        alone, full = mixer(x[7:, :1], Context()), mixer(x[:, 1:], Context())
        expected = torch.cat((torch.cat((x[:7, :1], alone)), full), dim=1)
        for sizes in ([20], [10, 1, 9], [5] * 4):
            state: State = {}
            made, past = [], 0
            for size in sizes:
                made.append(mixer(x[past : past + size], Context(state=state, past=past, valid=valid[:, : past + size])))
                past += size
            o = torch.cat(made)
            assert o.isfinite().all()
            torch.testing.assert_close(o[valid.T], expected[valid.T], rtol=1e-11, atol=1e-11)  # float64 rounding


@every_prior
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_nothing_comes_from_later_tokens(name: str, tokens: int) -> None:
    mixer = build(shape_of(name))
    x = stream(tokens + 5).requires_grad_()
    o = mixer(x, Context())
    (dx,) = torch.autograd.grad(o[:tokens].sum(), x)
    assert (dx[tokens:] == 0).all() and (dx[:tokens] != 0).all()
    for later in (3.0, 1e4):
        changed = torch.cat((x[:tokens], later * x[tokens:]))
        assert torch.equal(mixer(changed, Context())[:tokens], o[:tokens])


@every_prior
def test_without_a_mask_every_token_matters_and_the_reversed_sequence_gives_the_reversed_read(name: str) -> None:
    mixer = build(shape_of(name, replace(FemConfig(budget="ii", value_size=16), conditioner=False), causal=False))
    x = stream(9).requires_grad_()
    o = mixer(x, Context(causal=False))
    (dx,) = torch.autograd.grad(o[3].sum(), x)
    assert (dx != 0).all()
    if name.startswith("aft"):  # the state-space model's steps lie before a token in one direction, behind it in the other
        torch.testing.assert_close(mixer(x.flip(0), Context(causal=False)).flip(0), o, rtol=1e-12, atol=1e-12)  # float64 rounding


@every_prior
@pytest.mark.parametrize("off", ["conditioner", "free_energy", "temperature", "gate"])
def test_every_switch_by_itself(name: str, off: str) -> None:
    config = FemConfig(**{**vars(FemConfig(budget="ii", value_size=16, conditioner_size=4)), off: False})
    shape = shape_of(name, config)
    mixer = build(shape)
    state: State = {}
    o = mixer(stream(7), Context(state=state))
    o.sum().backward()
    assert o.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
    assert sum(t.numel() * t.element_size() for t in state.values()) == 2 * shape.state_bytes(7, 8)


@every_prior
def test_bfloat16(name: str) -> None:
    exact = build(shape_of(name), torch.float32)
    rounded = build(shape_of(name), torch.bfloat16)
    x = stream(40, dtype=torch.bfloat16)
    o = rounded(x, Context())
    o.sum().backward()
    assert o.dtype == torch.bfloat16 and all(p.grad is not None and p.grad.isfinite().all() for p in rounded.parameters())
    truth = exact(x.float(), Context())
    assert float((o.float() - truth).detach().norm() / truth.detach().norm()) < 0.02  # a handful of roundings of 2^-8


@pytest.mark.parametrize(("name", "budget"), [("aft", "ii"), ("aft_inside", "i"), ("aft_inside", "ii"), ("mamba", "i"), ("mamba", "ii")])
@pytest.mark.parametrize("on", [True, False])
def test_the_budget_is_four_times_the_width_squared(name: str, budget: str, on: bool) -> None:
    config = replace(FemConfig() if on else OFF, conditioner=False, budget=budget)
    shape = shape_of(name, config, hidden_size=768, num_attention_heads=8)
    matrices = {key: weight for key, weight in shape.weights().items() if key.endswith(".weight") and len(weight.shape) == 2}
    assert sum(weight.size for weight in matrices.values()) == 4 * 768**2


@every_prior
@pytest.mark.parametrize("causal", [True, False])
def test_flops_are_those_that_torch_counts(name: str, causal: bool) -> None:
    shape = shape_of(name, causal=causal)
    mixer = build(shape, torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mixer(stream(10, batch=3, dtype=torch.float32), Context(causal=causal))
    assert counter.get_total_flops() == 30 * sum(shape.flops(10).values())


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.fem\.aft_query='before' is not one of after, inside"):
        AftShape.of(8, 8, "before", free_energy=True)
    with pytest.raises(ValueError, match=r"model\.fem\.mamba_states=0 is below 1"):
        MambaShape.of(8, 8, 0, normalise=True, free_energy=True)
