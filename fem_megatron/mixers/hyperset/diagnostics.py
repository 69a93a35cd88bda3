"""Diagnostics of a Hyper-SET iteration on a sample of tokens."""

from __future__ import annotations

from fem_megatron.diagnostics import Quantities, Sample, step_energies
from fem_megatron.mixers.hyperset.layer import HyperSet


def observe(layer: HyperSet, sample: Sample) -> Quantities:
    """Return the diagnostics of one iteration: energies, effective rank and mean angle.

    Both energies are those before and after the iteration. Rank and angle (radians) are those
    before the iteration, as means over the heads. If the read has scores (the linear one has none),
    their largest value before the iteration is also returned. The result is empty for fewer than
    two tokens.
    """
    if len(sample.tokens) < 2:
        return {}
    before, found = step_energies(layer, sample, "attention_energy", "feed_forward_energy")
    return {
        **found,
        **{
            name: layer.parallel.gather(before[name]).mean()
            for name in ("effective_rank", "mean_angle")
        },
    }
