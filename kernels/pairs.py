"""Which keys a token sees, for the operations that make their scores a block of rows at a time. No scores here."""

from __future__ import annotations

import torch
from torch import Tensor


def allowed_pairs(own: Tensor, tk: int, causal: bool, valid: Tensor | None) -> Tensor | None:
    """Which of tk keys the tokens at positions ``own`` [n] see: bool, [n, tk] or [b, 1, n, tk]; None: all.

    valid [b, tk] is False at padding, which sees itself alone and which nobody else sees.
    """
    if valid is None and not causal:
        return None
    key = torch.arange(tk, device=own.device)
    before = key <= own[:, None]
    if valid is None:
        return before
    both = valid[:, None, None, :] & valid[:, None, own, None]
    return (both & before if causal else both) | (key == own[:, None])
