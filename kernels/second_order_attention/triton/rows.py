"""Rowwise parts of MHA2nd1st's step in Triton: between its two reads and after them, forward and
backward.

With R the rotation of a query's position and do the gradient of the result o:

    between:   r = q - R^-1 kbar    u = R G r           dkbar = -R (do + G R^-1 du)
    after:     y = R^-1 C u / T'    o = r + G^-1 y      d(C u) = R G^-1 do / T'

G^-1 is given as a matrix; the gradients of G and G^-1 are sums of r (R^-1 du)^T and do y^T over the
rows. Rows are processed as two halves of their channels, so that a rotation needs no exchange
between threads. Products with a matrix are float32, three products of TF32 on tensor cores, of some
channels at a time. r is computed wherever it is needed, which moves fewer bytes than a stored r.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.implementations import interpreted
from kernels.tiles import empty_as, of_head, padded, place, strides_of

# Channels of each half at a time; with 32, some kernels spill registers.
SOME, WARPS = 16, 8


def between(q, mean, gram, turn):
    """Return u = R G r [b, h, t, d] in q's dtype, contiguous.

    q [b, h, t, d]: own frame, last dimension contiguous. Float32 and contiguous: mean as q: kbar,
    gram [h, d, d], turn [b, 1, t, d] (cos | sin) or None.
    """
    u = q.new_empty(q.shape)
    _launch(_forward_kernel, q, (q, mean, None, gram, None, turn, u), (q, turn, u))
    return u


def after(q, mean, read, inverse, newton, turn):
    """Return o as q, from C u ``read``, as mean; inverse [h, d, d]: G^-1, newton [h]: T', float32
    and contiguous.

    The same function returns dq = do + R^-1 dq' + G R^-1 du, for q = do, mean = -dq', the rotated
    query's gradient, of any dtype, read = du, inverse = G and newton None.
    """
    out = empty_as(q)
    _launch(_forward_kernel, q, (q, mean, read, inverse, newton, turn, out), (q, turn, out))
    return out


def gradients(d_out, x, mean, matrix, newton, turn):
    """Return the gradient of a read, as u, and its row terms with kbar and x [2, b, h, t], float32:
    of C u, for x = C u, G^-1 and T'; of kbar, for x = du, G and newton None.

    d_out as q.
    """
    g = d_out.new_empty(d_out.shape)
    terms = torch.empty(2, *g.shape[:3], dtype=torch.float32, device=g.device)
    given = d_out, x, mean, matrix, newton, turn, g, *terms
    _launch(_backward_kernel, d_out, given, (d_out, turn))
    return g, terms


def matrix_gradient(own, mean, x, turn):
    """Return the sum [h, d, d], float32, of (own - R^-1 mean) (R^-1 x)^T over the rows; mean None:
    0. own as q.
    """
    b, h, t, d = own.shape
    rows = 32 if interpreted() else 512
    sums = torch.empty(b, h, triton.cdiv(t, rows), d, d, dtype=torch.float32, device=own.device)
    _launch(_matrix_kernel, own, (own, mean, x, turn, sums), (own, turn), SUMMED=rows)
    return sums.sum((0, 2))


def _launch(kernel, like, given, strided, **more):
    b, h, t, d = like.shape
    half = (d + 1) // 2
    # For products of 64 rows and more, Triton 3.7 makes a kernel for sm_100 that only traps.
    rows = 16 if interpreted() else 32
    grid = triton.cdiv(t, more.get("SUMMED", rows)) * b * h, triton.cdiv(half, SOME) if more else 1
    kernel[grid](
        *given, *strides_of(*strided), h, t, WIDTH=d, HALF=half, PADDED=padded(half), SOME=SOME,
        ROWS=rows, num_warps=WARPS, num_stages=1, **more,
    )  # fmt: skip


@triton.jit
def _halves(
    x, stride, left, begin, WIDTH: tl.constexpr, HALF: tl.constexpr, SOME: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Load SOME channels from ``begin`` on of each half of some rows, [ROWS, SOME], as float32."""
    row = tl.arange(0, ROWS)[:, None]
    column = begin + tl.arange(0, SOME)[None, :]
    at = x + row * stride + column
    there = row < left
    return (
        tl.load(at, mask=there & (column < HALF), other=0.0).to(tl.float32),
        tl.load(at + HALF, mask=there & (column < WIDTH - HALF), other=0.0).to(tl.float32),
    )


@triton.jit
def _turned(
    first, second, turn, stride, left, begin, back: tl.constexpr, HALF: tl.constexpr,
    SOME: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the channels of `_halves` rotated, or back; unchanged if turn is None."""
    if turn is not None:
        c, s = _halves(turn, stride, left, begin, 2 * HALF, HALF, SOME, ROWS)
        if back:
            s = -s
        first, second = first * c - second * s, second * c + first * s
    return first, second


@triton.jit
def _in_own_frame(
    own, own_t, x, turn, turn_t, left, begin, WIDTH: tl.constexpr, HALF: tl.constexpr,
    SOME: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return channels of own - R^-1 x, as `_halves`; own None: of R^-1 x; x None: of own."""
    if x is not None:
        first, second = _halves(x, WIDTH, left, begin, WIDTH, HALF, SOME, ROWS)
        first, second = _turned(first, second, turn, turn_t, left, begin, True, HALF, SOME, ROWS)
        if own is not None:
            one, two = _halves(own, own_t, left, begin, WIDTH, HALF, SOME, ROWS)
            first, second = one - first, two - second
    else:
        first, second = _halves(own, own_t, left, begin, WIDTH, HALF, SOME, ROWS)
    return first, second


@triton.jit
def _product(
    own, own_t, x, turn, turn_t, matrix, left, WIDTH: tl.constexpr, HALF: tl.constexpr,
    PADDED: tl.constexpr, SOME: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return both halves, [ROWS, PADDED], of the rows of `_in_own_frame` times a matrix."""
    made = tl.zeros([ROWS, PADDED], tl.float32)
    more = tl.zeros([ROWS, PADDED], tl.float32)
    for begin in range(0, HALF, SOME):
        first, second = _in_own_frame(
            own, own_t, x, turn, turn_t, left, begin, WIDTH, HALF, SOME, ROWS
        )
        top = matrix + begin * WIDTH
        one, two = _halves(top, WIDTH, HALF - begin, 0, WIDTH, HALF, PADDED, SOME)
        made = tl.dot(first, one, made, input_precision="tf32x3")
        more = tl.dot(first, two, more, input_precision="tf32x3")
        top += HALF * WIDTH
        one, two = _halves(top, WIDTH, WIDTH - HALF - begin, 0, WIDTH, HALF, PADDED, SOME)
        made = tl.dot(second, one, made, input_precision="tf32x3")
        more = tl.dot(second, two, more, input_precision="tf32x3")
    return made, more


@triton.jit
def _store(
    x, stride, left, first, second, WIDTH: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    at = x + row * stride + column
    there = row < left
    tl.store(at, first.to(x.dtype.element_ty), mask=there & (column < HALF))
    tl.store(at + HALF, second.to(x.dtype.element_ty), mask=there & (column < WIDTH - HALF))


@triton.jit
def _forward_kernel(
    q, mean, read, matrix, newton, turn, out,
    q_b, q_h, q_t, turn_b, turn_h, turn_t, out_b, out_h, out_t, heads, t,
    WIDTH: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, SOME: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute u of some rows if read is None, else o."""
    b, h, head_of_all, start = place(heads, t, ROWS)
    start = start.to(tl.int64)
    left, at = t - start, (head_of_all * t + start) * WIDTH
    turn = of_head(turn, b, 0, turn_b, 0, start, turn_t)
    matrix += h * WIDTH * WIDTH
    mean += at
    q = of_head(q, b, h, q_b, q_h, start, q_t)
    if read is None:
        first, second = _product(
            q, q_t, mean, turn, turn_t, matrix, left, WIDTH, HALF, PADDED, SOME, ROWS
        )
        first, second = _turned(first, second, turn, turn_t, left, 0, False, HALF, PADDED, ROWS)
    else:
        made, more = _product(
            None, 0, read + at, turn, turn_t, matrix, left, WIDTH, HALF, PADDED, SOME, ROWS
        )
        if newton is not None:
            scale = 1.0 / tl.load(newton + h)
            made, more = made * scale, more * scale
        first, second = _in_own_frame(
            q, q_t, mean, turn, turn_t, left, 0, WIDTH, HALF, PADDED, ROWS
        )
        first, second = first + made, second + more
    out = of_head(out, b, h, out_b, out_h, start, out_t)
    _store(out, out_t, left, first, second, WIDTH, HALF, PADDED, ROWS)


@triton.jit
def _backward_kernel(
    d_out, x, mean, matrix, newton, turn, g, mean_terms, x_terms,
    o_b, o_h, o_t, turn_b, turn_h, turn_t, heads, t,
    WIDTH: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, SOME: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of some rows of kbar if newton is None, else of C u."""
    b, h, head_of_all, start = place(heads, t, ROWS)
    start = start.to(tl.int64)
    left, at = t - start, (head_of_all * t + start) * WIDTH
    turn = of_head(turn, b, 0, turn_b, 0, start, turn_t)
    matrix += h * WIDTH * WIDTH
    d_out = of_head(d_out, b, h, o_b, o_h, start, o_t)
    if newton is None:
        first, second = _product(
            None, 0, x + at, turn, turn_t, matrix, left, WIDTH, HALF, PADDED, SOME, ROWS
        )
        one, two = _halves(d_out, o_t, left, 0, WIDTH, HALF, PADDED, ROWS)
        first, second = -one - first, -two - second
    else:
        first, second = _product(
            d_out, o_t, None, turn, turn_t, matrix, left, WIDTH, HALF, PADDED, SOME, ROWS
        )
        scale = 1.0 / tl.load(newton + h)
        first, second = first * scale, second * scale
    first, second = _turned(first, second, turn, turn_t, left, 0, False, HALF, PADDED, ROWS)
    first, second = first.to(g.dtype.element_ty), second.to(g.dtype.element_ty)
    _store(g + at, WIDTH, left, first, second, WIDTH, HALF, PADDED, ROWS)
    # The terms are of the rounded gradient, which the passes over the pairs read.
    first, second = first.to(tl.float32), second.to(tl.float32)
    row = tl.arange(0, ROWS)
    number = head_of_all * t + start + row
    one, two = _halves(mean + at, WIDTH, left, 0, WIDTH, HALF, PADDED, ROWS)
    tl.store(mean_terms + number, tl.sum(first * one + second * two, 1), mask=row < left)
    one, two = _halves(x + at, WIDTH, left, 0, WIDTH, HALF, PADDED, ROWS)
    tl.store(x_terms + number, tl.sum(first * one + second * two, 1), mask=row < left)


@triton.jit
def _matrix_kernel(
    own, mean, x, turn, sums, own_b, own_h, own_t, turn_b, turn_h, turn_t, heads, t,
    WIDTH: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, SOME: tl.constexpr,
    ROWS: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Compute SOME rows of each half of a matrix's gradient, their part from SUMMED rows of x."""
    b, h, head_of_all, begin = place(heads, t, SUMMED)
    channel = tl.program_id(1) * SOME
    made = tl.zeros([SOME, PADDED], tl.float32)
    more, low, last = made, made, made
    for first_row in range(begin, tl.minimum(begin + SUMMED, t), ROWS):
        start = tl.cast(first_row, tl.int64)
        left, at = t - start, (head_of_all * t + start) * WIDTH
        angles = of_head(turn, b, 0, turn_b, 0, start, turn_t)
        middle = None
        if mean is not None:
            middle = mean + at
        first, second = _in_own_frame(
            of_head(own, b, h, own_b, own_h, start, own_t), own_t, middle, angles, turn_t, left,
            channel, WIDTH, HALF, SOME, ROWS,
        )  # fmt: skip
        one, two = _in_own_frame(
            None, 0, x + at, angles, turn_t, left, 0, WIDTH, HALF, PADDED, ROWS
        )
        first, second = tl.trans(first), tl.trans(second)
        made = tl.dot(first, one, made, input_precision="tf32x3")
        more = tl.dot(first, two, more, input_precision="tf32x3")
        low = tl.dot(second, one, low, input_precision="tf32x3")
        last = tl.dot(second, two, last, input_precision="tf32x3")
    sums += (head_of_all * tl.cdiv(t, SUMMED) + begin // SUMMED) * WIDTH * WIDTH + channel * WIDTH
    _store(sums, WIDTH, HALF - channel, made, more, WIDTH, HALF, PADDED, SOME)
    sums += HALF * WIDTH
    _store(sums, WIDTH, WIDTH - HALF - channel, low, last, WIDTH, HALF, PADDED, SOME)
