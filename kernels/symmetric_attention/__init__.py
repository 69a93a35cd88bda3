"""Public names of `kernels.symmetric_attention.op`."""

from kernels.symmetric_attention.op import OP, symmetric_attention, symmetric_linear_attention

__all__ = ["OP", "symmetric_attention", "symmetric_linear_attention"]
