"""Differential attention (Differential Transformer, arXiv 2410.05258).

The difference of two softmax maps reads the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fem_megatron.context_parallel.ring import softmax_read
from fem_megatron.mixers.differential.shape import DifferentialShape
from fem_megatron.parallel import Parallel
from fem_megatron.state import Context
from fem_megatron.update import Update, head_norms, normed, rms_norm, rotate_both


class DifferentialAttention(Update):
    """Layer of differential attention, which subtracts two softmax maps.

        x + (1 - lambda_init) RMSNorm_head[(softmax(q1 k1^T) - lambda softmax(q2 k2^T)) v] W_O

    Scores are divided by sqrt(d). lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2)
    + lambda_init, one number per layer. All heads share the norm's weight. ``in_proj`` packs the
    heads one after another. The decoding state is a KV-cache of both keys (after RoPE) and the
    value.
    """

    diagnostics = "fem_megatron.mixers.differential.diagnostics:observe"

    def __init__(self, shape: DifferentialShape, parallel: Parallel) -> None:
        self.shape = shape
        super().__init__(shape, parallel)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        shape = self.shape
        x, h = normed(x, self.norm(), shape.norm_eps)
        q, k, v = self.project(h, context)
        k, v = (
            context.extend(name, t.permute(1, 2, 0, 3), dim=2) for name, t in (("k", k), ("v", v))
        )
        wide = torch.promote_types(x.dtype, torch.float32)
        both = softmax_read(context, q.permute(1, 2, 0, 3), k, v, scale=shape.scale).unflatten(
            1, (-1, 2)
        )
        first, second = (t.to(wide) for t in both.unbind(2))
        o = first - self.lam_now() * second
        o = rms_norm(o, self.parallel.share(self.head_norm()).to(wide), shape.norm_eps) * (
            1.0 - shape.lambda_init
        )
        return x + self.parallel.leave(self.out_proj(o.to(x.dtype).permute(2, 0, 1, 3).flatten(2)))

    def project(self, h: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of the normalised slice h.

        q and k: [s, b, 2 local heads, d], both maps of a head next to each other. v: [s, b, local
        heads, 2 d].
        """
        shape, d = self.shape, self.shape.head
        q, k, v = (
            self.parallel.project(h, self.in_proj)
            .unflatten(-1, (-1, shape.head_width))
            .split([2 * d, 2 * d, 2 * d], dim=-1)
        )
        q, k = (t.unflatten(-1, (2, d)).flatten(2, 3) for t in (q, k))
        if shape.qk_norm:
            q, k = head_norms(self, self.parallel, q, k, shape.norm_eps)
        if shape.rope:
            q, k = rotate_both(q, k, context, shape.rope)
        return q, k, v

    def lam_now(self) -> Tensor:
        """Return the current lambda as a scalar tensor, fp32 or wider."""
        lam = self.parallel.share(self.lam)
        q1, k1, q2, k2 = lam.to(torch.promote_types(lam.dtype, torch.float32))
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.shape.lambda_init
