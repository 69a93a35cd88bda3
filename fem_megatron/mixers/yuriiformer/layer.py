"""YuriiFormer (Zimin, Polyanskiy, Rigollet 2026, arXiv 2601.23236): Nesterov's method in place of attention's and the MLP's plain steps.

Attention is taken for the gradient of an energy of interaction, the MLP for that of a potential, and a layer for a step down each in turn
(Lie-Trotter splitting). Each token has a velocity v besides x, which begins as an embedding of its own. A step f, normalised as ever:

    ahead = x + mu v
    v'    = LN(beta v + gamma f(RMSNorm(ahead)))
    x'    = x + v'

mu, beta in (0, 1) and gamma > 0 are a number each, a step of every layer; LN has a weight and no bias. Read from the code that is published
with two later papers that compare with it (arXiv 2603.16535, 2605.24425), which agree; f is this project's attention and SwiGLU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fem_megatron.block import SwiGlu
from fem_megatron.mixers.attention.layer import Attention
from fem_megatron.mixers.yuriiformer.shape import AcceleratedAttentionShape, AcceleratedSwiGluShape
from fem_megatron.parallel import Parallel
from fem_megatron.state import Context
from fem_megatron.update import Update, layer_norm, rms_norm


class Accelerated(Update):
    """[x | v] -> [x' | v'], of an update whose ``step`` is f after its norm. The velocity is a token's own: decoding keeps none of it."""

    def __init__(
        self, shape: AcceleratedAttentionShape | AcceleratedSwiGluShape, parallel: Parallel
    ) -> None:
        self.norm_eps = shape.norm_eps
        super().__init__(shape, parallel)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        step = self.step(rms_norm(self.start(x), self.norm(), self.norm_eps), context)
        x, v = x.chunk(2, dim=-1)
        v = torch.addcmul(self.beta.sigmoid() * v, F.softplus(self.gamma), step)
        v = layer_norm(v, self.velocity_norm(), self.norm_eps)
        return torch.cat((x + v, v), dim=-1)

    def start(self, x: Tensor) -> Tensor:
        """Ahead of the tokens, where the step is read."""
        x, v = x.chunk(2, dim=-1)
        return torch.addcmul(x, self.mu.sigmoid(), v)


class AcceleratedAttention(Accelerated, Attention):
    """f: standard attention with RoPE."""


class AcceleratedSwiGlu(Accelerated, SwiGlu):
    """f: the MLP."""
