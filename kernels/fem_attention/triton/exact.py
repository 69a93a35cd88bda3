"""The exact free-energy read of single heads, in place, forward and backward: launching and block sizes. Which heads is decided elsewhere.

Attention on [v | U] holds while the range of beta v is at most 80. Where it is more, or where values are not finite, these kernels
overwrite that (batch, kv head)'s results with exact ones, for values of any range; the choice is a mask on the device, so nothing waits for
it, and a launch whose mask is empty does nothing. Of the forward only the log-sum-exp of the scores is kept: the backward reads again.
"""

from __future__ import annotations

import torch
import triton

from kernels.build import Build
from kernels.fem_attention.triton.attention_parts import LOG2E, padded, rows_of
from kernels.fem_attention.triton.exact_gradients import _dk_kernel, _dq_kernel, _dv_kernel, _rows_kernel
from kernels.fem_attention.triton.exact_read import _forward_kernel
from kernels.implementations import interpreted

BLOCK = 16  # channels at once
ROWS, KEYS = 32, 16  # at once; kernels whose blocks are of keys have them the other way round
WARPS, STAGES = 8, 3
PROGRAMS = 264  # two for each of an H100's multiprocessors
CHUNK = 64  # marks looked at together


def exact_forward_(o, q, k, v, beta, lam, gate, wild, *, causal, scale, keys_valid, bounds):
    """Overwrite o where wild: o = gate (mu + lam (F - mu)), exact for any finite values. Returns what `exact_backward_` needs.

    Shapes: o [b, h, tq, dv] in q's type, q [b, h, tq, dk], k [b, hk, tk, dk], v [b, hk, tk, dv], beta [hk, dv], lam and gate
    [b, h, tq, dv] or None (1), wild [b, hk] bool; hk divides h. Queries, keys_valid and bounds as in `attention.attend`. Types: float32
    or bfloat16; reads are summed in float32. A row that reads a value that is not finite gives what the definition gives; rows that
    cannot read it are not touched by it. Kept: the scores' log-sum-exp [b, h, tq], float32, filled where wild.
    Equations: Free Energy Mixer, the two-level gated read.
    """
    launch = _Launch(q, k, v, beta, lam, gate, wild, causal, scale, keys_valid, bounds)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    launch(_forward_kernel, (o, lse), (o,), ROWS, KEYS)
    return (lse,)


def exact_backward_(
    saved, d_o, q, k, v, beta, lam, gate, wild, dq, dk, dv, dbeta, dlam, dgate, *, causal, scale, keys_valid, bounds
):  # fmt: skip
    """Overwrite the gradients where wild, given o's gradient d_o [b, h, tq, dv]; the other arguments as in `exact_forward_`.

    dq, dk, dv, dlam, dgate: as q, k, v, lam, gate (None with them), rows contiguous. dbeta [b, hk, dv] float32, not summed over the batch.
    For a while it holds dv float32 and dv numbers of v's type for each query: F - x and x, the greatest value that it reads.
    """
    (lse,) = saved
    launch = _Launch(q, k, v, beta, lam, gate, wild, causal, scale, keys_valid, bounds)
    b, h, tq, channels = d_o.shape
    d_o = rows_of(d_o)
    rows, blocks = triton.cdiv(tq, ROWS), triton.cdiv(channels, BLOCK)
    greatest = torch.empty(b, h, tq, channels, dtype=v.dtype, device=q.device)
    free_energy, row_term, of_beta = (
        torch.empty(shape, dtype=torch.float32, device=q.device)
        for shape in (greatest.shape, (b, h, blocks, tq), (b, wild.shape[1], h // wild.shape[1] * rows, channels))
    )
    left = (dlam, dgate, greatest, free_energy, row_term, of_beta)
    launch(_rows_kernel, (d_o, lse, *left), (d_o, dlam, dgate), ROWS, KEYS)
    dbeta.copy_(torch.where(wild[:, :, None], of_beta.sum(2), dbeta))
    shared = (d_o, lse, greatest, free_energy)
    launch(_dq_kernel, (*shared, row_term, dq), (d_o, dq), ROWS, KEYS)
    launch(_dk_kernel, (*shared, row_term, dk), (d_o, dk), KEYS, ROWS)
    launch(_dv_kernel, (*shared, dv), (d_o, dv), KEYS, ROWS)


class _Launch:
    """What all of the kernels are given."""

    def __init__(self, q, k, v, beta, lam, gate, wild, causal, scale, keys_valid, bounds):
        lam, gate = (None if t is None else rows_of(t) for t in (lam, gate))
        self.strided = (rows_of(q), rows_of(k), rows_of(v), lam, gate)
        masks = (None if t is None else t.contiguous() for t in (wild, keys_valid, *(bounds or (None, None))))
        self.pointers = (*self.strided[:3], beta.contiguous(), lam, gate, *masks)
        heads, tq, width = q.shape[1:]
        kv_heads, tk, channels = v.shape[1:]
        self.sizes = (wild.numel(), heads, heads // kv_heads, tq, tk, scale * LOG2E)
        self.constants = constants(width, channels, causal)

    def __call__(self, kernel, more, strided, rows, keys):
        """Launch: more pointers follow those that all have; strided: which of them come with strides, in their order."""
        if any(t is not None and t.stride(-1) != 1 and t.shape[-1] > 1 for t in strided):
            raise ValueError("exact read: a result's last dimension is not contiguous; it is written in place, so make it so")
        strides = [s for t in (*self.strided, *strided) for s in ((0, 0, 0) if t is None else t.stride()[:3])]
        kernel[(3 if interpreted() else PROGRAMS,)](
            *self.pointers, *more, *strides, *self.sizes, **self.constants, ROWS=rows, KEYS=keys, num_warps=WARPS, num_stages=STAGES
        )


def constants(width, channels, causal):
    """The kernels' constants for a head's widths."""
    return {"WIDTH": width, "CHANNELS": channels, "CAUSAL": causal, "BLOCK_W": padded(width), "BLOCK_C": BLOCK, "CHUNK": CHUNK}


def _build(label, kernel, width, channels, *, rows, keys, absent=(), causal=True):
    float32 = ("beta", "lse", "free_energy", "row_term", "d_beta")
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(float32, "*fp32") | {"wild": "*i1", "valid": "*i1", "scale": "fp32"}
    types |= dict.fromkeys("q k v o d_o lam gate greatest d_lam d_gate d_q d_k d_v".split(), "*bf16")
    types |= {"first": "*i32", "last": "*i32"}
    given = constants(width, channels, causal) | {"group": 1, "ROWS": rows, "KEYS": keys} | dict.fromkeys(absent)
    aligned = tuple(name for name in kernel.arg_names if name.endswith(("_b", "_h", "_t")) or name in ("tq", "tk"))
    return Build(f"{label}, d_k {width}, d_v {channels}", kernel, types, given, WARPS, STAGES, aligned=aligned)


_PLAIN = ("valid", "first", "last")
_KERNELS = (
    ("forward", _forward_kernel, ROWS, KEYS),
    ("backward of rows", _rows_kernel, ROWS, KEYS),
    ("dq", _dq_kernel, ROWS, KEYS),
    ("dk", _dk_kernel, KEYS, ROWS),
    ("dv", _dv_kernel, KEYS, ROWS),
)
BUILDS = tuple(
    build
    for label, kernel, rows, keys in _KERNELS
    for build in (
        _build(label, kernel, 64, 32, rows=rows, keys=keys, absent=_PLAIN),
        _build(label, kernel, 128, 64, rows=rows, keys=keys, absent=_PLAIN),
        _build(f"{label}, documents and padding", kernel, 128, 64, rows=rows, keys=keys),
    )
)
