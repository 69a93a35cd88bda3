"""Attention of z with itself by its definition, in blocks of rows: plain PyTorch, any device.

Memory is linear in the tokens. The scores are symmetric, so the log-sum-exp of a column is that of
the row with the same number, and softmax over columns is the transpose P^T of softmax over rows. A
block of rows of P gives its own rows of P z, and its share of every row of P^T z, in one pass. The
block boundaries depend on shapes alone and a masked pair is an exact zero, so that no bit of an
output depends on later tokens. The module also contains the energies that Hyper-SET's steps
descend, token by token, and its measures of spread, for diagnostics and tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.arguments import without_autocast
from kernels.pairs import allowed_pairs, blocks_of_rows

# Most terms of a block, [b, h, rows, keys]: about a CPU's cache, or enough to fill a device.
BLOCK_TERMS_CPU, BLOCK_TERMS_DEVICE = 1 << 20, 1 << 26


def pairwise_attention(
    z: Tensor, keys: Tensor, *, kind: str, causal: bool, valid: Tensor | None
) -> Tensor:
    """Return `symmetric_attention` of the kinds softmax, bisoftmax and sigmoid.

    The result has z's dtype, computed in float32 (float64 for float64).
    """
    # torch.compile does not accept the same tensor twice.
    found: Tensor = _Pairs.apply(z, keys.view_as(keys) if keys is z else keys, kind, causal, valid)
    return found


class _Pairs(torch.autograd.Function):
    """A(q k^T) k of q [b, h, tq, p], k [b, h, tk, p], plus A^T q for bisoftmax (where q = k).

    The backward recomputes the blocks. q and k are kept in their own dtypes, and are float32
    (float64 for float64) while their blocks are computed.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, keys: Tensor, kind: str, causal: bool, valid: Tensor | None
    ) -> Tensor:
        q, k = _wide(z), _wide(keys)
        out = torch.zeros_like(q)
        for rows in blocks_of_rows(q, k, BLOCK_TERMS_CPU, BLOCK_TERMS_DEVICE):
            weights, _ = _weights(q, k, rows, kind, causal, valid)
            seen = k[:, :, : weights.shape[-1]]
            out[:, :, rows] += weights @ seen
            if kind == "bisoftmax":
                out += weights.mT @ q[:, :, rows]
        ctx.save_for_backward(z, keys, valid)
        ctx.kind, ctx.causal = kind, causal
        return out.to(z.dtype)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, keys, valid = ctx.saved_tensors
        q, k, d_out = (_wide(x) for x in (z, keys, *grads))
        dq, dk = torch.zeros_like(q), torch.zeros_like(k)
        scale = q.shape[-1] ** -0.5
        for rows in blocks_of_rows(q, k, BLOCK_TERMS_CPU, BLOCK_TERMS_DEVICE):
            weights, scores = _weights(q, k, rows, ctx.kind, ctx.causal, valid)
            seen = slice(0, weights.shape[-1])
            d_weights = d_out[:, :, rows] @ k[:, :, seen].mT
            dk[:, :, seen] += weights.mT @ d_out[:, :, rows]
            if ctx.kind == "bisoftmax":
                d_weights += q[:, :, rows] @ d_out.mT
                dq[:, :, rows] += weights @ d_out
            if ctx.kind == "sigmoid":
                d_scores = d_weights * weights * (-scores / 2).tanh()
            else:
                d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
            dq[:, :, rows] += d_scores @ k[:, :, seen] * scale
            dk[:, :, seen] += d_scores.mT @ q[:, :, rows] * scale
        return dq.to(z.dtype), dk.to(keys.dtype), None, None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _weights(
    q: Tensor, k: Tensor, rows: slice, kind: str, causal: bool, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (A, s) [b, h, rows, keys] of a block, over the keys that its last row may see.

    A is zero where a pair is not seen.
    """
    tq, tk = q.shape[2], k.shape[2]
    end = rows.stop + tk - tq if causal else tk
    scores = q[:, :, rows] @ k[:, :, :end].mT * q.shape[-1] ** -0.5
    seen = allowed_pairs(
        torch.arange(rows.start, rows.stop, device=q.device) + tk - tq, tk, causal, valid
    )
    if seen is not None:
        seen = seen[..., :end]
    if kind == "sigmoid":
        weights = scores.sigmoid() * (-scores).sigmoid()
        if seen is not None:
            weights, scores = weights.masked_fill(~seen, 0.0), scores.masked_fill(~seen, 0.0)
        return weights, scores
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1), scores


def attention_energy(
    z: Tensor,
    keys: Tensor | None = None,
    *,
    kind: str = "softmax",
    causal: bool = True,
    valid: Tensor | None = None,
) -> Tensor:
    """Return each token's energy among the tokens it sees.

    With s_ij = z_i . z_j / sqrt(p), f_ij = Phi(z_i) . Phi(z_j), Phi the sigmoid, the kinds are

        softmax, bisoftmax:  sqrt(p) log sum_j exp(s_ij)
        sigmoid:             c sqrt(p) sum_j sigma(s_ij)
        linear:              c / (2 sqrt(p)) sum_j f_ij^2

    c = 1 if causal: the energy of token i alone, the others held fixed. c = 1/2 otherwise, because
    the sum over i meets every pair twice. softmax and bisoftmax differ
    in what moves: z_i alone, or all of z.
    Shapes: z [b, h, t, p], keys [b, h, tk, p] (None: z; the tokens of z are the last of the keys),
    valid [b, tk] bool.
    Returns [b, h, t], float32 or wider. Memory holds t x tk terms: for long sequences pass a few
    tokens' z at a time.
    Source: Hyper-SET, equations 3, 4, table 18.
    """
    compute = torch.promote_types(z.dtype, torch.float32)
    z, keys = z.to(compute), (z if keys is None else keys).to(compute)
    t, tk = z.shape[2], keys.shape[2]
    seen = allowed_pairs(torch.arange(tk - t, tk, device=z.device), tk, causal, valid)
    return pair_energy(z, keys, seen, kind=kind, share=1.0 if causal else 0.5)


def pair_energy(z: Tensor, keys: Tensor, seen: Tensor | None, *, kind: str, share: float) -> Tensor:
    """Return the `attention_energy` of any tokens z [b, h, n, p] among keys [b, h, tk, p].

    seen [.., n, tk]: the keys that each sees; None: all.
    """
    p = z.shape[-1]
    if kind == "linear":
        terms = (z.sigmoid() @ keys.sigmoid().mT).square() * (share / (2 * p**0.5))
        return (terms if seen is None else terms.masked_fill(~seen, 0.0)).sum(-1)
    scores = z @ keys.mT * p**-0.5
    if kind == "sigmoid":
        terms = scores.sigmoid() * (share * p**0.5)
        return (terms if seen is None else terms.masked_fill(~seen, 0.0)).sum(-1)
    if kind not in ("softmax", "bisoftmax"):
        raise ValueError(
            f"attention_energy: kind {kind!r} is not one of softmax, bisoftmax, sigmoid, linear"
        )
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).logsumexp(
        -1
    ) * p**0.5


def feed_forward_energy(u: Tensor, *, kind: str = "relu") -> Tensor:
    """Return each token's energy among the directions: [...] for u [..., M], D^T x after its norm.

        relu:     -1/2 sum_m relu(u_m)^2
        softmax:  -log sum_m exp(u_m)
        gated:    -1/2 (sum_m Phi(u_m))^2, Phi the sigmoid

    The result is float32 or wider.
    Raises ValueError for another kind.
    Source: Hyper-SET, equation 5 and table 19.
    """
    u = u.to(torch.promote_types(u.dtype, torch.float32))
    if kind == "relu":
        return u.relu().square().sum(-1) * -0.5
    if kind == "softmax":
        return -u.logsumexp(-1)
    if kind == "gated":
        return u.sigmoid().sum(-1).square() * -0.5
    raise ValueError(f"feed_forward_energy: kind {kind!r} is not one of relu, softmax, gated")


def effective_rank(x: Tensor) -> Tensor:
    """Return exp of the entropy of the singular values' shares, [...], of n vectors x [..., n, p].

    Source: Hyper-SET, equation 17.
    """
    values = torch.linalg.svdvals(x.to(torch.promote_types(x.dtype, torch.float32)))
    share = values / values.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp()


def mean_angle(x: Tensor) -> Tensor:
    """Return the angle in radians whose cosine is the mean over all pairs of n >= 2 vectors.

    x [..., n, p] gives [...]. The cosines of all pairs add up to (|sum of the unit
    vectors|^2 - n) / 2, so that no n x n matrix is needed.
    Source: Hyper-SET, equation 18.
    """
    n = x.shape[-2]
    unit = torch.nn.functional.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
    mean = (unit.sum(-2).square().sum(-1) - n) / (n * (n - 1))
    return mean.clamp(-1.0, 1.0).acos()
