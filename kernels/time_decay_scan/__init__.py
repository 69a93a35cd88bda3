"""The time-decay scan of FEM's conditioner: one public function, `time_decay_scan`. Projections, norms and gates stay with the layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.time_decay_scan.reference import TimeDecayScan

__all__ = ["time_decay_scan"]


def time_decay_scan(a: Tensor, x: Tensor, initial: Tensor | None = None) -> Tensor:
    """First-order scan s_t = exp(a_t) s_{t-1} + x_t along the first dimension, with s_{-1} = initial (zero when None).

    Shapes: a and x [t, ...] alike, initial [...] (the state before step 0; in decoding, the last state so far). Returns s [t, ...].
    a <= 0 is the caller's promise (a log-decay; -inf, a full reset, is allowed) and is not checked, since that would wait for the device.
    Types: all float64, float32 or bfloat16; bfloat16 is computed in float32 and rounded at the end.
    Raises ValueError for shapes, types or devices that do not fit. Equation: Free Energy Mixer, the time-decay conditioner.
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
    for name, given in (("a", a), ("initial", initial)):
        if given is not None and (given.dtype, given.device) != (x.dtype, x.device):
            raise ValueError(f"time_decay_scan: {name} is {given.dtype} on {given.device} but x is {x.dtype} on {x.device}")
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return TimeDecayScan.apply(a.to(compute), x.to(compute), None if initial is None else initial.to(compute)).to(x.dtype)
