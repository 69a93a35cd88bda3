"""Free Energy Mixer read over any prior that can read value streams.

`free_energy_read` reads a sequence; `ValueWindow` is for decoding. The prior is a function from
value streams to their reads. This module does not depend on the prior's kind, models, layers and
configuration.

A constant per (batch, head, channel) cancels out of the free energy. Let c be the middle of v's
range over the sequence (detached) and x = beta (v - c). A prior that reads [v | U] as
[mu | Z] = sum_i p_t(i) [v_i | U_i] gives

    kappa = 0:  U = exp(x)                                        F - mu = log(Z) / beta - (mu - c)
    kappa = 1:  U = exp(x) - 1 - x,  y = beta (mu - c) + Z        F - mu = (log1p(y) - y + Z) / beta

kappa = 1 where beta * range is small. U then contains only the part beyond the mean, so that a
small F - mu keeps its digits, which matters most in bfloat16. No value is clipped.

Decoding: `ValueWindow` is a running window of the values seen so far, so that exp(beta (v - c))
stays in range. The state of a scan contains sums of U. When a new value moves c, these sums are
multiplied by exp(beta (c_old - c_new)). Any constant is valid, so the result stays the same.

The definition, `exact_read`, is exact for any finite values:

    mu[t, j] = sum_i p_t(i) v[i, j]
    F[t, j]  = (1 / beta_j) log sum_i exp(log p_t(i) + beta_j v[i, j])

The log-sum-exp of F has a separate maximum for every (t, j). The block boundaries depend on shapes
alone and an unread key is an exact zero in every sum, so that later tokens never change a bit of an
output. It takes O(t^2) time; the backward recomputes each block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.arguments import check_first, check_others, check_read, operation
from kernels.free_energy.ranges import MAX_RANGE, Decision
from kernels.implementations import Implementation, Op, lacks_triton

SHIFT_BELOW = 5.0  # kappa = 1 where the range of x is below this
# More than half of MAX_RANGE, so that no value within the range reaches it; exp(CLAMP)**2 is a
# finite float32.
CLAMP = MAX_RANGE / 2 + 0.5
FAINT = math.exp(-CLAMP)
# Lower bound of y = E[exp(x)] - 1; only rounding can give less.
LOWEST_Y = math.expm1(-SHIFT_BELOW / 2)

OP = Op(
    "free_energy",
    "FEM's gated read over any prior that reads value streams; the prior's own operation chooses "
    "for itself",
    (
        Implementation("triton", "prep and epilogue in one pass each", lacks_triton),
        Implementation("reference", "prep and epilogue in PyTorch"),
    ),
)


@operation("v")
def free_energy_read(
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    gate: Tensor | None,
    read: Callable[[Tensor], Tensor],
    log_weights: Callable[[int, int], Tensor],
    *,
    log_read: Callable[[Tensor, Tensor], Tensor] | None = None,
    terms: int = 1,
    exact: bool | None = None,
    decision: Decision | None = None,
    span: Tensor | None = None,
    products: torch.dtype | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Return the two-level gated read o = gate * ((1 - lam) * mu + lam * F).

    mu and F are taken under the prior p that ``read`` reads with.

    Shapes: v, lam, gate [b, h, t, dv], beta [h, dv] (positive); returns [b, h, t, dv] in v's dtype.
    beta None: o = mu. lam None: o = F. gate None: no gate.
    Dtypes: float64, float32, bfloat16 or float16; computed in float32 (float64 for float64).

    read(streams [b, h, t, n]) returns sum_i p_t(i) streams_i [b, h, t, n], in float32 or float64,
    with sum_i p_t(i) = 1. It is called once, with n = 2 dv ([v | U], see `kernels.free_energy`), or
    n = dv without beta. products: the dtype to which ``read`` rounds streams and reads; if it is
    v's, the fast form may exchange them with ``read`` in this dtype.

    log_weights(start, stop) returns log p_t(i) of these rows, [b, h, stop - start, t], up to a
    constant per row, -inf for unread keys. The definition calls it block by block, O(t^2) in total.

    log_read(heads [n], x [n, t, dv]) returns log sum_i p_t(i) exp(x_i) [n, t, dv] for the heads
    with these indices among the b h heads, in x's dtype, float64. It is required where exact is
    None.

    exact: True runs the definition. None: where beta * (max v - min v) over the sequence exceeds 80
    in a channel, F is read by ``log_read``, with one warning, because [v | U] cannot represent it;
    the other channels keep every bit. To find the range, each call with beta waits for the device,
    unless the layer passes a ``decision`` (`kernels.free_energy.ranges`). False: the fast form
    always runs. If a range exceeds 80 all the same, the results are finite, but F loses the values
    far below the greatest.

    terms: how many numbers ``log_weights`` computes for one weight. span [b, h, 2, dv]: where v is
    a part of the sequence, the least and greatest value of each channel in the full sequence.
    implementation: one of OP's names; it selects the code before and after ``read``.

    Raises ValueError for shapes and implementations that do not fit.
    Equations: Free Energy Mixer, the two-level gated read; numerics in kernels/README.md.
    """
    check_first("free_energy_read", "v", v)
    expected = {
        "beta": (beta, (v.shape[1], v.shape[3])),
        "lam": (lam, v.shape),
        "gate": (gate, v.shape),
    }
    check_others("free_energy_read", "v", v, expected)
    check_read("free_energy_read", beta, lam)
    chosen = OP.choose(
        implementation, v.device, {"triton": "float64" if v.dtype == torch.float64 else None}.get
    )
    wide = compute_type(v)
    if beta is None:
        values = v if v.dtype == products and not exact else v.to(wide)
        out = exact_read(values, None, log_weights, terms=terms)[0] if exact else read(values)
        return (out if gate is None else gate.to(wide) * out).to(v.dtype)
    temperature = beta.to(wide)
    if exact:
        mu, free_energy = exact_read(v.to(wide), temperature, log_weights, terms=terms)
        assert free_energy is not None
        return mix_gap(mu, free_energy - mu, lam, gate).to(v.dtype)
    window = (_triton_window if chosen == "triton" else value_window)(
        v if span is None else span, temperature
    )
    used = Decision() if decision is None else decision
    heads = 0 if exact is False else used.heads(window.largest)
    # With wild heads, the gradients of both forms are summed in the compute dtype.
    narrow = chosen == "triton" and v.dtype == products and not heads
    values = v if narrow else v.to(wide)
    out, mu = (_triton_read if chosen == "triton" else _read)(
        values, temperature, lam, gate, read, window
    )
    if heads:
        OP.log.warning(
            "free_energy_read: beta * (max v - min v) reaches %.4g, over %g: for heads beyond %g "
            "the exact form (slower) runs, too",
            math.nan if used.basis is None else used.basis,
            used.limit,
            MAX_RANGE,
        )
        assert log_read is not None, "exact=None without log_read"
        out = _with_wild_channels(out, mu, values, temperature, lam, gate, log_read, heads)
    return out.to(v.dtype)


def _with_wild_channels(
    out: Tensor,
    mu: Tensor,
    v: Tensor,
    beta: Tensor,
    lam: Tensor | None,
    gate: Tensor | None,
    log_read: Callable[[Tensor, Tensor], Tensor],
    heads: int,
) -> Tensor:
    """Return o with the channels over MAX_RANGE read again, in the ``heads`` heads with the
    greatest range.

    The choice of heads and channels stays on the device; the host does not wait for it. The fast
    form is finite everywhere, so its gradients of the replaced channels are exact zeros.
    """
    centre, spread = value_centre_and_range(v, beta)
    order = spread.flatten(0, 1).amax((1, 2))
    chosen = order.topk(min(heads, len(order))).indices

    def of(t: Tensor) -> Tensor:
        return t.flatten(0, 1).index_select(0, chosen)

    wild, middle, rows, fast = (
        ~(of(spread) <= MAX_RANGE),
        of(centre),
        of(beta[:, None].expand_as(centre)),
        of(mu),
    )
    # In float64: a logarithm of 70 in float32 gives weights with an error of 4e-6, and beta's
    # gradient is a small difference of values of both signs.
    deviations, slopes = (of(v) - middle).double(), rows.double()
    free_energy = middle + (log_read(chosen, deviations * slopes) / slopes).to(fast.dtype)
    exact = mix_gap(
        fast,
        free_energy - fast,
        None if lam is None else of(lam),
        None if gate is None else of(gate),
    )
    return out.flatten(0, 1).index_copy(0, chosen, torch.where(wild, exact, of(out))).view_as(out)


@dataclass(frozen=True)
class Window:
    """Constants of stream and read besides beta: centre and shifted (kappa = 1), [b, h, 1, dv], and
    the largest beta * range, in any shape.
    """

    centre: Tensor
    shifted: Tensor
    largest: Tensor


def value_window(span: Tensor, beta: Tensor) -> Window:
    """Return the `Window` of the values ``span`` [b, h, t, dv], or of their least and greatest
    values.
    """
    centre, spread = value_centre_and_range(span, beta)
    return Window(centre, spread < SHIFT_BELOW, spread)


def _triton_window(span: Tensor, beta: Tensor) -> Any:
    """Return the same constants as `value_window`, computed by a Triton kernel."""
    from kernels.fem_attention.triton.prep import value_constants

    return value_constants(span, beta)


def _read(
    v: Tensor,
    beta: Tensor,
    lam: Tensor | None,
    gate: Tensor | None,
    read: Callable[[Tensor], Tensor],
    window: Window,
) -> tuple[Tensor, Tensor]:
    """Return o and mu in the compute dtype, which v and beta have."""
    rows = beta[:, None].expand_as(window.centre)
    mu, z = read(
        torch.cat((v, ValueStream.apply(v, rows, window.centre, window.shifted)), dim=-1)
    ).chunk(2, dim=-1)
    return mix_gap(
        mu, FreeEnergyGap.apply(mu, z, rows, window.centre, window.shifted), lam, gate
    ), mu


def _triton_read(
    v: Tensor,
    beta: Tensor,
    lam: Tensor | None,
    gate: Tensor | None,
    read: Callable[[Tensor], Tensor],
    window: Any,
) -> tuple[Tensor, Tensor]:
    """Return o and mu as `_read`, computed by the prep and epilogue kernels of `fem_attention`."""
    from kernels.fem_attention.triton.epilogue import GatedRead
    from kernels.fem_attention.triton.prep import ValueStreams

    reads = read(ValueStreams.apply(v, beta, window))
    out: Tensor = GatedRead.apply(reads, beta, replace(window, wild=None), lam, gate)
    return out, reads[..., : v.shape[-1]]


def mix(mu: Tensor, free_energy: Tensor | None, lam: Tensor | None, gate: Tensor | None) -> Tensor:
    """Return gate * (mu + lam (F - mu)) in mu's dtype: mu if F is None, F if lam is None, without a
    gate if gate is None.
    """
    if free_energy is None:
        o = mu
    elif lam is None:
        o = free_energy
    else:
        o = mu + lam.to(mu.dtype) * (free_energy - mu)
    return o if gate is None else gate.to(mu.dtype) * o


def mix_gap(mu: Tensor, gap: Tensor, lam: Tensor | None, gate: Tensor | None) -> Tensor:
    """Return the same as `mix`, from the difference F - mu."""
    out = mu + gap if lam is None else torch.addcmul(mu, lam.to(gap.dtype), gap)
    return out if gate is None else gate.to(out.dtype) * out


def compute_type(t: Tensor) -> torch.dtype:
    """Return the dtype of logarithms, exponentials and stored sums: float64 for float64, else
    float32.
    """
    return torch.promote_types(t.dtype, torch.float32)


def value_centre_and_range(v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the constant c and the range of beta * v over the sequence.

    v is [b, h, t, dv], beta [h, dv]. c is the middle of v's range. Where beta * range exceeds 80, c
    is high - 40 / beta, so that no exponential overflows. Both results are [b, h, 1, dv], detached,
    float32 or float64.
    Source: Free Energy Mixer, the stabilised read; any constant is valid.
    """
    low, high = torch.aminmax(v.detach(), dim=2, keepdim=True)
    low, high = low.to(compute_type(v)), high.to(compute_type(v))
    rows = beta.detach().to(compute_type(v))[:, None]
    return _centre(low, high, rows), rows * (high - low)


def _centre(low: Tensor, high: Tensor, beta: Tensor) -> Tensor:
    return torch.maximum((low + high) / 2, high - MAX_RANGE / 2 / beta)


class ValueStream(torch.autograd.Function):
    """U [b, h, t, dv] from v, beta, centre [b, h, 1, dv] and shifted: True where kappa = 1, a
    tensor like centre or one bool for all channels.

    dU/dx = exp(x) - kappa.
    """

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, beta: Tensor, centre: Tensor, shifted: Tensor | bool
    ) -> Tensor:
        """Return U in v's dtype (float32 or float64)."""
        x = (v - centre).mul_(beta)
        slope, u = _each(shifted, lambda: _excess(x), lambda: [x.exp()] * 2)
        ctx.save_for_backward(x, slope, beta)
        return u

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of v and beta."""
        x, slope, beta = ctx.saved_tensors
        dx = grads[0] * slope
        d_beta = (dx * x).sum(2, keepdim=True) / beta
        return dx.mul_(beta), d_beta, None, None


class FreeEnergyGap(torch.autograd.Function):
    """F - mu >= 0 (Jensen's inequality) from the reads mu and Z [b, h, t, dv].

    The two clamps correct rounding only; the gradient ignores them. With a range over MAX_RANGE,
    all values that a row reads may be so far below c that Z is less than exp(-CLAMP). F - mu then
    has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, mu: Tensor, z: Tensor, beta: Tensor, centre: Tensor, shifted: Tensor | bool
    ) -> Tensor:
        """Return F - mu; beta, centre and shifted as in `ValueStream`."""
        offset = mu - centre
        gap, mass, tilt = _each(
            shifted,
            lambda: _small_gap(offset, z, beta),
            lambda: [z.log().div_(beta).sub_(offset), z, torch.ones_like(z)],
        )
        gap, mass = gap.clamp_(min=0), mass * beta
        ctx.faint = shifted is not True  # where kappa = 1, the mass is at least 1 + LOWEST_Y
        if ctx.faint:
            mass.masked_fill_(mass < FAINT * beta, torch.inf)
        ctx.save_for_backward(offset, mass, tilt, gap, beta)
        return gap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of mu, Z and beta."""
        offset, mass, tilt, gap, beta = ctx.saved_tensors
        d_gap = grads[0].masked_fill(mass == torch.inf, 0) if ctx.faint else grads[0]
        d_mu = (d_gap * tilt).neg_()
        d_beta = (d_mu * offset).addcmul_(d_gap, gap, value=-1).sum(2, keepdim=True) / beta
        return d_mu, d_gap / mass, d_beta, None, None


def _each(
    shifted: Tensor | bool,
    near: Callable[[], Sequence[Tensor]],
    far: Callable[[], Sequence[Tensor]],
) -> Sequence[Tensor]:
    """Return ``near()`` in channels with kappa = 1 and ``far()`` in the others.

    shifted: a tensor, or one bool for all channels; then only what is used is computed.
    """
    if isinstance(shifted, bool):
        return near() if shifted else far()
    return [torch.where(shifted, *both) for both in zip(near(), far(), strict=True)]


def _excess(x: Tensor) -> list[Tensor]:
    """Return exp(x) - 1 and exp(x) - 1 - x, a small difference and therefore taken in float64."""
    wide = x.double()
    made = wide.expm1()
    return [made.to(x.dtype), (made - wide).to(x.dtype)]


def _small_gap(offset: Tensor, z: Tensor, beta: Tensor) -> list[Tensor]:
    """Return F - mu = (log1p(y) - beta (mu - c)) / beta, 1 + y and y / (1 + y).

    The difference is small and therefore taken in float64.
    """
    first = offset.double() * beta
    y = (first + z).clamp_(min=LOWEST_Y)
    gap = y.log1p().sub_(first).div_(beta).to(z.dtype)
    y = y.to(z.dtype)
    mass = 1 + y
    return [gap, mass, y / mass]


class ValueWindow:
    """Least and greatest value of each channel so far, and the constant c that follows from them.

    While beta * (high - low) <= 80, c is the middle and every exponent is in [-40, 40]. Beyond 80,
    c = high - 40 / beta: values far below the greatest underflow smoothly, and F becomes mu where
    no other value is read. state [b, h, 2, dv]: (low, high); None: no past. On a CPU, one warning
    reports a range over 80. On a device and in a compiled step no warning is logged, because each
    step would have to wait for the range.
    """

    def __init__(self, v: Tensor, beta: Tensor, state: Tensor | None) -> None:
        """Extend the window by v [b, h, t, dv], the new values (float32 or float64), with beta
        [h, dv] of the same dtype.

        No gradient flows through a window.
        """
        self.beta = beta.detach()[:, None].expand(v.shape[0], -1, -1, -1)
        new = torch.stack(torch.aminmax(v.detach(), dim=2), dim=2)
        before = new if state is None else state
        low = torch.minimum(before[:, :, :1], new[:, :, :1])
        high = torch.maximum(before[:, :, 1:], new[:, :, 1:])
        self.state = torch.cat((low, high), dim=2)
        self.centre = _centre(low, high, self.beta)
        self.rescale = torch.exp(
            self.beta * (_centre(before[:, :, :1], before[:, :, 1:], self.beta) - self.centre)
        )
        self.v = v
        if v.device.type == "cpu" and not torch.compiler.is_compiling():
            self._warn(float((self.beta * (high - low)).max()))

    @staticmethod
    def _warn(largest: float) -> None:
        if not largest <= MAX_RANGE:
            OP.log.warning(
                "decoding: beta * (max v - min v) reaches %.4g, over %g: values that far under "
                "the greatest so far are lost to F",
                largest,
                MAX_RANGE,
            )

    def stream(self) -> Tensor:
        """Return U [b, h, t, dv], to be read together with v.

        First multiply the sums in the state by ``rescale`` [b, h, 1, dv].
        """
        return ValueStream.apply(self.v, self.beta, self.centre, False)

    def gap(self, mu: Tensor, z: Tensor) -> Tensor:
        """Return F - mu [b, h, t, dv] from the reads of v and U."""
        return FreeEnergyGap.apply(mu, z, self.beta, self.centre, False)


# Most terms of a block, [batch, heads, rows, channels, keys]: about a CPU's cache, or enough to
# fill a device.
BLOCK_TERMS_CPU, BLOCK_TERMS_DEVICE = 1 << 20, 1 << 24


def exact_read(
    v: Tensor, beta: Tensor | None, log_weights: Callable[[int, int], Tensor], *, terms: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Return (mu, F), each [b, h, t, dv], of v [b, h, t, dv] (float32 or float64) and beta [h, dv].

    F is None without beta. log_weights(start, stop) returns the log weights [b, h, stop - start, t]
    of the rows start to stop, -inf for unread keys, with at least one finite weight per row. This
    function normalises them.
    terms: how many numbers it computes for one weight, for the size of a block.
    """
    b, h, t, dv = v.shape
    budget = BLOCK_TERMS_CPU if v.device.type == "cpu" else BLOCK_TERMS_DEVICE
    size = max(1, min(t, budget // (b * h * t * max(dv, terms))))

    def rows(start: int, stop: int, v: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        log_p = log_weights(start, stop).log_softmax(-1)
        mu = log_p.exp() @ v
        if beta is None:
            return mu, None
        return mu, _FreeEnergy.apply(log_p, v, beta)

    reads = [
        checkpoint(
            rows,
            start,
            min(start + size, t),
            v,
            beta,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in range(0, t, size)
    ]
    mu = torch.cat([read[0] for read in reads], dim=2)
    return mu, None if beta is None else torch.cat([read[1] for read in reads], dim=2)


class _FreeEnergy(torch.autograd.Function):
    """F [b, h, rows, dv] of log_p [b, h, rows, t], v and beta.

    The backward computes E_w[v] - F as one difference, because each term alone may be large.
    """

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        free_energy = _joint(log_p, v, beta).logsumexp(-1) / beta[:, None]
        ctx.save_for_backward(log_p, v, beta, free_energy)
        return free_energy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        log_p, v, beta, free_energy = ctx.saved_tensors
        (d_free,) = grads
        # w = p exp(beta (v - F)) is computed as one softmax: w is at most 1, but its factors alone
        # may overflow.
        w = _joint(log_p, v, beta).softmax(-1)
        d_beta = (((w * v.mT[:, :, None]).sum(-1) - free_energy) * d_free).sum((0, 2)) / beta
        w = w * d_free[..., None]
        return (w / beta[:, None, :, None]).sum(3), w.sum(2).mT, d_beta


def _joint(log_p: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Return log p_t(i) + beta_j v[i, j]: [b, h, rows, dv, t]."""
    return log_p[:, :, :, None] + (beta[:, None] * v).mT[:, :, None]
