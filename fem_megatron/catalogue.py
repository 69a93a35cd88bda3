"""Registry of mixers: maps each mixer name to its description and to a function for its shape.

The module does not import torch: a shape refers to its layer class by the class's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING

from fem_megatron import mup, rope
from fem_megatron.mixers.attention.shape import AttentionShape
from fem_megatron.mixers.cem.shape import CemAttentionShape, CemMlpShape
from fem_megatron.mixers.delta.shape import DeltaShape
from fem_megatron.mixers.differential.shape import DifferentialShape
from fem_megatron.mixers.energy_transformer.shape import EnergyTransformerShape
from fem_megatron.mixers.fem.prior_shapes import (
    AftShape,
    DecayShape,
    GlaShape,
    LinearShape,
    MambaShape,
    PriorShape,
    SoftmaxShape,
)
from fem_megatron.mixers.fem.shape import FemShape
from fem_megatron.mixers.fla.shape import FlaShape
from fem_megatron.mixers.hyperset.shape import HyperSetShape
from fem_megatron.mixers.mamba2.shape import Mamba2Shape
from fem_megatron.mixers.nrgpt.shape import NrgptShape
from fem_megatron.mixers.second_order.shape import EnergyLinearShape, SecondOrderShape
from fem_megatron.mixers.yuriiformer.shape import AcceleratedAttentionShape, AcceleratedSwiGluShape
from fem_megatron.shape import BlockShape, Shape, SwiGluShape

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig

EVERY_LAYOUT = "TP SP PP VPP CP DP"
# Keys that are valid with every mixer, so that a configuration can be combined with any mixer. A
# mixer that defines its own heads or MLP ignores those keys, and one without positions ignores
# rope. The base of muP is checked by the mup module.
EVERYONES = frozenset(
    "mixer pattern mlp recurrence repeated hidden_size num_layers num_attention_heads "
    "ffn_hidden_size vocab_size make_vocab_size_divisible_by tie_embeddings causal rope "
    "rope_base rope_scaling norm_eps init_std parametrization mup mtp_depth "
    "mtp_loss_weight".split()
)


@dataclass(frozen=True)
class Mixer:
    """Catalogue entry of one value of ``model.mixer``.

    about: one-line description.
    paper: source of the mixer.
    cost: order of the cost for a sequence of T tokens.
    shape: function (model configuration, layer number from 0) -> shape. It raises ValueError,
        naming the key, if sizes do not fit.
    mlp: the MLP that follows the mixer unless ``model.mlp`` sets another.
    layouts: the parallel layouts that the mixer supports.
    package: the external package that computes the mixer (on a GPU only), or None.
    """

    about: str
    paper: str
    cost: str
    shape: Callable[[ModelConfig, int], Shape]
    mlp: str = "swiglu"
    layouts: str = EVERY_LAYOUT
    package: str | None = None


def _fem(about: str, prior: type[PriorShape], cost: str) -> Mixer:
    return Mixer(about, "Free Energy Mixer", cost, lambda model, layer: FemShape.of(model, prior))


BASELINE = "transformer"
"""The mixer that serves as the baseline of comparisons."""

MIXERS: dict[str, Mixer] = {
    "fem_softmax": _fem("FEM over softmax attention's weights", SoftmaxShape, "T^2"),
    "fem_linear": _fem("FEM over linear attention's weights", LinearShape, "T"),
    "fem_gla": _fem("FEM over gated linear attention's weights", GlaShape, "T"),
    "fem_lrnn_decay": _fem("FEM over a running mean that forgets", DecayShape, "T"),
    "fem_aft": _fem("FEM over AFT's weights, exp(k) a channel", AftShape, "T"),
    "fem_mamba": _fem(
        "FEM over a selective state space with non-negative weights, normalised", MambaShape, "T"
    ),
    "transformer": Mixer(
        "standard attention, RoPE, grouped queries on request",
        "Llama",
        "T^2",
        lambda model, layer: AttentionShape.of(model),
    ),
    "cem": Mixer(
        "steps down an interaction energy: K = V, O = Q^T, ALiBi, preconditioned",
        "Causal Energy Minimization",
        "T^2",
        lambda model, layer: CemAttentionShape.of(model),
        mlp="cem",
    ),
    "mha2nd1st": Mixer(
        "a Newton step down each head's free energy, its inverse to first order",
        "Transformers as Intrinsic Optimizers",
        "T^2",
        lambda model, layer: SecondOrderShape.of(model, exact=False),
    ),
    "mha2nd": Mixer(
        "the same with the exact inverse, for short sequences (one head: Att2nd)",
        "Transformers as Intrinsic Optimizers",
        "T^2 + T d^3",
        lambda model, layer: SecondOrderShape.of(model, exact=True),
    ),
    "energy_linear": Mixer(
        "linear attention as a first-order step down a quadratic energy",
        "Transformers as Intrinsic Optimizers",
        "T",
        lambda model, layer: EnergyLinearShape.of(model),
    ),
    "hyperset": Mixer(
        "tied symmetric attention and feed-forward with learned step sizes; depth is "
        "model.recurrence",
        "Hyper-SET",
        "T^2 (linear: T)",
        lambda model, layer: HyperSetShape.of(model),
        mlp="none",
    ),
    "energy_transformer": Mixer(
        "attention and a Hopfield network as one step down one energy; depth is model.recurrence",
        "Energy Transformer",
        "T^2",
        lambda model, layer: EnergyTransformerShape.of(model),
        mlp="none",
    ),
    "nrgpt": Mixer(
        "every token's step down its own energy, with a learned inference rate; depth is "
        "model.recurrence",
        "NRGPT",
        "T^2",
        lambda model, layer: NrgptShape.of(model),
        mlp="none",
    ),
    "yuriiformer": Mixer(
        "attention and MLP as Nesterov steps: a token also has a velocity, from a separate "
        "embedding",
        "YuriiFormer",
        "T^2",
        lambda model, layer: AcceleratedAttentionShape.of(model),
        mlp="yuriiformer",
    ),
    "differential": Mixer(
        "the difference of two softmax attentions",
        "Differential Transformer",
        "T^2",
        DifferentialShape.of,
    ),
    "deltanet": Mixer(
        "linear attention by the delta rule",
        "DeltaNet",
        "T",
        lambda model, layer: DeltaShape.of(model, layer, gated=False),
    ),
    "gated_deltanet": Mixer(
        "the delta rule with a decay and an output gate",
        "Gated DeltaNet",
        "T",
        lambda model, layer: DeltaShape.of(model, layer, gated=True),
    ),
    "mamba2": Mixer(
        "a selective state space with a scalar decay a head", "Mamba-2", "T", Mamba2Shape.of
    ),
    "fla.*": Mixer(
        "any layer of flash-linear-attention by its class, e.g. fla.GatedLinearAttention; needs "
        "a GPU",
        "flash-linear-attention",
        "the layer's",
        lambda model, layer: FlaShape.of(model, layer, name="*"),
        layouts="PP VPP DP",
        package="fla",
    ),
}

MLPS: dict[str, Callable[[ModelConfig], Shape]] = {
    "swiglu": SwiGluShape.of,
    "cem": CemMlpShape.of,
    "yuriiformer": AcceleratedSwiGluShape.of,
}


def describe(name: str) -> Mixer:
    """Return the mixer with this name. Raise KeyError for an unknown name."""
    if name.startswith("fla."):
        return replace(
            MIXERS["fla.*"],
            shape=lambda model, layer: FlaShape.of(model, layer, name=name.removeprefix("fla.")),
        )
    return MIXERS[name]


def blocks(model: ModelConfig) -> list[BlockShape]:
    """Return the shape of every layer, first layer first.

    Raises ValueError if sizes do not fit or if ``model`` sets a key that no layer reads. The
    message names the key.
    """
    names = mixer_names(model)
    mup.check_model(model)
    rope.check(model)
    made = [block(model, name, layer) for layer, name in enumerate(names)]
    for name, each in zip(names, made, strict=True):
        mup.check_mixer(model, name, each.mixer)
    if model.mtp_depth and not model.causal:
        raise ValueError(
            f"model.mtp_depth={model.mtp_depth} predicts later tokens, which a model with "
            "model.causal=false reads; set it to 0"
        )
    if keys := unread(model):
        what = (
            f"model.pattern={','.join(model.pattern)}"
            if model.pattern
            else f"model.mixer={model.mixer}"
        )
        raise ValueError(
            f"{', '.join(f'model.{key}' for key in keys)}: no layer of {what} uses this key in "
            "this configuration; leave it out"
        )
    return made


def unread(model: ModelConfig) -> list[str]:
    """Return the keys of ``model`` that differ from their defaults but that no layer reads.

    Raises ValueError if sizes do not fit.
    """
    read = set().union(*(block(model, name, 0).reads() for name in set(mixer_names(model))))
    default = type(model)()
    keys = []
    for name in (item.name for item in fields(model) if item.name not in EVERYONES | read):
        ours, theirs = getattr(model, name), getattr(default, name)
        if is_dataclass(theirs):
            keys += [
                f"{name}.{key}"
                for key, value in vars(theirs).items()
                if getattr(ours, key) != value
            ]
        elif ours != theirs:
            keys.append(name)
    return [key for key in keys if key not in read]


def mixer_names(model: ModelConfig) -> list[str]:
    """Return the name of every layer's mixer: ``model.pattern`` repeated, or ``model.mixer``."""
    pattern = model.pattern or [model.mixer]
    if model.num_layers % len(pattern):
        raise ValueError(
            f"model.pattern has {len(pattern)} layers, which does not divide "
            f"model.num_layers={model.num_layers}"
        )
    return [*pattern] * (model.num_layers // len(pattern))


def block(model: ModelConfig, name: str, layer: int) -> BlockShape:
    """Return the shape of layer ``layer`` (from 0) with the mixer ``name``.

    Raises ValueError, with the key, if sizes do not fit.
    """
    mixer = describe(name)
    mlp = model.mlp or mixer.mlp
    shape = mixer.shape(model, layer)
    rotated = shape.rotary_size()
    if rotated % 2:
        key = (
            "model.num_attention_heads"
            if model.attention.head_dim is None
            else "model.attention.head_dim"
        )
        raise ValueError(
            f"model.rope rotates pairs of channels, but a head has {rotated}; change {key}, or set "
            "model.rope=false"
        )
    if model.repeated != "block" and mlp == "none":
        raise ValueError(
            f"model.repeated={model.repeated}: a block of {name} has no separate MLP; leave it out"
        )
    return BlockShape(
        shape, None if mlp == "none" else MLPS[mlp](model), model.recurrence, model.repeated
    )


def table() -> str:
    """Return all mixers as a text table: name, cost in T, layouts, description and paper."""
    rows = [
        ("mixer", "cost", "layouts", "what, paper"),
        *((name, m.cost, m.layouts, f"{m.about} ({m.paper})") for name, m in MIXERS.items()),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        lines.append("  ".join([*cells, row[3]]))
    return "\n".join(lines)
