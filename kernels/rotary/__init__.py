"""Public names of `kernels.rotary.op`."""

from kernels.rotary.op import OP, rotary, turned

__all__ = ["OP", "rotary", "turned"]
