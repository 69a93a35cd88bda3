"""A model with a padded vocabulary against the same model without the padding, written in torch; at
any tensor-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm

from fem_megatron.block import Block
from fem_megatron.config import ModelConfig
from fem_megatron.parallel import OneProcess
from fem_megatron.state import Context

LENGTH, BATCH = 6, 3
VOCABULARIES = {"padded": (100, 128), "not padded": (128, 128), "a rank of padding": (60, 128)}
"""Vocabulary sizes and the multiples to which they are padded; at two ranks the second has rows 64
to 127."""


def model_of(vocabulary: str, tied: bool) -> ModelConfig:
    entries, multiple = VOCABULARIES[vocabulary]
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_layers": 1,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "init_std": 0.5,
    }
    return ModelConfig(
        mixer="transformer",
        **sizes,
        vocab_size=entries,
        make_vocab_size_divisible_by=multiple,
        tie_embeddings=tied,
        norm_eps=1e-5,
    )


def batch(model: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return tokens and labels [b, t], which contain the last entry of the vocabulary."""
    assert model.vocab_size is not None
    both = torch.randint(
        model.vocab_size, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    both[:, 0, 0] = model.vocab_size - 1
    return both[0], both[1]


def compare(vocabulary: str, tied: bool, **layout: Any) -> dict[str, float]:
    """Return the largest differences from the model without padding, and the largest gradient of
    the padded rows, of this rank's part.
    """
    from megatron.core import parallel_state

    from fem_megatron.megatron.model import Layout, build, global_name

    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    model = model_of(vocabulary, tied)
    assert model.vocab_size is not None
    (chunk,) = build(model, Layout(tensor_model_parallel_size=size, **layout), LENGTH, seed=1)
    tokens, labels = batch(model)
    positions = torch.arange(LENGTH).expand_as(tokens)
    losses = chunk(tokens, positions, None, labels=labels)
    z_loss = layout.get("z_loss", 0.0)
    losses.mean().backward()
    with torch.no_grad():
        logits = chunk(tokens, positions, None)
    rows = model.padded_vocab_size() // size
    own = slice(rank * rows, min((rank + 1) * rows, model.vocab_size))
    kept = max(0, own.stop - own.start)
    weights = {
        global_name(chunk, name): joined(weight, size).detach()
        for name, weight in chunk.named_parameters()
    }
    cut = {
        name: weight[: model.vocab_size] if weight.shape[0] == 128 else weight
        for name, weight in weights.items()
    }
    wanted, wanted_logits, gradients = without_padding(model, cut, tokens, labels, z_loss)
    found = {
        "loss": difference(losses, wanted),
        "logits": difference(logits[..., :kept], wanted_logits[..., own]),
        "not -inf": float((logits[..., kept:] != -torch.inf).sum()),
        "padding's gradient": 0.0,
    }
    for name, weight in chunk.named_parameters():
        if weight.shape[0] == rows and weight.ndim == 2:
            found[f"gradient of {name}"] = difference(
                weight.grad[:kept], gradients[global_name(chunk, name)][own]
            )
            found["padding's gradient"] = max(
                found["padding's gradient"], float(weight.grad[kept:].abs().sum())
            )
    assert sum(name.startswith("gradient of") for name in found) == 2 - tied
    return found


def without_padding(
    model: ModelConfig,
    weights: dict[str, Tensor],
    tokens: Tensor,
    labels: Tensor,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return losses [b, t], logits [b, t, V] and the gradients of embedding and output layer, in
    the weights' dtype.
    """
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    embedding = leaves["embedding.word_embeddings.weight"]
    x = embedding[tokens].transpose(0, 1)
    for layer, shape in enumerate(model.blocks()):
        block = Block(shape, OneProcess(embedding.dtype))
        prefix = f"decoder.layers.{layer}."
        own = {
            name.removeprefix(prefix): weight
            for name, weight in leaves.items()
            if name.startswith(prefix)
        }
        x = torch.func.functional_call(block, own, (x, Context()))
    x = rms_norm(x, (model.hidden_size,), leaves["decoder.final_layernorm.weight"], model.norm_eps)
    logits = linear(x, leaves.get("output_layer.weight", embedding)).transpose(0, 1)
    losses = cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="none"
    ).view_as(labels)
    (losses + z_loss * logits.logsumexp(-1).square()).mean().backward()
    return (
        losses.detach(),
        logits.detach(),
        {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
    )


def compare_chunks(vocabulary: str, tied: bool, tokens: int, **layout: Any) -> dict[str, float]:
    """Return the largest differences between the loss summed in chunks of ``tokens`` tokens and the
    sum of the losses, and of every gradient.

    ``logits``: the largest number in one tensor. Some tokens do not count. The sum has a factor, as
    an engine's has, which is a power of two because the loss is float32.
    """
    from megatron.core import parallel_state

    from fem_megatron.megatron.model import Layout, build

    model = model_of(vocabulary, tied)
    size = parallel_state.get_tensor_model_parallel_world_size()
    text, labels = batch(model)
    positions = torch.arange(LENGTH).expand_as(text)
    mask = (torch.arange(BATCH * LENGTH) % 4 != 1).float().view_as(text)
    sums = []
    gradients = []
    largest = []
    for chunk_of in (0, tokens):
        (chunk,) = build(
            model,
            Layout(tensor_model_parallel_size=size, loss_chunk=chunk_of, **layout),
            LENGTH,
            seed=1,
        )
        losses, seen = chunk.compute_language_model_loss, list[int]()

        def noted(
            known: Tensor, logits: Tensor, losses: Any = losses, seen: list[int] = seen
        ) -> Any:
            seen.append(logits.numel())
            return losses(known, logits)

        chunk.compute_language_model_loss = noted
        found = chunk(text, positions, None, labels=labels, loss_mask=mask)
        total = (found * mask).sum() if chunk_of == 0 else found
        with torch.no_grad():
            evaluated = chunk(text, positions, None, labels=labels, loss_mask=mask)
        assert torch.equal(evaluated, found.detach())
        (0.25 * total).backward()
        sums.append(total.detach())
        gradients.append({name: weight.grad for name, weight in chunk.named_parameters()})
        largest.append(max(seen))
    report = {"sum": difference(sums[1], sums[0]), "logits": float(largest[1])}
    return report | {
        name: difference(gradients[1][name], gradient) for name, gradient in gradients[0].items()
    }


def joined(weight: Tensor, size: int) -> Tensor:
    """Return the concatenation of the ranks' parts of a weight."""
    from megatron.core import parallel_state

    if not getattr(weight, "tensor_model_parallel", False):
        return weight
    parts = [torch.empty_like(weight) for _ in range(size)]
    torch.distributed.all_gather(
        parts, weight.detach().contiguous(), group=parallel_state.get_tensor_model_parallel_group()
    )
    return torch.cat(parts, weight.partition_dim)  # type: ignore[attr-defined]


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    if ours.numel():
        return float((ours - theirs).detach().abs().max() / (float(theirs.abs().max()) or 1.0))
    return 0.0


def wrong(found: dict[str, float], tolerance: float) -> dict[str, float]:
    """Return the values beyond the tolerance; -inf and zero gradients must be exact."""
    exact = ("not -inf", "padding's gradient")
    beyond = {}
    for name, value in found.items():
        allowed = 0.0 if name in exact else tolerance
        if not value <= allowed:
            beyond[name] = value
    return beyond
