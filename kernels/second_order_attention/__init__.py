"""Public names of `kernels.second_order_attention.op`."""

from kernels.second_order_attention.op import OP, second_order_attention

__all__ = ["OP", "second_order_attention"]
