"""Norms that know sequence parallelism; no mixer mathematics here."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension; Megatron-core's norm interface.

    Under sequence parallelism each rank sees a slice of the tokens, so the weight is marked for Megatron's gradient all-reduce over the
    tensor-parallel group (``finalize_model_grads``). Megatron's own ``WrappedTorchNorm`` refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> same shape and dtype."""
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
