"""What the kernels room may know of the machine: the device it would compute on, its name, its numbers. Nothing is chosen here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

PAPER = torch.device("cuda", 127)
"""A GPU that no machine has. A trace of tensors without numbers says that they are there, to ask what would run on an H100."""


def device() -> torch.device:
    """The first GPU where torch sees one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def is_current(where: torch.device) -> bool:
    """Whether kernels that are launched now run on ``where``; always, for the CPU."""
    return (
        where.type != "cuda" or where == PAPER or where.index in (None, torch.cuda.current_device())
    )


def name(where: torch.device) -> str:
    """The device's name as its maker writes it, as "NVIDIA H100 80GB HBM3"; "cpu" for the CPU."""
    if where == PAPER:
        return "NVIDIA H100 80GB HBM3"
    return torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"


def architecture(where: torch.device) -> int:
    """90 for sm_90 and so on; 0 for the CPU."""
    if where.type != "cuda":
        return 0
    if where == PAPER:
        return 90
    major, minor = torch.cuda.get_device_capability(where)
    return 10 * major + minor


def capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph instead of running."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def cudnn_attention() -> bool:
    """Whether attention may run on cuDNN; while torch.compile traces, which cannot ask, True."""
    return torch.compiler.is_compiling() or torch.backends.cuda.cudnn_sdp_enabled()


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Attention inside does not run on cuDNN, which compiles a plan for every new shape, about half a second each way.

    Process-wide, as torch's own switch is.
    """
    before = cudnn_attention()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class LateNumbers:
    """``count`` numbers of a device that the host gets without waiting for them."""

    def __init__(self, where: torch.device, count: int = 1) -> None:
        on_gpu = where.type == "cuda"
        with torch.inference_mode(False):
            self._told = torch.zeros(count, device="cpu", pin_memory=on_gpu)
        self._memory = self._told.numpy()  # to read it is no operation on a tensor
        self._arrived = torch.cuda.Event() if on_gpu and where != PAPER else None

    def send(self, numbers: Tensor) -> None:
        """Begins to copy them."""
        self._told.copy_(numbers, non_blocking=True)
        if self._arrived is not None and not capturing():
            self._arrived.record()

    def so_far(self) -> list[float]:
        """The numbers that have arrived, which may be older ones; 0 at first."""
        return [float(number) for number in self._memory]

    def last(self) -> list[float]:
        """The numbers that were sent last; waits until they have arrived."""
        if self._arrived is not None and not capturing():
            self._arrived.synchronize()
        return self.so_far()
