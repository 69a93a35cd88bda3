"""Hyper-SET: gradient descent on two energies of tokens that are projected to spheres.

An iteration descends attention's energy, then the feed-forward's.

    Z_h = RMSNorm(W_h^T x)
    x <- x - alpha_t * sum_h W_h A(Z_h) Z_h
    x <- x + gamma_t * D a(RMSNorm(D^T x))

A(Z_h) is the matrix of attention weights and a the activation function, see
`HyperSetConfig.attention` and `HyperSetConfig.feed_forward`. The norms follow the projections; x
itself is never normalised. The block runs the iterations one after another (``recurrence``).
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from fem_megatron.context_parallel.scans import squares_before
from fem_megatron.mixers.hyperset.shape import HyperSetShape
from fem_megatron.parallel import Parallel
from fem_megatron.state import Context
from fem_megatron.update import Layer, Update, rms_norm, rotate, rotate_back
from kernels.pairs import allowed_pairs
from kernels.symmetric_attention import symmetric_attention, symmetric_linear_attention
from kernels.symmetric_attention.reference import (
    effective_rank,
    feed_forward_energy,
    mean_angle,
    pair_energy,
)

LORA_SCALE = 4.0
SECOND_MOMENT_EPS = 1e-6


class HyperSet(Update):
    """One iteration of descent on both energies.

    ``subspaces`` is W^T and ``directions`` D^T; each is applied in both directions (tied).

    RoPE rotates z before the energy is computed, and rotates the energy's gradient back by the same
    angle. The update of x is therefore exactly minus a gradient, of an energy in z_i . R_(j-i) z_j,
    and one cache of rotated z serves as keys and values. Without ``model.rope`` only the causal
    mask gives an order. yarn's factor m maps z by m R and the gradient by the inverse R^T / m: the
    energy is unchanged and its scores are m^2 times as sharp. Linear attention has no scores and no
    factor.

    Tensor parallel: heads and directions are split over the ranks; the feed-forward's norm (and its
    softmax and sum) covers all directions. The running means of momentum, rmsprop and adam are in
    ``context.memory`` and last one forward pass.
    """

    diagnostics = "fem_megatron.mixers.hyperset.diagnostics:observe"

    def __init__(self, shape: HyperSetShape, parallel: Parallel) -> None:
        self.shape = shape
        super().__init__(shape, parallel)
        self.local_heads = shape.heads // parallel.size

    def build(self) -> None:
        """Create the step sizes' network, if they are learned."""
        if self.shape.switches.step_size == "learned":
            self.step = StepNet(self.shape)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run iteration ``context.iteration`` of ``context.origin``.

        x and the result are sliced like the residual stream, [s, b, D].
        """
        alpha, gamma = self.step_sizes(x, context)
        repulsion = self.attention_gradient(self.project_heads(x, context), context)
        x = x - alpha * self._direction("attention", self.parallel.leave(repulsion), context)
        attraction = self.feed_forward_descent(self.project_directions(x, context), context)
        return x + gamma * self._direction("feed_forward", self.parallel.leave(attraction), context)

    def step_sizes(self, x: Tensor, context: Context) -> tuple[Tensor | float, Tensor | float]:
        """Return (alpha_t, gamma_t), the step sizes of both energies.

        Learned step sizes are tensors [s, b, D] for the slice x, fixed step sizes are numbers.
        """
        switches = self.shape.switches
        if switches.step_size == "fixed":
            return switches.alpha, switches.gamma
        seen = (
            x if switches.step_condition == "current" or context.iteration == 0 else context.origin
        )
        if seen is None:
            raise ValueError(
                "HyperSet: step_condition origin needs context.origin, the block's input, after "
                "the first iteration"
            )
        alpha, gamma = self.step(seen, context.iteration)
        return alpha, gamma

    def project_heads(self, x: Tensor, context: Context) -> Tensor:
        """Project the slice x to this rank's z [s, b, local heads, p], each on its sphere."""
        z = self._project(x, "subspaces", context).unflatten(
            -1, (self.local_heads, self.shape.head)
        )
        return rms_norm(z, self.parallel.share(self.subspaces_norm()), self.shape.norm_eps)

    def attention_gradient(self, z: Tensor, context: Context) -> Tensor:
        """Return this rank's summand of sum_h W_h dE/dz_h, [s, b, D], for z [s, b, local heads, p].

        Rotated z, or its sums, are stored in the state.
        """
        kind = self.shape.switches.attention
        z = self._turn(z, context, forth=True).permute(1, 2, 0, 3)
        if kind == "linear":

            def read_linear(valid: Tensor | None, z: Tensor) -> Tensor:
                now = None if valid is None else valid[:, -z.shape[2] :]
                first = squares_before(z, context.recall("sums"), context, torch.sigmoid)
                o, sums = symmetric_linear_attention(
                    z, causal=context.causal, valid=now, state=first
                )
                context.keep("sums", sums)
                return o

            o = context.per_document(read_linear, z, passes=context.causal)
        else:
            read = partial(symmetric_attention, kind=kind, causal=context.causal)
            keys = context.extend("z", z, dim=2)
            # Without a past, queries and keys are one tensor, which saves memory.
            one = keys is z and not (context.split and context.split.gathers)
            given = (z,) if one else (z, keys)
            o = context.per_document(
                lambda valid, z, keys=None: read(z, keys, valid=valid),
                *given,
                keys=() if one else (1,),
            )
        o = self._turn(o.permute(2, 0, 1, 3), context, forth=False)
        return self._project_back(o.flatten(2), "subspaces", context)

    def project_directions(self, x: Tensor, context: Context) -> Tensor:
        """Return this rank's part of u = RMSNorm(D^T x), [s, b, M / size].

        The mean square covers all M.
        """
        u, weight = self._project(x, "directions", context), self.directions_norm()
        if self.parallel.size == 1:
            return rms_norm(u, weight, self.shape.norm_eps)
        # No wide copy of u is kept for the backward pass.
        wide = torch.promote_types(u.dtype, torch.float32)
        norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True, dtype=wide)
        mean = self.parallel.total(norm.square()) / self.shape.inner
        unit = (u * torch.rsqrt(mean + self.shape.norm_eps)).to(u.dtype)
        return unit * weight.to(u.dtype)

    def feed_forward_descent(self, u: Tensor, context: Context) -> Tensor:
        """Return this rank's summand of -D dE/du, [s, b, D], for u [s, b, M / size] (table 19)."""
        kind = self.shape.switches.feed_forward
        if kind == "relu":  # exact in every type
            return self._project_back(u.relu(), "directions", context)
        wide = u.to(torch.promote_types(u.dtype, torch.float32))
        if kind == "softmax":
            pull = (wide - self._log_sum_exp(wide)).exp()
        else:
            phi = wide.sigmoid()
            pull = self.parallel.total(phi.sum(-1, keepdim=True)) * phi * (-wide).sigmoid()
        return self._project_back(pull.to(u.dtype), "directions", context)

    @torch.no_grad()
    def diagnose(self, x: Tensor, context: Context, tokens: Tensor) -> dict[str, Tensor]:
        """Return diagnostics of the slice x before this iteration.

        tokens: [n >= 2], sampled positions.

        attention_energy and feed_forward_energy, [n, b]: of each sampled token among all tokens.
            Summed over all tokens they are E_attn and E_ff; if causal, a token's energy is among
            the tokens that it sees.
        effective_rank and mean_angle (radians), [b, local heads]: of z of the sampled tokens.
        largest_score, [local heads]: only if the read has scores.

        The context must not contain a state.
        """
        z = self.project_heads(x, context)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        turned = self._turn(z, context, forth=True).permute(1, 2, 0, 3)
        seen = allowed_pairs(tokens, len(z), context.causal, context.valid)
        kind, share = self.shape.switches.attention, 1.0 if context.causal else 0.5
        energy = pair_energy(turned[:, :, tokens], turned, seen, kind=kind, share=share)
        if self.shape.rope is not None:
            energy = energy / self.shape.rope.factor**2
        sample, largest = z[tokens].permute(1, 2, 0, 3), {}
        if kind != "linear":
            scores = turned[:, :, tokens] @ turned.mT * self.shape.head**-0.5
            largest["largest_score"] = (
                scores if seen is None else scores.masked_fill(~seen, -torch.inf)
            ).amax((0, 2, 3))
        u = self.parallel.gather(self.project_directions(x, context)[tokens])
        return {
            "attention_energy": self.parallel.total(energy.sum(1)).T,
            "feed_forward_energy": feed_forward_energy(u, kind=self.shape.switches.feed_forward),
            "effective_rank": effective_rank(sample),
            "mean_angle": mean_angle(sample),
            **largest,
        }

    def _log_sum_exp(self, u: Tensor) -> Tensor:
        """Return log sum_m exp(u_m) over all M directions, [s, b, 1]."""
        parts = self.parallel.gather(u.logsumexp(-1, keepdim=True))
        return self.parallel.share(parts.logsumexp(-1, keepdim=True))

    def _adapter(self, name: str, context: Context) -> tuple[Tensor, Tensor]:
        """Return the current iteration's low-rank factors A_t [rows / size, r] and B_t [r, D].

        Iterations beyond those in training use the last factors.
        """
        t = min(context.iteration, self.shape.iterations - 1)
        lora = self.get_submodule(f"{name}_lora")
        return lora("a")[t], self.parallel.share(lora("b")[t])

    def _project(self, x: Tensor, name: str, context: Context) -> Tensor:
        """Return (W + 4 A_t B_t) x of the full sequence: the slice x -> [s, b, rows / size]."""
        weight = self.get_submodule(name)()
        if not self.shape.switches.lora_rank:
            return self.parallel.project(x, weight)
        a, b = self._adapter(name, context)
        h = self.parallel.enter(x)
        return linear(h, weight) + LORA_SCALE * linear(linear(h, b), a)

    def _project_back(self, part: Tensor, name: str, context: Context) -> Tensor:
        """Return (W + 4 A_t B_t)^T part, this rank's summand of [s, b, D].

        part: [s, b, rows / size].
        """
        out: Tensor = part @ self.get_submodule(name)()
        if not self.shape.switches.lora_rank:
            return out
        a, b = self._adapter(name, context)
        return out + LORA_SCALE * ((part @ a) @ b)

    def _turn(self, z: Tensor, context: Context, *, forth: bool) -> Tensor:
        """Apply RoPE to z [s, b, heads, p], or its inverse."""
        rope = self.shape.rope
        if rope is None:
            return z
        return (rotate if forth else rotate_back)(z, context, rope)

    def _direction(self, name: str, gradient: Tensor, context: Context) -> Tensor:
        """Return the step direction for g, the gradient (or minus it) of the energy ``name``.

        Means run over the iterations.

            momentum   m <- beta1 m + g; result m
            rmsprop    v <- beta2 v + (1 - beta2) g^2; result g / sqrt(v + eps^2)
            adam       m <- beta1 m + (1 - beta1) g, v as in rmsprop, both divided by 1 - beta^t;
                       result m / sqrt(v + eps^2)
        """
        switches, memory = self.shape.switches, context.memory
        if switches.update == "gradient":
            return gradient
        if memory is None:
            if context.iteration:
                raise ValueError(
                    f"HyperSet: update {switches.update} needs context.memory, one dict for all "
                    "iterations of a forward pass"
                )
            memory = {}
        g = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        zero = torch.zeros_like(g)
        step = g
        if switches.update != "rmsprop":
            share = 1.0 - switches.beta1 if switches.update == "adam" else 1.0
            step = memory[f"{name}.mean"] = (
                switches.beta1 * memory.get(f"{name}.mean", zero) + share * g
            )
        if switches.update != "momentum":
            square = memory[f"{name}.square"] = (
                switches.beta2 * memory.get(f"{name}.square", zero)
                + (1.0 - switches.beta2) * g.square()
            )
            if switches.update == "adam":
                time = context.iteration + 1
                step = step / (1.0 - switches.beta1**time)
                square = square / (1.0 - switches.beta2**time)
            # eps^2 is inside the root; the released code adds eps outside, without a gradient at g
            # = 0.
            step = step / (square + SECOND_MOMENT_EPS**2).sqrt()
        return step.to(gradient.dtype)


class StepNet(Layer):
    """Network of the learned step sizes (alpha_t, gamma_t).

        (alpha_t, gamma_t) = out(gelu(norm(time_out(gelu(time_in(sinusoidal(t)))) + x)))

    ``out`` starts at zero, so the initial model is the identity. The paper's code also zeroes the
    two layers on t, whose weights then never receive a gradient; this class initialises them
    randomly. All weights are replicated and act on a rank's slice of the tokens.
    """

    def __init__(self, shape: HyperSetShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor, iteration: int) -> tuple[Tensor, Tensor]:
        """Return alpha and gamma [..., D].

        x: [..., D], x(0) or x(t). iteration: t - 1, from 0, without an upper limit.
        """
        switches = self.shape.switches
        embedding = sinusoidal(iteration + 1, self.shape.time_size, x)
        if switches.time_mlp:
            embedding = self.time_out(gelu(self.time_in(embedding)))
        h = x + embedding
        if switches.step_norm:
            h = rms_norm(h, self.norm(), self.shape.norm_eps)
        alpha, gamma = self.out(gelu(h)).chunk(2, dim=-1)
        return alpha, gamma


def sinusoidal(t: int, size: int, like: Tensor) -> Tensor:
    """Return [sin(t w_i), cos(t w_i)] with w_i = 10000^(-i / (size/2 - 1)), [size].

    size is even; the result has ``like``'s type and device.
    """
    half = size // 2
    wide = torch.promote_types(like.dtype, torch.float32)
    frequencies = torch.exp(
        torch.arange(half, dtype=wide, device=like.device) * (-math.log(10000.0) / max(1, half - 1))
    )
    angles = t * frequencies
    return torch.cat((angles.sin(), angles.cos())).to(like.dtype)
