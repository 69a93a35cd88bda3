"""Offload activations: keep the tensors that autograd saves in the host's memory.

This replaces ``torch.autograd.graph.save_on_cpu``. torch's function also copies the
weights, copies a tensor once per save, and restores it with other strides. This module
leaves weights on the device, copies a storage once in each direction, and restores views
as views. Every operation of the backward pass therefore has bit-identical operands.
Copies run in the compute stream, so they do not overlap with the computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class Sent:
    """Copy of a storage's bytes on the host, in page-locked memory if they are from a GPU.

    views: number of the storage's saved views that have not been restored yet.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.views = tensor.device, 0
        self.back: Tensor | None = None
        there = _bytes(tensor)
        self.host = torch.empty(there.shape, dtype=torch.uint8, pin_memory=there.is_cuda)
        self.host.copy_(there, non_blocking=there.is_cuda)

    def again(self) -> Tensor:
        """Return the bytes on the device.

        All calls return the same tensor until the last view is restored.
        """
        found = self.host.to(self.device, non_blocking=True) if self.back is None else self.back
        self.views -= 1
        self.back = found if self.views > 0 else None
        return found


class View(NamedTuple):
    """Position of a saved tensor in a copied storage."""

    sent: Sent
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def offload(module: nn.Module) -> None:
    """Make every forward pass of a module keep its saved activations on the host."""
    forward = module.forward

    @wraps(forward)
    def offloaded(*given: Any, **named: Any) -> Any:
        with _kept_on_host(module):
            return forward(*given, **named)

    module.forward = offloaded


@contextmanager
def _kept_on_host(module: nn.Module) -> Iterator[None]:
    weights = {StorageWeakRef(weight.untyped_storage()).cdata for weight in module.parameters()}
    # While a weak reference exists, the address of a freed storage is not reused.
    sent: dict[tuple[int, int], tuple[StorageWeakRef, Sent]] = {}

    def pack(tensor: Tensor) -> Tensor | View:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference.cdata in weights:
            return tensor
        key = (reference.cdata, tensor._version)
        if key not in sent:
            sent[key] = (reference, Sent(tensor))
        one = sent[key][1]
        one.views += 1
        return View(one, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(kept: Tensor | View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        flat = kept.sent.again()
        full = flat[: len(flat) // kept.dtype.itemsize * kept.dtype.itemsize].view(kept.dtype)
        return full.as_strided(kept.size, kept.stride, kept.offset)

    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        sent.clear()


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's entire storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
