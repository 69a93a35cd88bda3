"""Public names of `kernels.gated_delta_rule.op`."""

from kernels.gated_delta_rule.op import OP, gated_delta_rule

__all__ = ["OP", "gated_delta_rule"]
