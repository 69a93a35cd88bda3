"""The energy that CEM's attention descends, token by token. A pure function for diagnostics and tests."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cem_attention.reference import Diagonal, pair_scores
from kernels.pairs import allowed_pairs


def interaction_energy(
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
    """eps(x_i | h_1..i) = -tau sum_heads log sum_j exp(a_ij), tau = 1 / scale, a_ij as in `cem_attention`.

    Of any n tokens, at positions ``own`` [n] among the keys: q [b, heads, n, r], diagonal.u [b, n, D], the rest as there. Returns [b, n],
    float32 or wider, of these heads (the sum over tensor-parallel ranks is the layer's). n x tk terms are held. Its gradient in u, with q
    = W_Q u, is minus what the read adds to x; the diagonal's own part, d sum_j p_j h_j, is left out of the step by Algorithm 1.
    Source: Causal Energy Minimization, equation 1 and appendix B.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, self_bias, cross_bias = (t.to(wide) for t in (q, k, self_bias, cross_bias))
    parts = None
    if diagonal is not None:
        u, h, d = (t.to(wide) for t in diagonal)
        parts = (u[:, None] * d[:, None], h)
    scores = pair_scores(q, k, own, slopes.to(wide), (self_bias - cross_bias).sum(), parts, scale)
    seen = allowed_pairs(own, k.shape[2], causal, valid)
    terms = (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).logsumexp(-1) + cross_bias.sum()
    return -terms.sum(1) / scale
