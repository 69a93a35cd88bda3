"""Tests of the diagnostics: every quantity against its definition, for every mixer of the
catalogue, without effect on the model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fem_megatron import catalogue
from fem_megatron.block import Block
from fem_megatron.config import ModelConfig
from fem_megatron.diagnostics import observe, observing
from fem_megatron.documents import Documents
from fem_megatron.mixers.cem.shape import CemConfig
from fem_megatron.mixers.fem.shape import FemConfig
from fem_megatron.mixers.hyperset.shape import HyperSetConfig
from fem_megatron.parallel import OneProcess
from fem_megatron.state import Context
from fem_megatron.update import rms_norm

SMALL = ModelConfig(
    hidden_size=16, num_layers=1, num_attention_heads=2, ffn_hidden_size=24, vocab_size=32
)
NAMES = [name for name in catalogue.MIXERS if not name.startswith("fla.")]
FEMS = [name for name in NAMES if name.startswith("fem_")]
LENGTH = 24
ROUNDING: Any = {"rel": 1e-9, "abs": 1e-12}  # float64 sums of a few hundred terms


def block(
    name: str = "fem_softmax",
    seed: int = 0,
    spread: float = 0.4,
    model: ModelConfig = SMALL,
    **settings: Any,
) -> Block:
    """Return a block of one process in float64 with random weights; those with constant initial
    values are perturbed.
    """
    made = Block(
        catalogue.block(replace(model, mixer=name, **settings), name, 0), OneProcess(torch.float64)
    )
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            init = weight.spec.init  # type: ignore[attr-defined]
            noise = torch.randn(weight.shape, generator=rng, dtype=torch.float64)
            weight.copy_(
                init + 0.1 * noise.abs() if isinstance(init, int | float) else spread * noise
            )
    return made


def tokens(
    length: int = LENGTH, batch: int = 2, seed: int = 1, name: str = "fem_softmax"
) -> Tensor:
    width = replace(SMALL, mixer=name).stream_size
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(length, batch, width, generator=rng, dtype=torch.float64)


def seen(made: Block, x: Tensor, count: int = 256, *, causal: bool = True) -> dict[str, float]:
    with torch.no_grad(), observing({3: made}, count) as values:
        made(x, Context(causal=causal))
    return values


def own(values: dict[str, float], part: str = "mixer") -> dict[str, float]:
    """Return the quantities of one part of a block without recurrence, by their names within the
    part.
    """
    return {
        name.rpartition("/")[2]: value
        for name, value in values.items()
        if name.startswith(f"layer_03/{part}/")
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_mixer_is_seen_and_does_not_notice(name: str) -> None:
    made, x = block(name), tokens(name=name)
    with torch.no_grad():
        plain = made(x, Context())
        moved = made.mixer(x, Context(origin=x, memory={}))
        with observing({3: made}) as values:
            watched = made(x, Context())
        hooks: list[int] = []
        for module in made.modules():
            hooks += [*module._forward_hooks, *module._forward_pre_hooks]
    assert torch.equal(plain, watched)
    assert not hooks
    assert all(math.isfinite(value) for value in values.values()), values
    x, moved, plain = (t[..., : SMALL.hidden_size] for t in (x, moved, plain))
    expected = ((moved - x).norm(dim=-1) / x.norm(dim=-1))[:, 0].mean().item()
    if not name.startswith("cem"):  # the steps of cem start at another point
        assert own(values)["step_norm"] == pytest.approx(expected, **ROUNDING)
    quantities = set(own(values)) - {"step_norm", "activation_max"}
    assert own(values, "mlp" if made.mlp else "mixer")["activation_max"] == pytest.approx(
        plain[:, 0].abs().max().item(), **ROUNDING
    )
    assert bool(quantities) == (made.mixer.diagnostics is not None)
    assert own(values, "mlp").keys() >= ({"step_norm"} if made.mlp else set())


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_a_causal_model_is_its_beginning(name: str) -> None:
    """The sample of a longer sequence and of a batch equals that of its beginning; a second call in
    one context is ignored.
    """
    made, x = block(name), tokens(name=name)
    with torch.no_grad(), observing({3: made}, 8) as values:
        made(x, Context())
        made(-x, Context())
    assert values == pytest.approx(seen(made, x[:8, :1]), **ROUNDING)


class Gathering(OneProcess):
    """One of two ranks that have equal halves of a sequence."""

    size = 2

    def enter(self, x: Tensor) -> Tensor:
        return torch.cat((x, x))


def test_of_documents_read_separately_the_longest_is_the_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The longest document of the first sequence; if two ranks have documents of one token, only
    the step norm is reported.
    """
    made = block("fem_gla")
    x = tokens()
    begins = torch.zeros(2, LENGTH, dtype=torch.bool)
    begins[0, [1, 5, 20]], begins[1, 1] = True, True
    documents = Documents.of(begins)
    with torch.no_grad(), observing({3: made}) as values:
        made(x, Context(documents.positions, documents=documents))
    assert values == pytest.approx(seen(made, x[5:20, :1]), **ROUNDING)
    monkeypatch.setattr(made.mixer, "parallel", Gathering(torch.float64))
    short = Context(documents=Documents.of(torch.ones(2, 2 * LENGTH, dtype=torch.bool)))
    assert observe(made.mixer, x, 2 * x, short) == {
        "step_norm": pytest.approx(1.0),
        "activation_max": 2 * x[:, 0].abs().max(),
    }


def test_names_of_iterations() -> None:
    names = set(seen(block("transformer", recurrence=2), tokens()))
    quantities = [
        f"{part}/{name}" for part in ("mixer", "mlp") for name in ("step_norm", "activation_max")
    ]
    quantities += ["mixer/prior_entropy", "mixer/logit_max"]
    assert names == {
        f"layer_03/iteration_{i:02}/{quantity}" for i in (0, 1) for quantity in quantities
    }


def test_fem_by_its_equations() -> None:
    """All quantities of FEM-softmax from p by loops: the entropies as means over the requested
    (channel, token) pairs.
    """
    made, x = block(rope=False, fem=FemConfig(conditioner=False)), tokens(batch=1)
    given: list[Any] = []
    made.mixer.prior.register_forward_pre_hook(lambda _, arguments: given.append(arguments))
    values = own(seen(made, x))
    parts, (v, beta, lam, _), _ = given[0]
    q, k = (parts[name][:, 0].transpose(0, 1) for name in ("q", "k"))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(
        torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf
    )
    p = scores.softmax(-1)
    heads, _, width = v[0].shape
    by_channel = []
    for j in range(width):
        boltzmann = (beta[:, j, None, None] * v[0, :, None, :, j]).exp()
        by_channel.append((p * boltzmann).sum(-1).log() / beta[:, j, None])
    free_energy = torch.stack(by_channel, -1)
    mu = p @ v[0]
    assert values["energy"] == pytest.approx(-free_energy.mean().item(), **ROUNDING)
    assert values["free_energy_gap"] == pytest.approx((free_energy - mu).mean().item(), **ROUNDING)
    assert values["logit_max"] == pytest.approx(scores.max().item(), **ROUNDING)
    prior, posterior = [], []
    for h in range(heads):
        for j in range(width):
            t = max(0, (j * heads + h + 1) * LENGTH // (heads * width) - 1)
            row = p[h, t]
            tilted = row * (beta[h, j] * (v[0, h, :, j] - free_energy[h, t, j])).exp()
            prior.append(torch.special.entr(row).sum())
            posterior.append(torch.special.entr(tilted).sum())
    assert values["prior_entropy"] == pytest.approx(torch.stack(prior).mean().item(), **ROUNDING)
    assert values["posterior_entropy"] == pytest.approx(
        torch.stack(posterior).mean().item(), **ROUNDING
    )
    for name, known in (("beta", beta), ("lambda", lam)):
        for percent in (10, 50, 90):
            assert values[f"{name}_{percent}"] == pytest.approx(
                known.flatten().quantile(percent / 100).item(), **ROUNDING
            )


@pytest.mark.parametrize("name", FEMS)
def test_a_fem_of_equal_values(name: str) -> None:
    """With equal values F = mu = v and the posterior is the prior; likewise for beta near 0."""
    made, x = block(name), tokens(name=name)
    rows = made.mixer.in_proj.weight.view(made.mixer.shape.heads, -1, SMALL.hidden_size)
    start = sum(width for slice_, width in made.mixer.shape.prior.slices().items())
    with torch.no_grad():
        rows[:, start : start + made.mixer.shape.value_head] = 0.0
    values = own(seen(made, x))
    assert values["free_energy_gap"] == pytest.approx(0.0, abs=1e-12)
    assert values["posterior_entropy"] == pytest.approx(values["prior_entropy"], **ROUNDING)
    hot = block(name)
    with torch.no_grad():
        hot.mixer.beta.fill_(-25.0)
    values = own(seen(hot, x))
    # q differs from p by beta (v - mu), which is of the order of 1e-9.
    assert values["posterior_entropy"] == pytest.approx(values["prior_entropy"], rel=1e-7)
    assert 0.0 < values["prior_entropy"] < math.log(LENGTH)


def test_attention_of_zero_scores() -> None:
    """p is uniform over the visible tokens, so its entropy is log(t + 1); also with grouped queries
    and for a bidirectional model.
    """
    for groups in (1, 2):
        made = block("transformer", num_query_groups=groups)
        with torch.no_grad():
            made.mixer.in_proj.weight.zero_()
        wanted = sum(math.log(t + 1) for t in range(LENGTH)) / LENGTH
        assert own(seen(made, tokens()))["prior_entropy"] == pytest.approx(wanted, **ROUNDING)
        assert own(seen(made, tokens(), causal=False))["prior_entropy"] == pytest.approx(
            math.log(LENGTH), **ROUNDING
        )


@pytest.mark.parametrize("part", ["mixer", "mlp"])
def test_cem_descends_and_climbs(part: str) -> None:
    """A small downward step with a positive preconditioner lowers every token's energy; the
    reversed step raises it.
    """
    for eta, rose in ((1e-3, 0.0), (-1e-3, 1.0)):
        cem = CemConfig(diagonal="none", preconditioner="diagonal", eta_attention=eta, eta_mlp=eta)
        made = block("cem", cem=cem)
        values, update = own(seen(made, tokens()), part), getattr(made, part)
        assert values["energy_rose"] == rose
        assert (values["energy_after"] > values["energy_before"]) == bool(rose)
        assert values["smallest_eigenvalue"] == pytest.approx(
            update.precondition.diagonal().min().item(), **ROUNDING
        )
        x = tokens()[:, :1] if part == "mixer" else made.mixer(tokens()[:, :1], Context())
        start = rms_norm(x, update.norm.weight, update.shape.norm_eps)
        wanted = (update(x, Context()) - start).norm(dim=-1) / start.norm(dim=-1)
        assert values["step_norm"] == pytest.approx(wanted.mean().item(), **ROUNDING)


def test_second_order_steps_descend_their_energy() -> None:
    """W_O = -(eta / H) W_Q^T is gradient descent, and + is ascent; for linear attention the signs
    are reversed.
    """
    for name, down in (("mha2nd1st", -1e-3), ("energy_linear", 1e-3)):
        for sign, rose in ((1.0, 0.0), (-1.0, 1.0)):
            made = block(name, rope=False, mlp="none")
            head = made.mixer.shape.head
            query = made.mixer.in_proj.weight.unflatten(0, (-1, 2, head))[:, 0].flatten(0, 1)
            with torch.no_grad():
                made.mixer.out_proj.weight.copy_(sign * down * query.T)
                made.mixer.norm.weight.fill_(1.0)
            values = own(seen(made, tokens()))
            # The norm at the input changes the direction of the step, so the check covers the mean
            # and nearly every token instead of each token.
            assert (values["energy_after"] > values["energy_before"]) == bool(rose)
            assert values["energy_rose"] == pytest.approx(rose, abs=0.1)


def test_hyperset_is_its_own_measure() -> None:
    """With depth-wise LoRA the second iteration is measured with the second adapter."""
    made = block("hyperset", recurrence=2, hyperset=HyperSetConfig(lora_rank=2))
    x = tokens(batch=1)
    with torch.no_grad():
        middle = made.mixer(x, Context(origin=x, memory={}))
        after = made(x, Context())
    every, context = torch.arange(LENGTH), Context(iteration=1)
    then, now = (made.mixer.diagnose(t, context, every) for t in (middle, after))
    values = {
        name.rpartition("/")[2]: value
        for name, value in seen(made, x).items()
        if "iteration_01" in name
    }
    for energy in ("attention_energy", "feed_forward_energy"):
        assert values[f"{energy}_before"] == pytest.approx(then[energy].mean().item(), **ROUNDING)
        assert values[f"{energy}_after"] == pytest.approx(now[energy].mean().item(), **ROUNDING)
        assert values[f"{energy}_rose"] == pytest.approx(
            (now[energy] > then[energy]).double().mean().item(), **ROUNDING
        )
    for measure in ("effective_rank", "mean_angle"):
        assert values[measure] == pytest.approx(then[measure].mean().item(), **ROUNDING)


@pytest.mark.parametrize("name", NAMES)
def test_short_and_broken_samples(name: str) -> None:
    """One token, an odd number, bfloat16; for a non-finite update only the step norm is reported,
    and no error is raised.
    """
    made = block(name)
    for length in (1, 3):
        assert all(math.isfinite(value) for value in seen(made, tokens(length, name=name)).values())
    x = tokens(4, name=name)
    with torch.no_grad():
        found = observe(made.mixer, x, x * torch.nan, Context())
    assert set(found) == {"step_norm", "activation_max"} and found["step_norm"].isnan()
    half = block(name).to(torch.bfloat16)
    assert all(
        math.isfinite(value) for value in seen(half, tokens(5, name=name).bfloat16()).values()
    )


@pytest.mark.parametrize(
    "name", ["transformer", "differential", "mha2nd1st", "cem", "hyperset", "fem_softmax"]
)
def test_the_largest_logit_is_what_the_read_s_softmax_is_taken_of(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the input of the definition's softmax, including the mask, in a forward pass of
    one sequence.
    """
    made = block(name, cem=CemConfig(steps_attention=1))
    x = tokens(batch=1)
    given = list[Tensor]()

    class Softmaxes(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), named: Any = None
        ) -> Any:
            if function in (Tensor.softmax, Tensor.log_softmax):
                given.append(arguments[0])
            return function(*arguments, **(named or {}))

    found = own(seen(made, x))["logit_max"]
    monkeypatch.setenv("FEM_KERNELS", "fem_attention=reference,symmetric_attention=reference")
    with torch.no_grad(), Softmaxes():
        made.mixer(x, Context(origin=x, memory={}))
    # A constant that is added to all scores.
    left_out = float(made.mixer.cross_bias.detach()) if name == "cem" else 0.0
    assert found == pytest.approx(
        max(float(scores.max()) for scores in given) + left_out, **ROUNDING
    )


@pytest.mark.parametrize("query", ["after", "inside"])
def test_afts_prior_is_of_its_keys(query: str) -> None:
    """p_t(i) = exp(k_i) / sum, wherever the query multiplies; F is the free energy under p, without
    the query.
    """
    made = block("fem_aft", fem=FemConfig(conditioner=False, aft_query=query))
    x = tokens(batch=1)
    given: list[Any] = []
    made.mixer.prior.register_forward_pre_hook(lambda _, arguments: given.append(arguments))
    values = own(seen(made, x))
    parts, (v, beta, *_), _ = given[0]
    k, v = parts["k"][:, 0], v[0].transpose(0, 1)
    heads, width = made.mixer.shape.heads, made.mixer.shape.value_head
    entropies = []
    for h in range(heads):
        for j in range(width):
            t = max(0, (j * heads + h + 1) * LENGTH // (heads * width) - 1)
            entropies.append(torch.special.entr(k[: t + 1, h, j].softmax(0)).sum())
    assert values["prior_entropy"] == pytest.approx(
        torch.stack(entropies).mean().item(), **ROUNDING
    )
    # The second half: the variant of the released code, with F inside, has separate logits for F.
    first, last = k[..., :width], k[..., -width:]
    free_energy = ((last + beta * v).logcumsumexp(0) - last.logcumsumexp(0)) / beta
    mu = (first.exp() * v).cumsum(0) / first.exp().cumsum(0)
    assert values["energy"] == pytest.approx(-free_energy.mean().item(), **ROUNDING)
    assert values["free_energy_gap"] == pytest.approx((free_energy - mu).mean().item(), **ROUNDING)


def test_the_gap_is_a_divergence() -> None:
    """For a FEM with different values: F > mu, and the posterior is sharper than a flat prior."""
    made = block()
    parts = made.mixer.shape.prior.slices()
    rows = made.mixer.in_proj.weight.view(made.mixer.shape.heads, -1, SMALL.hidden_size)
    with torch.no_grad():
        rows[:, : sum(parts.values())] = 0.0
    values = own(seen(made, tokens()))
    heads, width = made.mixer.shape.heads, made.mixer.shape.value_head
    requested = [
        max(0, number * LENGTH // (heads * width) - 1) for number in range(1, heads * width + 1)
    ]
    assert values["prior_entropy"] == pytest.approx(
        sum(math.log(t + 1) for t in requested) / len(requested), **ROUNDING
    )
    assert values["free_energy_gap"] > 0.01
    assert values["posterior_entropy"] < values["prior_entropy"] - 0.01


def test_switches_of_the_fem() -> None:
    x = tokens()
    assert set(own(seen(block(fem=FemConfig(free_energy=False)), x))) == {
        "step_norm",
        "activation_max",
        "logit_max",
        "prior_entropy",
    }
    without = set(own(seen(block(fem=FemConfig(temperature=False)), x)))
    assert without == {
        "step_norm",
        "activation_max",
        "logit_max",
        "prior_entropy",
        "posterior_entropy",
        "energy",
        "free_energy_gap",
    }


def test_hypersets_iterations_have_their_own_weights() -> None:
    """With depth-wise LoRA the second iteration is measured with the second adapter."""
    made = block("hyperset", recurrence=2, hyperset=HyperSetConfig(lora_rank=2))
    x = tokens(batch=1)
    with torch.no_grad():
        middle = made.mixer(x, Context(origin=x, memory={}))
    then = made.mixer.diagnose(middle, Context(iteration=1), torch.arange(LENGTH))
    found = seen(made, x)["layer_03/iteration_01/mixer/attention_energy_before"]
    assert found == pytest.approx(then["attention_energy"].mean().item(), **ROUNDING)


def test_values_and_normaliser_do_not_bend_the_prior() -> None:
    """Mamba's prior reads sigmoid(v): its weights equal those of the same prior that reads v. The
    ablation's weights do not sum to one.
    """
    made, x = block("fem_mamba"), tokens()
    usual, shape = own(seen(made, x)), made.mixer.shape
    assert shape.prior.squash and shape.prior.normalise
    for changed in (replace(shape.prior, squash=False), replace(shape.prior, normalise=False)):
        made.mixer.shape = made.mixer.prior.shape = replace(shape, prior=changed)
        other = own(seen(made, x))
        assert usual["prior_entropy"] == pytest.approx(other["prior_entropy"], **ROUNDING)
        assert usual["energy"] != pytest.approx(other["energy"], rel=1e-3)
