"""What AFT's kernels share: a tile of tokens by channels, its running maxima and sums, and how parts of a sequence are joined. No launches.

A sum of exponentials over the past is kept relative to its running maximum m_t, S_t = sum_{i <= t} exp(z_i - m_t), and moves by
S_t = exp(m_{t-1} - m_t) S_{t-1} + exp(z_t - m_t): a scan of products at most 1, most of them 1 exactly. m_{t-1} comes from a second load,
one token back. Tokens that nobody reads, and those outside, have weight 0 and as z the number that stands for -inf, and so has m where
there was no other before: differences then stay numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.implementations import interpreted

PROGRAMS = 528  # four for each of an H100's multiprocessors
MOST_SEGMENTS = 64  # their summaries are joined in one block
WARPS, STAGES = 4, 1
MAXIMUM = tl.constexpr(0)  # rows of a state, and of what is kept of each chunk
SUM = tl.constexpr(1)
VALUES = tl.constexpr(2)
JOINT_MAXIMUM = tl.constexpr(3)
JOINT_SUM = tl.constexpr(4)
ROWS = tl.constexpr(5)
NOTHING = tl.constexpr(-1.0e38)


class Launch:
    """Grid and block sizes for [batch, heads, tokens, width]: one program a block of channels and segment of chunks."""

    def __init__(self, batch, heads, tokens, width):
        block_t, block_c, programs = (8, 4, 4) if interpreted() else (32, 32, PROGRAMS)
        block_c = min(block_c, triton.next_power_of_2(width))
        self.columns, self.chunks = triton.cdiv(width, block_c), triton.cdiv(tokens, block_t)
        wanted = min(MOST_SEGMENTS, self.chunks, max(1, programs // (batch * heads * self.columns)))
        each = triton.cdiv(self.chunks, wanted)
        self.segments = triton.cdiv(self.chunks, each)
        self.grid = (batch * heads * self.columns, self.segments)
        self.sizes = (batch, heads, tokens, width, each, self.segments, self.chunks)
        self.constants = {"SEGMENTS": triton.next_power_of_2(self.segments), "BT": block_t, "BC": block_c}
        self.options = {"num_warps": WARPS, "num_stages": STAGES}


@triton.jit
def place(heads, width, BC: tl.constexpr):
    """(batch entry, head, head counted through, channels, which of them exist) of this program."""
    columns = tl.cdiv(width, BC)
    bh = (tl.program_id(0) // columns).to(tl.int64)
    c = (tl.program_id(0) % columns) * BC + tl.arange(0, BC)
    return bh // heads, bh % heads, bh, c, c < width


@triton.jit
def load(x, b, h, t, c, sb, sh, st, mask):
    """x[b, h, t, c] in float32 for tokens t and channels c; the last stride is 1."""
    at = x + b * sb + h * sh + t.to(tl.int64)[:, None] * st + c[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def dense(b, h, t, c, batch, heads, width):
    """Offsets of [b, h, t, c] in an output laid out as [tokens, batch, heads, width]."""
    return ((t.to(tl.int64) * batch + b) * heads + h)[:, None] * width + c[None, :]


@triton.jit
def put_rows(at, width, mask, top, total, values, joint_top, joint):
    """Store the five rows of a block of channels."""
    tl.store(at + MAXIMUM * width, top, mask=mask)
    tl.store(at + SUM * width, total, mask=mask)
    tl.store(at + VALUES * width, values, mask=mask)
    tl.store(at + JOINT_MAXIMUM * width, joint_top, mask=mask)
    tl.store(at + JOINT_SUM * width, joint, mask=mask)


@triton.jit
def readable(valid, wb, b, t, c_inside, tokens):
    """Which of the tokens and channels are there and read by others."""
    inside = (t >= 0) & (t < tokens)
    if valid is not None:
        inside = inside & (tl.load(valid + b * wb + t, mask=inside, other=0) != 0)
    return inside[:, None] & c_inside[None, :]


@triton.jit
def exponents(k, v, beta, read):
    """k + beta v as its rounding and what the rounding left, so that weights keep their digits where beta is small."""
    product = beta[None, :] * v
    high = k + product
    back = high - k
    low = (k - (high - back)) + (product - back) + tl.fma(tl.zeros_like(v) + beta[None, :], v, -product)
    return tl.where(read, high, NOTHING), tl.where(read, low, 0.0)


@triton.jit
def falling(low, high):
    """exp(low - high) for low <= high."""
    return tl.exp(low - high)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def join_one(d1, x1, d2, x2):
    """Two parts of S_t = d_t S_{t-1} + x_t as one."""
    return d1 * d2, d2 * x1 + x2


@triton.jit
def join_two(d1, x1, y1, d2, x2, y2):
    """The same of two sums with the same decays."""
    return d1 * d2, d2 * x1 + x2, d2 * y1 + y2


@triton.jit
def row(x, at, BT: tl.constexpr):
    """One row of a tile."""
    return tl.sum(tl.where((tl.arange(0, BT) == at)[:, None], x, 0.0), 0)


@triton.jit
def running(k, before, v, past_top, past_sum, past_values, BT: tl.constexpr):
    """(m, S, V): running maxima of k, and sums of exp(k - m) and exp(k - m) v, from those before; ``before``: k one token back."""
    first = (tl.arange(0, BT) == 0)[:, None]
    top_before = tl.associative_scan(tl.where(first, past_top[None, :], before), 0, _greater)
    top = tl.maximum(top_before, k)
    weight = tl.where(k <= NOTHING, 0.0, tl.exp(k - top))
    decay, total, values = tl.associative_scan((falling(top_before, top), weight, weight * v), 0, join_two)
    return top, total + decay * past_sum[None, :], values + decay * past_values[None, :]


@triton.jit
def running_joint(z, low, before, past_top, past_sum, BT: tl.constexpr):
    """(M, S) of exponents z + low; ``before``: z one token back."""
    first = (tl.arange(0, BT) == 0)[:, None]
    top_before = tl.associative_scan(tl.where(first, past_top[None, :], before), 0, _greater)
    top = tl.maximum(top_before, z)
    weight = tl.where(z <= NOTHING, 0.0, tl.exp(z - top + low))
    decay, total = tl.associative_scan((falling(top_before, top), weight), 0, join_one)
    return top, total + decay * past_sum[None, :]


@triton.jit
def tile(
    k, v, beta, valid, kb, kh, kt, vb, vh, vt, wb, b, h, t, c, inside, tokens, m0, s0, v0, j0, i0,
    BETA: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """(k, v, z, low, read, m, S, V, M, J) of a tile, from the five rows before it; z, M and J stand for k's own where BETA is False."""
    read = readable(valid, wb, b, t, inside, tokens)
    there = readable(valid, wb, b, t - 1, inside, tokens)
    kk = tl.where(read, load(k, b, h, t, c, kb, kh, kt, read), NOTHING)
    vv = load(v, b, h, t, c, vb, vh, vt, read)
    before = tl.where(there, load(k, b, h, t - 1, c, kb, kh, kt, there), NOTHING)
    top, total, values = running(kk, before, vv, m0, s0, v0, BT)
    z, low, joint_top, joint = kk, vv, top, total
    if BETA:
        z, low = exponents(kk, vv, beta, read)
        z_before, _ = exponents(before, load(v, b, h, t - 1, c, vb, vh, vt, there), beta, there)
        joint_top, joint = running_joint(z, low, z_before, j0, i0, BT)
    return kk, vv, z, low, read, top, total, values, joint_top, joint


@triton.jit
def counted(total):
    """The sum, or 1 where nothing was summed."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def free_energy(top, total, joint_top, joint, beta):
    """F from the maxima and sums of exp(k) and exp(k + beta v); 0 where nothing was read."""
    return (joint_top - top + tl.log(counted(joint) / counted(total))) / beta[None, :]
