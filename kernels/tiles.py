"""What the Triton kernels of several operations share: tiles of memory, and which pairs of a tile count.

A module whose kernels multiply on a GPU's tensor cores ends with ``MATRIX``, those kernels. `python -m tools.kernel_gate` compiles what
layers and operations launch, without a GPU. Pairs count as `kernels.pairs.allowed_pairs` has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.implementations import interpreted

LOG2E = math.log2(math.e)
LOG2_E = tl.constexpr(LOG2E)  # the same within kernels


@dataclass(frozen=True)
class Blocks:
    """A program's own rows, the others it takes at once, warps, and stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int

    def given(self) -> dict[str, int]:
        """The arguments of a launch."""
        return {
            "ROWS": self.rows,
            "KEYS": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def fitting(dtype: torch.dtype, small: Blocks, float32: Blocks, bfloat16: Blocks) -> Blocks:
    """Block sizes by type; ``small`` in Triton's interpreter, so that a test has several. float32 multiplies without tensor cores."""
    return small if interpreted() else float32 if dtype == torch.float32 else bfloat16


def padded(width: int) -> int:
    """The power of two, at least 16, that a tile has for a width."""
    return max(16, 1 << (width - 1).bit_length())


def rows_of(t: Tensor) -> Tensor:
    """t with its last dimension contiguous, as the kernels read it."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def alignment(width: int, *tensors: Tensor) -> int:
    """What ``ALIGN`` is for these: the power of two, up to 16, that divides a width and all strides; 1 where Triton sees it by itself."""
    found = math.gcd(16, width, *(n for t in tensors for n in t.stride()[:3]))
    return 1 if found == 16 else found


def strides_of(*tensors: Tensor | None) -> list[int]:
    """The first three strides of each, batch, head and token; zeros where there is none."""
    return [n for t in tensors for n in ((0, 0, 0) if t is None else t.stride()[:3])]


def empty_as(t: Tensor, dtype: torch.dtype | None = None, *, width: int | None = None) -> Tensor:
    """Uninitialised, of t's shape but for its last dimension where ``width`` is given, in memory in the order of t's dimensions."""
    order = sorted(range(3), key=lambda n: (t.stride(n), -n), reverse=True)
    shape = [t.shape[n] for n in order] + [t.shape[3] if width is None else width]
    return t.new_empty(shape, dtype=dtype).permute(*(order.index(n) for n in range(3)), 3)


@triton.jit
def load_tile(
    base, stride, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, RAGGED: tl.constexpr = True, ALIGN: tl.constexpr = 1
):  # fmt: skip
    """[ROWS, PADDED] from ``base``: rows ``stride`` apart, zero from row ``count`` on (where RAGGED) and from column WIDTH on.

    ALIGN: divides the stride; 1 says nothing. Head widths as 84 are no multiple of 16: Triton cannot tell how wide a load may be.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    offset = tl.arange(0, ROWS) * stride
    if ALIGN > 1:  # said here: of its argument, a function could say nothing
        offset = tl.multiple_of(offset, ALIGN)
    at = base + offset[:, None] + column
    if WIDTH < PADDED:
        inside = (row < count) & (column < WIDTH) if RAGGED else column < WIDTH
        tile = tl.load(at, mask=inside, other=0.0)
    elif RAGGED:
        tile = tl.load(at, mask=row < count, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store_tile(
    base,
    stride,
    count,
    tile,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGN: tl.constexpr = 1,
):
    """Store a tile [ROWS, PADDED] in the type at ``base``: its rows before ``count``, its columns before WIDTH."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    offset = tl.arange(0, ROWS) * stride
    if ALIGN > 1:
        offset = tl.multiple_of(offset, ALIGN)
    at = base + offset[:, None] + column
    tl.store(at, tile.to(base.dtype.element_ty), mask=(row < count) & (column < WIDTH))


@triton.jit
def place(heads, rows, ROWS: tl.constexpr):
    """(sequence, head, head of all, first row) of a program; grid: blocks of rows, the last first, times heads of all.

    Under a causal mask the last queries have the most to do.
    """
    blocks = tl.cdiv(rows, ROWS)
    head_of_all = (tl.program_id(0) // blocks).to(tl.int64)
    return (
        head_of_all // heads,
        head_of_all % heads,
        head_of_all,
        (blocks - 1 - tl.program_id(0) % blocks) * ROWS,
    )


@triton.jit
def at_row(x, row, stride, ALIGN: tl.constexpr = 1):
    """x plus ``row`` rows ``stride`` apart; ALIGN: as `load_tile` has it. Said of a product, since of a sum with 0 nothing is kept."""
    offset = row * stride
    if ALIGN > 1:
        offset = tl.multiple_of(offset, ALIGN)
    return x + offset


@triton.jit
def of_head(x, b, h, x_b, x_h, start=None, x_t=0, ALIGN: tl.constexpr = 1):
    """Where a head of x [b, h, ...], or its row ``start``, begins; None where there is no x. ALIGN: of all strides."""
    at = None  # Triton 3.6 returns no argument that is None
    if x is not None:
        at = at_row(at_row(x, b, x_b, ALIGN), h, x_h, ALIGN)
        if start is not None:
            at = at_row(at, start, x_t, ALIGN)
    return at


@triton.jit
def good_at(valid, position, count):
    """Whether the tokens at these positions are not padding; None where there is none."""
    good = None
    if valid is not None:
        good = tl.load(valid + position, mask=position < count, other=0).to(tl.int1)
    return good


@triton.jit
def seen(query, key, count, query_good, key_good, CAUSAL: tl.constexpr):
    """Whether the token at position ``query`` sees ``key``, of ``count``; broadcast against each other, and so are the ..._good.

    Padding sees itself alone, and nobody sees it. Queries past the last are not looked at.
    """
    allowed = key <= query if CAUSAL else (key < count) & (query >= 0)
    if query_good is not None:
        allowed &= (query_good & key_good) | (key == query)
    return allowed


@triton.jit
def probabilities(scores, level):
    """exp2 of scores less their log-sum-exp.

    Never above 1: scores in the millions are rounded by more than 128, and differently in a tile of other rows.
    """
    return tl.exp2(tl.minimum(scores - level, 0.0))
