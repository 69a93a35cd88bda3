"""Triton kernels of `fem_attention`, imported only where they run; here what several share: tiles, which keys a query reads."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.tiles import Blocks, build, padded

WIDEST = 256  # of a head's queries and keys, and of v
KEYS = {"first": "*i32", "last": "*i32"}  # of documents
HEADS = ((64, 32), (128, 64), (96, 48), (64, 64), (128, 128), (256, 128))  # (dk, dv) that the kernels are built for in the gate


@triton.jit
def load_tile(base, stride, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, RAGGED: tl.constexpr):
    """[ROWS, PADDED] from ``base``: rows ``stride`` apart, zero from row ``count`` on (where RAGGED) and from column WIDTH on."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    at = base + row * stride + column
    if WIDTH < PADDED:
        inside = (row < count) & (column < WIDTH) if RAGGED else column < WIDTH
        tile = tl.load(at, mask=inside, other=0.0)
    elif RAGGED:
        tile = tl.load(at, mask=row < count, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def key_spans(top, bottom, tk, valid, first, last, CAUSAL: tl.constexpr, KEYS: tl.constexpr):
    """(begin, inner, end): where the keys of the queries at positions top to bottom begin, need a mask from, and end.

    begin and inner are multiples of KEYS. With invalid keys or documents every block has a mask: inner is begin.
    """
    begin = 0
    end = tk
    inner = tk // KEYS * KEYS
    if CAUSAL:
        end = bottom + 1
        inner = (top + 1) // KEYS * KEYS
    if first is not None:
        begin = tl.load(first + top) // KEYS * KEYS
        if not CAUSAL:
            end = tl.load(last + bottom)
    if valid is not None or first is not None:
        inner = begin
    # inner is at least begin anyway; where the compiler knows too much of it, ptxas serialises the products (C7515).
    return begin, tl.maximum(inner, begin), end


@triton.jit
def query_span(top, bottom, past, tq, first, last, CAUSAL: tl.constexpr, ROWS: tl.constexpr):
    """(begin, end): where the queries that read the keys at positions top to bottom begin, a multiple of ROWS, and end.

    past: positions before the first query.
    """
    begin = 0
    end = tq
    if first is not None:
        begin = tl.load(first + top)
        end = tl.load(last + bottom)
    if CAUSAL:
        begin = tl.maximum(top - past, 0)
    return begin // ROWS * ROWS, end


@triton.jit
def last_key(position, there, tk, last, CAUSAL: tl.constexpr):
    """The last key that the queries at ``position`` may read."""
    if CAUSAL:
        highest = position
    elif last is not None:
        highest = tl.load(last + position, mask=there, other=0) - 1
    else:
        highest = tl.zeros_like(position) + (tk - 1)
    return highest


@triton.jit
def readable(position, lowest, highest, key, tk, valid):
    """[queries, keys]: whether the queries at ``position`` read ``key``; a key that is not valid is read at its own position alone."""
    allowed = key[None, :] <= highest[:, None]
    if lowest is not None:
        allowed &= key[None, :] >= lowest[:, None]
    if valid is not None:
        good = tl.load(valid + key, mask=key < tk, other=0).to(tl.int1)
        allowed &= good[None, :] | (key[None, :] == position[:, None])
    return allowed


FLOAT32 = Blocks(16, 16, 4, 1)  # without tensor cores a product's operands lie in registers, and larger blocks spill


def built(label, kernel, blocks, constants):
    """The `Build` of a kernel in bfloat16 with these blocks."""
    sizes = {"BDK": padded(constants["DK"]), "BDV": padded(constants["DV"]), "ROWS": blocks.rows, "KEYS": blocks.keys}
    return build(
        label, kernel, constants | sizes, blocks.warps, blocks.stages, matrix=True, even="tq tk",
        bf16="q k values out lam gate d_reads d_q d_k d_values", fp32="lse reads beta centre row_term", kinds=KEYS,
    )  # fmt: skip
