"""C, the time-decay conditioner: a first-order scan over the past that scales a mixer's projections (mathematics 1.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from fem_megatron.layers.parallel import Parallel
from fem_megatron.layers.update import Context, Layer, layer_norm
from kernels.conditioner_features import conditioner_features
from kernels.time_decay_scan import time_decay_scan


class TimeDecayConditioner(Layer):
    """phi = (r * LayerNorm(s)) W_out with s_t = exp(a_t) s_{t-1} + f_t, the factor every projection is multiplied by as 1 + phi.

    Weights (``FemShape.weights``, ``tdc.*``): norm [D], in_proj [3 H_c, D] (rows a, f, r of each channel), state_norm [H_c],
    out_proj [packed, H_c]. Tensor parallel: the H_c channels and their scans are split over the ranks; the norm over H_c sees all of them
    (a gather of 2 H_c numbers a token); W_out's rows are split as the mixer's packed projection is. ``backward``: the scan runs from the
    end of the sequence. Padding keeps the state: its decay's logit is -inf, its input 0. On a GPU the scan and what follows up to W_out
    are a kernel each; W_out is a GEMM.
    """

    def __init__(self, eps: float, parallel: Parallel, *, backward: bool = False) -> None:
        super().__init__()
        self.eps, self.parallel, self.backward = eps, parallel, backward

    def forward(self, h: Tensor, context: Context) -> Tensor:
        """h [s, b, D], the whole sequence on every rank -> phi [s, b, packed / tensor-parallel size]."""
        u = layer_norm(h, self.parallel.share(self.norm.weight), self.eps)
        a, f, r = self.in_proj(u).unflatten(-1, (-1, 3)).unbind(-1)
        valid = context.valid_now(h.shape[0])
        if valid is not None:
            a, f = a.masked_fill(~valid[..., None], -torch.inf), f.masked_fill(~valid[..., None], 0.0)
        if self.backward:
            state = time_decay_scan(a.flip(0), f.flip(0), softplus=True).flip(0)
        else:
            state = time_decay_scan(a, f, context.recall("state"), softplus=True)
            context.keep("state", state[-1])
        if self.parallel.size > 1:
            both = self.parallel.gather(torch.stack((r.to(state.dtype), state), dim=-1).flatten(-2)).unflatten(-1, (-1, 2))
            r, state = both[..., 0].to(r.dtype), both[..., 1]
        features = conditioner_features(r, state, self.state_norm.weight, self.eps)
        return self.out_proj(self.parallel.share(features))
