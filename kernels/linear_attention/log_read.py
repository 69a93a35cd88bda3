"""Logarithm of the weighted mean of exp(x) that linear attention reads, without overflow.

One public function: `log_read`. The computation is that of `linear_attention` in the log domain:
every number is represented by its logarithm, every sum is a log-sum-exp and every product a sum.
Time and memory are linear in t.

It takes chunk + 2 dk exponentials for each token and column of x, and chunk * dk for each token.
The chunk boundaries depend on shapes alone, and a masked key adds an exact zero, so later tokens
never change a bit of an output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from kernels.linear_attention.op import _chunk, _window_sums

# Represents log 0. It is below every other logarithm, and finite, so that no difference is NaN.
NOTHING = -1e30
# Most exponentials in a segment: about a CPU's cache, or enough to fill a device.
BLOCK_TERMS_CPU, BLOCK_TERMS_DEVICE = 1 << 20, 1 << 24


def log_read(
    q: Tensor, k: Tensor, x: Tensor, log_decay: Tensor | None = None, *, causal: bool = True
) -> Tensor:
    """Return log sum_i p_t(i) exp(x_i), [n, t, m].

    The weights are p_t(i) ~ (q_t * exp(-|c_t - c_i|)) . k_i with sum_i p_t(i) = 1, where c is the
    cumulative sum of log_decay.
    Shapes: q, k [n, t, dk], not negative; x [n, t, m]; log_decay [n, t], [n, t, dk] or None,
    at most 0. All float32 or all float64.
    A row that reads no token returns its own x. A feature that is 0 has no gradient.
    Equations: those of `linear_attention`.
    """
    keys, queries = _log(k[:, None]), _log(q[:, None])
    streams = pad(x, (0, 1))[:, None]  # the added column of zeros reads log sum_i w_t(i)
    decay = (
        None
        if log_decay is None
        else log_decay.view(*log_decay.shape[:2], -1)[:, None].clamp_min(NOTHING)
    )
    sums = _scan(queries, keys, streams, decay)
    if not causal:
        # Add the later tokens by a scan of the reversed sequence. Keys are shifted by one step, so
        # that no token is read twice. A token's decay is between it and the tokens before it.
        faded = keys if decay is None else keys + decay
        late_keys = pad(faded.flip(2)[:, :, :-1], (0, 0, 1, 0), value=NOTHING)
        late_streams, late_decay = (
            None if t is None else pad(t.flip(2)[:, :, :-1], (0, 0, 1, 0)) for t in (streams, decay)
        )
        assert late_streams is not None
        sums = torch.logaddexp(
            sums, _scan(queries.flip(2), late_keys, late_streams, late_decay).flip(2)
        )
    made, total = sums[:, 0, :, :-1], sums[:, 0, :, -1:]
    return torch.where(total < NOTHING / 2, x, made - total)


def _log(t: Tensor) -> Tensor:
    return torch.where(t > 0, torch.where(t > 0, t, 1).log(), NOTHING)


def _scan(q: Tensor, k: Tensor, x: Tensor, a: Tensor | None) -> Tensor:
    """Return log sum_i w_t(i) exp(x_i), [n, 1, t, m], for causal weights w that are not normalised.

    q, k: logarithms of the queries and keys, [n, 1, t, dk]. x: [n, 1, t, m]. a: log decays,
    [n, 1, t, 1 or dk], or None. Segments of several chunks are recomputed in the backward pass.
    """
    (n, _, t, dk), m = q.shape, x.shape[3]
    size = min(t, _chunk(a))
    budget = BLOCK_TERMS_CPU if q.device.type == "cpu" else BLOCK_TERMS_DEVICE
    step = size * max(1, budget // (n * size * max((size + dk) * m, size * dk)))
    state, made = q.new_full((n, 1, dk, m), NOTHING), []
    for start in range(0, t, step):
        parts = [
            None if each is None else each[:, :, start : start + step] for each in (q, k, x, a)
        ]
        y, state = checkpoint(
            _segment, *parts, state, size, use_reentrant=False, preserve_rng_state=False
        )
        made.append(y)
    return torch.cat(made, dim=2)


def _segment(
    q: Tensor, k: Tensor, x: Tensor, a: Tensor | None, state: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    t = x.shape[2]
    q, x, k = _cut(q, size), _cut(x, size), _cut(k, size, NOTHING)
    unread = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    if a is None:
        pairs = LogProduct.apply(q, k.mT).masked_fill(unread, NOTHING)
        added, total, read = LogProduct.apply(k.mT, x), q.new_zeros(q.shape[2], 1, 1), q
    else:
        a = _cut(a, size)
        if a.shape[-1] == 1:
            pairs = LogProduct.apply(q, k.mT) + _window_sums(a).masked_fill(unread, NOTHING)
        else:
            window = _window_sums(a).masked_fill(unread[..., None], NOTHING)
            pairs = (q[..., None, :] + k[..., None, :, :] + window).logsumexp(-1)
        after = pad(a.flip(-2).cumsum(-2).flip(-2)[..., 1:, :], (0, 0, 0, 1))
        added, total, read = (
            LogProduct.apply((k + after).mT, x),
            a.sum(-2)[..., None],
            q + a.cumsum(-2),
        )
    starts = []
    for fade, new in zip(total.unbind(-3), added.unbind(2), strict=True):
        starts.append(state)
        state = torch.logaddexp(state + fade, new)
    y = LogProduct.apply(
        torch.cat((pairs, read), dim=-1), torch.cat((x, torch.stack(starts, dim=2)), dim=-2)
    )
    return y.flatten(2, 3)[:, :, :t], state


def _cut(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """Pad [n, 1, t, w] with ``fill`` and reshape it to [n, 1, chunks, size, w]."""
    return pad(x, (0, 0, 0, -x.shape[2] % size), value=fill).unflatten(2, (-1, size))


class LogProduct(torch.autograd.Function):
    """Matrix product in the log domain: log(exp(a) @ exp(b)), a [..., m, r], b [..., r, n].

    Inputs must be finite. The gradients weight the incoming gradient by at most 1, so they do not
    overflow.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        made = (a[..., None] + b[..., None, :, :]).logsumexp(-2)
        ctx.save_for_backward(a, b, made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b, made = ctx.saved_tensors
        weights = (
            (a[..., None] + b[..., None, :, :])
            .sub_(made[..., None, :])
            .exp_()
            .mul_(grads[0][..., None, :])
        )
        return weights.sum(-1), weights.sum(-3)
