"""Step after attention: o = gate (mu + lam (F - mu)) from [mu | Z], and its backward.

No scores and no softmax are computed. The formulas are those of
`kernels.free_energy.FreeEnergyGap`, in float32. The backward reads [mu | Z] anyway (attention keeps
it) and recomputes F - mu, so that the epilogue saves no further tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.fem_attention.triton.prep import (
    BLOCK,
    Constants,
    row_blocks,
    rows_and_channels,
    tile_of,
)
from kernels.free_energy.op import FAINT as LEAST
from kernels.free_energy.op import LOWEST_Y
from kernels.implementations import interpreted
from kernels.tiles import empty_as, load_tile, of_head, padded, place, rows_of, strides_of

WARPS = 8  # more than in prep: each element of a tile needs many registers
LOWEST = tl.constexpr(LOWEST_Y)
FAINT = tl.constexpr(LEAST)


class GatedRead(torch.autograd.Function):
    """o [b, h, tq, dv] in the dtype of reads [b, h, tq, 2dv] = [mu | Z].

    lam, gate [b, h, tq, dv] or None. beta [hk, dv] (float32) and `value_constants` belong to kv
    head n // (h // hk) for head n. If ``wild`` is not None, the gradients of wild blocks are zero.
    beta's gradient is the epilogue's own part, at fixed reads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        reads: Tensor,
        beta: Tensor,
        constants: Constants,
        lam: Tensor | None,
        gate: Tensor | None,
    ) -> Tensor:
        reads, beta, centre, shifted = (
            rows_of(reads),
            beta.contiguous(),
            constants.centre,
            constants.shifted,
        )
        lam, gate = (None if t is None else rows_of(t) for t in (lam, gate))
        (b, h, tokens), dv = reads.shape[:3], beta.shape[1]
        # In lam's order in memory, a layer's next product reads o without a copy.
        o = empty_as(reads if lam is None else lam, reads.dtype, width=dv)
        rows, columns = row_blocks(dv)
        _epilogue_kernel[b * h * triton.cdiv(tokens, rows),](
            reads, beta, centre, shifted, lam, gate, o, *strides_of(reads, lam, gate, o), h,
            h // beta.shape[0], tokens,
            dv, rows, columns, num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(reads, beta, centre, shifted, constants.wild, lam, gate)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        reads, beta, centre, shifted, wild, lam, gate = ctx.saved_tensors
        d_o = rows_of(grads[0])
        (b, h, tokens), (hk, dv) = reads.shape[:3], beta.shape
        rows, columns = row_blocks(dv)
        blocks = triton.cdiv(tokens, rows)
        d_reads = empty_as(reads, d_o.dtype, width=2 * dv)
        d_lam, d_gate = (None if t is None else empty_as(t, width=dv) for t in (lam, gate))
        d_beta = torch.empty(b, hk, h // hk * blocks, dv, dtype=torch.float32, device=d_o.device)
        _epilogue_backward_kernel[b * h * blocks,](
            reads, beta, centre, shifted, wild, lam, gate, d_o, d_reads, d_lam, d_gate, d_beta,
            *strides_of(reads, lam, gate, d_o, d_reads, d_lam, d_gate), h, h // hk, tokens, dv,
            rows, columns, num_warps=WARPS,
        )  # fmt: skip
        return d_reads, d_beta.sum((0, 2)), None, d_lam, d_gate


@triton.jit
def log_beyond(y, log):
    """Return log(1 + y) - y from that logarithm, or from its series where y is small, so that no
    digit is lost.
    """
    series = y * (1.0 / 13) - 1.0 / 12
    series = series * y + 1.0 / 11
    series = series * y - 1.0 / 10
    series = series * y + 1.0 / 9
    series = series * y - 1.0 / 8
    series = series * y + 1.0 / 7
    series = series * y - 1.0 / 6
    series = series * y + 1.0 / 5
    series = series * y - 1.0 / 4
    series = series * y + 1.0 / 3
    series = series * y - 1.0 / 2
    return tl.where(tl.abs(y) < 0.25, y * y * series, log - y)


@triton.jit
def free_energy_gap(mu, z, beta, centre, shifted):
    """Return (F - mu >= 0, mu - c, y) from float32 reads mu and Z, beta and c; kappa = 1 where
    shifted, and only these y have a meaning.

    It takes one logarithm and no division per element.
    """
    offset = mu - centre
    y = tl.maximum(z + offset * beta, LOWEST)
    log = tl.log(tl.where(shifted, 1.0 + y, z))
    beyond = log_beyond(y, log) + z
    width = 1.0 / beta
    return tl.maximum(tl.where(shifted, beyond * width, log * width - offset), 0.0), offset, y


@triton.jit
def _epilogue_kernel(
    reads, beta, centre, shifted, lam, gate, o,
    rb, rh, rt, lb, lh, lt, gb, gh, gt, ob, oh, ot, heads, group, tokens,
    DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute o of ROWS tokens of a head."""
    head, _, at, column, inside, temperature, middle, shift = rows_and_channels(
        beta, centre, shifted, heads, group, tokens, DV, ROWS, COLUMNS
    )
    read = tile_of(reads, head, heads, rb, rh, rt, at, column)
    mu = tl.load(read, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(read + DV, mask=inside, other=1.0).to(tl.float32)
    gap, _, _ = free_energy_gap(mu, z, temperature, middle, shift)
    if lam is not None:
        gap *= tl.load(
            tile_of(lam, head, heads, lb, lh, lt, at, column), mask=inside, other=0.0
        ).to(tl.float32)
    out = mu + gap
    if gate is not None:
        out *= tl.load(
            tile_of(gate, head, heads, gb, gh, gt, at, column), mask=inside, other=0.0
        ).to(tl.float32)
    tl.store(
        tile_of(o, head, heads, ob, oh, ot, at, column), out.to(o.dtype.element_ty), mask=inside
    )


@triton.jit
def _epilogue_backward_kernel(
    reads, beta, centre, shifted, wild, lam, gate, d_o, d_reads, d_lam, d_gate, d_beta,
    rb, rh, rt, lb, lh, lt, gb, gh, gt, ob, oh, ot, drb, drh, drt, dlb, dlh, dlt, dgb, dgh, dgt,
    heads, group, tokens,
    DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute [dmu | dZ], dlam, dgate of ROWS tokens of a head, and their part of dbeta."""
    head, kv, at, column, inside, temperature, middle, shift = rows_and_channels(
        beta, centre, shifted, heads, group, tokens, DV, ROWS, COLUMNS
    )
    kept = inside
    if wild is not None:
        block = kv * tl.cdiv(DV, BLOCK) + column // BLOCK
        kept = inside & (tl.load(wild + block, mask=column < DV, other=0) == 0)[None, :]
    read = tile_of(reads, head, heads, rb, rh, rt, at, column)
    # The reads of a wild block may be arbitrary. They are masked, so that its gradients are zero.
    mu = tl.load(read, mask=kept, other=0.0).to(tl.float32)
    z = tl.load(read + DV, mask=kept, other=1.0).to(tl.float32)
    gap, offset, y = free_energy_gap(mu, z, temperature, middle, shift)
    width = 1.0 / temperature
    mass = tl.where(shift, 1.0 + y, z)
    known = mass >= FAINT  # otherwise F - mu has no gradient, as in `FreeEnergyGap`
    level = 1.0 / tl.where(known, mass, 1.0)
    tilt = tl.where(shift, y * level, 1.0)
    mixed = gap
    d_mixed = tl.load(tile_of(d_o, head, heads, ob, oh, ot, at, column), mask=kept, other=0.0).to(
        tl.float32
    )
    if lam is not None:
        share = tl.load(
            tile_of(lam, head, heads, lb, lh, lt, at, column), mask=inside, other=0.0
        ).to(tl.float32)
        mixed = share * gap
    if gate is not None:
        opening = tl.load(
            tile_of(gate, head, heads, gb, gh, gt, at, column), mask=inside, other=0.0
        ).to(tl.float32)
        d_opening = d_mixed * (mu + mixed)
        tl.store(
            tile_of(d_gate, head, heads, dgb, dgh, dgt, at, column),
            d_opening.to(d_gate.dtype.element_ty),
            mask=inside,
        )
        d_mixed *= opening
    d_gap = d_mixed
    if lam is not None:
        tl.store(
            tile_of(d_lam, head, heads, dlb, dlh, dlt, at, column),
            (d_mixed * gap).to(d_lam.dtype.element_ty),
            mask=inside,
        )
        d_gap = d_mixed * share
    d_gap = tl.where(known, d_gap, 0.0)
    out = tile_of(d_reads, head, heads, drb, drh, drt, at, column)
    tl.store(out, (d_mixed - d_gap * tilt).to(d_reads.dtype.element_ty), mask=inside)
    tl.store(out + DV, (d_gap * level * width).to(d_reads.dtype.element_ty), mask=inside)
    part = tl.sum(tl.where(kept, -d_gap * (tilt * offset + gap) * width, 0.0), 0)
    tl.store(d_beta + tl.program_id(0).to(tl.int64) * DV + column, part, mask=column < DV)


@triton.jit
def _row_term_kernel(
    d_out, out, share, row_term, heads, tokens, d_out_b, d_out_h, d_out_t, out_b, out_h, out_t,
    N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b, h, head_of_all, start = place(heads, tokens, ROWS)
    left, row = tokens - start, tl.arange(0, ROWS)
    d_o = load_tile(
        of_head(d_out, b, h, d_out_b, d_out_h, start, d_out_t), d_out_t, left, ROWS, N, BN
    ).to(tl.float32)
    term = tl.sum(
        d_o
        * load_tile(of_head(out, b, h, out_b, out_h, start, out_t), out_t, left, ROWS, N, BN).to(
            tl.float32
        ),
        1,
    )
    at = head_of_all * tokens + start + row
    if share is not None:
        term = tl.where(tl.load(share + at, mask=row < left, other=0.0) != 0, -term, 0.0)
    tl.store(row_term + at, term, mask=row < left)


def row_term(d_out: Tensor, out: Tensor, share: Tensor | None = None) -> Tensor:
    """Return the sum of do o over each row, [b, h, t] float32, of do and o [b, h, t, n], rows
    contiguous.

    share [b h, t], if given: minus that sum, and 0 where share is 0.
    """
    b, h, tokens, n = out.shape
    rows = 16 if interpreted() else max(4, 1024 // padded(n))
    term = torch.empty(b, h, tokens, dtype=torch.float32, device=out.device)
    _row_term_kernel[b * h * triton.cdiv(tokens, rows),](
        d_out, out, share, term, h, tokens, *strides_of(d_out, out), n, padded(n), rows, num_warps=4
    )  # fmt: skip
    return term
