"""The Free Energy Mixer over any prior.

The read's numerics are in ``kernels``, the priors in ``priors``. The letters C, L, T and G name the
mixer's four switches: conditioner, free-energy branch, temperature and gate (`shape.FemConfig`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fem_megatron.context_parallel.scans import fading_sum
from fem_megatron.mixers.fem.priors import Prior, Values
from fem_megatron.mixers.fem.shape import FemShape
from fem_megatron.parallel import Parallel
from fem_megatron.shape import located
from fem_megatron.state import Context
from fem_megatron.update import Layer, Update, head_norms, layer_norm, rotate_both, rotations
from kernels.conditioner_features import conditioner_features
from kernels.fem_projection import fem_projection
from kernels.residual_norm import residual_norm

BETA_OFFSET = 1.8


class FemMixer(Update):
    """Layer of the Free Energy Mixer: x + o W_O, o = g * ((1 - lambda) mu + lambda F).

    mu is the expectation of v under the prior p, F = 1/beta log E_p[exp(beta v)] the free energy.

    ``in_proj`` packs the heads one after another: the rows of the prior's slices, v, the
    lambda-logit and the g-logit. A rank's slice therefore consists of complete heads at any
    tensor-parallel size. Under sequence parallelism the sequence is gathered once for projection
    and conditioner, and again in the backward pass.
    """

    diagnostics = "fem_megatron.mixers.fem.diagnostics:observe"

    def __init__(self, shape: FemShape, parallel: Parallel) -> None:
        self.shape = shape
        super().__init__(shape, parallel)
        self.local_heads = shape.heads // parallel.size

    def build(self) -> None:
        self.prior: Prior = located(self.shape.prior.layer_class)(self.shape)
        for name in self.shape.conditioners():
            self.add_module(
                name,
                TimeDecayConditioner(
                    self.shape.norm_eps, self.parallel, backward=name == "tdc_backward"
                ),
            )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        # With several ranks, the conditioner normalises the gathered sequence.
        one = self.parallel.size == 1 and bool(self.shape.conditioner)
        x, h, u = residual_norm(
            x, self.norm(), self.shape.norm_eps, self.tdc.norm() if one else None
        )
        return x + self.step(h, context, u)

    def step(self, h: Tensor, context: Context, u: Tensor | None = None) -> Tensor:
        """Return o W_O of the normalised residual stream, sliced like the stream.

        u: the input of the causal conditioner, if already computed.
        """
        named: dict[str, TimeDecayConditioner] = {
            name: getattr(self, name) for name in self.shape.conditioners()
        }

        def projected(h: Tensor) -> list[Tensor]:
            return [each.project(h, u if name == "tdc" else None) for name, each in named.items()]

        inputs, z = (
            self.parallel.project_with(h, self.in_proj, projected)
            if named
            else ([], self.parallel.project(h, self.in_proj))
        )
        made = [
            each(own, context.within(name))
            for (name, each), own in zip(named.items(), inputs, strict=True)
        ]
        conditioners = [(features.to(z.dtype), weight.to(z.dtype)) for features, weight in made]
        size, normed = self.shape.rotary_size(), self.shape.prior.qk_norm
        rope = self.shape.rope if size else None
        turn = None if rope is None or normed else rotations(z, size, context, rope)
        parts = fem_projection(z, conditioners, turn, self.shape.slices, self.shape.norm_eps)
        # The norms are between the conditioner's scaling and RoPE, which `fem_projection` otherwise
        # fuses.
        if normed:
            q, k = head_norms(
                self.prior, self.parallel, parts["q"], parts["k"], self.shape.norm_eps
            )
            parts["q"], parts["k"] = (q, k) if rope is None else rotate_both(q, k, context, rope)
        v, lam, gate = (
            parts.pop(name).permute(1, 2, 0, 3) if name in parts else None
            for name in ("v", "lam", "gate")
        )
        assert v is not None
        o = self.prior(parts, Values(v, self.inverse_temperature(z), lam, gate), context)
        return self.parallel.leave(self.out_proj(o.permute(2, 0, 1, 3).flatten(2)))

    def inverse_temperature(self, like: Tensor) -> Tensor | None:
        """Return beta = softplus(b + 1.8), [local heads, d_v], fp32 or wider.

        Without fem.temperature, beta is all ones on ``like``'s device. Without fem.free_energy,
        return None.
        """
        if not self.shape.free_energy:
            return None
        size = (self.local_heads, self.shape.value_head)
        if not self.shape.temperature:
            return torch.ones(
                size, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device
            )
        return softplus(
            self.beta.to(torch.promote_types(self.beta.dtype, torch.float32)) + BETA_OFFSET
        ).view(size)


class TimeDecayConditioner(Layer):
    """Layer that scales every projection by 1 + phi, with phi = (r * LayerNorm(s)) W_out.

    The state is s_t = exp(-softplus(a_t)) s_{t-1} + f_t. Weights (``FemShape.weights``, ``tdc.*``):
    norm [D], in_proj [3 H_c, D] (rows a, f, r of each channel), state_norm [H_c], out_proj [packed,
    H_c]. H_c is the number of state channels.

    Tensor parallel: the H_c channels and their scans are split over the ranks; the norm over H_c
    reads all of them (a gather of 2 H_c numbers per token); W_out's rows are split like the mixer's
    packed projection.

    Padding does not change the state: its decay's logit is -inf, its input 0. On a GPU the scan and
    the operations up to W_out are one kernel each; phi is computed where it is used
    (`kernels.fem_projection`).

    backward: True if the scan runs from the end of the sequence.
    """

    def __init__(self, eps: float, parallel: Parallel, *, backward: bool = False) -> None:
        super().__init__()
        self.eps, self.parallel, self.backward = eps, parallel, backward

    def project(self, h: Tensor, u: Tensor | None = None) -> Tensor:
        """Project h to a, f, r of the rank's channels, [s, b, 3 H_c / tensor-parallel size].

        h: [s, b, D], the full sequence on every rank. u: the norm of h, if already computed.
        """
        made: Tensor = self.in_proj(
            layer_norm(h, self.parallel.share(self.norm()), self.eps) if u is None else u
        )
        return made

    def forward(self, projected: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return r * LayerNorm(s) [s, b, H_c] and W_out [packed / tensor-parallel size, H_c].

        projected: the result of ``project``.
        """
        a, f, r = projected.unflatten(-1, (-1, 3)).unbind(-1)
        first = context.recall("state")

        def scan(valid: Tensor | None, a: Tensor, f: Tensor) -> Tensor:
            if valid is not None:
                padding = ~valid.T[-a.shape[0] :, :, None]
                a, f = a.masked_fill(padding, -torch.inf), f.masked_fill(padding, 0.0)
            return fading_sum(
                a, f, None if self.backward else first, context, backward=self.backward
            )

        state = context.per_document(scan, a, f, passes=True, batch=1, time=0, heads=2)
        if not self.backward:
            context.keep("state", state[-1])
        if self.parallel.size > 1:
            both = self.parallel.gather(
                torch.stack((r.to(state.dtype), state), dim=-1).flatten(-2)
            ).unflatten(-1, (-1, 2))
            r, state = both[..., 0].to(r.dtype), both[..., 1]
        features = conditioner_features(r, state, self.state_norm(), self.eps)
        return self.parallel.share(features), self.out_proj()
