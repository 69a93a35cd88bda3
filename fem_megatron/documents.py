"""Documents that share a sequence, each read by itself: whatever a mixer reads, it is given a document a row, as many rows as there are.

What a layer computes of one token alone it computes of all tokens as they lie. What it reads of other tokens (attention, scans,
convolutions) passes `Documents.apart`, which puts the tokens of each document into a row of their own, and what was read back into their
places. Rows are independent in every read, so nothing crosses a document's end, whichever kernel runs; and of a pair of tokens of two
documents nothing is computed. A row is longer than its document by up to a quarter of it, or 3 tokens; rows of one length are read
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LEAST = 4  # tokens of the shortest row


@dataclass(frozen=True)
class Documents:
    """Where the documents of a micro-batch [b, s] lie.

    positions [s, b] int64: of each token in its document, from 0. longest: of the first sequence, its first token, and its tokens. rows:
    (documents, tokens of a row) of each length. batch, time [all rows' tokens] int64: which token stands there; past a document's end its
    last one. kept [b * s] int64: where each token, sequence after sequence, stands among the rows' tokens. valid: of each length
    [documents, tokens of a row] bool, False past a document's end.
    """

    positions: Tensor
    longest: tuple[int, int]
    rows: tuple[tuple[int, int], ...]
    batch: Tensor
    time: Tensor
    kept: Tensor
    valid: tuple[Tensor, ...]

    @classmethod
    def of(cls, begins: Tensor) -> Documents:
        """From begins [b, s] bool, on the CPU: True where a token is a document's first. The first of a sequence is one anyway."""
        (sequences, length), begins = begins.shape, begins.clone()
        begins[:, 0] = True
        first = begins.flatten().nonzero()[:, 0]
        sizes = torch.diff(first, append=torch.tensor([sequences * length]))
        row = torch.tensor([row_length(size, length) for size in sizes.tolist()])
        order = torch.argsort(row, stable=True)
        rows, tokens, valid, base = [], [], [], 0
        kept = torch.empty(sequences * length, dtype=torch.int64)
        lengths, counts = torch.unique(row[order], return_counts=True)
        for here, wide in zip(order.split(counts.tolist()), lengths.tolist(), strict=True):
            place = torch.arange(wide)
            inside = place < sizes[here, None]
            token = first[here, None] + torch.minimum(place, sizes[here, None] - 1)
            kept[token[inside]] = base + torch.arange(token.numel()).view_as(token)[inside]
            base += token.numel()
            rows.append((len(here), wide))
            tokens.append(token.flatten())
            valid.append(inside)
        every = torch.cat(tokens)
        most = int(sizes[first < length].argmax())
        begun = torch.where(begins, torch.arange(length), 0).cummax(1).values
        positions, longest = (torch.arange(length) - begun).T, (int(first[most]), int(sizes[most]))
        return cls(
            positions, longest, tuple(rows), every // length, every % length, kept, tuple(valid)
        )

    def to(self, device: torch.device) -> Documents:
        """The same on a device."""
        moved = [
            t.to(device, non_blocking=True)
            for t in (self.positions, self.batch, self.time, self.kept)
        ]
        valid = tuple(t.to(device, non_blocking=True) for t in self.valid)
        return Documents(moved[0], self.longest, self.rows, moved[1], moved[2], moved[3], valid)

    def apart(
        self,
        read: Callable[..., Tensor],
        tensors: Sequence[Tensor | None],
        *,
        batch: int,
        time: int,
        causal: bool,
    ) -> Tensor:
        """``read(valid, *tensors)`` of every document by itself, its tokens the ``time`` dimension, documents the ``batch`` dimension.

        tensors: with b and s in these dimensions (1 in place of b: alike in every sequence); None stays None. What ``read`` returns has
        them too. valid [documents, tokens] is None where causal: what stands past a document's end is read by no token of it.
        """
        sizes = [documents * length for documents, length in self.rows]
        given = [None if t is None else self._rows(t, batch, time).split(sizes) for t in tensors]
        made = []
        for number, shape in enumerate(self.rows):
            parts = [
                None
                if parts is None
                else parts[number].unflatten(0, shape).movedim((0, 1), (batch, time))
                for parts in given
            ]
            here = read(None if causal else self.valid[number], *parts)
            made.append(here.movedim((batch, time), (0, 1)).flatten(0, 1))
        length, sequences = self.positions.shape
        out: Tensor = _Back.apply(torch.cat(made), self.kept)
        return out.unflatten(0, (sequences, length)).movedim((0, 1), (batch, time))

    def _rows(self, t: Tensor, batch: int, time: int) -> Tensor:
        t = t.movedim((batch, time), (0, 1))
        if t.shape[0] != self.positions.shape[1]:
            t = t.expand(self.positions.shape[1], *t.shape[1:])
        out: Tensor = _Rows.apply(t, self.batch, self.time, self.kept)
        return out


def row_length(size: int, most: int) -> int:
    """Tokens of a document's row: 4, 5, 6 or 7 times a power of two, so that few lengths are met, and at most ``most``."""
    step = max(_LEAST, 1 << max(0, (size - 1).bit_length() - 3))
    return min(most, -(-size // step) * step)


class _Rows(torch.autograd.Function):
    """t [b, s, ...] -> [rows' tokens, ...]. Every token stands in one place that counts; a copy past a document's end has no gradient."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, batch: Tensor, time: Tensor, kept: Tensor) -> Tensor:
        ctx.kept, ctx.shape = kept, t.shape
        return t[batch, time]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.kept].view(ctx.shape), None, None, None


class _Back(torch.autograd.Function):
    """rows' tokens [n, ...] -> [b * s, ...]."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, kept: Tensor) -> Tensor:
        ctx.kept, ctx.shape = kept, t.shape
        return t[kept]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_zeros(ctx.shape).index_copy_(0, ctx.kept, grads[0]), None
