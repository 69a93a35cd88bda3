"""Linear maps that multiply 8-bit floats (train.fp8): y = x W^T and both products of its backward pass.

An operand Q(t) is t / scale rounded to e4m3 (inputs and weights) or e5m2 (gradients). The scale is the smallest power of two that brings
the largest magnitude of the tensor that a rank holds below the type's largest number (``tensorwise``, dynamic). A power of two moves no
mantissa: cuts of one tensor that are scaled apart, by rank or micro-batch, round to the same numbers, but for those below 2^-13 (e4m3) or
2^-28 (e5m2) of the largest. So no rank asks another for a maximum, nothing is kept from step to step, and no checkpoint knows of it.

``delayed``: the magnitude is instead the largest of the last steps (`Delayed`), of the whole tensor and all ranks; what passes it is cut
off at the type's largest number. In the first step, which has none behind it, each tensor's own.

On a GPU torch's own product of 8-bit operands runs (``torch._scaled_mm``). Elsewhere the same operands are multiplied in fp32: the same
numbers up to the order of sums. Weights stay as they are; a forward pass keeps its input in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
PREFIX = "fp8.largest."  # of names in a checkpoint
_MANTISSA = 23  # bits of an fp32's


class Fp8Linear(nn.Linear):
    """A linear map, its bias in the model's type."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], x's type."""
        y = linear(x, self.weight, known_of(self.weight))
        return y if self.bias is None else y + self.bias


Known = tuple[Tensor, Tensor]
"""Of a map's input, weight and gradient [3], fp32: the magnitudes that scales go by, 0 where there is none; this step's largest so far."""


def known_of(weight: Tensor) -> Known | None:
    """What delayed scaling knows of a weight's map, where it is on."""
    return getattr(weight, "known", None)


def linear(x: Tensor, weight: Tensor, known: Known | None = None) -> Tensor:
    """Q(x) Q(weight)^T: x [..., in], weight [out, in] -> [..., out], x's type. A GPU wants tokens, in and out to be multiples of 16."""
    y: Tensor = _Linear.apply(x, weight, known)
    return y


class _Linear(torch.autograd.Function):
    """y = Q(x) Q(W)^T, dx = Q(dy) Q(W), dW = Q(dy)^T Q(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, known: Known | None) -> Tensor:
        of_x, ctx.of_weight, ctx.of_gradient = (
            [None] * 3 if known is None else zip(*known, strict=True)
        )
        rows, scale = quantised(x.flatten(0, -2), FORWARD, of_x)
        ctx.save_for_backward(rows, scale, weight)
        return product(rows, scale, *quantised(weight, FORWARD, ctx.of_weight), x.dtype).view(
            *x.shape[:-1], -1
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, scale, weight = ctx.saved_tensors
        (dy,) = grads
        gradient, own = quantised(dy.flatten(0, -2), BACKWARD, ctx.of_gradient)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            narrow, its = quantised(weight, FORWARD, ctx.of_weight)
            dx = product(gradient, own, narrow.t().contiguous(), its, dy.dtype).view(
                *dy.shape[:-1], -1
            )
        if ctx.needs_input_grad[1]:
            dw = product(gradient.t().contiguous(), own, rows.t().contiguous(), scale, weight.dtype)
        return dx, dw, None


def quantised(t: Tensor, dtype: torch.dtype, known: Known | None = None) -> tuple[Tensor, Tensor]:
    """t / scale in ``dtype``, and the scale, an fp32 of no dimension. Where t is not finite that is NaN: e4m3 has no infinity.

    known: of t, two numbers; where the first is not 0 the scale goes by it, and what is too large is cut off. t's own goes into the second.
    """
    own = torch.linalg.vector_norm(
        t, torch.inf, dtype=torch.promote_types(t.dtype, torch.float32)
    ).float()
    largest, most = own, torch.finfo(dtype).max
    if known is not None:
        largest = torch.where(known[0] > 0, known[0], own)
        torch.maximum(known[1], own, out=known[1])
    # The exponent's bits, one more: the power of two above. 0 and what is denormal have 2^-126.
    exponent = ((largest / most).view(torch.int32) >> _MANTISSA) + 1
    scale = (exponent << _MANTISSA).view(torch.float32) + (own - own)
    scaled = t * scale.reciprocal()
    return (scaled if known is None else scaled.clamp(-most, most)).to(dtype).contiguous(), scale


class Delayed:
    """Delayed scaling (train.fp8=delayed): of each map the largest magnitudes of its input, weight and gradient in each of the last steps.

    A step's scales go by the largest of them, times 2^margin, whichever micro-batch it is; of the step itself nothing is known before its
    end. Then the ranks that share the maps agree on its own (``advance``), in one all-reduce. A step that is left out is none of them.

    weights: by their names in the whole model. history [steps, maps, 3], fp32, the last step first, gradients those of the loss summed over
    tokens; 0: there was none.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        steps: int,
        margin: int,
        group: Any,
        device: torch.device,
    ) -> None:
        self.names, self.factor, self.group = list(weights), 2.0**margin, group
        self.history = torch.zeros(steps, len(weights), 3, device=device)
        self.by, self.now = (torch.zeros(len(weights), 3, device=device) for _ in range(2))
        self.units = torch.ones(3, device=device)
        for weight, by, now in zip(weights.values(), self.by, self.now, strict=True):
            weight.known = by, now  # type: ignore[attr-defined]

    def begin(self, gradient: Tensor | float = 1.0) -> None:
        """A step begins; what was computed since the last one does not count. gradient: what this step multiplies the summed loss by."""
        self.now.zero_()
        if self.names:
            self.units[2] = gradient
            self.by.copy_(self.history.amax(0) * self.factor * self.units)

    def advance(self) -> None:
        """The step is done. Collective over the group."""
        if self.names:
            torch.distributed.all_reduce(self.now, torch.distributed.ReduceOp.MAX, group=self.group)
            self.history.copy_(torch.cat(((self.now / self.units)[None], self.history[:-1])))

    def sharded_state(self, steps: int | None = None) -> dict[str, ShardedTensor]:
        """The history for a checkpoint, [steps, 3] of each map under its weight's name; ``steps``: as many, to be read."""
        history = (
            self.history
            if steps is None
            else self.history.new_zeros(steps, *self.history.shape[1:])
        )
        keys = {name: f"{PREFIX}{name}" for name in self.names}
        parts = zip(keys.items(), history.unbind(1), strict=True)
        rank = self.group.rank()
        return {
            name: ShardedTensor.from_rank_offsets(key, part.contiguous(), replica_id=rank)
            for (name, key), part in parts
        }

    def restore(self, read: Callable[[dict[str, Any]], dict[str, Any]], steps: int | None) -> None:
        """Takes over the last steps of a checkpoint's history, which has so many; None: it has none, and this begins anew."""
        self.history.zero_()
        if steps is not None and self.names:
            given = read(self.sharded_state(steps))
            kept = torch.stack([given[name] for name in self.names], dim=1)[: len(self.history)]
            self.history[: len(kept)] = kept


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a b^T times both scales: a [m, k], b [n, k], both contiguous 8-bit floats, not both e5m2 -> [m, n] of ``dtype``."""
    if a.is_cuda:
        out: Tensor = torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype)
        return out
    wide = torch.promote_types(dtype, torch.float32)
    return (a.to(wide) @ b.to(wide).t() * a_scale * b_scale).to(dtype)
