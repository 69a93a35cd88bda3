"""C, the time-decay conditioner: a first-order scan over the past that scales a mixer's projections (mathematics 1.4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fem_megatron.layers.parallel import Parallel
from fem_megatron.layers.update import Context, Layer, layer_norm
from kernels.time_decay_scan import time_decay_scan


class TimeDecayConditioner(Layer):
    """phi = (r * LayerNorm(s)) W_out with s_t = exp(a_t) s_{t-1} + f_t, the factor every projection is multiplied by as 1 + phi.

    Weights (``FemShape.weights``, ``tdc.*``): norm [D], in_proj [3 H_c, D] (rows a, f, r of each channel), state_norm [H_c],
    out_proj [packed, H_c]. Tensor parallel: the H_c channels and their scans are split over the ranks; the norm over H_c sees all of them
    (a gather of 2 H_c numbers a token); W_out's rows are split as the mixer's packed projection is. ``backward``: the scan runs from the
    end of the sequence.
    """

    def __init__(self, eps: float, parallel: Parallel, *, backward: bool = False) -> None:
        super().__init__()
        self.eps, self.parallel, self.backward = eps, parallel, backward

    def forward(self, h: Tensor, context: Context) -> Tensor:
        """h [s, b, D], the whole sequence on every rank -> phi [s, b, packed / tensor-parallel size]."""
        u = layer_norm(h, self.parallel.share(self.norm.weight), self.eps)
        packed = self.in_proj(u)
        a, f, r = packed.unflatten(-1, (-1, 3)).to(torch.promote_types(packed.dtype, torch.float32)).unbind(-1)
        a = -softplus(a)
        valid = context.valid_now(h.shape[0])
        if valid is not None:
            a, f = a * valid[..., None], f * valid[..., None]
        if self.backward:
            state = time_decay_scan(a.flip(0), f.flip(0)).flip(0)
        else:
            state = time_decay_scan(a, f, context.recall("state"))
            context.keep("state", state[-1])
        both = torch.stack((softplus(r), state), dim=-1).flatten(-2)
        size = self.state_norm.weight.shape[0]
        r, state = self.parallel.gather(both).unflatten(-1, (size, 2)).unbind(-1)
        r = r * (size**0.5 / r.norm(dim=-1, keepdim=True).clamp_min(self.eps))
        features = (r * layer_norm(state, self.state_norm.weight.to(state.dtype), self.eps)).to(h.dtype)
        return self.out_proj(self.parallel.share(features))
