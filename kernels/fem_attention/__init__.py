"""The Free Energy Mixer's read over a causal (or full) softmax prior: one public function, `fem_attention`.

Shapes and types are checked here once and the implementation is chosen here and nowhere else; models, layers and configuration stay out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kernels.fem_attention.accelerated import Choice, accelerated_attention, fused_attention
from kernels.fem_attention.engines import ENGINES, Call
from kernels.fem_attention.reference import Reading, Tensors, reference_attention
from kernels.fem_attention.table import order
from kernels.free_energy.streams import MAX_RANGE, value_centre_and_range
from kernels.implementations import Implementation, Op, lacks_triton
from kernels.pairs import document_bounds

__all__ = ["OP", "fem_attention"]

DECODED = 16  # queries at once, at most, that the decoding kernel is for

OP = Op(
    "fem_attention",
    "Free Energy Mixer's gated read over a softmax prior",
    (
        *(Implementation(engine.name, f"Triton prep and epilogue around {engine.what}", engine.lacks) for engine in ENGINES.values()),
        Implementation("decode", "a few queries over a long past, its keys split over the device, without gradients", lacks_triton),
        Implementation("fused", "torch's scaled_dot_product_attention on [v | U], prep and epilogue in torch"),
        Implementation("reference", "the definition, block by block, exact for any finite values"),
    ),
)


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
    """Two-level gated free-energy read o = gate * ((1 - lam) * mu + lam * F), with mu and F under p = softmax(scale * q k^T).

    Shapes: q [b, h, tq, dk], k [b, hk, tk, dk], v [b, hk, tk, dv], beta [hk, dv] (positive), lam and gate [b, h, tq, dv];
    returns [b, h, tq, dv]. hk divides h, and query head n reads kv head n // (h // hk). The queries are the last tq of the tk positions
    (decoding: tq < tk). beta None: o = mu. lam None: o = F. gate None: no gate.
    keys_valid [b, tk] bool: False at padding, which no query reads but its own. cu_seqlens [n + 1], int32 or int64: where each of n
    documents begins, from 0, and in the end the token count; no document reads another (b = 1 and tq = tk; its numbers are not checked).
    Types: q, k, v all float64, float32 or bfloat16; beta, lam, gate the same, or float32 beside bfloat16. The result has q's type.
    implementation: one of OP's names. "reference" is exact for any finite values. "fused" (what "auto" takes on a CPU) is torch's attention
    on [v | U], right while beta * (max v - min v) over the sequence is at most 80 in every channel; beyond that, or with values that are
    not finite, the reference runs for that call and a warning says so, once; to know it, each call with beta waits for the device. The
    engines' names: prep and epilogue in Triton around that engine's attention; a head beyond 80 is read exactly, the others are not slowed,
    and nothing waits. On a GPU "auto" takes the engine that table.json measured fastest at the nearest shape, or "decode"; on a CPU it
    takes "reference" for one query without gradients.
    Which implementation runs is logged once (level INFO). Raises ValueError for shapes, types or names that do not fit.
    Equations: Free Energy Mixer, the two-level gated read; numerics in kernels/README.md.
    """
    x = Tensors(q, k, v, beta, lam, gate)
    _check(x)
    _check_keys(keys_valid, cu_seqlens, q, k)
    bounds = None if cu_seqlens is None else document_bounds(cu_seqlens, k.shape[2])
    reading = Reading(causal, q.shape[-1] ** -0.5 if scale is None else scale, keys_valid, cu_seqlens, bounds)
    call = _call(x, reading)
    # One query: the exact form costs no more than the fused one, and asks nothing of the range.
    last = ("reference", "fused") if call.tq == 1 and not call.trains else ("fused", "reference")
    chosen = _in_order(("decode", *order(call), *last)).choose(implementation, q.device, _Unfit(call))
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
            "fem_attention: beta * (max v - min v) reaches %.4g, over %g: the exact reference (slower) runs for such calls",
            largest,
            MAX_RANGE,
        )
    return reference_attention(x, reading)


def _call(x: Tensors, reading: Reading) -> Call:
    (b, h, tq, dk), (hk, tk, dv) = x.q.shape, x.v.shape[1:]
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
    values, given = dv if x.beta is None else 2 * dv, (reading.keys_valid is not None, reading.cu_seqlens is not None)
    return Call(x.q.device, x.q.dtype, b, h, hk, tq, tk, dk, values, reading.causal, reading.scale >= 0, *given, trains)


@functools.lru_cache(maxsize=64)
def _in_order(names: tuple[str, ...]) -> Op:
    """OP with its implementations in the order in which a call's shape tries them."""
    by_name = {implementation.name: implementation for implementation in OP.implementations}
    return replace(OP, implementations=tuple(by_name[name] for name in names))


class _Unfit(Mapping[str, "str | None"]):
    """Implementation -> why it does not take a call, or None; found out only for those that are asked about."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __getitem__(self, name: str) -> str | None:
        if name not in self:
            return None
        # Under use_deterministic_algorithms some engines step aside.
        return _unfit(name, self._call, torch.get_deterministic_debug_mode())

    def __contains__(self, name: object) -> bool:
        return name == "decode" or name in ENGINES

    def __iter__(self) -> Iterator[str]:
        return iter(("decode", *ENGINES))

    def __len__(self) -> int:
        return 1 + len(ENGINES)


@functools.lru_cache(maxsize=4096)
def _unfit(name: str, call: Call, deterministic: int) -> str | None:
    if name in ENGINES:
        return ENGINES[name].unfit(call)
    if call.trains:
        return "gradients"
    if call.tq > DECODED:
        return f"{call.tq} queries"
    return "documents" if call.documents else ENGINES["triton"].unfit(call)


def _check(x: Tensors) -> None:
    q, k, v, beta, lam, gate = x
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"fem_attention: {name} has shape {list(tensor.shape)}, expected 4 dimensions [batch, heads, tokens, width]")
    b, h, tq, dk = q.shape
    hk, tk, dv = v.shape[1:]
    if min(b, h, hk, tq, dk, dv) < 1:
        raise ValueError(f"fem_attention: empty dimension in q {list(q.shape)} or v {list(v.shape)}")
    if h % hk:
        raise ValueError(f"fem_attention: {h} query heads are not a multiple of v's {hk} heads")
    expected = {
        "k": (k, (b, hk, tk, dk)),
        "v": (v, (b, hk, tk, dv)),
        "beta": (beta, (hk, dv)),
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
    if tq > tk:
        raise ValueError(f"fem_attention: {tq} queries but {tk} keys; queries are the last positions of the keys, so tq <= tk")
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"fem_attention: q is {q.dtype}; use float64, float32 or bfloat16")
    for name, (given, _) in expected.items():
        wide = (torch.float32,) if q.dtype == torch.bfloat16 and name in ("beta", "lam", "gate") else ()
        if given is not None and given.dtype not in (q.dtype, *wide):
            raise ValueError(f"fem_attention: {name} is {given.dtype} but q is {q.dtype}; use {' or '.join(map(str, (q.dtype, *wide)))}")
        if given is not None and given.device != q.device:
            raise ValueError(f"fem_attention: {name} is on {given.device} but q is on {q.device}")


def _check_keys(keys_valid: Tensor | None, cu_seqlens: Tensor | None, q: Tensor, k: Tensor) -> None:
    wanted = (k.shape[0], k.shape[2])
    if keys_valid is not None and (keys_valid.shape != wanted or keys_valid.dtype != torch.bool):
        raise ValueError(f"fem_attention: keys_valid is {keys_valid.dtype} {list(keys_valid.shape)}, expected bool {list(wanted)}")
    if cu_seqlens is None:
        return
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"fem_attention: cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}, expected int32 or int64 [documents + 1]"
        )
    if q.shape[0] != 1 or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"fem_attention: cu_seqlens needs a batch of 1 and as many queries as keys, not {q.shape[0]}, {q.shape[2]} and {k.shape[2]}"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"fem_attention: cu_seqlens is on {cu_seqlens.device} but q is on {q.device}")
