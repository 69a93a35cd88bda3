"""Losses beyond Megatron's: the z-loss, and a loss sum computed in chunks.

The z-loss is that of PaLM (arXiv 2204.02311, 5). The chunked sum never stores the logits
of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from torch import Tensor


class _WithZ(torch.autograd.Function):
    """Cross-entropy over the split vocabulary with the gradient of cross-entropy + w (log Z)^2.

    The loss is computed with Megatron's own functions, so its value is bitwise equal to Megatron's
    and uses the same memory. dL/dlogit = (softmax (1 + 2 w log Z) - onehot(label)) times the loss's
    gradient, because the gradient of log Z is the softmax.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: float, group: Any) -> Tensor:
        logits, largest = VocabParallelCrossEntropy.calculate_logits_max(logits)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        first = group.rank() * logits.shape[-1]
        mask, place, predicted, total, exponentials = (
            VocabParallelCrossEntropy.calculate_predicted_logits(
                logits, target, largest, first, first + logits.shape[-1]
            )
        )
        for partial in (predicted, total):
            torch.distributed.all_reduce(partial, group=group)
        softmax, loss = VocabParallelCrossEntropy.calculate_cross_entropy_loss(
            exponentials, predicted, total
        )
        ctx.save_for_backward(softmax, mask, place, total.log() + largest)
        ctx.weight = weight
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, mask, place, log_z = ctx.saved_tensors
        softmax.mul_((1 + 2 * ctx.weight * log_z).unsqueeze(-1))
        pieces = VocabParallelCrossEntropy.prepare_gradient_calculation_operands(softmax, mask)
        rows, numbers, update, gradient = pieces
        return (
            VocabParallelCrossEntropy.calculate_gradients(
                rows, numbers, place, update, gradient, grads[0]
            ),
            None,
            None,
            None,
        )


def add_z_loss(chunk: GPTModel, weight: float) -> None:
    """Make the chunk compute its losses with `_WithZ`: the gradient includes the z-loss.

    The reported value stays the cross-entropy. This replaces the fused cross-entropy of a GPU
    (``fusions``), which does not support the z-loss.

    weight: the factor w of (log Z)^2.
    """
    group = chunk.pg_collection.tp

    def losses(labels: Tensor, logits: Tensor) -> Tensor:
        """Return the losses [b, s], float32: labels [b, s], logits [s, b, V / TP]."""
        found: Tensor = _WithZ.apply(logits, labels.transpose(0, 1).contiguous(), weight, group)
        return found.transpose(0, 1).contiguous()

    chunk.compute_language_model_loss = losses


def masked_sum(losses: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over the counted tokens of losses [b, s]; a sum is returned unchanged.

    mask: [b, s], 1 where a token counts.
    """
    return (losses.float() * mask).sum() if losses.ndim else losses


Losses = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function that computes the losses [b, s], float32.

Arguments: hidden [s / SP, b, h], the output layer's weight [V / TP, h], labels [b, s].
"""


class _Summed(torch.autograd.Function):
    """The masked sum of the chunks' losses, with gradients computed in the forward pass.

    A chunk's logits are freed at once and never recomputed. The tensors kept for the backward pass
    have the sizes of the hidden states and the weight; the backward pass multiplies them by the
    sum's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        chunks: list[tuple[Tensor, Tensor]],
        size: int,
        losses: Losses,
        learns: bool,
    ) -> Tensor:
        leaf = weight.detach().requires_grad_(learns)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        if learns:
            of_hidden = torch.empty_like(hidden)
            # accumulate without rounding
            of_weight = torch.zeros_like(
                weight, dtype=torch.promote_types(weight.dtype, torch.float32)
            )
            ctx.save_for_backward(of_hidden, of_weight)
        for start, (labels, mask) in zip(range(0, len(hidden), size), chunks, strict=True):
            x = hidden[start : start + size].detach().requires_grad_(learns)
            with torch.set_grad_enabled(learns):
                found = losses(x, leaf, labels)
            total += (found.detach() * mask).sum()
            if learns:
                gradients = torch.autograd.grad(found, (x, leaf), mask)
                of_hidden[start : start + size] = gradients[0]
                of_weight += gradients[1]
                del gradients
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return (
            of_hidden.mul_(grads[0]),
            of_weight.mul_(grads[0]).to(of_hidden.dtype),
            None,
            None,
            None,
            None,
        )


def sum_in_chunks(chunk: GPTModel, tokens: int) -> None:
    """Make a chunk that receives the loss mask return the sum of its losses, computed in chunks.

    Call it after every other change to the logits. Calls without a mask are unchanged. Under
    sequence parallelism a chunk of tokens contains tokens of every rank's slice.

    tokens: largest number of tokens whose logits are stored at a time.
    """
    layer, logits, finish = chunk.output_layer, chunk.output_layer.forward, chunk._postprocess
    ranks = chunk.pg_collection.tp.size() if layer.sequence_parallel else 1

    def losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = chunk.compute_language_model_loss(labels, logits(hidden, weight)[0])
        return found

    def forward(
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        if known is None:
            return logits(hidden, weight, runtime_gather_output)
        size = max(1, tokens // (ranks * hidden.shape[1]))
        parts = zip(*(t.unflatten(1, (ranks, -1)).split(size, dim=2) for t in known), strict=True)
        chunks = [(labels.flatten(1), mask.flatten(1)) for labels, mask in parts]
        return _Summed.apply(
            hidden,
            layer.weight if weight is None else weight,
            chunks,
            size,
            losses,
            torch.is_grad_enabled(),
        )

    def postprocess(
        hidden_states: Tensor, *, labels: Tensor | None, loss_mask: Tensor | None, **given: Any
    ) -> Any:
        if labels is None or loss_mask is None:
            return finish(hidden_states, labels=labels, loss_mask=loss_mask, **given)
        shared = chunk.share_embeddings_and_output_weights
        return layer(
            hidden_states,
            chunk.shared_embedding_or_output_weight() if shared else None,
            known=(labels, loss_mask),
        )

    # Replaced on the layer itself, because ZeRO gathers its complete weight during its call.
    layer.forward, chunk._postprocess = forward, postprocess
