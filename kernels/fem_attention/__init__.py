"""The Free Energy Mixer's read over a causal (or full) softmax prior: one public function, `fem_attention`.

Shapes and types are checked here once and the implementation is chosen here and nowhere else; models, layers and configuration stay out.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kernels.fem_attention.fused import fused_attention
from kernels.fem_attention.reference import reference_attention
from kernels.free_energy.once import OncePerMessage
from kernels.free_energy.streams import MAX_RANGE, value_centre_and_range

__all__ = ["fem_attention"]

IMPLEMENTATIONS = ("auto", "fused", "reference")

_log = logging.getLogger(__name__)
_log.addFilter(OncePerMessage())


def fem_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    lam: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    causal: bool = True,
    keys_valid: Tensor | None = None,
    scale: float | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Two-level gated free-energy read o = gate * ((1 - lam) * mu + lam * F), with mu and F under p = softmax(scale * q k^T).

    Shapes: q [b, h, tq, dk], k [b, h, tk, dk], v [b, h, tk, dv], beta [h, dv] (positive), lam and gate [b, h, tq, dv];
    returns [b, h, tq, dv]. The queries are the last tq of the tk positions (decoding: tq < tk).
    keys_valid [b, tk] bool: False at padding, which no query reads but its own. beta None: o = mu. lam None: o = F. gate None: no gate.
    Types: q, k, v all float64, float32 or bfloat16; beta, lam, gate the same, or float32 beside bfloat16. The result has q's type.
    implementation: "reference" is exact for any finite values. "fused" (today also "auto") is torch's attention on [v | U], right while
    beta * (max v - min v) over the sequence is at most 80 in every channel. Beyond that, or with values that are not finite, the
    reference runs for that call and a warning says so, once; to know it, each call with beta waits for the device.
    Which implementation runs is logged once (level INFO). Raises ValueError for shapes, types or names that do not fit.
    Equations: Free Energy Mixer, the two-level gated read; numerics in kernels/README.md.
    """
    _check(q, k, v, beta, lam, gate, implementation)
    _check_keys_valid(keys_valid, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if implementation == "reference":
        _log.info("fem_attention: the reference implementation runs (asked for)")
        return reference_attention(q, k, v, beta, lam, gate, keys_valid, causal=causal, scale=scale)
    centre, spread = (None, None) if beta is None else value_centre_and_range(v, beta)
    if spread is not None and not (largest := float(spread.max())) <= MAX_RANGE:
        _log.warning(
            "fem_attention: beta * (max v - min v) reaches %.4g, over %g: the exact reference (slower) runs for such calls",
            largest,
            MAX_RANGE,
        )
        return reference_attention(q, k, v, beta, lam, gate, keys_valid, causal=causal, scale=scale)
    _log.info("fem_attention: the fused implementation runs (torch scaled_dot_product_attention on [v | U])")
    return fused_attention(q, k, v, beta, lam, gate, centre, spread, keys_valid, causal=causal, scale=scale)


def _check(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, lam: Tensor | None, gate: Tensor | None, implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"fem_attention: implementation {implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"fem_attention: {name} has shape {list(tensor.shape)}, expected 4 dimensions [batch, heads, tokens, width]")
    b, h, tq, dk = q.shape
    tk, dv = v.shape[2:]
    expected = {
        "k": (k, (b, h, tk, dk)),
        "v": (v, (b, h, tk, dv)),
        "beta": (beta, (h, dv)),
        "lam": (lam, (b, h, tq, dv)),
        "gate": (gate, (b, h, tq, dv)),
    }
    for name, (given, shape) in expected.items():
        if given is not None and given.shape != shape:
            raise ValueError(
                f"fem_attention: {name} has shape {list(given.shape)}, expected {list(shape)} beside q {list(q.shape)}, v {list(v.shape)}"
            )
    if lam is not None and beta is None:
        raise ValueError("fem_attention: lam mixes mu with the free energy, so it needs beta; leave out lam for o = mu")
    if min(b, h, tq, dk, dv) < 1:
        raise ValueError(f"fem_attention: empty dimension in q {list(q.shape)} or v {list(v.shape)}")
    if tq > tk:
        raise ValueError(f"fem_attention: {tq} queries but {tk} keys; queries are the last positions of the keys, so tq <= tk")
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"fem_attention: q is {q.dtype}; use float64, float32 or bfloat16")
    for name, given, others in (
        ("k", k, ()),
        ("v", v, ()),
        ("beta", beta, (torch.float32,)),
        ("lam", lam, (torch.float32,)),
        ("gate", gate, (torch.float32,)),
    ):
        allowed = (q.dtype, *others) if q.dtype == torch.bfloat16 else (q.dtype,)
        if given is not None and given.dtype not in allowed:
            raise ValueError(f"fem_attention: {name} is {given.dtype} but q is {q.dtype}; use {' or '.join(map(str, allowed))}")
        if given is not None and given.device != q.device:
            raise ValueError(f"fem_attention: {name} is on {given.device} but q is on {q.device}")


def _check_keys_valid(keys_valid: Tensor | None, k: Tensor) -> None:
    wanted = (k.shape[0], k.shape[2])
    if keys_valid is not None and (keys_valid.shape != wanted or keys_valid.dtype != torch.bool):
        raise ValueError(f"fem_attention: keys_valid is {keys_valid.dtype} {list(keys_valid.shape)}, expected bool {list(wanted)}")
