"""Diagnostics of an NRGPT step on a sample of tokens."""

from __future__ import annotations

from fem_megatron.diagnostics import Quantities, Sample, step_energies
from fem_megatron.mixers.nrgpt.layer import Nrgpt


def observe(layer: Nrgpt, sample: Sample) -> Quantities:
    """Return both energies before and after the step, and the largest score before it."""
    return step_energies(layer, sample, "attention_energy", "feed_forward_energy")[1]
