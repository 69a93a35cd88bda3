"""The scores' diagonal part C_ij = h_j . (d u_i) and its gradients, by the vendor's matrix products, a part of the rows at a time.

In bfloat16 C and its gradient are bfloat16, once rounded from float32 sums: a head reads C once in the forward and thrice in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Of C's terms at once: 128 MB in bfloat16, and as much for the gradient. A sequence alone may be longer than that; then rows are cut.
TERMS = 1 << 26
LEAST_ROWS = 128  # of a part, so that memory is linear in the tokens
STRIP = 512  # rows or keys of one product: what lies above the diagonal is left out by strips, and a product still fills a GPU


def parts(b: int, diagonals: int, t: int, tk: int) -> Iterator[tuple[slice, slice]]:
    """Sequences and rows, in order, whose terms are at most ``TERMS``; diagonals: how many C a sequence has, 0: everything at once."""
    if diagonals * t * tk <= TERMS:
        at_once = max(1, TERMS // (diagonals * t * tk)) if diagonals else b
        yield from ((slice(start, min(start + at_once, b)), slice(0, t)) for start in range(0, b, at_once))
        return
    at_once = max(LEAST_ROWS, TERMS // (diagonals * tk))
    for sequence in range(b):
        yield from ((slice(sequence, sequence + 1), slice(start, min(start + at_once, t))) for start in range(0, t, at_once))


def weighted(u: Tensor, d: Tensor) -> Tensor:
    """u [b, rows, D] times one diagonal d [D], in u's type."""
    return torch.mul(u, d, out=torch.empty(u.shape, dtype=u.dtype, device=u.device))


def bias(u: Tensor, h: Tensor, d: Tensor, first: int, causal: bool) -> Tensor:
    """C [b, diagonals, rows, keys] of u [b, rows, D] that stand at ``first`` and after, h [b, keys, D], d [diagonals, D].

    Causal: above the diagonal not all is written. Rows are 16 terms apart or a multiple, for wide loads.
    """
    (b, rows, _), keys = u.shape, h.shape[1]
    c = u.new_empty(b, len(d), rows, -(-keys // 16) * 16)[..., :keys]
    for n, each in enumerate(d):
        left = weighted(u, each)
        for start in range(0, rows, STRIP):
            stop = min(start + STRIP, rows)
            end = stop + first if causal else keys
            torch.bmm(left[:, start:stop], h[:, :end].mT, out=c[:, n, start:stop, :end])
    return c


def gradients(
    d_bias: Tensor, u: Tensor, h: Tensor, d: Tensor, first: int, causal: bool, du: Tensor, dh: Tensor, dd: Tensor, *, add: bool
) -> None:
    """Write du [b, rows, D]; write dh [b, keys, D], or add to it (float32 then); add to dd [diagonals, D] (float32).

    d_bias [b, diagonals, rows, keys] is zero above the diagonal where causal.
    """
    rows, keys, several = u.shape[1], h.shape[1], len(d) > 1
    total = u.new_zeros(u.shape, dtype=dd.dtype) if several else du
    for n, each in enumerate(d):
        d_left = torch.empty_like(u)
        for start in range(0, rows, STRIP):
            stop = min(start + STRIP, rows)
            end = stop + first if causal else keys
            torch.bmm(d_bias[:, n, start:stop, :end], h[:, :end], out=d_left[:, start:stop])
        dd[n] += (d_left * u).sum((0, 1), dtype=dd.dtype)
        if several:
            total.addcmul_(d_left, each)
        else:
            torch.mul(d_left, each, out=du)
        left = weighted(u, each)
        for start in range(0, keys, STRIP):
            stop = min(start + STRIP, keys)
            seen_from = max(0, start - first) if causal else 0
            given = d_bias[:, n, seen_from:, start:stop].mT, left[:, seen_from:]
            if add or several:
                dh[:, start:stop] += torch.bmm(*given)
            else:
                torch.bmm(*given, out=dh[:, start:stop])
    if several:
        du.copy_(total)
