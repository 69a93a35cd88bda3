"""Diagnostics of a Hyper-SET iteration on a sample of tokens."""

from __future__ import annotations

from fem_megatron.diagnostics import Quantities, Sample, energies
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
    before, after = (
        layer.diagnose(t, sample.context, sample.tokens) for t in (sample.x, sample.after)
    )
    largest = (
        {"logit_max": layer.parallel.gather(before["largest_score"]).max()}
        if "largest_score" in before
        else {}
    )
    return {
        **largest,
        **energies("attention_energy", before["attention_energy"], after["attention_energy"]),
        **energies(
            "feed_forward_energy", before["feed_forward_energy"], after["feed_forward_energy"]
        ),
        **{
            name: layer.parallel.gather(before[name]).mean()
            for name in ("effective_rank", "mean_angle")
        },
    }
