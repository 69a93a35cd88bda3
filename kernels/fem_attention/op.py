"""Free Energy Mixer read over a causal (or full) softmax prior: one public function,
`fem_attention`.

This module checks shapes and dtypes once and is the only place that chooses the implementation. It
does not depend on models, layers and configuration.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.arguments import check_first, check_others, check_read, operation
from kernels.fem_attention.accelerated import Choice, accelerated_attention, fused_attention
from kernels.fem_attention.engines import ENGINES, Call
from kernels.fem_attention.reference import Reading, Tensors, reference_attention
from kernels.fem_attention.table import order
from kernels.free_energy.op import value_centre_and_range
from kernels.free_energy.ranges import MAX_RANGE
from kernels.implementations import Implementation, Op, lacks_triton
from kernels.machine import cudnn_attention
from kernels.pairs import document_bounds
from kernels.registered import registered

DECODED = 16  # most queries of a call for which the decoding kernel is used

OP = Op(
    "fem_attention",
    "Free Energy Mixer's gated read over a softmax prior",
    (
        *(
            Implementation(
                engine.name, f"Triton prep and epilogue around {engine.what}", engine.lacks
            )
            for engine in ENGINES.values()
        ),
        Implementation(
            "decode",
            "a few queries over a long past, its keys split over the device, without gradients",
            lacks_triton,
        ),
        Implementation(
            "fused", "torch's scaled_dot_product_attention on [v | U], prep and epilogue in torch"
        ),
        Implementation("reference", "the definition, block by block, exact for any finite values"),
    ),
)


def _traceable(q: Tensor, *_: Any, **__: Any) -> bool:
    """Return True for a decoding step, which runs the definition and needs no range."""
    return q.shape[2] == 1 and not torch.is_grad_enabled()


@operation("q")
@registered(lambda q, k, v, *_, **__: q.new_empty(*q.shape[:3], v.shape[3]), _traceable)
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
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Return the two-level gated free-energy read o = gate * ((1 - lam) * mu + lam * F).

    mu and F are taken under p = softmax(scale * q k^T).

    Shapes: q [b, h, tq, dk], k [b, hk, tk, dk], v [b, hk, tk, dv], beta [hk, dv] (positive), lam
    and gate [b, h, tq, dv]; returns [b, h, tq, dv]. hk divides h, and query head n reads kv head
    n // (h // hk). The queries are the last tq of the tk positions (decoding: tq < tk). beta None:
    o = mu. lam None: o = F. gate None: no gate. keys_valid [b, tk] bool: False at padding; only the
    query at its own position reads such a key. cu_seqlens [n + 1], int32 or int64: the start of
    each of n documents, beginning with 0, followed by the token count. No document reads another
    (b = 1 and tq = tk; the numbers are not checked).
    Dtypes: q, k, v all float64, float32, bfloat16 or float16; beta, lam, gate the same, or float32
    with bfloat16. The result has q's dtype.

    implementation: one of OP's names.
    - "reference" is exact for any finite values.
    - "fused" is torch's attention on [v | U], and "auto" takes it on a CPU. It is correct while
      beta * (max v - min v) over the sequence is at most 80 in every channel. Beyond 80, or with
      values that are not finite, the reference runs for that call, with one warning. Each call with
      beta waits for the device to find the range.
    - The names of engines run prep and epilogue in Triton around that engine's attention. A block
      of 16 channels with one channel beyond 80 is read exactly, the other blocks are not slowed,
      and no call waits.
    - "auto" on a GPU takes the engine that table.json measured as fastest at the nearest shape, or
      "decode"; on a CPU it takes "reference" for one query without gradients.

    The chosen implementation is logged once (level INFO).
    Raises ValueError for shapes, dtypes or names that do not fit.
    Equations: Free Energy Mixer, the two-level gated read; numerics in kernels/README.md.
    """
    x = Tensors(q, k, v, beta, lam, gate)
    _check(x, keys_valid, cu_seqlens)
    bounds = None if cu_seqlens is None else document_bounds(cu_seqlens, k.shape[2])
    reading = Reading(
        causal, q.shape[-1] ** -0.5 if scale is None else scale, keys_valid, cu_seqlens, bounds
    )
    call = _call(x, reading)
    # For one query, the exact form costs no more than the fused one, and needs no range.
    last = ("reference", "fused") if call.tq == 1 and not call.trains else ("fused", "reference")

    def unfit(name: str) -> str | None:
        return (
            _unfit(name, call, torch.get_deterministic_debug_mode())
            if name == "decode" or name in ENGINES
            else None
        )

    # torch.compile cannot trace reading a file.
    engines = ENGINES if torch.compiler.is_compiling() else order(call)
    chosen = _in_order(("decode", *engines, *last)).choose(implementation, q.device, unfit)
    if chosen == "decode":
        from kernels.fem_attention.triton.decode import decode

        out: Tensor = decode(*x, causal=causal, scale=reading.scale, keys_valid=keys_valid)
        return out
    if chosen in ENGINES:
        return accelerated_attention(x, reading, Choice(chosen, call, OP.log))
    if chosen == "fused":
        centre, spread = (None, None) if beta is None else value_centre_and_range(v, beta)
        if spread is None or (largest := float(spread.max())) <= MAX_RANGE:
            return fused_attention(x, centre, spread, reading)
        OP.log.warning(
            "fem_attention: beta * (max v - min v) reaches %.4g, over %g: the exact reference "
            "(slower) runs for such calls",
            largest,
            MAX_RANGE,
        )
    return reference_attention(x, reading)


def _call(x: Tensors, reading: Reading) -> Call:
    (b, h, tq, dk), (hk, tk, dv) = x.q.shape, x.v.shape[1:]
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
    values, given = (
        dv if x.beta is None else 2 * dv,
        (reading.keys_valid is not None, reading.cu_seqlens is not None),
    )
    return Call(
        x.q.device,
        x.q.dtype,
        b,
        h,
        hk,
        tq,
        tk,
        dk,
        values,
        reading.causal,
        reading.scale >= 0,
        *given,
        trains,
        cudnn_attention(),
    )


@functools.lru_cache(maxsize=64)
def _in_order(names: tuple[str, ...]) -> Op:
    """Return OP with its implementations in the order in which they are tried."""
    by_name = {implementation.name: implementation for implementation in OP.implementations}
    return replace(OP, implementations=tuple(by_name[name] for name in names))


@functools.lru_cache(maxsize=4096)
def _unfit(name: str, call: Call, deterministic: int) -> str | None:
    """Return why an engine, or "decode", does not take a call, or None.

    deterministic: torch's mode, in which some engines are not available.
    """
    if name in ENGINES:
        return ENGINES[name].unfit(call)
    if call.trains:
        return "gradients"
    if call.tq > DECODED:
        return f"{call.tq} queries"
    return "documents" if call.documents else ENGINES["triton"].unfit(call)


def _check(x: Tensors, keys_valid: Tensor | None, cu_seqlens: Tensor | None) -> None:
    q, k, v, beta, lam, gate = x
    check_first("fem_attention", "q", q)
    check_first("fem_attention", "v", v)
    (b, h, tq, dk), (hk, tk, dv) = q.shape, v.shape[1:]
    if h % hk:
        raise ValueError(f"fem_attention: {h} query heads are not a multiple of v's {hk} heads")
    gates = (q.dtype, torch.float32) if q.dtype == torch.bfloat16 else (q.dtype,)
    expected: dict[str, Any] = {
        "k": (k, (b, hk, tk, dk), q.dtype),
        "v": (v, (b, hk, tk, dv), q.dtype),
        "beta": (beta, (hk, dv), *gates),
    }
    expected |= {"lam": (lam, (b, h, tq, dv), *gates), "gate": (gate, (b, h, tq, dv), *gates)}
    check_others(
        "fem_attention", "q", q, expected | {"keys_valid": (keys_valid, (b, tk), torch.bool)}
    )
    check_read("fem_attention", beta, lam)
    if tq > tk:
        raise ValueError(
            f"fem_attention: {tq} queries but {tk} keys; queries are the last positions of the "
            "keys, so tq <= tk"
        )
    if cu_seqlens is None:
        return
    count = max(2, *cu_seqlens.shape) if cu_seqlens.dim() == 1 else 2
    check_others(
        "fem_attention", "q", q, {"cu_seqlens": (cu_seqlens, (count,), torch.int32, torch.int64)}
    )
    if b != 1 or tq != tk:
        raise ValueError(
            f"fem_attention: cu_seqlens needs a batch of 1 and as many queries as keys, not {b}, "
            f"{tq} and {tk}"
        )
