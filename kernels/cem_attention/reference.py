"""CEM's attention read by its definition, in blocks of rows: plain PyTorch, any device.

Memory is linear in the tokens. The block boundaries depend on shapes alone and a masked pair is an
exact zero, so that no bit of an output depends on later tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.arguments import without_autocast
from kernels.pairs import allowed_pairs, blocks_of_rows

# Most terms of a block, [b, heads, rows, keys]: about a CPU's cache, or enough to fill a device.
BLOCK_TERMS_CPU, BLOCK_TERMS_DEVICE = 1 << 20, 1 << 26


class Diagonal(NamedTuple):
    """Diagonal part h_j . (d u_i) of the scores.

    u [b, t, D], h [b, tk, D], d [1, D] for all heads or [heads, D]; None: of ones, for an h that is
    already multiplied by d.
    """

    u: Tensor
    h: Tensor
    d: Tensor | None


def weighted(u: Tensor, d: Tensor | None) -> Tensor:
    """Return d u, [b, 1 or heads, n, D], of u [b, n, D]."""
    return u[:, None] if d is None else u[:, None] * d[:, None]


def pair_scores(
    q: Tensor,
    k: Tensor,
    own: Tensor,
    slopes: Tensor,
    alone: Tensor,
    diagonal: tuple[Tensor, Tensor] | None,
    scale: float,
) -> Tensor:
    """Return a_ij of the tokens q [b, heads, n, r] at positions ``own`` [n] and the keys k
    [b, heads, keys, r] at 0, 1, 2, ...; no mask.

    diagonal: (d u [b, 1 or heads, n, D], h [b, keys, D]).
    alone: b_self - b_cross, so that the result is a - b_cross.
    Returns [b, heads, n, keys].
    """
    scores = q @ k.mT
    if diagonal is not None:
        weighted, h = diagonal
        scores += weighted @ h[:, None].mT
    distance = (own[:, None] - torch.arange(k.shape[2], device=k.device)).abs().to(scores.dtype)
    scores = torch.addcmul(scores.mul_(scale), -slopes[:, None, None], distance)
    scores[:, :, torch.arange(len(own), device=own.device), own] += alone
    return scores


class Read(torch.autograd.Function):
    """`cem_attention` as an autograd function.

    alone = b_self - b_cross, a scalar tensor, and the slopes have the compute dtype. The backward
    recomputes the blocks. Inputs are kept in their own dtypes; wide copies of bfloat16 exist only
    during a pass.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, u, h, d, slopes, alone, scale, causal, valid = inputs
        given, (q, k, u, h, d) = (q, k, u, h, d), _wide(slopes.dtype, q, k, u, h, d)
        out = torch.empty_like(q)
        for rows in blocks_of_rows(q, k, BLOCK_TERMS_CPU, BLOCK_TERMS_DEVICE):
            weights = _weights((q, k, u, h, d, slopes, alone, scale, causal, valid), rows)
            out[:, :, rows] = weights @ k[:, :, : weights.shape[-1]]
        returned = out.to(given[0].dtype)
        ctx.save_for_backward(*given, slopes, alone, valid, returned if returned is out else None)
        ctx.scale, ctx.causal = scale, causal
        return returned

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *given, slopes, alone, valid, out = ctx.saved_tensors
        q, k, u, h, d, d_out = _wide(slopes.dtype, *given, grads[0])
        dq, dk, d_alone = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(alone)
        du, dh, dd = (None if t is None else torch.zeros_like(t) for t in (u, h, d))
        for rows in blocks_of_rows(q, k, BLOCK_TERMS_CPU, BLOCK_TERMS_DEVICE):
            weights = _weights((q, k, u, h, d, slopes, alone, ctx.scale, ctx.causal, valid), rows)
            n, end = weights.shape[2:]
            read = weights @ k[:, :, :end] if out is None else out[:, :, rows]
            row_terms = (d_out[:, :, rows] * read).sum(-1, keepdim=True)
            dk[:, :, :end] += weights.mT @ d_out[:, :, rows]
            d_scores = (d_out[:, :, rows] @ k[:, :, :end].mT).sub_(row_terms).mul_(weights)
            d_alone += d_scores.diagonal(rows.start + k.shape[2] - q.shape[2], 2, 3).sum()
            d_scores *= ctx.scale
            dq[:, :, rows] = d_scores @ k[:, :, :end]
            dk[:, :, :end] += d_scores.mT @ q[:, :, rows]
            if du is not None and dh is not None:
                left = weighted(u[:, rows], d)
                shared = d_scores.sum(1, keepdim=True) if left.shape[1] == 1 else d_scores
                d_left = shared @ h[:, None, :end]
                du[:, rows] = (d_left if d is None else d_left * d[:, None]).sum(1)
                if d is not None:
                    dd += (d_left * u[:, None, rows]).sum((0, 2))
                both = n * left.shape[1]
                dh[:, :end] += shared.transpose(1, 2).reshape(
                    len(q), both, end
                ).mT @ left.transpose(1, 2).reshape(len(q), both, -1)
        found = (
            None if t is None else t.to(like.dtype)
            for t, like in zip((dq, dk, du, dh, dd), given, strict=True)
        )
        return *found, None, d_alone, None, None, None


def _wide(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if t is None else t.to(dtype) for t in tensors)


def _weights(given: tuple[Any, ...], rows: slice) -> Tensor:
    """Return softmax_j(a_ij) [b, heads, rows, keys] of a block, over the keys that its last row may
    see.

    given: as in `Read`.
    """
    q, k, u, h, d, slopes, alone, scale, causal, valid = given
    past, tk = k.shape[2] - q.shape[2], k.shape[2]
    own = torch.arange(rows.start, rows.stop, device=q.device) + past
    end = rows.stop + past if causal else tk
    diagonal = None if u is None or h is None else (weighted(u[:, rows], d), h[:, :end])
    scores = pair_scores(q[:, :, rows], k[:, :, :end], own, slopes, alone, diagonal, scale)
    if valid is not None:
        seen = allowed_pairs(own, tk, causal, valid)
        assert seen is not None
        scores.masked_fill_(~seen[..., :end], -torch.inf)
    elif causal:
        first = rows.start + past  # every row of the block sees all keys before it
        later = torch.ones(len(own), len(own), dtype=torch.bool, device=q.device).triu_(1)
        scores[..., first:].masked_fill_(later, -torch.inf)
    return scores.softmax(-1)


def interaction_energy(scores: Tensor, scale: float) -> Tensor:
    """Return the energy of n tokens, [b, n], of their `interaction_scores` [b, heads, n, tk].

        eps(x_i | h_1..i) = -tau sum_heads log sum_j exp(a_ij), tau = 1 / scale

    The sum is over these heads; the layer's energy is the sum over tensor-parallel ranks. Its
    gradient in u, with q = W_Q u, is minus the read's update of x. Algorithm 1 leaves the
    diagonal's own part, d sum_j p_j h_j, out of the step.
    Source: Causal Energy Minimization, equation 1 and appendix B.
    """
    return -scores.logsumexp(-1).sum(1) / scale


def interaction_scores(
    q: Tensor,
    k: Tensor,
    slopes: Tensor,
    self_bias: Tensor,
    cross_bias: Tensor,
    diagonal: Diagonal | None = None,
    *,
    own: Tensor,
    scale: float,
    causal: bool = True,
    valid: Tensor | None = None,
) -> Tensor:
    """Return a_ij as in `cem_attention` of any n tokens, [b, heads, n, tk], float32 or wider; -inf
    where a token does not see the key.

    own [n]: their positions among the keys; q [b, heads, n, r], diagonal.u [b, n, D], the other
    arguments as in `cem_attention`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, self_bias, cross_bias = (t.to(wide) for t in (q, k, self_bias, cross_bias))
    parts = None
    if diagonal is not None:
        u, h, d = _wide(wide, *diagonal)
        parts = (weighted(u, d), h)
    scores = (
        pair_scores(q, k, own, slopes.to(wide), (self_bias - cross_bias).sum(), parts, scale)
        + cross_bias.sum()
    )
    seen = allowed_pairs(own, k.shape[2], causal, valid)
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)
