"""The free-energy read under AFT's prior, p_t(i) ~ exp(k_i) for each channel: one public function, `aft_read`. Layers stay out.

The definition: first-order scans in plain PyTorch, any device, exact for any finite logits and values. A sum of exponentials over the past
is kept relative to its running maximum m_t: S_t = sum_{i <= t} exp(z_i - m_t), in [1, t], moves by
S_t = exp(m_{t-1} - m_t) S_{t-1} + exp(z_t - m_t), a scan whose decays are at most 1. The maxima are constants to the gradient: they cancel.
Tokens that nobody reads have z = -inf; as long as there was none else, S is 0 and stands for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.arguments import check_first, check_others, check_read
from kernels.free_energy import mix
from kernels.implementations import Implementation, Op, first_reason, lacks_triton
from kernels.time_decay_scan import time_decay_scan

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
    reasons = {"float64": v.dtype == torch.float64, "the free energy has logits of its own": k.shape != v.shape}
    unfit = first_reason(reasons | {"all tokens read all": not causal})
    if OP.choose(implementation, v.device, {"triton": unfit}.get) == "triton":
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


def read_past(
    k: Tensor, v: Tensor, beta: Tensor | None, valid: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(mu, F, state) over i <= t. k [b, h, t, d or 2 d], v [b, h, t, d], beta [h, 1, d], valid [b, 1, t, 1], state as `aft_read` says.

    The state's rows: maximum, sum and value sum of exp(k); with beta, maximum and sum of exp(k + beta v); where F has logits of its own,
    maximum and sum of their exponentials.
    """
    rows = [None] * 3 if state is None else list(state.split((3, *[2] * ((state.shape[2] - 3) // 2)), dim=2))
    v, logits = _readable(v, valid, 0.0), [_readable(z, valid, -torch.inf) for z in k.split(v.shape[-1], dim=-1)]
    one = torch.ones_like(v)
    base = sums = _running_sums(logits[0], (one, v), rows[0])
    after = [sums]
    mu, free_energy = sums[2] / counted(sums[1]), None
    if beta is not None:
        joint = _running_sums(logits[-1] + beta * v, (one,), rows[1])
        after.append(joint)
        if len(logits) == 2:
            base = _running_sums(logits[1], (one,), rows[2])
            after.append(base)
        free_energy = (joint[0] - base[0] + counted(joint[1]).log() - counted(base[1]).log()) / beta
    return mu, free_energy, torch.cat([part[:, :, :, -1] for part in after]).movedim(0, 2).detach()


def read_all(k: Tensor, v: Tensor, beta: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(mu, F) over all i, the same at every token; arguments as in `read_past`."""
    v, logits = _readable(v, valid, 0.0), [_readable(z, valid, -torch.inf) for z in k.split(v.shape[-1], dim=-1)]
    weight, _ = _relative(logits[0])
    mu = (weight * v).sum(2, keepdim=True) / counted(weight.sum(2, keepdim=True))
    if beta is None:
        return mu.expand_as(v), None
    (weight, top), (joint, joint_top) = _relative(logits[-1]), _relative(logits[-1] + beta * v)
    total, joint_total = (counted(w.sum(2, keepdim=True)) for w in (weight, joint))
    return mu.expand_as(v), ((joint_top - top + joint_total.log() - total.log()) / beta).expand_as(v)


def _running_sums(z: Tensor, factors: tuple[Tensor, ...], past: Tensor | None) -> Tensor:
    """[1 + factors, b, h, t, d]: m_t, the running maximum of z (0 where there was none), and sum_{i <= t} exp(z_i - m_t) factor_i.

    past [b, h, 1 + factors, d]: the same at the token before, of which the first factor is 1.
    """
    start = torch.full_like(z[:, :, :1], -torch.inf) if past is None else past[:, :, :1].masked_fill(past[:, :, 1:2] == 0, -torch.inf)
    top = torch.cat((start, z.detach()), dim=2).cummax(dim=2).values
    before, none_before = top[:, :, :-1], top[:, :, :-1] == -torch.inf
    top = _finite(top[:, :, 1:])
    decay = (before - top).masked_fill(none_before, 0.0)
    weight = (z - top).exp()
    terms = torch.stack([weight * factor for factor in factors]).movedim(3, 0)
    initial = None if past is None else past[:, :, 1:].movedim(2, 0)
    states = time_decay_scan(decay.movedim(2, 0)[:, None].expand_as(terms), terms, initial)
    return torch.cat((top[None], states.movedim(0, 3)))


def _relative(z: Tensor) -> tuple[Tensor, Tensor]:
    """exp(z - m) and m, the maximum of z [b, h, t, d] over all tokens (0 where all are -inf)."""
    top = _finite(z.detach().amax(2, keepdim=True))
    return (z - top).exp(), top


def _readable(x: Tensor, valid: Tensor | None, otherwise: float) -> Tensor:
    return x if valid is None else x.masked_fill(~valid, otherwise)


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -torch.inf, 0.0)


def counted(total: Tensor) -> Tensor:
    """The sum, or 1 where nothing was summed, so that quotients and logarithms stay finite, with their gradients."""
    return total.masked_fill(total == 0, 1.0)
