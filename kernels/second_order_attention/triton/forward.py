"""Two flash passes of MHA2nd1st in Triton: k-bar with the log-sum-exp, and the covariance's product
C u.

No gradients are computed, and no kernel is autotuned. With p = softmax((q.k - |k|^2 / 2) / T),
c_i = k_i - kbar and w_i = u.c_i: kbar = sum p k and C u = sum p_i w_i c_i. Products take their
operands in the inputs' dtype. Weights are rounded to it before they are summed and multiplied, so
that a rounding error has the size of c, not of k: keys may be far from zero. |k|^2 / 2 is
subtracted in float32, from the same rounded k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.tiles import (
    Blocks,
    fitting,
    good_at,
    load_tile,
    of_head,
    padded,
    place,
    probabilities,
    seen,
    store_tile,
)

# Block sizes in the interpreter, and without tensor cores, where larger ones spill.
SMALL, FLOAT32 = Blocks(32, 32, 4, 1), Blocks(16, 32, 8, 1)


def means(q, k, half, factors, valid, causal):
    """Return (kbar [b, h, t, d], the scores' log-sum-exp and mean under p [2, b, h, t], in base 2),
    both float32 and contiguous.

    q [b, h, t, d] and k [b, h, tk, d], float32 or bfloat16, last dimension contiguous; half
    [b, h, tk]: |k|^2 / 2, factors [h]: log2(e) / T, float32 and contiguous; valid [b, tk] bool or
    None.
    """
    b, h, t, d = q.shape
    mean = torch.empty(b, h, t, d, dtype=torch.float32, device=q.device)
    levels = torch.empty(2, b, h, t, dtype=torch.float32, device=q.device)
    given = (q, k, None, half, factors, valid, mean, *levels, None, None)
    launch(_read_kernel, read_blocks(q.dtype, is_second=False), t, q, k, valid, causal, *given)
    return mean, levels


def second(q, k, u, half, factors, mean, lse, valid, causal):
    """Return (C u [b, h, t, d], u.kbar [b, h, t]), both float32 and contiguous.

    u: as q but contiguous; the other arguments as those and the results of `means`.
    """
    read, centre = torch.empty_like(mean), torch.empty_like(lse)
    given = (q, k, u, half, factors, valid, mean, lse, None, read, centre)
    launch(
        _read_kernel, read_blocks(q.dtype, is_second=True), q.shape[2], q, k, valid, causal, *given
    )
    return read, centre


def launch(kernel, blocks, own, q, k, valid, causal, *arguments):
    """Launch a kernel on each block of every head's ``own`` queries or keys.

    After ``arguments`` come the ones that all kernels of this package end with.
    """
    b, h, t, d = q.shape
    kernel[(triton.cdiv(own, blocks.rows) * b * h,)](
        *arguments, h, t, k.shape[2], *q.stride()[:3], *k.stride()[:3],
        0 if valid is None else valid.stride(0),
        CAUSAL=causal, WIDTH=d, PADDED=padded(d), OWN=blocks.rows, OTHER=blocks.keys,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


@triton.jit
def _read_kernel(
    q, k, u, half, factors, valid, mean, lse, average, read, centre, heads, t, tk, q_b, q_h, q_t,
    k_b, k_h, k_t, valid_b,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, OWN: tl.constexpr,
    OTHER: tl.constexpr,
):  # fmt: skip
    """Compute the pass for kbar if u is None, else the pass for C u.

    Long, because both iterate over the same pairs.
    """
    b, h, head_of_all, start = place(heads, t, OWN)
    k += b * k_b + h * k_h
    half += head_of_all * tk
    at = (head_of_all * t + start) * WIDTH
    valid = of_head(valid, b, 0, valid_b, 0)
    row = start + tl.arange(0, OWN)
    position = tk - t + row[:, None]
    good = good_at(valid, position, tk)
    factor = tl.load(factors + h)
    queries = load_tile(
        q + b * q_b + h * q_h + start.to(tl.int64) * q_t, q_t, t - start, OWN, WIDTH, PADDED
    )
    if u is None:
        top = tl.full([OWN], float("-inf"), tl.float32)
        total = tl.zeros([OWN], tl.float32)
        score = tl.zeros([OWN], tl.float32)
    else:
        level = tl.load(lse + head_of_all * t + row, mask=row < t, other=0.0)
        along = load_tile(u + at, WIDTH, t - start, OWN, WIDTH, PADDED)
        middle = load_tile(mean + at, WIDTH, t - start, OWN, WIDTH, PADDED)
        offset = tl.sum(along.to(tl.float32) * middle, 1)
        tl.store(centre + head_of_all * t + row, offset, mask=row < t)
    weighed = tl.zeros([OWN], tl.float32)
    found = tl.zeros([OWN, PADDED], tl.float32)
    end = tk
    if CAUSAL:
        end = tl.minimum(tk, tk - t + start + OWN)
    for n in range(0, end, OTHER):
        keys = load_tile(k + tl.cast(n, tl.int64) * k_t, k_t, tk - n, OTHER, WIDTH, PADDED)
        key = n + tl.arange(0, OTHER)
        norm = tl.load(half + key, mask=key < tk, other=0.0)[None, :]
        scores = (tl.dot(queries, tl.trans(keys), input_precision="ieee") - norm) * factor
        if u is None:
            allowed = seen(
                position, key[None, :], tk, good, good_at(valid, key[None, :], tk), CAUSAL
            )
            scores = tl.where(allowed, scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            # For a row that has seen no key yet, -inf - -inf would be NaN.
            level = tl.where(new == float("-inf"), 0.0, new)
            under = scores - level[:, None]
            weights = tl.exp2(under)
            kept = tl.exp2(top - level)
            # The sum of weights times scores, relative to the new maximum; zero for rows that have
            # seen no key.
            score = (score + tl.where(total > 0, total * (top - level), 0.0)) * kept + tl.sum(
                tl.where(allowed, weights * under, 0.0), 1
            )
            total = total * kept + tl.sum(weights, 1)
            rounded = weights.to(keys.dtype)
            weighed *= kept
            found *= kept[:, None]
            top = new
        else:
            weights = probabilities(scores, level[:, None])
            weights *= tl.dot(along, tl.trans(keys), input_precision="ieee") - offset[:, None]
            allowed = seen(
                position, key[None, :], tk, good, good_at(valid, key[None, :], tk), CAUSAL
            )
            rounded = tl.where(allowed, weights, 0.0).to(keys.dtype)
        weighed += tl.sum(rounded.to(tl.float32), 1)
        found = tl.dot(rounded, keys, found, input_precision="ieee")
    if u is None:
        tl.store(lse + head_of_all * t + row, top + tl.log2(total), mask=row < t)
        tl.store(average + head_of_all * t + row, top + score / total, mask=row < t)
        store_tile(mean + at, WIDTH, t - start, found / weighed[:, None], OWN, WIDTH, PADDED)
    else:
        # The mean is loaded again: during the loop it would take too many registers.
        middle = load_tile(mean + at, WIDTH, t - start, OWN, WIDTH, PADDED)
        store_tile(
            read + at, WIDTH, t - start, found - weighed[:, None] * middle, OWN, WIDTH, PADDED
        )


def read_blocks(dtype, is_second):
    """Return the block sizes of a pass, for kbar or for C u."""
    return fitting(dtype, SMALL, FLOAT32, Blocks(128, 64, 8, 2 if is_second else 3))


MATRIX = (_read_kernel,)  # compiled to wgmma on sm_90
