"""Public names of CEM's attention (`op`, `reference`)."""

from kernels.cem_attention.op import OP, cem_attention
from kernels.cem_attention.reference import Diagonal

__all__ = ["OP", "Diagonal", "cem_attention"]
