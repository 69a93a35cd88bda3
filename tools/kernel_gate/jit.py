"""Compilation by Triton's JIT without a GPU.

The kernel of a launch is compiled with the same specialisation, options and cache key as on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

POINTERS = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.bool: "*u1",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
"""Dtype of a tensor -> the JIT's type of a pointer to it."""
_DTYPES = {name: dtype for dtype, name in POINTERS.items()}
# A multiple of 16, and an integer that is not.
_INTEGERS = {"u1": (False, True), "i32": (16, 17), "i64": (2**40, 2**40 + 1)}


@dataclass(frozen=True)
class Pointer:
    """Replacement of a tensor that has what the JIT reads: dtype and address in bytes."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


class Driver:
    """Replacement of Triton's CUDA driver that compiles for sm_<arch> and launches no kernel."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        """Return the target of the compilation: sm_<arch>."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """Return the architecture as the number of the device.

        The JIT stores the data of a target by device, so each architecture needs a different
        device.
        """
        return self.arch

    def get_current_stream(self, device: int) -> int:
        """Return 0; the JIT requests a stream before every launch."""
        return 0


def argument(kind: str, aligned: bool) -> Any:
    """Return a value for which the JIT selects the type ``kind``.

    aligned: the value is a multiple of 16.
    """
    if kind in _DTYPES:
        return Pointer(_DTYPES[kind], 0 if aligned else 1)
    return _INTEGERS[kind][not aligned] if kind in _INTEGERS else 0.5


def compiled(kernel: Any, given: Mapping[str, Any], arch: int) -> Any:
    """Return the ``CompiledKernel`` of a launch, from Triton's cache if it is cached.

    given: arguments and options of the launch (name -> value).

    The process's active driver is `Driver` afterwards. Raises whatever Triton's passes raise.
    """
    from triton.runtime import driver

    driver.set_active(Driver(arch))
    try:
        return kernel.run(grid=(1,), warmup=True, **given)
    finally:
        kernel.device_caches.clear()  # a process compiles hundreds of kernels, each once
