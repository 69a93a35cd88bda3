"""Training engines: each owns the gradients, the optimizer and the parallel schedule of a run."""

from pretrain.engines.engine import (
    AroundUpdate,
    Engine,
    ExtraNumbers,
    StepResult,
    StepTimes,
    Unwanted,
    unobserved,
)

__all__ = [
    "AroundUpdate",
    "Engine",
    "ExtraNumbers",
    "StepResult",
    "StepTimes",
    "Unwanted",
    "unobserved",
]
