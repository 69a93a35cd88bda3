"""Conditioner's features in Triton: a few tokens in each block, all their channels in registers,
forward and backward. No autotuning.

The backward recomputes r and the norms from logits and state, which are stored for other reasons.
With z = (s - mean) / deviation, r' = c r, c = sqrt(n) / max(|r|, eps) and g the output's gradient:

    dr' = g z w      dr = c (dr' - r (r . dr') / |r|^2)
    dz = g r' w      ds = (dz - mean(dz) - z mean(dz z)) / deviation      dw = sum_t g r' z

Each program writes a partial sum of the weight's gradient; the partial sums are added afterwards,
so every run gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.implementations import interpreted
from kernels.tiles import LOG2_E
from kernels.time_decay_scan.triton import softplus

NUMBERS = 2048  # most of a block that has several tokens
PROGRAMS = 528  # four for each of an H100's multiprocessors


def fused_features(logits, state, weight, eps):
    """Return features [..., n] in logits' type; logits float32 or bfloat16 with any strides, state
    float32, weight [n].
    """
    size = state.shape[-1]
    return _Features.apply(logits.reshape(-1, size), state.reshape(-1, size), weight, eps).view(
        state.shape
    )


class _Features(torch.autograd.Function):
    """Autograd function of the features in two dimensions, [tokens, n]."""

    @staticmethod
    def forward(ctx, logits, state, weight, eps):
        weight = weight.contiguous()
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        constants, tokens = _constants(logits.shape[1]), logits.shape[0]
        grid = (triton.cdiv(tokens, constants["BT"]),)
        _forward_kernel[grid](
            logits,
            state,
            weight,
            out,
            *logits.stride(),
            *state.stride(),
            *logits.shape,
            eps,
            **constants,
        )
        ctx.save_for_backward(logits, state, weight)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        logits, state, weight = ctx.saved_tensors
        d_out = d_out.contiguous()
        tokens, size = logits.shape
        constants = _constants(size)
        blocks = triton.cdiv(tokens, constants["BT"])
        each = triton.cdiv(blocks, 2 if interpreted() else PROGRAMS)
        programs = triton.cdiv(blocks, each)
        d_logits, d_state = (
            torch.empty_like(d_out),
            torch.empty(state.shape, dtype=state.dtype, device=state.device),
        )
        d_weights = torch.empty(programs, size, dtype=torch.float32, device=state.device)
        _backward_kernel[(programs,)](
            logits, state, weight, d_out, d_logits, d_state, d_weights,
            *logits.stride(), *state.stride(), tokens, size, ctx.eps, each, **constants,
        )  # fmt: skip
        return d_logits, d_state, d_weights.sum(0).to(weight.dtype), None


def _constants(size):
    padded = triton.next_power_of_2(size)
    tokens = 4 if interpreted() else max(1, NUMBERS // padded)
    return {
        "BT": tokens,
        "BN": padded,
        "num_warps": min(16, max(4, padded // 512)),
        "num_stages": 1,
    }


@triton.jit
def _row(logits, state, slt, sln, sst, ssn, t, n, mask, size, eps):
    """Return, for each token: logits, r, c and |r| (mathematics above), z and 1 / deviation."""
    t = t.to(tl.int64)
    raw = tl.load(logits + t[:, None] * slt + n[None, :] * sln, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(state + t[:, None] * sst + n[None, :] * ssn, mask=mask, other=0.0)
    r = tl.where(mask, softplus(raw), 0.0)
    norm = tl.sqrt(tl.sum(r * r, 1))
    scale = tl.sqrt(tl.cast(size, tl.float32)) / tl.maximum(norm, eps)
    s = tl.where(mask, s - (tl.sum(s, 1) / size)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(s * s, 1) / size + eps)
    return raw, r, scale, norm, s * inverse[:, None], inverse


@triton.jit
def _forward_kernel(
    logits, state, weight, out, slt, sln, sst, ssn, tokens, size, eps,
    BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    t, n = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, BN)
    mask = (t < tokens)[:, None] & (n < size)[None, :]
    _, r, scale, _, z, _ = _row(logits, state, slt, sln, sst, ssn, t, n, mask, size, eps)
    w = tl.load(weight + n, mask=n < size, other=0.0).to(tl.float32)
    made = r * scale[:, None] * (z * w[None, :])
    tl.store(
        out + t.to(tl.int64)[:, None] * size + n[None, :], made.to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def _backward_kernel(
    logits, state, weight, d_out, d_logits, d_state, d_weights, slt, sln, sst, ssn, tokens, size,
    eps, each,
    BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BN)
    w = tl.load(weight + n, mask=n < size, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BN,), tl.float32)
    for block in range(tl.program_id(0) * each, tl.program_id(0) * each + each):
        t = block * BT + tl.arange(0, BT)
        mask = (t < tokens)[:, None] & (n < size)[None, :]
        raw, r, scale, norm, z, inverse = _row(
            logits, state, slt, sln, sst, ssn, t, n, mask, size, eps
        )
        at = t.to(tl.int64)[:, None] * size + n[None, :]
        g = tl.load(d_out + at, mask=mask, other=0.0).to(tl.float32)
        d_weight += tl.sum(g * (r * scale[:, None]) * z, 0)
        g = g * w[None, :]
        dr = g * z
        # The norm is a constant under eps.
        along = tl.where(
            norm > eps, tl.sum(dr * r, 1) / tl.where(norm > eps, norm * norm, 1.0), 0.0
        )
        dr = scale[:, None] * (dr - r * along[:, None])
        d_raw = dr / (1.0 + tl.exp2(-raw * LOG2_E))
        tl.store(d_logits + at, d_raw.to(d_logits.dtype.element_ty), mask=mask)
        dz = g * (r * scale[:, None])
        ds = inverse[:, None] * (
            dz - (tl.sum(dz, 1) / size)[:, None] - z * (tl.sum(dz * z, 1) / size)[:, None]
        )
        tl.store(d_state + at, ds, mask=mask)
    tl.store(d_weights + tl.program_id(0) * size + n, d_weight, mask=n < size)
