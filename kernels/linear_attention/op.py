"""Linear attention with decay: `linear_attention`, and `log_weights` for exact forms. Gates and
norms belong to the layer, and feature maps other than relu(x) + eps.

The definition runs in plain PyTorch on any device, chunk by chunk, with time and memory linear in
t. Every exponent is <= 0. Pairs within a chunk are weighted by exp of the sum of log-decays over
their window, which is built term by term (never as a difference of cumulative sums), so decays of
any strength, including -inf, are exact; a state passes from chunk to chunk. No loop over tokens.
Segments of several chunks are recomputed in the backward. The chunk boundaries depend on shapes
alone, and a masked key is an exact zero: no bit depends on later tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, relu

from kernels.arguments import check_first, check_others, operation, without_autocast
from kernels.implementations import Implementation, Op, lacks_fla, lacks_triton
from kernels.registered import registered

CHUNK, CHUNK_PER_CHANNEL = (
    64,
    16,
)  # tokens whose pairs are computed at once; with channels' decays a pair has dk exponents
CHUNKS = 16  # chunks of a segment

OP = Op(
    "linear_attention",
    "y_t = sum of (q_t * exp(c_t - c_i)) . k_i v_i, decays per head or per channel, with a state",
    (
        Implementation(
            "triton",
            "chunks in parallel, their states in one pass; normaliser, decays and states exact",
            lacks_triton,
        ),
        Implementation(
            "fla", "flash-linear-attention's chunked kernels", lacks_fla, automatic=False
        ),
        Implementation("reference", "plain PyTorch, chunk by chunk"),
    ),
)


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, *_: Any, normalise: bool, **__: Any
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return v.new_empty(v.shape), v.new_empty(
        *k.shape[:2], k.shape[3], v.shape[3] + normalise, dtype=wide
    )


@operation("q", state=True)
@registered(
    _shapes, traceable=lambda *_, **__: not torch.is_grad_enabled()
)  # its backward uses autograd
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    initial: Tensor | None = None,
    *,
    causal: bool = True,
    normalise: bool = False,
    eps: float | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return y_t = sum_{i <= t} ((q_t * exp(c_t - c_i)) . k_i) v_i with c = cumsum(log_decay), and
    the state after the last token.

    Shapes: q, k [b, h, t, dk], v [b, h, t, dv], log_decay [b, h, t] (one decay for each head), [b,
    h, t, dk] (for each channel) or None, initial [b, h, dk, dv], the state before the first token.
    Returns y [b, h, t, dv] and the state [b, h, dk, dv]. normalise: y is divided by the sum of its
    weights, which must not be negative (q and k >= 0); a row whose weights are all 0 returns its
    own v. States then have one more column, the sums over ones: [b, h, dk, dv + 1]. eps: relu(q) +
    eps and relu(k) + eps, rounded to q's type, replace q and k. causal False: all tokens, weighted
    by exp(-|c_t - c_i|); no initial. The caller must ensure log_decay <= 0 (-inf, a full reset, is
    allowed); it is not checked, because that would wait for the device.
    Types: q, k, v all float64, float32, bfloat16 or float16, log_decay the same or float32; sums
    and states are float32 (float64 for float64). y has q's type. Time and memory are linear in t,
    forward and backward. implementation: "triton" multiplies float32 exactly and bfloat16 on the
    tensor cores; "reference" computes in float32 or float64; "fla" (only on request) supports
    bfloat16 and finite decays, and loses digits of a weak decay after a strong one. Raises
    ValueError for shapes, types, devices or implementations that do not fit. Equations: Free Energy
    Mixer, appendix H.2 and H.3; exact, where the released code clips the cumulative decay.
    """
    _check(q, k, v, log_decay, initial, causal, normalise)
    unfit = {
        "triton": _unfit(q, causal, (torch.float32, torch.bfloat16)),
        "fla": _unfit(q, causal, (torch.bfloat16,)),
    }
    chosen = OP.choose(implementation, q.device, unfit.get)
    if chosen == "triton":
        from kernels.linear_attention.triton.function import TritonLinearAttention

        return TritonLinearAttention.apply(q, k, v, log_decay, initial, normalise, eps)
    q, k = features(q, eps), features(k, eps)
    if chosen == "fla":
        return _by_fla(q, k, v, log_decay, initial, normalise)
    wide = torch.promote_types(q.dtype, torch.float32)
    decay = (
        None
        if log_decay is None
        else (log_decay if log_decay.dim() == 4 else log_decay[..., None]).to(wide)
    )
    if causal:
        y, state = LinearAttention.apply(
            q.to(wide), k.to(wide), v.to(wide), decay, initial, normalise
        )
    else:
        y, state = both_ways(q.to(wide), k.to(wide), v.to(wide), decay, normalise)
    return y.to(q.dtype), state


def features(x: Tensor, eps: float | None) -> Tensor:
    """Return relu(x) + eps in x's type, or x if eps is None."""
    return x if eps is None else relu(x) + eps


def _unfit(q: Tensor, causal: bool, types: tuple[torch.dtype, ...]) -> str | None:
    if not causal:
        return "causal=False reads both ways"
    return None if q.dtype in types else str(q.dtype).removeprefix("torch.")


def _by_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the same with flash-linear-attention, whose layout is [b, t, h, d]. The normaliser is
    a column of ones appended to the values.
    """
    values = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1) if normalise else v
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, values)]
    decay = None if log_decay is None else log_decay.float().transpose(1, 2).contiguous()
    if log_decay is not None and log_decay.dim() == 4:
        from fla.ops.gla import chunk_gla as chunked
    else:
        from fla.ops.simple_gla import chunk_simple_gla as chunked
    y, state = chunked(*turned, g=decay, scale=1.0, initial_state=initial, output_final_state=True)
    y = y.transpose(1, 2)
    if not normalise:
        return y, state
    mass = y[..., -1:]
    empty = mass <= 0
    return torch.where(empty, v, y[..., :-1] / mass.masked_fill(empty, 1)), state


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    causal: bool,
    normalise: bool,
) -> None:
    check_first("linear_attention", "q", q)
    check_first("linear_attention", "v", v)
    (b, h, t, dk), dv, wide = q.shape, v.shape[3], torch.promote_types(q.dtype, torch.float32)
    expected: dict[str, Any] = {"k": (k, q.shape, q.dtype), "v": (v, (b, h, t, dv), q.dtype)}
    expected |= {
        "log_decay": (log_decay, [(b, h, t), q.shape], q.dtype, wide),
        "initial": (initial, (b, h, dk, dv + normalise), wide),
    }
    check_others("linear_attention", "q", q, expected)
    if not causal and initial is not None:
        raise ValueError(
            "linear_attention: initial is the past of a causal scan; leave it out with causal=False"
        )


class LinearAttention(torch.autograd.Function):
    """Autograd function (y, state) of q, k [b, h, t, dk], v [b, h, t, dv], log_decay [b, h, t, 1 or
    dk] or None, initial.

    All arguments are float32 or all are float64.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        initial: Tensor | None,
        normalise: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute the causal form of `linear_attention`. normalise: the state has one more column,
        the sums over ones.
        """
        state = (
            q.new_zeros(*k.shape[:2], k.shape[3], v.shape[3] + normalise)
            if initial is None
            else initial
        )
        starts, outputs = [], []
        for part in _segments(q, log_decay):
            starts.append(state)
            decay = None if log_decay is None else log_decay[:, :, part]
            output, state = _segment(
                q[:, :, part], k[:, :, part], v[:, :, part], decay, state, normalise
            )
            outputs.append(output)
        ctx.save_for_backward(q, k, v, log_decay, torch.stack(starts))
        ctx.normalise, ctx.has_initial = normalise, initial is not None
        return torch.cat(outputs, dim=2), state

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Process segments from the last to the first; each is recomputed with gradients."""
        q, k, v, log_decay, starts = ctx.saved_tensors
        dy, d_state = grads
        given = [q, k, v] if log_decay is None else [q, k, v, log_decay]
        gradients = [torch.empty_like(x) for x in given]
        for part, start in reversed(list(zip(_segments(q, log_decay), starts, strict=True))):
            with torch.enable_grad():
                leaves = [x[:, :, part].detach().requires_grad_() for x in given]
                before = start.detach().requires_grad_()
                decay = None if log_decay is None else leaves[3]
                results = _segment(leaves[0], leaves[1], leaves[2], decay, before, ctx.normalise)
            *pieces, d_state = torch.autograd.grad(
                results, (*leaves, before), (dy[:, :, part], d_state)
            )
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient[:, :, part] = piece
        return (
            *gradients,
            *[None] * (4 - len(gradients)),
            d_state if ctx.has_initial else None,
            None,
        )


class Damp(torch.autograd.Function):
    """Autograd function x * exp(a) for a <= 0 that broadcasts to x.

    The backward multiplies by the decay first, so that inf * 0 cannot occur where exp(a) is 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, factor: Tensor | None = None) -> Tensor:
        """Return x * exp(a). factor: exp(a), if it is already computed."""
        factor = a.exp() if factor is None else factor
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and a."""
        x, factor = ctx.saved_tensors
        damped = grads[0] * factor
        return (
            damped,
            (damped * x).sum_to_size(factor.shape) if ctx.needs_input_grad[1] else None,
            None,
        )


def both_ways(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, normalise: bool
) -> tuple[Tensor, Tensor]:
    """Compute the same over all tokens, with pairs weighted by exp(-|c_t - c_i|); the state is the
    causal one after the last token.
    """
    if log_decay is None:
        state = k.mT @ (torch.cat((v, torch.ones_like(v[..., :1])), dim=-1) if normalise else v)
        if not normalise:
            return q @ state, state
        mass = q @ state[..., -1:]
        empty = mass <= 0
        return torch.where(empty, v, (q / mass.masked_fill(empty, 1)) @ state[..., :-1]), state
    if not normalise:
        return _earlier_and_later(q, k, v, log_decay)
    mass, key_state = _earlier_and_later(q, k, torch.ones_like(v[..., :1]), log_decay)
    empty = mass <= 0
    y, state = _earlier_and_later(q / mass.masked_fill(empty, 1), k, v, log_decay)
    return torch.where(empty, v, y), torch.cat((state, key_state), dim=-1)


def _earlier_and_later(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    earlier, state = LinearAttention.apply(q, k, v, log_decay, None, False)
    # Reversed, with each key one step later: a token is read once, and its own decay is between it
    # and the tokens before it.
    late_k, late_v, late_decay = (
        pad(x.flip(2)[:, :, :-1], (0, 0, 1, 0)) for x in (Damp.apply(k, log_decay), v, log_decay)
    )
    later, _ = LinearAttention.apply(q.flip(2), late_k, late_v, late_decay, None, False)
    return earlier + later.flip(2), state


def _segments(q: Tensor, log_decay: Tensor | None) -> Iterator[slice]:
    t, size = q.shape[2], _chunk(log_decay) * CHUNKS
    yield from (slice(start, min(start + size, t)) for start in range(0, t, size))


def _chunk(log_decay: Tensor | None) -> int:
    return CHUNK if log_decay is None or log_decay.shape[-1] == 1 else CHUNK_PER_CHANNEL


def _segment(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, state: Tensor, normalise: bool
) -> tuple[Tensor, Tensor]:
    """Return y [b, h, t, dv] and the state after it. Arguments: see `LinearAttention`."""
    t, dv = v.shape[2:]
    size = min(t, _chunk(a))
    q, k, v = (_chunked(x, size) for x in (q, k, v))
    values = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1) if normalise else v
    if a is None:
        raw = (q @ k.mT).tril()
        sums = torch.cat((state[:, :, None], k.mT @ values), dim=2).cumsum(2)
        starts, state = sums[:, :, :-1], sums[:, :, -1]
        window = factor = since = None
    else:
        a = _chunked(a, size)
        window, since = _window_sums(a), a.cumsum(-2)
        factor = window.detach().exp()
        raw = q @ k.mT if a.shape[-1] == 1 else q[..., None, :] * k[..., None, :, :]
        starts, state = _carry(k, values, a, state)
    empty = None
    if normalise:
        mass = _pairs(raw, window, factor).sum(-1, keepdim=True) + _from_start(
            q, starts[..., dv:], since
        )
        empty = mass <= 0
        share = mass.masked_fill(empty, 1).reciprocal()
        q, raw = q * share, raw * (share if raw.dim() == 5 else share[..., None])
    y = _pairs(raw, window, factor) @ v + _from_start(q, starts[..., :dv], since)
    y = y if empty is None else torch.where(empty, v, y)
    return y.flatten(2, 3)[:, :, :t], state


def _chunked(x: Tensor, size: int) -> Tensor:
    """Reshape [b, h, t, n] to [b, h, chunks, size, n]; the last chunk is padded with zeros."""
    return pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _window_sums(a: Tensor) -> Tensor:
    """Return the sums of a [..., c, w] over (i, t]: [..., t, i, w] (no last dimension if w is 1),
    -inf where t < i.
    """
    steps = a[..., None, :].expand(*a.shape[:-1], a.shape[-2], a.shape[-1])
    unread = torch.ones(a.shape[-2], a.shape[-2], dtype=torch.bool, device=a.device)
    sums = (
        steps.masked_fill(unread.triu()[..., None], 0)
        .cumsum(-3)
        .masked_fill(unread.triu(1)[..., None], -torch.inf)
    )
    return sums.squeeze(-1) if a.shape[-1] == 1 else sums


def _pairs(raw: Tensor, window: Tensor | None, factor: Tensor | None) -> Tensor:
    """Return the weights of a chunk's pairs [..., t, i] from their products."""
    if window is None:
        return raw
    damped: Tensor = Damp.apply(raw, window, factor)
    return damped if window.dim() == 5 else damped.sum(-1)


def _from_start(q: Tensor, starts: Tensor, since: Tensor | None) -> Tensor:
    """Return the queries' read from the state at their chunk's start; since: the log-decays from
    the start.
    """
    if since is None:
        return q @ starts
    common, rest = _parted(since)
    return Damp.apply(Damp.apply(q, rest) @ starts, common)


def _carry(k: Tensor, values: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states at the starts of the chunks [b, h, chunks, dk, n], and the last state."""
    added, starts = _added(k, values, a), []
    for total, new in zip(a.sum(-2)[..., None].unbind(2), added.unbind(2), strict=True):
        starts.append(state)
        state = Damp.apply(state, total) + new
    return torch.stack(starts, dim=2), state


def _added(k: Tensor, values: Tensor, a: Tensor) -> Tensor:
    """Return the contribution of each chunk's tokens to the state at its end: k, values and a [...,
    tokens, n] -> [..., dk, n].
    """
    common, rest = _parted(pad(a.flip(-2).cumsum(-2).flip(-2)[..., 1:, :], (0, 0, 0, 1)))
    return Damp.apply(k, rest).mT @ Damp.apply(values, common)


def end_state(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    normalise: bool,
    eps: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the final state of `linear_attention` without an initial state, by one product, and
    the log-decay of an initial state.

    Shapes and types are those of `linear_attention`. The log-decay is [b, h, 1 or dk, 1], in the
    state's type; None without log_decay.
    """
    k, wide = features(k, eps), torch.promote_types(k.dtype, torch.float32)
    values = (torch.cat((v, torch.ones_like(v[..., :1])), dim=-1) if normalise else v).to(wide)
    if log_decay is None:
        return k.to(wide).mT @ values, None
    decay = (log_decay if log_decay.dim() == 4 else log_decay[..., None]).to(wide)
    return _added(k.to(wide), values, decay), decay.sum(2)[..., None]


def _parted(a: Tensor) -> tuple[Tensor, Tensor]:
    """Split a [..., w] into the decay shared by all channels [..., 1], constant to autograd, and
    each channel's remainder; both at most 0.

    The shared part is applied to the values of a product, so that a forgotten value cannot overflow
    in the backward.
    """
    common = a.detach().amax(-1, keepdim=True)
    return common, torch.where(common == -torch.inf, 0, a - common)


def log_weights(
    q: Tensor, k: Tensor, log_decay: Tensor | None, start: int, stop: int, *, causal: bool = True
) -> Tensor:
    """Return log (q_t * exp(-|c_t - c_i|)) . k_i, [b, h, stop - start, t], of the rows start to
    stop; -inf if the weight is 0 or masked.

    Shapes as in `linear_attention`; q and k are not negative. A row that reads no token reads its
    own. Float32 or float64.
    """
    t = k.shape[2]
    rows = q[:, :, start:stop]
    row, column = (
        torch.arange(start, stop, device=q.device)[:, None],
        torch.arange(t, device=q.device),
    )
    products = rows @ k.mT
    read = products.detach() > 0
    if causal:
        read = read & (column <= row)
    read = read | ((column == row) & ~read.any(-1, keepdim=True))
    decay = (
        None
        if log_decay is None
        else _decay_between(
            log_decay if log_decay.dim() == 4 else log_decay[..., None], row, column, causal
        )
    )
    if decay is None or decay.shape[-1] == 1:
        positive = products > 0
        logs = torch.where(positive, products, 1).log()
        return (logs if decay is None else logs + decay[..., 0].masked_fill(~read, 0)).masked_fill(
            ~read, -torch.inf
        )
    terms = _log(rows)[:, :, :, None] + _log(k)[:, :, None] + decay
    # A row of padding has no finite term. It is filled before the logarithm, whose gradient would
    # be NaN otherwise.
    finite = read & (terms.detach() > -torch.inf).any(-1)
    summed = terms.masked_fill(~finite[..., None], 0).logsumexp(-1)
    return torch.where(finite, summed, torch.where(read & (column == row), 0.0, -torch.inf))


def _decay_between(a: Tensor, row: Tensor, column: Tensor, causal: bool) -> Tensor:
    """Return the sum of a [b, h, t, w] over (i, t], or over (t, i] if the key is later: [b, h,
    rows, i, w].
    """
    steps = a[:, :, None]
    earlier = steps.masked_fill(~(column <= row)[..., None], 0)
    between = (
        torch.cat((earlier[:, :, :, 1:], torch.zeros_like(earlier[:, :, :, :1])), dim=3)
        .flip(3)
        .cumsum(3)
        .flip(3)
    )
    return (
        between if causal else between + steps.masked_fill(~(column > row)[..., None], 0).cumsum(3)
    )


def _log(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.where(x > 0, x, 1).log(), -torch.inf)
