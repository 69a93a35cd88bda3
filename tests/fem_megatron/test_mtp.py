"""Multi-token prediction: losses and gradients against the paper's equations, and which predictions
count. One process; tests/pretrain/test_parity.py compares the layouts.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm

from fem_megatron.config import ModelConfig
from tests.fem_megatron.test_catalogue import CAUSAL, model_of

DEPTH, LENGTH, BATCH = 2, 7, 2


def batch_of(model: ModelConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return tokens [b, LENGTH + 1], and a batch of which a few labels do not count."""
    from pretrain.data.datasets import look_ahead

    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(model.vocab_size or 1, (BATCH, LENGTH + 1), generator=generator)
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": (torch.rand(BATCH, LENGTH, generator=generator) < 0.7).float(),
        "position_ids": torch.arange(LENGTH).expand(BATCH, LENGTH),
    }
    return tokens, batch | look_ahead(batch, DEPTH, None)


def by_the_equations(chunk: object, model: ModelConfig, tokens: Tensor, counts: Tensor) -> Tensor:
    """Return the summed losses [1 + DEPTH] of equations 21 to 25, module after module.

    Module k reads only the positions whose token i + k exists. counts: as ``loss_mask``.
    """
    get = chunk.get_parameter  # type: ignore[attr-defined]
    weight = get("embedding.word_embeddings.weight")
    output = weight if model.tie_embeddings else get("output_layer.weight")
    if model.stream_size > model.hidden_size:
        weight = torch.cat((weight, get("embedding.velocity.word_embeddings.weight")), dim=1)
    width, eps = model.hidden_size, model.norm_eps
    embedded = weight[tokens.T]  # [LENGTH + 1, b, channels]

    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm(x[..., :width], (width,), get(name), eps)

    def loss(hidden: Tensor, ahead: int) -> Tensor:
        """Sum over the positions i whose token i + ahead exists."""
        logits = linear(hidden, output[: model.vocab_size])[: LENGTH + 1 - ahead]
        losses = cross_entropy(logits.permute(1, 2, 0), tokens[:, ahead:], reduction="none")
        return (losses * counts[:, ahead - 1 :]).sum()

    stream = embedded[:-1]
    for layer in chunk.decoder.layers:  # type: ignore[attr-defined]
        stream, _ = layer(stream, None, None)
    hidden = normed(stream, "decoder.final_layernorm.weight")
    sums = [loss(hidden, 1)]
    for k in range(1, DEPTH + 1):
        name = f"mtp_modules.{k - 1}"
        later = embedded[k:]
        hidden = hidden[: len(later)]
        both = (
            normed(hidden, f"{name}.hidden_norm.weight"),
            normed(later, f"{name}.token_norm.weight"),
        )
        x = linear(torch.cat(both, dim=-1), get(f"{name}.projection.weight"))
        block = chunk.get_submodule(f"{name}.block")  # type: ignore[attr-defined]
        stream, _ = block(torch.cat((x, later[..., width:]), dim=-1), None, None)
        hidden = normed(stream, f"{name}.norm.weight")
        sums.append(loss(hidden, k + 1))
    return torch.stack(sums)


@pytest.mark.parametrize("name", CAUSAL)
def test_losses_and_gradients_are_those_of_the_equations(name: str) -> None:
    """2e-6: Megatron computes the cross-entropy in float32; all other numbers are float64. A label
    shifted by one place changes a loss by 1e-1 and more.
    """
    from fem_megatron.megatron.model import Layout, build
    from pretrain.engines.building import forward, summed_loss

    model = model_of(name, mtp_depth=DEPTH, init_std=0.3)
    (chunk,) = build(model, Layout(params_dtype=torch.float64), LENGTH, seed=1)
    tokens, batch = batch_of(model)
    wanted = by_the_equations(chunk, model, tokens, batch["loss_mask"])
    parameters = list(chunk.parameters())
    gradients = torch.autograd.grad(wanted[0] + 0.3 * wanted[1:].mean(), parameters)

    total, counted, report = summed_loss(forward(chunk, batch), batch, 0.3)
    assert report.tolist() == pytest.approx(
        [wanted[0].item(), counted.item(), *wanted[1:].tolist()], rel=2e-6
    )
    largest = max(gradient.abs().max() for gradient in gradients)
    for ours, theirs in zip(torch.autograd.grad(total, parameters), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6 * largest.item())
    chunk.eval()  # validation is without the modules
    assert summed_loss(forward(chunk, batch), batch)[2].tolist() == report[:2].tolist()


def test_a_prediction_counts_if_its_token_counts_and_no_document_ends_before() -> None:
    from pretrain.data.datasets import look_ahead

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(100, (3, 12), generator=generator)
    mask = (torch.rand(3, 12, generator=generator) < 0.8).float()
    ends = torch.rand(3, 12, generator=generator) < 0.2
    for cuts in (None, ends):
        found = look_ahead({"labels": labels, "loss_mask": mask}, 3, cuts)
        ahead, counts = (found[key].view(3, 3, 12) for key in ("labels_ahead", "mask_ahead"))
        for k, row, i in product((1, 2, 3), range(3), range(12)):
            if i + k >= 12:
                assert counts[k - 1, row, i] == 0
                continue
            crossed = cuts is not None and bool(ends[row, i : i + k].any())
            assert ahead[k - 1, row, i] == labels[row, i + k]
            assert counts[k - 1, row, i] == mask[row, i + k] * (not crossed)
