"""Free-energy read under AFT's prior, p_t(i) ~ exp(k_i) for each channel. One public function:
`aft_read`. Layers are not included.

The definition consists of first-order scans in plain PyTorch on any device, and is exact for any
finite logits and values. A sum of exponentials over the past is stored relative to its running
maximum m_t: S_t = sum_{i <= t} exp(z_i - m_t), in [1, t], is updated by S_t = exp(m_{t-1} - m_t)
S_{t-1} + exp(z_t - m_t), a scan whose decays are at most 1. The maxima are constants to the
gradient, because they cancel. Masked tokens have z = -inf; before the first unmasked token, S is 0
and m has no meaning.

For small beta, F - mu as the difference of two logarithms over beta would consist of rounding
errors. Therefore F - mu is computed from the sum of exp(x) - 1 - x, x = beta (v_i - c), under mu's
own weights, as in `kernels.free_energy` for kappa = 1, where c is the first unmasked value. This
holds as long as every beta |v_i - c| of the past is under REACH. From the first larger value on,
the logarithms are used. The choice depends on the past alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.arguments import check_first, check_others, check_read, operation
from kernels.free_energy.op import SHIFT_BELOW, FreeEnergyGap, ValueStream, mix, mix_gap
from kernels.implementations import Implementation, Op, first_reason, lacks_triton
from kernels.registered import registered
from kernels.time_decay_scan import time_decay_scan

REACH = SHIFT_BELOW / 2  # bound of beta |v - c| for computing F - mu from the excess exp(x) - 1 - x

OP = Op(
    "aft_read",
    "FEM's read under p ~ exp(k_i) for each channel, with a state",
    (
        Implementation(
            "triton",
            "scans over segments and chunks with running maxima, all fused, forward and backward",
            lacks_triton,
        ),
        Implementation("reference", "the same scans in PyTorch"),
    ),
)


@operation("v", state=True)
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
    """Return o = gate * ((1 - lam) mu + lam F) under p_t(i) = exp(k_i) / sum_{i' <= t} exp(k_i'), a
    distribution for each channel.

        mu_t = sum_i p_t(i) v_i          F_t = (1/beta) log sum_i p_t(i) exp(beta v_i)

    Shapes: v, lam, gate [b, h, t, d]; k [b, h, t, d], or [b, h, t, 2 d] if F has separate logits,
    the second half (the released code; mu <= F then no longer holds); beta [h, d], positive. query:
    like k and positive; multiplies both sums before the log (mu -> query mu, F -> F + log(query) /
    beta; its second half is for F). valid [b, t] bool: False at masked tokens, which no token reads
    and whose own o is finite and has no meaning. beta None: o = mu. lam None: o = F. gate None: no
    gate. causal False: i runs over all tokens. state: the state that a previous call returned, None
    at the start; it gets no gradient. Returns (o [b, h, t, d] in v's type, state [b, h, rows, d] in
    float32 or float64: running maxima and sums relative to them; 3 rows, 7 with beta, 10 if F has
    separate logits; None if causal is False). Types: k, v both float64, float32, bfloat16 or
    float16, the others the same or float32; sums are float32 or float64. k and v may be any finite
    values: every sum has its own running maximum over the past. F - mu is accurate for any small
    beta as long as beta |v - v_0| stays under 2.5; beyond that, the rounding error of F is eps max
    |k + beta v| / beta. Cost O(t d), memory linear in t. An output is bitwise independent of later
    tokens. implementation: "triton", "reference" or "auto", the fastest that supports this call.
    Raises ValueError for shapes and types that do not fit, and for an implementation that cannot
    run. Equations: Free Energy Mixer, the LRNN-softmax prior and the two-level gated read.
    """
    check_first("aft_read", "v", v, "[batch, heads, tokens, channels]")
    (b, h, t, d), rows = v.shape, _rows(k, v, beta)
    expected: dict[str, Any] = {
        "k": (k, [v.shape, (b, h, t, 2 * d)], v.dtype),
        "beta": (beta, (h, d)),
        "lam": (lam, v.shape),
    }
    expected |= {
        "gate": (gate, v.shape),
        "query": (query, k.shape),
        "valid": (valid, (b, t)),
        "state": (state, (b, h, rows, d)),
    }
    check_others("aft_read", "v", v, expected)
    check_read("aft_read", beta, lam, state, causal)
    o, *after = _checked_read(k, v, beta, lam, gate, query, valid, state, causal, implementation)
    return o, after[0] if after else None


def _rows(k: Tensor, v: Tensor, beta: Tensor | None) -> int:
    """Return the number of rows of a state."""
    if beta is None:
        return 3
    return 7 if k.shape == v.shape else 10


def _shapes(k: Tensor, v: Tensor, beta: Tensor | None, causal: bool, **_: Any) -> list[Tensor]:
    state = v.new_empty(
        *v.shape[:2],
        _rows(k, v, beta),
        v.shape[3],
        dtype=torch.promote_types(v.dtype, torch.float32),
    )
    return [v.new_empty(v.shape), state] if causal else [v.new_empty(v.shape)]


@registered(_shapes, name="aft_read")
def _checked_read(
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    gate: Tensor | None,
    query: Tensor | None,
    valid: Tensor | None,
    state: Tensor | None,
    causal: bool,
    implementation: str,
) -> list[Tensor]:
    """Return o, and the state if causal. The arguments are those of `aft_read`, which has checked
    them.
    """
    compute = torch.promote_types(v.dtype, torch.float32)
    reasons = {
        "float64": v.dtype == torch.float64,
        "the free energy has logits of its own": k.shape != v.shape,
    }
    unfit = first_reason(reasons | {"all tokens read all": not causal})
    if OP.choose(implementation, v.device, {"triton": unfit}.get) == "triton":
        from kernels.aft_read.triton.function import fused_past

        wide = None if beta is None else beta.to(compute)
        return list(
            fused_past(
                k,
                v,
                wide,
                lam,
                gate,
                query,
                valid,
                None if state is None else state.detach().to(compute),
            )
        )
    logits, values = k.to(compute), v.to(compute)
    mask = None if valid is None else valid[:, None, :, None]
    temperature = None if beta is None else beta.to(compute)[:, None]
    if causal:
        mu, gap, *after = read_past(logits, values, temperature, mask, state)
    else:
        mu, gap, *after = read_all(logits, values, temperature, mask)
    if query is not None:
        factors, mean = query.to(compute).split(v.shape[-1], dim=-1), mu
        mu = factors[0] * mean
        if gap is not None and temperature is not None:
            gap = mean + gap + factors[-1].log() / temperature - mu
    o = mix(mu, None, None, gate) if gap is None else mix_gap(mu, gap, lam, gate)
    return [o.to(v.dtype), *after]


def read_past(
    k: Tensor, v: Tensor, beta: Tensor | None, valid: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (mu, F - mu, state) over i <= t. Shapes: k [b, h, t, d or 2 d], v [b, h, t, d], beta
    [h, 1, d], valid [b, 1, t, 1].

    The rows of the state: maximum, sum and value sum of exp(k); with beta: maximum and sum of exp(k
    + beta v), sum of exp(k) (exp(x) - 1 - x), which is -1 from the first value beyond REACH on, and
    c; if F has separate logits: maximum, sum and value sum of their exponentials, and the excess is
    then computed under them.
    """
    before: list[Tensor | None] = [None] * 5
    if state is not None:
        before = [
            *state.split(
                (3, *(() if beta is None else (2, 1, 1)), *(() if k.shape == v.shape else (3,))),
                dim=2,
            ),
            *before,
        ]
    past, past_joint, past_excess, past_centre, past_base = before[:5]
    centre = first_value(v, valid)
    if state is not None and past_centre is not None:
        centre = torch.where(state[:, :, 1:2] == 0, centre, past_centre)
    own, width = k.shape != v.shape, v.shape[-1]
    v, logits = (
        _readable(v, valid, centre),
        [_readable(z, valid, -torch.inf) for z in k.split(width, dim=-1)],
    )
    one = torch.ones_like(v)
    if beta is None:
        sums = _running_sums(logits[0], (one, v), past)
        return sums[2] / counted(sums[1]), None, sums[:, :, :, -1].movedim(0, 2).detach()
    u, far = excess_stream(v, beta, centre)
    far, base_past = far.cumsum(2) > 0, past_base if own else past
    if past_excess is not None and base_past is not None:
        far, base_past = (
            far | (past_excess < 0),
            torch.cat((base_past, past_excess.clamp(min=0)), dim=2),
        )
    base = _running_sums(logits[-1], (one, v, u), base_past)
    joint = _running_sums(logits[-1] + beta * v, (one,), past_joint)
    mean, z = base[2] / counted(base[1]), base[3] / counted(base[1])
    free_energy_part = (
        joint[0] - base[0] + counted(joint[1]).log() - counted(base[1]).log()
    ) / beta - mean
    gap = torch.where(far, free_energy_part, excess_gap(mean, z, beta, centre))
    sums = _running_sums(logits[0], (one, v), past) if own else base[:3]
    after = [
        sums,
        joint,
        base[3:].masked_fill(far, -1.0),
        centre.expand_as(v)[None],
        *((base[:3],) if own else ()),
    ]
    mu = sums[2] / counted(sums[1])
    return (
        mu,
        gap + (mean - mu) if own else gap,
        torch.cat([part[:, :, :, -1] for part in after]).movedim(0, 2).detach(),
    )


def read_all(
    k: Tensor, v: Tensor, beta: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return (mu, F - mu) over all i, the same at every token. The arguments are those of
    `read_past`.
    """
    centre = first_value(v, valid)
    v, logits = (
        _readable(v, valid, centre),
        [_readable(z, valid, -torch.inf) for z in k.split(v.shape[-1], dim=-1)],
    )
    weight, _ = _relative(logits[0])
    mu = (weight * v).sum(2, keepdim=True) / counted(weight.sum(2, keepdim=True))
    if beta is None:
        return mu.expand_as(v), None
    (weight, top), (joint, joint_top) = _relative(logits[-1]), _relative(logits[-1] + beta * v)
    total, joint_total = (counted(w.sum(2, keepdim=True)) for w in (weight, joint))
    u, far = excess_stream(v, beta, centre)
    mean, z = ((weight * x).sum(2, keepdim=True) / total for x in (v, u))
    free_energy_part = (joint_top - top + joint_total.log() - total.log()) / beta - mean
    gap = torch.where(far.any(2, keepdim=True), free_energy_part, excess_gap(mean, z, beta, centre))
    return mu.expand_as(v), (gap if len(logits) == 1 else gap + (mean - mu)).expand_as(v)


def first_value(v: Tensor, valid: Tensor | None) -> Tensor:
    """Return the first unmasked value [b, h, 1, d] of v [b, h, t, d], or 0 if every token is
    masked. valid [b, 1, t, 1]. Detached.
    """
    if valid is None:
        return v[:, :, :1].detach()
    at = valid.to(torch.uint8).argmax(2, keepdim=True)
    return (
        v.detach()
        .gather(2, at.expand(-1, v.shape[1], -1, v.shape[3]))
        .masked_fill(~valid.any(2, keepdim=True), 0.0)
    )


def excess_stream(v: Tensor, beta: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Return (exp(x) - 1 - x, far) for x = beta (v - centre). far is True where |x| exceeds REACH;
    the first is 0 at those places.

    Shapes: v [b, h, t, d], centre [b, h, 1, d].
    """
    far = ((v - centre) * beta).detach().abs() > REACH
    return ValueStream.apply(torch.where(far, centre, v), *_constants(beta, centre)), far


def excess_gap(mu: Tensor, z: Tensor, beta: Tensor, centre: Tensor) -> Tensor:
    """Return F - mu from the means of v and of `excess_stream`."""
    gap = FreeEnergyGap.apply(mu, z, *_constants(beta, centre))
    assert isinstance(gap, Tensor)
    return gap


def _constants(beta: Tensor, centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return beta.expand_as(centre), centre, torch.ones_like(centre, dtype=torch.bool)


def _running_sums(z: Tensor, factors: tuple[Tensor, ...], past: Tensor | None) -> Tensor:
    """Return [1 + factors, b, h, t, d]: m_t, the running maximum of z (0 before the first finite
    z), and sum_{i <= t} exp(z_i - m_t) factor_i.

    past [b, h, 1 + factors, d]: the same values at the previous token; the first factor is 1.
    """
    start = (
        torch.full_like(z[:, :, :1], -torch.inf)
        if past is None
        else past[:, :, :1].masked_fill(past[:, :, 1:2] == 0, -torch.inf)
    )
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
    """Return exp(z - m) and m, the maximum of z [b, h, t, d] over tokens (0 if all are -inf)."""
    top = _finite(z.detach().amax(2, keepdim=True))
    return (z - top).exp(), top


def _readable(x: Tensor, valid: Tensor | None, otherwise: float | Tensor) -> Tensor:
    return x if valid is None else torch.where(valid, x, otherwise)


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -torch.inf, 0.0)


def counted(total: Tensor) -> Tensor:
    """Return the sum, with 1 in place of an empty sum (0), so that quotients, logarithms and their
    gradients stay finite.
    """
    return total.masked_fill(total == 0, 1.0)
