"""Cross-entropy over the split vocabulary whose gradient is that of cross-entropy + w (log Z)^2 (z-loss; PaLM, arXiv 2204.02311, 5)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from torch import Tensor


class _WithZ(torch.autograd.Function):
    """Megatron's cross-entropy, of whose pieces it is made: the same losses to the bit, and as much memory kept.

    dL/dlogit = softmax (1 + 2 w log Z) - [the label's], times the loss's gradient: log Z's own is the softmax.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: float, group: Any) -> Tensor:
        logits, largest = VocabParallelCrossEntropy.calculate_logits_max(logits)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        first = group.rank() * logits.shape[-1]
        mask, place, predicted, total, exponentials = VocabParallelCrossEntropy.calculate_predicted_logits(
            logits, target, largest, first, first + logits.shape[-1]
        )
        for partial in (predicted, total):
            torch.distributed.all_reduce(partial, group=group)
        softmax, loss = VocabParallelCrossEntropy.calculate_cross_entropy_loss(exponentials, predicted, total)
        ctx.save_for_backward(softmax, mask, place, total.log() + largest)
        ctx.weight = weight
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, mask, place, log_z = ctx.saved_tensors
        softmax.mul_((1 + 2 * ctx.weight * log_z).unsqueeze(-1))
        pieces = VocabParallelCrossEntropy.prepare_gradient_calculation_operands(softmax, mask)
        rows, numbers, update, gradient = pieces
        return VocabParallelCrossEntropy.calculate_gradients(rows, numbers, place, update, gradient, grads[0]), None, None, None


def add_z_loss(chunk: GPTModel, weight: float) -> None:
    """Make the chunk's losses those of ``_WithZ``: what is told stays the cross-entropy, what is descended has the z-loss in it.

    In place of the fused cross-entropy of a GPU (``fusions``), which has no place for it.
    """
    group = chunk.pg_collection.tp

    def losses(labels: Tensor, logits: Tensor) -> Tensor:
        """labels [b, s], logits [s, b, V / TP] -> [b, s], float32."""
        found: Tensor = _WithZ.apply(logits, labels.transpose(0, 1).contiguous(), weight, group)
        return found.transpose(0, 1).contiguous()

    chunk.compute_language_model_loss = losses
