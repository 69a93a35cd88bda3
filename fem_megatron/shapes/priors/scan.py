"""What the priors that one scan of linear attention computes have in common: its cost and its state. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from fem_megatron.shapes.base import keys_seen
from fem_megatron.shapes.priors.base import PriorShape

CHUNK, CHUNK_PER_CHANNEL = 64, 16
"""Tokens whose pairs `kernels.linear_attention` makes at once, with one decay for a head (or none), or one for each channel."""


@dataclass(frozen=True)
class ScanShape(PriorShape):
    """p_t(i) ~ q_t . k_i, decayed: ``features`` channels of q and k, ``decays`` log-decays a head (0: none)."""

    features: int
    decays: int
    causal: bool

    def flops(self, length: int, streams: int, *, whole_square: bool) -> float:
        """Pairs within chunks, sums at their ends and reads of these; of the streams and of the ones that normalise."""
        if not self.causal and not self.decays:
            return 4.0 * self.features * (streams + 1)
        if self.causal:
            return self._scan(length, streams, 1, whole_square)
        return 2 * (self._scan(length, streams, 0, whole_square) + self._scan(length, 1, 0, whole_square))

    def _scan(self, length: int, streams: int, ones: int, whole_square: bool) -> float:
        per_channel = self.decays > 1
        chunk = min(length, CHUNK_PER_CHANNEL if per_channel else CHUNK)
        filled_up = -(-length // chunk) * chunk / length
        inside = 2.0 * keys_seen(chunk, whole_square) * (streams + (0 if per_channel else self.features))
        return filled_up * (inside + 4.0 * self.features * (streams + ones))

    def state_bytes(self, length: int, element: int, *, value: int, free_energy: bool) -> int:
        """The sums over v, U and ones, and the least and the greatest value seen: of any length."""
        streams = value * (2 if free_energy else 1)
        return (self.features * (streams + 1) + (2 * value if free_energy else 0)) * max(4, element)
