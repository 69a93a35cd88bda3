"""Step before attention: the constants of each head's free energy, and the stream [v | U].

No scores and no softmax are computed. The formulas are those of `kernels.free_energy`, in float32.
A block of BLOCK channels of a head is *wild* if beta * (max v - min v) exceeds MAX_RANGE in one of
them. All blocks of a head with values that are not finite are wild, because these values would make
the gradients of its other channels invalid. In a wild block, c is chosen so that no exponential
overflows; the results of attention for it must be replaced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.free_energy.op import CLAMP as MOST
from kernels.free_energy.op import SHIFT_BELOW
from kernels.free_energy.ranges import MAX_RANGE
from kernels.implementations import interpreted
from kernels.tiles import LOG2_E, empty_as, rows_of

WARPS = 4
BLOCK = tl.constexpr(16)  # channels that are read exactly or not, as a unit
LARGEST = tl.constexpr(MAX_RANGE)
SHIFT = tl.constexpr(SHIFT_BELOW)
CLAMP = tl.constexpr(MOST)
LOWEST = tl.constexpr(-120.0)  # its exponential is 0 in float32
# Ten bits of log 2: its product with an integer below 2^14 is exact.
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(math.log(2) - 0.693359375)


@dataclass(frozen=True)
class Constants:
    """Constants of stream and epilogue besides beta: centre, shifted [b, hk, 1, dv] and wild
    [b, hk, blocks of channels].

    largest [b, hk]: the largest beta * range of each head.
    """

    centre: Tensor
    shifted: Tensor
    wild: Tensor | None
    largest: Tensor


def value_constants(v: Tensor, beta: Tensor) -> Constants:
    """Return each channel's c over the sequence, where kappa is 1, and which blocks are wild.

    v [b, hk, t, dv], beta [hk, dv]. The results are float32 and bool, detached, and stay on the
    device.
    Source: as `kernels.free_energy.value_centre_and_range`.
    """
    v, beta = rows_of(v.detach()), beta.detach().contiguous()
    b, hk, tokens, dv = v.shape
    rows, columns, span = range_blocks(dv)
    splits = triton.cdiv(tokens, span)
    low, high = v.new_empty(2, b * hk, splits, dv, dtype=torch.float32)
    _range_kernel[b * hk * splits,](
        v, low, high, *v.stride()[:3], hk, tokens, splits, dv, span, rows, columns, num_warps=WARPS
    )
    centre = v.new_empty(b, hk, 1, dv, dtype=torch.float32)
    shifted = torch.empty_like(centre, dtype=torch.bool)
    wild, largest = (
        v.new_empty(b, hk, triton.cdiv(dv, BLOCK.value), dtype=torch.bool),
        v.new_empty(b, hk, dtype=torch.float32),
    )
    _constants_kernel[b * hk,](
        low,
        high,
        beta,
        centre,
        shifted,
        wild,
        largest,
        hk,
        splits,
        dv,
        rows,
        columns,
        num_warps=WARPS,
    )
    return Constants(centre, shifted, wild, largest)


class ValueStreams(torch.autograd.Function):
    """[v | U] [b, hk, t, 2dv] in v's dtype, of v [b, hk, t, dv], beta [hk, dv] (float32) and
    `value_constants`.

    beta's gradient is the part that flows through the stream.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, beta: Tensor, constants: Constants) -> Tensor:
        v, beta, centre, shifted = (
            rows_of(v),
            beta.contiguous(),
            constants.centre,
            constants.shifted,
        )
        b, hk, tokens, dv = v.shape
        values = v.new_empty(b, hk, tokens, 2 * dv)
        rows, columns = row_blocks(dv)
        grid = (b * hk * triton.cdiv(tokens, rows),)
        _stream_kernel[grid](
            v,
            beta,
            centre,
            shifted,
            values,
            *v.stride()[:3],
            *values.stride()[:3],
            hk,
            tokens,
            dv,
            rows,
            columns,
            num_warps=WARPS,
        )
        ctx.save_for_backward(v, beta, centre, shifted)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        v, beta, centre, shifted = ctx.saved_tensors
        d_values = rows_of(grads[0])
        b, hk, tokens, dv = v.shape
        rows, columns = row_blocks(dv)
        blocks = triton.cdiv(tokens, rows)
        d_v = empty_as(v, width=dv)
        d_beta = v.new_empty(b, hk, blocks, dv, dtype=torch.float32)
        strides = (*v.stride()[:3], *d_values.stride()[:3], *d_v.stride()[:3])
        _stream_backward_kernel[b * hk * blocks,](
            v,
            beta,
            centre,
            shifted,
            d_values,
            d_v,
            d_beta,
            *strides,
            hk,
            tokens,
            dv,
            rows,
            columns,
            num_warps=WARPS,
        )
        return d_v, d_beta.sum((0, 2)), None


def row_blocks(dv: int) -> tuple[int, int]:
    """Return (tokens, channels) of a tile for ``dv`` channels.

    The kernels keep about six of these tiles in registers.
    """
    columns = max(16, triton.next_power_of_2(dv))
    return (16 if interpreted() else max(4, 2048 // columns)), columns


def range_blocks(dv: int) -> tuple[int, int, int]:
    """Return (tokens, channels) of a tile of the range kernel, and the number of tokens that one
    program reads.
    """
    rows, columns = row_blocks(dv)
    return rows, columns, 2 * rows if interpreted() else 256


@triton.jit
def accurate_exp(x):
    """Return exp(x) to two units in the last place.

    The hardware's exp2 of x log2(e) would lose |x| units through the rounding of that product.
    """
    whole = tl.floor(x * LOG2_E + 0.5)
    rest = (x - whole * LN2_HIGH) - whole * LN2_LOW
    return tl.exp2(rest * LOG2_E) * tl.exp2(whole)


@triton.jit
def excess(x):
    """Return exp(x) - 1 - x, to full precision where x is small."""
    series = x * (1.0 / 39916800) + 1.0 / 3628800
    series = series * x + 1.0 / 362880
    series = series * x + 1.0 / 40320
    series = series * x + 1.0 / 5040
    series = series * x + 1.0 / 720
    series = series * x + 1.0 / 120
    series = series * x + 1.0 / 24
    series = series * x + 1.0 / 6
    series = series * x + 0.5
    return tl.where(tl.abs(x) < 1, x * x * series, accurate_exp(x) - 1 - x)


@triton.jit
def exponent(v, beta, centre):
    """Return x = beta (v - centre), clamped where the range is over LARGEST; 0 where it is NaN."""
    x = (v - centre) * beta
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, LOWEST), CLAMP)


@triton.jit
def _range_kernel(
    v,
    low,
    high,
    sb,
    sh,
    st,
    heads,
    tokens,
    splits,
    DV: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the least and greatest value of each channel in SPAN tokens.

    The greatest is infinite where a value is NaN.
    """
    head = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    column = tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    base = v + head // heads * sb + head % heads * sh
    least = tl.full((ROWS, COLUMNS), float("inf"), tl.float32)
    greatest = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    for start in range(0, SPAN, ROWS):
        at = split * SPAN + start + row
        inside = (at < tokens)[:, None] & (column < DV)[None, :]
        value = tl.load(
            base + at.to(tl.int64)[:, None] * st + column[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        least = tl.minimum(least, tl.where(inside, value, float("inf")))
        greatest = tl.maximum(
            greatest, tl.where(inside, tl.where(value == value, value, float("inf")), float("-inf"))
        )
    out = (head * splits + split) * DV + column
    tl.store(low + out, tl.min(least, 0), mask=column < DV)
    tl.store(high + out, tl.max(greatest, 0), mask=column < DV)


@triton.jit
def _constants_kernel(
    low,
    high,
    beta,
    centre,
    shifted,
    wild,
    largest,
    heads,
    splits,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the constants of one head from the least and the greatest values of its spans."""
    head = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    least = tl.full((ROWS, COLUMNS), float("inf"), tl.float32)
    greatest = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
    for start in range(0, splits, ROWS):
        at = (head * splits + start + row)[:, None] * DV + column[None, :]
        inside = (start + row < splits)[:, None] & (column < DV)[None, :]
        least = tl.minimum(least, tl.load(low + at, mask=inside, other=float("inf")))
        greatest = tl.maximum(greatest, tl.load(high + at, mask=inside, other=float("-inf")))
    lowest = tl.min(least, 0)
    highest = tl.max(greatest, 0)
    inside = column < DV
    temperature = tl.load(beta + head % heads * DV + column, mask=inside, other=1.0).to(tl.float32)
    spread = tl.where(inside, temperature * (highest - lowest), 0.0)
    spread = tl.where(spread == spread, spread, float("inf"))
    middle = tl.maximum(lowest * 0.5 + highest * 0.5, highest - LARGEST * 0.5 / temperature)
    finite = tl.abs(middle) < float("inf")
    tl.store(centre + head * DV + column, tl.where(finite, middle, 0.0), mask=inside)
    tl.store(shifted + head * DV + column, spread < SHIFT, mask=inside)
    reach = tl.max(spread, 0)
    tl.store(largest + head, reach)
    block = tl.arange(0, COLUMNS // BLOCK)
    of_block = tl.where(
        reach < float("inf"), tl.max(tl.reshape(spread, (COLUMNS // BLOCK, BLOCK)), 1), reach
    )
    tl.store(
        wild + head * tl.cdiv(DV, BLOCK) + block,
        of_block > LARGEST,
        mask=block < tl.cdiv(DV, BLOCK),
    )


@triton.jit
def tile_of(base, head, heads, sb, sh, st, at, column):
    """Return the pointers to the rows ``at`` of a head."""
    return base + head // heads * sb + head % heads * sh + at[:, None] * st + column[None, :]


@triton.jit
def rows_and_channels(
    beta,
    centre,
    shifted,
    heads,
    group,
    tokens,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return (head, kv head, rows, channels, mask of existing elements, beta, c, kappa = 1) of a
    program.
    """
    blocks = tl.cdiv(tokens, ROWS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    at = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    kv = head // group
    there = (column < DV)[None, :]
    temperature = tl.load(
        beta + kv % (heads // group) * DV + column[None, :], mask=there, other=1.0
    )
    middle = tl.load(centre + kv * DV + column[None, :], mask=there, other=0.0)
    shift = tl.load(shifted + kv * DV + column[None, :], mask=there, other=1).to(tl.int1)
    return head, kv, at, column, (at < tokens)[:, None] & there, temperature, middle, shift


@triton.jit
def _stream_kernel(
    v, beta, centre, shifted, values,
    sb, sh, st, ub, uh, ut, heads, tokens,
    DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute values = [v | U] of ROWS tokens of a head."""
    head, _, at, column, inside, temperature, middle, kappa = rows_and_channels(
        beta, centre, shifted, heads, 1, tokens, DV, ROWS, COLUMNS
    )
    value = tl.load(tile_of(v, head, heads, sb, sh, st, at, column), mask=inside, other=0.0)
    x = exponent(value.to(tl.float32), temperature, middle)
    u = tl.where(kappa, excess(x), accurate_exp(x))
    out = tile_of(values, head, heads, ub, uh, ut, at, column)
    tl.store(out, value, mask=inside)
    tl.store(out + DV, u.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _stream_backward_kernel(
    v, beta, centre, shifted, d_values, d_v, d_beta,
    sb, sh, st, ub, uh, ut, db, dh, dt, heads, tokens,
    DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute dv = dv of the stream + beta dU/dx dU, and this block's part of dbeta."""
    head, _, at, column, inside, temperature, middle, kappa = rows_and_channels(
        beta, centre, shifted, heads, 1, tokens, DV, ROWS, COLUMNS
    )
    value = tl.load(tile_of(v, head, heads, sb, sh, st, at, column), mask=inside, other=0.0)
    x = exponent(value.to(tl.float32), temperature, middle)
    slope = tl.where(kappa, excess(x) + x, accurate_exp(x))
    given = tile_of(d_values, head, heads, ub, uh, ut, at, column)
    dx = tl.load(given + DV, mask=inside, other=0.0).to(tl.float32) * slope
    gradient = tl.load(given, mask=inside, other=0.0).to(tl.float32) + dx * temperature
    tl.store(
        tile_of(d_v, head, heads, db, dh, dt, at, column),
        gradient.to(d_v.dtype.element_ty),
        mask=inside,
    )
    part = tl.sum(tl.where(inside, dx * (value.to(tl.float32) - middle), 0.0), 0)
    tl.store(d_beta + tl.program_id(0).to(tl.int64) * DV + column, part, mask=column < DV)
