"""Free-energy read under a selective state-space prior. One public function: `ssm_read`. Layers and
parametrisations are not included.

The definition runs in plain PyTorch on any device: first-order scans of [d, n] states, chunk after
chunk. Streams: v and, under the same decays, 1 (the normaliser); exp(beta v - m_t) with m_t the
largest log(delta_i) + beta v_i of the past, faded with the channel's slowest rate, so that the
stream's own decays are exp(-rate delta_t + m_{t-1} - m_t). m is a constant to the gradient, because
it cancels. Masked tokens have delta = 0: they decay and add 0. Inside the definition time is the
first dimension.

One more stream, exp(x) - 1 - x of x = beta (v - c) under the same decays, with c the first unmasked
value, gives F - mu as in `kernels.aft_read` as long as |x| was under 2.5. It is not used if weights
are not normalised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.aft_read.op import counted, excess_gap, excess_stream, first_value
from kernels.arguments import check_first, check_others, check_read, operation
from kernels.free_energy.op import mix, mix_gap
from kernels.implementations import Implementation, Op, first_reason, lacks_triton
from kernels.registered import registered
from kernels.time_decay_scan import time_decay_scan

CHUNK = 64  # tokens whose states are computed at once

OP = Op(
    "ssm_read",
    "FEM's read under a selective state space with non-negative weights, with a state",
    (
        Implementation(
            "triton", "chunks by scans, the states made again in the backward", lacks_triton
        ),
        Implementation("reference", "the same scans in PyTorch, checkpointed chunks"),
    ),
)


@operation("v", state=True)
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
    """Return o = gate * ((1 - lam) mu + lam F) under the impulse response of a diagonal
    non-negative state-space model.

        w_t(i) = sum_n C_t[n] exp(-rate[n] (delta_{i+1} + ... + delta_t)) delta_i B_i[n]
        p_t(i) = w_t(i) / sum_i' w_t(i')
        mu_t = sum_i p_t(i) v_i          F_t = (1/beta) log sum_i p_t(i) exp(beta v_i)

    for each channel. Shapes: delta (step, > 0), v, lam, gate [b, h, t, d]; rate [h, d, n] (>= 0);
    b_in and c_out, B and C, [b, h, t, n] (> 0); beta [h, d] (> 0). normalise False: w in place of p
    (the paper's ablation; mu <= F then no longer holds). valid [b, t] bool: False at masked tokens,
    which no token reads, which do not change the state, and whose own o is finite and has no
    meaning. beta None: o = mu. lam None: o = F. gate None: no gate. causal False: w_t(i) for i > t
    is the same with the steps delta_t ... delta_{i-1}: the scan of the reversed sequence. state:
    the state that a previous call returned, None at the start; it gets no gradient. Returns (o [b,
    h, t, d] in v's type, state [b, h, d, 4 n + 2 with beta, else 2 n], float32 or float64: sums of
    v, weights, exponentials and exp(x) - 1 - x (-1 from the first value beyond 2.5 on), then c and
    m; normalise False: [b, h, d, 2 n + 1 or n], of v and exponentials, then m; None if causal is
    False). Types: v float64, float32, bfloat16 or float16, the others the same or float32. Sums are
    float32 or float64. The signs are not checked. v may be any finite values: the exponentials are
    stored relative to a running maximum that fades with each channel's slowest rate; F - mu is
    accurate for any small beta as long as beta |v - v_0| stays under 2.5. Cost O(t d n). The [t, d,
    n] states are computed 64 tokens at a time and recomputed in the backward: memory is linear in
    t, with up to n / 16 numbers stored for each one of v. An output is bitwise independent of later
    tokens. implementation: "triton", "reference" or "auto", the fastest that supports this call.
    Raises ValueError for shapes and types that do not fit, and for an implementation that cannot
    run. Equations: Free Energy Mixer, the SSM prior and the two-level gated read.
    """
    check_first("ssm_read", "v", v, "[batch, heads, tokens, channels]")
    b, h, t, d = v.shape
    if rate.dim() != 3 or rate.shape[:2] != (h, d) or rate.shape[2] < 1:
        raise ValueError(
            f"ssm_read: rate has shape {list(rate.shape)}, expected [{h}, {d}, states] for v"
            f" {list(v.shape)}"
        )
    per_state = (b, h, t, rate.shape[2])
    expected: dict[str, Any] = {
        name: (x, v.shape) for name, x in (("delta", delta), ("lam", lam), ("gate", gate))
    }
    expected |= {
        "b_in": (b_in, per_state),
        "c_out": (c_out, per_state),
        "beta": (beta, (h, d)),
        "valid": (valid, (b, t)),
    }
    check_others(
        "ssm_read",
        "v",
        v,
        expected | {"state": (state, (b, h, d, _columns(rate, beta, normalise)))},
    )
    check_read("ssm_read", beta, lam, state, causal)
    o, *after = _checked_read(
        delta,
        rate,
        b_in,
        c_out,
        v,
        beta,
        lam,
        gate,
        normalise,
        valid,
        state,
        causal,
        implementation,
    )
    return o, after[0] if after else None


def _columns(rate: Tensor, beta: Tensor | None, normalise: bool) -> int:
    """Return the number of columns of a state."""
    n, free = rate.shape[2], beta is not None
    return (1 + normalise) * (n * (1 + free) + free)


def _shapes(
    rate: Tensor, v: Tensor, beta: Tensor | None, normalise: bool, causal: bool, **_: Any
) -> list[Tensor]:
    wide = torch.promote_types(v.dtype, torch.float32)
    state = v.new_empty(*v.shape[:2], v.shape[3], _columns(rate, beta, normalise), dtype=wide)
    return [v.new_empty(v.shape), state] if causal else [v.new_empty(v.shape)]


@registered(
    _shapes, lambda *_, **__: not torch.compiler.is_exporting(), name="ssm_read"
)  # it calls torch.utils.checkpoint
def _checked_read(
    delta: Tensor,
    rate: Tensor,
    b_in: Tensor,
    c_out: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    gate: Tensor | None,
    normalise: bool,
    valid: Tensor | None,
    state: Tensor | None,
    causal: bool,
    implementation: str,
) -> list[Tensor]:
    """Return o, and the state if causal. The arguments are those of `ssm_read`, which has checked
    them.
    """
    compute = torch.promote_types(v.dtype, torch.float32)
    reasons = {
        "float64": v.dtype == torch.float64,
        "weights that are not normalised": not normalise,
        "all tokens read all": not causal,
    }
    if OP.choose(implementation, v.device, {"triton": first_reason(reasons)}.get) == "triton":
        from kernels.ssm_read.triton.function import fused_past

        delta, rate, b_in, c_out = (t.to(compute) for t in (delta, rate, b_in, c_out))
        past = None if state is None else state.detach().to(compute).contiguous()
        return list(
            fused_past(
                delta,
                rate,
                b_in,
                c_out,
                v,
                None if beta is None else beta.to(compute),
                lam,
                gate,
                valid,
                past,
            )
        )
    tokens = Tokens.of(delta.to(compute), b_in.to(compute), c_out.to(compute), v.to(compute), valid)
    temperature = None if beta is None else beta.to(compute)
    first = first_value(v.to(compute), None if valid is None else valid[:, None, :, None])
    if causal:
        mu, gap, *after = read_past(tokens, rate.to(compute), temperature, first, state, normalise)
    else:
        mu, gap, *after = read_all(tokens, rate.to(compute), temperature, first, normalise)
    return [
        (mix(mu, None, None, gate) if gap is None else mix_gap(mu, gap, lam, gate)).to(v.dtype),
        *after,
    ]


class Tokens(NamedTuple):
    """Inputs of each token, [t, b, h, d or n]. u: exp(x) - 1 - x, or v if it is not needed."""

    delta: Tensor
    b_in: Tensor
    c_out: Tensor
    v: Tensor
    u: Tensor

    @classmethod
    def of(
        cls, delta: Tensor, b_in: Tensor, c_out: Tensor, v: Tensor, valid: Tensor | None
    ) -> Tokens:
        """Build from [b, h, t, d or n]. Masked tokens (valid [b, t] False) get delta = v = 0."""
        if valid is not None:
            delta, v = (t.masked_fill(~valid[:, None, :, None], 0.0) for t in (delta, v))
        return cls(*(t.movedim(2, 0) for t in (delta, b_in, c_out, v, v)))

    def with_excess(self, beta: Tensor, centre: Tensor) -> tuple[Tokens, Tensor]:
        """Return the tokens with u, and the mask [b, h, t, d] of values too far from centre [b, h,
        1, d]; beta [h, d].
        """
        u, far = excess_stream(self.v.movedim(0, 2), beta[:, None], centre)
        return self._replace(u=u.movedim(2, 0)), far & (self.delta.movedim(0, 2) > 0)

    def flip(self) -> Tokens:
        """Return the reversed sequence."""
        return Tokens(*(t.flip(0) for t in self))

    def chunks(self) -> list[Tokens]:
        """Split into parts of CHUNK tokens."""
        return [Tokens(*part) for part in zip(*(t.split(CHUNK) for t in self), strict=True)]


def read_past(
    tokens: Tokens,
    rate: Tensor,
    beta: Tensor | None,
    first: Tensor,
    state: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (mu, F - mu, state) over i <= t, [b, h, t, d]; F - mu is None without beta.

    rate, beta and state are those of `ssm_read`. first [b, h, 1, d]: c, used if no state is given.
    """
    streams, centre, far = _streams(beta, normalise), first, None
    states, top = (
        tokens.v.new_zeros(streams, *tokens.v.shape[1:], rate.shape[-1]),
        torch.full_like(tokens.v[0], -torch.inf),
    )
    if state is not None:
        states = state[..., : streams * rate.shape[-1]].unflatten(-1, (streams, -1)).movedim(3, 0)
        if beta is not None:
            top = state[..., -1].masked_fill((states[1 + normalise] == 0).all(-1), -torch.inf)
    if streams == 4 and beta is not None:
        if state is not None:
            centre = torch.where(
                (states[1] == 0).all(-1)[:, :, None], first, state[..., -2][:, :, None]
            )
        tokens, far = tokens.with_excess(beta, centre)
        far = (far.cumsum(2) > 0) | (states[3, :, :, None, :, 0] < 0)
        states = torch.cat((states[:3], states[3:].clamp(min=0)))
    sums, tops, after = _scan(tokens, rate, beta, states, top, normalise, own=True)
    if far is not None:
        after = torch.cat((after[:3], after[3:].masked_fill(far[:, :, -1, :, None], -1.0)))
    held = [after.movedim(0, 3).flatten(-2)]
    held += [centre.movedim(2, 3)] if far is not None else []
    held += [tops[-1][..., None]] if beta is not None else []
    return *_read(sums, tops, beta, normalise, centre, far), torch.cat(held, dim=-1).detach()


def read_all(
    tokens: Tokens, rate: Tensor, beta: Tensor | None, first: Tensor, normalise: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (mu, F - mu) over all i: the scan, and that of the reversed sequence without each
    token's own term.
    """
    far = None
    if beta is not None and normalise:
        tokens, far = tokens.with_excess(beta, first)
        far = far.any(2, keepdim=True)
    states = tokens.v.new_zeros(_streams(beta, normalise), *tokens.v.shape[1:], rate.shape[-1])
    top = torch.full_like(tokens.v[0], -torch.inf)
    sums, tops, _ = _scan(tokens, rate, beta, states, top, normalise, own=True)
    later, later_tops, _ = _scan(tokens.flip(), rate, beta, states, top, normalise, own=False)
    later, later_tops = later.flip(0), later_tops.flip(0)
    both = list((sums + later).unbind(1))
    highest = torch.maximum(tops, later_tops)
    if beta is not None:
        joint = 1 + normalise
        both[joint] = (
            sums[:, joint] * (tops - highest).exp() + later[:, joint] * (later_tops - highest).exp()
        )
    return _read(torch.stack(both, dim=1), highest, beta, normalise, first, far)


def _streams(beta: Tensor | None, normalise: bool) -> int:
    """Return the number of streams: v, the weights if normalise, exponentials with beta, and exp(x)
    - 1 - x with both.
    """
    return (1 + normalise) * (1 if beta is None else 2)


def _read(
    sums: Tensor,
    top: Tensor,
    beta: Tensor | None,
    normalise: bool,
    centre: Tensor,
    far: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return mu and F - mu, [b, h, t, d], from the streams' sums [t, s, b, h, d] and the
    exponentials' maxima [t, b, h, d].
    """
    sums, top = sums.movedim(0, 3), top.movedim(0, 2)
    total = counted(sums[1]) if normalise else torch.ones_like(sums[0])
    mu = sums[0] / total
    if beta is None:
        return mu, None
    free_energy = (top + counted(sums[1 + normalise]).log() - total.log()) / beta[:, None] - mu
    return mu, (
        free_energy
        if far is None
        else torch.where(far, free_energy, excess_gap(mu, sums[3] / total, beta[:, None], centre))
    )


def _scan(
    tokens: Tokens,
    rate: Tensor,
    beta: Tensor | None,
    states: Tensor,
    top: Tensor,
    normalise: bool,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each stream's sum_n C S [t, s, b, h, d], the maxima [t, b, h, d] (zeros without beta),
    and the states after the last token.

    own False: a token's own term is in the state that it passes on, but not in its sum.
    """
    made, tops = [], []
    for part in tokens.chunks():
        sums, highest, states, top = checkpoint(
            _chunk,
            part,
            rate,
            beta,
            states,
            top,
            normalise,
            own,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        made.append(sums)
        tops.append(highest)
    return torch.cat(made), torch.cat(tops), states


def _chunk(
    tokens: Tokens,
    rate: Tensor,
    beta: Tensor | None,
    states: Tensor,
    top: Tensor,
    normalise: bool,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute one chunk of `_scan`: sums, finite maxima, last states, last maximum (-inf before the
    first unmasked token).
    """
    delta, b_in, c_out, v, u = tokens
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
        if normalise:
            decays.append(decay)
            terms.append(intake * u[..., None])
    a, x = torch.stack(decays, dim=1), torch.stack(terms, dim=1)
    after = time_decay_scan(a, x, states)
    seen = after if own else torch.cat((states[None], after[:-1])) * a.exp()
    # A copy, because a view would keep every state of the chunk in memory.
    return torch.einsum("tbhn,tsbhdn->tsbhd", c_out, seen), tops, after[-1].clone(), top


def _fading_maximum(z: Tensor, fade: Tensor, start: Tensor) -> Tensor:
    """Return m_t = max(m_{t-1} - fade_t, z_t) along the first dimension from m_{-1} = start."""
    faded = fade.cumsum(0)
    return torch.maximum((z + faded).cummax(0).values, start) - faded
