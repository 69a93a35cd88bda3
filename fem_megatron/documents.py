"""Documents that share a sequence and are read independently: reads receive one document per row.

Token-wise operations run on the sequence unchanged. Reads of other tokens (attention, scans,
convolutions) pass through the class `Documents`, which copies the tokens of each document into a
separate row and copies the results back. Rows are independent in every read, so no information
crosses a document's end with any kernel, and pairs of tokens from two documents are never computed.
A row is longer than its document by up to a quarter of it, or by up to 3 tokens. Rows of equal
length are read together.
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
    """The documents of a micro-batch [b, s], and the indices that copy each to a separate row.

    positions: [s, b] int64, position of each token in its document, from 0.
    longest: (first token, length) of the longest document of the first sequence.
    rows: (documents, tokens per row) for each row length.
    batch, time: [tokens in all rows] int64, sequence and position from which each row entry is
        copied. Entries past a document's end copy its last token.
    kept: [b * s] int64, index of each token among the rows' entries, sequence after sequence.
    valid: for each row length, [documents, tokens per row] bool, False past a document's end.
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
        """Build the documents from begins [b, s] bool, on the CPU.

        begins is True at the first token of a document. The first token of a sequence always
        begins a document.
        """
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
        """Return a copy on a device."""
        moved = [
            t.to(device, non_blocking=True)
            for t in (self.positions, self.batch, self.time, self.kept)
        ]
        valid = tuple(t.to(device, non_blocking=True) for t in self.valid)
        return Documents(moved[0], self.longest, self.rows, moved[1], moved[2], moved[3], valid)

    def per_document(
        self,
        read: Callable[..., Tensor],
        tensors: Sequence[Tensor | None],
        *,
        batch: int,
        time: int,
        causal: bool,
    ) -> Tensor:
        """Return ``read(valid, *tensors)`` computed separately for every document.

        ``read`` receives documents along the ``batch`` dimension and their tokens along ``time``.
        Its result has both dimensions, too. valid [documents, tokens] is None if causal: no token
        of a document reads the entries past its end.

        tensors: have sizes b (or 1: equal in every sequence) and s in these dimensions; None stays
            None.
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
    """Return the row length of a document: 4, 5, 6 or 7 times a power of two, at most ``most``.

    This limits the number of distinct lengths.
    """
    step = max(_LEAST, 1 << max(0, (size - 1).bit_length() - 3))
    return min(most, -(-size // step) * step)


class _Rows(torch.autograd.Function):
    """Copy t [b, s, ...] to the documents' rows, [tokens in all rows, ...].

    A token's gradient is that of exactly one row entry. Copies past a document's end are ignored.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, batch: Tensor, time: Tensor, kept: Tensor) -> Tensor:
        ctx.kept, ctx.shape = kept, t.shape
        return t[batch, time]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.kept].view(ctx.shape), None, None, None


class _Back(torch.autograd.Function):
    """Copy the rows' entries [n, ...] back to the sequences' tokens [b * s, ...]."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, kept: Tensor) -> Tensor:
        ctx.kept, ctx.shape = kept, t.shape
        return t[kept]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_zeros(ctx.shape).index_copy_(0, ctx.kept, grads[0]), None
