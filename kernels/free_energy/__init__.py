"""The Free Energy Mixer's read over any prior that can read value streams: `free_energy_read`, and `ValueWindow` for decoding.

The prior is a function from value streams to their reads; what it is, models, layers and configuration stay out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.free_energy.exact import exact_read
from kernels.free_energy.once import OncePerMessage
from kernels.free_energy.streams import MAX_RANGE, SHIFT_BELOW, FreeEnergyGap, ValueStream, compute_type, value_centre_and_range
from kernels.free_energy.window import ValueWindow

__all__ = ["ValueWindow", "free_energy_read"]

_log = logging.getLogger(__name__)
_log.addFilter(OncePerMessage())


def free_energy_read(
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    gate: Tensor | None,
    read: Callable[[Tensor], Tensor],
    log_weights: Callable[[int, int], Tensor],
    *,
    terms: int = 1,
    exact: bool = False,
) -> Tensor:
    """Two-level gated read o = gate * ((1 - lam) * mu + lam * F), with mu and F under the prior p that ``read`` reads with.

    Shapes: v, lam, gate [b, h, t, dv], beta [h, dv] (positive); returns [b, h, t, dv] in v's type. beta None: o = mu. lam None: o = F.
    gate None: no gate. Types: float64, float32 or bfloat16; computed in float32 (float64 for float64).
    read(streams [b, h, t, n]) -> sum_i p_t(i) streams_i [b, h, t, n], in float32 or float64, with sum_i p_t(i) = 1: called once, with
    n = 2 dv ([v | U], see `kernels.free_energy.streams`), or n = dv without beta.
    log_weights(start, stop) -> log p_t(i) of those rows [b, h, stop - start, t], up to a constant a row, -inf where nothing is read;
    called block by block by the exact O(t^2) form, which runs where ``exact``, and, with one warning, where beta * (max v - min v) over the
    sequence passes 80 in a channel (to know that, each call with beta waits for the device). terms: numbers it holds for one weight.
    Raises ValueError for shapes that do not fit. Equations: Free Energy Mixer, the two-level gated read; numerics in kernels/README.md.
    """
    _check(v, beta, lam, gate)
    wide = compute_type(v)
    values = v.to(wide)
    temperature = None if beta is None else beta.to(wide)
    if temperature is None:
        out = exact_read(values, None, log_weights, terms=terms)[0] if exact else read(values)
    else:
        centre, spread = value_centre_and_range(values, temperature)
        if not exact and not (largest := float(spread.max())) <= MAX_RANGE:
            exact = True
            _log.warning(
                "free_energy_read: beta * (max v - min v) reaches %.4g, over %g: the exact form (slower) runs for such calls",
                largest,
                MAX_RANGE,
            )
        if exact:
            mu, free_energy = exact_read(values, temperature, log_weights, terms=terms)
            assert free_energy is not None
            gap = free_energy - mu
        else:
            shifted = spread < SHIFT_BELOW
            rows = temperature[:, None].expand_as(centre)
            mu, z = read(torch.cat((values, ValueStream.apply(values, rows, centre, shifted)), dim=-1)).chunk(2, dim=-1)
            gap = FreeEnergyGap.apply(mu, z, rows, centre, shifted)
        out = mu + (gap if lam is None else lam.to(wide) * gap)
    return (out if gate is None else gate.to(wide) * out).to(v.dtype)


def _check(v: Tensor, beta: Tensor | None, lam: Tensor | None, gate: Tensor | None) -> None:
    if v.dim() != 4 or v.numel() == 0:
        raise ValueError(f"free_energy_read: v has shape {list(v.shape)}, expected [batch, heads, tokens, width], not empty")
    if v.dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"free_energy_read: v is {v.dtype}; use float64, float32 or bfloat16")
    for name, given, shape in (("beta", beta, (v.shape[1], v.shape[3])), ("lam", lam, v.shape), ("gate", gate, v.shape)):
        if given is not None and given.shape != shape:
            raise ValueError(f"free_energy_read: {name} has shape {list(given.shape)}, expected {list(shape)} beside v {list(v.shape)}")
    if lam is not None and beta is None:
        raise ValueError("free_energy_read: lam mixes mu with the free energy, so it needs beta; leave out lam for o = mu")
