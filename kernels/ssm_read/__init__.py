"""The free-energy read under a selective state-space prior: one public function, `ssm_read`. Layers and parametrisations stay out."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.aft_read.reference import mix
from kernels.implementations import Implementation, Op, lacks_triton
from kernels.ssm_read.reference import Tokens, read_all, read_past

__all__ = ["OP", "ssm_read"]

OP = Op(
    "ssm_read",
    "FEM's read under a selective state space with non-negative weights, with a state",
    (
        Implementation("triton", "chunks by scans, the states made again in the backward", lacks_triton),
        Implementation("reference", "the same scans in PyTorch, checkpointed chunks"),
    ),
)


def ssm_read(
    delta: Tensor,
    rate: Tensor,
    b_in: Tensor,
    c_out: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    lam: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    normalise: bool = True,
    valid: Tensor | None = None,
    state: Tensor | None = None,
    causal: bool = True,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Read o = gate * ((1 - lam) mu + lam F) under the impulse response of a diagonal non-negative state-space model.

        w_t(i) = sum_n C_t[n] exp(-rate[n] (delta_{i+1} + ... + delta_t)) delta_i B_i[n]          p_t(i) = w_t(i) / sum_i' w_t(i')
        mu_t = sum_i p_t(i) v_i          F_t = (1/beta) log sum_i p_t(i) exp(beta v_i)             for each channel

    Shapes: delta (step, > 0), v, lam, gate [b, h, t, d]; rate [h, d, n] (>= 0); b_in and c_out, B and C, [b, h, t, n] (> 0); beta [h, d]
    (> 0). normalise False: w in place of p (the paper's ablation; mu <= F then no longer holds). valid [b, t] bool: False at tokens that
    nobody reads and that do not move the state, whose own o is finite and means nothing. beta None: o = mu. lam None: o = F. gate None:
    no gate. causal False: w_t(i) for i > t is the same with the steps delta_t ... delta_{i-1}: the scan of the reversed sequence.
    state: what a previous call returned, None at the start; no gradient goes through it. Returns (o [b, h, t, d] in v's type, state
    [b, h, d, s n + 1 with beta, else s n], s = 1 (v) + 1 (weights, where normalise) + 1 (exponentials, with beta), float32 or float64;
    None where causal is False).
    Types: v float64, float32 or bfloat16, the others the same or float32; sums are float32 or float64. Signs are the caller's promise.
    Any finite v: the exponentials are kept relative to a running maximum that fades with each channel's slowest rate.
    Cost O(t d n). The [t, d, n] states are made 64 tokens at a time and made again in the backward: memory is linear in t, with
    s n / 64 numbers kept for each one of v. An output does not move by a bit when later tokens change.
    implementation: "triton", "reference" or "auto", the fastest that this call allows.
    Raises ValueError for shapes and types that do not fit, and for an implementation that cannot run.
    Equations: Free Energy Mixer, the SSM prior and the two-level gated read.
    """
    _check(delta, rate, b_in, c_out, v, beta, lam, gate, valid, state, normalise, causal)
    compute = torch.promote_types(v.dtype, torch.float32)
    if OP.choose(implementation, v.device, {"triton": _unfit(v, normalise, causal)}) == "triton":
        from kernels.ssm_read.triton import fused_past

        delta, rate, b_in, c_out = (t.to(compute) for t in (delta, rate, b_in, c_out))
        past = None if state is None else state.detach().to(compute).contiguous()
        return fused_past(delta, rate, b_in, c_out, v, None if beta is None else beta.to(compute), lam, gate, valid, past)
    tokens = Tokens.of(delta.to(compute), b_in.to(compute), c_out.to(compute), v.to(compute), valid)
    temperature = None if beta is None else beta.to(compute)
    if causal:
        mu, free_energy, after = read_past(tokens, rate.to(compute), temperature, state, normalise)
    else:
        mu, free_energy = read_all(tokens, rate.to(compute), temperature, normalise)
        after = None
    return mix(mu, free_energy, lam, gate).to(v.dtype), after


def _unfit(v: Tensor, normalise: bool, causal: bool) -> str | None:
    """Why the kernels do not read this call."""
    if v.dtype == torch.float64:
        return "float64"
    if not normalise:
        return "weights that are not normalised"
    return None if causal else "all tokens read all"


def _check(
    delta: Tensor,
    rate: Tensor,
    b_in: Tensor,
    c_out: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    gate: Tensor | None,
    valid: Tensor | None,
    state: Tensor | None,
    normalise: bool,
    causal: bool,
) -> None:
    if v.dim() != 4 or v.numel() == 0:
        raise ValueError(f"ssm_read: v has shape {list(v.shape)}, expected [batch, heads, tokens, channels], none of them 0")
    b, h, t, d = v.shape
    if rate.dim() != 3 or rate.shape[:2] != (h, d) or rate.shape[2] < 1:
        raise ValueError(f"ssm_read: rate has shape {list(rate.shape)}, expected [{h}, {d}, states] beside v {list(v.shape)}")
    n = rate.shape[2]
    width = n * (1 + normalise + (beta is not None)) + (beta is not None)
    expected = {
        "delta": (delta, v.shape),
        "b_in": (b_in, (b, h, t, n)),
        "c_out": (c_out, (b, h, t, n)),
        "beta": (beta, (h, d)),
        "lam": (lam, v.shape),
        "gate": (gate, v.shape),
        "valid": (valid, (b, t)),
        "state": (state, (b, h, d, width)),
    }
    for name, (given, shape) in expected.items():
        if given is not None and given.shape != shape:
            raise ValueError(
                f"ssm_read: {name} has shape {list(given.shape)}, expected {list(shape)} beside v {list(v.shape)}, rate {list(rate.shape)}"
            )
    if lam is not None and beta is None:
        raise ValueError("ssm_read: lam mixes mu with the free energy, so it needs beta; leave out lam for o = mu")
    if state is not None and not causal:
        raise ValueError("ssm_read: a state stands for the past, so it needs causal=True")
    if v.dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"ssm_read: v is {v.dtype}; use float64, float32 or bfloat16")
