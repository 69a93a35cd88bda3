"""AFT's read in Triton as one autograd function, and its backward.

The backward recomputes the same tiles from the rows stored before each chunk; its scans run from
the end. With p_t(i) = exp(k_i - m_t) / S_t, w_t(i) = exp(k_i + beta v_i - M_t) / J_t, x_i = beta
(v_i - c), u = exp(x) - 1 - x, and dmu, dF the gradients of mu and F at t: at tokens where F - mu is
computed from Z_t = Q_t / S_t, with y_t = beta (mu_t - c) + Z_t, dZ = dF / (beta (1 + y)), dmu
increases by dF / (1 + y), and dF is 0 in B and C.

    A_i = sum_{t >= i} p_t(i) dmu_t
    B_i = sum_{t >= i} p_t(i) (dmu_t (mu_t - c) + dZ_t Z_t + dF_t / beta)
    H_i = sum_{t >= i} p_t(i) dZ_t         C_i = sum_{t >= i} w_t(i) dF_t
    dv_i = A_i + beta (exp(x_i) - 1) H_i + C_i
    dk_i = (v_i - c) A_i + u_i H_i - B_i + C_i / beta
    dbeta = (sum_i v_i C_i - sum_t dF_t F_t) / beta + sum_i (v_i - c) (exp(x_i) - 1) H_i
            - sum_t dF_t (y / (1 + y) (mu - c) + F - mu) / beta

The first sum over t covers the tokens whose F is computed from the logarithms, the second sum over
t covers all others.

m and M never fall, so A_i = exp(k_i - m_i) R_i with R_i = dmu_i / S_i + exp(m_i - m_{i+1}) R_{i+1},
and B, C, H in the same way: no term can overflow. A segment's summary consists of the six rows (m,
R of A, R of B, M, R of C, R of H) at its first token. Each program writes a partial sum of beta's
gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.aft_read.op import first_value
from kernels.aft_read.triton.forward import (
    CENTRE,
    EXCESS,
    JOINT_MAXIMUM,
    JOINT_SUM,
    MAXIMUM,
    NOTHING,
    ROWS,
    SUM,
    VALUES,
    Launch,
    counted,
    dense,
    exponents,
    falling,
    free_energy,
    join_one,
    join_three,
    join_two,
    launch_forward,
    load,
    place,
    put_rows,
    readable,
    row,
    tile,
    valid_stride,
)
from kernels.fem_attention.triton.prep import excess
from kernels.tiles import rows_of, strides_of


def fused_past(k, v, beta, lam, gate, query, valid, state):
    """Return (o, state) as `aft_read` does. All are [b, h, t, d] with one logit for each value;
    beta and state float32 or None.
    """
    centre = None
    if beta is not None:
        centre = first_value(v, None if valid is None else valid[:, None, :, None])[:, :, 0].float()
        if state is not None:
            centre = torch.where(state[:, :, SUM.value] == 0, centre, state[:, :, CENTRE.value])
    beta, centre, valid, state = (
        None if x is None else x.contiguous() for x in (beta, centre, valid, state)
    )
    lam, gate, query = (None if x is None else rows_of(x) for x in (lam, gate, query))
    return _Read.apply(rows_of(k), rows_of(v), beta, centre, lam, gate, query, valid, state)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, v, beta, centre, lam, gate, query, valid, state):
        o, after, kept = launch_forward(
            k, v, beta, centre, lam, gate, query, valid, state, any(ctx.needs_input_grad)
        )
        ctx.save_for_backward(k, v, beta, centre, lam, gate, query, valid, kept)
        ctx.mark_non_differentiable(after)
        return o, after

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, _):
        dk, dv, d_beta, *others = _launch_backward(rows_of(d_o), *ctx.saved_tensors)
        return dk, dv, d_beta, None, *others, None, None


def _launch_backward(d_o, k, v, beta, centre, lam, gate, query, valid, kept):
    """Return (dk, dv, dbeta, dlam, dgate, dquery), None for inputs that are None. Their memory
    layout is [t, b, h, d].
    """
    batch, heads, tokens, width = v.shape
    # With padding or a query, a block of all channels would exceed the registers.
    launch = Launch(*v.shape, narrow=query is not None or valid is not None)

    def like(x):
        made = (
            None
            if x is None
            else torch.empty(tokens, batch, heads, width, dtype=x.dtype, device=x.device)
        )
        return None if made is None else made.permute(1, 2, 0, 3)

    dk, dv, d_lam, d_gate, d_query = (like(x) for x in (k, v, lam, gate, query))
    per_program = (batch, heads, launch.segments, width)
    d_beta = (
        None if beta is None else torch.empty(per_program, dtype=torch.float32, device=v.device)
    )
    summary = (
        torch.empty(*per_program[:3], 6, width, dtype=torch.float32, device=v.device)
        if launch.segments > 1
        else None
    )
    shared = (*strides_of(d_o, k, v, lam, gate, query), *valid_stride(valid), *launch.sizes)
    options = launch.options | {"num_warps": 8}
    if summary is not None:
        _backward_kernel[launch.grid](
            d_o, k, v, beta, centre, lam, gate, query, valid, kept, summary, *(None,) * 6, *shared,
            SEGMENTS=1,
            BT=launch.constants["BT"], BC=launch.constants["BC"], **options,
        )  # fmt: skip
    _backward_kernel[launch.grid](
        d_o, k, v, beta, centre, lam, gate, query, valid, kept, summary, dk, dv, d_beta, d_lam,
        d_gate, d_query, *shared,
        **launch.constants, **options,
    )  # fmt: skip
    return dk, dv, None if d_beta is None else d_beta.sum((0, 2)), d_lam, d_gate, d_query


@triton.jit
def _get_rows(at, width, mask):
    return (
        tl.load(at + MAXIMUM * width, mask=mask, other=0.0),
        tl.load(at + SUM * width, mask=mask, other=0.0),
        tl.load(at + VALUES * width, mask=mask, other=0.0),
        tl.load(at + JOINT_MAXIMUM * width, mask=mask, other=0.0),
        tl.load(at + JOINT_SUM * width, mask=mask, other=0.0),
        tl.load(at + EXCESS * width, mask=mask, other=0.0),
    )  # fmt: skip


@triton.jit
def sources(
    g,
    mixed,
    factor,
    offset,
    y,
    total,
    joint,
    beyond,
    far,
    beta,
    BETA: tl.constexpr,
    LAM: tl.constexpr,
):
    """Return each token's contribution to the sums R of A, B, H and C, and dF, from the gradient of
    the gate's other factor; offset: mu - c.
    """
    d_mu, d_free, d_z, d_far = g * factor, g, g, g
    if BETA:
        d_mu = g * (1.0 - mixed) * factor if LAM else tl.zeros_like(g)
        d_free = g * mixed if LAM else g
        level = 1.0 / (1.0 + y)
        d_mu += tl.where(far, 0.0, d_free * level)
        d_z = tl.where(far, 0.0, d_free * level / beta[None, :]) / counted(total)
        d_far = tl.where(far, d_free, 0.0)
    from_mean = d_mu * offset
    if BETA:
        from_mean = from_mean + d_far / beta[None, :] + d_z * beyond
    return d_mu / counted(total), from_mean / counted(total), d_z, d_far / counted(joint), d_free


@triton.jit
def _start(
    summary, bh, c, inside, width, segment, segments, SEGMENTS: tl.constexpr, BC: tl.constexpr
):
    """Return R of A, B, C and H at the first token after a segment."""
    r_a = tl.zeros((BC,), tl.float32)
    r_b, r_c, r_h = r_a, r_a, r_a
    if SEGMENTS > 1:
        which = tl.arange(0, SEGMENTS)
        mask = ((which > segment) & (which < segments))[:, None] & inside[None, :]
        at = summary + (bh * segments + which)[:, None] * ROWS * width + c[None, :]
        tops = tl.load(at + MAXIMUM * width, mask=mask, other=-NOTHING)
        weight = falling(tl.min(tops, 0)[None, :], tops)
        r_a = tl.sum(weight * tl.load(at + SUM * width, mask=mask, other=0.0), 0)
        r_b = tl.sum(weight * tl.load(at + VALUES * width, mask=mask, other=0.0), 0)
        r_h = tl.sum(weight * tl.load(at + EXCESS * width, mask=mask, other=0.0), 0)
        tops = tl.load(at + JOINT_MAXIMUM * width, mask=mask, other=-NOTHING)
        r_c = tl.sum(
            falling(tl.min(tops, 0)[None, :], tops)
            * tl.load(at + JOINT_SUM * width, mask=mask, other=0.0),
            0,
        )
    return r_a, r_b, r_c, r_h


@triton.jit
def _backward_kernel(
    d_o, k, v, beta, centre, lam, gate, query, valid, kept, summary, dk, dv, d_beta, d_lam, d_gate,
    d_query,
    db, dh, dt, kb, kh, kt, vb, vh, vt, lb, lh, lt, gb, gh, gt, qb, qh, qt, wb, batch, heads,
    tokens, width, each, segments, chunks,
    SEGMENTS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a segment. dk None: write its summary, without SEGMENTS.

    Long, because the gradients of all inputs come from one pass over the values of a tile, which
    are too many to pass between functions.
    """
    b, h, bh, c, inside = place(heads, width, BC)
    segment = tl.program_id(1)
    BETA: tl.constexpr = beta is not None
    r_a, r_b, r_c, r_h = _start(summary, bh, c, inside, width, segment, segments, SEGMENTS, BC)
    inverse_temperature, middle, d_beta_sum = (
        r_a,
        tl.zeros((BC,), tl.float32),
        tl.zeros((BC,), tl.float32),
    )
    first, joint_first = middle, middle
    if BETA:
        inverse_temperature = tl.load(beta + h * width + c, mask=inside, other=1.0)
        middle = tl.load(centre + bh * width + c, mask=inside, other=0.0)
    end = tl.minimum(segment * each + each, chunks)
    for back in range(end - segment * each):
        chunk = end - 1 - back
        t = chunk * BT + tl.arange(0, BT)
        there = (t < tokens)[:, None] & inside[None, :]
        at = dense(b, h, t, c, batch, heads, width)
        m, s, u, j, i, e = _get_rows(kept + (bh * chunks + chunk) * ROWS * width + c, width, inside)
        kk, vv, centred, z, low, x, read, far, top, total, values, joint_top, joint, beyond = tile(
            k,
            v,
            inverse_temperature,
            middle,
            valid,
            kb,
            kh,
            kt,
            vb,
            vh,
            vt,
            wb,
            b,
            h,
            t,
            c,
            inside,
            tokens,
            m,
            s,
            u,
            j,
            i,
            e,
            BETA,
            BT,
        )
        offset = values / counted(total)
        mean = offset + middle[None, :]
        y, gap, mu, of_query = mean, mean, mean, mean
        factor = (
            load(query, b, h, t, c, qb, qh, qt, there)
            if query is not None
            else tl.full((BT, BC), 1.0, tl.float32)
        )
        if query is not None:
            mu = mean * factor
        if BETA:
            gap, y = free_energy(
                offset, top, total, joint_top, joint, beyond, far, inverse_temperature, middle
            )
            own_gap = gap
            if query is not None:
                of_query = tl.log(tl.where(there, factor, 1.0)) / inverse_temperature[None, :]
                gap += mean * (1.0 - factor) + of_query
        g = load(d_o, b, h, t, c, db, dh, dt, there)
        mixed = load(lam, b, h, t, c, lb, lh, lt, there) if lam is not None else g
        if gate is not None:
            made = mu
            if BETA:
                made += mixed * gap if lam is not None else gap
            if d_gate is not None:
                tl.store(d_gate + at, (g * made).to(d_gate.dtype.element_ty), mask=there)
            g *= load(gate, b, h, t, c, gb, gh, gt, there)
        if d_lam is not None:
            tl.store(d_lam + at, (g * gap).to(d_lam.dtype.element_ty), mask=there)
        x_a, x_b, x_h, x_c, d_free = sources(
            g,
            mixed,
            factor,
            offset,
            y,
            total,
            joint,
            beyond,
            far,
            inverse_temperature,
            BETA,
            lam is not None,
        )
        if d_query is not None:
            d_factor = g * mean
            if BETA:
                d_factor = g * (1.0 - mixed) * mean if lam is not None else tl.zeros_like(g)
                d_factor += d_free / (inverse_temperature[None, :] * tl.where(there, factor, 1.0))
            tl.store(d_query + at, d_factor.to(d_query.dtype.element_ty), mask=there)
        next_read = readable(valid, wb, b, t + 1, inside, tokens)
        next_k = tl.where(next_read, load(k, b, h, t + 1, c, kb, kh, kt, next_read), NOTHING)
        fade = falling(top, tl.maximum(top, next_k))
        weight = tl.where(read, tl.exp(kk - top), 0.0)
        if BETA:
            decay, x_a, x_b, x_h = tl.associative_scan(
                (fade, x_a, x_b, x_h), 0, join_three, reverse=True
            )
            x_h += decay * r_h[None, :]
            r_h = row(x_h, 0, BT)
        else:
            decay, x_a, x_b = tl.associative_scan((fade, x_a, x_b), 0, join_two, reverse=True)
        x_a, x_b = x_a + decay * r_a[None, :], x_b + decay * r_b[None, :]
        r_a, r_b = row(x_a, 0, BT), row(x_b, 0, BT)
        if dk is None:
            first, joint_first = row(top, 0, BT), row(joint_top, 0, BT)
        dv_tile, dk_tile = weight * x_a, weight * (centred * x_a - x_b)
        if BETA:
            beyond_one = excess(x)
            x_h *= weight
            dk_tile += x_h * beyond_one
            x_h *= beyond_one + x
            next_z, _ = exponents(
                next_k,
                load(v, b, h, t + 1, c, vb, vh, vt, next_read),
                inverse_temperature,
                next_read,
            )
            decay, x_c = tl.associative_scan(
                (falling(joint_top, tl.maximum(joint_top, next_z)), x_c), 0, join_one, reverse=True
            )
            x_c += decay * r_c[None, :]
            r_c = row(x_c, 0, BT)
            x_c *= tl.where(read, tl.exp(z - joint_top + low), 0.0)
            dv_tile += x_h * inverse_temperature[None, :] + x_c
            dk_tile += x_c / inverse_temperature[None, :]
            own_gap += tl.where(far, mean, offset * (y / (1.0 + y)))
            if query is not None:
                own_gap += of_query
            d_beta_sum += tl.sum(centred * x_h + vv * x_c / inverse_temperature[None, :], 0)
            d_beta_sum -= tl.sum(tl.where(there, d_free * own_gap, 0.0), 0) / inverse_temperature
        if dk is not None:
            tl.store(dv + at, dv_tile.to(dv.dtype.element_ty), mask=there)
            tl.store(dk + at, dk_tile.to(dk.dtype.element_ty), mask=there)
    if dk is None:
        put_rows(
            summary + (bh * segments + segment) * ROWS * width + c,
            width,
            inside,
            first,
            r_a,
            r_b,
            joint_first,
            r_c,
            r_h,
        )
    elif BETA:
        tl.store(d_beta + (bh * segments + segment) * width + c, d_beta_sum, mask=inside)
