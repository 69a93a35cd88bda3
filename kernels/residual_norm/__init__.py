"""Public names of `kernels.residual_norm.op`."""

from kernels.residual_norm.op import OP, residual_norm

__all__ = ["OP", "residual_norm"]
