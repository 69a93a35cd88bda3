"""Communication between the ranks of a Megatron process group for split sequences.

The class `ContextParallel` implements `fem_megatron.context_parallel.split.Ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fem_megatron.context_parallel.split import Ranks


class _Exchange(torch.autograd.Function):
    """All-to-all over the first dimension; its backward pass is the same all-to-all."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """All-gather; its backward pass sums the gradients of the ranks' copies, in fp32 or wider."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group, own = group, own.contiguous()
        full = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
        torch.distributed.all_gather_into_tensor(full, own, group=group)
        return full.view(group.size(), *own.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        own = _exchanged(grad, ctx.group)
        return own.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(grad.dtype), None


def _exchanged(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    made = torch.empty_like(parts)
    torch.distributed.all_to_all_single(made, parts, group=group)
    return made


class ContextParallel(Ranks):
    """``fem_megatron.context_parallel.split.Ranks`` over a Megatron process group."""

    def __init__(self, group: Any) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()

    def exchange(self, parts: Tensor) -> Tensor:
        """Send part i to rank i and return the received parts (`Ranks.exchange`)."""
        made: Tensor = _Exchange.apply(parts, self.group)
        return made

    def shift(self, own: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start sending to the next rank and receiving from the previous (`Ranks.shift`)."""
        sent = [t.contiguous() for t in own]
        received = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in own]
        after, before = (
            torch.distributed.get_global_rank(self.group, (self.rank + by) % self.size)
            for by in (1, -1)
        )
        moves = [
            torch.distributed.P2POp(torch.distributed.isend, t, after, self.group) for t in sent
        ]
        moves += [
            torch.distributed.P2POp(torch.distributed.irecv, t, before, self.group)
            for t in received
        ]
        works = torch.distributed.batch_isend_irecv(moves)

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            return received

        return wait

    def gather(self, own: Tensor) -> Tensor:
        """Gather [...] of every rank into [size, ...]; see `Ranks.gather`."""
        made: Tensor = _Gather.apply(own, self.group)
        return made
