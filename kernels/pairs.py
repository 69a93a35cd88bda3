"""Which keys a token sees: masks and bounds for the operations that read keys. No scores here."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def allowed_pairs(own: Tensor, tk: int, causal: bool, valid: Tensor | None) -> Tensor | None:
    """Which of tk keys the tokens at positions ``own`` [n] see: bool, [n, tk] or [b, 1, n, tk]; None: all.

    valid [b, tk] is False at padding, which sees itself alone and which nobody else sees.
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
    """(first, last), int32 [tokens] each: the token at position i belongs to the document of the positions first[i] <= j < last[i].

    cu_seqlens [n + 1], int32 or int64: where each of n documents begins, from 0, and in the end the number of tokens. Nothing waits for the
    device, so its numbers are not checked.
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
    """Which of tk keys the last tq positions read: bool [tq, tk], or [b, 1, tq, tk] with keys_valid [b, tk].

    A key that is not valid is read by its own position alone; bounds: of documents, as `document_bounds` makes them.
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
    """Rows of q [b, heads, tq, ...], as many at once as a bound on their pairs with k's allows; one at least."""
    at_once = max(
        1, (cpu if q.device.type == "cpu" else device) // (q.shape[0] * q.shape[1] * k.shape[2])
    )
    for start in range(0, q.shape[2], at_once):
        yield slice(start, min(start + at_once, q.shape[2]))
