"""Linear attention in Triton, forward and backward: the launches, in order, as one autograd function. No equations: those are the kernels'.

Forward: cumulated decays, (each channel's decay: the pairs' weights,) the states at the chunks' starts, the rows. Backward: those but the
rows again, y . dy of each row, the gradients of the states at the chunks' ends, dv (the read backward in time), and dq, dk and the decay's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

from kernels.linear_attention.triton import plan as plans
from kernels.linear_attention.triton.forward import cumulate_kernel, pairs_kernel, read_kernel, row_terms_kernel, states_kernel
from kernels.linear_attention.triton.gradients import gradients_kernel


class _Call(NamedTuple):
    """What the launches of one call share. high, low: the decays cumulated in each chunk."""

    plan: plans.Plan
    tokens: int
    chunks: int
    heads: int
    rows: int  # batch * heads
    high: Tensor | None
    low: Tensor | None

    @property
    def per_chunk(self) -> int:
        """Programs, where each has a chunk."""
        return self.rows * self.chunks

    @property
    def steps(self) -> tuple[int, int, int]:
        """T, N and H of every kernel."""
        return self.tokens, self.chunks, self.heads


class TritonLinearAttention(torch.autograd.Function):
    """(y, state) of q, k [b, h, t, dk], v [b, h, t, dv], log_decay [b, h, t], [b, h, t, dk] or None, initial; float32 or bfloat16."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial: Tensor | None, normalise: bool
    ) -> tuple[Tensor, Tensor]:
        """As `linear_attention`, causal; y in q's type, the state float32."""
        q, k, v = (_rows(x) for x in (q, k, v))
        log_decay = None if log_decay is None else _rows(log_decay) if log_decay.dim() == 4 else log_decay
        initial = None if initial is None else initial.contiguous()
        call = _call(q, v, log_decay, normalise)
        states, masses, last = _states(call, k, v, initial)
        share = q.new_empty(call.rows, call.tokens, dtype=torch.float32) if normalise else None
        y = _read(call, q, k, v, _pairs(call, q, k), states, masses, share, reverse=False)
        ctx.save_for_backward(q, k, v, log_decay, initial, share, y)
        ctx.set_materialize_grads(False)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of all that is differentiated."""
        q, k, v, log_decay, initial, share, y = ctx.saved_tensors
        dy, d_last = grads
        if dy is None and d_last is None:
            return (None,) * 6
        dy = torch.zeros_like(y) if dy is None else _rows(dy)
        call = _call(q, v, log_decay, share is not None)
        states, masses, _ = _states(call, k, v, initial)
        terms = _row_terms(call, y, dy, share)
        d_last = None if d_last is None else d_last.contiguous()
        d_states, d_masses, d_initial = _states(call, q, dy, d_last, share=share, weight=terms, reverse=True)
        dv = _read(call, k, q, dy, _pairs(call, q, k), d_states, d_masses, share, reverse=True)
        dq, dk, da = _gradients(call, q, k, v, dy, share, terms, states, masses, d_states, d_masses)
        return dq, dk, dv, None if da is None else da.to(log_decay.dtype), d_initial if initial is not None else None, None


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _call(q: Tensor, v: Tensor, log_decay: Tensor | None, normalise: bool) -> _Call:
    """How the call is cut, and its decays cumulated in each chunk."""
    (b, h, t, dk), dv = q.shape, v.shape[3]
    decay = plans.NONE if log_decay is None else plans.HEAD if log_decay.dim() == 3 else plans.CHANNEL
    plan = plans.Plan(dk, dv, decay, normalise, q.dtype == torch.float32)
    chunks = cdiv(t, plan.chunk)
    high = low = None
    if log_decay is not None:
        constants = plan.cumulating()
        high, low = (q.new_empty(b * h, chunks * plan.chunk, constants["W"], dtype=dtype) for dtype in (torch.float32, torch.float16))
        grid = (b * h * chunks, cdiv(constants["W"], constants["BW"]))
        cumulate_kernel[grid](log_decay, high, low, t, chunks, h, *log_decay.stride()[:3], **constants, **plans.OTHERS)
    return _Call(plan, t, chunks, h, b * h, high, low)


def _states(
    call: _Call,
    x: Tensor,
    v: Tensor,
    first: Tensor | None,
    *,
    share: Tensor | None = None,
    weight: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The states at the chunks' edges, their sums over ones, and the last state [b, h, dk, dv + normalise]."""
    plan = call.plan
    states = v.new_empty(call.rows, call.chunks, plan.key_width, plan.value_width)
    masses = v.new_empty(call.rows, call.chunks, plan.key_width, dtype=torch.float32) if plan.normalise else None
    last = v.new_empty(*v.shape[:2], plan.key_width, plan.value_width + plan.normalise, dtype=torch.float32)
    states_kernel[(call.rows, cdiv(plan.key_width, plan.keys) * cdiv(plan.value_width, plan.values))](
        x, v, call.high, call.low, share, weight, first, states, masses, last, *call.steps, *x.stride()[:3], *v.stride()[:3],
        **plan.constants(), REVERSE=reverse, **plans.STATES,
    )  # fmt: skip
    return states, masses, last


def _pairs(call: _Call, q: Tensor, k: Tensor) -> Tensor | None:
    """The weights of the chunks' pairs, where each channel has its decay."""
    plan = call.plan
    if plan.decay != plans.CHANNEL:
        return None
    pairs = q.new_empty(call.rows, call.chunks * plan.chunk, plan.chunk)
    pairs_kernel[(call.per_chunk,)](
        q, k, call.high, call.low, pairs, *call.steps, *q.stride()[:3], *k.stride()[:3], **plan.pairing(), **plans.OTHERS
    )
    return pairs


def _read(
    call: _Call,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    pairs: Tensor | None,
    states: Tensor,
    masses: Tensor | None,
    share: Tensor | None,
    *,
    reverse: bool,
) -> Tensor:
    """What the rows x read of the columns y, whose values are v, and of the states: [b, h, t, dv] in v's type."""
    plan = call.plan
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    read_kernel[(call.per_chunk, cdiv(plan.value_width, plan.values))](
        x, y, v, call.high, call.low, pairs, states, masses, share, out, *call.steps, *x.stride()[:3], *y.stride()[:3], *v.stride()[:3],
        **plan.constants(), REVERSE=reverse, **plans.OTHERS,
    )  # fmt: skip
    return out


def _row_terms(call: _Call, y: Tensor, dy: Tensor, share: Tensor | None) -> Tensor | None:
    """The gradients of the rows' masses times the masses, [b h, t]."""
    if share is None:
        return None
    terms = torch.empty_like(share)
    constants = {"DV": call.plan.value_width, "BV": call.plan.values, "C": call.plan.chunk}
    row_terms_kernel[(call.per_chunk,)](y, dy, share, terms, *call.steps, *y.stride()[:3], *dy.stride()[:3], **constants, **plans.OTHERS)
    return terms


def _gradients(
    call: _Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dy: Tensor,
    share: Tensor | None,
    terms: Tensor | None,
    states: Tensor,
    masses: Tensor | None,
    d_states: Tensor,
    d_masses: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dq, dk and the decay's, in float32: [b, h, t] or [b, h, t, dk]."""
    plan = call.plan
    blocks = cdiv(plan.key_width, plan.gradient_keys)
    dq, dk = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    da = None
    if plan.decay:
        da = q.new_empty(q.shape if plan.decay == plans.CHANNEL else (blocks, *q.shape[:3]), dtype=torch.float32)
    gradients_kernel[(call.per_chunk, blocks)](
        q, k, v, dy, call.high, call.low, share, terms, states, masses, d_states, d_masses, dq, dk, da, *call.steps,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dy.stride()[:3],
        **plan.constants(plan.gradient_keys), LEVELS=plan.levels, **plan.gradient_options,
    )  # fmt: skip
    return dq, dk, da.sum(0) if da is not None and plan.decay == plans.HEAD else da
