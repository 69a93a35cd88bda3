"""The maximal update parametrization, muP (Yang et al. 2022, arXiv 2203.03466): what a weight starts from and learns with. Torch-free.

With m = model.hidden_size / model.mup.base_hidden_size, a weight's initial spread and learning rate are those of the base times powers of
m that `Scaling` tells, Adam's (table 3). Nothing multiplies an activation: of the paper's equivalent forms (lemma J.1: with Adam a
multiplier 1/m in front of a weight is the same training as a spread and a learning rate divided by m, but for Adam's epsilon) this is the
one in which the model computes what it always did.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from fem_common.settings import setting
from fem_megatron.shape import FIXED, HIDDEN, OUTPUT, Normal, Shape, Weight, Weights

if TYPE_CHECKING:
    from fem_megatron.config import ModelConfig

PARAMETRIZATIONS = ("standard", "mup")


@dataclass(frozen=True)
class MupConfig:
    """The base model of muP; only where ``model.parametrization`` is mup."""

    base_hidden_size: int = setting(
        256,
        "hidden_size of the model that init_std and the learning rate are meant for; m = hidden_size / base_hidden_size.",
        least=1,
    )
    base_head_size: int | None = setting(
        None,
        "Where heads grow wider with the model: the base's width of a query; scores are multiplied by sqrt(base_head_size) / width. null: "
        "1 / sqrt(width), right where the models' heads are of one width and the wider model has more of them.",
        least=1,
    )

    def changed(self) -> list[str]:
        """The names of the fields that are not at their defaults."""
        return [item.name for item in fields(self) if getattr(self, item.name) != item.default]


def width_ratio(model: ModelConfig) -> float:
    """m: how many times wider than the base the model is; 1 under the standard parametrization."""
    return model.hidden_size / model.mup.base_hidden_size if model.parametrization == "mup" else 1.0


def starts_from(model: ModelConfig, weight: Weight) -> float | Normal:
    """What training starts ``weight`` from: its constant, or a normal distribution, the model's or its own, of the width's spread."""
    if isinstance(weight.init, int | float):
        return float(weight.init)
    std = weight.init.std if isinstance(weight.init, Normal) else model.init_std
    return Normal(std * width_ratio(model) ** weight.scaling.std)


def lr_factor(model: ModelConfig, weight: Weight) -> float:
    """The weight's learning rate in optimizer.lr."""
    return float(width_ratio(model) ** weight.scaling.lr)


def decay_factor(model: ModelConfig, weight: Weight) -> float:
    """The weight's decay in optimizer.weight_decay, where it is decayed: a step takes away learning rate times decay, as at the base."""
    return 1.0 / lr_factor(model, weight)


def update_scale(model: ModelConfig, weight: Weight, rows: int) -> float:
    """What Muon multiplies a map's orthogonal update by, of ``rows`` rows of the weight, besides the rate.

    0.2 sqrt(max(rows, columns)) gives its numbers the size of AdamW's (arXiv 2502.16982, 2.2), so that both share rate and decay. muP keeps
    to the base's and lets the update's spectral norm follow sqrt(rows / columns) (arXiv 2310.17813, condition 1; the rate's power of m is
    in it): constant for a map of the width into itself, m^(-1/2) for one of it into a head, of which a wider model has more.
    """
    m, columns = width_ratio(model), weight.shape[-1]
    outward = weight.scaling in (HIDDEN, FIXED) and (
        not weight.maps or model.mup.base_head_size is not None
    )
    inward = weight.scaling != FIXED
    base = max(rows / m**outward, columns / m**inward)
    return float(0.2 * base**0.5 * m ** ((outward - inward) / 2))


def score_scale(model: ModelConfig, width: int) -> float | None:
    """What the scores of heads whose queries are ``width`` wide are multiplied by; None: 1 / sqrt(width), as everywhere.

    sqrt(base) / width is definition 4.1's 1 / width, with the constant that leaves the base as it is.
    """
    base = model.mup.base_head_size if model.parametrization == "mup" else None
    return None if base is None or base == width else float(base**0.5 / width)


def outer_weights(model: ModelConfig) -> Weights:
    """Name -> weight of what is in no block: embeddings, of velocities where there are any, final norm, output layer unless tied."""
    shape = (model.padded_vocab_size(), model.hidden_size)
    weights = {
        "embedding.word_embeddings.weight": Weight(shape, split=0, mup=FIXED, maps=None),
        "decoder.final_layernorm.weight": Weight((model.hidden_size,), init=1.0, per_token=True),
    }
    if model.stream_size > model.hidden_size:
        weights["embedding.velocity.word_embeddings.weight"] = Weight(
            shape, split=0, mup=FIXED, maps=None
        )
    return (
        weights
        if model.tie_embeddings
        else weights | {"output_layer.weight": Weight(shape, split=0, mup=OUTPUT, maps=None)}
    )


def check_model(model: ModelConfig) -> None:
    """Raises ValueError, naming the key and what to set, where muP and the model do not go together."""
    mup = model.mup
    if model.parametrization != "mup":
        if changed := mup.changed():
            raise ValueError(
                f"model.mup.{changed[0]} is set, but model.parametrization is {model.parametrization}; set it to mup, or leave both out"
            )
        return
    if model.tie_embeddings:
        raise ValueError(
            "model.tie_embeddings: muP starts and trains the output layer otherwise than the embedding; set it to false"
        )


def check_mixer(model: ModelConfig, name: str, shape: Shape) -> None:
    """Raises ValueError as `check_model` does, where muP and the mixer of this name do not go together."""
    if model.parametrization != "mup":
        return
    if shape.external:
        raise ValueError(
            f"model.parametrization=mup: the weights of {name} are another package's; set model.parametrization=standard"
        )
    if model.mup.base_head_size is not None and not shape.product_scores():
        raise ValueError(
            f"model.mup.base_head_size scales scores that are products over a head's width, and {name} has none of that kind; "
            "set it to null"
        )
