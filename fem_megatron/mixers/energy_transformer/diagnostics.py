"""Diagnostics of an Energy Transformer step on a sample of tokens."""

from __future__ import annotations

from fem_megatron.diagnostics import Quantities, Sample, step_energies
from fem_megatron.mixers.energy_transformer.layer import EnergyTransformer


def observe(layer: EnergyTransformer, sample: Sample) -> Quantities:
    """Return both energies before and after the step, and the largest score before it.

    The result is empty for fewer than two tokens: a single token has no attention energy.
    """
    if len(sample.tokens) < 2:
        return {}
    return step_energies(layer, sample, "attention_energy", "memory_energy")[1]
