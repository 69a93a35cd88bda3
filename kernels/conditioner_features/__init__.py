"""Public names of `kernels.conditioner_features.op`."""

from kernels.conditioner_features.op import OP, conditioner_features

__all__ = ["OP", "conditioner_features"]
