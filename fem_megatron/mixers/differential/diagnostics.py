"""Diagnostics of differential attention on a sample of tokens."""

from __future__ import annotations

from fem_megatron.diagnostics import Quantities, Sample, largest_logit, wide
from fem_megatron.mixers.differential.layer import DifferentialAttention
from fem_megatron.update import rms_norm
from kernels.pairs import allowed_pairs


def observe(layer: DifferentialAttention, sample: Sample) -> Quantities:
    """Return the largest logit of both softmax maps, and the current lambda."""
    h = rms_norm(sample.x, layer.norm.weight, layer.shape.norm_eps)
    q, k = (wide(t).permute(1, 2, 0, 3) for t in layer.project(h, sample.context)[:2])
    scores = q @ k.mT * (layer.shape.head**-0.5 if layer.shape.scale is None else layer.shape.scale)
    seen = allowed_pairs(
        sample.tokens, len(sample.tokens), sample.context.causal, sample.context.valid
    )
    return largest_logit(scores, seen, layer.parallel) | {"lambda": layer.lam_now()}
