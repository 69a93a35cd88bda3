"""Causal Energy Minimization (CEM): attention and MLP as steps of preconditioned gradient descent.

The energy is a function of x_i given h_1..i.

    h <- RMSNorm(h);  x <- h;  T times:  u = RMSNorm(x),  x <- x - eta P dE/du(u | h)

h and the values computed only from it (keys, gamma) are constant during the steps. The inner norm
has no weight: with one, the tied projections would no longer form a gradient.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, softplus

from fem_megatron.mixers.cem.shape import CemAttentionShape, CemMlpShape
from fem_megatron.parallel import Parallel
from fem_megatron.state import Context
from fem_megatron.update import Layer, Update, normed, rms_norm
from kernels.arguments import autocast_on, is_dynamic
from kernels.cem_attention import Diagonal, cem_attention
from kernels.cem_attention.reference import interaction_energy, interaction_scores
from kernels.gated_silu import gated_silu
from kernels.residual_norm import residual_norm

# B_n / (n + 1)! of the dilogarithm's series in log(1 + y), n = 0, 1, 2, 4, ..
# log(1 + y) is at most log 2, so the next term is below 1e-18.
DILOGARITHM: tuple[float, ...] = (
    1.0,
    -1 / 4,
    1 / 36,
    -1 / 3600,
    1 / 211680,
    -1 / 10886400,
    1 / 526901760,
    -691 / 16999766784000,
    1 / 1120863744000,
)
DILOGARITHM += (-3617 / 181400588328960000,)


class CemAttention(Update):
    """T steps down -tau sum_k log sum_j exp(a_ijk): x <- x + eta sum_k P_k W_Qk^T o_ik.

    a_ijk is the score of token i with key j in head k, and P_k the head's preconditioner. o is the
    attention output over the keys, which are also the values. Positions enter through ALiBi and two
    learned biases (for a token's score with itself and with other tokens). RoPE is not used,
    because it would make values depend on the position of the query. A diagonal D_k affects only
    the scores: as in Algorithm 1, its part of the gradient, d sum_j p_ij h_j, is left out of the
    step.

    Tensor parallel: heads are split over the ranks. Each step gathers u and sums the heads. Every
    rank computes the scores of a shared diagonal. Decoding state: k, which is also v, and with a
    diagonal h, times a shared diagonal.
    """

    diagnostics = "fem_megatron.mixers.cem.diagnostics:observe"

    def __init__(self, shape: CemAttentionShape, parallel: Parallel) -> None:
        self.shape = shape
        super().__init__(shape, parallel)
        self.local_heads = shape.heads // parallel.size

    def build(self) -> None:
        self.precondition = Preconditioner(
            self.shape.switches.preconditioner, self.shape.hidden, self.parallel, full=False
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.descend(*_start(self, x), context)

    def descend(self, h: Tensor, x: Tensor, u: Tensor | None, context: Context) -> Tensor:
        """Run the T steps and return x after the last step.

        h: the normalised stream. x: the starting point of the steps. u: RMSNorm(x), if known. All
        are sliced like the stream.
        """
        full = self.parallel.enter(h)
        context = context.without_gap(full.shape[0])
        k, seen = self.remember(full, context)
        back = self.precondition(self.query(), full.shape[0] * full.shape[1])
        slopes, *biases = self.biases(k)
        own_bias = biases[0].to(slopes.dtype) - biases[1].to(slopes.dtype)
        for step in range(self.shape.switches.steps_attention):
            if u is None and step == 0 and x is h:
                u = self._norm(full)  # of the gathered h, which saves an exchange
            elif u is None:
                x, u = normed(x, None, self.shape.norm_eps)
                u = self.parallel.enter(u)
            q, diagonal = self.score_inputs(u, seen)
            o = self.read(q, k, slopes, own_bias, diagonal, context)
            moved = o.permute(2, 0, 1, 3).flatten(2)
            x = _moved(x, back, moved, self.shape.switches.eta_attention, self.parallel)
            u = None
        return x

    def read(
        self,
        q: Tensor,
        k: Tensor,
        slopes: Tensor,
        own_bias: Tensor,
        diagonal: Diagonal | None,
        context: Context,
    ) -> Tensor:
        """Return o [b, local heads, s, r] in k's type, see `cem_attention`."""

        def read(
            valid: Tensor | None,
            q: Tensor,
            k: Tensor,
            u: Tensor | None,
            h: Tensor | None,
            slopes: Tensor,
            d: Tensor | None,
        ) -> Tensor:
            own = None
            if u is not None and h is not None:
                own = Diagonal(u.squeeze(1), h.squeeze(1), d)
            return cem_attention(
                q,
                k,
                slopes,
                own_bias,
                own,
                scale=self.shape.scale,
                causal=context.causal,
                valid=valid,
            )

        u, h, d = (
            (None, None, None)
            if diagonal is None
            else (diagonal.u[:, None].to(k.dtype), diagonal.h[:, None], diagonal.d)
        )
        return context.per_document(read, q.to(k.dtype), k, u, h, each=(slopes, d), keys=(1, 3))

    def remember(self, full: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return this rank's k [b, local heads, past + s, r] and h [b, past + s, D].

        h is multiplied by a shared diagonal, once for all steps, and None without a diagonal. Both
        include the past and are stored in the state.
        """
        k = context.extend("k", self._heads(self.key(full)), dim=2)
        if self.shape.switches.diagonal == "none":
            return k, None
        if self.shape.switches.diagonal == "shared":
            full = full * self.parallel.share(self.diagonal)
        return k, context.extend("h", full.transpose(0, 1).to(k.dtype), dim=1)

    def score_inputs(self, u: Tensor, h: Tensor | None) -> tuple[Tensor, Diagonal | None]:
        """Return q [b, local heads, s, r] and the inputs of the scores' diagonal part.

        The second value is None without a diagonal.

        u: [s, b, D], normalised. h: from `remember`.
        """
        q = self._heads(linear(u, self.query()))
        if h is None:
            return q, None
        d = None
        if self.shape.switches.diagonal == "head":
            d = self.diagonal.view(-1, self.shape.hidden)
        return q, Diagonal(u.transpose(0, 1), h, d)

    def biases(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ALiBi's slopes of this rank's heads, b_self and b_cross.

        The slopes are 2^(``shape.falling`` k), k = 1, 2, ..
        """
        first, each = self.parallel.rank * self.local_heads + 1, self.shape.falling
        wide = torch.promote_types(like.dtype, torch.float32)
        last = first + self.local_heads - 1
        slopes = torch.logspace(
            each * first, each * last, self.local_heads, 2.0, dtype=wide, device=like.device
        )
        return (
            slopes,
            self.parallel.share(self.self_bias),
            self.parallel.share(self.cross_bias),
        )

    def start(self, x: Tensor) -> Tensor:
        """Return the starting point of the steps.

        This is x, or RMSNorm(x) with ``cem.residual=normalised``.
        """
        return _start(self, x)[1]

    @torch.no_grad()
    def diagnose(
        self, x: Tensor, context: Context, tokens: Tensor, after: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return diagnostics of this update of x [s, b, D] with h fixed.

        tokens: [n], sampled positions.

        The result contains energy_before, energy_after and step_norm [n, b], and per local head
        smallest_eigenvalue (of P_k) and largest_score (of the a_ij before the update). The context
        must not contain a state.

        after: the result of forward(x), if already computed.
        """
        h, start, u = _start(self, x)
        after = self.descend(h, start, u, context) if after is None else after
        k, seen = self.remember(self.parallel.enter(h), context)
        energies, largest = [], []
        for end in (start, after):
            q, diagonal = self.score_inputs(self.parallel.enter(self._norm(end))[tokens], seen)
            scores = interaction_scores(
                q,
                k,
                *self.biases(q),
                diagonal,
                own=tokens,
                scale=self.shape.scale,
                causal=context.causal,
                valid=context.valid,
            )
            largest.append(scores.amax((0, 2, 3)))
            energies.append(self.parallel.total(interaction_energy(scores, self.shape.scale)).T)
        measures = _measures(
            energies, self.parallel.enter(after - start)[tokens], self.precondition
        )
        return measures | {"largest_score": largest[0]}

    def _norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, None, self.shape.norm_eps)

    def _heads(self, z: Tensor) -> Tensor:
        return z.unflatten(-1, (self.local_heads, self.shape.head)).permute(1, 2, 0, 3)


class CemMlp(Update):
    """T steps down the energy -gamma . phi(V x), where phi' = SiLU.

    A step is x <- x + eta P V^T (gamma * SiLU(V u)), gamma = W h. Tensor parallel: the inner
    channels are split over the ranks. P is replicated and acts on each rank's summand, so that it
    can be folded into V.
    """

    diagnostics = "fem_megatron.mixers.cem.diagnostics:observe"

    def __init__(self, shape: CemMlpShape, parallel: Parallel) -> None:
        self.shape = shape
        super().__init__(shape, parallel)

    def build(self) -> None:
        self.precondition = Preconditioner(
            self.shape.switches.preconditioner, self.shape.hidden, self.parallel, full=True
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.descend(*_start(self, x))

    def descend(self, h: Tensor, x: Tensor, u: Tensor | None) -> Tensor:
        """Run the T steps and return x after the last step.

        h: the normalised stream. x: the starting point of the steps. u: RMSNorm(x), if known. All
        are sliced like the stream.
        """
        full = self.parallel.enter(h)
        gamma = self.gamma(full)
        back = self.precondition(self.up(), full.shape[0] * full.shape[1])
        for step in range(self.shape.switches.steps_mlp):
            if u is None and step == 0 and x is h:
                z = linear(self._norm(full), self.up())  # gathered before
            else:
                if u is None:
                    x, u = normed(x, None, self.shape.norm_eps)
                z = self.parallel.project(u, self.up())
            wide = torch.promote_types(z.dtype, gamma.dtype)  # a quantised map may widen
            c, gamma = gated_silu(z.to(wide), gamma.to(wide))
            x = _moved(x, back, c, self.shape.switches.eta_mlp, self.parallel)
            u = None
        return x

    def start(self, x: Tensor) -> Tensor:
        """Return the starting point of the steps.

        This is x, or RMSNorm(x) with ``cem.residual=normalised``.
        """
        return _start(self, x)[1]

    @torch.no_grad()
    def diagnose(
        self, x: Tensor, context: Context, tokens: Tensor, after: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the diagnostics of `CemAttention.diagnose` for the MLP's energy.

        smallest_eigenvalue is [1], and largest_score is absent.
        """
        h, start, u = _start(self, x)
        after = self.descend(h, start, u) if after is None else after
        gamma = self.gamma(self.parallel.enter(h)[tokens])
        points = [
            linear(self.parallel.enter(self._norm(end))[tokens], self.up())
            for end in (start, after)
        ]
        energies = [self.parallel.total(elementwise_energy(gamma, z)) for z in points]
        return _measures(energies, self.parallel.enter(after - start)[tokens], self.precondition)

    def _norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, None, self.shape.norm_eps)


def _start(layer: CemAttention | CemMlp, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return h = RMSNorm(x), the starting point of the steps, and its RMSNorm.

    The last is None if another norm computes it later: of x, or of an h gathered over the ranks.
    """
    again = layer.shape.switches.residual == "normalised"
    x, h, u = residual_norm(
        x, layer.norm(), layer.shape.norm_eps, twice=again and layer.parallel.size == 1
    )
    return h, h if again else x, u


def _moved(x: Tensor, back: Back, c: Tensor, eta: float, parallel: Parallel) -> Tensor:
    """Return x plus eta times the ranks' sum of ``back(c)``; one rank adds it in the product."""
    if parallel.size == 1:
        return back(c, x, eta)
    return torch.add(x, parallel.leave(back(c)), alpha=eta)


def elementwise_energy(gamma: Tensor, z: Tensor) -> Tensor:
    """Return xi = -gamma . phi(z) over the last dimension, z = V u.

    [..., M] each -> [...], float32 or wider. phi(z) = integral of SiLU from -inf to z = z
    softplus(z) + Li2(-e^z). Source: Causal Energy Minimization, equation 7, Algorithm 1.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    gamma, z = gamma.to(wide), z.to(wide)
    y = torch.where(z > 0, -z, z).exp()
    log = y.log1p()
    dilogarithm = -log * DILOGARITHM[0] + log.square() * DILOGARITHM[1]
    for power, factor in enumerate(DILOGARITHM[2:], start=1):
        dilogarithm = dilogarithm - factor * log ** (2 * power + 1)
    above = z.square() / 2 + z * log - torch.pi**2 / 6 - dilogarithm
    return -(gamma * torch.where(z > 0, above, z * log + dilogarithm)).sum(-1)


def _measures(
    energies: list[Tensor], moved: Tensor, precondition: Preconditioner
) -> dict[str, Tensor]:
    return {
        "energy_before": energies[0],
        "energy_after": energies[1],
        "step_norm": torch.linalg.vector_norm(moved.to(energies[0].dtype), dim=-1),
        "smallest_eigenvalue": precondition.smallest_eigenvalue(),
    }


class Back(Protocol):
    """The function c [..., G m] -> sum_g c_g W_g P_g [..., D]; with x, x + eta times that."""

    def __call__(self, c: Tensor, x: Tensor | None = None, eta: float = 1.0) -> Tensor: ...


BISECTIONS = 60  # more than the 52 mantissa bits of float64


class Preconditioner(Layer):
    """Preconditioners of G groups: p [G D], u and v [G, D, R].

    Identity without p, diagonal without u.

    The last keyword is True if every rank has all weights and uses them on its part of the rows
    (``parallel.share``); otherwise the weights are the rank's own.
    """

    def __init__(self, kind: str, hidden: int, parallel: Parallel, *, full: bool) -> None:
        super().__init__()
        self.kind = kind
        self.hidden = hidden
        self.parallel = parallel
        self.whole = full

    def forward(self, w: Tensor, tokens: int) -> Back:
        """Return the function c [..., G m] -> sum_g c_g W_g P_g [..., D], for w = W [G m, D].

        With more than m tokens W P is computed once, as one matrix: 8 m D R per group and forward
        pass. With fewer, as in decoding, P acts on each group's c_g W_g: 8 D R per group, token and
        step.

        tokens: tokens per step.
        """
        if self.kind == "identity":
            return lambda c, x=None, eta=1.0: _product(c, w, x, eta)
        rows = w.unflatten(0, (self.p.numel() // self.hidden, -1))
        # read before the closures run, because offloaded weights may be freed by then
        diagonal = self.diagonal()
        factors = self.factors() if self.kind == "low_rank" else None
        if is_dynamic(tokens) or tokens > rows.shape[1]:
            folded = self.times(rows, diagonal, factors).flatten(0, 1)
            return lambda c, x=None, eta=1.0: _product(c, folded, x, eta)

        def per_document(c: Tensor, x: Tensor | None = None, eta: float = 1.0) -> Tensor:
            groups = c.reshape(-1, *rows.shape[:2]).transpose(0, 1) @ rows
            step = self.times(groups, diagonal, factors).sum(0).view(*c.shape[:-1], -1)
            return step if x is None else torch.add(x, step, alpha=eta)

        return per_document

    def times(
        self, rows: Tensor, diagonal: Tensor, factors: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Return rows P for rows [G, n, D]; P is symmetric; same shape and type.

        diagonal, factors: the results of the methods below.
        """
        out = rows * diagonal.to(rows.dtype)[:, None]
        if factors is None:
            return out
        u, v = factors
        if autocast_on(rows):  # which does not concatenate float16
            return out + (rows @ v) @ u.mT + (rows @ u) @ v.mT
        left, right = torch.cat((v, u), -1), torch.cat((u, v), -1)
        return torch.baddbmm(out, rows @ left, right.mT)

    def diagonal(self) -> Tensor:
        """Return the diagonal part of P: softplus(sqrt(D) p), [G, D], float32 or wider."""
        p = self.parallel.share(self.p) if self.whole else self.p
        return softplus(p.to(torch.promote_types(p.dtype, torch.float32)) * self.hidden**0.5).view(
            -1, self.hidden
        )

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the low-rank factors U and V of P, [G, D, R] each."""
        return (
            (self.parallel.share(self.u), self.parallel.share(self.v))
            if self.whole
            else (self.u, self.v)
        )

    @torch.no_grad()
    def smallest_eigenvalue(self) -> Tensor:
        """Return the smallest eigenvalue of each of this rank's P, [G], float64 on the CPU.

        A negative eigenvalue means that a step may increase the energy. The identity's is one, [1].
        """
        if self.kind == "identity":
            return torch.ones(1, dtype=torch.float64)
        if self.kind == "diagonal":
            return self.diagonal().double().cpu().amin(-1)
        return smallest_eigenvalue(self.diagonal(), *self.factors())


def _product(c: Tensor, w: Tensor, x: Tensor | None, eta: float) -> Tensor:
    """Return c w, or x + eta c w, rounded once where the types agree."""
    if x is None:
        return c @ w
    if autocast_on(x) or not x.dtype == c.dtype == w.dtype:
        return torch.add(x, c @ w, alpha=eta)
    return torch.addmm(x.flatten(0, -2), c.flatten(0, -2), w, alpha=eta).view(x.shape)


def smallest_eigenvalue(diagonal: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return the smallest eigenvalue of diag(diagonal) + U V^T + V U^T, [G], float64 on the CPU.

    diagonal [G, D], u and v [G, D, R]; the result is exact up to rounding. With A = [U V] and C =
    [[0, I], [I, 0]] = C^-1, the matrix minus t I has as many negative eigenvalues as diag(diagonal
    - t) and -C - A^T diag(diagonal - t)^-1 A together, minus R (inertia of a Schur complement,
    taken both ways). So each bisection step on t costs a product with A and the eigenvalues of a 2R
    x 2R matrix, and no D x D matrix is formed.
    """
    diagonal, u, v = (t.detach().double().cpu() for t in (diagonal, u, v))
    a, rank = torch.cat((u, v), dim=-1), u.shape[-1]
    swap = torch.eye(2 * rank, dtype=torch.float64).roll(rank, 0)
    # Bracket: a Gershgorin-like lower bound; the smallest diagonal entry, a Rayleigh quotient.
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
