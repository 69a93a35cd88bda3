"""Tables of the peak performance and the memory of devices, indexed by parts of their names.

The module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

# Dense bf16 tensor-core peaks in TFLOP/s, from NVIDIA's product data sheets (H100, H200, A100,
# L40S, DGX B200). Most data sheets give figures with 2:4 sparsity, which are halved in this table.
# A device matches the longest key that its name contains.
DEVICE_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "A100": 312.0,
    "L40S": 362.0,
}

# GiB that torch reports (total_memory), rounded down. An A100 without a size in its name counts as
# the larger one.
DEVICE_MEMORY_GIB = {
    "B200": 178,
    "H200": 139,
    "H100": 79,
    "A100": 79,
    "A100-SXM4-40GB": 39,
    "A100-PCIE-40GB": 39,
    "L40S": 44,
}

T = TypeVar("T")


def peak_tflops(device: str) -> float | None:
    """Return the dense bf16 peak of a device in TFLOP/s, or None if it is not listed.

    device: full name; ``NVIDIA H100 80GB HBM3`` matches the entry ``H100``.
    """
    return _of_device(DEVICE_PEAK_TFLOPS, device)


def memory_gib(device: str) -> int | None:
    """Return the memory of a device in GiB by its name, or None if it is not listed."""
    return _of_device(DEVICE_MEMORY_GIB, device)


def _of_device(table: Mapping[str, T], device: str) -> T | None:
    found = [key for key in table if key.lower() in device.lower()]
    return table[max(found, key=len)] if found else None
