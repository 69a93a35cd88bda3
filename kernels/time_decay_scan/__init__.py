"""The time-decay scan of FEM's conditioner: one public function, `time_decay_scan`. Projections, norms and gates stay with the layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.implementations import Implementation, Op, lacks_triton
from kernels.time_decay_scan.reference import TimeDecayScan

__all__ = ["OP", "time_decay_scan"]

OP = Op(
    "time_decay_scan",
    "s_t = exp(a_t) s_{t-1} + x_t, the scan of FEM's conditioner",
    (
        Implementation("triton", "segments and chunks by associative scans, forward and backward", lacks_triton),
        Implementation("reference", "pairs of steps joined, log2(t) rounds"),
    ),
)


def time_decay_scan(a: Tensor, x: Tensor, initial: Tensor | None = None, *, softplus: bool = False, implementation: str = "auto") -> Tensor:
    """First-order scan s_t = exp(a_t) s_{t-1} + x_t along the first dimension, with s_{-1} = initial (zero when None).

    Shapes: a and x [t, ...] alike, with any strides, initial [...] (the state before step 0; in decoding, the last state so far).
    Returns s [t, ...]. a <= 0 is the caller's promise (a log-decay; -inf, a full reset, is allowed) and is not checked, since that would
    wait for the device. softplus True: a holds logits, the log-decays are -softplus(a), and the step a logit of -inf keeps the state.
    Types: a and x float64, float32 or bfloat16; bfloat16 is computed in float32. s and initial are of x's type; with softplus they are
    float32 where x is bfloat16.
    implementation: "triton", "reference" or "auto", the fastest that this call allows.
    Raises ValueError for shapes, types or devices that do not fit, and for an implementation that cannot run.
    Equation: Free Energy Mixer, the time-decay conditioner.
    """
    if x.dim() < 1 or a.shape != x.shape or x.numel() == 0:
        raise ValueError(
            f"time_decay_scan: a has shape {list(a.shape)} and x {list(x.shape)}; both must be the same, [t, ...], and not empty"
        )
    if initial is not None and initial.shape != x.shape[1:]:
        raise ValueError(
            f"time_decay_scan: initial has shape {list(initial.shape)}, expected {list(x.shape[1:])}, one step of x {list(x.shape)}"
        )
    if x.dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"time_decay_scan: x is {x.dtype}; use float64, float32 or bfloat16")
    compute = torch.promote_types(x.dtype, torch.float32)
    made = compute if softplus else x.dtype
    for name, given, dtype in (("a", a, x.dtype), ("initial", initial, made)):
        if given is not None and (given.dtype, given.device) != (dtype, x.device):
            raise ValueError(f"time_decay_scan: {name} is {given.dtype} on {given.device}, expected {dtype} on {x.device}, x is {x.dtype}")
    start = None if initial is None else initial.to(compute)
    if OP.choose(implementation, x.device, {"triton": "float64" if compute == torch.float64 else None}) == "triton":
        from kernels.time_decay_scan.triton import scan

        return scan(a, x, start, softplus).to(made)
    decay = -torch.nn.functional.softplus(a.to(compute)) if softplus else a.to(compute)
    return TimeDecayScan.apply(decay, x.to(compute), start).to(made)
