"""Public names of `kernels.gated_silu.op`."""

from kernels.gated_silu.op import OP, gated_silu

__all__ = ["OP", "gated_silu"]
