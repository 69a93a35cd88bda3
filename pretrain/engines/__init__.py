"""Engines: the owners of gradients, optimizer and parallel schedule."""

from pretrain.engines.engine import (
    AroundUpdate,
    Beside,
    Engine,
    StepResult,
    StepTimes,
    Unwanted,
    unobserved,
)

__all__ = ["AroundUpdate", "Beside", "Engine", "StepResult", "StepTimes", "Unwanted", "unobserved"]
