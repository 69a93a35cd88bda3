"""Public names of `kernels.time_decay_scan.op`."""

from kernels.time_decay_scan.op import OP, time_decay_scan

__all__ = ["OP", "time_decay_scan"]
