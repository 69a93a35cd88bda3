"""Flash attention in Triton: one pass over the keys with a running maximum.

`attention_backward` contains its gradients. The weights are rounded to the inputs' dtype before
they are summed and multiplied. The weights that multiply the values therefore add up to one, and
Jensen's inequality holds between the reads. Keys that every query of a block reads are processed
without a mask. No kernel is autotuned and no step waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.fem_attention.triton.attention_backward import (
    WIDEST,
    _keys_kernel,
    _queries_kernel,
    forward_blocks,
    key_spans,
    keys_blocks,
    last_key,
    queries_blocks,
    readable,
)  # fmt: skip
from kernels.fem_attention.triton.epilogue import row_term
from kernels.tiles import (
    LOG2E,
    alignment,
    at_row,
    empty_as,
    load_tile,
    of_head,
    padded,
    place,
    rows_of,
    store_tile,
    strides_of,
)


def attend(q, k, values, *, causal, scale, keys_valid=None, bounds=None):
    """Return softmax(scale q k^T) values, [b, h, tq, n] in q's dtype.

    The result is differentiable in q, k and values.
    Shapes: q [b, h, tq, dk], k [b, hk, tk, dk], values [b, hk, tk, n]; hk divides h, and query head
    i reads head i // (h // hk). The queries are the last tq of the tk positions. keys_valid [b, tk]
    bool: only the query at the same position reads a False key.
    bounds: (first, last), int32 [tk]: the token at position i reads first[i] <= j < last[i], its
    document's tokens (b = 1, tq = tk).
    Dtypes: float32 or bfloat16.
    Raises ValueError for dk over 256, n over 512 or a negative scale.
    """
    return _Attend.apply(q, k, values, keys_valid, bounds, causal, scale)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, values, keys_valid, bounds, causal, scale):
        (b, h, tq, dk), (hk, tk, n) = q.shape, values.shape[1:]
        if dk > WIDEST or n > 2 * WIDEST or scale < 0:
            raise ValueError(
                f"attention: widths {dk} and {n} with scale {scale:g}; use at most {WIDEST} and "
                f"{2 * WIDEST}, and scale >= 0"
            )
        q, k, values = rows_of(q), rows_of(k), rows_of(values)
        masks = tuple(
            None if t is None else t.contiguous() for t in (keys_valid, *(bounds or (None, None)))
        )
        out, lse = empty_as(q, width=n), torch.empty(b, h, tq, dtype=torch.float32, device=q.device)
        blocks = forward_blocks(q.dtype, dk, n)
        _forward_kernel[(triton.cdiv(tq, blocks.rows) * b * h,)](
            q, k, values, *masks, out, lse, scale * LOG2E, h, tq, tk, *strides_of(q, k, values,
            out),
            CAUSAL=causal, DK=dk, BDK=padded(dk), DV=n, BDV=padded(n), GROUP=h // hk,
            ALIGN=alignment(n, q, k, values, out),
            **blocks.given(),
        )  # fmt: skip
        ctx.save_for_backward(q, k, values, *masks, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, values, keys_valid, first, last, out, lse = ctx.saved_tensors
        (b, h, tq, dk), (hk, tk, n), d_out = q.shape, values.shape[1:], rows_of(d_out)
        d_q, d_k, d_values = torch.empty_like(q), torch.empty_like(k), torch.empty_like(values)
        # The values are read in two halves of equal width, because one accumulator of all channels
        # would spill. They are not split if the one accumulator would be no wider than the two, and
        # the second half would need narrower loads.
        halves = 1 if n % 2 or (n % 16 and n <= 128) else 2
        given = (q, k, values, keys_valid, first, last, d_out, row_term(d_out, out), lse)
        numbers = (ctx.scale, ctx.scale * LOG2E, h, tq, tk, *strides_of(q, k, values, d_out))
        widths = {
            "CAUSAL": ctx.causal,
            "HALVES": halves,
            "DK": dk,
            "BDK": padded(dk),
            "DV": n // halves,
            "BDV": padded(n // halves),
        }
        widths |= {
            "ALIGN": alignment(n // halves, q, k, values, d_out, d_q, d_k, d_values),
            "GROUP": h // hk,
        }
        blocks = queries_blocks(q.dtype, dk, n // halves, halves)
        _queries_kernel[(triton.cdiv(tq, blocks.rows) * b * h,)](
            *given, d_q, *numbers, *strides_of(d_q), **widths, **blocks.given()
        )
        blocks = keys_blocks(q.dtype, dk, n // halves, halves)
        _keys_kernel[(triton.cdiv(tk, blocks.keys) * b * hk,)](
            *given, d_k, d_values, *numbers, *strides_of(d_k, d_values), **widths, **blocks.given()
        )
        return d_q, d_k, d_values, None, None, None, None


@triton.jit
def _span(
    top, total, read, q, k, values, valid, position, lowest, highest, start, stop, factor, tk, k_t,
    values_t,
    MASKED: tl.constexpr, DK: tl.constexpr, BDK: tl.constexpr, DV: tl.constexpr,
    BDV: tl.constexpr, KEYS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Read the keys from start to stop.

    Return the running maximum (in powers of two), the sum of weights and the reads.
    """
    for n in range(start, stop, KEYS):
        here = tl.cast(n, tl.int64)
        keys = load_tile(at_row(k, here, k_t, ALIGN), k_t, tk - n, KEYS, DK, BDK, MASKED, ALIGN)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if MASKED:
            allowed = readable(position, lowest, highest, n + tl.arange(0, KEYS), tk, valid)
            scores = tl.where(allowed, scores * factor, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            # For a row that has read no key yet, -inf - -inf would be NaN.
            level = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - level[:, None])
            kept = tl.exp2(top - level)
        else:
            new = tl.maximum(top, tl.max(scores, 1) * factor)
            weights = tl.exp2(scores * factor - new[:, None])
            kept = tl.exp2(top - new)
        weights = weights.to(values.dtype.element_ty)
        total = total * kept + tl.sum(weights.to(tl.float32), 1)
        tile = load_tile(
            at_row(values, here, values_t, ALIGN), values_t, tk - n, KEYS, DV, BDV, MASKED, ALIGN
        )
        read = tl.dot(weights, tile, read * kept[:, None], input_precision="ieee")
        top = new
    return top, total, read


@triton.jit
def _forward_kernel(
    q, k, values, valid, first, last, out, lse, factor, heads, tq, tk,
    q_b, q_h, q_t, k_b, k_h, k_t, values_b, values_h, values_t, out_b, out_h, out_t,
    CAUSAL: tl.constexpr, DK: tl.constexpr, BDK: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute the reads and log-sum-exp of a block of queries of a head."""
    b, h, head_of_all, top_row = place(heads, tq, ROWS)
    kv = h // GROUP
    start, left = top_row.to(tl.int64), tq - top_row
    row = tl.arange(0, ROWS)
    position = tk - tq + top_row + row
    k, values = (
        of_head(k, b, kv, k_b, k_h, ALIGN=ALIGN),
        of_head(values, b, kv, values_b, values_h, ALIGN=ALIGN),
    )
    valid = of_head(valid, b, 0, tk, 0)
    lowest = None
    if first is not None:
        lowest = tl.load(first + position, mask=row < left, other=0)
    highest = last_key(position, row < left, tk, last, CAUSAL)

    queries = load_tile(
        of_head(q, b, h, q_b, q_h, start, q_t, ALIGN), q_t, left, ROWS, DK, BDK, True, ALIGN
    )
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    read = tl.zeros([ROWS, BDV], tl.float32)
    bottom = tl.minimum(top_row + ROWS, tq) - 1
    begin, inner, end = key_spans(
        tk - tq + top_row, tk - tq + bottom, tk, valid, first, last, CAUSAL, KEYS
    )
    for MASKED in tl.static_range(0 if valid is None and first is None else 1, 2):
        top, total, read = _span(
            top, total, read, queries, k, values, valid, position, lowest, highest,
            inner if MASKED else begin, end if MASKED else inner,
            factor, tk, k_t, values_t, MASKED, DK, BDK, DV, BDV, KEYS, ALIGN,
        )  # fmt: skip

    # Only rows past the last query have read no key.
    total = tl.where(total > 0, total, 1.0)
    tl.store(lse + head_of_all * tq + start + row, top + tl.log2(total), mask=row < left)
    store_tile(
        of_head(out, b, h, out_b, out_h, start, out_t, ALIGN),
        out_t,
        left,
        read / total[:, None],
        ROWS,
        DV,
        BDV,
        ALIGN,
    )


MATRIX = (_forward_kernel,)  # compiled to wgmma on sm_90
