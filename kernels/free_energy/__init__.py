"""The Free Energy Mixer's read over any prior that can read value streams: `free_energy_read`, and `ValueWindow` for decoding.

The prior is a function from value streams to their reads; what it is, models, layers and configuration stay out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.arguments import check_first, check_others, check_read
from kernels.free_energy.streams import (
    MAX_RANGE,
    SHIFT_BELOW,
    FreeEnergyGap,
    ValueStream,
    ValueWindow,
    compute_type,
    exact_read,
    value_centre_and_range,
)
from kernels.implementations import Implementation, Op, lacks_triton

__all__ = ["OP", "ValueWindow", "free_energy_read"]

OP = Op(
    "free_energy",
    "FEM's gated read over any prior that reads value streams; the prior's own operation chooses for itself",
    (
        Implementation("triton", "prep and epilogue in one pass each", lacks_triton),
        Implementation("reference", "prep and epilogue in PyTorch"),
    ),
)


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
    implementation: str = "auto",
) -> Tensor:
    """Two-level gated read o = gate * ((1 - lam) * mu + lam * F), with mu and F under the prior p that ``read`` reads with.

    Shapes: v, lam, gate [b, h, t, dv], beta [h, dv] (positive); returns [b, h, t, dv] in v's type. beta None: o = mu. lam None: o = F.
    gate None: no gate. Types: float64, float32 or bfloat16; computed in float32 (float64 for float64).
    read(streams [b, h, t, n]) -> sum_i p_t(i) streams_i [b, h, t, n], in float32 or float64, with sum_i p_t(i) = 1: called once, with
    n = 2 dv ([v | U], see `kernels.free_energy.streams`), or n = dv without beta.
    log_weights(start, stop) -> log p_t(i) of those rows [b, h, stop - start, t], up to a constant a row, -inf where nothing is read;
    called block by block by the exact O(t^2) form, which runs where ``exact``, and, with one warning, where beta * (max v - min v) over the
    sequence passes 80 in a channel (to know that, each call with beta waits for the device, a GPU too: what lies beyond cannot be had
    from [v | U]). terms: numbers it holds for one weight. implementation: one of OP's names; what comes before and after ``read``.
    Raises ValueError for shapes and implementations that do not fit.
    Equations: Free Energy Mixer, the two-level gated read; numerics in kernels/README.md.
    """
    check_first("free_energy_read", "v", v)
    expected = {"beta": (beta, (v.shape[1], v.shape[3])), "lam": (lam, v.shape), "gate": (gate, v.shape)}
    check_others("free_energy_read", "v", v, expected)
    check_read("free_energy_read", beta, lam)
    chosen = OP.choose(implementation, v.device, {"triton": "float64" if v.dtype == torch.float64 else None})
    wide = compute_type(v)
    values = v.to(wide)
    if beta is None:
        out = exact_read(values, None, log_weights, terms=terms)[0] if exact else read(values)
        return (out if gate is None else gate.to(wide) * out).to(v.dtype)
    temperature = beta.to(wide)
    if not exact:
        fast = _triton_read if chosen == "triton" else _read
        mixed, largest = fast(values, temperature, lam, gate, read)
        if mixed is not None:
            return mixed.to(v.dtype)
        OP.log.warning(
            "free_energy_read: beta * (max v - min v) reaches %.4g, over %g: the exact form (slower) runs for such calls",
            largest,
            MAX_RANGE,
        )
    mu, free_energy = exact_read(values, temperature, log_weights, terms=terms)
    assert free_energy is not None
    return _mixed(mu, free_energy - mu, lam, gate).to(v.dtype)


def _read(
    v: Tensor, beta: Tensor, lam: Tensor | None, gate: Tensor | None, read: Callable[[Tensor], Tensor]
) -> tuple[Tensor | None, float]:
    """(o, the largest beta * range), o None where that passes MAX_RANGE; v and beta in the type of sums."""
    centre, spread = value_centre_and_range(v, beta)
    if not (largest := float(spread.max())) <= MAX_RANGE:
        return None, largest
    shifted = spread < SHIFT_BELOW
    rows = beta[:, None].expand_as(centre)
    mu, z = read(torch.cat((v, ValueStream.apply(v, rows, centre, shifted)), dim=-1)).chunk(2, dim=-1)
    return _mixed(mu, FreeEnergyGap.apply(mu, z, rows, centre, shifted), lam, gate), largest


def _triton_read(
    v: Tensor, beta: Tensor, lam: Tensor | None, gate: Tensor | None, read: Callable[[Tensor], Tensor]
) -> tuple[Tensor | None, float]:
    """The same by the kernels that `fem_attention` has around its engines."""
    from kernels.fem_attention.triton.epilogue import GatedRead
    from kernels.fem_attention.triton.prep import ValueStreams, value_constants

    constants = value_constants(v, beta)
    if not (largest := float(constants.largest.max())) <= MAX_RANGE:
        return None, largest
    reads = read(ValueStreams.apply(v, beta, constants.centre, constants.shifted))
    return GatedRead.apply(reads, beta, constants.centre, constants.shifted, constants.wild, lam, gate), largest


def _mixed(mu: Tensor, gap: Tensor, lam: Tensor | None, gate: Tensor | None) -> Tensor:
    out = mu + (gap if lam is None else lam.to(gap.dtype) * gap)
    return out if gate is None else gate.to(out.dtype) * out
