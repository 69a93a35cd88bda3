"""The maximal update parametrization, muP: initial weights and learning rates for any width.

Source: Yang et al. 2022, arXiv 2203.03466. The base is the model with hidden_size =
model.mup.base_hidden_size, and m = model.hidden_size / model.mup.base_hidden_size. A weight's
initial standard deviation and its learning rate are those of the base times powers of m (`Scaling`,
for Adam, table 3). No activation is multiplied. The paper has equivalent forms (lemma J.1: with
Adam, a multiplier 1/m on a weight gives the same training as a standard deviation and a learning
rate divided by m, up to Adam's epsilon). This is the form in which the model's computation does not
change. The module does not import torch.
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
    """The base model of muP; used only if ``model.parametrization`` is mup."""

    base_hidden_size: int = setting(
        256,
        "hidden_size of the model for which init_std and the learning rate are chosen; m = "
        "hidden_size / base_hidden_size.",
        least=1,
    )
    base_head_size: int | None = setting(
        None,
        "For heads that grow wider with the model: the width of a query in the base; scores are "
        "multiplied by sqrt(base_head_size) / width. null: 1 / sqrt(width), for models whose "
        "heads have the same width and whose number of heads grows.",
        least=1,
    )

    def changed(self) -> list[str]:
        """Return the names of the fields that differ from their defaults."""
        return [item.name for item in fields(self) if getattr(self, item.name) != item.default]


def width_ratio(model: ModelConfig) -> float:
    """Return m, the model's width divided by the base's; 1 under the standard parametrization."""
    return model.hidden_size / model.mup.base_hidden_size if model.parametrization == "mup" else 1.0


def starts_from(model: ModelConfig, weight: Weight) -> float | Normal:
    """Return the initial value of ``weight``: a constant, or a normal distribution.

    The distribution's standard deviation is scaled for the model's width.
    """
    if isinstance(weight.init, int | float):
        return float(weight.init)
    std = weight.init.std if isinstance(weight.init, Normal) else model.init_std
    return Normal(std * width_ratio(model) ** weight.scaling.std)


def lr_factor(model: ModelConfig, weight: Weight) -> float:
    """Return the weight's learning rate divided by optimizer.lr."""
    return float(width_ratio(model) ** weight.scaling.lr)


def decay_factor(model: ModelConfig, weight: Weight) -> float:
    """Return the weight decay of a decayed weight divided by optimizer.weight_decay.

    The product of learning rate and decay is then the same as in the base model.
    """
    return 1.0 / lr_factor(model, weight)


def update_scale(model: ModelConfig, weight: Weight, rows: int) -> float:
    """Return Muon's factor on the orthogonal update of one linear map in ``weight``.

    ``rows`` is the number of the map's rows. The learning rate is a separate factor. 0.2
    sqrt(max(rows, columns)) gives the entries the size of AdamW's updates (arXiv 2502.16982, 2.2),
    so that both optimizers share rate and decay. muP uses the base's factor and scales the update's
    spectral norm with sqrt(rows / columns) (arXiv 2310.17813, condition 1; the rate already
    contains its power of m). The result is constant in m for a map of the width into itself. For a
    map of the width into a head it is proportional to m^(-1/2), because a wider model has more
    heads.
    """
    m, columns = width_ratio(model), weight.shape[-1]
    outward = weight.scaling in (HIDDEN, FIXED) and (
        not weight.maps or model.mup.base_head_size is not None
    )
    inward = weight.scaling != FIXED
    base = max(rows / m**outward, columns / m**inward)
    return float(0.2 * base**0.5 * m ** ((outward - inward) / 2))


def score_scale(model: ModelConfig, width: int) -> float | None:
    """Return the factor on the scores q.k of heads with queries of ``width`` channels.

    None means the default 1 / sqrt(width). With muP and model.mup.base_head_size = base, the factor
    is sqrt(base) / width: definition 4.1's 1 / width, with the constant that leaves the base
    unchanged.
    """
    base = model.mup.base_head_size if model.parametrization == "mup" else None
    return None if base is None or base == width else float(base**0.5 / width)


def outer_weights(model: ModelConfig) -> Weights:
    """Return name -> weight of the parameters outside the layers.

    These are the embeddings (also the embedding of velocities, if used), the final norm, and the
    output layer unless it is tied to the embedding.
    """
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
    """Raise ValueError, naming the key and the fix, if muP and the model are incompatible."""
    mup = model.mup
    if model.parametrization != "mup":
        if changed := mup.changed():
            raise ValueError(
                f"model.mup.{changed[0]} is set, but model.parametrization is "
                f"{model.parametrization}; set it to mup, or leave both out"
            )
        return
    if model.tie_embeddings:
        raise ValueError(
            "model.tie_embeddings: muP uses different initial values and learning rates for the "
            "output layer and the embedding; set it to false"
        )


def check_mixer(model: ModelConfig, name: str, shape: Shape) -> None:
    """Raise ValueError, like `check_model`, if muP and the mixer ``name`` are incompatible."""
    if model.parametrization != "mup":
        return
    if shape.external:
        raise ValueError(
            f"model.parametrization=mup: the weights of {name} belong to another package; set "
            "model.parametrization=standard"
        )
    if model.mup.base_head_size is not None and not shape.product_scores():
        raise ValueError(
            "model.mup.base_head_size scales scores that are products over a head's width, and "
            f"{name} has no scores of this kind; set it to null"
        )
