"""Sizes of the prior of decay alone (LRNN-decay). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from fem_megatron.shapes.priors.scan import ScanShape


@dataclass(frozen=True)
class DecayShape(ScanShape):
    """p_t(i) ~ exp(-sum over (i, t] of softplus(a)): a decay for each head, no queries and no keys."""

    @classmethod
    def of(cls, *, causal: bool = True) -> DecayShape:
        """One feature, a constant, and one decay."""
        return cls(1, 1, causal)

    def slices(self) -> dict[str, int]:
        return {"decay": 1}
