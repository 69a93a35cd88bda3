"""Diagnostics of an Energy Transformer step on a sample of tokens."""

from __future__ import annotations

from fem_megatron.diagnostics import Quantities, Sample, energies
from fem_megatron.mixers.energy_transformer.layer import EnergyTransformer


def observe(layer: EnergyTransformer, sample: Sample) -> Quantities:
    """Return both energies before and after the step, and the largest score before it.

    The result is empty for fewer than two tokens: a single token has no attention energy.
    """
    if len(sample.tokens) < 2:
        return {}
    before, after = (
        layer.diagnose(t, sample.context, sample.tokens) for t in (sample.x, sample.after)
    )
    return {
        "logit_max": layer.parallel.gather(before["largest_score"]).max(),
        **{
            key: value
            for name in ("attention_energy", "memory_energy")
            for key, value in energies(name, before[name], after[name]).items()
        },
    }
