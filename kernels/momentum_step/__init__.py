"""Public names of `kernels.momentum_step.op`."""

from kernels.momentum_step.op import OP, momentum_step

__all__ = ["OP", "momentum_step"]
