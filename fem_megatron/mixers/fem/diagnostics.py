"""Diagnostics of the Free Energy Mixer on a sample of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fem_megatron.diagnostics import Quantities, Sample, entropy, largest_logit, quantiles, wide
from fem_megatron.mixers.fem.layer import FemMixer
from fem_megatron.mixers.fem.prior_shapes import AftShape, MambaShape, PriorShape, SoftmaxShape
from fem_megatron.mixers.fem.priors import Values
from fem_megatron.state import Context
from fem_megatron.update import rms_norm
from kernels.pairs import allowed_pairs

ONE_AS_AFT_QUERY = 1e4  # sigmoid is 1 at this value, and so is softplus over its RMS


def observe(mixer: FemMixer, sample: Sample) -> Quantities:
    """Return -F, F - mu, entropies of prior p and posterior q ~ p exp(beta v), and quantiles.

    mu is the expectation of v and F its free energy under the prior (see `layer`). The quantiles
    are those of beta and lambda. For the softmax prior the largest of its logits is also returned.

    For every prior, the derivatives of mu and F of token t by v_i are p_t(i) and q_t(i), channel by
    channel, so the weights are a gradient. Each channel computes the weights of one token. These
    tokens are spread over the sample, so that all entropies together cost one backward pass.
    """
    parts, v, beta, lam, context = _given_to_prior(mixer, sample)
    gather, (heads, length, width) = mixer.parallel.gather, v.shape[1:]
    head = torch.arange(heads, device=v.device)[:, None] + mixer.parallel.rank * heads
    number = torch.arange(width, device=v.device) * mixer.shape.heads + head + 1
    tokens = (number * length // (mixer.shape.heads * width) - 1).clamp_min(0)
    slope = _slope_of_values(mixer.shape.prior, v)

    def read(temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mu or F [h, n, d], and the mean entropy of its weights."""
        with torch.enable_grad():
            values = v.detach().requires_grad_()
            out = mixer.prior(parts, Values(values, temperature), context)[0]
            (weights,) = torch.autograd.grad(out.gather(1, tokens[:, None]).sum(), values)
        weights = torch.where(slope > 0, weights / slope, 0.0)
        return out.detach(), gather(entropy(weights[0].transpose(1, 2)).mean(-1)).mean()

    mu, prior_entropy = read(None)
    logits = _largest_logit(mixer, parts, sample)
    if beta is None:
        return {"prior_entropy": prior_entropy} | logits
    free_energy, posterior_entropy = read(beta)
    quantities = {
        "energy": -gather(free_energy.mean((1, 2))).mean(),
        "free_energy_gap": gather((free_energy - mu).mean((1, 2))).mean(),
        "prior_entropy": prior_entropy,
        "posterior_entropy": posterior_entropy,
    } | logits
    if lam is not None:
        quantities |= quantiles("beta", gather(beta.flatten())) | quantiles(
            "lambda", gather(lam.transpose(1, 2).flatten(2))
        )
    return quantities


def _largest_logit(mixer: FemMixer, parts: dict[str, Tensor], sample: Sample) -> Quantities:
    prior = mixer.shape.prior
    if not isinstance(prior, SoftmaxShape):
        return {}
    q, k = (parts[name].permute(1, 2, 0, 3) for name in ("q", "k"))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if prior.scale is None else prior.scale)
    seen = allowed_pairs(
        sample.tokens, len(sample.tokens), sample.context.causal, sample.context.valid
    )
    return largest_logit(scores, seen, mixer.parallel)


def _given_to_prior(
    mixer: FemMixer, sample: Sample
) -> tuple[dict[str, Tensor], Tensor, Tensor | None, Tensor | None, Context]:
    """Return the inputs of the mixer's prior for the sample, in float32 or wider.

    The result is (slices of the packed projection, v, beta, lambda, context). beta and lambda may
    be None.
    """
    given: list[Any] = []
    handle = mixer.prior.register_forward_pre_hook(lambda _, arguments: given.extend(arguments))
    try:
        mixer.step(rms_norm(sample.x, mixer.norm.weight, mixer.shape.norm_eps), sample.context)
    finally:
        handle.remove()
    parts, (v, beta, lam, _), context = given
    if isinstance(mixer.shape.prior, AftShape):
        # AFT's query multiplies the read. This value gives a factor of 1 for both query modes.
        parts["q"] = torch.full_like(parts["q"], ONE_AS_AFT_QUERY)
    return (
        {name: wide(t) for name, t in parts.items()},
        wide(v),
        *(t if t is None else wide(t) for t in (beta, lam)),
        context,
    )


def _slope_of_values(prior: PriorShape, v: Tensor) -> Tensor:
    """Return the derivative of a read value by v: 1, unless the prior reads sigmoid(v)."""
    if isinstance(prior, MambaShape) and prior.squash:
        return v.sigmoid() * (1 - v.sigmoid())
    return torch.ones_like(v)
