"""Tests of muP: initialisation and learning rate of every weight of every mixer, the scale of
scores, and refusals. One process.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fem_megatron import catalogue
from fem_megatron.block import Block
from fem_megatron.config import ModelConfig
from fem_megatron.mixers.attention.shape import AttentionConfig
from fem_megatron.mixers.cem.shape import CemConfig
from fem_megatron.mixers.fem.shape import FemConfig
from fem_megatron.mixers.hyperset.shape import HyperSetConfig
from fem_megatron.mup import MupConfig, decay_factor, lr_factor, starts_from
from fem_megatron.parallel import OneProcess
from fem_megatron.shape import Normal
from fem_megatron.state import Context
from pretrain.plan.run_plan import model_weights

SMALL = ModelConfig(
    hidden_size=64, num_layers=1, num_attention_heads=8, ffn_hidden_size=96, vocab_size=100
)
MIXERS = {
    name: replace(SMALL, mixer=name) for name in catalogue.MIXERS if not name.startswith("fla.")
} | {
    "cem, a diagonal a head": replace(
        SMALL, mixer="cem", cem=CemConfig(diagonal="head", scale="head")
    ),
    "hyperset with adapters": replace(
        SMALL, mixer="hyperset", recurrence=2, hyperset=HyperSetConfig(lora_rank=2, time_size=16)
    ),
    "transformer, biases": replace(
        SMALL,
        mixer="transformer",
        attention=AttentionConfig(qkv_bias=True),
        num_query_groups=4,
        qk_norm=True,
    ),
}
HIDDEN, FIXED, OUTPUT = (-0.5, -1.0), (0.0, 0.0), (-1.0, -1.0)
# Weights whose factors do not follow from their number of dimensions: pattern of the name, (spread,
# learning rate) as powers of m. FIXED: the fan-in does not grow. OUTPUT: sums over the width into a
# size that does not grow. CEM's preconditioners: d = sqrt(D) p (see cem.py).
EXCEPTIONS = (
    (r"^embedding\.", FIXED),
    (r"^output_layer\.", OUTPUT),
    (r"\.(bc_)?conv$", FIXED),
    (r"\.mixer\.lam$", FIXED),
    (r"\.bc_proj\.weight$", OUTPUT),
    (r"\.step\.time_in\.weight$", FIXED),
    (r"_lora\.a$", FIXED),
    (r"_lora\.b$", OUTPUT),
    (r"\.mixer\.diagonal$", OUTPUT),
    (r"\.mixer\.precondition\.p$", (0.0, -1.0)),
    (r"\.mixer\.precondition\.u$", (0.0, -0.5)),
    (r"\.mlp\.precondition\.p$", (0.0, -0.5)),
    (r"\.mlp\.precondition\.u$", FIXED),
    (r"\.precondition\.v$", OUTPUT),
)


def mup(model: ModelConfig, base: int, head: int | None = None) -> ModelConfig:
    return replace(model, parametrization="mup", mup=MupConfig(base, head))


def build(model: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    from fem_megatron.megatron.model import Layout, build

    return build(model, Layout(params_dtype=dtype), 16, seed=1)[0]


def expected(name: str, dimensions: int) -> tuple[float, float]:
    return next(
        (powers for pattern, powers in EXCEPTIONS if re.search(pattern, name)),
        HIDDEN if dimensions > 1 else FIXED,
    )


@pytest.mark.parametrize("name", MIXERS)
def test_every_weight_starts_and_learns_as_its_fans_ask(name: str) -> None:
    """At m = 4 and m = 1/2 against powers written in this file; at m = 1 the standard start bit for
    bit. A draw is one normal times a std.
    """
    model = MIXERS[name]
    standard = dict(build(model).named_parameters())
    for base in (64, 16, 128):
        m, wide = 64 / base, mup(model, base)
        for key, parameter in build(wide).named_parameters():
            std, rate = expected(key, parameter.ndim)
            start = standard[key] * (
                1.0 if isinstance(parameter.spec.init, int | float) else m**std
            )
            # A draw is std times a unit normal, rounded: within one fp32 ulp of the standard draw
            # times the factor.
            torch.testing.assert_close(parameter, start, rtol=0.0 if m == 1 else 3e-7, atol=0.0)
            assert lr_factor(wide, parameter.spec) == pytest.approx(m**rate, rel=1e-12), key
            # lr x decay equals that of the base.
            assert lr_factor(wide, parameter.spec) * decay_factor(
                wide, parameter.spec
            ) == pytest.approx(1.0, rel=1e-12)
    assert {key: weight.scaling for key, weight in model_weights(wide).items()} == {
        key: parameter.spec.scaling for key, parameter in build(wide).named_parameters()
    }


# --- a step has the same effect at every width ----------------------------------------------------

BASE, WIDTHS, RATE = 32, (64, 256), 0.01


def felt(model: ModelConfig) -> dict[str, float]:
    """Return weight -> effect of one sign step (Adam's first) of this weight on a readout of the
    block's output, after three joint steps.

    The readout is sum of x * w / D with a random direction w per token: finite, like a loss.
    Float64; the block's input learns too.
    """
    generator = torch.Generator().manual_seed(model.hidden_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    block = Block(model.blocks()[0], OneProcess(torch.float64))
    weights = dict(block.named_parameters())
    factors = {name: lr_factor(model, weight.spec) for name, weight in weights.items()}  # type: ignore[attr-defined]
    with torch.no_grad():
        for weight in weights.values():
            start = starts_from(model, weight.spec)  # type: ignore[attr-defined]
            if isinstance(start, Normal):
                weight.copy_(normal(*weight.shape) * start.std)
    weights["input"] = torch.nn.Parameter(normal(12, 2, model.hidden_size))
    factors["input"] = 1.0
    directions = normal(12, 2, model.hidden_size) / model.hidden_size / 24

    def readout() -> Tensor:
        return (block(weights["input"], Context(causal=True)) * directions).sum()

    def step(names: list[str]) -> None:
        gradients = torch.autograd.grad(readout(), [weights[name] for name in names])
        with torch.no_grad():
            for name, gradient in zip(names, gradients, strict=True):
                weights[name].sub_(RATE * factors[name] * gradient.sign())

    for _ in range(3):
        step(list(weights))
    before, moved = float(readout().detach()), {}
    for name, weight in weights.items():
        kept = weight.detach().clone()
        step([name])
        moved[name] = abs(float(readout().detach()) - before)
        with torch.no_grad():
            weight.copy_(kept)
    return moved


def growth(model: ModelConfig, parametrization: str) -> dict[str, float]:
    """Return weight -> power of the width with which the effect of its step grows, for weights that
    grow with the width.

    The effect of a weight with a few numbers (CEM's biases, lambda) has either sign, and its size
    is random.
    """
    found, sizes_of = [], []
    for width in WIDTHS:
        sizes = {
            "hidden_size": width,
            "num_attention_heads": width // 8,
            "ffn_hidden_size": 2 * width,
            "init_std": BASE**-0.5,
        }
        wide = replace(model, **sizes)
        found.append(felt(mup(wide, BASE) if parametrization == "mup" else wide))
        sizes_of.append(
            {name: weight.size for name, weight in wide.blocks()[0].weights().items()}
            | {"input": width}
        )
    grown = {
        name: math.log(found[1][name] / found[0][name]) / math.log(WIDTHS[1] / WIDTHS[0])
        for name in found[0]
    }
    return {name: power for name, power in grown.items() if sizes_of[1][name] > sizes_of[0][name]}


FELT = (
    "transformer",
    "fem_softmax",
    "cem, a diagonal a head",
    "hyperset with adapters",
    "gated_deltanet",
    "differential",
)


@pytest.mark.parametrize("name", FELT)
def test_no_weight_s_step_is_felt_more_where_the_model_is_wider(name: str) -> None:
    """At four times the width. A wrong half power of m gives 0.5 and more; 0.3 allows for the
    scatter of one draw, up to 0.2 at these sizes.

    The effect of matrices over the full width does not decrease either. For others it may: the
    contribution of a random start to a sum that only learning aligns (adapters, an MLP's
    preconditioner) shrinks, as for an output layer.
    """
    grown = growth(MIXERS[name], "mup")
    assert max(grown.values()) < 0.3, grown
    full = (
        "in_proj",
        "out_proj",
        "query",
        "key",
        "gate_up",
        "down",
        "gamma",
        "up",
        "subspaces.weight",
        "directions.weight",
        "input",
    )
    felt_alike = {
        key: power
        for key, power in grown.items()
        if key.removesuffix(".weight").endswith(full) or key.endswith(full)
    }
    assert len(felt_alike) >= 3 and min(felt_alike.values()) > -0.3, felt_alike


def test_without_mup_they_are() -> None:
    """With the base's learning rates at every width, the effect of each matrix's step grows with
    the first power of the width.
    """
    grown = growth(MIXERS["transformer"], "standard")
    matrices = ("mixer.in_proj.weight", "mixer.out_proj.weight", "mlp.gate_up", "mlp.down.weight")
    assert min(grown[name] for name in matrices) > 0.7, grown


# --- the scale of the scores ----------------------------------------------------------------------

SCALED: dict[str, tuple[ModelConfig, int]] = {
    "transformer": (replace(SMALL, mixer="transformer"), 8),
    "transformer, a window and groups": (
        replace(
            SMALL,
            mixer="transformer",
            num_query_groups=4,
            attention=AttentionConfig(sliding_window=5),
        ),
        8,
    ),
    "fem_softmax": (replace(SMALL, mixer="fem_softmax"), 8),
    "fem_softmax, budget ii": (
        replace(SMALL, mixer="fem_softmax", hidden_size=96, fem=FemConfig(budget="ii")),
        8,
    ),
    "differential": (replace(SMALL, mixer="differential"), 4),
}


def query_rows(model: ModelConfig) -> Tensor:
    """Return a mask of the rows of in_proj that make queries."""
    shape: Any = model.blocks()[0].mixer
    if model.mixer == "transformer":
        each, width = shape.heads // shape.groups, shape.group_width
        return (torch.arange(shape.groups * width) % width) < each * shape.head
    if model.mixer == "differential":
        return (torch.arange(shape.heads * shape.head_width) % shape.head_width) < 2 * shape.head
    return (torch.arange(shape.heads * shape.head_width) % shape.head_width) < shape.slices["q"]


@pytest.mark.parametrize("name", SCALED)
def test_scores_are_scaled_by_the_root_of_the_base_over_the_width(name: str) -> None:
    """sqrt(base) / d is 1 / sqrt(d) times sqrt(base / d): the standard model with correspondingly
    smaller queries. Float64: 1e-12.
    """
    model, width = SCALED[name]
    scaled = build(mup(model, model.hidden_size, 2 * width), torch.float64)
    plain = build(mup(model, model.hidden_size), torch.float64)
    rows = query_rows(model)
    with torch.no_grad():
        plain.load_state_dict(scaled.state_dict())
        weight = plain.get_parameter("decoder.layers.0.mixer.in_proj.weight")
        weight[rows] *= math.sqrt(2.0)
        for name, parameter in (*scaled.named_parameters(), *plain.named_parameters()):
            if name.endswith("in_proj.weight") and ".tdc." not in name:
                parameter *= 5.0  # makes attention far from a mean
    tokens = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(16).repeat(2, 1)
    with torch.no_grad():
        ours, wanted = scaled(tokens, positions, None), plain(tokens, positions, None)
        plain.get_parameter("decoder.layers.0.mixer.in_proj.weight")[rows] /= math.sqrt(2.0)
        other = plain(tokens, positions, None)
    torch.testing.assert_close(ours[..., :100], wanted[..., :100], rtol=1e-12, atol=1e-12)
    assert (ours - other)[..., :100].abs().max() > 1e-6, "the scale matters"


def test_cem_s_scale_does_not_vanish_with_the_width() -> None:
    model = replace(SMALL, mixer="cem")
    scales = [each.blocks()[0].mixer.scale for each in (model, mup(model, 64), mup(model, 16))]  # type: ignore[attr-defined]
    assert scales == [64**-0.5, 64**-0.5, 16**-0.5]
    by_head = replace(model, cem=CemConfig(scale="head"))
    scales = [
        each.blocks()[0].mixer.scale  # type: ignore[attr-defined]
        for each in (by_head, mup(by_head, 16), mup(by_head, 16, 8), mup(by_head, 16, 2))
    ]
    assert scales == [8**-0.5, 8**-0.5, 8**-0.5, pytest.approx(2**0.5 / 8)]


@pytest.mark.parametrize("name", SCALED)
def test_at_the_base_s_own_head_nothing_changes(name: str) -> None:
    model, width = SCALED[name]
    assert mup(model, 16, width).blocks() == model.blocks()


# --- refused configurations -----------------------------------------------------------------------


def test_a_configuration_from_before_is_standard() -> None:
    fields = asdict(SMALL)
    del fields["parametrization"], fields["mup"]
    assert ModelConfig.from_dict(fields) == SMALL
    assert ModelConfig.from_dict(asdict(mup(SMALL, 16, 8))) == mup(SMALL, 16, 8)
