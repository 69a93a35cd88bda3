"""The free-energy read under AFT's prior, p_t(i) ~ exp(k_i) for each channel: one public function, `aft_read`. Layers stay out."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.aft_read.reference import mix, read_all, read_past
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
    _check(k, v, beta, lam, gate, query, valid, state, causal)
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


def _check(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    gate: Tensor | None,
    query: Tensor | None,
    valid: Tensor | None,
    state: Tensor | None,
    causal: bool,
) -> None:
    if v.dim() != 4 or v.numel() == 0:
        raise ValueError(f"aft_read: v has shape {list(v.shape)}, expected [batch, heads, tokens, channels], none of them 0")
    b, h, t, d = v.shape
    wide = k.shape == (b, h, t, 2 * d)
    if not wide and k.shape != v.shape:
        raise ValueError(f"aft_read: k has shape {list(k.shape)}, expected {[b, h, t, d]} or {[b, h, t, 2 * d]} beside v")
    rows = 3 if beta is None else 7 if wide else 5
    expected = {
        "beta": (beta, (h, d)),
        "lam": (lam, v.shape),
        "gate": (gate, v.shape),
        "query": (query, k.shape),
        "valid": (valid, (b, t)),
        "state": (state, (b, h, rows, d)),
    }
    for name, (given, shape) in expected.items():
        if given is not None and given.shape != shape:
            raise ValueError(f"aft_read: {name} has shape {list(given.shape)}, expected {list(shape)} beside v {list(v.shape)}")
    if lam is not None and beta is None:
        raise ValueError("aft_read: lam mixes mu with the free energy, so it needs beta; leave out lam for o = mu")
    if state is not None and not causal:
        raise ValueError("aft_read: a state stands for the past, so it needs causal=True")
    if v.dtype not in (torch.float64, torch.float32, torch.bfloat16) or k.dtype != v.dtype:
        raise ValueError(f"aft_read: k is {k.dtype} and v {v.dtype}; use float64, float32 or bfloat16 for both")
