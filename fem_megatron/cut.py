"""A sequence that is cut over ranks (context parallelism): who has which tokens, and how a read gets those of others.

The cut is Megatron's: 2 N chunks, of which rank i has i and 2 N - 1 - i, so that the tokens of each rank read as many others where causal.
What a layer computes of one token alone it computes of its own tokens. What it reads of other tokens passes `Cut.apart`:

    all_to_all   every rank gets all tokens of 1 / N of the heads (or channels), reads them as one process does, and gives each rank its
                 tokens of what was read. For any read.
    all_gather   every rank gets the keys of all tokens, and reads each of its two chunks of queries as decoding does, with the keys up to
                 the chunk's end. For causal reads that name their keys; no head is split. Keys, and what is made of them, are not kept:
                 the backward pass gathers and reads again.
    ring         as all_gather, for reads under a softmax; keys and values go from rank to rank (`ring`).
    states       every rank reads each of its two chunks as a sequence of its own, from the state that the chunks before it leave behind:
                 of each chunk all ranks get what it adds to the state and how far it fades what was there. What is sent does not grow
                 with the length, and no head is split. For scans whose state fades channel by channel and for convolutions (`scans`).
                 Not for a state that a matrix turns (the delta rules) and not for sums kept relative to a running maximum (AFT, Mamba's
                 free energy), which exchange heads.

No mixer's mathematics and no process group here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from fem_megatron.state import Context

Given = Sequence[Tensor | None]
Read = Callable[..., Tensor]


class Ranks(Protocol):
    """The ranks that share a sequence, in one rank's view."""

    size: int
    rank: int

    def exchange(self, parts: Tensor) -> Tensor:
        """[size, ...]: part i goes to rank i -> [size, ...], part j from rank j; gradients go back the same way."""

    def gather(self, own: Tensor) -> Tensor:
        """[...] -> [size, ...], every rank's; the gradients of all ranks' copies are summed."""

    def shift(self, own: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begins to send to the next rank, and to receive the same of the one before; what is called waits for it. No gradient."""


@dataclass(frozen=True)
class Dims:
    """Which dimensions of a read's tensors are sequences, tokens and heads (or channels)."""

    batch: int
    time: int
    heads: int


def own_chunks(size: int, rank: int) -> tuple[int, int]:
    """Which of the 2 ``size`` chunks a rank has, in the order in which its tokens lie."""
    return rank, 2 * size - 1 - rank


def own_tokens(whole: Tensor, size: int, rank: int, time: int) -> Tensor:
    """A rank's tokens of a tensor that has all, along the dimension ``time``, which 2 ``size`` divides."""
    chunks = whole.chunk(2 * size, time)
    return torch.cat([chunks[number] for number in own_chunks(size, rank)], time)


def _in_order(parts: Tensor, dim: int) -> list[Tensor]:
    """The chunks of a sequence, of every rank's two, which lie one behind the other in the dimension ``dim`` of [ranks, ...]."""
    first, second = (chunks.unbind() for chunks in parts.chunk(2, dim))
    return [*first, *reversed(second)]


@dataclass(frozen=True)
class Cut:
    """One rank's part of each sequence, and how the reads of one layer are made.

    gathers: of reads that name their keys, these are gathered. states: scans that can pass states do. ring: softmax reads go round instead
    of gathering. Whatever else exchanges heads.
    """

    ranks: Ranks
    gathers: bool
    states: bool
    ring: bool = False

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Where this rank's ``length`` tokens stand in the sequence, [length] int64."""
        whole = torch.arange(length * self.ranks.size, device=device)
        return own_tokens(whole, self.ranks.size, self.ranks.rank, 0)

    def apart(
        self,
        read: Read,
        given: Given,
        each: Given,
        keys: Collection[int],
        dims: Dims,
        context: Context,
    ) -> Tensor:
        """``read(valid, *given, *each)`` of whole sequences, of which ``given`` and the result are this rank's tokens.

        each: what belongs to a head alone, heads first; of one head: to all. keys: the places in ``given`` of what queries read; none:
        the read does not tell. context: the layer's, without a cut.

        Raises:
            ValueError: keys are to be gathered for a read of documents, or one that is not causal.
        """
        if not (self.gathers and keys):
            return self._by_heads(read, given, each, dims, context)
        if context.documents is not None or not context.causal:
            raise ValueError(
                "documents that are read apart, and reads both ways, are made by exchanging heads"
            )

        def gathered(*given: Tensor | None) -> Tensor:
            whole = [
                t if t is None or place not in keys else self._all_tokens(t, dims.time)
                for place, t in enumerate(given)
            ]
            return self._by_chunks(read, whole, each, keys, dims.time)

        if not torch.is_grad_enabled():
            return gathered(*given)
        made: Tensor = checkpoint(
            gathered, *given, use_reentrant=False, preserve_rng_state=False
        )  # nothing is random
        return made

    def side_by_side(self, read: Read, given: Given, each: Given, dims: Dims) -> Tensor:
        """``read(None, *given, *each)``, given this rank's two chunks as sequences, the first chunks of all before the second ones."""
        beside = [
            None if t is None else torch.cat(t.chunk(2, dims.time), dims.batch) for t in given
        ]
        return torch.cat(read(None, *beside, *each).chunk(2, dims.batch), dims.time)

    def tokens_before(self, x: Tensor, count: int) -> Tensor:
        """The ``count`` tokens before each chunk, [count, 2 b, ...] of x [tokens of a chunk, 2 b, ...]; zeros before the first of all."""
        zeros = x.new_zeros(count, x.shape[1] // 2, *x.shape[2:])
        if not count:
            return torch.cat((zeros, zeros), 1)
        chunks = self.all_chunks(x[-count:], 1)
        return torch.cat(
            [
                torch.cat((zeros, *chunks[max(0, number - count) : number]))[-count:]
                for number in self.own
            ],
            1,
        )

    def span(self, v: Tensor, time: int) -> Tensor:
        """The least and the greatest of all tokens, two in place of this rank's along ``time``; no gradient."""
        every = self.ranks.gather(
            torch.cat(torch.aminmax(v.detach(), dim=time, keepdim=True), time)
        )
        low, high = every.chunk(2, time + 1)
        return torch.cat((low.amin(0), high.amax(0)), time)

    @property
    def own(self) -> tuple[int, int]:
        """The numbers of this rank's chunks."""
        return own_chunks(self.ranks.size, self.ranks.rank)

    def all_chunks(self, own: Tensor, batch: int) -> list[Tensor]:
        """What every chunk has, in order, of what this rank's two have side by side in the dimension ``batch``."""
        return _in_order(self.ranks.gather(own), batch + 1)

    def _by_chunks(
        self, read: Read, given: Given, each: Given, keys: Collection[int], time: int
    ) -> Tensor:
        """``given``: keys of all tokens, the rest of this rank's."""
        chunks, made = 2 * self.ranks.size, []
        for half, number in enumerate(self.own):

            def seen(place: int, t: Tensor, half: int = half, number: int = number) -> Tensor:
                if place not in keys:
                    return t.chunk(2, time)[half]
                return t.narrow(time, 0, t.shape[time] // chunks * (number + 1))

            made.append(
                read(
                    None,
                    *(None if t is None else seen(place, t) for place, t in enumerate(given)),
                    *each,
                )
            )
        return torch.cat(made, time)

    def _by_heads(
        self, read: Read, given: Given, each: Given, dims: Dims, context: Context
    ) -> Tensor:
        heads = max(t.shape[dims.heads] for t in given if t is not None)
        whole = [None if t is None else self._own_heads(t, dims, heads) for t in given]
        mine = [
            t if t is None or t.shape[0] == 1 else t.chunk(self.ranks.size)[self.ranks.rank]
            for t in each
        ]
        out = context.apart(
            read, *whole, each=mine, batch=dims.batch, time=dims.time, heads=dims.heads
        )
        parts = self._by_rank(out.movedim((dims.time, dims.heads), (0, 1)))
        return (
            self.ranks.exchange(parts)
            .transpose(0, 1)
            .flatten(1, 2)
            .movedim((0, 1), (dims.time, dims.heads))
        )

    def _own_heads(self, t: Tensor, dims: Dims, heads: int) -> Tensor:
        """All tokens of this rank's heads; of what is one for all ``heads`` as it is; of fewer heads than ranks the one that these read."""
        size, own = self.ranks.size, t.shape[dims.heads]
        if own == 1 < heads:
            return self._all_tokens(t, dims.time)
        if own < size:
            t = t.repeat_interleave(size // own, dims.heads)
        parts = t.movedim((dims.heads, dims.time), (0, 1)).unflatten(0, (size, -1))
        return torch.cat(_in_order(self.ranks.exchange(parts), 2), 1).movedim(
            (0, 1), (dims.heads, dims.time)
        )

    def _all_tokens(self, t: Tensor, time: int) -> Tensor:
        return torch.cat(_in_order(self.ranks.gather(t.movedim(time, 0)), 1)).movedim(0, time)

    def _by_rank(self, tokens: Tensor) -> Tensor:
        """[tokens, ...] -> [size, tokens of a rank, ...]."""
        size = self.ranks.size
        return torch.stack([own_tokens(tokens, size, rank, 0) for rank in range(size)])
