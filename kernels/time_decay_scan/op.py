"""Time-decay scan of FEM's conditioner. One public function: `time_decay_scan`. Projections, norms
and gates belong to the layer.

The definition runs in plain PyTorch on any device: neighbouring steps are joined in pairs, (a, x),
(a', x') -> (a + a', exp(a') x + x'), the scan of half the length is solved in the same way, and the
steps between are filled in: log2(t) rounds, about 2 t joins, no loop over tokens. Only sums of a
over windows (<= 0) are exponentiated. A state is computed from its own past alone: it is bitwise
independent of later steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.arguments import check_first, check_others, operation
from kernels.implementations import Implementation, Op, lacks_triton
from kernels.registered import registered

OP = Op(
    "time_decay_scan",
    "s_t = exp(a_t) s_{t-1} + x_t, the scan of FEM's conditioner",
    (
        Implementation(
            "triton", "segments and chunks by associative scans, forward and backward", lacks_triton
        ),
        Implementation("reference", "pairs of steps joined, log2(t) rounds"),
    ),
)


def _shape(x: Tensor, softplus: bool, **_: Any) -> Tensor:
    return x.new_empty(
        x.shape, dtype=torch.promote_types(x.dtype, torch.float32) if softplus else x.dtype
    )


@operation("x", wide="softplus")
@registered(_shape)
def time_decay_scan(
    a: Tensor,
    x: Tensor,
    initial: Tensor | None = None,
    *,
    softplus: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """Compute the first-order scan s_t = exp(a_t) s_{t-1} + x_t along the first dimension, with
    s_{-1} = initial (zero if None).

    Shapes: a and x [t, ...] alike, with any strides, initial [...] (the state before step 0; in
    decoding, the last state so far). Returns s [t, ...]. The caller must ensure a <= 0 (a
    log-decay; -inf, a full reset, is allowed); it is not checked, because that would wait for the
    device. softplus True: a contains logits, the log-decays are -softplus(a), and a step with the
    logit -inf keeps the state. Types: a and x float64, float32, bfloat16 or float16, computed in
    float32 or float64. s and initial have x's type; with softplus they are float32 if x is bfloat16
    or float16. implementation: "triton", "reference" or "auto", the fastest that supports this
    call. Raises ValueError for shapes, types or devices that do not fit, and for an implementation
    that cannot run. Equation: Free Energy Mixer, the time-decay conditioner.
    """
    check_first("time_decay_scan", "x", x, "[t, ...]")
    compute = torch.promote_types(x.dtype, torch.float32)
    made = compute if softplus else x.dtype
    check_others(
        "time_decay_scan",
        "x",
        x,
        {"a": (a, x.shape, x.dtype), "initial": (initial, x.shape[1:], made)},
    )
    start = None if initial is None else initial.to(compute)
    if (
        OP.choose(
            implementation,
            x.device,
            {"triton": "float64" if compute == torch.float64 else None}.get,
        )
        == "triton"
    ):
        from kernels.time_decay_scan.triton import scan

        return scan(a, x, start, softplus).to(made)
    decay = a.to(compute)
    if softplus:  # on a CPU torch computes a strided tensor's logarithms one by one
        decay = -torch.nn.functional.softplus(decay.contiguous())
    return TimeDecayScan.apply(decay, x.to(compute), start).to(made)


class TimeDecayScan(torch.autograd.Function):
    """Autograd function of the states s [t, ...] from a, x [t, ...] and initial [...]; the backward
    is the same scan run from the end.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, initial: Tensor | None) -> Tensor:
        if initial is not None:
            x = torch.cat((x[:1] + a[:1].exp() * initial, x[1:]))
        states = _scan(a, x)
        ctx.save_for_backward(a, states, initial)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        a, states, initial = ctx.saved_tensors
        (d_states,) = grads
        following = torch.cat((a[1:], torch.zeros_like(a[:1])))
        dx = _scan(following.flip(0), d_states.flip(0)).flip(0)
        first = torch.zeros_like(states[0]) if initial is None else initial
        through = dx * a.exp()
        da = through * torch.cat((first[None], states[:-1]))
        return da, dx, None if initial is None else through[0]


def _scan(a: Tensor, x: Tensor) -> Tensor:
    steps = x.shape[0]
    if steps == 1:
        return x
    paired = steps - steps % 2
    first, second = slice(0, paired, 2), slice(1, paired, 2)
    joined = _scan(a[first] + a[second], torch.addcmul(x[second], a[second].exp(), x[first]))
    states = torch.empty_like(x)
    states[0] = x[0]
    states[second] = joined
    states[2::2] = torch.addcmul(x[2::2], a[2::2].exp(), joined[: (steps - 1) // 2])
    return states
