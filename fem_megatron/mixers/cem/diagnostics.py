"""Diagnostics of a CEM step on a sample of tokens."""

from __future__ import annotations

from fem_megatron.diagnostics import Quantities, Sample, energies, size
from fem_megatron.mixers.cem.layer import CemAttention, CemMlp


def observe(layer: CemAttention | CemMlp, sample: Sample) -> Quantities:
    """Return the energy before and after the steps with h fixed, and the smallest eigenvalue.

    The eigenvalue is the minimum over all of the layer's preconditioners. For attention the largest
    score of the first step is also returned.
    """
    found = layer.diagnose(sample.x, sample.context, sample.tokens, sample.after)
    start = layer.start(sample.x)
    smallest = found["smallest_eigenvalue"].to(sample.x.device)
    largest = {}
    if isinstance(layer, CemAttention):
        smallest = layer.parallel.gather(smallest)
        largest = {"logit_max": layer.parallel.gather(found["largest_score"]).max()}
    return {
        **largest,
        **energies("energy", found["energy_before"], found["energy_after"]),
        "step_norm": (found["step_norm"] / size(layer.parallel.enter(start))).mean(),
        "smallest_eigenvalue": smallest.min(),
    }
