"""Free-energy read as standard attention on [v | U]: prep, attention, epilogue.

It runs in torch's operations, or in Triton on a GPU. With U of `kernels.free_energy`, attention
gives [mu | Z] from the values [v | U], and F - mu follows from both. On a GPU the read is one
operation for autograd, and no step waits for the device, so that a CUDA graph can capture it.
Blocks of channels whose range exceeds the limit of the engines are marked on the device. The exact
kernels overwrite their results, forward and backward.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from kernels.arguments import without_autocast
from kernels.fem_attention.engines import ENGINES, Call
from kernels.fem_attention.reference import Reading, Tensors, repeat_heads
from kernels.free_energy.op import (
    SHIFT_BELOW,
    FreeEnergyGap,
    ValueStream,
    compute_type,
    mix,
    mix_gap,
)
from kernels.free_energy.ranges import MAX_RANGE
from kernels.machine import LateNumbers


def fused_attention(
    x: Tensors, centre: Tensor | None, spread: Tensor | None, reading: Reading
) -> Tensor:
    """Return the read o = gate * (mu + lam * (F - mu)); arguments as in `fem_attention`.

    centre and spread come from `value_centre_and_range` (None without beta); spread must be at most
    MAX_RANGE, which the caller checks. Prep and epilogue run in float32 for float32 and bfloat16
    inputs, in float64 for float64; the attention runs in q's dtype.
    """
    q, k, v, beta, lam, gate = x
    compute, heads = compute_type(q), q.shape[1]
    if beta is None or centre is None or spread is None:
        mu = _attend(q, k, v, reading).to(compute)
        return mix(mu, None, None, gate).to(q.dtype)
    each = spread < SHIFT_BELOW
    shifted: Tensor | bool = each
    if not torch.compiler.is_compiling() and (count := int(each.sum())) in (0, each.numel()):
        shifted = count > 0
    inverse_temperature = beta.to(compute)[:, None].expand_as(centre)
    stream = ValueStream.apply(v.to(compute), inverse_temperature, centre, shifted)
    mu, z = (
        _attend(q, k, torch.cat((v, stream.to(v.dtype)), dim=-1), reading)
        .to(compute)
        .chunk(2, dim=-1)
    )
    gap = FreeEnergyGap.apply(
        mu,
        z,
        *(repeat_heads(t, 1, heads) for t in (inverse_temperature, centre)),
        shifted if isinstance(shifted, bool) else repeat_heads(shifted, 1, heads),
    )
    return mix_gap(mu, gap, lam, gate).to(q.dtype)


def _attend(q: Tensor, k: Tensor, values: Tensor, reading: Reading) -> Tensor:
    """Return softmax(scale * q k^T) values by torch's scaled_dot_product_attention.

    The queries are the last positions of the keys.
    """
    width, value_width = q.shape[-1], values.shape[-1]
    if q.device.type == "cpu" and width != value_width:
        # The CPU's flash kernel requires equal widths. With padding it is still faster than the
        # unfused path, which would run otherwise.
        common = max(width, value_width)
        q, k, values = (
            F.pad(q, (0, common - width)),
            F.pad(k, (0, common - width)),
            F.pad(values, (0, common - value_width)),
        )
    return ENGINES["sdpa"].attend(q, k, values, reading)[..., :value_width]


@dataclass(frozen=True)
class Choice:
    """Name of an engine, the call that it was chosen for, and the logger for warnings."""

    engine: str
    call: Call
    log: logging.Logger


def accelerated_attention(x: Tensors, reading: Reading, choice: Choice) -> Tensor:
    """Return the read o = gate * (mu + lam * (F - mu)); arguments as in `fem_attention`.

    The engine must fit the call.
    Dtypes: float32 or bfloat16; the engine works in q's dtype, prep and epilogue in float32.
    """
    if x.beta is None:
        out = ENGINES[choice.engine].read(x.q, x.k, x.v, reading, choice.call)
        return out if x.gate is None else (x.gate.float() * out.float()).to(x.q.dtype)
    out = _Read.apply(*x, reading, choice)
    assert isinstance(out, Tensor)
    return out


class _Read(torch.autograd.Function):
    """One autograd operation that contains an inner graph from prep to epilogue, which provides the
    engine's own backward.

    The inner graph begins at `_Source`, and only its edges refer to it. Its saved tensors are saved
    once, with those of the outer operation, so that the hooks of checkpointing and offloading apply
    to them. The graph is freed after the backward.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        from kernels.fem_attention.triton.exact import exact_forward_
        from kernels.fem_attention.triton.prep import value_constants

        q, k, v, beta, lam, gate, reading, choice = given
        inputs = (q, k, v, beta.float(), lam, gate)
        constants = value_constants(v, inputs[3])
        watch(q.device).note(constants.largest, choice.log)
        kept: list[Tensor] = []
        restored: list[Tensor] = []

        def keep(t: Tensor) -> int:
            kept.append(t)
            return len(kept) - 1

        # The tensors that the inner graph saves are saved by this function, so that a checkpoint
        # around this call recomputes all of them together.
        with (
            torch.set_grad_enabled(choice.call.trains),
            saved_tensors_hooks(keep, restored.__getitem__),
        ):
            places = [
                _place(t, needed) for t, needed in zip(inputs, ctx.needs_input_grad, strict=False)
            ]
            o = _inside(places, constants, reading, choice)
        if choice.call.trains:
            ctx.starts = [
                None if t is None or not t.requires_grad else get_gradient_edge(t) for t in places
            ]
            ctx.end = get_gradient_edge(o)
        out = o.detach()
        saved = exact_forward_(out, *inputs, constants.wild, **reading.masks())
        ctx.save_for_backward(*inputs, constants.wild, *saved, *kept)
        kept.clear()
        ctx.restored, ctx.exact = restored, len(saved)
        ctx.reading, ctx.beta_type = reading, beta.dtype
        return out

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        from kernels.fem_attention.triton.exact import exact_backward_

        q, k, v, beta, lam, gate, wild, *rest = ctx.saved_tensors
        saved = rest[: ctx.exact]
        if ctx.end is None:
            raise RuntimeError(
                "fem_attention: a second backward through the same call; its inner graph is "
                "freed by the first"
            )
        starts, end = ctx.starts, ctx.end
        ctx.starts = ctx.end = None
        ctx.restored.extend(rest[ctx.exact :])
        del rest
        try:
            gradients = _gradients(starts, end, d_o, [q, k, v, beta, lam, gate])
        finally:
            ctx.restored.clear()
        d_q, d_k, d_v, fast, d_lam, d_gate = gradients
        exact = exact_backward_(
            saved,
            d_o,
            q,
            k,
            v,
            beta,
            lam,
            gate,
            wild,
            d_q,
            d_k,
            d_v,
            d_lam,
            d_gate,
            **ctx.reading.masks(),
        )
        assert fast is not None
        gradients[3] = (fast + exact).to(ctx.beta_type)
        return (
            *(
                g if needed else None
                for g, needed in zip(gradients, ctx.needs_input_grad, strict=False)
            ),
            None,
            None,
        )


class _Source(torch.autograd.Function):
    """Identity of t that starts a graph and whose gradient can be requested.

    Unlike a leaf tensor, the graph does not keep it alive.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, anchor: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        raise AssertionError("gradients are taken here; the graph ends")


def _place(t: Tensor | None, needed: bool) -> Tensor | None:
    if t is None or not needed or not torch.is_grad_enabled():
        return t
    place = _Source.apply(t.detach(), torch.empty(0, requires_grad=True))
    assert isinstance(place, Tensor)
    return place


def _inside(
    places: list[Tensor | None], constants: Any, reading: Reading, choice: Choice
) -> Tensor:
    """Return o from operations that autograd differentiates; correct where a block is not wild,
    finite elsewhere.
    """
    from kernels.fem_attention.triton.epilogue import GatedRead
    from kernels.fem_attention.triton.prep import ValueStreams

    q, k, v, beta, lam, gate = places
    assert q is not None and k is not None
    values = ValueStreams.apply(v, beta, constants)
    reads = ENGINES[choice.engine].read(q, k, values, reading, choice.call)
    o = GatedRead.apply(reads, beta, constants, lam, gate)
    assert isinstance(o, Tensor)
    return o


def _gradients(
    starts: list[GradientEdge | None], end: GradientEdge, d_o: Tensor, inputs: list[Tensor | None]
) -> list[Tensor | None]:
    """Return the inner graph's gradients of q, k, v, beta, lam, gate, and free the graph.

    An input without a requested gradient gets an uninitialised tensor, to be overwritten.
    """
    found = iter(torch.autograd.grad(end, [start for start in starts if start is not None], d_o))
    gradients: list[Tensor | None] = []
    for start, t in zip(starts, inputs, strict=True):
        if start is not None:
            gradient = next(found)
            gradients.append(gradient if gradient.stride(-1) == 1 else gradient.contiguous())
        else:
            gradients.append(
                None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
            )
    return gradients


class RangeWatch:
    """Warning, without waiting, when beta * (max v - min v) has exceeded the limit of the engines.

    A call reports the range of earlier calls. The largest range so far is kept on the device. The
    host may read an older value.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._largest = torch.zeros((), device=device)
        self._late = LateNumbers(device)

    def note(self, largest: Tensor, log: logging.Logger) -> None:
        """Record the ranges of a call, and warn about those of earlier calls."""
        if (reached := self._late.so_far()[0]) > MAX_RANGE:
            log.warning(
                "fem_attention: beta * (max v - min v) has reached %.4g, over %g: blocks of "
                "channels beyond it run the exact form, slower",
                reached,
                MAX_RANGE,
            )
        torch.maximum(self._largest, largest.max(), out=self._largest)
        self._late.send(self._largest)


@functools.cache
def watch(device: torch.device) -> RangeWatch:
    """Return the device's watch."""
    return RangeWatch(device)
