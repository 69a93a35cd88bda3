"""What the kernels of CEM's attention share: tiles of rows, the scores of a tile of pairs, block sizes. No kernel is launched here."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.build import Build
from kernels.implementations import interpreted

LOG2_E = tl.constexpr(math.log2(math.e))


class Sizes(NamedTuple):
    """M rows and N keys a tile, and how Triton builds the kernel."""

    m: int
    n: int
    warps: int
    stages: int


class Part(NamedTuple):
    """Some rows of some sequences, and the keys that they may see; unit strides in the last dimension.

    q [b, heads, rows, r], the first of them at position ``first`` among the keys k [b, heads, keys, r]; bias: C [b, 1 or heads, rows,
    keys] or None; slopes [heads] and alone [], float32; valid [b, at least keys] or None.
    """

    q: Tensor
    k: Tensor
    bias: Tensor | None
    slopes: Tensor
    alone: Tensor
    valid: Tensor | None
    first: int
    scale: float
    causal: bool

    def pointers(self) -> tuple[Tensor | None, ...]:
        """What every kernel takes first."""
        return self.q, self.k, self.bias, self.slopes, self.alone, self.valid

    def numbers(self) -> tuple[int | float, ...]:
        """Rows, keys, first, and the scale for base 2."""
        return self.q.shape[2], self.k.shape[2], self.first, self.scale * LOG2_E.value

    def strides(self, *others: Tensor) -> tuple[int, ...]:
        """Of q, k, C (a head's is 0 where one is for all), valid and, of three dimensions each, others."""
        bias = (0, 0, 0)
        if self.bias is not None:
            bias = (self.bias.stride(0), self.bias.stride(1) if self.bias.shape[1] > 1 else 0, self.bias.stride(2))
        valid = 0 if self.valid is None else self.valid.stride(0)
        return (*self.q.stride()[:3], *self.k.stride()[:3], *bias, valid, *(n for other in others for n in other.stride()[:3]))

    def constants(self, sizes: Sizes, *others: Tensor) -> dict[str, int | bool]:
        """The compile-time arguments that every kernel has, and how it is built. ALIGN: the greatest power of 2 in all strides of rows."""
        width, strides = self.q.shape[3], [n for x in (self.q, self.k, *others) for n in x.stride()[:3]]
        tiles = {"WIDTH": width, "PADDED": padded(width), "M": sizes.m, "N": sizes.n, "CAUSAL": self.causal}
        return tiles | {
            "STAGES": sizes.stages,
            "ALIGN": math.gcd(16, width, *strides),
            "num_warps": sizes.warps,
            "num_stages": sizes.stages,
        }


def padded(width: int) -> int:
    """The width of tiles in registers: a power of 2, at least what a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())


def fitting(dtype: torch.dtype, wide: int, narrow: Sizes, middle: Sizes, broad: Sizes) -> Sizes:
    """bfloat16's sizes for tiles up to 64, 128 and 256 wide; float32 multiplies without tensor cores.

    In Triton's interpreter tiles are small, so that a test has many.
    """
    if interpreted():
        return Sizes(32, 16, 4, 1)
    if dtype == torch.float32:
        return Sizes(32, 32, 4, 1) if wide <= 64 else Sizes(16, 16, 4, 1)
    return narrow if wide <= 64 else middle if wide <= 128 else broad


@triton.jit
def tile_of(base, start, count, local, row_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """Rows start + local of a matrix of ``count`` rows, [len(local), PADDED]; zeros beyond it."""
    column = tl.arange(0, PADDED)
    # Head widths as 84 are no multiple of 16, so Triton cannot tell by itself how wide a load may be.
    at = base + tl.multiple_of(tl.cast(start, tl.int64) * row_stride, ALIGN)
    at = at + tl.multiple_of(local * row_stride, ALIGN)[:, None] + column[None, :]
    return tl.load(at, mask=(start + local < count)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def store_tile(base, start, count, local, row_stride, tile, WIDTH: tl.constexpr, PADDED: tl.constexpr, ALIGN: tl.constexpr):
    """The way back of `tile_of`."""
    column = tl.arange(0, PADDED)
    at = base + tl.multiple_of(tl.cast(start, tl.int64) * row_stride, ALIGN)
    at = at + tl.multiple_of(local * row_stride, ALIGN)[:, None] + column[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=(start + local < count)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def pair_scores(products, scaled, own, key, keys, slope, alone, scale, own_valid, key_valid, edge, CAUSAL: tl.constexpr):
    """a_ij log2(e) of a tile; -inf where i does not see j.

    products: q_i.k_j + C_ij; or q_i.k_j, and ``scaled``, None else, is C_ij times scale. own, key: positions as float32 (exact to 2^24)
    that broadcast against each other, of ``keys`` there are. slope, alone and scale hold log2(e). own_valid, key_valid: None, or they
    broadcast likewise. edge: whether i <= j or j >= keys occurs.
    """
    distance = own - key
    if not CAUSAL:
        distance = tl.abs(distance)
    scores = products * scale if scaled is None else products * scale + scaled
    scores -= slope * distance
    if own_valid is not None:
        scores = tl.where(own == key, scores + alone, scores)
        seen = own_valid & key_valid
        if CAUSAL:
            seen = seen & (key <= own)
        scores = tl.where(seen | (own == key), scores, float("-inf"))
    elif edge:
        scores = tl.where(own == key, scores + alone, scores)
        seen = key <= own if CAUSAL else key < keys
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def bias_tile(bias, row_stride, row, rows, key, keys):
    """C_ij as float32; zeros beyond it. What lies above the diagonal may be anything: its pairs are not seen.

    row, key: indices that broadcast against each other; ``bias`` begins at row 0.
    """
    return tl.load(bias + (row * row_stride + key), mask=(row < rows) & (key < keys), other=0.0).to(tl.float32)


def built(
    label: str,
    kernel: Any,
    sizes: Sizes,
    width: int,
    *,
    outputs: dict[str, str],
    numbers: tuple[str, ...] = (),
    bias: bool = True,
    valid: bool = False,
    causal: bool = True,
    add: bool | None = None,
    matrix: bool = True,
) -> Build:
    """A kernel as a layer launches it: q and k are views of [s, b, heads r], so that only a head's stride is no multiple of 16.

    outputs: its pointers after `Part.pointers`, name -> Triton type; numbers: its integers that a layer's sizes make odd.
    """
    types = {"q": "*bf16", "k": "*bf16", "bias": "*bf16", "slopes": "*fp32", "alone": "*fp32", "valid": "*i1"} | outputs
    absent = {name: None for name, there in (("bias", bias), ("valid", valid)) if not there}
    tiles = {
        "WIDTH": width,
        "PADDED": padded(width),
        "M": sizes.m,
        "N": sizes.n,
        "CAUSAL": causal,
        "STAGES": sizes.stages,
        "ALIGN": math.gcd(16, width),
    }
    constants: dict[str, Any] = absent | tiles | ({} if add is None else {"ADD": add})
    heads = {f"{name}_head" for name, kind in types.items() if kind == "*bf16" and not name.endswith("bias")}
    odd = {"first", *numbers} | (heads if width % 16 else set())
    integers = [name for name in kernel.arg_names if name not in types and name not in constants and name not in ("scale", "unit")]
    types = {name: kind for name, kind in types.items() if name not in absent} | dict.fromkeys(integers, "i32")
    types |= {name: "fp32" for name in ("scale", "unit") if name in kernel.arg_names}
    aligned = tuple(name for name in integers if name not in odd)
    return Build(label, kernel, types, constants, sizes.warps, sizes.stages, matrix=matrix, aligned=aligned)
