"""What operations demand of their arguments. Each fault is a ValueError of one line that begins with the operation's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16)


def check_first(op: str, name: str, x: Tensor, layout: str = "[batch, heads, tokens, width]") -> None:
    """Raises ValueError unless x, beside which the others are checked, is not empty and of a type that operations take.

    layout: its dimensions; "[t, ...]" and the like: any number of them.
    """
    if (x.dim() != 4 and "..." not in layout) or x.dim() == 0 or x.numel() == 0:
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}, expected {layout}, not empty")
    if x.dtype not in FLOATS:
        raise ValueError(f"{op}: {name} is {x.dtype}; use float64, float32 or bfloat16")


def check_others(op: str, first: str, x: Tensor, others: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ValueError for an argument that does not fit ``x``, the argument called ``first``.

    others: name -> (tensor or None, its shape or a list of shapes, its types). Without types any type on any device will do, else the
    device is x's.
    """
    for name, (tensor, allowed, *types) in others.items():
        if tensor is None:
            continue
        shapes = allowed if isinstance(allowed, list) else [allowed]
        if tensor.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}, expected {wanted} beside {first} {list(x.shape)}")
        if types and (tensor.dtype not in types or tensor.device != x.device):
            wanted = " or ".join(str(kind) for kind in dict.fromkeys(types))
            raise ValueError(f"{op}: {name} is {tensor.dtype} on {tensor.device}, expected {wanted} on {x.device} beside {first} {x.dtype}")


def check_read(op: str, beta: Tensor | None, lam: Tensor | None, state: Tensor | None = None, causal: bool = True) -> None:
    """Raises ValueError for lam without beta, and for a state where all tokens read all."""
    if lam is not None and beta is None:
        raise ValueError(f"{op}: lam mixes mu with the free energy, so it needs beta; leave out lam for o = mu")
    if state is not None and not causal:
        raise ValueError(f"{op}: a state stands for the past, so it needs causal=True")
