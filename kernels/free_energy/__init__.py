"""Public names of `kernels.free_energy.op`."""

from kernels.free_energy.op import OP, ValueWindow, free_energy_read

__all__ = ["OP", "ValueWindow", "free_energy_read"]
