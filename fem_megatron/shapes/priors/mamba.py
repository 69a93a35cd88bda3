"""Sizes of the selective state-space prior (Mamba). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from fem_megatron.shapes.base import Weight, Weights
from fem_megatron.shapes.priors.base import PriorShape


@dataclass(frozen=True)
class MambaShape(PriorShape):
    """p_t(i) ~ sum_n C_t[n] exp(-rate[n] (delta_{i+1} + ... + delta_t)) delta_i B_i[n], a distribution for each value channel.

    A head owns a step delta for each of its ``value`` channels and B, C of ``states`` numbers. normalise: divide by the sum over i (off:
    the paper's ablation). squash: the values go through a sigmoid first. scans: 2 where the mixer is bidirectional.
    """

    value: int
    states: int
    normalise: bool
    squash: bool
    scans: int = 1

    @classmethod
    def of(
        cls, qk_head: int, value_head: int, states: int | None, *, normalise: bool, free_energy: bool, causal: bool = True
    ) -> MambaShape:
        """As many states as the budget of q and k has room for beside delta, unless ``states`` says how many: d_v + 2 N = 2 d_k.

        Values are squashed where there is a free energy. Raises ValueError for less than one state.
        """
        if states is None:
            states = max(1, (2 * qk_head - value_head) // 2)
        if states < 1:
            raise ValueError(f"model.fem.mamba_states={states} is below 1")
        return cls(value_head, states, normalise, squash=free_energy, scans=1 if causal else 2)

    def slices(self) -> dict[str, int]:
        """The step of each value channel, B and C."""
        return {"delta": self.value, "b": self.states, "c": self.states}

    def reads(self) -> set[str]:
        return {"fem.mamba_states", "fem.mamba_normalise"}

    def flops(self, length: int, streams: int, *, whole_square: bool) -> float:
        """The products of C with the states of every stream."""
        return 2.0 * self.scans * self.states * (streams + self.value * self.normalise)

    def state_bytes(self, length: int, element: int, *, value: int, free_energy: bool) -> int:
        """``states`` sums for each channel and stream, fp32, and a maximum where there is a free energy."""
        streams = 1 + self.normalise + free_energy
        return value * (streams * self.states + free_energy) * max(4, element)

    def weights(self, heads: int) -> Weights:
        """delta_bias, head-major [heads * value]; rate, [heads * value * states]: both start at 0, added to constants."""
        channels = heads * self.value
        return {"delta_bias": Weight((channels,), split=0, init=0.0), "rate": Weight((channels * self.states,), split=0, init=0.0)}
