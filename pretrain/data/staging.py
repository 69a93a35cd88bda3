"""Copy micro-batches to the device ahead of their use.

The next micro-batch is read and copied while the device still computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from fem_common.errors import CommandError
from fem_megatron.megatron import platform
from pretrain.data.datasets import Batch


class Staged:
    """Iterator over the batches of a stream, with a method that prepares the next batch early.

    On a GPU the copies overlap with the computation (`platform.Copies`).
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.batches = batches
        self.copies = platform.Copies()
        self.waiting: Batch | CommandError | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.ahead()
        batch, self.waiting = self.waiting, None
        if batch is None:
            raise StopIteration
        if isinstance(batch, CommandError):
            raise batch
        self.copies.needed(_tensors(batch))
        return batch

    def ahead(self) -> None:
        """Read the next batch and begin to copy it to the device.

        An error is raised only when the batch is requested, so that the state before it can still
        be saved.
        """
        if self.waiting is None:
            try:
                with self.copies.begun():
                    self.waiting = next(self.batches, None)
            except CommandError as error:
                self.waiting = error


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested dicts, tuples, lists and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
