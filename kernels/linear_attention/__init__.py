"""Public names of `kernels.linear_attention.op`."""

from kernels.linear_attention.op import OP, end_state, linear_attention, log_weights

__all__ = ["OP", "end_state", "linear_attention", "log_weights"]
