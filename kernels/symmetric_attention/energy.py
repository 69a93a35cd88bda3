"""The energies that Hyper-SET's steps descend, token by token, and its measures of spread. Pure functions for diagnostics and tests."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.pairs import allowed_pairs


def attention_energy(
    z: Tensor, keys: Tensor | None = None, *, kind: str = "softmax", causal: bool = True, valid: Tensor | None = None
) -> Tensor:
    """Each token's energy among the tokens it sees, with s_ij = z_i . z_j / sqrt(p), f_ij = Phi(z_i) . Phi(z_j), Phi the sigmoid.

    softmax, bisoftmax: sqrt(p) log sum_j exp(s_ij)     sigmoid: c sqrt(p) sum_j sigma(s_ij)     linear: c / (2 sqrt(p)) sum_j f_ij^2

    c = 1 where causal: the energy of token i alone, the others held fixed. c = 1/2 otherwise, so that the sum over i is the whole energy,
    which counts every pair twice. softmax and bisoftmax differ in what moves: z_i alone, or all of z.
    Shapes: z [b, h, t, p], keys [b, h, tk, p] (None: z; the tokens of z are the last of the keys), valid [b, tk] bool. Returns [b, h, t],
    float32 or wider. t x tk terms are held: for long sequences pass a few tokens' z at a time. Source: Hyper-SET, equations 3, 4, table 18.
    """
    compute = torch.promote_types(z.dtype, torch.float32)
    z, keys = z.to(compute), (z if keys is None else keys).to(compute)
    t, tk = z.shape[2], keys.shape[2]
    seen = allowed_pairs(torch.arange(tk - t, tk, device=z.device), tk, causal, valid)
    return pair_energy(z, keys, seen, kind=kind, share=1.0 if causal else 0.5)


def pair_energy(z: Tensor, keys: Tensor, seen: Tensor | None, *, kind: str, share: float) -> Tensor:
    """`attention_energy` of any tokens z [b, h, n, p] among keys [b, h, tk, p] of which they see ``seen`` [.., n, tk] (None: all)."""
    p = z.shape[-1]
    if kind == "linear":
        terms = (z.sigmoid() @ keys.sigmoid().mT).square() * (share / (2 * p**0.5))
        return (terms if seen is None else terms.masked_fill(~seen, 0.0)).sum(-1)
    scores = z @ keys.mT * p**-0.5
    if kind == "sigmoid":
        terms = scores.sigmoid() * (share * p**0.5)
        return (terms if seen is None else terms.masked_fill(~seen, 0.0)).sum(-1)
    if kind not in ("softmax", "bisoftmax"):
        raise ValueError(f"attention_energy: kind {kind!r} is not one of softmax, bisoftmax, sigmoid, linear")
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).logsumexp(-1) * p**0.5


def feed_forward_energy(u: Tensor, *, kind: str = "relu") -> Tensor:
    """Each token's energy among the directions: u [..., M], D^T x after its norm -> [...], float32 or wider.

    relu: -1/2 sum_m relu(u_m)^2     softmax: -log sum_m exp(u_m)     gated: -1/2 (sum_m Phi(u_m))^2, Phi the sigmoid
    Raises ValueError for another kind. Source: Hyper-SET, equation 5 and table 19.
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
    """exp of the entropy of the singular values' shares: x [..., n, p], n vectors -> [...]. Source: Hyper-SET, equation 17."""
    values = torch.linalg.svdvals(x.to(torch.promote_types(x.dtype, torch.float32)))
    share = values / values.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp()


def mean_angle(x: Tensor) -> Tensor:
    """The angle, in radians, whose cosine is the mean over all pairs: x [..., n, p], n >= 2 vectors -> [...]. Hyper-SET, equation 18.

    The cosines of all pairs add up to (|sum of the unit vectors|^2 - n) / 2, so no n x n matrix is made.
    """
    n = x.shape[-2]
    unit = torch.nn.functional.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
    mean = (unit.sum(-2).square().sum(-1) - n) / (n * (n - 1))
    return mean.clamp(-1.0, 1.0).acos()
