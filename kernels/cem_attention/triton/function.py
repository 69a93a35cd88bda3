"""CEM's attention in Triton: the kernels compute the pairs in registers, torch.bmm the diagonal's
part of the scores.

The backward keeps the inputs, in their own dtypes, the output and one number per row and head. The
diagonal part C_ij = h_j . (d u_i) is computed for some rows at a time; d is None for one C, h_j .
u_i, which all heads share. In bfloat16, C and its
gradient are bfloat16, rounded once from float32 sums. A head reads C once in the forward and three
times in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.arguments import without_autocast
from kernels.cem_attention.triton.backward import d_keys, d_pairs, d_queries
from kernels.cem_attention.triton.forward import Part, attend
from kernels.tiles import rows_of


class Read(torch.autograd.Function):
    """`cem_attention` of float32 or bfloat16.

    alone = b_self - b_cross, a scalar tensor, and slopes are float32.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, u, h, d, slopes, alone, scale, causal, valid = inputs
        q, k = rows_of(q), rows_of(k)
        ctx.scale, ctx.causal = scale, causal
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for sequences, rows in diagonal_parts(len(q), _matrices(u, d), q.shape[2], k.shape[2]):
            part = _part((q, k, u, h, d, slopes, alone, scale, causal, valid), sequences, rows)
            attend(part, out[sequences, :, rows], lse[sequences, :, rows])
        ctx.save_for_backward(q, k, u, h, d, slopes, alone, valid, out, lse)
        return out

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, u, h, d, slopes, alone, valid, out, lse = ctx.saved_tensors
        (d_out,) = grads
        d_out = rows_of(d_out)
        (b, _, t, _), tk = q.shape, k.shape[2]
        pieces = list(diagonal_parts(b, _matrices(u, d), t, tk))
        # If the rows are cut, several parts add to the same keys.
        cut = len({rows.start for _, rows in pieces}) > 1
        dq, row_terms, d_alone = torch.empty_like(q), torch.empty_like(lse), None
        dk = torch.zeros_like(k, dtype=torch.float32) if cut else torch.empty_like(k)
        several = d is not None
        dd = torch.zeros_like(d, dtype=torch.float32) if several else None
        du = None if u is None else torch.empty_like(u)
        dh = None
        if h is not None:
            wide = cut or several
            dh = torch.zeros_like(h, dtype=torch.float32) if wide else torch.empty_like(h)
        for sequences, rows in pieces:
            part = _part(
                (q, k, u, h, d, slopes, alone, ctx.scale, ctx.causal, valid), sequences, rows
            )
            end = part.k.shape[2]
            given = (
                d_out[sequences, :, rows],
                lse[sequences, :, rows],
                row_terms[sequences, :, rows],
            )
            d_queries(part, out[sequences, :, rows], *given, dq[sequences, :, rows])
            d_part = d_keys(part, *given, dk[sequences, :, :end], add=cut)
            d_alone = d_part if d_alone is None else d_alone + d_part
            if du is not None and dh is not None:
                d_bias = d_pairs(part, *given)
                diagonal_gradients(
                    d_bias, u[sequences, rows], h[sequences, :end], d, part.first, ctx.causal,
                    du[sequences, rows], dh[sequences, :end], dd, add=cut,
                )  # fmt: skip
        dh, dd = (None if x is None else x.to(like.dtype) for x, like in ((dh, h), (dd, d)))
        return dq, dk.to(k.dtype), du, dh, dd, None, d_alone, None, None, None


def _part(given: tuple[Any, ...], sequences: slice, rows: slice) -> Part:
    """Return the `Part` with these sequences and rows of the arguments of `Read`."""
    q, k, u, h, d, slopes, alone, scale, causal, valid = given
    first = rows.start + k.shape[2] - q.shape[2]
    end = first + rows.stop - rows.start if causal else k.shape[2]
    c = None
    if u is not None and h is not None:
        c = diagonal_scores(u[sequences, rows], h[sequences, :end], d, first, causal)
    seen = None if valid is None else valid[sequences]
    return Part(
        q[sequences, :, rows], k[sequences, :, :end], c, slopes, alone, seen, first, scale, causal
    )


# Most terms of C at a time: 128 MB in bfloat16, and the same for the gradient. The rows of a longer
# sequence are cut.
TERMS = 1 << 26
LEAST_ROWS = 128  # least rows of a part; memory is linear in the tokens
# Rows or keys of one matrix product: terms above the diagonal are left out in strips, and a product
# still fills a GPU.
STRIP = 512


def diagonal_parts(b: int, diagonals: int, t: int, tk: int) -> Iterator[tuple[slice, slice]]:
    """Yield (sequences, rows), in order, with at most ``TERMS`` terms of C each.

    diagonals: the number of C matrices of a sequence; 0: everything in one part.
    """
    if diagonals * t * tk <= TERMS:
        at_once = max(1, TERMS // (diagonals * t * tk)) if diagonals else b
        yield from (
            (slice(start, min(start + at_once, b)), slice(0, t)) for start in range(0, b, at_once)
        )
        return
    at_once = max(LEAST_ROWS, TERMS // (diagonals * tk))
    for sequence in range(b):
        yield from (
            (slice(sequence, sequence + 1), slice(start, min(start + at_once, t)))
            for start in range(0, t, at_once)
        )


def _matrices(u: Tensor | None, d: Tensor | None) -> int:
    """Return the number of C matrices of a sequence."""
    return 0 if u is None else 1 if d is None else len(d)


def weighted(u: Tensor, d: Tensor | None) -> Tensor:
    """Return u [b, rows, D] times one diagonal d [D] (None: u itself), in u's dtype."""
    if d is None:
        return u
    return torch.mul(u, d, out=torch.empty(u.shape, dtype=u.dtype, device=u.device))


def diagonal_scores(u: Tensor, h: Tensor, d: Tensor | None, first: int, causal: bool) -> Tensor:
    """Return C [b, diagonals, rows, keys] of u [b, rows, D] at the positions from ``first`` on, h
    [b, keys, D], d [diagonals, D], or None for one C = u h^T.

    If causal, some terms above the diagonal are not written. The stride between rows is a multiple
    of 16 terms, for wide loads.
    """
    (b, rows, _), keys = u.shape, h.shape[1]
    c = u.new_empty(b, _matrices(u, d), rows, -(-keys // 16) * 16)[..., :keys]
    for n, each in enumerate([None] if d is None else d):
        left = weighted(u, each)
        for start in range(0, rows, STRIP):
            stop = min(start + STRIP, rows)
            end = stop + first if causal else keys
            torch.bmm(left[:, start:stop], h[:, :end].mT, out=c[:, n, start:stop, :end])
    return c


def diagonal_gradients(
    d_bias: Tensor,
    u: Tensor,
    h: Tensor,
    d: Tensor | None,
    first: int,
    causal: bool,
    du: Tensor,
    dh: Tensor,
    dd: Tensor | None,
    *,
    add: bool,
) -> None:
    """Write du; write dh, or add to it if ``add`` or with d; and add to dd, if given.

    du [b, rows, D], dh [b, keys, D] (float32 if it is added to), dd [diagonals, D] (float32).
    d_bias [b, diagonals, rows, keys] is zero above the diagonal if causal.
    """
    rows, keys = u.shape[1], h.shape[1]
    total = None if dd is None else torch.zeros_like(u, dtype=dd.dtype)
    for n, each in enumerate([None] if d is None else d):
        d_left = du if total is None else torch.empty_like(u)
        for start in range(0, rows, STRIP):
            stop = min(start + STRIP, rows)
            end = stop + first if causal else keys
            torch.bmm(d_bias[:, n, start:stop, :end], h[:, :end], out=d_left[:, start:stop])
        if total is not None and dd is not None:
            dd[n] += (d_left * u).sum((0, 1), dtype=dd.dtype)
            total.addcmul_(d_left, each)
        left = weighted(u, each)
        for start in range(0, keys, STRIP):
            stop = min(start + STRIP, keys)
            seen_from = max(0, start - first) if causal else 0
            given = d_bias[:, n, seen_from:, start:stop].mT, left[:, seen_from:]
            if add or total is not None:
                dh[:, start:stop] += torch.bmm(*given)
            else:
                torch.bmm(*given, out=dh[:, start:stop])
    if total is not None:
        du.copy_(total)
