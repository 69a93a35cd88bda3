"""Exact free-energy read of blocks of channels, in place: backward kernels, and all launches.

Attention on [v | U] is correct while the range of beta v is at most 80. Where the range is greater,
or values are not finite, these kernels overwrite the results of that (batch, kv head)'s block of
channels with exact ones, for values of any range, and add the block's part to the gradients of q
and k. A mask on the device selects the blocks, so that no step waits, and a launch with an empty
mask returns at once. The forward keeps only the log-sum-exp of the scores; the backward reads
again.

With p the prior, w = exp(log p + beta (v - F)) <= 1 in one exponent, and the gradients dmu and dF
of the two reads:

    dv[i, j] = sum_t (dF w + dmu p)
    dbeta_j = sum_t dF (E_w[v] - F) / beta
    dscore[t, i] = sum_j (p dmu (v - x) + w dF / beta) - p_t(i) term_t
    term_t = sum_j (dmu (mu - x) + dF / beta)

`_rows_kernel` reads as in the forward and stores x, F - x and the terms; each of the other kernels
sums over one of the dimensions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fem_attention.triton.attention_backward import key_spans, query_span
from kernels.fem_attention.triton.exact_read import (
    _allowed,
    _gradients_of_reads,
    _marked,
    _operand,
    _place,
    _put,
    _rows_kernel,
    _scores,
    _temperature,
    _tile,
)  # fmt: skip
from kernels.fem_attention.triton.prep import BLOCK
from kernels.implementations import interpreted
from kernels.tiles import LOG2_E, LOG2E, of_head, padded, rows_of, strides_of


@triton.jit
def _score_gradients(
    log_p, allowed, v, v_t, keys, beta, kv, marks, greatest, free_energy, row_term, d_o, lam, gate,
    d_o_t, lam_t, gate_t, rows, tq, tk,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return the marked channels' part of the gradient of the scores, [rows, keys], from log_p
    [keys, rows].

    The pointers are already offset to the head.
    """
    there = tl.minimum(rows, tq - 1)
    term = tl.zeros_like(there).to(tl.float32)
    for block in range(0, CHANNELS, BLOCK_C):
        marked = tl.load(marks + block // BLOCK_C) != 0
        term += tl.load(
            row_term + (block // BLOCK_C) * tq + there, mask=(rows < tq) & marked, other=0.0
        )
    log_p = tl.trans(log_p)
    allowed = tl.trans(allowed)
    p = tl.exp2(log_p)
    found = -p * term[:, None]
    for block in range(0, CHANNELS, BLOCK_C):
        if tl.load(marks + block // BLOCK_C) != 0:
            channels = block + tl.arange(0, BLOCK_C)
            beta_1 = _temperature(beta, kv, channels, CHANNELS)
            d_mean, d_free = _gradients_of_reads(
                d_o, lam, gate, d_o_t, lam_t, gate_t, rows, tq, channels, CHANNELS
            )
            x, free = (
                _tile(greatest, CHANNELS, there, channels, CHANNELS),
                _tile(free_energy, CHANNELS, there, channels, CHANNELS),
            )
            values = _operand(v, v_t, keys, tk, channels, CHANNELS).to(tl.float32)
            below = tl.where(
                allowed[None, :, :], tl.trans(values)[:, None, :] - tl.trans(x)[:, :, None], 0.0
            )
            w = tl.exp2(
                log_p[None, :, :]
                + (beta_1 * LOG2_E)[:, None, None] * (below - tl.trans(free)[:, :, None])
            )
            slope = tl.trans(d_free / beta_1[None, :])
            found += tl.sum(
                w * slope[:, :, None] + p[None, :, :] * below * tl.trans(d_mean)[:, :, None], 0
            )
    return found


@triton.jit
def _dq_kernel(
    q, k, v, beta, lam, gate, wild, valid, first, last, d_o, lse, greatest, free_energy, row_term,
    d_q,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, lam_b, lam_h, lam_t, gate_b, gate_h, gate_t, d_o_b,
    d_o_h, d_o_t,
    d_q_b, d_q_h, d_q_t, pairs, heads, group, tq, tk, scale,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    MARKS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(tq, ROWS)
    columns = tl.arange(0, BLOCK_W)
    upto, count = _marked(wild, pairs, MARKS, PAIRS)
    each = group * blocks
    for item in range(tl.program_id(0), count * each, tl.num_programs(0)):
        batch, head, kv, block, _ = _place(upto, item, each, heads, group, blocks, 1)
        marks = wild + (batch * (heads // group) + kv) * MARKS
        bottom = tl.minimum(block * ROWS + ROWS, tq) - 1 + tk - tq
        begin, _, end = key_spans(block * ROWS + tk - tq, bottom, tk, valid, first, last, CAUSAL, 1)
        rows = block * ROWS + tl.arange(0, ROWS)
        there = tl.minimum(rows, tq - 1)
        valid_here = of_head(valid, batch, 0, tk, 0)
        lam_here = of_head(lam, batch, head, lam_b, lam_h)
        gate_here = of_head(gate, batch, head, gate_b, gate_h)
        k_here, v_here = k + batch * k_b + kv * k_h, v + batch * v_b + kv * v_h
        queries = _operand(q + batch * q_b + head * q_h, q_t, there, tq, columns, WIDTH)
        flat = (batch * heads + head) * tq
        sums = tl.load(lse + flat + there)
        found = tl.zeros((ROWS, BLOCK_W), tl.float32)
        for key in range(begin, end, KEYS):
            keys = key + tl.arange(0, KEYS)
            allowed = _allowed(keys, there + (tk - tq), valid_here, first, last, tk, CAUSAL)
            tile = _operand(k_here, k_t, keys, tk, columns, WIDTH)
            log_p = _scores(queries, tile, allowed, scale) - sums[None, :]
            d_scores = _score_gradients(
                log_p, allowed, v_here, v_t, keys, beta, kv, marks, greatest + flat * CHANNELS,
                free_energy + flat * CHANNELS,
                row_term + flat * MARKS, d_o + batch * d_o_b + head * d_o_h, lam_here, gate_here,
                d_o_t, lam_t, gate_t, rows, tq, tk,
                CHANNELS, BLOCK_C,
            )  # fmt: skip
            found += tl.dot(d_scores.to(tile.dtype), tile, input_precision="ieee")
        mask = (rows < tq)[:, None] & (columns < WIDTH)[None, :]
        _put(
            d_q,
            batch,
            head,
            d_q_b,
            d_q_h,
            d_q_t,
            rows,
            columns,
            found * (scale / LOG2_E),
            mask,
            marks,
            MARKS,
        )


@triton.jit
def _keys_kernel(
    q, k, v, beta, lam, gate, wild, valid, first, last, d_o, lse, greatest, free_energy, row_term,
    d_k, d_v,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, lam_b, lam_h, lam_t, gate_b, gate_h, gate_t, d_o_b,
    d_o_h, d_o_t,
    d_k_b, d_k_h, d_k_t, d_v_b, d_v_h, d_v_t, pairs, heads, group, tq, tk, scale,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
    MARKS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Compute dk, or dv if d_k is None.

    Long, because both iterate over the same rows of the same heads.
    """
    ALONE: tl.constexpr = MARKS if d_k is None else 1  # marks of a pair with separate items
    blocks = tl.cdiv(tk, KEYS)
    columns = tl.arange(0, BLOCK_W)
    upto, count = _marked(wild, pairs * ALONE, MARKS // ALONE, PAIRS)
    for item in range(tl.program_id(0), count * blocks, tl.num_programs(0)):
        batch, _, kv, block, of_channels = _place(upto, item, blocks, heads, group, blocks, ALONE)
        marks = wild + (batch * (heads // group) + kv) * MARKS
        begin, end = query_span(
            block * KEYS,
            tl.minimum(block * KEYS + KEYS, tk) - 1,
            tk - tq,
            tq,
            first,
            last,
            CAUSAL,
            1,
        )
        keys, channels = (
            block * KEYS + tl.arange(0, KEYS),
            of_channels * BLOCK_C + tl.arange(0, BLOCK_C),
        )
        tile = _operand(k + batch * k_b + kv * k_h, k_t, keys, tk, columns, WIDTH)
        v_here = v + batch * v_b + kv * v_h
        valid_here = of_head(valid, batch, 0, tk, 0)
        if d_k is None:
            values = _operand(v_here, v_t, keys, tk, channels, CHANNELS).to(tl.float32)
            beta_2 = _temperature(beta, kv, channels, CHANNELS) * LOG2_E
        found = tl.zeros((KEYS, BLOCK_C if d_k is None else BLOCK_W), tl.float32)
        for head in range(kv * group, kv * group + group):
            flat = (batch * heads + head) * tq
            lam_here = of_head(lam, batch, head, lam_b, lam_h)
            gate_here = of_head(gate, batch, head, gate_b, gate_h)
            d_o_here = d_o + batch * d_o_b + head * d_o_h
            for row in range(begin, end, ROWS):
                rows = row + tl.arange(0, ROWS)
                there = tl.minimum(rows, tq - 1)
                queries = _operand(q + batch * q_b + head * q_h, q_t, there, tq, columns, WIDTH)
                allowed = _allowed(keys, there + (tk - tq), valid_here, first, last, tk, CAUSAL)
                log_p = (
                    _scores(queries, tile, allowed, scale) - tl.load(lse + flat + there)[None, :]
                )
                if d_v is None:
                    d_scores = _score_gradients(
                        log_p, allowed, v_here, v_t, keys, beta, kv, marks,
                        greatest + flat * CHANNELS, free_energy + flat * CHANNELS,
                        row_term + flat * MARKS, d_o_here, lam_here, gate_here, d_o_t, lam_t,
                        gate_t, rows, tq, tk, CHANNELS, BLOCK_C,
                    )  # fmt: skip
                    found += tl.dot(
                        tl.trans(d_scores).to(queries.dtype), queries, input_precision="ieee"
                    )
                else:
                    log_p = tl.trans(log_p)
                    d_mean, d_free = _gradients_of_reads(
                        d_o_here,
                        lam_here,
                        gate_here,
                        d_o_t,
                        lam_t,
                        gate_t,
                        rows,
                        tq,
                        channels,
                        CHANNELS,
                    )
                    x = _tile(greatest + flat * CHANNELS, CHANNELS, there, channels, CHANNELS)
                    free = _tile(free_energy + flat * CHANNELS, CHANNELS, there, channels, CHANNELS)
                    below = tl.where(
                        tl.trans(allowed)[:, :, None], values[None, :, :] - x[:, None, :], 0.0
                    )
                    w = tl.exp2(
                        log_p[:, :, None] + beta_2[None, None, :] * (below - free[:, None, :])
                    )
                    found += tl.sum(
                        w * d_free[:, None, :] + tl.exp2(log_p)[:, :, None] * d_mean[:, None, :], 0
                    )
        if d_v is None:
            mask = (keys < tk)[:, None] & (columns < WIDTH)[None, :]
            _put(
                d_k,
                batch,
                kv,
                d_k_b,
                d_k_h,
                d_k_t,
                keys,
                columns,
                found * (scale / LOG2_E),
                mask,
                marks,
                MARKS,
            )
        else:
            mask = (keys < tk)[:, None] & (channels < CHANNELS)[None, :]
            _put(d_v, batch, kv, d_v_b, d_v_h, d_v_t, keys, channels, found, mask)


KEYS = 16  # keys per step; in kernels over blocks of keys, rows per step
WARPS, STAGES = 8, 2
PROGRAMS = 264  # two per multiprocessor of an H100


def exact_forward_(o, q, k, v, beta, lam, gate, wild, *, causal, scale, keys_valid, bounds):
    """Overwrite o where wild: o = gate (mu + lam (F - mu)), exact for any finite values.

    Return the tensors that `exact_backward_` needs.
    Shapes: o [b, h, tq, dv] in q's dtype, q [b, h, tq, dk], k [b, hk, tk, dk], v [b, hk, tk, dv],
    beta [hk, dv], lam and gate [b, h, tq, dv] or None (1), wild [b, hk, blocks of BLOCK channels]
    bool; hk divides h. Queries, keys_valid and bounds as in `kernels.fem_attention.triton.attend`.
    Dtypes: float32 or bfloat16; reads are summed in float32. A row that reads a value that is not
    finite gives the definition's result; rows that cannot read it are not affected. Returned: the
    scores' log-sum-exp [b, h, tq], float32, filled where wild.
    Equations: Free Energy Mixer, the two-level gated read.
    """
    launch = _Launch(q, k, v, beta, lam, gate, wild, causal, scale, keys_valid, bounds)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    # With more stages it spills in float32.
    launch(_rows_kernel, (lse, o, *(None,) * 7), (o, *(None,) * 3), launch.rows, KEYS, stages=1)
    return (lse,)


def exact_backward_(
    saved, d_o, q, k, v, beta, lam, gate, wild, dq, dk, dv, dlam, dgate, *, causal, scale,
    keys_valid, bounds
):  # fmt: skip
    """Overwrite the gradients where wild, given o's gradient d_o [b, h, tq, dv].

    The other arguments are those of `exact_forward_`. The wild blocks' part is added to dq and dk.
    If all blocks of a head are wild, its dq and dk are overwritten, whatever they contained. dq,
    dk, dv, dlam, dgate: shaped as q, k, v, lam, gate (None with them), rows contiguous. Returns the
    wild blocks' part of beta's gradient, float32.
    Temporary memory: dv float32 numbers and dv numbers of v's dtype for each query, for F - x and
    x, the greatest value that it reads.
    """
    (lse,) = saved
    launch = _Launch(q, k, v, beta, lam, gate, wild, causal, scale, keys_valid, bounds)
    (b, h, tq, channels), d_o = d_o.shape, rows_of(d_o)
    rows, blocks = launch.rows, wild.shape[2]
    greatest = torch.empty(b, h, tq, channels, dtype=v.dtype, device=q.device)
    free_energy, row_term = (
        torch.empty(shape, dtype=torch.float32, device=q.device)
        for shape in (greatest.shape, (b, h, blocks, tq))
    )
    of_beta = torch.zeros(
        b,
        wild.shape[1],
        h // wild.shape[1] * triton.cdiv(tq, rows),
        channels,
        dtype=torch.float32,
        device=q.device,
    )
    launch(
        _rows_kernel,
        (lse, None, d_o, dlam, dgate, greatest, free_energy, row_term, of_beta),
        (None, d_o, dlam, dgate),
        rows,
        KEYS,
    )
    shared = (d_o, lse, greatest, free_energy, row_term)
    launch(_dq_kernel, (*shared, dq), (d_o, dq), KEYS, KEYS)  # with more rows it spills
    launch(_keys_kernel, (*shared, dk, None), (d_o, dk, None), KEYS, rows)
    launch(_keys_kernel, (*shared, None, dv), (d_o, None, dv), KEYS, rows)
    return of_beta.sum((0, 2))


class _Launch:
    """Arguments and constants that all of the kernels share."""

    def __init__(self, q, k, v, beta, lam, gate, wild, causal, scale, keys_valid, bounds):
        lam, gate = (None if t is None else rows_of(t) for t in (lam, gate))
        self.strided = (rows_of(q), rows_of(k), rows_of(v), lam, gate)
        masks = (
            None if t is None else t.contiguous()
            for t in (wild, keys_valid, *(bounds or (None, None)))
        )
        self.pointers = (*self.strided[:3], beta.contiguous(), lam, gate, *masks)
        heads, tq, width = q.shape[1:]
        kv_heads, tk, channels = v.shape[1:]
        # 32 rows would spill with more than 128 channels, or with unaligned addresses.
        self.rows = (
            16
            if max(width, channels) > 128 or any(n > 64 and n % 16 for n in (width, channels))
            else 32
        )
        self.sizes = (len(wild) * kv_heads, heads, heads // kv_heads, tq, tk, scale * LOG2E)
        self.constants = {
            "WIDTH": width,
            "CHANNELS": channels,
            "CAUSAL": causal,
            "BLOCK_W": padded(width),
            "BLOCK_C": BLOCK.value,
        }
        self.constants |= {"MARKS": wild.shape[2], "PAIRS": padded(wild.numel())}

    def __call__(self, kernel, more, strided, rows, keys, stages=STAGES):
        """Launch a kernel.

        more: pointers that follow the shared ones; strided: those of them that are passed with
        strides, in their order.
        """
        if any(t is not None and t.stride(-1) != 1 and t.shape[-1] > 1 for t in strided):
            raise ValueError(
                "exact read: a result's last dimension is not contiguous; it is written in "
                "place, so make it so"
            )
        strides = strides_of(*self.strided, *strided)
        kernel[(3 if interpreted() else PROGRAMS,)](
            *self.pointers,
            *more,
            *strides,
            *self.sizes,
            **self.constants,
            ROWS=rows,
            KEYS=keys,
            num_warps=WARPS,
            num_stages=stages,
        )


TRAFFIC = dict.fromkeys((_rows_kernel, _dq_kernel, _keys_kernel), ("wild",))
"""Kernel -> the arguments that a launch usually reads or writes, for models of memory traffic.

Usually no block is wild.
"""
