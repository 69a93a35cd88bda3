"""NRGPT (eNeRgy-GPT): a GPT whose block is a step of every token down its own energy.

Source: Dehmamy et al., NRGPT: An Energy-based Alternative for GPT, ICLR 2026, arXiv 2512.16762, and
the authors' public code (`models/energy_models.py`, classes NRGPT_H_FF1, NRGPT_H_FF2 and
NRGPT_H_FF2W). With g = LayerNorm(x), which has a bias but no scale, and a matrix H_h per head:

    E_i(g_i) = -sum_h log sum_(j <= i) exp(g_i . H_h g_j)  +  c E_ff(g_i)
    x_i <- x_i - P dE_i/dg_i

The inference rate P is a learned matrix, and c a learned number. E_ff is one of three energies, see
`NrgptConfig.feed_forward`. The keys H_h g_j are constants of the gradient, also that of token i
itself. Since P is neither symmetric nor positive definite, the energy may rise, which the authors'
models also do; with P = eta I the step is gradient descent.

The paper's model applies the block several times with the same weights (``recurrence``) and adds
learned positions to the embeddings. Here RoPE gives the positions: it rotates g and H_h g before
the energy is computed, and rotates the gradient back.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from fem_megatron.mixers.nrgpt.shape import NrgptShape
from fem_megatron.parallel import Parallel
from fem_megatron.state import Context
from fem_megatron.update import Update, rotate, rotate_back
from kernels.cem_attention import cem_attention
from kernels.pairs import allowed_pairs


class Nrgpt(Update):
    """x - P (dE_att/dg + c dE_ff/dg).

    -dE_att/dg_i = sum_h sum_j A_hij H_h g_j, where A is the softmax over j of g_i . H_h g_j.

    Heads are as wide as the stream: on a GPU the fused kernel serves up to 256 channels in
    bfloat16, wider ones are read in blocks by matrix products.

    Tensor parallel: heads and the feed-forward's inner channels are split over the ranks; c, b2 and
    the first matrix of ff2 are replicated. P acts on a rank's slice of the sequence. Decoding
    state: H_h g, which is key and value.
    """

    diagnostics = "fem_megatron.mixers.nrgpt.diagnostics:observe"

    def __init__(self, shape: NrgptShape, parallel: Parallel) -> None:
        self.shape = shape
        super().__init__(shape, parallel)
        self.local_heads = shape.heads // parallel.size

    def forward(self, x: Tensor, context: Context) -> Tensor:
        g = self.parallel.enter(self.normalise(x))
        c = self.parallel.share(self.scale).to(g.dtype)
        descent = self.attention_descent(g, context) + c * self.feed_forward_descent(g)
        moved: Tensor = self.rate(self.parallel.leave(descent))
        return x + moved

    def normalise(self, x: Tensor) -> Tensor:
        """Return g of x, [..., D]."""
        g = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=self.shape.norm_eps).to(x.dtype)
        return g + self.norm("bias").to(x.dtype)

    def project(self, g: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return the rotated g [b, 1, s, D] and H_h g [b, local heads, s, D] of g [s, b, D]."""
        q = g[:, :, None]
        k = self.interaction(g).unflatten(-1, (self.local_heads, self.shape.hidden))
        if self.shape.rope is not None:
            q, k = (rotate(t, context, self.shape.rope) for t in (q, k))
        return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3)

    def attention_descent(self, g: Tensor, context: Context) -> Tensor:
        """Return this rank's summand of -dE_att/dg, [s, b, D], for g [s, b, D]."""
        q, k = self.project(g, context)
        k = context.extend("k", k, dim=2)

        def read(valid: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
            slopes = q.new_zeros(q.shape[1])
            bias = q.new_zeros((), dtype=torch.promote_types(q.dtype, torch.float32))
            return cem_attention(
                q.to(k.dtype),
                k,
                slopes,
                bias,
                scale=self.shape.scale,
                causal=context.causal,
                valid=valid,
            )

        q = q.expand(-1, k.shape[1], -1, -1)
        descent = context.per_document(read, q, k, keys=(1,)).sum(1, keepdim=True)
        descent = descent.permute(2, 0, 1, 3)
        if self.shape.rope is not None:
            descent = rotate_back(descent, context, self.shape.rope)
        return descent.flatten(2)

    def feed_forward_descent(self, g: Tensor) -> Tensor:
        """Return this rank's summand of -dE_ff/dg, [s, b, D], for g [s, b, D]."""
        descent: Tensor
        if self.shape.switches.feed_forward == "ff1":
            up = self.up()
            a, slope = gelu_and_slope(linear(g, up, self.up("bias")))
            descent = 2 * (a * slope) @ up
            return descent
        if self.shape.switches.feed_forward == "ff2":
            # Every rank computes the first layer and its part of the second one.
            up, down = self.parallel.share(self.up()), self.down()
            y, inner = gelu_and_slope(linear(g, up, self.parallel.share(self.up("bias"))))
            a, slope = gelu_and_slope(linear(y, down, self.down("bias")))
            descent = 2 * (((a * slope) @ down) * inner) @ up
            return descent
        up, down = self.up(), self.down()
        a, slope = gelu_and_slope(linear(g, up, self.up("bias")))
        bias = self.parallel.share(self.down("bias")) / self.parallel.size
        descent = linear(a, down, bias) + (slope * (g @ down)) @ up
        return descent

    def feed_forward_energy(self, g: Tensor) -> Tensor:
        """Return this rank's summand of E_ff, [...], for g [..., D]."""
        if self.shape.switches.feed_forward == "ff2w":
            a = gelu(linear(g, self.up(), self.up("bias")))
            return -(g * linear(a, self.down(), self.down("bias") / self.parallel.size)).sum(-1)
        a = gelu(linear(g, self.up(), self.up("bias")))
        if self.shape.switches.feed_forward == "ff2":
            a = gelu(linear(a, self.down(), self.down("bias")))
        return -a.square().sum(-1)

    @torch.no_grad()
    def diagnose(self, x: Tensor, context: Context, tokens: Tensor) -> dict[str, Tensor]:
        """Return diagnostics of the slice x before this step.

        tokens: [n], sampled positions. attention_energy and feed_forward_energy (times c), [n, b]:
        of each sampled token. largest_score, [local heads]. The context must not contain a state.
        """
        g = self.parallel.enter(self.normalise(x))
        wide = torch.promote_types(g.dtype, torch.float32)
        q, k = self.project(g, context)
        scores = self.shape.scale * q[:, :, tokens].to(wide) @ k.to(wide).mT
        seen = allowed_pairs(tokens, k.shape[2], context.causal, context.valid)
        scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
        energy = -scores.logsumexp(-1).sum(1) / self.shape.scale
        if self.shape.rope is not None:
            energy = energy / self.shape.rope.factor**2
        return {
            "attention_energy": self.parallel.total(energy).T,
            "feed_forward_energy": self.scale
            * self.parallel.total(self.feed_forward_energy(g[tokens]).to(wide)),
            "largest_score": scores.amax((0, 2, 3)),
        }


def gelu_and_slope(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return gelu(z) = z Phi(z) and its derivative Phi(z) + z phi(z), in z's type."""
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    phi = torch.special.ndtr(wide)
    density = torch.exp(-wide.square() / 2) / math.sqrt(2 * math.pi)
    return (wide * phi).to(z.dtype), (phi + wide * density).to(z.dtype)
