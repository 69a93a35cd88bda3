"""Linear attention in Triton, forward and backward: the launches, in order, as one autograd function. No equations: those are the kernels'.

Forward: cumulated decays, (each channel's decay: the pairs' weights,) the states at the chunks' starts, the rows. Backward: those but the
rows again, y . dy of each row, the gradients of the states at the chunks' ends, dv (the read backward in time), and dq, dk and the decay's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

from kernels.linear_attention.triton import plan as plans
from kernels.linear_attention.triton.forward import cumulate_kernel, pairs_kernel, read_kernel, row_terms_kernel, states_kernel
from kernels.linear_attention.triton.gradients import gradients_kernel
from kernels.tiles import strides_of


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
        call = _Call(q, v, log_decay, normalise)
        states, masses, last = call.states(k, v, initial)
        share = q.new_empty(call.rows, call.tokens, dtype=torch.float32) if normalise else None
        y = call.read(q, k, v, call.pairs(q, k), states, masses, share, reverse=False)
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
        call = _Call(q, v, log_decay, share is not None)
        states, masses, _ = call.states(k, v, initial)
        terms = None if share is None else torch.empty_like(share)
        if share is not None:
            call.launch(row_terms_kernel, (call.per_chunk,), (y, dy, share, terms), (y, dy))
        d_last = None if d_last is None else d_last.contiguous()
        d_states, d_masses, d_initial = call.states(q, dy, d_last, share, terms, reverse=True)
        dv = call.read(k, q, dy, call.pairs(q, k), d_states, d_masses, share, reverse=True)
        dq, dk, da = call.gradients(q, k, v, dy, share, terms, states, masses, d_states, d_masses)
        return dq, dk, dv, None if da is None else da.to(log_decay.dtype), d_initial if initial is not None else None, None


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Call:
    """How a call is cut, its decays cumulated in each chunk (high, low), and its launches."""

    def __init__(self, q: Tensor, v: Tensor, log_decay: Tensor | None, normalise: bool) -> None:
        self.heads, self.tokens, dk = q.shape[1:]
        self.rows = q.shape[0] * self.heads
        decay = plans.NONE if log_decay is None else plans.HEAD if log_decay.dim() == 3 else plans.CHANNEL
        self.plan = plans.Plan(dk, v.shape[3], decay, normalise, q.dtype == torch.float32)
        self.chunks = cdiv(self.tokens, self.plan.chunk)
        self.per_chunk = self.rows * self.chunks
        self.high = self.low = None
        if log_decay is not None:
            width, block = self.plan.decay_widths
            shape = (self.rows, self.chunks * self.plan.chunk, width)
            self.high, self.low = (q.new_empty(shape, dtype=dtype) for dtype in (torch.float32, torch.float16))
            self.launch(cumulate_kernel, (self.per_chunk, cdiv(width, block)), (log_decay, self.high, self.low), (log_decay,))

    def launch(
        self, kernel: Any, grid: tuple[int, ...], tensors: tuple[Tensor | None, ...], strided: tuple[Tensor, ...], **more: Any
    ) -> None:
        """A kernel on its tensors, the sizes T, N and H, and the strides of some."""
        kernel[grid](*tensors, self.tokens, self.chunks, self.heads, *strides_of(*strided), **self.plan.given(kernel, **more))

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
        """The states at the chunks' edges, their sums over ones, and the last state [b, h, dk, dv + normalise]."""
        keys, values = self.plan.key_width, self.plan.value_width
        states = v.new_empty(self.rows, self.chunks, keys, values)
        masses = v.new_empty(self.rows, self.chunks, keys, dtype=torch.float32) if self.plan.normalise else None
        last = v.new_empty(*v.shape[:2], keys, values + self.plan.normalise, dtype=torch.float32)
        grid = (self.rows, cdiv(keys, self.plan.keys) * cdiv(values, self.plan.values))
        tensors = (x, v, self.high, self.low, share, weight, first, states, masses, last)
        self.launch(states_kernel, grid, tensors, (x, v), REVERSE=reverse)
        return states, masses, last

    def pairs(self, q: Tensor, k: Tensor) -> Tensor | None:
        """The weights of the chunks' pairs, where each channel has its decay."""
        if self.plan.decay != plans.CHANNEL:
            return None
        pairs = q.new_empty(self.rows, self.chunks * self.plan.chunk, self.plan.chunk)
        self.launch(pairs_kernel, (self.per_chunk,), (q, k, self.high, self.low, pairs), (q, k))
        return pairs

    def read(self, x: Tensor, y: Tensor, v: Tensor, *others: Tensor | None, reverse: bool) -> Tensor:
        """What the rows x read of the columns y, whose values are v, and of the states: [b, h, t, dv] in v's type.

        others: pairs, states, masses and share.
        """
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        grid = (self.per_chunk, cdiv(self.plan.value_width, self.plan.values))
        self.launch(read_kernel, grid, (x, y, v, self.high, self.low, *others, out), (x, y, v), REVERSE=reverse)
        return out

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """dq, dk and the decay's, in float32: [b, h, t] or [b, h, t, dk]; others: share, terms, states, masses and their gradients."""
        plan, da = self.plan, None
        blocks = cdiv(plan.key_width, plan.gradient_keys)
        dq, dk = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
        if plan.decay:
            da = q.new_empty(q.shape if plan.decay == plans.CHANNEL else (blocks, *q.shape[:3]), dtype=torch.float32)
        tensors = (q, k, v, dy, self.high, self.low, *others, dq, dk, da)
        self.launch(gradients_kernel, (self.per_chunk, blocks), tensors, (q, k, v, dy))
        return dq, dk, da.sum(0) if da is not None and plan.decay == plans.HEAD else da
