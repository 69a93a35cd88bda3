"""Second-order attention (MHA2nd1st, MHA2nd), and linear attention in the same energy frame.

    z = RMSNorm(x);  q = W_Q z;  k_i = W_K z_i
    x <- x + sum_h W_O,h (r + b)               second order; r + b: `second_order_attention`
    x <- x + sum_h W_O,h sum_i (q.k_i) k_i     linear

W_O replaces the paper's (eta / H) W_Q^T and is learned freely, including its sign: the step that
descends the free energy has W_O = -(eta / H) W_Q^T, linear attention's W_O = (eta T / H) W_Q^T.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fem_megatron.context_parallel.scans import squares_before
from fem_megatron.mixers.second_order.shape import EnergyLinearShape, SecondOrderShape
from fem_megatron.parallel import Parallel
from fem_megatron.state import Context
from fem_megatron.update import Update, normed, rms_norm, rotations
from kernels.arguments import without_autocast
from kernels.pairs import allowed_pairs
from kernels.rotary import rotary
from kernels.second_order_attention import second_order_attention
from kernels.second_order_attention.reference import energy_linear_attention, free_energy, rotated


class _EnergyHeads(Update):
    """Base of both layers: projections to q and k of this rank's heads, positions and W_O.

    ``in_proj`` packs the heads one after another (W_Q,h, then W_K,h), so that a rank's slice
    consists of complete heads.

    Positions, with ``model.rope`` (R_t is RoPE's rotation at position t): the energy of q_t with
    k_i is |R_t q_t - R_i k_i|^2 / 2 = |q_t - R_(i-t) k_i|^2 / 2. The step is computed in q_t's
    frame, where it depends only on differences of positions. Keys act as values, and a step in the
    rotated frame would rotate with t. R must therefore remain a rotation: yarn's factor m is
    applied to the temperatures, T / m^2 and T' / m^2, which has its effect on the scores of
    attention. Linear attention has no temperature and no factor. The paper adds absolute embeddings
    to its tokens; without ``model.rope`` only the causal mask gives an order.
    """

    def __init__(self, shape: SecondOrderShape | EnergyLinearShape, parallel: Parallel) -> None:
        self.shape = shape
        super().__init__(shape, parallel)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = normed(x, self.norm(), self.shape.norm_eps)
        return x + self.parallel.leave(self.step(h, context))

    def step(self, z: Tensor, context: Context) -> Tensor:
        """Return this rank's summand of the step, [s, b, D], for the normalised slice z."""
        raise NotImplementedError

    def project(self, z: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return q and k of the slice z, [b, local heads, s, d_h] each, and (cos | sin) of their
        positions, [1 or b, 1, s, d_h], float32 or wider; None without model.rope.

        k is rotated to its position.
        """
        q, k = (
            self.parallel.project(z, self.in_proj())
            .unflatten(-1, (-1, 2, self.shape.head))
            .unbind(3)
        )
        turn = None
        if self.shape.rope is not None:
            angles = rotations(k, self.shape.head, context, self.shape.rope)
            k = rotary(k, None, *angles)[0]
            turn = torch.cat(angles, dim=-1).permute(1, 2, 0, 3)
        return q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), turn

    def back(self, o: Tensor) -> Tensor:
        """Apply W_O: [b, local heads, s, d_h] -> this rank's summand of [s, b, D]."""
        out: Tensor = self.out_proj(o.permute(2, 0, 1, 3).flatten(2))
        return out


class SecondOrderAttention(_EnergyHeads):
    """Layer of second-order attention: MHA2nd1st, or MHA2nd if ``shape.exact`` is True.

    With one head these are the paper's Att2nd1st and Att2nd. The decoding state is only k (rotated
    to its position): half of standard attention's KV-cache. Tensor parallel: each rank has complete
    heads, so it computes G = W_Q W_Q^T and its Cholesky factor without communication.
    """

    diagnostics = "fem_megatron.mixers.second_order.diagnostics:observe"

    shape: SecondOrderShape

    def step(self, z: Tensor, context: Context) -> Tensor:
        """Return this rank's summand of the step (`_EnergyHeads.step`).

        Raises ValueError if MHA2nd receives more tokens than model.second_order.exact_max_length.
        """
        q, k, turn = self.project(z, context)
        longest, length = self.shape.max_length(), context.past + q.shape[2]
        if longest is not None and length > longest:
            raise ValueError(
                f"model.second_order.exact_max_length={longest}, but mha2nd was given {length} "
                "tokens; raise it, or use mixer mha2nd1st"
            )
        k = context.extend("k", k, dim=2)
        temperature, newton = self.temperatures()
        full = partial(
            second_order_attention, exact=self.shape.exact, jitter=self.shape.switches.jitter
        )

        def read(
            valid: Tensor | None, q: Tensor, k: Tensor, turn: Tensor | None, *each: Tensor
        ) -> Tensor:
            return full(q, k, *each, causal=context.causal, valid=valid, turn=turn)

        return self.back(
            context.per_document(
                read,
                q,
                k,
                turn,
                each=(self.gram(q), temperature, newton),
                keys=(1,),
            )
        )

    def gram(self, q: Tensor) -> Tensor:
        """Return G = W_Q W_Q^T of this rank's heads, [local heads, d_h, d_h], float32 or wider.

        W_Q is rounded to the dtype in which q was computed.
        """
        weight = self.in_proj().to(q.dtype).unflatten(0, (-1, 2, self.shape.head))[:, 0]
        return _squared(weight.to(torch.promote_types(weight.dtype, torch.float32)))

    def temperatures(self) -> tuple[Tensor, Tensor]:
        """Return T and T' of this rank's heads divided by the shape's sharpness, float32 or wider.

        A raw temperature that is not positive gives NaN, so that training's check for finite values
        stops it.
        """
        found = []
        for learned in (self.temperature, self.newton_temperature):
            wide = learned.to(torch.promote_types(learned.dtype, torch.float32))
            warm = (
                wide.exp()
                if self.shape.switches.temperature == "log"
                else torch.where(wide > 0, wide, torch.nan)
            )
            found.append(warm if self.shape.sharpness == 1.0 else warm / self.shape.sharpness)
        return found[0], found[1]

    @torch.no_grad()
    def diagnose(self, x: Tensor, context: Context, tokens: Tensor) -> dict[str, Tensor]:
        """Return the free energy before and after the update, and the step size.

        tokens: [n], sampled positions.

        free_energy_before, free_energy_after: mean over all heads (theorem 2); after: the moved
            token's q among the keys that it saw.
        step_norm: Euclidean norm of the update of x.

        Each is [n, b]. The context must not contain a state; x is the layer's slice.
        """
        temperature, _ = self.temperatures()
        moved = self(x, context)
        before, after = (rms_norm(part, self.norm(), self.shape.norm_eps) for part in (x, moved))
        _, k, _ = self.project(before, context)
        seen = allowed_pairs(tokens, k.shape[2], context.causal, context.valid)
        energies = []
        for z in (before, after):
            q, _, turn = self.project(z, context)
            energy = free_energy(rotated(q, turn)[:, :, tokens], k, temperature, seen)
            energies.append(self.parallel.total(energy.sum(1)).T / self.shape.heads)
        return {
            "free_energy_before": energies[0],
            "free_energy_after": energies[1],
            "step_norm": self.parallel.enter(moved - x)[tokens].to(energies[0].dtype).norm(dim=-1),
        }


@without_autocast
def _squared(w: Tensor) -> Tensor:
    return w @ w.mT


class EnergyLinearAttention(_EnergyHeads):
    """Linear attention whose values are its keys.

    The paper's form (``linear_read: sum``) has no normaliser and no temperature, which W_O absorbs.
    The decoding state is a head's sum of k k^T, float32: O(1) in the length.
    """

    diagnostics = "fem_megatron.mixers.second_order.diagnostics:observe_linear"

    shape: EnergyLinearShape

    def step(self, z: Tensor, context: Context) -> Tensor:
        """Return this rank's summand of the step (`_EnergyHeads.step`)."""
        q, k, turn = self.project(z, context)
        wide = torch.promote_types(q.dtype, torch.float32)

        def read(valid: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
            now = None if valid is None else valid[:, -k.shape[2] :]
            first = squares_before(k, context.recall("sums"), context)
            o, sums = energy_linear_attention(q, k, causal=context.causal, valid=now, state=first)
            context.keep("sums", sums)
            mean = self.shape.switches.linear_read == "mean"
            return o / self.tokens_seen(valid, k, context)[:, None, :, None] if mean else o

        o = context.per_document(
            read, self.rotated(q.to(wide), turn), k.to(wide), passes=context.causal
        )
        return self.back(self.rotated(o, turn, back=True).to(k.dtype))

    def rotated(self, x: Tensor, turn: Tensor | None, *, back: bool = False) -> Tensor:
        """Rotate x [b, h, s, d] by the angles of ``turn`` (cos | sin), or by the opposite.

        With None, x is returned.
        """
        if turn is None:
            return x
        cos, sin = turn.permute(2, 0, 1, 3).chunk(2, dim=-1)
        return rotary(x.permute(2, 0, 1, 3), None, cos, -sin if back else sin)[0].permute(
            1, 2, 0, 3
        )

    def tokens_seen(self, valid: Tensor | None, k: Tensor, context: Context) -> Tensor:
        """Return the number of tokens, at least 1, that each of k [b, h, s, d] reads.

        The result is [1 or b, s], in k's type.

        valid: [b, past + s].
        """
        length = k.shape[2]
        if context.passing is not None and context.causal:
            assert context.positions is not None
            return (
                (context.positions + 1)
                .view(2, length)
                .repeat_interleave(k.shape[0] // 2, 0)
                .to(k.dtype)
            )
        if valid is None:
            valid = torch.ones(1, context.past + length, dtype=torch.bool, device=k.device)
        seen = (
            valid.cumsum(1)[:, -length:]
            if context.causal
            else valid.sum(1, keepdim=True).expand(-1, length)
        )
        return seen.clamp_min(1).to(k.dtype)
