"""Diagnostics of a step down second-order attention's energies on a sample of tokens."""

from __future__ import annotations

from fem_megatron.diagnostics import Quantities, Sample, energies, largest_logit, wide
from fem_megatron.mixers.second_order.layer import EnergyLinearAttention, SecondOrderAttention
from fem_megatron.update import rms_norm
from kernels.pairs import allowed_pairs
from kernels.second_order_attention.reference import log_weights, quadratic_energy, rotated


def observe(layer: SecondOrderAttention, sample: Sample) -> Quantities:
    """Return the free energy (mean over heads) before and after the update, and the largest logit.

    The logits are (q.k - |k|^2 / 2) / T.
    """
    found, context = layer.diagnose(sample.x, sample.context, sample.tokens), sample.context
    q, k, turn = layer.project(rms_norm(sample.x, layer.norm.weight, layer.shape.norm_eps), context)
    scores = log_weights(rotated(wide(q), turn), wide(k), layer.temperatures()[0], None)
    seen = allowed_pairs(sample.tokens, len(sample.tokens), context.causal, context.valid)
    return energies(
        "energy", found["free_energy_before"], found["free_energy_after"]
    ) | largest_logit(scores, seen, layer.parallel)


def observe_linear(layer: EnergyLinearAttention, sample: Sample) -> Quantities:
    """Return the energy -1/2 sum_i (q.k_i)^2 (mean over heads) for q before and after the update.

    The keys are always those before the update.
    """
    eps, context = layer.shape.norm_eps, sample.context
    before, after = (rms_norm(t, layer.norm.weight, eps) for t in (sample.x, sample.after))
    _, k, _ = layer.project(before, context)
    seen = allowed_pairs(sample.tokens, len(sample.tokens), context.causal, context.valid)
    found = []
    for z in (before, after):
        q, _, turn = layer.project(z, context)
        energy = quadratic_energy(rotated(wide(q), turn), k, seen)
        found.append(layer.parallel.total(energy.sum(1)) / layer.shape.heads)
    return energies("energy", *found)
