"""FEM's projection up to its read in Triton: one pass over memory forward, one backward.

A program has some tokens of one head, whose channels are contiguous: q, k, the plain slices (which
are scaled only), lambda's logit, g's logit. A tile of phi = f W is computed where it is needed and
not stored. z, f and W are saved, and the backward computes x = z (1 + phi) again. The gradient of x
is, with e = exp(-|x|), y = softplus(x), g = r y and 1 / r = the root mean square of y,

    lambda:   dx = dlambda e / (1 + e)^2
    g:        dx = r (dg - g mean(g dg)) sigmoid(x)
    q and k:  dx is dq or dk rotated back

Then dz = dx (1 + phi) and dphi = dx z. dphi is stored, and torch's matrix products compute df and
dW from it: with df inside, the backward spilled at 16 warps, where it now takes 87 registers. The
read's prep is not part of the kernel: its centre must be known before the values are, and a centre
from the previous step would be state that a resumed run must have. No kernel is autotuned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from kernels.arguments import without_autocast
from kernels.implementations import interpreted
from kernels.tiles import LOG2_E, padded, rows_of, strides_of
from kernels.time_decay_scan.triton import softplus

# Approximate numbers per tile; UNEVEN: if slices are not aligned, so that each number is loaded
# separately.
NUMBERS, UNEVEN, FLOAT32 = 4096, 2048, 1024
WARPS, FEW_WARPS = 16, 8  # for NUMBERS, and for fewer
SOME = tl.constexpr(64)  # channels per step of the slices that are scaled only


def fused_projection(z, features, weight, turn, plain, gates, eps):
    """Return the result of `kernels.fem_projection.fem_projection`, which has checked the
    arguments.

    plain: name -> width of the slices that are scaled only; gates: the widths of lam and gate.
    """
    cos, sin = (None, None) if turn is None else (t.contiguous() for t in turn)
    sizes = (0 if cos is None else 2 * cos.shape[3], sum(plain.values()), *gates)
    z, features, weight = (None if t is None else t.contiguous() for t in (z, features, weight))
    q, k, scaled, lam, gate = _Projection.apply(z, features, weight, cos, sin, sizes, eps)
    rest = scaled.split(list(plain.values()), dim=-1) if len(plain) > 1 else (scaled,)
    made = {"q": q, "k": k, **dict(zip(plain, rest, strict=False)), "lam": lam, "gate": gate}
    return {name: part for name, part in made.items() if part is not None}


class _Projection(torch.autograd.Function):
    """(q, k, plain slices, lambda, g), each [s, b, heads, width] or None where its width in
    ``sizes`` is 0.
    """

    @staticmethod
    def forward(ctx, z, features, weight, cos, sin, sizes, eps):
        launch = _Launch(z, features, cos, sizes)
        made = [
            z.new_empty(*z.shape[:2], launch.heads, width) if width else None
            for width in (sizes[0], *sizes)
        ]
        _forward_kernel[launch.grid](
            z, features, weight, cos, sin, *made, *launch.counts, eps, **launch.constants
        )
        used = features is not None or any(sizes[2:])  # without, dz does not depend on z
        ctx.save_for_backward(z if used else None, features, weight, cos, sin)
        ctx.sizes, ctx.eps, ctx.shape = sizes, eps, z.shape
        return tuple(made)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, *grads):
        z, features, weight, cos, sin = ctx.saved_tensors
        grads = [None if g is None else rows_of(g) for g in grads]
        d_z = next(g for g in grads if g is not None).new_empty(ctx.shape)
        d_phi = None if features is None else torch.empty_like(d_z)
        launch = _Launch(d_z, features, cos, ctx.sizes)
        _backward_kernel[launch.grid](
            z, features, weight, cos, sin, *grads, d_z, d_phi, *strides_of(*grads), *launch.counts,
            ctx.eps, **launch.constants
        )  # fmt: skip
        d_features = d_weight = None
        if d_phi is not None:
            d_features, d_weight = d_phi @ weight, d_phi.flatten(0, 1).mT @ features.flatten(0, 1)
        return d_z, d_features, d_weight, None, None, None, None


class _Launch:
    """Grid, counts (tokens, heads, sequences, sequences that share angles) and constants of both
    kernels.
    """

    def __init__(self, z, features, cos, sizes):
        self.constants = _constants(z.dtype, 0 if features is None else features.shape[2], *sizes)
        tokens, sequences = z.shape[0] * z.shape[1], z.shape[1]
        self.heads = z.shape[2] // (sizes[0] + sum(sizes))
        self.counts = (
            tokens,
            self.heads,
            sequences,
            sequences if cos is not None and cos.shape[1] == 1 else 1,
        )
        self.grid = (triton.cdiv(tokens, self.constants["ROWS"]) * self.heads,)


def _constants(dtype, features, turned, plain, lam, gate):
    """Return the widths, the tokens per program and the warps."""
    numbers = NUMBERS
    if any(width % 8 for width in (turned // 2, plain, lam, gate)):
        numbers = UNEVEN if features else UNEVEN // 2  # more spilled at 42 channels
    numbers, widest = (
        FLOAT32 if dtype == torch.float32 else numbers,
        max(turned // 2, min(plain, SOME.value), lam, gate),
    )
    rows, warps = (
        min(128, max(16, numbers // padded(widest))),
        WARPS if numbers == NUMBERS else FEW_WARPS,
    )
    widths = {"FEATURES": features, "TURNED": turned, "PLAIN": plain, "LAM": lam, "GATE": gate}
    return widths | {"ROWS": 16 if interpreted() else rows, "num_warps": warps}


@triton.jit
def _program(tokens, heads, ROWS: tl.constexpr):
    """Return (tokens, which of them exist, head) of a program.

    Consecutive programs have the heads of the same tokens.
    """
    token = (tl.program_id(0) // heads * ROWS).to(tl.int64) + tl.arange(0, ROWS)[:, None]
    return token, token < tokens, tl.program_id(0) % heads


@triton.jit
def _columns(good, WIDTH: tl.constexpr):
    """Return WIDTH channels [1, a power of two], and which numbers of a tile exist."""
    column = tl.arange(0, 16 if WIDTH < 16 else triton.next_power_of_2(WIDTH))[None, :]
    return column, good & (column < WIDTH)


@triton.jit
def _tokens(features, token, good, FEATURES: tl.constexpr):
    """Load f of some tokens."""
    column, there = _columns(good, FEATURES)
    return tl.load(features + token * FEATURES + column, mask=there, other=0.0)


@triton.jit
def _factors(z, f, weight, begin, good, WIDTH: tl.constexpr, FEATURES: tl.constexpr):
    """Return z and 1 + phi of WIDTH channels from ``begin`` on; z None: its value is not used."""
    column, there = _columns(good, WIDTH)
    scale = tl.full(there.shape, 1.0, tl.float32)
    value = scale
    if z is not None:
        value = tl.load(z + begin + column, mask=there, other=0.0).to(tl.float32)
    if f is not None:
        channel = tl.trans(column)
        feature, part = _columns(channel < WIDTH, FEATURES)
        w = tl.load(weight + (begin + channel) * FEATURES + feature, mask=part, other=0.0)
        scale += tl.dot(f, tl.trans(w), input_precision="tf32x3")
    return value, scale


@triton.jit
def _scaled(z, f, weight, begin, good, WIDTH: tl.constexpr, FEATURES: tl.constexpr):
    """Return x = z (1 + phi) of WIDTH channels from ``begin`` on."""
    value, scale = _factors(z, f, weight, begin, good, WIDTH, FEATURES)
    return value * scale


@triton.jit
def _put(out, at, made, there):
    tl.store(out + at, made.to(out.dtype.element_ty), mask=there)


@triton.jit
def _back(d_z, d_phi, at, there, value, scale, dx):
    """Store dz and dphi of a tile whose x = z (1 + phi) has the gradient dx.

    value and scale: z and 1 + phi.
    """
    _put(d_z, at, dx * scale, there)
    if d_phi is not None:
        _put(d_phi, at, dx * value, there)


@triton.jit
def _gate(x, there, eps, WIDTH: tl.constexpr):
    """Return (g, r) of logits x."""
    y = tl.where(there, softplus(x), 0.0)
    r = 1.0 / tl.sqrt(tl.sum(y * y, 1) / WIDTH + eps)[:, None]
    return y * r, r


@triton.jit
def _forward_kernel(
    z, features, weight, cos, sin, q, k, plain, lam, gate, tokens, heads, batch, share, eps,
    FEATURES: tl.constexpr, TURNED: tl.constexpr, PLAIN: tl.constexpr, LAM: tl.constexpr,
    GATE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = TURNED // 2
    HEAD: tl.constexpr = 2 * TURNED + PLAIN + LAM + GATE
    token, good, head = _program(tokens, heads, ROWS)
    row = token * heads + head
    z += row * HEAD
    f = None
    if features is not None:
        f = _tokens(features, token, good, FEATURES)
        weight += head * HEAD * FEATURES
    if TURNED:
        column, there = _columns(good, HALF)
        angle = token // share * HALF + column
        c, s = (
            tl.load(cos + angle, mask=there, other=0.0),
            tl.load(sin + angle, mask=there, other=0.0),
        )
        for n in tl.static_range(2):
            first = _scaled(z, f, weight, n * TURNED, good, HALF, FEATURES)
            second = _scaled(z, f, weight, n * TURNED + HALF, good, HALF, FEATURES)
            out = (q if n == 0 else k) + row * TURNED + column
            _put(out, 0, first * c - second * s, there)
            _put(out, HALF, second * c + first * s, there)
    for begin in tl.static_range(0, PLAIN, SOME):
        column, there = _columns(good, PLAIN - begin if PLAIN - begin < SOME else SOME)
        x = _scaled(
            z,
            f,
            weight,
            2 * TURNED + begin,
            good,
            PLAIN - begin if PLAIN - begin < SOME else SOME,
            FEATURES,
        )
        _put(plain, row * PLAIN + begin + column, x, there)
    if LAM:
        column, there = _columns(good, LAM)
        x = _scaled(z, f, weight, 2 * TURNED + PLAIN, good, LAM, FEATURES)
        e = tl.exp2(-tl.abs(x) * LOG2_E)
        _put(lam, row * LAM + column, tl.where(x < 0, e, 1.0) / (1.0 + e), there)
    if GATE:
        column, there = _columns(good, GATE)
        g, _ = _gate(
            _scaled(z, f, weight, 2 * TURNED + PLAIN + LAM, good, GATE, FEATURES), there, eps, GATE
        )
        _put(gate, row * GATE + column, g, there)


@triton.jit
def _backward_kernel(
    z, features, weight, cos, sin, d_q, d_k, d_plain, d_lam, d_gate, d_z, d_phi,
    qt, qb, qh, kt, kb, kh, pt, pb, ph, lt, lb, lh, gt, gb, gh, tokens, heads, batch, share, eps,
    FEATURES: tl.constexpr, TURNED: tl.constexpr, PLAIN: tl.constexpr, LAM: tl.constexpr,
    GATE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = TURNED // 2
    HEAD: tl.constexpr = 2 * TURNED + PLAIN + LAM + GATE
    token, good, head = _program(tokens, heads, ROWS)
    row = (token * heads + head) * HEAD
    if z is not None:
        z += row
    d_z += row
    f = None
    if features is not None:
        f = _tokens(features, token, good, FEATURES)
        weight += head * HEAD * FEATURES
        d_phi += row
    t, b = token // batch, token % batch
    if TURNED:
        column, there = _columns(good, HALF)
        angle = token // share * HALF + column
        c, s = (
            tl.load(cos + angle, mask=there, other=0.0),
            tl.load(sin + angle, mask=there, other=0.0),
        )
        for n in tl.static_range(2):
            given = (
                d_q + t * qt + b * qb + head * qh if n == 0 else d_k + t * kt + b * kb + head * kh
            ) + column
            first = tl.load(given, mask=there, other=0.0).to(tl.float32)
            second = tl.load(given + HALF, mask=there, other=0.0).to(tl.float32)
            value, scale = _factors(z, f, weight, n * TURNED, good, HALF, FEATURES)
            _back(d_z, d_phi, n * TURNED + column, there, value, scale, first * c + second * s)
            value, scale = _factors(z, f, weight, n * TURNED + HALF, good, HALF, FEATURES)
            _back(
                d_z, d_phi, n * TURNED + HALF + column, there, value, scale, second * c - first * s
            )
    for begin in tl.static_range(0, PLAIN, SOME):
        column, there = _columns(good, PLAIN - begin if PLAIN - begin < SOME else SOME)
        dx = tl.load(
            d_plain + t * pt + b * pb + head * ph + begin + column, mask=there, other=0.0
        ).to(tl.float32)
        value, scale = _factors(
            z,
            f,
            weight,
            2 * TURNED + begin,
            good,
            PLAIN - begin if PLAIN - begin < SOME else SOME,
            FEATURES,
        )
        _back(d_z, d_phi, 2 * TURNED + begin + column, there, value, scale, dx)
    if LAM:
        column, there = _columns(good, LAM)
        value, scale = _factors(z, f, weight, 2 * TURNED + PLAIN, good, LAM, FEATURES)
        e = tl.exp2(-tl.abs(value * scale) * LOG2_E)
        dx = tl.load(d_lam + t * lt + b * lb + head * lh + column, mask=there, other=0.0).to(
            tl.float32
        )
        _back(
            d_z,
            d_phi,
            2 * TURNED + PLAIN + column,
            there,
            value,
            scale,
            dx * e / ((1.0 + e) * (1.0 + e)),
        )
    if GATE:
        column, there = _columns(good, GATE)
        value, scale = _factors(z, f, weight, 2 * TURNED + PLAIN + LAM, good, GATE, FEATURES)
        g, r = _gate(value * scale, there, eps, GATE)
        dx = tl.load(d_gate + t * gt + b * gb + head * gh + column, mask=there, other=0.0).to(
            tl.float32
        )
        dx = (
            r
            * (dx - g * (tl.sum(dx * g, 1)[:, None] / GATE))
            / (1.0 + tl.exp2(-value * scale * LOG2_E))
        )
        _back(d_z, d_phi, 2 * TURNED + PLAIN + LAM + column, there, value, scale, dx)
