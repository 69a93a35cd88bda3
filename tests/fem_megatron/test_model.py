"""Tests of complete models: documented initialisation, causality, padding of the vocabulary. One
process.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fem_megatron.config import ModelConfig
from fem_megatron.documents import Documents
from fem_megatron.state import Context
from tests.fem_megatron import padding

FAMILIES = tuple(
    "fem_softmax cem mha2nd1st hyperset transformer energy_linear fem_aft fem_mamba fem_gla"
    " deltanet mamba2 differential".split()
)
SMALL = ModelConfig(
    hidden_size=32, num_layers=2, num_attention_heads=4, ffn_hidden_size=48, vocab_size=100
)


def build(model: ModelConfig, dtype: torch.dtype = torch.float64, *, draw: bool = True) -> Any:
    from fem_megatron.megatron.model import Layout, build

    return build(model, Layout(params_dtype=dtype), 16, seed=1, draw=draw)[0]


def test_initialisation_is_as_documented() -> None:
    """normal(0, init_std) for matrices, W_out of the conditioner zero, norm weights one, beta 1.95;
    every layer has a separate draw.
    """
    model = build(replace(SMALL, hidden_size=64, init_std=0.03))
    for name, weight in model.named_parameters():
        if name.endswith(("tdc.out_proj.weight", ".beta")):
            assert not weight.any()
        elif weight.ndim == 1:
            assert (weight == 1).all()
        else:
            # The standard deviation of n draws has a standard error of 1/sqrt(2n), relative; the
            # tolerance is five of them.
            assert weight.std().item() == pytest.approx(0.03, rel=5 / math.sqrt(2 * weight.numel()))
    mixer = model.get_submodule("decoder.layers.0.mixer")
    assert mixer.inverse_temperature(torch.ones(1)).mean().item() == pytest.approx(1.953, abs=1e-3)
    weights = [model.get_parameter(f"decoder.layers.{i}.mlp.down.weight") for i in (0, 1)]
    assert not torch.equal(*weights)


def test_undrawn_weights_are_nan_and_drawn_ones_the_same_from_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight that a checkpoint failed to overwrite is visible as NaN; constants and specs are
    unchanged.
    """
    drawn = dict(build(SMALL).named_parameters())
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        several = dict(build(SMALL).named_parameters())
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr("fem_megatron.megatron.model.start", None)
    undrawn = dict(build(SMALL, draw=False).named_parameters())
    for name, weight in drawn.items():
        assert torch.equal(several[name], weight) and undrawn[name].spec == weight.spec
        constant = isinstance(weight.spec.init, int | float)
        if constant:
            assert torch.equal(undrawn[name], weight), name
        else:
            assert undrawn[name].isnan().all(), name
    assert any(weight.isnan().any() for weight in undrawn.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("vocabulary", ["padded", "not padded"])
def test_the_vocabulary_s_padding_is_left_out(
    vocabulary: str, tied: bool, dtype: torch.dtype
) -> None:
    """Loss, logits and gradients equal those of the model without padding."""
    # Megatron computes the cross-entropy in float32 for every dtype of the model; bfloat16 rounds
    # the gradient of the logits to 8 bits.
    assert not padding.wrong(
        padding.compare(vocabulary, tied, params_dtype=dtype),
        1e-2 if dtype == torch.bfloat16 else 2e-6,
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_z_loss_is_in_the_gradients_and_not_in_the_losses(tied: bool) -> None:
    """Tolerance against float64: 2e-6, from the float32 loss; without the term gradients would be
    wrong by 1e-1 and more.
    """
    with_z = padding.compare("padded", tied, params_dtype=torch.float64, z_loss=0.05)
    assert not padding.wrong(with_z, 2e-6)


@pytest.mark.parametrize("tokens", [1, 7, 1000])
@pytest.mark.parametrize("more", [{}, {"z_loss": 0.05}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_loss_in_chunks_has_the_gradients_of_the_loss(
    tied: bool, more: dict[str, Any], tokens: int
) -> None:
    """Up to float64's rounding of a sum in another order; the sum is of float32 losses. Fewer
    logits at once, never more than allowed.
    """
    errors = padding.compare_chunks("padded", tied, tokens, params_dtype=torch.float64, **more)
    # A chunk has at least one position of every sequence, and only complete positions.
    assert errors.pop("logits") == 128 * padding.BATCH * max(
        1, min(tokens // padding.BATCH, padding.LENGTH)
    )
    assert errors.pop("sum") < 1e-6 and max(errors.values()) < 1e-10, errors


def test_the_padding_is_left_out_of_the_fused_loss() -> None:
    """Megatron's fused cross-entropy, uncompiled, and with recompute, equals the plain one bit for
    bit.
    """
    from fem_megatron.megatron.model import Layout, build

    model = padding.model_of("padded", tied=True)
    tokens, labels = padding.batch(model)
    losses = []
    for recompute in ("none", "full"):
        (chunk,) = build(
            model, Layout(params_dtype=torch.bfloat16, recompute=recompute), padding.LENGTH, seed=1
        )
        chunk.config.cross_entropy_loss_fusion = recompute != "none"
        chunk.config.cross_entropy_fusion_impl = "native"
        with torch.compiler.set_stance("force_eager"):
            losses.append(
                chunk(tokens, torch.arange(padding.LENGTH).expand_as(tokens), None, labels=labels)
            )
            losses[-1].sum().backward()
        gradient = chunk.get_parameter("embedding.word_embeddings.weight").grad
        assert not gradient[100:].any() and gradient[:100].isfinite().all()
    assert torch.equal(*losses)


@pytest.mark.parametrize("documents", [False, True], ids=["joined", "separate"])
def test_what_is_computed_again_or_offloaded_has_the_same_gradients_to_the_bit(
    documents: bool,
) -> None:
    """All families of mixers in one model; fewer bytes are saved for the backward pass, and only
    those outside the layers are offloaded.
    """
    from fem_megatron.megatron.model import Layout, build

    model = replace(
        padding.model_of("not padded", tied=True), pattern=FAMILIES, num_layers=len(FAMILIES)
    )
    tokens, labels = padding.batch(model)
    context = None
    if documents:
        begins = (torch.arange(padding.LENGTH) % 4 == 0).expand_as(tokens)
        context = Context(documents=Documents.of(begins))
    kept, found = list[int](), []

    def noted(t: torch.Tensor) -> torch.Tensor:
        kept.append(t.nbytes)
        return t

    for recompute, offloaded in (
        ("none", False),
        ("selective", False),
        ("none", True),
        ("selective", True),
    ):
        (chunk,) = build(
            model,
            Layout(recompute=recompute, offload_activations=offloaded),
            padding.LENGTH,
            seed=1,
        )
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(noted, lambda t: t):
            loss = chunk(
                tokens,
                torch.arange(padding.LENGTH).expand_as(tokens),
                None,
                labels=labels,
                packed_seq_params=context,
            )
        loss.sum().backward()
        found.append(
            (sum(kept), loss, {name: weight.grad for name, weight in chunk.named_parameters()})
        )
    (plain, wanted, gradients), (less, *_), *others = found
    assert less < 0.8 * plain and all(left < 0.1 * less for left, *_ in others)
    for _, ours, again in found[1:]:
        assert torch.equal(wanted, ours)
        assert all(torch.equal(gradient, again[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_of_one_rank_copies_no_buffer(ranks: int) -> None:
    """An asynchronous call has a handle that is awaited, so it is made for one rank too."""
    from fem_megatron.megatron.upstream import _not_alone

    calls: list[bool] = []
    buffer, group = torch.zeros(4), SimpleNamespace(size=lambda: ranks)
    collective = _not_alone(lambda *_, async_op, **__: calls.append(async_op))
    for async_op in (False, True):
        collective(buffer[: 4 // ranks], buffer, group=group, async_op=async_op)
    assert calls == ([True] if ranks == 1 else [False, True])


def test_clipping_scales_in_place_as_upstream_does() -> None:
    from megatron.core.utils import local_multi_tensor_scale

    from fem_megatron.megatron.upstream import _scale

    ours, theirs = ([torch.arange(1.0, 9.0) / 7, torch.ones(3)] for _ in range(2))
    _scale(0, None, [ours, ours], 0.3)
    local_multi_tensor_scale(0, None, [theirs, theirs], 0.3)
    assert all(map(torch.equal, ours, theirs))


def test_norm_of_many_parts_is_exact() -> None:
    """The gradient norm on the CPU: a large tensor with a few large rows, for which a plain float32
    sum is wrong by 2e-5.
    """
    from fem_megatron.megatron.upstream import _l2_norm

    heavy = torch.randn(4096 * 64 + 37, generator=torch.Generator().manual_seed(0)) * 1e-4
    heavy[:6400] *= 1000
    rest = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    wanted = torch.cat([heavy, rest.flatten()]).double().norm().item()
    norm, _ = _l2_norm(0, torch.zeros(1), [[heavy, rest, torch.zeros(0)]], False)
    # The resolution of float32.
    assert norm.item() == pytest.approx(wanted, rel=1e-7)


def test_without_padding_nothing_is_added() -> None:
    from fem_megatron.megatron.model import Layout, build

    layers = [
        build(padding.model_of(name, tied=False), Layout(), 4, seed=1)[0].output_layer
        for name in padding.VOCABULARIES
    ]
    assert ["forward" in vars(layer) for layer in layers] == [True, False, True]
