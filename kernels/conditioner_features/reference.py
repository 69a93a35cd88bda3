"""The conditioner's features in plain PyTorch, any device, with PyTorch's gradients: the definition."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import layer_norm, softplus


def features(logits: Tensor, state: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Arguments as in `conditioner_features`, which has checked them."""
    size = state.shape[-1]
    r = softplus(logits.to(state.dtype))
    r = r * (size**0.5 / r.norm(dim=-1, keepdim=True).clamp_min(eps))
    return (r * layer_norm(state, (size,), weight.to(state.dtype), None, eps)).to(logits.dtype)
