"""Weights on their way between formats, one tensor at a time: a recipe says which tensors of the source make one of the target.

Both directions stream over recipes, so that nobody needs to hold a whole model. Torch alone; no files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fem_megatron.config import ModelConfig
from pretrain.plan.run_plan import parameter_shapes

RENAMED = (
    ("embedding.word_embeddings.", "model.embed_tokens."),
    ("embedding.velocity.word_embeddings.", "model.embed_velocities."),
    ("decoder.layers.", "model.layers."),
    ("decoder.final_layernorm.", "model.norm."),
    ("output_layer.", "lm_head."),
)
VOCABULARY = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "embedding.velocity.word_embeddings.weight",
)


@dataclass(frozen=True)
class Recipe:
    """One tensor of the target.

    sources: names of the source's tensors, in the order in which ``make`` takes them. shape: of what it makes. make: changes no value
    and no type: it cuts, joins and permutes, and may return a view.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[[list[Tensor]], Tensor]


Recipes = dict[str, Recipe]
"""Name in the target -> how it is made."""


def to_fem(model: ModelConfig) -> Recipes:
    """A checkpoint's tensors -> those of an exported folder with our code; the rows that pad the vocabulary stay behind."""
    assert model.vocab_size is not None
    recipes = {}
    for name, shape in parameter_shapes(model).items():
        cut = model.vocab_size if name in VOCABULARY else shape[0]
        recipes[hf_name(name)] = Recipe(
            (name,),
            (cut, *shape[1:]),
            lambda tensors, cut=cut: tensors[0][:cut],  # type: ignore[misc]
        )
    return recipes


def from_fem(model: ModelConfig) -> Recipes:
    """The way back; rows that pad the vocabulary are zero."""
    assert model.vocab_size is not None
    return {
        name: Recipe(
            (hf_name(name),),
            shape,
            lambda tensors, rows=shape[0]: padded(tensors[0], rows),  # type: ignore[misc]
        )
        for name, shape in parameter_shapes(model).items()
    }


def hf_name(name: str) -> str:
    """A parameter's name in the exported folder: the table in ``export``."""
    for ours, theirs in RENAMED:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def first_of(names: Collection[str]) -> str:
    """For a message: the first name in the alphabet, and how many more there are."""
    return min(names) + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")


def padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with rows of zeros below it."""
    missing = rows - tensor.shape[0]
    return (
        tensor
        if missing == 0
        else torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))
    )


class Tensors(Protocol):
    """Where weights come from, a few at a time: a checkpoint (``pretrain.checkpoint.reader.Weights``), a folder, or memory."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor, by name."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names, on the CPU, in their stored types. Raises ConfigError where they are damaged."""


def made(source: Tensors, recipes: Recipes) -> Iterator[tuple[str, Tensor]]:
    """Every recipe's tensor in turn; neighbours that are made of the same tensors have them read once."""
    at_hand: dict[str, Tensor] = {}
    for name, recipe in recipes.items():
        if at_hand.keys() != set(recipe.sources):
            at_hand.clear()  # before the next are read
            at_hand = source.read(recipe.sources)
        tensor = recipe.make([at_hand[part] for part in recipe.sources])
        assert tuple(tensor.shape) == recipe.shape, name
        yield name, tensor
        del tensor


@dataclass(frozen=True)
class Made:
    """What the recipes make of a source, as a source."""

    source: Tensors
    recipes: Recipes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, by name."""
        return {name: recipe.shape for name, recipe in self.recipes.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names; each maybe a view into one of the source's."""
        return dict(made(self.source, {name: self.recipes[name] for name in names}))
