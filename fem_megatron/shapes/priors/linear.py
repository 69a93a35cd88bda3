"""Sizes of linear attention's prior, and of gated linear attention's (GLA). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from fem_megatron.shapes.priors.scan import ScanShape

DECAYS = ("head", "channel")


@dataclass(frozen=True)
class LinearShape(ScanShape):
    """p_t(i) ~ phi(q_t) . phi(k_i), phi(x) = relu(x) + eps, after RoPE where ``rope``; with ``decays``, gated linear attention."""

    rope: bool
    eps: float

    @classmethod
    def linear(cls, qk_head: int, *, rope: bool, eps: float = 1e-6, causal: bool = True) -> LinearShape:
        """Without decay."""
        return cls(qk_head, 0, causal, rope, _positive(eps))

    @classmethod
    def gla(cls, qk_head: int, *, decay: str = "head", rope: bool, eps: float = 1e-6, causal: bool = True) -> LinearShape:
        """With a log-decay -(relu(a) + eps) for each head, or (``decay`` channel) for each channel of q and k: D^2 parameters more.

        Raises ValueError for another ``decay``.
        """
        if decay not in DECAYS:
            raise ValueError(f"model.fem.gla_decay={decay!r} is not one of {', '.join(DECAYS)}")
        return cls(qk_head, 1 if decay == "head" else qk_head, causal, rope, _positive(eps))

    def slices(self) -> dict[str, int]:
        return {"q": self.features, "k": self.features} | ({"decay": self.decays} if self.decays else {})

    def reads(self) -> set[str]:
        return {"fem.feature_eps"} | ({"fem.gla_decay"} if self.decays else set())

    def rotary_size(self) -> int:
        return self.features if self.rope else 0


def _positive(eps: float) -> float:
    if eps <= 0:
        raise ValueError(f"model.fem.feature_eps={eps:g} is not above 0: a token must weigh something")
    return eps
