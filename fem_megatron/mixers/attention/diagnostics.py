"""Diagnostics of attention on a sample of tokens."""

from __future__ import annotations

import torch

from fem_megatron.diagnostics import Quantities, Sample, entropy, largest_logit, wide
from fem_megatron.mixers.attention.layer import Attention
from fem_megatron.update import rms_norm
from kernels.pairs import allowed_pairs


def observe(layer: Attention, sample: Sample) -> Quantities:
    """Return the entropy of softmax(q k^T / sqrt(d)) in nats, and the largest of its logits."""
    shape = layer.shape
    h = rms_norm(layer.start(sample.x), layer.norm.weight, shape.norm_eps)
    q, k, _ = layer.project(h, sample.context)
    q, k = (
        wide(t).permute(1, 2, 0, 3)
        for t in (q, k.repeat_interleave(shape.heads // shape.groups, dim=2))
    )
    scores = q @ k.mT * (shape.head**-0.5 if shape.scale is None else shape.scale)
    seen = allowed_pairs(
        sample.tokens, len(sample.tokens), sample.context.causal, sample.context.valid
    )
    if shape.window is not None and seen is not None:
        seen = seen & (
            torch.arange(seen.shape[-1], device=seen.device) > sample.tokens[:, None] - shape.window
        )
    weights = (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1)
    prior_entropy = layer.parallel.gather(entropy(weights).mean(-1)).mean()
    return {"prior_entropy": prior_entropy} | largest_logit(scores, seen, layer.parallel)
