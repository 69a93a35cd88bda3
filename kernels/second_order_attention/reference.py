"""Newton step of attention's free energy in plain PyTorch, any device, in blocks of rows: memory is
linear in the tokens.

A block's scores give both reads, k-bar and the covariance's product, so that no log-sum-exp is
kept; the backward recomputes the block (checkpoint). The block boundaries depend on shapes alone
and a masked pair is an exact zero, so that no bit of an output depends on later tokens. The module
also contains the free energies that the steps descend, token by token, and the first-order step on
a quadratic energy, linear attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from kernels.arguments import check_first, check_others, operation
from kernels.pairs import allowed_pairs
from kernels.registered import registered
from kernels.rotary import turned

# Most terms of a block, [b, h, rows, keys]: about a CPU's cache, or enough to fill a device.
BLOCK_TERMS_CPU, BLOCK_TERMS_DEVICE = 1 << 20, 1 << 26


def step(
    q: Tensor,
    k: Tensor,
    gram: Tensor,
    temperature: Tensor,
    newton: Tensor,
    turn: Tensor | None,
    *,
    exact: bool,
    causal: bool,
    valid: Tensor | None,
    jitter: float,
) -> Tensor:
    """Return the result of `second_order_attention`.

    All tensors but q have one dtype, which the result has too.
    """
    t, tk, d = q.shape[2], k.shape[2], q.shape[3]
    terms = BLOCK_TERMS_CPU if q.device.type == "cpu" else BLOCK_TERMS_DEVICE
    at_once = max(1, terms // (q.shape[0] * q.shape[1] * (max(tk, d * d) if exact else tk)))
    remade = torch.is_grad_enabled() and any(
        x.requires_grad for x in (q, k, gram, temperature, newton)
    )
    outputs = []
    for start in range(0, t, at_once):
        stop = min(start + at_once, t)
        turned = None if turn is None else turn[:, :, start:stop]
        block = (
            q[:, :, start:stop],
            k,
            gram,
            temperature,
            newton,
            turned,
            start + tk - t,
            exact,
            causal,
            valid,
        )
        outputs.append(
            checkpoint(_rows, *block, use_reentrant=False, preserve_rng_state=False)
            if remade
            else _rows(*block)
        )
    r, product = (torch.cat(parts, dim=2) for parts in zip(*outputs, strict=True))
    solved = solve_gram(gram, product, jitter)
    return solved if exact else r + solved


def rotated(x: Tensor, turn: Tensor | None, *, back: bool = False) -> Tensor:
    """Return x [..., t, d] rotated by (cos | sin) ``turn``, halves paired, or rotated back; None: x
    unchanged.
    """
    if turn is None:
        return x
    cos, sin = turn.chunk(2, dim=-1)
    return turned(x, cos, -sin if back else sin)


def log_weights(q: Tensor, k: Tensor, temperature: Tensor, seen: Tensor | None) -> Tensor:
    """Return (q.k_i - |k_i|^2 / 2) / T [b, h, n, tk] of each head's T [h], -inf where not seen."""
    scores = (q @ k.mT - k.square().sum(-1)[:, :, None] / 2) / temperature[:, None, None]
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def residual(q: Tensor, mean: Tensor, gram: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (r, u) of q [b, h, n, d] and kbar: r = q - kbar in q's own frame, u = G r in the frame
    of the keys.
    """
    r = q - rotated(mean, turn, back=True)
    return r, rotated(r @ gram, turn)


def in_own_frame(product: Tensor, newton: Tensor, turn: Tensor | None) -> Tensor:
    """Return C u [b, h, n, d] over T' [h], rotated back from the frame of the keys."""
    return rotated(product / newton[:, None, None], turn, back=True)


def solve_gram(gram: Tensor, x: Tensor, jitter: float) -> Tensor:
    """Return G^-1 x for gram [h, d, d] and x [b, h, t, d]; NaN for a head whose G + jitter
    mean(diag G) I has no Cholesky factor.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    lifted = gram + torch.diag_embed((jitter * diagonal.mean(-1, keepdim=True)).expand_as(diagonal))
    factor, failed = torch.linalg.cholesky_ex(lifted)
    factor = torch.where((failed == 0)[:, None, None], factor, torch.nan)
    b, _, t, _ = x.shape
    columns = x.permute(1, 3, 0, 2).flatten(2)
    return torch.cholesky_solve(columns, factor).unflatten(2, (b, t)).permute(2, 0, 3, 1)


def _rows(
    q: Tensor,
    k: Tensor,
    gram: Tensor,
    temperature: Tensor,
    newton: Tensor,
    turn: Tensor | None,
    first: int,
    exact: bool,
    causal: bool,
    valid: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return r of a block of queries, the tokens from ``first`` on, and (C / T') G r, or
    (I - C / T')^-1 G r if exact; both [b, h, n, d].

    q has its own dtype, so that a checkpoint saves no wide copy. k's gradient is summed over the
    blocks, so k has the wide dtype.
    """
    q = q.to(k.dtype)
    end = first + q.shape[2] if causal else k.shape[2]
    seen = allowed_pairs(
        torch.arange(first, first + q.shape[2], device=q.device), k.shape[2], causal, valid
    )
    seen, k = None if seen is None else seen[..., :end], k[:, :, :end]
    p = log_weights(rotated(q, turn), k, temperature, seen).softmax(-1)
    mean = p @ k
    r, u = residual(q, mean, gram, turn)
    if not exact:
        # sum p k (k.u) - kbar (kbar.u), with the second term subtracted inside the sum, which loses
        # fewer digits where the keys are far from zero.
        along = u @ k.mT - (mean * u).sum(-1, keepdim=True)
        weighted = p * along
        weighted = weighted if seen is None else weighted.masked_fill(~seen, 0.0)
        return r, in_own_frame(weighted @ k, newton, turn)
    squares = (k[..., :, None] * k[..., None, :]).flatten(3)
    covariance = (p @ squares).unflatten(3, (-1, k.shape[-1])) - mean[..., :, None] * mean[
        ..., None, :
    ]
    hessian = (
        torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        - covariance / newton[:, None, None, None]
    )
    solved, _ = torch.linalg.solve_ex(hessian, u[..., None])
    return r, rotated(solved[..., 0], turn, back=True)


def free_energy(q: Tensor, k: Tensor, temperature: Tensor, seen: Tensor | None = None) -> Tensor:
    """Return F = -T log sum_i exp(-|q - k_i|^2 / 2T) of any tokens' q among the keys that they see.

    Its gradient in q is r = q - kbar, its Hessian I - C / T; `second_order_attention` defines the
    symbols.
    Shapes: q [b, h, n, d] (rotated to its position if k is), k [b, h, tk, d], temperature T [h] >
    0, seen bool [n, tk] or [b, 1, n, tk] (`kernels.pairs.allowed_pairs`; None: all).
    Returns [b, h, n], float32 or wider. Memory holds n tk terms: pass a sample of the tokens.
    Source: Transformers as Intrinsic Optimizers, theorem 2 (its F is the mean over heads).
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    q, k, temperature = q.to(compute), k.to(compute), temperature.to(compute)
    return q.square().sum(-1) / 2 - temperature[:, None] * log_weights(
        q, k, temperature, seen
    ).logsumexp(-1)


def quadratic_energy(q: Tensor, k: Tensor, seen: Tensor | None = None) -> Tensor:
    """Return F = -1/2 sum_i (q.k_i)^2 of any tokens' q among the keys that they see.

    It is linear attention's energy at T = 1. Shapes as in `free_energy`. Its gradient in q is
    -sum_i (q.k_i) k_i, minus the result of `energy_linear_attention`.
    Source: Transformers as Intrinsic Optimizers, theorem 3.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    squares = (q.to(compute) @ k.to(compute).mT).square()
    return -(squares if seen is None else squares.masked_fill(~seen, 0.0)).sum(-1) / 2


CHUNK = 64


def _shapes(q: Tensor, k: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), k.new_empty(*k.shape[:2], k.shape[3], k.shape[3], dtype=wide)


@operation("q", state=True)
@registered(_shapes, kernels=False)
def energy_linear_attention(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = True,
    valid: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out_t = sum_i (q_t.k_i) k_i over i <= t (causal) or over all i, and the state.

    out is minus the gradient of `quadratic_energy` in q.
    Shapes: q and k [b, h, t, d], valid [b, t] bool, False at padding (those keys contribute zero),
    state [b, h, d, d]: the past's sum_i k_i k_i^T (None: no past).
    Returns (out [b, h, t, d] in q's dtype, the state after the last token).
    Dtypes: float64, float32, bfloat16 or float16; sums and state are float32 (float64 for float64).
    Time and memory are linear in t.
    Raises ValueError for shapes or dtypes that do not fit.
    Source: Transformers as Intrinsic Optimizers, theorem 3, with W = W_Q^T W_K.
    """
    check_first("energy_linear_attention", "q", q)
    b, h, t, d = q.shape
    kind, compute = q.dtype, torch.promote_types(q.dtype, torch.float32)
    expected = {
        "k": (k, q.shape, kind),
        "valid": (valid, (b, t), torch.bool),
        "state": (state, (b, h, d, d), compute),
    }
    check_others("energy_linear_attention", "q", q, expected)
    q, k = q.to(compute), k.to(compute)
    if valid is not None:
        k = k * valid[:, None, :, None]
    past = k.new_zeros(b, h, d, d) if state is None else state
    if not causal:
        after = past + k.mT @ k
        return (q @ after).to(kind), after
    size = min(CHUNK, t)
    queries, keys = (pad(x, (0, 0, 0, -t % size)).unflatten(2, (-1, size)) for x in (q, k))
    sums = torch.cat((past[:, :, None], keys.mT @ keys), dim=2).cumsum(2)
    before, after = sums.split([queries.shape[2], 1], dim=2)
    inside = (queries @ keys.mT).tril() @ keys
    return (inside + queries @ before).flatten(2, 3)[:, :, :t].to(kind), after[:, :, 0]
