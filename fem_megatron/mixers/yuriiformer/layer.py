"""YuriiFormer: Nesterov steps for attention and MLP.

Source: Zimin, Polyanskiy, Rigollet 2026, arXiv 2601.23236. Attention is interpreted as
the gradient of an interaction energy, the MLP as that of a potential, and a layer as a
step down each in turn (Trotter splitting). Each token has a velocity v in addition to x,
which starts as a separate embedding. A step f on normalised input becomes:

    ahead = x + mu v
    v'    = LN(beta v + gamma f(RMSNorm(ahead)))
    x'    = x + v'

mu, beta in (0, 1) and gamma > 0 are one number each per step of every layer; LN has a weight and no
bias. The form is taken from the code published with two later papers that compare with it (arXiv
2603.16535, 2605.24425), which agree. f is this project's attention and SwiGLU.
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
from fem_megatron.update import Update, rms_norm
from kernels.momentum_step import momentum_step


class Accelerated(Update):
    """Step with momentum: [x | v] -> [x' | v'] for an update whose ``step`` is f.

    A subclass also inherits from the class that defines f. Decoding stores no velocity, because
    other tokens do not read it.
    """

    def __init__(
        self, shape: AcceleratedAttentionShape | AcceleratedSwiGluShape, parallel: Parallel
    ) -> None:
        self.norm_eps = shape.norm_eps
        super().__init__(shape, parallel)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        step = self.step(rms_norm(self.start(x), self.norm(), self.norm_eps), context)
        beta, gamma = self.beta.sigmoid(), F.softplus(self.gamma)
        return momentum_step(x, step, beta, gamma, self.velocity_norm(), self.norm_eps)

    def start(self, x: Tensor) -> Tensor:
        """Return the point ahead of the tokens, x + mu v, at which the step is computed."""
        x, v = x.chunk(2, dim=-1)
        return torch.addcmul(x, self.mu.sigmoid(), v)


class AcceleratedAttention(Accelerated, Attention):
    """Step with momentum whose f is standard attention with RoPE."""


class AcceleratedSwiGlu(Accelerated, SwiGlu):
    """Step with momentum whose f is the SwiGLU MLP."""
