"""Linear maps that multiply 8-bit floats (train.fp8).

The products are y = x W^T and both products of its backward pass. An operand Q(t) is t /
scale rounded to e4m3 (inputs and weights) or e5m2 (gradients). The scale is the smallest
power of two that brings the largest magnitude of a rank's tensor below the dtype's
largest number (``tensorwise``, dynamic). A power of two does not change the mantissa.
Slices of one tensor that are scaled separately, by rank or micro-batch, therefore round
to the same numbers, except below 2^-13 (e4m3) or 2^-28 (e5m2) of the largest. So ranks
exchange no maximum, and neither steps nor checkpoints store any.

``delayed``: the magnitude is the largest of the last steps (`Delayed`), over the full tensor and
all ranks. Larger values are clamped to the dtype's largest number. The first step has no history
and uses each tensor's own magnitude.

On a GPU torch's product of 8-bit operands runs (``torch._scaled_mm``). Elsewhere the same operands
are multiplied in fp32, with equal results up to the order of summation. Weights keep their dtype; a
forward pass keeps its input in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
PREFIX = "fp8.largest."  # prefix of names in a checkpoint
_MANTISSA = 23  # mantissa bits of fp32


class Fp8Linear(nn.Linear):
    """A linear map that multiplies in 8-bit floats, with an optional bias in the model's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] -> [..., out], in x's type."""
        y = linear(x, self.weight, known_of(self.weight))
        return y if self.bias is None else y + self.bias


Known = tuple[Tensor, Tensor]
"""Magnitudes of a map's input, weight and gradient, two fp32 tensors [3].

The first determines the scales (0: no value); the second is the largest of this step so far.
"""


def known_of(weight: Tensor) -> Known | None:
    """Return the two magnitudes of each operand of a weight's map, or None without delayed scaling.

    They are the attribute ``known`` of the weight, see `quantised`.
    """
    return getattr(weight, "known", None)


def linear(x: Tensor, weight: Tensor, known: Known | None = None) -> Tensor:
    """Return Q(x) Q(weight)^T: x [..., in], weight [out, in] -> [..., out], in x's type.

    Q rounds to scaled 8-bit floats (see the module). A GPU requires tokens, in and out to be
    multiples of 16.
    """
    y: Tensor = _Linear.apply(x, weight, known)
    return y


class _Linear(torch.autograd.Function):
    """The three products of a linear map: y = Q(x) Q(W)^T, dx = Q(dy) Q(W), dW = Q(dy)^T Q(x)."""

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
    """Return t / scale in ``dtype``, and the scale, an fp32 scalar tensor.

    If t is not finite the result is NaN, because e4m3 has no infinity.

    known: two magnitudes for t, or None. If the first is not 0 it determines the scale, and larger
        values are clamped. The second is raised in place to t's magnitude if that is larger.
    """
    own = torch.linalg.vector_norm(
        t, torch.inf, dtype=torch.promote_types(t.dtype, torch.float32)
    ).float()
    largest, most = own, torch.finfo(dtype).max
    if known is not None:
        largest = torch.where(known[0] > 0, known[0], own)
        torch.maximum(known[1], own, out=known[1])
    # The exponent plus one gives the next power of two. Zero and denormals give 2^-126.
    exponent = ((largest / most).view(torch.int32) >> _MANTISSA) + 1
    scale = (exponent << _MANTISSA).view(torch.float32) + (own - own)
    scaled = t * scale.reciprocal()
    return (scaled if known is None else scaled.clamp(-most, most)).to(dtype).contiguous(), scale


class Delayed:
    """Delayed scaling (train.fp8=delayed): scales from each map's largest values in recent steps.

    The recorded values are the largest magnitudes of the map's input, weight and gradient. A step's
    scales use the maximum over the recent steps, times 2^margin, in all of its micro-batches. The
    step's own magnitudes are available only at its end. Then the ranks that share the maps agree on
    them in one all-reduce (``advance``). A skipped step is not recorded.

    weights: the maps' weights, by their names in the full model.
    history: [steps, maps, 3], fp32, the most recent step first. The three magnitudes are those of
        input, weight and gradient of the loss summed over tokens. 0: no value.
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
        """Begin a step: set its magnitudes from the history, and clear the recorded ones.

        gradient: factor by which this step multiplies the summed loss.
        """
        self.now.zero_()
        if self.names:
            self.units[2] = gradient
            self.by.copy_(self.history.amax(0) * self.factor * self.units)

    def advance(self) -> None:
        """Finish the step: agree on its magnitudes and add them to the history.

        This is a collective operation over the group.
        """
        if self.names:
            torch.distributed.all_reduce(self.now, torch.distributed.ReduceOp.MAX, group=self.group)
            self.history.copy_(torch.cat(((self.now / self.units)[None], self.history[:-1])))

    def sharded_state(self, steps: int | None = None) -> dict[str, ShardedTensor]:
        """Return the history for a checkpoint: [steps, 3] of each map under its weight's name.

        steps: number of steps to read from a checkpoint; None: the current history.
        """
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
        """Load the most recent steps of a checkpoint's history.

        steps: number of steps in the checkpoint; None: start empty.
        """
        self.history.zero_()
        if steps is not None and self.names:
            given = read(self.sharded_state(steps))
            kept = torch.stack([given[name] for name in self.names], dim=1)[: len(self.history)]
            self.history[: len(kept)] = kept


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a b^T times both scales, [m, n] of ``dtype``.

    a [m, k] and b [n, k] are contiguous 8-bit floats, not both e5m2.
    """
    if a.is_cuda:
        out: Tensor = torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype)
        return out
    wide = torch.promote_types(dtype, torch.float32)
    return (a.to(wide) @ b.to(wide).t() * a_scale * b_scale).to(dtype)
