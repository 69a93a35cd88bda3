"""Public names of `kernels.fem_projection.op`."""

from kernels.fem_projection.op import OP, fem_projection, split_heads

__all__ = ["OP", "fem_projection", "split_heads"]
