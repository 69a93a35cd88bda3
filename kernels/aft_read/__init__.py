"""The free-energy read under AFT's prior, p_t(i) ~ exp(k_i) for each channel: one public function, `aft_read`. Layers stay out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.aft_read.reference import mix, read_all, read_past
from kernels.arguments import check_first, check_others, check_read
from kernels.implementations import Implementation, Op, lacks_triton

__all__ = ["OP", "aft_read"]

OP = Op(
    "aft_read",
    "FEM's read under p ~ exp(k_i) for each channel, with a state",
    (
        Implementation("triton", "scans over segments and chunks with running maxima, all fused, forward and backward", lacks_triton),
        Implementation("reference", "the same scans in PyTorch"),
    ),
)


def aft_read(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    lam: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    query: Tensor | None = None,
    valid: Tensor | None = None,
    state: Tensor | None = None,
    causal: bool = True,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Read o = gate * ((1 - lam) mu + lam F) under p_t(i) = exp(k_i) / sum_{i' <= t} exp(k_i'), a distribution for each channel.

        mu_t = sum_i p_t(i) v_i          F_t = (1/beta) log sum_i p_t(i) exp(beta v_i)

    Shapes: v, lam, gate [b, h, t, d]; k [b, h, t, d], or [b, h, t, 2 d] where F has logits of its own, the second half (the released
    code; mu <= F then no longer holds); beta [h, d], positive. query, like k and positive: multiplies both sums before the log
    (mu -> query mu, F -> F + log(query) / beta; its second half for F). valid [b, t] bool: False at tokens that nobody reads, whose own
    o is finite and means nothing. beta None: o = mu. lam None: o = F. gate None: no gate. causal False: i runs over all tokens.
    state: what a previous call returned, None at the start; no gradient goes through it. Returns (o [b, h, t, d] in v's type, state
    [b, h, rows, d] in float32 or float64: running maxima and sums relative to them; 3 rows, 5 with beta, 7 where F has logits of its
    own; None where causal is False).
    Types: k, v both float64, float32 or bfloat16, the others the same or float32; sums are float32 or float64.
    Any finite k and v: every sum has its own running maximum over the past; F rounds at eps max |k + beta v| / beta. Cost O(t d), memory
    linear in t. An output does not move by a bit when later tokens change.
    implementation: "triton", "reference" or "auto", the fastest that this call allows.
    Raises ValueError for shapes and types that do not fit, and for an implementation that cannot run.
    Equations: Free Energy Mixer, the LRNN-softmax prior and the two-level gated read.
    """
    check_first("aft_read", "v", v, "[batch, heads, tokens, channels]")
    (b, h, t, d), rows = v.shape, 3 if beta is None else 5 if k.shape == v.shape else 7
    expected: dict[str, Any] = {"k": (k, [v.shape, (b, h, t, 2 * d)], v.dtype), "beta": (beta, (h, d)), "lam": (lam, v.shape)}
    expected |= {"gate": (gate, v.shape), "query": (query, k.shape), "valid": (valid, (b, t)), "state": (state, (b, h, rows, d))}
    check_others("aft_read", "v", v, expected)
    check_read("aft_read", beta, lam, state, causal)
    compute = torch.promote_types(v.dtype, torch.float32)
    if OP.choose(implementation, v.device, {"triton": _unfit(k, v, causal)}) == "triton":
        from kernels.aft_read.triton import fused_past

        wide = None if beta is None else beta.to(compute)
        return fused_past(k, v, wide, lam, gate, query, valid, None if state is None else state.detach().to(compute))
    logits, values = k.to(compute), v.to(compute)
    mask = None if valid is None else valid[:, None, :, None]
    temperature = None if beta is None else beta.to(compute)[:, None]
    if causal:
        mu, free_energy, after = read_past(logits, values, temperature, mask, state)
    else:
        mu, free_energy, after = *read_all(logits, values, temperature, mask), None
    if query is not None:
        factors = query.to(compute).split(v.shape[-1], dim=-1)
        mu = factors[0] * mu
        if free_energy is not None:
            assert temperature is not None
            free_energy = free_energy + factors[-1].log() / temperature
    return mix(mu, free_energy, lam, gate).to(v.dtype), after


def _unfit(k: Tensor, v: Tensor, causal: bool) -> str | None:
    """Why the kernels do not read this call."""
    if v.dtype == torch.float64:
        return "float64"
    if k.shape != v.shape:
        return "the free energy has logits of its own"
    return None if causal else "all tokens read all"
