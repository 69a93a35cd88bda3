"""Conversion of weights between formats, one tensor at a time.

A conversion lists the source tensors of one target tensor and the function that combines them. No
full model needs to be in memory. The module uses only torch and reads no files.
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


Make = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class Conversion:
    """Conversion that creates one tensor of the target format.

    sources: names of the source tensors, in the order in which ``make`` takes them. shape: shape of
    the result. make: function that cuts, joins and permutes without changing values or dtypes; its
    result may be a view.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    make: Make


Conversions = dict[str, Conversion]
"""Name in the target -> conversion that creates the tensor."""


def to_fem(model: ModelConfig) -> Conversions:
    """Return name in an export with our code -> conversion from a checkpoint.

    Rows that pad the vocabulary are dropped.
    """
    assert model.vocab_size is not None
    conversions = {}
    for name, shape in parameter_shapes(model).items():
        rows = model.vocab_size if name in VOCABULARY else shape[0]
        conversions[hf_name(name)] = Conversion((name,), (rows, *shape[1:]), _first_rows(rows))
    return conversions


def _first_rows(rows: int) -> Make:
    return lambda tensors: tensors[0][:rows]


def from_fem(model: ModelConfig) -> Conversions:
    """Return name in a checkpoint -> conversion from an export with our code.

    Rows that pad the vocabulary are zero.
    """
    return {
        name: Conversion((hf_name(name),), shape, _padded_to(shape[0]))
        for name, shape in parameter_shapes(model).items()
    }


def _padded_to(rows: int) -> Make:
    return lambda tensors: padded(tensors[0], rows)


def hf_name(name: str) -> str:
    """Return the name of a parameter in the export, by the table in ``export``."""
    for ours, theirs in RENAMED:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def first_of(names: Collection[str]) -> str:
    """Return the alphabetically first name and the number of further ones, for a message."""
    return min(names) + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")


def padded(tensor: Tensor, rows: int) -> Tensor:
    """Return the tensor with zeros appended, so that it has ``rows`` rows."""
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))


class Tensors(Protocol):
    """Source of weights that are read a few at a time: a checkpoint
    (``pretrain.checkpoint.reader.Weights``), a folder, or memory.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return name -> tensor on the CPU in its stored dtype, for ``names``.

        Raises ConfigError if a tensor is damaged.
        """


@dataclass(frozen=True)
class Converted:
    """Tensors that conversions create from a source; usable wherever Tensors are expected."""

    source: Tensors
    conversions: Conversions

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: conversion.shape for name, conversion in self.conversions.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return name -> tensor for ``names``; a tensor may be a view of a source tensor."""
        return dict(self.items(names))

    def items(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for ``names`` in turn; None: for all tensors.

        If consecutive tensors have the same sources, the sources are read only once.
        """
        at_hand: dict[str, Tensor] = {}
        for name in self.conversions if names is None else names:
            conversion = self.conversions[name]
            if at_hand.keys() != set(conversion.sources):
                at_hand.clear()  # free them before the next ones are read
                at_hand = self.source.read(conversion.sources)
            tensor = conversion.make([at_hand[part] for part in conversion.sources])
            assert tuple(tensor.shape) == conversion.shape, name
            yield name, tensor
            del tensor
