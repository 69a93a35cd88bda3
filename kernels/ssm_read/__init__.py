"""Public names of `kernels.ssm_read.op`."""

from kernels.ssm_read.op import OP, ssm_read

__all__ = ["OP", "ssm_read"]
