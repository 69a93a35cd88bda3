"""Context parallelism: the distribution of a sequence over ranks, and reads across ranks.

The distribution is Megatron's: a sequence has 2 N chunks, and rank i has chunks i and 2 N - 1 - i,
so that causal reads cost every rank the same. A rank computes token-wise operations on its own
tokens. Reads of other tokens pass through the class `SequenceSplit`, in one of these ways:

    all_to_all   Every rank receives all tokens of 1 / N of the heads (or channels), reads them
                 as one process would, and returns to each rank its tokens of the result. Works
                 for any read.
    all_gather   Every rank gathers the keys of all tokens and reads each of its two chunks of
                 queries as decoding does, with the keys up to the chunk's end. For causal reads
                 that name their keys; no head is split. Keys and their products are not kept:
                 the backward pass gathers and reads again.
    ring         Like all_gather, for softmax reads; keys and values pass from rank to rank
                 (`ring`).
    states       Every rank reads each of its two chunks as a separate sequence that starts from
                 the state after the previous chunks. All ranks receive, for each chunk, its
                 contribution to the state and its decay of the earlier state. The traffic does
                 not grow with the length, and no head is split. For convolutions and for scans
                 whose state decays channel by channel (`scans`). Not for states that a matrix
                 transforms (the delta rules) and not for sums relative to a running maximum
                 (AFT, Mamba's free energy), which exchange heads.

This module contains no mixer mathematics and no process group.
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
    """The ranks that share a sequence, as seen by one of these ranks.

    size: number of ranks. rank: number of this rank, from 0.
    """

    size: int
    rank: int

    def exchange(self, parts: Tensor) -> Tensor:
        """Send part i of [size, ...] to rank i and return [size, ...] with part j from rank j.

        Gradients are sent back the same way.
        """

    def gather(self, own: Tensor) -> Tensor:
        """Gather [...] of every rank into [size, ...].

        The gradients of all ranks' copies are summed.
        """

    def shift(self, own: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start sending tensors to the next rank and receiving equal shapes from the previous one.

        Returns a function that waits for the received tensors. Gradients are not propagated.
        """


@dataclass(frozen=True)
class Dims:
    """Indices of the sequence, token and head (or channel) dimensions of a read's tensors."""

    batch: int
    time: int
    heads: int


def own_chunks(size: int, rank: int) -> tuple[int, int]:
    """Return the numbers of a rank's two chunks among the 2 ``size`` chunks, in token order."""
    return rank, 2 * size - 1 - rank


def own_tokens(full: Tensor, size: int, rank: int, time: int) -> Tensor:
    """Return a rank's tokens of a tensor with all tokens along ``time``.

    The number of tokens must be a multiple of 2 ``size``.
    """
    chunks = full.chunk(2 * size, time)
    return torch.cat([chunks[number] for number in own_chunks(size, rank)], time)


def _in_order(parts: Tensor, dim: int) -> list[Tensor]:
    """Return a sequence's chunks in order.

    parts: [ranks, ...] with each rank's two chunks one after the other along ``dim``.
    """
    first, second = (chunks.unbind() for chunks in parts.chunk(2, dim))
    return [*first, *reversed(second)]


@dataclass(frozen=True)
class SequenceSplit:
    """One rank's part of each sequence, and the method by which a layer reads other ranks' tokens.

    gathers: True if reads with separate keys gather the keys of all tokens.
    states: True if scans pass states where they can.
    ring: True if softmax reads use a ring instead of gathering.

    All other reads exchange heads.
    """

    ranks: Ranks
    gathers: bool
    states: bool
    ring: bool = False

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's ``length`` tokens in the sequence, [length] int64."""
        full = torch.arange(length * self.ranks.size, device=device)
        return own_tokens(full, self.ranks.size, self.ranks.rank, 0)

    def per_document(
        self,
        read: Read,
        given: Given,
        each: Given,
        keys: Collection[int],
        dims: Dims,
        context: Context,
    ) -> Tensor:
        """Return this rank's tokens of ``read(valid, *given, *each)`` over full sequences.

        given: tensors with this rank's tokens. each: tensors per head, heads first; a tensor with
        one head is shared by all heads. keys: indices in ``given`` of the tensors that contain keys
        or values; empty if the read has no
            separate keys.
        context: the layer's context, without a split.

        Raises:
            ValueError: if keys would be gathered although documents are read separately or the read
            is not causal.
        """
        if not (self.gathers and keys):
            return self._by_heads(read, given, each, dims, context)
        if context.documents is not None or not context.causal:
            raise ValueError(
                "reads of separate documents, and reads that are not causal, must exchange heads"
            )

        def gathered(*given: Tensor | None) -> Tensor:
            full = [
                t if t is None or place not in keys else self._all_tokens(t, dims.time)
                for place, t in enumerate(given)
            ]
            return self._by_chunks(read, full, each, keys, dims.time)

        if not torch.is_grad_enabled():
            return gathered(*given)
        # no RNG state: the operations are deterministic
        made: Tensor = checkpoint(gathered, *given, use_reentrant=False, preserve_rng_state=False)
        return made

    def side_by_side(self, read: Read, given: Given, each: Given, dims: Dims) -> Tensor:
        """Return ``read(None, *given, *each)`` with this rank's two chunks as separate sequences.

        The first chunks of all sequences precede the second chunks in the batch dimension.
        """
        blocks = [
            None if t is None else torch.cat(t.chunk(2, dims.time), dims.batch) for t in given
        ]
        return torch.cat(read(None, *blocks, *each).chunk(2, dims.batch), dims.time)

    def tokens_before(self, x: Tensor, count: int) -> Tensor:
        """Return the ``count`` tokens before each chunk, [count, 2 b, ...].

        x: [tokens of a chunk, 2 b, ...]. Zeros precede the first chunk of the sequence.
        """
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
        """Return the minimum and maximum of v over the tokens of all ranks.

        The result has two entries along ``time``, first the minimum, and no gradient.
        """
        every = self.ranks.gather(
            torch.cat(torch.aminmax(v.detach(), dim=time, keepdim=True), time)
        )
        low, high = every.chunk(2, time + 1)
        return torch.cat((low.amin(0), high.amax(0)), time)

    @property
    def own(self) -> tuple[int, int]:
        """Numbers of this rank's chunks."""
        return own_chunks(self.ranks.size, self.ranks.rank)

    def all_chunks(self, own: Tensor, batch: int) -> list[Tensor]:
        """Gather the values of all chunks and return them in order.

        own: values of this rank's two chunks, next to each other along ``batch``.
        """
        return _in_order(self.ranks.gather(own), batch + 1)

    def _by_chunks(
        self, read: Read, given: Given, each: Given, keys: Collection[int], time: int
    ) -> Tensor:
        """Return this rank's tokens of a causal read, computed separately for its two chunks.

        Each chunk reads the keys up to its end.

        given: the keys of all tokens; this rank's tokens of every other tensor.
        """
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
        full = [None if t is None else self._own_heads(t, dims, heads) for t in given]
        mine = [
            t if t is None or t.shape[0] == 1 else t.chunk(self.ranks.size)[self.ranks.rank]
            for t in each
        ]
        out = context.per_document(
            read, *full, each=mine, batch=dims.batch, time=dims.time, heads=dims.heads
        )
        parts = self._by_rank(out.movedim((dims.time, dims.heads), (0, 1)))
        return (
            self.ranks.exchange(parts)
            .transpose(0, 1)
            .flatten(1, 2)
            .movedim((0, 1), (dims.time, dims.heads))
        )

    def _own_heads(self, t: Tensor, dims: Dims, heads: int) -> Tensor:
        """Return all tokens of this rank's heads.

        A tensor that all ``heads`` share is gathered unchanged. With fewer heads than ranks, the
        result is the one head that this rank's queries read.
        """
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
        """Reorder [tokens, ...] -> [size, tokens of a rank, ...]; entry i belongs to rank i."""
        size = self.ranks.size
        return torch.stack([own_tokens(tokens, size, rank, 0) for rank in range(size)])
