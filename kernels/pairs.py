"""Masks and bounds of the keys that a token reads, for the operations that read keys. Scores are
not computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def allowed_pairs(own: Tensor, tk: int, causal: bool, valid: Tensor | None) -> Tensor | None:
    """Return the mask of the keys, out of tk, that the queries at positions ``own`` [n] read: bool,
    [n, tk] or [b, 1, n, tk]; None: all.

    valid [b, tk] is False at padding, which reads itself alone and which no other token reads.
    """
    if valid is None and not causal:
        return None
    key = torch.arange(tk, device=own.device)
    before = key <= own[:, None]
    if valid is None:
        return before
    both = valid[:, None, None, :] & valid[:, None, own, None]
    return (both & before if causal else both) | (key == own[:, None])


def document_bounds(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return (first, last), int32 [tokens] each: position i belongs to the document with the
    positions first[i] <= j < last[i].

    cu_seqlens [n + 1], int32 or int64: the start of each of n documents, from 0, and finally the
    number of tokens. No step waits for the device, so its numbers are not checked.
    """
    ends = cu_seqlens[1:].contiguous()
    position = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(ends, position, right=True).clamp_(max=ends.shape[0] - 1)
    return cu_seqlens[document].int(), ends[document].int()


def readable_keys(
    tq: int,
    tk: int,
    device: torch.device,
    *,
    causal: bool,
    keys_valid: Tensor | None,
    bounds: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the mask of the keys, out of tk, that the last tq positions read: bool [tq, tk], or
    [b, 1, tq, tk] with keys_valid [b, tk].

    A key that is not valid is read by its own position alone. bounds: of documents, from
    `document_bounds`.
    """
    mask = torch.ones(tq, tk, dtype=torch.bool, device=device)
    if causal:
        mask = mask.tril(tk - tq)
    if bounds is not None:
        key = torch.arange(tk, device=device)
        first, last = (bound[tk - tq :, None] for bound in bounds)
        mask = mask & (first <= key) & (key < last)
    if keys_valid is not None:
        own = torch.ones_like(mask).tril(tk - tq).triu(tk - tq)
        mask = (mask & keys_valid[:, None, None]) | own
    return mask


def blocks_of_rows(q: Tensor, k: Tensor, cpu: int, device: int) -> Iterator[slice]:
    """Yield blocks of rows of q [b, heads, tq, ...], each as large as a bound on their pairs with
    k's keys allows; at least one row.
    """
    at_once = max(
        1, (cpu if q.device.type == "cpu" else device) // (q.shape[0] * q.shape[1] * k.shape[2])
    )
    for start in range(0, q.shape[2], at_once):
        yield slice(start, min(start + at_once, q.shape[2]))
