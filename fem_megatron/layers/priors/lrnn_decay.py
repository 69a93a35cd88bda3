"""Decay alone as a prior (LRNN-decay): a running mean that forgets as its input says; linear time (mathematics 1.3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fem_megatron.layers.priors.base import Parts
from fem_megatron.layers.priors.scan import ScanPrior
from fem_megatron.layers.update import Context


class DecayPrior(ScanPrior):
    """exp(-sum over (i, t] of softplus(a)): every token weighs one, and fades."""

    def features(self, parts: Parts, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        logit = parts["decay"]
        decay = -softplus(logit.to(torch.promote_types(logit.dtype, torch.float32)))
        return torch.ones_like(decay), torch.ones_like(decay), decay
