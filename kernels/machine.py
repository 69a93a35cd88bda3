"""What the kernels room may know of the machine: which device it would compute on, and that device's name. Nothing is chosen here."""

from __future__ import annotations

import torch

PAPER = torch.device("cuda", 127)
"""A GPU that no machine has. A trace of tensors without numbers says that they are there, to ask what would run on an H100."""


def device() -> torch.device:
    """The first GPU where torch sees one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def is_current(where: torch.device) -> bool:
    """Whether kernels that are launched now run on ``where``; always, for the CPU."""
    return where.type != "cuda" or where == PAPER or where.index in (None, torch.cuda.current_device())


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
