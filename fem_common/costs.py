"""Vocabulary for the cost of a run.

Plans, rehearsals and models of a step describe cost in these types. docs/costs.md defines every
quantity and names the tool that computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a rank's device memory by content.

    weights: parameters in the training precision.
    gradients: accumulated gradients.
    optimizer: main weights and moments.
    activations: tensors that the forward pass keeps for the backward pass.
    workspace: all other tensors, which live within one pass or within the update.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """Sum over all contents."""
        return sum(self.by_content().values())

    def by_content(self) -> dict[str, int]:
        """Return the bytes of each content; the keys are CONTENTS."""
        return {name: getattr(self, name) for name in CONTENTS}


CONTENTS = tuple(field.name for field in fields(Memory))
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, WORKSPACE = CONTENTS


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step by category.

    The categories depend on the performance model of the step; docs/costs.md compares them.
    """

    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of the complete step."""
        return sum(self.seconds.values())


def bytes_sent(kind: str, size: float, ranks: int) -> float:
    """Return the bytes that one of ``ranks`` ranks sends in a ring collective, or in a send.

    kind: "send", "receive", "all-reduce", or another collective, in which every part of the tensor
        passes once.
    size: bytes of the complete tensor on one rank; for "send" those of the message.
    """
    if kind == "send":
        return size
    if kind == "receive":
        return 0.0
    passes = 2 if kind == "all-reduce" else 1
    return passes * (ranks - 1) / ranks * size
