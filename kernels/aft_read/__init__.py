"""Public names of `kernels.aft_read.op`."""

from kernels.aft_read.op import OP, aft_read

__all__ = ["OP", "aft_read"]
