"""Public names of `kernels.fem_attention.op`."""

from kernels.fem_attention.op import OP, fem_attention

__all__ = ["OP", "fem_attention"]
