"""Mamba-2 (arXiv 2405.21060): linear attention with an input-dependent decay and step per head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from fem_megatron.context_parallel.scans import linear_scan
from fem_megatron.mixers.mamba2.shape import Mamba2Shape
from fem_megatron.mixers.recurrent import short_convolution, time_steps
from fem_megatron.parallel import Parallel
from fem_megatron.state import Context
from fem_megatron.update import Update, normed, product_type

RATES = (1.0, 16.0)


class Mamba2(Update):
    """Layer of Mamba-2: x + RMSNorm((y + D u) * silu(z)) W_O, with y_t computed per head.

    y_t = sum_(i<=t) C_t.B_i exp(sum_(i<s<=t) -A delta_s) delta_i u_i. In this formula u are the
    values, z is the gate, delta the step sizes, A the heads' decay rates and D the skip weights. u,
    B and C pass a short convolution and SiLU; all heads share B and C.

    Tensor parallel: the heads are split over the ranks, and every rank computes B and C; the norm
    covers all channels. The decoding state consists of the heads' matrices and the last inputs of
    the convolutions.
    """

    def __init__(self, shape: Mamba2Shape, parallel: Parallel) -> None:
        self.shape = shape
        super().__init__(shape, parallel)
        self.local_heads = shape.heads // parallel.size

    def forward(self, x: Tensor, context: Context) -> Tensor:
        shape, share = self.shape, self.parallel.share
        x, h = normed(x, self.norm(), shape.norm_eps)

        def bc_and_steps(h: Tensor) -> list[Tensor]:
            return [linear(h, share(self.bc_proj())), self.steps(h)]

        (bc, raw), uz = self.parallel.project_with(h, self.in_proj, bc_and_steps)
        u, z = uz.unflatten(-1, (self.local_heads, 2 * shape.head)).chunk(2, dim=-1)
        u = short_convolution(u.flatten(2), self.conv, self.conv_bias, context, "conv").unflatten(
            -1, (self.local_heads, -1)
        )
        bc = short_convolution(
            bc, share(self.bc_conv), share(self.bc_conv_bias), context, "bc_conv"
        )
        y = self._scan(u, bc, raw, context) + u * self.skip[:, None].to(u.dtype)
        y = y.flatten(2) * silu(z.flatten(2))
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        mean = self.parallel.total(wide.square().sum(-1, keepdim=True)) / shape.inner
        y = (wide * torch.rsqrt(mean + shape.norm_eps)).to(y.dtype) * self.out_norm().to(y.dtype)
        return x + self.parallel.leave(self.out_proj(y))

    def _scan(self, u: Tensor, bc: Tensor, raw: Tensor, context: Context) -> Tensor:
        """Return the scan's output y.

        u [s, b, local heads, d]; bc [s, b, 2 N], B and C; raw [s, b, local heads], time steps.

        Padding does not change the state.
        """
        first, valid = self.parallel.rank * self.local_heads, context.valid_now(u.shape[0])
        delta, log_decay = time_steps(
            raw, self.log_rate, self.step_bias, RATES, self.shape.heads, first
        )
        if valid is not None:
            delta, log_decay = delta * valid[..., None], log_decay * valid[..., None]
        narrow = product_type(u)
        b, c = (t.permute(1, 0, 2)[:, None] for t in bc.to(narrow).chunk(2, dim=-1))
        v = (u * delta[..., None]).to(narrow).permute(1, 2, 0, 3)

        def read(_: Tensor | None, c: Tensor, b: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
            c, b = (t.expand(-1, v.shape[1], -1, -1) for t in (c, b))
            y, state = linear_scan(c, b, v, log_decay, context.recall("matrix"), context)
            context.keep("matrix", state)
            return y

        y = context.per_document(read, c, b, v, log_decay.permute(1, 2, 0), passes=True)
        return y.permute(2, 0, 1, 3).to(u.dtype)
