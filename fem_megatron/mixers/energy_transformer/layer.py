"""Energy Transformer: attention and a Hopfield network as one step down one energy.

Source: Hoover et al. 2023, Energy Transformer, arXiv 2302.07253, sections 2 and 3. With
g = gamma (x - mean(x)) / std(x) + delta (gamma is one number, delta a vector), Q_h = W^Q_h g and
K_h = W^K_h g:

    E(g) = -1/beta sum_h sum_C log sum_(B != C) exp(beta K_Bh . Q_Ch)  -  1/2 sum_C |relu(xi g_C)|^2
    x <- x - alpha dE/dg

The paper's model applies this step several times with the same weights (``recurrence``).

The paper's tokens see each other in both directions. Here this is the form with
``model.causal=false``. In the causal form, token C descends the energy that it has given the
tokens before it,

    E_C(g_C) = -1/beta sum_h log sum_(B < C) exp(beta K_Bh . Q_Ch)  -  1/2 |relu(xi g_C)|^2,

with respect to g_C only. Thus the part of dE/dg_C that token C has as the key of later tokens is
left out, since a token must not depend on later tokens. The first token of a sequence has no
attention energy. In both forms no token attends to itself, as in the paper; the authors' released
code includes the token itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fem_megatron.mixers.energy_transformer.shape import EnergyTransformerShape
from fem_megatron.parallel import Parallel
from fem_megatron.state import Context
from fem_megatron.update import Update, rotate, rotate_back
from kernels.cem_attention import cem_attention
from kernels.pairs import allowed_pairs

EXCLUDED = -1e30
"""Score of a token with itself; finite, because the first token has no other score."""


class EnergyTransformer(Update):
    """One step down both energies, which share g: x - alpha (dE_att/dg + dE_hn/dg).

    dE_att/dg_C = -sum_h W^Q_h^T sum_B A_hCB K_Bh, in the bidirectional form also
    -sum_h W^K_h^T sum_B A_hBC Q_Bh. dE_hn/dg = -xi^T relu(xi g).

    ``query``, ``key`` and ``memories`` are W^Q, W^K and xi; each is applied in both directions.
    RoPE rotates Q and K before the energy is computed and rotates the gradient back, so that the
    step remains a gradient; it replaces the paper's learned positions (``model.rope=false``: no
    positions).

    Tensor parallel: heads and memories are split over the ranks. Decoding state: K, which is also
    the value.
    """

    diagnostics = "fem_megatron.mixers.energy_transformer.diagnostics:observe"

    def __init__(self, shape: EnergyTransformerShape, parallel: Parallel) -> None:
        self.shape = shape
        super().__init__(shape, parallel)
        self.local_heads = shape.heads // parallel.size

    def forward(self, x: Tensor, context: Context) -> Tensor:
        g = self.parallel.enter(self.normalise(x))
        descent = self.attention_descent(g, context) + self.memory_descent(g)
        return x + self.shape.switches.alpha * self.parallel.leave(descent)

    def normalise(self, x: Tensor) -> Tensor:
        """Return g of x, [..., D]."""
        g = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=self.shape.norm_eps).to(x.dtype)
        return g * self.norm().to(x.dtype) + self.norm("bias").to(x.dtype)

    def project(self, g: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return this rank's rotated Q and K of g [s, b, D], [b, local heads, s, Y] each."""
        found = []
        for weight in (self.query(), self.key()):
            heads = linear(g, weight).unflatten(-1, (self.local_heads, self.shape.head))
            if self.shape.rope is not None:
                heads = rotate(heads, context, self.shape.rope)
            found.append(heads.permute(1, 2, 0, 3))
        return found[0], found[1]

    def attention_descent(self, g: Tensor, context: Context) -> Tensor:
        """Return this rank's summand of -dE_att/dg, [s, b, D], for g [s, b, D]."""
        q, k = self.project(g, context)
        k = context.extend("k", k, dim=2)
        if context.causal:
            o = context.per_document(self.read, q, k, keys=(1,))
            return self._back(o, context) @ self.query()
        o = context.per_document(self.read_both_ways, q, k)
        as_query, as_key = (self._back(part, context) for part in o.chunk(2, dim=-1))
        return as_query @ self.query() + as_key @ self.key()

    def read(self, valid: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
        """Return sum_(B < C) A_hCB K_Bh, [b, heads, s, Y]; zero for the first token.

        q: [b, heads, s, Y]. k: [b, heads, past + s, Y]. valid: [b, past + s], False at padding.
        """
        slopes = q.new_zeros(q.shape[1])
        alone = q.new_full((), EXCLUDED, dtype=torch.promote_types(q.dtype, torch.float32))
        o = cem_attention(q, k, slopes, alone, scale=self.shape.beta, valid=valid)
        return o * _has_past(q.shape[2], k, valid).to(o.dtype)

    def read_both_ways(self, valid: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
        """Return [sum_B A_hCB K_Bh | sum_B A_hBC Q_Bh] without B = C, [b, heads, s, 2 Y].

        The memory is quadratic in the tokens.
        """
        weights = self.scores(q, k, torch.arange(k.shape[2], device=k.device), valid).softmax(-1)
        # A row without other tokens is NaN; its energy is zero.
        weights = weights.nan_to_num(0.0).to(q.dtype)
        return torch.cat((weights @ k, weights.mT @ q), dim=-1)

    def scores(self, q: Tensor, k: Tensor, own: Tensor, valid: Tensor | None) -> Tensor:
        """Return beta K_B . Q_C, [b, heads, n, keys], float32 or wider; -inf for excluded pairs.

        q: [b, heads, n, Y], of the tokens at the indices ``own`` [n] among the keys.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) @ k.to(wide).mT) * self.shape.beta
        itself = torch.arange(k.shape[2], device=k.device) == own[:, None]
        scores = scores.masked_fill(itself, -torch.inf)
        seen = allowed_pairs(own, k.shape[2], self.shape.causal, valid)
        return scores if seen is None else scores.masked_fill(~seen, -torch.inf)

    def memory_descent(self, g: Tensor) -> Tensor:
        """Return this rank's summand of -dE_hn/dg = xi^T relu(xi g), [s, b, D]."""
        memories = self.memories()
        descent: Tensor = linear(g, memories).relu() @ memories
        return descent

    @torch.no_grad()
    def diagnose(self, x: Tensor, context: Context, tokens: Tensor) -> dict[str, Tensor]:
        """Return diagnostics of the slice x before this step.

        tokens: [n], sampled positions. attention_energy and memory_energy, [n, b]: of each sampled
        token; summed over all tokens they are E_att and E_hn. largest_score, [local heads]. The
        context must not contain a state.
        """
        g = self.parallel.enter(self.normalise(x))
        q, k = self.project(g, context)
        scores = self.scores(q[:, :, tokens], k, tokens, context.valid)
        sums = scores.logsumexp(-1)  # -inf without another token
        energy = -sums.masked_fill(sums == -torch.inf, 0.0).sum(1) / self.shape.beta
        if self.shape.rope is not None:
            energy = energy / self.shape.rope.factor**2
        hidden = linear(g[tokens], self.memories())
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32)).relu()
        return {
            "attention_energy": self.parallel.total(energy).T,
            "memory_energy": self.parallel.total(-hidden.square().sum(-1) / 2),
            "largest_score": scores.amax((0, 2, 3)),
        }

    def _back(self, o: Tensor, context: Context) -> Tensor:
        """Return a gradient with respect to rotated heads, in the frame of g.

        [b, local heads, s, Y] -> [s, b, D / size].
        """
        o = o.permute(2, 0, 1, 3)
        if self.shape.rope is not None:
            o = rotate_back(o, context, self.shape.rope)
        return o.flatten(2)


def _has_past(length: int, k: Tensor, valid: Tensor | None) -> Tensor:
    """Return whether each of the last ``length`` tokens has another token before it.

    k: [b, heads, keys, Y]. valid: [b, keys], False at padding. The result is bool [length, 1] or
    [b, 1, length, 1].
    """
    keys = k.shape[2]
    if valid is None:
        return torch.arange(keys - length, keys, device=k.device)[:, None] > 0
    before = valid.cumsum(1) - valid.to(torch.int64)
    return before[:, None, keys - length :, None] > 0
