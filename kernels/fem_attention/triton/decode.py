"""Free-energy read of a few queries over many keys (decoding) in Triton.

The read is exact for values of any range and has no gradients. Decoding is limited by memory
bandwidth, so each key and each value is read once. A program computes one part of the sequence for
one (batch, kv head). Its rows are the queries of all query heads that share this kv head. For each
row and channel it keeps a running maximum of log p + beta v and the sum of its exponentials. Unlike
in training, no centre of the values and no limit of their range is needed. Scores are relative to
their own running maximum. If every |beta v| is at most 1/2, F is computed from the sum of p
(exp(beta v) - 1) instead, because a logarithm near 0 would lose digits.

A second kernel joins the parts by their log-sum-exps and applies lam and gate. Logarithms are in
base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fem_attention.triton.epilogue import log_beyond
from kernels.fem_attention.triton.exact_read import INFINITY, _allowed, _finite_or_zero
from kernels.fem_attention.triton.prep import excess as excess_of
from kernels.implementations import interpreted
from kernels.tiles import LOG2_E, LOG2E, of_head, padded, rows_of, strides_of

PROGRAMS = 264  # two per multiprocessor of an H100
SLOTS = tl.constexpr(16)  # rows of the smallest matrix product
STAGES = 3
# Parts that the join kernel reads at a time, and its warps.
JOINED, JOIN_WARPS = 16, 4


def decode(q, k, v, beta, lam, gate, *, causal, scale, keys_valid=None, splits=None):
    """Return the read o = gate (mu + lam (F - mu)) of the last tq of tk positions.

    mu is the mean of v under the attention weights p, and F = (1 / beta) log sum_i p_i exp(beta
    v_i).

    Shapes: q [b, h, tq, dk], k [b, hk, tk, dk], v [b, hk, tk, dv], beta [hk, dv] or None
    (o = gate mu), lam and gate [b, h, tq, dv] or None (lam: 1, gate: 1), keys_valid [b, tk] bool:
    a key that is False is read only by the query at the same position. hk divides h, and query
    head i reads kv head i // (h // hk).
    Returns [b, h, tq, dv] in q's dtype.
    Dtypes: float32 or bfloat16; reads are summed in float32.
    splits: the largest number of parts of the sequence; None: enough to fill a device. Intended
    for tq up to about 16: beyond 16 rows (queries times heads of a group; fewer for wide values),
    keys and values are read more than once.
    Equations: Free Energy Mixer, the two-level gated read.
    """
    (b, h, tq, width), (hk, tk, channels) = q.shape, v.shape[1:]
    sizes = _Sizes(width, channels, h // hk * tq)
    blocks = triton.cdiv(h // hk * tq, sizes.rows)
    each = _keys_each(tk, b * hk * blocks, sizes.keys, splits)
    splits = triton.cdiv(tk, each)
    q, k, v, lam, gate = (None if t is None else rows_of(t) for t in (q, k, v, lam, gate))
    beta, keys_valid = (None if t is None else t.contiguous() for t in (beta, keys_valid))
    scores = torch.empty(2, b * h * tq, splits, dtype=torch.float32, device=q.device)
    reads = torch.empty(
        1 if beta is None else 4, b * h * tq, splits, channels, dtype=torch.float32, device=q.device
    )
    shared = {"WIDTH": width, "CHANNELS": channels, "CAUSAL": causal, "HAS_BETA": beta is not None}
    _part_kernel[(b * hk, splits, blocks)](
        q, k, v, beta, keys_valid, scores, reads, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        h, hk, tq, tk, each, scale * LOG2E,
        **shared, **sizes.constants, num_warps=sizes.warps, num_stages=STAGES,
    )  # fmt: skip
    o = torch.empty(b, h, tq, channels, dtype=q.dtype, device=q.device)
    strides = strides_of(lam, gate)
    _join_kernel[(b * h * tq, triton.cdiv(channels, sizes.joined_channels))](
        scores, reads, beta, lam, gate, o, *strides, h, hk, tq, splits,
        CHANNELS=channels, HAS_BETA=beta is not None, PARTS=JOINED, BLOCK_C=sizes.joined_channels,
        num_warps=JOIN_WARPS,
    )  # fmt: skip
    return o


class _Sizes:
    """Block sizes for given head widths and number of rows per kv head.

    They are chosen so that a tile [keys, rows, channels] has 16 to 32 numbers per thread.
    """

    def __init__(self, width, channels, rows):
        wide = padded(channels)
        self.rows = min(triton.next_power_of_2(rows), max(1, min(16, 512 // wide)))
        self.keys = 16 if interpreted() else min(64, max(16, 2048 // (self.rows * wide)))
        self.warps = 4 if self.rows * self.keys * wide <= 2048 else 8
        self.joined_channels = min(wide, 64)
        self.constants = {
            "ROWS": self.rows,
            "KEYS": self.keys,
            "BLOCK_W": padded(width),
            "BLOCK_C": wide,
        }


def _keys_each(tk, heads, keys, splits):
    """Return the number of keys in each part of the sequence, a multiple of the block size.

    By default the parts of all heads together fill a device, and each part has at least four blocks
    where possible.
    """
    blocks = triton.cdiv(tk, keys)
    wanted = min(triton.cdiv(PROGRAMS, heads), triton.cdiv(blocks, 4)) if splits is None else splits
    return triton.cdiv(blocks, max(1, wanted)) * keys


@triton.jit
def _part_kernel(
    q, k, v, beta, valid, scores, reads, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, heads,
    kv_heads, tq, tk, each, scale,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CAUSAL: tl.constexpr, HAS_BETA: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the sums of one part of the sequence in a single pass over its keys.

    They are the scores' maximum and sum, sum p v, and the maximum and sum of exp(log p + beta v),
    with log p relative to the scores' maximum. Long, because one pass over the keys computes them
    all.
    """
    batch, kv = (
        (tl.program_id(0) // kv_heads).to(tl.int64),
        (tl.program_id(0) % kv_heads).to(tl.int64),
    )
    group = heads // kv_heads
    columns, channels = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_C)
    # A matrix product has at least 16 rows. Those beyond ROWS are zero and are dropped afterwards.
    slot = tl.arange(0, SLOTS)
    row = tl.program_id(2) * ROWS + slot
    there = (row < group * tq) & (slot < ROWS)
    at = (
        q
        + batch * q_b
        + (kv * group + row // tq)[:, None] * q_h
        + (row % tq).to(tl.int64)[:, None] * q_t
        + columns[None, :]
    )
    queries = tl.load(at, mask=there[:, None] & (columns < WIDTH)[None, :], other=0.0)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    position = tk - tq + rows % tq
    k += batch * k_b + kv * k_h
    v += batch * v_b + kv * v_h
    beta_2 = tl.full((BLOCK_C,), 1.0, tl.float32)
    if HAS_BETA:
        beta_2 = (
            tl.load(beta + kv * CHANNELS + channels, mask=channels < CHANNELS, other=1.0).to(
                tl.float32
            )
            * LOG2_E
        )

    top = tl.full((ROWS,), -INFINITY, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, BLOCK_C), tl.float32)
    peak = tl.full((ROWS, BLOCK_C), -INFINITY, tl.float32)
    mass = tl.zeros((ROWS, BLOCK_C), tl.float32)
    excess = tl.zeros((ROWS, BLOCK_C), tl.float32)
    begin = tl.program_id(1) * each
    for start in range(begin, tl.minimum(begin + each, tk), KEYS):
        keys = start + tl.arange(0, KEYS)
        inside = (keys < tk)[:, None]
        wide = keys.to(tl.int64)[:, None]
        values = tl.load(
            v + wide * v_t + channels[None, :],
            mask=inside & (channels < CHANNELS)[None, :],
            other=0.0,
        ).to(tl.float32)
        tile = tl.load(
            k + wide * k_t + columns[None, :], mask=inside & (columns < WIDTH)[None, :], other=0.0
        )
        product = tl.dot(tile, tl.trans(queries), input_precision="ieee")
        if ROWS < SLOTS:
            product = tl.gather(
                product, tl.zeros((KEYS, 1), tl.int32) + tl.arange(0, ROWS)[None, :], 1
            )
        allowed = _allowed(keys, position, of_head(valid, batch, 0, tk, 0), None, None, tk, CAUSAL)
        score = tl.where(allowed, product * scale, -INFINITY)
        higher = tl.maximum(top, tl.max(score, 0))
        base = tl.where(higher == -INFINITY, 0.0, higher)
        log_p = score - base[None, :]
        p = tl.exp2(log_p)
        fading = tl.exp2(top - base)
        total = total * fading + tl.sum(p, 0)
        mean = mean * fading[:, None] + tl.sum(
            tl.where(allowed[:, :, None], p[:, :, None] * values[:, None, :], 0.0), 0
        )
        if HAS_BETA:
            joint = tl.where(
                allowed[:, :, None],
                log_p[:, :, None] + (values * beta_2[None, :])[:, None, :],
                -INFINITY,
            )
            before = peak + (top - base)[:, None]
            peak = tl.maximum(before, tl.max(joint, 0))
            level = _finite_or_zero(peak)
            mass = mass * tl.exp2(before - level) + tl.sum(tl.exp2(joint - level[None, :, :]), 0)
            small = values * (beta_2 / LOG2_E)[None, :]
            # A term beyond 1/2 makes the sum infinite, and _join_kernel then does not use it.
            small = tl.where(tl.abs(small) <= 0.5, excess_of(small) + small, INFINITY)
            excess = excess * fading[:, None] + tl.sum(
                tl.where(allowed[:, :, None], p[:, :, None] * small[:, None, :], 0.0), 0
            )
        top = higher

    all_rows = (tl.num_programs(0) * group * tq).to(tl.int64)
    part = (tl.program_id(0).to(tl.int64) * group * tq + rows) * tl.num_programs(1) + tl.program_id(
        1
    )
    tl.store(scores + part, top, mask=rows < group * tq)
    tl.store(scores + all_rows * tl.num_programs(1) + part, total, mask=rows < group * tq)
    mask = (rows < group * tq)[:, None] & (channels < CHANNELS)[None, :]
    at = reads + part[:, None] * CHANNELS + channels[None, :]
    apart = all_rows * tl.num_programs(1) * CHANNELS
    tl.store(at, mean, mask=mask)
    if HAS_BETA:
        tl.store(at + apart, peak, mask=mask)
        tl.store(at + 2 * apart, mass, mask=mask)
        tl.store(at + 3 * apart, excess, mask=mask)


@triton.jit
def _join_kernel(
    scores, reads, beta, lam, gate, o, lam_b, lam_h, lam_t, gate_b, gate_h, gate_t, heads, kv_heads,
    tq, parts,
    CHANNELS: tl.constexpr, HAS_BETA: tl.constexpr, PARTS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row for a block of channels, then apply lam and gate.

    Rows are in the order batch, head, query.
    """
    flat = tl.program_id(0).to(tl.int64)
    batch, head, query = flat // tq // heads, flat // tq % heads, flat % tq
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = channels < CHANNELS
    all_parts = tl.num_programs(0).to(tl.int64) * parts
    top = tl.full((1,), -INFINITY, tl.float32)
    total = tl.zeros((1,), tl.float32)
    mean = tl.zeros((BLOCK_C,), tl.float32)
    peak = tl.full((BLOCK_C,), -INFINITY, tl.float32)
    mass = tl.zeros((BLOCK_C,), tl.float32)
    excess = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        at = flat * parts + part
        score = tl.load(scores + at, mask=part < parts, other=-INFINITY)
        weight = tl.load(scores + all_parts + at, mask=part < parts, other=0.0)
        mask = (part < parts)[:, None] & there[None, :]
        from_here = reads + at[:, None] * CHANNELS + channels[None, :]
        higher = tl.maximum(top, tl.max(score, 0))
        base = tl.where(higher == -INFINITY, 0.0, higher)
        down = score - base
        p = tl.exp2(down)
        fading = tl.exp2(top - base)
        total = total * fading + tl.sum(p * weight, 0)
        mean = mean * fading + tl.sum(p[:, None] * tl.load(from_here, mask=mask, other=0.0), 0)
        if HAS_BETA:
            peaks = (
                tl.load(from_here + all_parts * CHANNELS, mask=mask, other=-INFINITY)
                + down[:, None]
            )
            masses = tl.load(from_here + 2 * all_parts * CHANNELS, mask=mask, other=0.0)
            before = peak + (top - base)
            peak = tl.maximum(before, tl.max(peaks, 0))
            level = _finite_or_zero(peak)
            mass = mass * tl.exp2(before - level) + tl.sum(
                masses * tl.exp2(peaks - level[None, :]), 0
            )
            small = tl.load(from_here + 3 * all_parts * CHANNELS, mask=mask, other=0.0)
            excess = excess * fading + tl.sum(p[:, None] * small, 0)
        top = higher
    out = mean / total
    if HAS_BETA:
        beta_2 = (
            tl.load(
                beta + head // (heads // kv_heads) * CHANNELS + channels, mask=there, other=1.0
            ).to(tl.float32)
            * LOG2_E
        )
        excess /= total
        near = tl.abs(excess) < INFINITY
        far = (_finite_or_zero(peak) + tl.log2(mass / total)) / beta_2
        excess = tl.where(near, excess, 0.0)
        free = tl.where(
            near, (excess + log_beyond(excess, tl.log(1.0 + excess))) * LOG2_E / beta_2, far
        )
        free = tl.where(free < out, out, free)
        if lam is None:
            out = free
        else:
            share = tl.load(
                lam + batch * lam_b + head * lam_h + query * lam_t + channels, mask=there, other=0.0
            ).to(tl.float32)
            out += share * (free - out)
    if gate is not None:
        out *= tl.load(
            gate + batch * gate_b + head * gate_h + query * gate_t + channels, mask=there, other=0.0
        ).to(tl.float32)
    tl.store(o + flat * CHANNELS + channels, out.to(o.dtype.element_ty), mask=there)
