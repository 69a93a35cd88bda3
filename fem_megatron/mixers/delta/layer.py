"""DeltaNet (arXiv 2406.06484) and Gated DeltaNet (arXiv 2412.06464).

The layers have the same structure as those of flash-linear-attention.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from fem_megatron.mixers.delta.shape import CHUNK, DeltaShape
from fem_megatron.mixers.recurrent import short_convolution, time_steps
from fem_megatron.parallel import Parallel
from fem_megatron.state import Context
from fem_megatron.update import Update, normed, rms_norm
from kernels.gated_delta_rule import gated_delta_rule

UNIT_EPS = 1e-6
RATES = (0.0, 16.0)


class DeltaNet(Update):
    """Layer of (Gated) DeltaNet: x + RMSNorm_head(o) [* silu(gate)] W_O.

    o is read from the delta rule's state; queries and keys have unit length, queries are also
    divided by sqrt(d_k). q, k and v pass a short convolution and SiLU. ``in_proj`` packs q, k, v
    (and the gate) of the heads one after another. ``rates`` packs the logit of beta (and the raw
    time step). The decoding state consists of each head's matrix and the last inputs of the
    convolution.
    """

    def __init__(self, shape: DeltaShape, parallel: Parallel) -> None:
        self.shape = shape
        super().__init__(shape, parallel)
        self.local_heads = shape.heads // parallel.size

    def forward(self, x: Tensor, context: Context) -> Tensor:
        shape = self.shape
        x, h = normed(x, self.norm(), shape.norm_eps)
        (rates,), packed = self.parallel.project_with(h, self.in_proj, lambda h: [self.rates(h)])
        heads = packed.unflatten(-1, (self.local_heads, shape.head_width))
        mixed, gate = heads.split([shape.mixed_width, shape.head_width - shape.mixed_width], dim=-1)
        mixed = short_convolution(mixed.flatten(2), self.conv, None, context, "conv").unflatten(
            -1, (self.local_heads, -1)
        )
        q, k, v = mixed.permute(1, 2, 0, 3).split(
            [shape.key_head, shape.key_head, shape.value_head], dim=-1
        )
        beta, log_decay = self.rates_of(rates, context)

        def read(
            _: Tensor | None,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            beta: Tensor,
            log_decay: Tensor | None,
        ) -> Tensor:
            o, state = gated_delta_rule(
                q, k, v, beta, log_decay, context.recall("matrix"), chunk=CHUNK
            )
            context.keep("matrix", state)
            return o

        o = context.per_document(read, _unit(q), _unit(k), v, beta, log_decay)
        o = rms_norm(o.permute(2, 0, 1, 3), self.parallel.share(self.head_norm()), shape.norm_eps)
        o = o * silu(gate) if shape.gated else o
        return x + self.parallel.leave(self.out_proj(o.flatten(2)))

    def rates_of(self, rates: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return beta and the log-decay (None if not gated), [b, local heads, s], fp32 or wider.

        Both are zero at padding.
        """
        shape, valid = self.shape, context.valid_now(rates.shape[0])
        logit, *step = rates.unflatten(-1, (self.local_heads, -1)).unbind(-1)
        beta = logit.to(torch.promote_types(rates.dtype, torch.float32)).sigmoid() * (
            2.0 if shape.negative_eigenvalues else 1.0
        )
        log_decay = None
        if shape.gated:
            first = self.parallel.rank * self.local_heads
            _, log_decay = time_steps(
                step[0], self.log_rate, self.step_bias, RATES, shape.heads, first
            )
        if valid is not None:
            beta = beta * valid[..., None]
            log_decay = None if log_decay is None else log_decay * valid[..., None]
        return beta.permute(1, 2, 0), None if log_decay is None else log_decay.permute(1, 2, 0)


def _unit(t: Tensor) -> Tensor:
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + UNIT_EPS)).to(t.dtype)
