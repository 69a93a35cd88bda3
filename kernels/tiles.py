"""Code that the Triton kernels of several operations share: tiles of memory, and the mask of a
tile's pairs.

A module whose kernels multiply on a GPU's tensor cores ends with ``MATRIX``, a tuple of those
kernels. `python -m tools.kernel_gate` compiles the kernels that layers and operations launch,
without a GPU. The pairs are those of `kernels.pairs.allowed_pairs`.
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
    """Rows of a program, other rows that it processes at once, warps, and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int

    def given(self) -> dict[str, int]:
        """Return the arguments of a launch."""
        return {
            "ROWS": self.rows,
            "KEYS": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def fitting(dtype: torch.dtype, small: Blocks, float32: Blocks, bfloat16: Blocks) -> Blocks:
    """Return block sizes by type; ``small`` in Triton's interpreter, so that a test has several.
    float32 multiplies without tensor cores.
    """
    if interpreted():
        return small
    return float32 if dtype == torch.float32 else bfloat16


def padded(width: int) -> int:
    """Return the tile width for ``width``: the next power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def rows_of(t: Tensor) -> Tensor:
    """Return t with its last dimension contiguous, as the kernels require."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def alignment(width: int, *tensors: Tensor) -> int:
    """Return ``ALIGN`` for these: the power of two, up to 16, that divides the width and all
    strides; 1 if Triton detects it itself.
    """
    found = math.gcd(16, width, *(n for t in tensors for n in t.stride()[:3]))
    return 1 if found == 16 else found


def strides_of(*tensors: Tensor | None) -> list[int]:
    """Return the first three strides of each tensor, batch, head and token; zeros for None."""
    return [n for t in tensors for n in ((0, 0, 0) if t is None else t.stride()[:3])]


def empty_as(t: Tensor, dtype: torch.dtype | None = None, *, width: int | None = None) -> Tensor:
    """Return an uninitialised tensor of t's shape, except for its last dimension if ``width`` is
    given, with t's order of dimensions in memory.
    """
    order = sorted(range(3), key=lambda n: (t.stride(n), -n), reverse=True)
    shape = [t.shape[n] for n in order] + [t.shape[3] if width is None else width]
    return t.new_empty(shape, dtype=dtype).permute(*(order.index(n) for n in range(3)), 3)


@triton.jit
def load_tile(
    base, stride, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    RAGGED: tl.constexpr = True, ALIGN: tl.constexpr = 1
):  # fmt: skip
    """Load [ROWS, PADDED] from ``base``: rows with ``stride``, zero from row ``count`` on (if
    RAGGED) and from column WIDTH on.

    ALIGN: divides the stride; 1 is no information. Head widths such as 84 are not multiples of 16,
    so Triton cannot infer the width of a load.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    offset = tl.arange(0, ROWS) * stride
    if ALIGN > 1:  # the hint has no effect on a function's argument
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
    """Store a tile [ROWS, PADDED] in the type at ``base``: its rows before ``count``, its columns
    before WIDTH.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    offset = tl.arange(0, ROWS) * stride
    if ALIGN > 1:
        offset = tl.multiple_of(offset, ALIGN)
    at = base + offset[:, None] + column
    tl.store(at, tile.to(base.dtype.element_ty), mask=(row < count) & (column < WIDTH))


@triton.jit
def place(heads, rows, ROWS: tl.constexpr):
    """Return (sequence, head, index over sequences and heads, first row) of a program; grid: blocks
    of rows, the last first, times sequences and heads.

    Under a causal mask the last queries have the most work.
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
    """Return x plus ``row`` rows with ``stride``. ALIGN: see `load_tile`.

    The hint is on the product, because a sum with 0 loses it.
    """
    offset = row * stride
    if ALIGN > 1:
        offset = tl.multiple_of(offset, ALIGN)
    return x + offset


@triton.jit
def of_head(x, b, h, x_b, x_h, start=None, x_t=0, ALIGN: tl.constexpr = 1):
    """Return the address of a head of x [b, h, ...], or of its row ``start``; None if x is None.
    ALIGN: of all strides.
    """
    at = None  # Triton 3.6 returns no argument that is None
    if x is not None:
        at = at_row(at_row(x, b, x_b, ALIGN), h, x_h, ALIGN)
        if start is not None:
            at = at_row(at, start, x_t, ALIGN)
    return at


@triton.jit
def good_at(valid, position, count):
    """Return the mask of the unpadded tokens at these positions; None without a mask."""
    good = None
    if valid is not None:
        good = tl.load(valid + position, mask=position < count, other=0).to(tl.int1)
    return good


@triton.jit
def seen(query, key, count, query_good, key_good, CAUSAL: tl.constexpr):
    """Return the mask of queries that read keys, of ``count`` positions. The arguments broadcast
    against each other.

    Padding reads itself alone, and no other token reads it. Queries after the last one are ignored.
    """
    allowed = key <= query if CAUSAL else (key < count) & (query >= 0)
    if query_good is not None:
        allowed &= (query_good & key_good) | (key == query)
    return allowed


@triton.jit
def probabilities(scores, level):
    """Return exp2 of scores minus their log-sum-exp, never above 1.

    Scores in the millions have rounding errors of more than 128, which differ between tiles.
    """
    return tl.exp2(tl.minimum(scores - level, 0.0))
