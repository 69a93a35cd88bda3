"""CEM's preconditioners, P = diag(softplus(sqrt(D) p)) + U V^T + V U^T (mathematics 2.3), one for each group of a tied matrix's rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fem_megatron.layers.parallel import Parallel
from fem_megatron.layers.update import Layer

BISECTIONS = 60  # float64's 52 bits of the bracket, and some


class Preconditioner(Layer):
    """Of G groups: p [G D], u and v [G, D, R]. Without p it is the identity, without u a diagonal.

    whole: every rank holds these weights whole and uses them on its part of the rows (``parallel.share``); else they are the rank's own.
    """

    def __init__(self, kind: str, hidden: int, parallel: Parallel, *, whole: bool) -> None:
        super().__init__()
        self.kind = kind
        self.hidden = hidden
        self.parallel = parallel
        self.whole = whole

    def forward(self, w: Tensor, tokens: int) -> Callable[[Tensor], Tensor]:
        """The way back through w [G m, D]: a function c [..., G m] -> sum_g c_g W_g P_g [..., D], for steps of ``tokens`` tokens each.

        More than m tokens: W P is made once, as one matrix, and the preconditioner costs 8 m D R a group and forward pass. Few tokens, as
        in decoding: P acts on each group's c_g W_g, 8 D R a group, token and step.
        """
        if self.kind == "identity":
            return lambda c: c @ w
        rows = w.unflatten(0, (self.p.numel() // self.hidden, -1))
        if tokens > rows.shape[1]:
            folded = self.times(rows).flatten(0, 1)
            return lambda c: c @ folded

        def apart(c: Tensor) -> Tensor:
            groups = c.reshape(-1, *rows.shape[:2]).transpose(0, 1) @ rows
            return self.times(groups).sum(0).view(*c.shape[:-1], -1)

        return apart

    def times(self, rows: Tensor) -> Tensor:
        """rows [G, n, D] -> rows P (P is symmetric), same shape and type."""
        out = rows * self.diagonal().to(rows.dtype)[:, None]
        if self.kind == "low_rank":
            u, v = self.factors()
            out = out + (rows @ v) @ u.mT + (rows @ u) @ v.mT
        return out

    def diagonal(self) -> Tensor:
        """softplus(sqrt(D) p), [G, D], float32 or wider."""
        p = self.parallel.share(self.p) if self.whole else self.p
        return softplus(p.to(torch.promote_types(p.dtype, torch.float32)) * self.hidden**0.5).view(-1, self.hidden)

    def factors(self) -> tuple[Tensor, Tensor]:
        """U and V, [G, D, R]."""
        return (self.parallel.share(self.u), self.parallel.share(self.v)) if self.whole else (self.u, self.v)

    @torch.no_grad()
    def smallest_eigenvalue(self) -> Tensor:
        """Of each of this rank's P, [G], float64 on the CPU; below zero a step may climb. The identity's is one, [1]."""
        if self.kind == "identity":
            return torch.ones(1, dtype=torch.float64)
        if self.kind == "diagonal":
            return self.diagonal().double().cpu().amin(-1)
        return smallest_eigenvalue(self.diagonal(), *self.factors())


def smallest_eigenvalue(diagonal: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Of diag(diagonal) + U V^T + V U^T: diagonal [G, D], u and v [G, D, R] -> [G], float64 on the CPU, exact to rounding.

    With A = [U V] and C = [[0, I], [I, 0]] = C^-1, the matrix less t I has as many negative eigenvalues as diag(diagonal - t) and
    -C - A^T diag(diagonal - t)^-1 A together, less R (inertia of a Schur complement, taken both ways). So each bisection on t costs
    a product with A and the eigenvalues of a 2R x 2R matrix, and no D x D matrix is made.
    """
    diagonal, u, v = (t.detach().double().cpu() for t in (diagonal, u, v))
    a, rank = torch.cat((u, v), dim=-1), u.shape[-1]
    swap = torch.eye(2 * rank, dtype=torch.float64).roll(rank, 0)
    # Between Gershgorin's kind of bound and the smallest diagonal entry, a Rayleigh quotient.
    low = diagonal.amin(-1) - 2 * torch.linalg.matrix_norm(u, 2) * torch.linalg.matrix_norm(v, 2)
    high = (diagonal + 2 * (u * v).sum(-1)).amin(-1)
    tiny = torch.finfo(torch.float64).eps * diagonal.abs().amax(-1, keepdim=True)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        gap = diagonal - middle[:, None]
        gap = torch.where(gap.abs() < tiny, tiny, gap)
        inner = torch.linalg.eigvalsh(-swap - a.mT @ (a / gap[..., None]))
        below = (gap < 0).sum(-1) + (inner < 0).sum(-1) > rank
        low, high = torch.where(below, low, middle), torch.where(below, middle, high)
    return (low + high) / 2
