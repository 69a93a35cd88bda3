"""The free-energy read under a selective state-space prior: one public function, `ssm_read`. Layers and parametrisations stay out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.aft_read.reference import mix
from kernels.arguments import check_first, check_others, check_read
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
    check_first("ssm_read", "v", v, "[batch, heads, tokens, channels]")
    b, h, t, d = v.shape
    if rate.dim() != 3 or rate.shape[:2] != (h, d) or rate.shape[2] < 1:
        raise ValueError(f"ssm_read: rate has shape {list(rate.shape)}, expected [{h}, {d}, states] beside v {list(v.shape)}")
    (n, free), per_state = (rate.shape[2], beta is not None), (b, h, t, rate.shape[2])
    expected: dict[str, Any] = {name: (x, v.shape) for name, x in (("delta", delta), ("lam", lam), ("gate", gate))}
    expected |= {"b_in": (b_in, per_state), "c_out": (c_out, per_state), "beta": (beta, (h, d)), "valid": (valid, (b, t))}
    check_others("ssm_read", "v", v, expected | {"state": (state, (b, h, d, n * (1 + normalise + free) + free))})
    check_read("ssm_read", beta, lam, state, causal)
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
