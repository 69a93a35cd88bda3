"""Properties of the machine: the device to compute on, its name and its architecture.

Other modules select kernels from them; this module selects none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

FAKE_GPU = torch.device("cuda", 127)
"""Device that represents an assumed H100. A trace with fake tensors uses it to select the kernels
that would run on an H100.
"""


def device() -> torch.device:
    """Return the first GPU if torch finds one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def is_current(where: torch.device) -> bool:
    """Return True if kernels that are launched now run on ``where``; always True for the CPU."""
    if where.type != "cuda" or where == FAKE_GPU:
        return True
    return where.index in (None, torch.cuda.current_device())


def name(where: torch.device) -> str:
    """Return the device's name in the vendor's spelling, such as "NVIDIA H100 80GB HBM3"; "cpu" for
    the CPU.
    """
    if where == FAKE_GPU:
        return "NVIDIA H100 80GB HBM3"
    return torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"


def architecture(where: torch.device) -> int:
    """Return the GPU's architecture as a number, 90 for sm_90; 0 for the CPU."""
    if where.type != "cuda":
        return 0
    if where == FAKE_GPU:
        return 90
    major, minor = torch.cuda.get_device_capability(where)
    return 10 * major + minor


def capturing() -> bool:
    """Return True if launches are now recorded in a CUDA graph instead of run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def cudnn_attention() -> bool:
    """Return True if torch may use cuDNN for attention.

    While torch.compile traces, the setting cannot be read and the result is True.
    """
    return torch.compiler.is_compiling() or torch.backends.cuda.cudnn_sdp_enabled()


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN for attention in this context.

    cuDNN compiles a plan for every new shape, which takes about half a second in each direction.
    The setting applies to the process, like torch's own.
    """
    before = cudnn_attention()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class LateNumbers:
    """Asynchronous copy of ``count`` numbers from a device to the host.

    `send` starts a copy; `so_far` reads the latest values that have arrived without waiting.
    """

    def __init__(self, where: torch.device, count: int = 1) -> None:
        on_gpu = where.type == "cuda"
        with torch.inference_mode(False):
            self._host_copy = torch.zeros(count, device="cpu", pin_memory=on_gpu)
        self._memory = self._host_copy.numpy()  # reading it is not an operation on a tensor
        self._arrived = torch.cuda.Event() if on_gpu and where != FAKE_GPU else None

    def send(self, numbers: Tensor) -> None:
        """Start to copy the numbers to the host, without waiting for the copy."""
        self._host_copy.copy_(numbers, non_blocking=True)
        if self._arrived is not None and not capturing():
            self._arrived.record()

    def so_far(self) -> list[float]:
        """Return the numbers on the host without waiting; they may be from an earlier `send`, or 0
        at first.
        """
        return [float(number) for number in self._memory]

    def last(self) -> list[float]:
        """Wait for the latest `send` and return its numbers."""
        if self._arrived is not None and not capturing():
            self._arrived.synchronize()
        return self.so_far()
