"""Time-decay scan of FEM's conditioner. One public function: `time_decay_scan`. Projections, norms
and gates belong to the layer.

The definition runs in plain PyTorch on any device: chunks of 16 steps are scanned side by side, one
step after another; the states at their ends are scanned in the same way; each state then adds what
its chunk began with. That takes about 16 operations for each factor of 16 in the length. It works
in float64, so that products of many decays near 1 keep their digits. A state is computed from its
own past alone: it is bitwise independent of later steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.arguments import check_first, check_others, operation
from kernels.implementations import Implementation, Op, lacks_triton
from kernels.registered import registered

CHUNK = 16  # steps of the definition's chunks

OP = Op(
    "time_decay_scan",
    "s_t = exp(a_t) s_{t-1} + x_t, the scan of FEM's conditioner",
    (
        Implementation(
            "triton", "segments and chunks by associative scans, forward and backward", lacks_triton
        ),
        Implementation("reference", "chunks of 16 steps, log16(t) rounds"),
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
    logit -inf keeps the state. Types: a and x float64, float32, bfloat16 or float16. s and initial
    have x's type; with softplus they are float32 if x is bfloat16 or float16. "triton" computes in
    float32. implementation: "triton", "reference" or "auto", the fastest that supports this call.
    Raises ValueError for shapes, types or devices that do not fit, and for an implementation that
    cannot run. Equation: Free Energy Mixer, the time-decay conditioner.
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
        decay, wide = a.double().exp(), x.double()
        if initial is not None:
            wide = torch.cat((torch.addcmul(wide[:1], decay[:1], initial.double()), wide[1:]))
        states = _scan(decay, wide).to(x.dtype)
        ctx.save_for_backward(a, states, initial)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        a, states, initial = ctx.saved_tensors
        (d_states,) = grads
        decay = a.double().exp()
        # A step's factor is the next step's decay; the last step has none.
        dx = _scan(decay.roll(-1, 0).flip(0), d_states.double().flip(0)).flip(0)
        through = (dx * decay).to(a.dtype)
        first = torch.zeros_like(states[0]) if initial is None else initial
        da = through * torch.cat((first[None], states[:-1]))
        return da, dx.to(a.dtype), None if initial is None else through[0]


def _scan(decay: Tensor, x: Tensor) -> Tensor:
    """Return s_t = decay_t s_{t-1} + x_t with s_{-1} = 0, all float64 [t, ...]; decay_0 has no
    effect.
    """
    steps, size = x.shape[0], min(x.shape[0], CHUNK)
    if missing := -steps % size:
        decay, x = (torch.cat((t, t.new_zeros(missing, *t.shape[1:]))) for t in (decay, x))
    decay = decay.reshape(-1, size, *x.shape[1:])
    states = x.reshape(decay.shape).clone()
    each, factors = states.unbind(1), decay.unbind(1)
    for n in range(1, size):
        each[n].addcmul_(factors[n], each[n - 1])
    if len(states) > 1:
        since = decay.cumprod(1)
        ends = _scan(since[:, -1], states[:, -1])
        states[1:].addcmul_(since[1:], ends[:-1, None])
    return states.flatten(0, 1)[:steps]
