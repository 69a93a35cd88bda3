"""Linear attention in Triton, forward and backward: the launches, in order, as one autograd
function, and the gradients of q, k and decays.

Forward: cumulative decays, the pairs' weights (only for a decay of each channel), the states at the
chunks' starts, the rows. Backward: the first three again, y . dy of each row, the gradients of the
states at the chunks' ends, dv (the read backward in time), and dq, dk and the decay's gradient.

The log-decay of a token s is in the weights of every pair i < s <= t. Its gradient is the sum over
exactly those pairs (within the chunk, from the state at its start, into the state at its end, and
past the chunk), and never a difference of sums in which they would cancel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

from kernels.fem_attention.triton.epilogue import row_term
from kernels.linear_attention.triton import plan as plans
from kernels.linear_attention.triton.forward import (
    CHANNEL,
    HEAD,
    NONE,
    cumulate_kernel,
    damp,
    feature,
    level_terms,
    pairs_kernel,
    read_kernel,
    states_kernel,
    window,
)
from kernels.tiles import rows_of, strides_of


class TritonLinearAttention(torch.autograd.Function):
    """Autograd function (y, state) of q, k [b, h, t, dk], v [b, h, t, dv], log_decay [b, h, t], [b,
    h, t, dk] or None, initial.

    float32 or bfloat16. eps: as in `linear_attention`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        initial: Tensor | None,
        normalise: bool,
        eps: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the causal form of `linear_attention`; y in q's type, the state float32."""
        q, k, v = (rows_of(x) for x in (q, k, v))
        if log_decay is not None and log_decay.dim() == 4:
            log_decay = rows_of(log_decay)
        initial = None if initial is None else initial.contiguous()
        call = _Call(q, v, log_decay, normalise, eps)
        states, masses, last = call.states(k, v, initial)
        share = q.new_empty(call.rows, call.tokens, dtype=torch.float32) if normalise else None
        y = call.read(q, k, v, call.pairs(q, k), states, masses, share, reverse=False)
        ctx.save_for_backward(q, k, v, log_decay, initial, share, y)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, log_decay and initial."""
        q, k, v, log_decay, initial, share, y = ctx.saved_tensors
        dy, d_last = grads
        if dy is None and d_last is None:
            return (None,) * 7
        dy = torch.zeros_like(y) if dy is None else rows_of(dy)
        call = _Call(q, v, log_decay, share is not None, ctx.eps)
        states, masses, _ = call.states(k, v, initial)
        # Minus y . dy is the gradient of a row's mass times that mass.
        terms = None if share is None else row_term(dy, y, share)
        d_last = None if d_last is None else d_last.contiguous()
        d_states, d_masses, d_initial = call.states(q, dy, d_last, share, terms, reverse=True)
        dv = call.read(k, q, dy, call.pairs(q, k), d_states, d_masses, share, reverse=True)
        dq, dk, da = call.gradients(q, k, v, dy, share, terms, states, masses, d_states, d_masses)
        return (
            dq,
            dk,
            dv,
            None if da is None else da.to(log_decay.dtype),
            d_initial if initial is not None else None,
            None,
            None,
        )


class _Call:
    """One call: its plan, its decays cumulated within each chunk (high, low), and its launches."""

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        normalise: bool,
        eps: float | None,
    ) -> None:
        self.heads, self.tokens, dk = q.shape[1:]
        self.rows = q.shape[0] * self.heads
        if log_decay is None:
            decay = plans.NONE
        else:
            decay = plans.HEAD if log_decay.dim() == 3 else plans.CHANNEL
        self.plan = plans.Plan(dk, v.shape[3], decay, normalise, q.dtype == torch.float32, eps)
        self.chunks = cdiv(self.tokens, self.plan.chunk)
        self.per_chunk = self.rows * self.chunks
        self.high = self.low = None
        if log_decay is not None:
            width, block = self.plan.decay_widths
            shape = (self.rows, self.chunks * self.plan.chunk, width)
            self.high, self.low = (
                q.new_empty(shape, dtype=dtype) for dtype in (torch.float32, torch.float16)
            )
            self.launch(
                cumulate_kernel,
                (self.per_chunk, cdiv(width, block)),
                (log_decay, self.high, self.low),
                (log_decay,),
            )

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tensors: tuple[Tensor | None, ...],
        strided: tuple[Tensor, ...],
        **more: Any,
    ) -> None:
        """Launch a kernel on its tensors, the sizes T, N and H, and the strides of the ``strided``
        tensors.
        """
        kernel[grid](
            *tensors,
            self.tokens,
            self.chunks,
            self.heads,
            *strides_of(*strided),
            **self.plan.given(kernel, **more),
        )

    def states(
        self,
        x: Tensor,
        v: Tensor,
        first: Tensor | None,
        share: Tensor | None = None,
        weight: Tensor | None = None,
        *,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the states at the chunks' edges, their sums over ones, and the last state [b, h,
        dk, dv + normalise].
        """
        keys, values = self.plan.key_width, self.plan.value_width
        states = v.new_empty(self.rows, self.chunks, keys, values)
        masses = (
            v.new_empty(self.rows, self.chunks, keys, dtype=torch.float32)
            if self.plan.normalise
            else None
        )
        last = v.new_empty(*v.shape[:2], keys, values + self.plan.normalise, dtype=torch.float32)
        grid = (self.rows, cdiv(keys, self.plan.keys) * cdiv(values, self.plan.values))
        tensors = (x, v, self.high, self.low, share, weight, first, states, masses, last)
        self.launch(states_kernel, grid, tensors, (x, v), REVERSE=reverse)
        return states, masses, last

    def pairs(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return the weights of the chunks' pairs if each channel has its decay, else None."""
        if self.plan.decay != plans.CHANNEL:
            return None
        pairs = q.new_empty(self.rows, self.chunks * self.plan.chunk, self.plan.chunk)
        self.launch(pairs_kernel, (self.per_chunk,), (q, k, self.high, self.low, pairs), (q, k))
        return pairs

    def read(
        self, x: Tensor, y: Tensor, v: Tensor, *others: Tensor | None, reverse: bool
    ) -> Tensor:
        """Read the columns y, with values v, and the states by the rows x: [b, h, t, dv] in v's
        type.

        others: pairs, states, masses and share.
        """
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        grid = (self.per_chunk, cdiv(self.plan.value_width, self.plan.values))
        self.launch(
            read_kernel,
            grid,
            (x, y, v, self.high, self.low, *others, out),
            (x, y, v),
            REVERSE=reverse,
        )
        return out

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, *others: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return dq, dk and the decay's gradient, float32 [b, h, t] or [b, h, t, dk].

        others: share, terms, states, masses and their gradients.
        """
        plan, da = self.plan, None
        blocks = cdiv(plan.key_width, plan.gradient_keys)
        dq, dk = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
        if plan.decay:
            da = q.new_empty(
                q.shape if plan.decay == plans.CHANNEL else (blocks, *q.shape[:3]),
                dtype=torch.float32,
            )
        tensors = (q, k, v, dy, self.high, self.low, *others, dq, dk, da)
        self.launch(gradients_kernel, (self.per_chunk, blocks), tensors, (q, k, v, dy))
        return dq, dk, da.sum(0) if da is not None and plan.decay == plans.HEAD else da


@triton.jit
def from_past(high, low, row, d, C: tl.constexpr, DK: tl.constexpr, DECAY: tl.constexpr):
    """Return the decay factors from the chunk's start to each token, and from each token to its
    end: [C, 1] for a head's decay, [C, dk] for channels'.
    """
    if DECAY == HEAD:
        high_row, low_row = tl.load(high + row)[:, None], tl.load(low + row)[:, None]
        high_end, low_end = tl.load(high + C - 1), tl.load(low + C - 1)
    else:
        known = (d < DK)[None, :]
        at_row, at_end = row[:, None] * DK + d[None, :], ((C - 1) * DK + d)[None, :]
        high_row, low_row = (
            tl.load(high + at_row, mask=known, other=0.0),
            tl.load(low + at_row, mask=known, other=0.0),
        )
        high_end, low_end = (
            tl.load(high + at_end, mask=known, other=0.0),
            tl.load(low + at_end, mask=known, other=0.0),
        )
    return tl.exp(high_row), tl.exp(window(high_end, low_end, high_row, low_row))


@triton.jit
def head_pairs(queries, keys, gq, gk, d_pairs, through, high, low, row):
    """Return (d_pairs times the decay between the tokens, 0 where i > t; these channels' part of
    the gradient of the head's decays [C]).
    """
    kind = keys.dtype
    high_row, low_row = tl.load(high + row), tl.load(low + row)
    between = tl.abs(
        window(high_row[:, None], low_row[:, None], high_row[None, :], low_row[None, :])
    )
    d_pairs = tl.where(row[:, None] >= row[None, :], damp(d_pairs, tl.exp(-between)), 0.0)
    read, written = (
        tl.sum(queries.to(tl.float32) * gq, axis=1),
        tl.sum(keys.to(tl.float32) * gk, axis=1),
    )
    flows = d_pairs * tl.dot(queries, tl.trans(keys), input_precision="ieee")
    later = row[:, None] <= row[None, :]
    flows = tl.dot(
        tl.where(later, 1.0, 0.0).to(kind), flows.to(kind), input_precision="ieee"
    )  # [s, i]: sum over the rows t >= s
    flows = tl.where(later, read[None, :], flows + written[None, :])
    return d_pairs, tl.sum(flows, axis=1) + tl.sum(through, axis=0)


@triton.jit
def channel_pairs(
    queries,
    keys,
    gq,
    gk,
    d_pairs,
    through,
    high,
    low,
    row,
    d,
    DK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Return (gq and gk with the terms of the chunk's pairs, the gradient of the channels' decays
    [C, dk]), level by level of `level_terms`.
    """
    kind = keys.dtype
    later = row[:, None] <= row[None, :]
    ga = tl.zeros_like(gq) + through[None, :]
    ga += tl.dot(
        tl.where(later, 1.0, 0.0).to(kind),
        (queries.to(tl.float32) * gq).to(kind),
        input_precision="ieee",
    )
    ga += tl.dot(
        tl.where(later, 0.0, 1.0).to(kind),
        (keys.to(tl.float32) * gk).to(kind),
        input_precision="ieee",
    )
    own = tl.sum(tl.where(row[:, None] == row[None, :], d_pairs, 0.0), axis=1)[:, None]
    gq += own * keys.to(tl.float32)
    gk += own * queries.to(tl.float32)
    mirrored = tl.where(row[:, None] > row[None, :], d_pairs, tl.trans(d_pairs)).to(kind)
    for shift in range(LEVELS):
        block = row >> shift
        upper, factor = level_terms(high, low, row, d, shift, DK)
        both = tl.where(upper[:, None], queries, keys).to(tl.float32)
        level = tl.where(block[:, None] == (block ^ 1)[None, :], mirrored, 0.0)
        grad = damp(tl.dot(level, (both * factor).to(kind), input_precision="ieee"), factor)
        gq += tl.where(upper[:, None], grad, 0.0)
        gk += tl.where(upper[:, None], 0.0, grad)
        # A pair i < t of this level contains s if i < s in i's block or s <= t in t's block.
        ahead, behind = tl.where(upper, row, 1 - row), tl.where(upper, row, -row)
        crossed = (block[:, None] == block[None, :]) & (ahead[:, None] <= behind[None, :])
        ga += tl.dot(
            tl.where(crossed, 1.0, 0.0).to(kind), (both * grad).to(kind), input_precision="ieee"
        )
    return gq, gk, ga


@triton.jit
def gradients_kernel(
    q, k, v, dy, high, low, share, weight, states, masses, d_states, d_masses, dq, dk, da, T, N, H,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, dy_b, dy_h, dy_t,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, DECAY: tl.constexpr, NORMALISE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Write dq, dk [b h, t, dk] and da.

    da: [b h, t, dk] (a decay for each channel), or [blocks of channels, b h, t], to be summed over
    blocks (one decay for each head). states, masses: those at the chunks' starts; d_states,
    d_masses: gradients of those at their ends. share, weight: see `states_kernel`. Long, because it
    reads many tensors, each with its own addresses.
    """
    bh, n = tl.program_id(0).to(tl.int64) // N, tl.program_id(0).to(tl.int64) % N
    block_k = tl.program_id(1)
    row, d = tl.arange(0, C), block_k * BK + tl.arange(0, BK)
    here, known = n * C + row < T, d < DK
    q += (bh // H) * q_b + (bh % H) * q_h + n * C * q_t
    k += (bh // H) * k_b + (bh % H) * k_h + n * C * k_t
    v += (bh // H) * v_b + (bh % H) * v_h + n * C * v_t
    dy += (bh // H) * dy_b + (bh % H) * dy_h + n * C * dy_t
    states += (bh * N + n) * DK * DV
    d_states += (bh * N + n) * DK * DV
    W: tl.constexpr = DK if DECAY == CHANNEL else 1
    if DECAY != NONE:
        high += (bh * N + n) * C * W
        low += (bh * N + n) * C * W
    if DECAY == HEAD:
        past = tl.exp(tl.load(high + C - 1))
    if DECAY == CHANNEL:
        past = tl.exp(tl.load(high + (C - 1) * DK + d, mask=known, other=0.0))

    d_pairs = tl.zeros((C, C), tl.float32)
    gq, gk = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
    through = tl.zeros((BK,), tl.float32)
    for vb in range(0, DV, BV):
        j = vb + tl.arange(0, BV)
        inside = here[:, None] & (j < DV)[None, :]
        values = tl.load(v + row[:, None] * v_t + j[None, :], mask=inside, other=0.0)
        d_read = tl.load(dy + row[:, None] * dy_t + j[None, :], mask=inside, other=0.0)
        at_state = d[None, :] * DV + j[:, None]
        state = tl.load(states + at_state, mask=known[None, :] & (j < DV)[:, None], other=0.0)
        d_state = tl.load(d_states + at_state, mask=known[None, :] & (j < DV)[:, None], other=0.0)
        d_pairs += tl.dot(d_read, tl.trans(values), input_precision="ieee")
        gq += tl.dot(d_read, state, input_precision="ieee")
        gk += tl.dot(values, d_state, input_precision="ieee")
        if DECAY == HEAD:
            through += tl.sum(damp(d_state.to(tl.float32), past) * state.to(tl.float32), axis=0)
        if DECAY == CHANNEL:
            through += tl.sum(
                damp(d_state.to(tl.float32), past[None, :]) * state.to(tl.float32), axis=0
            )
    if NORMALISE:
        shares = tl.load(share + bh * T + n * C + row, mask=here, other=0.0)
        term = tl.load(weight + bh * T + n * C + row, mask=here, other=0.0)
        sums = tl.load(masses + (bh * N + n) * DK + d, mask=known, other=0.0)
        d_sums = tl.load(d_masses + (bh * N + n) * DK + d, mask=known, other=0.0)
        d_pairs = tl.where((shares != 0)[:, None], d_pairs + term[:, None], 0.0)
        gq = tl.where((shares != 0)[:, None], gq + term[:, None] * sums[None, :], 0.0)
        gk += d_sums[None, :]
        if DECAY != NONE:
            through += damp(d_sums, past) * sums

    held = here[:, None] & known[None, :]
    queries = tl.load(q + row[:, None] * q_t + d[None, :], mask=held, other=0.0)
    keys = tl.load(k + row[:, None] * k_t + d[None, :], mask=held, other=0.0)
    queries = feature(queries, known[None, :], DK % BK > 0, EPS)
    keys = feature(keys, known[None, :], DK % BK > 0, EPS)
    kind = keys.dtype
    if NORMALISE:
        queries = (queries.to(tl.float32) * shares[:, None]).to(kind)
    if DECAY != NONE:
        before, after = from_past(high, low, row, d, C, DK, DECAY)
        gq, gk = damp(gq, before), damp(gk, after)
    if DECAY == CHANNEL:
        gq, gk, ga = channel_pairs(
            queries, keys, gq, gk, d_pairs, through, high, low, row, d, DK, LEVELS
        )
        tl.store(da + (bh * T + n * C) * DK + (row[:, None] * DK + d[None, :]), ga, mask=held)
    else:
        if DECAY == HEAD:
            d_pairs, ga = head_pairs(queries, keys, gq, gk, d_pairs, through, high, low, row)
            tl.store(
                da + (block_k * (tl.num_programs(0) // N) + bh) * T + n * C + row, ga, mask=here
            )
        else:
            d_pairs = tl.where(row[:, None] >= row[None, :], d_pairs, 0.0)
        gq += tl.dot(d_pairs.to(kind), keys, input_precision="ieee")
        gk += tl.dot(tl.trans(d_pairs).to(kind), queries, input_precision="ieee")
    if EPS is not None:
        # Loaded again, k first: otherwise sm_80 spills.
        raw = tl.load(k + row[:, None] * k_t + d[None, :], mask=held, other=0.0, volatile=True)
        gk = tl.where(raw.to(tl.float32) <= 0, 0.0, gk)
        raw = tl.load(q + row[:, None] * q_t + d[None, :], mask=held, other=0.0, volatile=True)
        gq = tl.where(raw.to(tl.float32) <= 0, 0.0, gq)
    if NORMALISE:
        gq *= shares[:, None]
    to = (bh * T + n * C) * DK + (row[:, None] * DK + d[None, :])
    tl.store(dq + to, gq.to(dq.dtype.element_ty), mask=held)
    tl.store(dk + to, gk.to(dk.dtype.element_ty), mask=held)


MATRIX = (gradients_kernel,)  # their products are wgmma on sm_90
