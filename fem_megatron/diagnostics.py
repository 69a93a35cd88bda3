"""What every layer's update does to a sample of tokens: step norm, energies, entropies. No trainer, no logger and no file may come in.

Each family's quantities are a function here; the energies themselves are the layers' and kernels' own. The sample is the beginning of the
first sequence, taken as a sequence of its own: of a causal model its energies are those of the whole sequence's first tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fem_megatron.block import Block
from fem_megatron.mixers.attention.layer import Attention
from fem_megatron.mixers.cem.layer import CemAttention, CemMlp
from fem_megatron.mixers.fem.layer import FemMixer
from fem_megatron.mixers.fem.prior_shapes import AftShape, MambaShape, PriorShape
from fem_megatron.mixers.hyperset.layer import HyperSet
from fem_megatron.mixers.second_order.layer import EnergyLinearAttention, SecondOrderAttention
from fem_megatron.state import Context
from fem_megatron.update import Update, rms_norm
from kernels.pairs import allowed_pairs
from kernels.second_order_attention.reference import quadratic_energy, rotated

TOKENS = 256  # of the sample
ONE_AS_AFT_QUERY = 1e4  # sigmoid is 1 there, and so is softplus over its root mean square

Quantities = dict[str, Tensor]
"""Name -> a number, the same on every tensor-parallel rank."""


@dataclass(frozen=True)
class Sample:
    """What an update made of x: x and after [n (/ tensor-parallel size under sequence parallelism), 1, D], tokens: 0 .. n - 1."""

    x: Tensor
    after: Tensor
    context: Context
    tokens: Tensor


@contextmanager
def observing(blocks: Mapping[int, Block], tokens: int = TOKENS) -> Iterator[dict[str, float]]:
    """Look at the first time that each block's updates run in this context; before and after it the blocks are as if nobody looked.

    blocks: by the layer's number in the whole model; all of a tensor-parallel group must do this together. The dictionary is filled when
    the context ends: ``layer_03/mixer/step_norm`` (of a block with recurrence ``layer_03/iteration_01/mixer/step_norm``) -> value.
    ``step_norm`` is the mean of |x' - x| / |x|; energies and entropies (nats) are means over the sample, energy_rose a share of tokens.
    """
    found: Quantities = {}
    numbers: dict[str, float] = {}
    handles = [
        update.register_forward_hook(_hook(f"layer_{number:02}", part, block.recurrence > 1, found, tokens))
        for number, block in blocks.items()
        for part, update in (("mixer", block.mixer), ("mlp", block.mlp))
        if update is not None
    ]
    try:
        yield numbers
    finally:
        for handle in handles:
            handle.remove()
        numbers |= {name: float(value) for name, value in found.items()}


def _hook(layer: str, part: str, iterated: bool, found: Quantities, tokens: int) -> Callable[[nn.Module, Any, Any], None]:
    looked: set[int] = set()

    def look(update: nn.Module, arguments: tuple[Tensor, Context], output: Tensor) -> None:
        x, context = arguments
        if context.iteration in looked:  # a later micro-batch, or the backward pass's recomputation
            return
        looked.add(context.iteration)
        assert isinstance(update, Update)
        place = f"{layer}/iteration_{context.iteration:02}/{part}" if iterated else f"{layer}/{part}"
        found.update({f"{place}/{name}": value for name, value in observe(update, x, output, context, tokens).items()})

    return look


@torch.no_grad()
def observe(update: Update, x: Tensor, after: Tensor, context: Context, tokens: int = TOKENS) -> Quantities:
    """The quantities of one update that made ``after`` of the slice x. The context must be one without a state."""
    parallel = update.parallel
    whole = [parallel.enter(t.detach()[:, :1].contiguous()) for t in (x, after)]
    length = min(tokens, len(whole[0]))
    if len(whole[0]) > len(x):
        length -= length % parallel.size
    sliced = [t[:length].chunk(parallel.size)[parallel.rank] if len(t) > len(x) else t[:length] for t in whole]
    positions = context.positions
    here = Context(
        positions=positions if positions is None else positions[:length] if positions.ndim == 1 else positions[:length, :1],
        valid=None if context.valid is None else context.valid[:1, :length],
        causal=context.causal,
        iteration=context.iteration,
    )
    sample = Sample(sliced[0], sliced[1], here, torch.arange(length, device=x.device))
    before, later = (t[:length] for t in whole)
    generic = {"step_norm": (_size(_wide(later) - _wide(before)) / _size(before)).mean()}
    family = FAMILIES.get(type(update))
    # Eigenvalues of what is not finite would end the run, which knows what to do with such a step.
    if family is None or not later.isfinite().all():
        return generic
    return generic | family(update, sample)


def _fem(mixer: FemMixer, sample: Sample) -> Quantities:
    """-F, F - mu, entropies of the prior p and the posterior q ~ p exp(beta v), quantiles of beta and lambda (mathematics 1.1).

    Whatever the prior, mu and F of token t move with v_i by p_t(i) and q_t(i), channel by channel: the weights are a gradient. Each channel
    is asked for one token's, spread over the sample, so that all entropies together cost one backward pass.
    """
    parts, v, beta, lam, context = _given_to_prior(mixer, sample)
    gather, (heads, length, width) = mixer.parallel.gather, v.shape[1:]
    head = torch.arange(heads, device=v.device)[:, None] + mixer.parallel.rank * heads
    number = torch.arange(width, device=v.device) * mixer.shape.heads + head + 1
    asked = (number * length // (mixer.shape.heads * width) - 1).clamp_min(0)
    slope = _slope_of_values(mixer.shape.prior, v)

    def read(temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        """mu or F [h, n, d], and the entropy of its weights, a number."""
        with torch.enable_grad():
            values = v.detach().requires_grad_()
            out = mixer.prior(parts, values, temperature, None, None, context)[0]
            (weights,) = torch.autograd.grad(out.gather(1, asked[:, None]).sum(), values)
        weights = torch.where(slope > 0, weights / slope, 0.0)
        return out.detach(), gather(_entropy(weights[0].transpose(1, 2)).mean(-1)).mean()

    mu, prior_entropy = read(None)
    if beta is None:
        return {"prior_entropy": prior_entropy}
    free_energy, posterior_entropy = read(beta)
    quantities = {
        "energy": -gather(free_energy.mean((1, 2))).mean(),
        "free_energy_gap": gather((free_energy - mu).mean((1, 2))).mean(),
        "prior_entropy": prior_entropy,
        "posterior_entropy": posterior_entropy,
    }
    if lam is not None:
        quantities |= _quantiles("beta", gather(beta.flatten())) | _quantiles("lambda", gather(lam.transpose(1, 2).flatten(2)))
    return quantities


def _given_to_prior(mixer: FemMixer, sample: Sample) -> tuple[dict[str, Tensor], Tensor, Tensor | None, Tensor | None, Context]:
    """What the mixer gives its prior for the sample, in float32 or wider: its slices, v, beta, lambda, the context."""
    given: list[Any] = []
    handle = mixer.prior.register_forward_pre_hook(lambda _, arguments: given.extend(arguments))
    try:
        mixer.step(rms_norm(sample.x, mixer.norm.weight, mixer.shape.norm_eps), sample.context)
    finally:
        handle.remove()
    parts, v, beta, lam, _, context = given
    if isinstance(mixer.shape.prior, AftShape):
        # AFT's query multiplies the read; this one by 1, whether it stands inside or after it.
        parts["q"] = torch.full_like(parts["q"], ONE_AS_AFT_QUERY)
    return {name: _wide(t) for name, t in parts.items()}, _wide(v), *(t if t is None else _wide(t) for t in (beta, lam)), context


def _slope_of_values(prior: PriorShape, v: Tensor) -> Tensor:
    """By what a value that is read moves with v: 1, but where the prior reads sigmoid(v)."""
    if isinstance(prior, MambaShape) and prior.squash:
        return v.sigmoid() * (1 - v.sigmoid())
    return torch.ones_like(v)


def _attention(layer: Attention, sample: Sample) -> Quantities:
    """Entropy of softmax(q k^T / sqrt(d))."""
    shape = layer.shape
    q, k, _ = layer.project(sample.x, sample.context)
    q, k = (_wide(t).permute(1, 2, 0, 3) for t in (q, k.repeat_interleave(shape.heads // shape.groups, dim=2)))
    scores = q @ k.mT * shape.head**-0.5
    seen = allowed_pairs(sample.tokens, len(sample.tokens), sample.context.causal, sample.context.valid)
    if shape.window is not None and seen is not None:
        seen = seen & (torch.arange(seen.shape[-1], device=seen.device) > sample.tokens[:, None] - shape.window)
    weights = (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1)
    return {"prior_entropy": layer.parallel.gather(_entropy(weights).mean(-1)).mean()}


def _cem(layer: CemAttention | CemMlp, sample: Sample) -> Quantities:
    """The energy with h held where it is, from where the steps start; the smallest eigenvalue of all of the layer's preconditioners."""
    found = layer.diagnose(sample.x, sample.context, sample.tokens, sample.after)
    start = sample.x
    if layer.shape.switches.residual == "normalised":
        start = rms_norm(start, layer.norm.weight, layer.shape.norm_eps)
    smallest = found["smallest_eigenvalue"].to(sample.x.device)
    if isinstance(layer, CemAttention):
        smallest = layer.parallel.gather(smallest)
    return {
        **_energies("energy", found["energy_before"], found["energy_after"]),
        "step_norm": (found["step_norm"] / _size(layer.parallel.enter(start))).mean(),
        "smallest_eigenvalue": smallest.min(),
    }


def _second_order(layer: SecondOrderAttention, sample: Sample) -> Quantities:
    found = layer.diagnose(sample.x, sample.context, sample.tokens)
    return _energies("energy", found["free_energy_before"], found["free_energy_after"])


def _energy_linear(layer: EnergyLinearAttention, sample: Sample) -> Quantities:
    """-1/2 sum_i (q.k_i)^2, the mean over heads, of q before and after among the keys before."""
    eps, context = layer.shape.norm_eps, sample.context
    before, after = (rms_norm(layer.parallel.enter(t), layer.norm.weight, eps) for t in (sample.x, sample.after))
    _, k = layer.project(before, context)
    seen = allowed_pairs(sample.tokens, len(sample.tokens), context.causal, context.valid)
    energies = []
    for z in (before, after):
        q, _ = layer.project(z, context)
        energy = quadratic_energy(rotated(_wide(q), layer.turn(z, context)), k, seen)
        energies.append(layer.parallel.total(energy.sum(1)) / layer.shape.heads)
    return _energies("energy", *energies)


def _hyperset(layer: HyperSet, sample: Sample) -> Quantities:
    """Both energies before and after this iteration; effective rank and mean angle (radians) before it, means over the heads."""
    if len(sample.tokens) < 2:
        return {}
    before, after = (layer.diagnose(t, sample.context, sample.tokens) for t in (sample.x, sample.after))
    return {
        **_energies("attention_energy", before["attention_energy"], after["attention_energy"]),
        **_energies("feed_forward_energy", before["feed_forward_energy"], after["feed_forward_energy"]),
        **{name: layer.parallel.gather(before[name]).mean() for name in ("effective_rank", "mean_angle")},
    }


FAMILIES: dict[type[Update], Callable[[Any, Sample], Quantities]] = {
    FemMixer: _fem,
    Attention: _attention,
    CemAttention: _cem,
    CemMlp: _cem,
    SecondOrderAttention: _second_order,
    EnergyLinearAttention: _energy_linear,
    HyperSet: _hyperset,
}
"""What is known of an update besides its step norm."""


def _energies(name: str, before: Tensor, after: Tensor) -> Quantities:
    rose = (after > before).to(before.dtype).mean()
    return {f"{name}_before": before.mean(), f"{name}_after": after.mean(), f"{name}_rose": rose}


def _quantiles(name: str, values: Tensor) -> Quantities:
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=values.dtype, device=values.device)
    found = values.flatten().quantile(shares)
    return {f"{name}_{percent}": value for percent, value in zip((10, 50, 90), found, strict=True)}


def _entropy(weights: Tensor) -> Tensor:
    """Of weights [..., n], which need not add up to one, in nats; rounding's negative ones count as zero."""
    weights = weights.clamp_min(0.0)
    return torch.special.entr(weights / weights.sum(-1, keepdim=True)).sum(-1)


def _size(x: Tensor) -> Tensor:
    """|x| of each token, in float32 or wider."""
    return torch.linalg.vector_norm(_wide(x), dim=-1)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))
