"""Triton's JIT without a GPU: it compiles what a launch would ask for, with the same specialisation, options and cache key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

POINTERS = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float16: "*fp16", torch.float64: "*fp64", torch.bool: "*u1",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
"""The dtype of a tensor -> the JIT's type of a pointer to it."""
_DTYPES = {name: dtype for dtype, name in POINTERS.items()}
_INTEGERS = {
    "u1": (False, True),
    "i32": (16, 17),
    "i64": (2**40, 2**40 + 1),
}  # a multiple of 16, another


@dataclass(frozen=True)
class Pointer:
    """What the JIT reads of a tensor: dtype and address, in bytes."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class Driver:
    """In place of Triton's CUDA driver: compiles for sm_<arch>, launches nothing."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        """The compiler's target."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """The JIT keeps what belongs to a target by device, so each architecture is a device."""
        return self.arch

    def get_current_stream(self, device: int) -> int:
        """Asked for before every launch."""
        return 0


def argument(kind: str, aligned: bool) -> Any:
    """A value that the JIT specialises to the type ``kind``; aligned: as a multiple of 16."""
    if kind in _DTYPES:
        return Pointer(_DTYPES[kind], 0 if aligned else 1)
    return _INTEGERS[kind][not aligned] if kind in _INTEGERS else 0.5


def compiled(kernel: Any, given: Mapping[str, Any], arch: int) -> Any:
    """The ``CompiledKernel`` of a launch with these arguments and options, by name; from Triton's cache where it has it.

    Leaves `Driver` in place of the process's own. Raises whatever Triton's passes raise.
    """
    from triton.runtime import driver

    driver.set_active(Driver(arch))
    try:
        return kernel.run(grid=(1,), warmup=True, **given)
    finally:
        kernel.device_caches.clear()  # a process compiles hundreds and needs each once
