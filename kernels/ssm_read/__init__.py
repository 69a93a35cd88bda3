"""The free-energy read under a selective state-space prior: one public function, `ssm_read`. Layers and parametrisations stay out.

The definition, in plain PyTorch on any device: first-order scans of [d, n] states, chunk after chunk. Streams: v and, under the same
decays, 1 (the normaliser); exp(beta v - m_t) with m_t the largest log(delta_i) + beta v_i of the past, faded with the channel's slowest
rate, so that the stream's own decays are exp(-rate delta_t + m_{t-1} - m_t). m is a constant to the gradient: it cancels. Tokens that
nobody reads have delta = 0: they decay nothing and add nothing. Inside the definition time comes first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.aft_read import counted
from kernels.arguments import check_first, check_others, check_read
from kernels.free_energy import mix
from kernels.implementations import Implementation, Op, first_reason, lacks_triton
from kernels.time_decay_scan import time_decay_scan

__all__ = ["OP", "ssm_read"]

CHUNK = 64  # tokens whose states are made at once

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
    reasons = {"float64": v.dtype == torch.float64, "weights that are not normalised": not normalise, "all tokens read all": not causal}
    if OP.choose(implementation, v.device, {"triton": first_reason(reasons)}.get) == "triton":
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


class Tokens(NamedTuple):
    """What comes with each token, [t, b, h, d or n]."""

    delta: Tensor
    b_in: Tensor
    c_out: Tensor
    v: Tensor

    @classmethod
    def of(cls, delta: Tensor, b_in: Tensor, c_out: Tensor, v: Tensor, valid: Tensor | None) -> Tokens:
        """From [b, h, t, d or n], those that nobody reads (valid [b, t] False) made idle."""
        if valid is not None:
            delta, v = (t.masked_fill(~valid[:, None, :, None], 0.0) for t in (delta, v))
        return cls(*(t.movedim(2, 0) for t in (delta, b_in, c_out, v)))

    def flip(self) -> Tokens:
        """The reversed sequence."""
        return Tokens(*(t.flip(0) for t in self))

    def chunks(self) -> list[Tokens]:
        """Parts of CHUNK tokens."""
        return [Tokens(*part) for part in zip(*(t.split(CHUNK) for t in self), strict=True)]


def read_past(
    tokens: Tokens, rate: Tensor, beta: Tensor | None, state: Tensor | None, normalise: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(mu, F, state) over i <= t, [b, h, t, d]; rate, beta and state as `ssm_read` has them, F None without beta."""
    sums, top, after = _scan(tokens, rate, beta, state, normalise, own=True)
    return *_read(sums, top, beta, normalise), after


def read_all(tokens: Tokens, rate: Tensor, beta: Tensor | None, normalise: bool) -> tuple[Tensor, Tensor | None]:
    """(mu, F) over all i: the scan, and that of the reversed sequence without each token's own term."""
    sums, top, _ = _scan(tokens, rate, beta, None, normalise, own=True)
    later, later_top, _ = _scan(tokens.flip(), rate, beta, None, normalise, own=False)
    later, later_top = later.flip(0), later_top.flip(0)
    if beta is None:
        return _read(sums + later, top, beta, normalise)
    highest = torch.maximum(top, later_top)
    joint = sums[:, -1] * (top - highest).exp() + later[:, -1] * (later_top - highest).exp()
    return _read(torch.cat((sums[:, :-1] + later[:, :-1], joint[:, None]), dim=1), highest, beta, normalise)


def _read(sums: Tensor, top: Tensor, beta: Tensor | None, normalise: bool) -> tuple[Tensor, Tensor | None]:
    """mu and F, [b, h, t, d], from the streams' sums [t, s, b, h, d] and the last one's maximum [t, b, h, d]."""
    sums, top = sums.movedim(0, 3), top.movedim(0, 2)
    total = counted(sums[1]) if normalise else torch.ones_like(sums[0])
    mu = sums[0] / total
    return mu, None if beta is None else (top + counted(sums[-1]).log() - total.log()) / beta[:, None]


def _scan(
    tokens: Tokens, rate: Tensor, beta: Tensor | None, state: Tensor | None, normalise: bool, own: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Each stream's sum_n C S [t, s, b, h, d], the maxima [t, b, h, d] (zeros without beta), the state behind the last token.

    own False: a token's own term is in the state that it hands on, but not in its sum.
    """
    streams, v = 1 + normalise + (beta is not None), tokens.v
    if state is None:
        states, top = v.new_zeros(streams, *v.shape[1:], rate.shape[-1]), torch.full_like(v[0], -torch.inf)
    else:
        states = state[..., : streams * rate.shape[-1]].unflatten(-1, (streams, -1)).movedim(3, 0)
        top = state[..., -1].masked_fill((states[-1] == 0).all(-1), -torch.inf)
    made, tops = [], []
    for part in tokens.chunks():
        sums, highest, states, top = checkpoint(
            _chunk, part, rate, beta, states, top, normalise, own, use_reentrant=False, preserve_rng_state=False
        )
        made.append(sums)
        tops.append(highest)
    after = states.movedim(0, 3).flatten(-2)
    if beta is not None:
        after = torch.cat((after, tops[-1][-1][..., None]), dim=-1)
    return torch.cat(made), torch.cat(tops), after.detach()


def _chunk(
    tokens: Tokens, rate: Tensor, beta: Tensor | None, states: Tensor, top: Tensor, normalise: bool, own: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One chunk of `_scan`: sums, finite maxima, last states, last maximum (-inf where nothing was read yet)."""
    delta, b_in, c_out, v = tokens
    decay = -delta[..., None] * rate
    intake = delta[..., None] * b_in[..., None, :]
    decays, terms = [decay], [intake * v[..., None]]
    if normalise:
        decays.append(decay)
        terms.append(intake)
    tops = torch.zeros_like(v)
    if beta is not None:
        z = delta.masked_fill(delta == 0, 1.0).log().masked_fill(delta == 0, -torch.inf) + beta * v
        highest = _fading_maximum(z.detach(), (delta * rate.amin(-1)).detach(), top)
        before = torch.cat((top[None], highest[:-1]))
        top, tops = highest[-1], highest.masked_fill(highest == -torch.inf, 0.0)
        decays.append(decay + (before - tops).masked_fill(before == -torch.inf, 0.0)[..., None])
        terms.append((z - tops).exp()[..., None] * b_in[..., None, :])
    a, x = torch.stack(decays, dim=1), torch.stack(terms, dim=1)
    after = time_decay_scan(a, x, states)
    seen = after if own else torch.cat((states[None], after[:-1])) * a.exp()
    # A copy: a view would keep every state of the chunk.
    return torch.einsum("tbhn,tsbhdn->tsbhd", c_out, seen), tops, after[-1].clone(), top


def _fading_maximum(z: Tensor, fade: Tensor, start: Tensor) -> Tensor:
    """m_t = max(m_{t-1} - fade_t, z_t) along the first dimension from m_{-1} = start."""
    faded = fade.cumsum(0)
    return torch.maximum((z + faded).cummax(0).values, start) - faded
