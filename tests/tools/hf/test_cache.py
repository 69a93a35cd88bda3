"""Tests of the exported model's caches: the bytes of the plan's formula, and a decoding step that
is compiled once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig

from fem_megatron import catalogue
from fem_megatron.config import ModelConfig
from fem_megatron.mixers.hyperset.shape import HyperSetConfig
from pretrain.plan.run_plan import decoding_state_bytes
from tests.tools.hf.small import (
    GREEDY,
    NAMES,
    close,
    config_of,
    here,
    padded_batch,
    pairs,
    small,
    tokens,
)
from tools.hf.configuration_fem import FemLMConfig
from tools.hf.modeling_fem import FemLMForCausalLM

BATCH = 3
LINEAR = small("hyperset", recurrence=2, hyperset=HyperSetConfig(attention="linear"))
LOOPED = replace(config_of("hybrid"), recurrence=3)
MODELS: dict[str, ModelConfig] = {name: config_of(name) for name in NAMES} | {
    "looped": LOOPED,
    "hyperset_linear": LINEAR,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_holds_what_the_formula_states(name: str) -> None:
    """Exact after a prompt, a chunk and each token; no tensor keeps more memory than its size, none
    is shared.

    A static cache has one more token from the start, including positions outside a window, and its
    tensors are never replaced.
    """
    config = MODELS[name]
    ids = tokens(BATCH, 14)
    held = []
    places = set()
    full = replace(config, attention=replace(config.attention, sliding_window=None))
    model: Any = FemLMForCausalLM(FemLMConfig(config.__dict__)).eval().to(torch.bfloat16)
    cache = model.new_cache()
    fixed = model.new_cache(20)
    seen = 0
    assert not (cache.is_initialized or fixed.is_initialized or any(cache))
    with torch.no_grad():
        for piece in ids.split([7, 4, 1, 1, 1], dim=1):
            model(piece, past_key_values=cache)
            seen += piece.shape[1]
            states: list[Tensor] = [tensor for layer in cache for tensor in layer]
            held.append(sum(tensor.untyped_storage().nbytes() for tensor in states))
            assert len(
                {tensor.untyped_storage().data_ptr() for tensor in states if tensor.nbytes}
            ) == len(states)
            assert held[-1] == cache.nbytes() == BATCH * decoding_state_bytes(config, seen, 2), seen
            model(piece, past_key_values=fixed)
            places.add(
                tuple(
                    tensor.data_ptr() for layer in fixed.layers for tensor in layer.state.values()
                )
            )
            assert fixed.nbytes() == BATCH * decoding_state_bytes(full, 20 + 1, 2)
    linear = (
        all(catalogue.MIXERS[mixer].cost == "T" for mixer in catalogue.mixer_names(config))
        or name == "hyperset_linear"
    )
    assert (len(set(held)) == 1) == linear
    assert cache.is_initialized
    assert fixed.is_initialized
    assert len(cache) == len([*cache]) == config.num_layers
    cache.reset()
    assert not (cache.is_initialized or any(cache))
    assert len(places) == 1 and fixed.get_seq_length() == seen == 14 and fixed.is_compileable


@pytest.mark.parametrize("name", ["fem_softmax", "cem", "mha2nd1st", "gated_deltanet", "switched"])
def test_every_cache_gives_the_parallel_logits(name: str) -> None:
    """float64, a prompt in chunks with padding: positions, distances and mask agree for all
    caches.
    """
    model, ids = here(name, torch.float64), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, slice(2) if model.model.counts_padding else 5] = 0
    with torch.no_grad():
        parallel = model(ids, attention_mask=mask, use_cache=False).logits
        for cache in (model.new_cache(), model.new_cache(12), model.new_cache(17)):
            ends, pieces = (4, 9, 10, 12), ids.split([4, 5, 1, 2], dim=1)
            given = zip(pieces, ends, strict=True)
            steps = [
                model(piece, attention_mask=mask[:, :end], past_key_values=cache).logits
                for piece, end in given
            ]
            # float64 rounding.
            close(torch.cat(steps, dim=1)[mask.bool()], parallel[mask.bool()], 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_padding_inside_a_text_changes_nothing_or_is_refused(name: str) -> None:
    """At once, with a cache and with a static one; padding at the ends is accepted. The property of
    a mixer's shape is measured in this test.
    """
    model = here(name, torch.float64)
    ids = tokens(1, 14)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0]])
    caches = (model.new_cache(), model.new_cache(14))
    counts = model.model.counts_padding
    refusal = "padding between two tokens of a row, .* pad only on the left"
    with torch.no_grad():
        for start in (5, 11):  # starts at the last token before the second gap, and after it
            model(ids[:, start:], attention_mask=mask[:, start:] | (torch.arange(start, 14) < 10))
        if counts:
            with pytest.raises(ValueError, match=refusal):
                model(ids, attention_mask=mask)
            for cache in caches:
                model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
                with pytest.raises(ValueError, match=refusal):
                    model(ids[:, 5:7], attention_mask=mask[:, :7], past_key_values=cache)
            model.model.counts_padding = False
        found = model(ids, attention_mask=mask).logits[mask.bool()]
        wanted = model(ids[mask.bool()][None]).logits[0]
    # float64 rounding where only tokens count. Otherwise the change, which the model refuses, is of
    # the order of the logits.
    difference = (found - wanted).abs().max().item() / wanted.abs().max().item()
    if counts:
        assert difference > 0.1
    else:
        assert difference < 1e-10


@pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo")
@pytest.mark.parametrize(
    ("name", "backend"),
    pairs(NAMES, "eager", quick=("fem_softmax", "gated_deltanet"))
    + pairs(("fem_softmax", "fem_gla", "cem"), "inductor"),
)
def test_a_decoding_step_is_one_graph(name: str, backend: str) -> None:
    """``generate`` compiled by transformers, full graphs only: one graph for prompts of any length
    and padding, with equal tokens.

    Later texts are shorter, and use the cache of the first one.
    """
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward if backend == "eager" else torch._inductor.compile(graph, inputs)

    model, (ids, mask) = here(name), padded_batch()
    ids = ids.clamp_min(1)  # without a mask, 0 would be padding
    torch._dynamo.reset()
    settings: Any = CompileConfig(fullgraph=True, backend=count)
    settings.mode = None
    settings._compile_all_devices = True
    static = {"cache_implementation": "static", "compile_config": settings}
    for start, given, longest in (
        (0, mask, 16),
        (0, None, 12),
        (2, mask[:, 2:], 14),
        (0, mask, 11),
        (0, None, 16),
    ):
        greedy = GREEDY | {"max_length": longest}
        wanted = model.generate(ids[:, start:], attention_mask=given, **greedy)
        # On a CPU, fem_megatron.megatron.platform turns compilation off for Megatron, which other
        # tests of this process start.
        with torch.compiler.set_stance("default"):
            found = model.generate(ids[:, start:], attention_mask=given, **greedy, **static)
        assert torch.equal(wanted, found)
        assert len(graphs) == 1, longest
