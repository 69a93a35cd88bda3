"""Diagnostics of an NRGPT step on a sample of tokens."""

from __future__ import annotations

from fem_megatron.diagnostics import Quantities, Sample, energies
from fem_megatron.mixers.nrgpt.layer import Nrgpt


def observe(layer: Nrgpt, sample: Sample) -> Quantities:
    """Return both energies before and after the step, and the largest score before it."""
    before, after = (
        layer.diagnose(t, sample.context, sample.tokens) for t in (sample.x, sample.after)
    )
    return {
        "logit_max": layer.parallel.gather(before["largest_score"]).max(),
        **{
            key: value
            for name in ("attention_energy", "feed_forward_energy")
            for key, value in energies(name, before[name], after[name]).items()
        },
    }
