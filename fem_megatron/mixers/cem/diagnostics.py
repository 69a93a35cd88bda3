"""What a step of CEM does to a sample of tokens."""

from __future__ import annotations

from fem_megatron.diagnostics import Quantities, Sample, energies, size
from fem_megatron.mixers.cem.layer import CemAttention, CemMlp


def observe(layer: CemAttention | CemMlp, sample: Sample) -> Quantities:
    """The energy with h held where it is, from where the steps start; the smallest eigenvalue of all of the layer's preconditioners.

    Of attention also the largest of the first step's scores.
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
