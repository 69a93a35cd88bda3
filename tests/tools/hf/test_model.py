"""Tests of the exported model: every mixer of the catalogue against Megatron, loss and gradient,
configuration, the folder.

The mathematics of a mixer is tested in its own package; a new name of the catalogue is tested
without changes to this file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from fem_megatron.config import ModelConfig
from fem_megatron.rope import RopeScaling
from pretrain.plan.run_plan import model_weights
from tests.tools.hf.checkpoints import rewrite
from tests.tools.hf.small import (
    GREEDY,
    NAMES,
    VOCAB,
    Exports,
    close,
    export,
    here,
    random_state,
    small,
    tokens,
    trained_logits,
)
from tests.tools.refusals import Refused
from tools.hf.configuration_fem import FemLMConfig
from tools.hf.folder import json_object
from tools.hf.modeling_fem import FemCache, FemLMForCausalLM
from tools.hf.weight_conversion import hf_name


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, open_folder: Callable[..., Any]) -> Any:
    """Export a state and load it."""

    def export_and_load(model: ModelConfig, state: dict[str, Tensor]) -> Any:
        return open_folder(export(model, tmp_path_factory.mktemp("export") / "model", state=state))

    return export_and_load


@pytest.fixture(scope="module")
def plain(load: Any) -> Any:
    """The default mixer's model in float64; read-only."""
    return load(small(), random_state(small(), torch.float64))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_megatrons(exported: Exports, name: str) -> None:
    given, ids = exported(name), tokens(2, 21)
    wanted = trained_logits(given.config, given.state, ids)
    with torch.no_grad():
        # float32 rounding: the same operations, except that the product of the output layer has 50
        # rows or 64.
        close(given.model(ids).logits, wanted, 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_read_as_if_alone(exported: Exports, name: str) -> None:
    """transformers' convention: position_ids that do not increase by one begin a document; the
    third one is the rest of a longer document.
    """
    given = exported(name)
    ids = tokens(2, 21)
    packed = (((0, 5), (0, 1), (7, 15)), ((3, 20), (0, 1)))
    model, ours = given.model, (given.folder / "modeling_fem.py").exists()
    without = {} if ours else {"use_cache": False}  # with a cache, Llama joins packed documents
    rows = [[torch.arange(first, first + size)[None] for first, size in row] for row in packed]
    position_ids = torch.stack([torch.cat(row, dim=1)[0] for row in rows])
    with torch.no_grad():
        made = model(ids, position_ids=position_ids, **without)
        assert made.past_key_values is None
        for full, row, parts in zip(made.logits, ids, rows, strict=True):
            sizes = [part.shape[1] for part in parts]
            alone = []
            for document, positions in zip(row[None].split(sizes, dim=1), parts, strict=True):
                alone.append(model(document, position_ids=positions, use_cache=False).logits)
            # float32 rounding, in matrix products of other shapes.
            close(full[None], torch.cat(alone, dim=1), 1e-5)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_the_loss_is_of_the_next_tokens_and_has_a_gradient(load: Any) -> None:
    """Also with every block recomputed: the same operations in the same order."""
    model = load(small(), random_state(small(), torch.float64)).train()
    ids = tokens(2, 8)
    labels, gradients = ids.clone(), []
    labels[0, :3] = -100
    logits = model(ids).logits.log_softmax(-1)
    wanted = [
        logits[b, t, ids[b, t + 1]] for b in range(2) for t in range(7) if labels[b, t + 1] != -100
    ]
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = model(ids, labels=labels).loss
        # transformers computes the loss in float32.
        assert loss.item() == pytest.approx(-torch.stack(wanted).mean().item(), rel=1e-6)
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(
        torch.equal(a, b) and a.isfinite().all() and a.any()
        for a, b in zip(*gradients, strict=True)
    )
    assert any(layer.gradient_checkpointing for layer in model.model.layers)


def test_other_ways_in_and_out(plain: Any) -> None:
    """Tests inputs_embeds, position_ids, logits_to_keep, hidden states, tuples."""
    ids = tokens(2, 9)
    with torch.no_grad():
        full = plain(ids, output_hidden_states=True)
        assert torch.equal(
            plain(inputs_embeds=plain.get_input_embeddings()(ids)).logits, full.logits
        )
        for positions in (torch.arange(9)[None], torch.arange(9).expand(2, 9)):
            assert torch.equal(plain(ids, position_ids=positions).logits, full.logits)
        assert not torch.allclose(
            plain(ids, position_ids=torch.arange(9)[None] ** 2).logits, full.logits
        )
        close(plain(ids, logits_to_keep=2).logits, full.logits[:, -2:], 1e-12)
        assert torch.equal(plain(ids, return_dict=False)[0], full.logits)
        assert len(full.hidden_states) == 3
        assert torch.equal(full.hidden_states[0], plain.get_input_embeddings()(ids))
        close(plain.lm_head(full.hidden_states[-1]), full.logits, 1e-12)


@pytest.mark.parametrize("name", ["fem_softmax", "yuriiformer"])
def test_hidden_states_have_gradients(name: str) -> None:
    """At every layer, for a stream of tokens and for one with velocities; the first one is the
    embedding's.
    """
    model, ids = here(name, torch.float64), tokens(2, 7)
    made = model(ids, labels=ids, output_hidden_states=True)
    for state in made.hidden_states:
        state.retain_grad()
    made.loss.backward()
    assert len(made.hidden_states) == 3
    assert all(state.grad is not None and state.grad.any() for state in made.hidden_states)
    embedding = model.get_input_embeddings().weight
    # float64 rounding: both gradients are computed from the gradient of a float32 loss.
    close(
        embedding.grad,
        torch.zeros_like(embedding).index_add(
            0, ids.flatten(), made.hidden_states[0].grad.flatten(0, 1)
        ),
        1e-12,
    )
    assert torch.equal(made.logits, model(ids).logits)


def test_arguments_that_clients_of_llama_give() -> None:
    """shift_labels and num_items_in_batch belong to the loss function; arguments without effect are
    accepted, contradicting ones refused.
    """
    plain, ids = here("fem_softmax", torch.float64), tokens(2, 9)
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    with torch.no_grad():
        wanted = plain(ids, labels=ids)
        nothing = {
            "cache_position": torch.arange(9),
            "token_type_ids": torch.zeros_like(ids),
            "max_length_q": 9,
            "is_causal": True,
        }
        assert torch.equal(plain(ids, **nothing).logits, wanted.logits)
        assert plain(ids, labels=ids, shift_labels=shifted, **nothing).loss == wanted.loss
        assert plain(ids, labels=ids, shift_labels=shifted.flip(1).contiguous()).loss != wanted.loss
        # float32 rounding: a mean of 16, or a sum divided by 8.
        assert plain(ids, labels=ids, num_items_in_batch=8).loss.item() == pytest.approx(
            2 * wanted.loss.item(), rel=1e-6
        )


def test_packed_documents_by_their_ends_or_numbers() -> None:
    """With the arguments of transformers' collator for flattened batches, with or without
    position_ids, documents are separate.
    """
    plain = here("fem_softmax", torch.float64)
    row = tokens(1, 12)
    ends = torch.tensor([0, 5, 5, 6, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (5, 1, 6)])[None]
    numbers = torch.tensor([[0] * 5 + [1] + [2] * 6], dtype=torch.int32)
    with torch.no_grad():
        alone = torch.cat(
            [plain(part, use_cache=False).logits for part in row.split([5, 1, 6], dim=1)], dim=1
        )
        lengths = {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": 6,
            "max_length_k": 6,
        }
        for report in (
            lengths,
            {"cu_seq_lens_q": ends},
            {"cu_seq_lens_k": ends},
            {"seq_idx": numbers},
            lengths | {"seq_idx": numbers},
        ):
            for given in (None, positions, torch.arange(12)[None]):
                made = plain(row, position_ids=given, attention_mask=torch.ones_like(row), **report)
                assert made.past_key_values is None
                # float64 rounding, in matrix products of other shapes.
                close(made.logits, alone, 1e-10)
        full = plain(row, use_cache=False).logits
        assert torch.equal(plain(row, cu_seq_lens_q=torch.tensor([0, 12])).logits, full)
        assert not torch.allclose(full, alone)
        both = plain(
            torch.cat((row, row)), seq_idx=torch.cat((numbers, torch.zeros_like(numbers)))
        ).logits
        close(both, torch.cat((alone, full)), 1e-10)


def test_masked_tokens_anywhere_change_nothing(plain: Any) -> None:
    """Gaps and right padding show that positions are counted without them: RoPE would not show a
    shift of all.
    """
    ids, mask = tokens(1, 10), torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0, 1, 0]])
    kept = mask[0].bool()
    with torch.no_grad():
        # The positions that transformers' generate passes; equal up to float64 rounding.
        for positions in (None, (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)):
            close(
                plain(ids, attention_mask=mask, position_ids=positions).logits[0, kept],
                plain(ids[:, kept]).logits[0],
                1e-10,
            )


def test_refused_inputs(plain: Any, raised: Refused) -> None:
    encoder = FemLMForCausalLM(FemLMConfig(small(causal=False).__dict__)).eval()
    ids = {"input_ids": tokens(1, 5)}
    gap = {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}
    two = {"cu_seq_lens_q": torch.tensor([0, 2, 5])}
    assert encoder(**ids, use_cache=True).past_key_values is None
    for given in (
        ids | {"attention_mask": torch.ones(1, 4)},
        ids | {"past_key_values": DynamicCache()},
        {},
        ids | {"position_ids": torch.tensor([[0, 1, 0, 1, 2]]), "use_cache": True},
        ids | {"position_ids": torch.tensor([[1, 0, 1, 0, 1]])} | gap,
        ids | {"cu_seq_lens_q": torch.tensor([0, 4])},
        {"input_ids": tokens(2, 5), "cu_seq_lens_q": torch.tensor([0, 5])},
        ids | {"seq_idx": torch.zeros(1, 4)},
        ids | two | {"cu_seq_lens_k": torch.tensor([0, 3, 5])},
        ids | two | {"position_ids": torch.tensor([[0, 1, 2, 0, 1]])},
        ids | two | gap,
        ids | two | {"past_key_values": plain.new_cache()},
        ids | {"is_causal": False},
    ):
        raised(plain, error=ValueError, **given)
    raised(encoder, error=ValueError, **ids, past_key_values=FemCache(encoder.config))
    looped = FemLMConfig(small().__dict__, recurrence=0)
    raised(FemLMForCausalLM, looped, error=ValueError)
    raised(FemLMConfig, error=ValueError, num_attention_heads=5)
    with pytest.raises(TypeError, match="no_such"):
        FemLMConfig({"no_such": 1})


def test_velocities_have_an_embedding_that_transformers_does_not_know() -> None:
    model = FemLMForCausalLM(FemLMConfig(small("yuriiformer").__dict__))
    embeds = model.get_input_embeddings()(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(
        ValueError,
        match="inputs_embeds: this model also needs velocities, .* give input_ids",
    ):
        model(inputs_embeds=embeds)
    with pytest.raises(
        ValueError,
        match="a separate embedding for velocities, which is not resized: train with all tokens",
    ):
        model.resize_token_embeddings(VOCAB + 6)


def test_the_configuration() -> None:
    """transformers' names override ``architecture``, also for later changes and after writing and
    reading.
    """
    config = FemLMConfig(
        small(init_std=0.03).__dict__, num_hidden_layers=4, tie_word_embeddings=True
    )
    assert (
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.vocab_size,
    ) == (32, 4, 4, VOCAB)
    assert config.initializer_range == 0.03 and config.recurrence == 1
    model = ModelConfig.from_dict(config.model_fields())
    assert model == small(init_std=0.03, num_layers=4, tie_embeddings=True)
    config.vocab_size = 60
    again = FemLMConfig(**json.loads(config.to_json_string(use_diff=True)))
    assert again.vocab_size == 60
    assert ModelConfig.from_dict(again.model_fields()) == replace(model, vocab_size=60)


def test_fresh_model_starts_as_trained_ones_do(plain: Any) -> None:
    """For this repository's code, and for the same as remote code, which transformers initialises
    module by module.
    """
    config = small(hidden_size=128, init_std=0.03, mtp_depth=1)
    starts = {hf_name(name): weight.init for name, weight in model_weights(config).items()}
    for kind, settings in ((FemLMForCausalLM, FemLMConfig), (type(plain), type(plain.config))):
        torch.manual_seed(0)
        model = kind(settings(config.__dict__))
        assert starts.keys() == model.state_dict().keys()
        for name, weight in model.named_parameters():
            if isinstance(start := starts[name], int | float):
                assert not (weight - start).any(), name
            else:
                # The standard deviation of n draws has a relative standard error of 1/sqrt(2n); the
                # tolerance is five of them.
                assert weight.std().item() == pytest.approx(
                    0.03, rel=5 / math.sqrt(2 * weight.numel())
                ), name


def test_a_missing_weight_starts_anew(tmp_path: Path) -> None:
    out = export(small(), tmp_path / "model")
    missing = [
        "model.layers.0.mixer.beta",
        "model.layers.1.mixer.tdc.out_proj.weight",
        "model.norm.weight",
    ]
    rewrite(out, lambda held: [held.pop(name) for name in missing])
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert not model.model.layers[0].mixer.beta.any()
    assert not model.model.layers[1].mixer.tdc.out_proj.weight.any()
    assert (model.model.norm.weight == 1).all() and model.model.layers[1].mixer.beta.any()


def test_recurrence_may_be_raised(plain: Any, load: Any, open_folder: Callable[..., Any]) -> None:
    ids = tokens(2, 6)
    thrice = load(small(recurrence=3), random_state(small(), torch.float64))
    raised = open_folder(plain.config._name_or_path, recurrence=3)
    assert raised.config.recurrence == 3 and raised.config.architecture["recurrence"] == 1
    with torch.no_grad():
        wanted = thrice(ids).logits
        assert torch.equal(raised(ids).logits, wanted)
        assert not torch.allclose(plain(ids).logits, wanted)
    greedy = GREEDY | {"max_new_tokens": 6}
    assert torch.equal(
        raised.generate(ids, **greedy), raised.generate(ids, use_cache=False, **greedy)
    )


def test_saved_again_it_is_the_same(
    plain: Any, tmp_path: Path, open_folder: Callable[..., Any]
) -> None:
    """save_pretrained copies the code; a resized vocabulary is kept."""
    model = open_folder(plain.config._name_or_path)
    model.resize_token_embeddings(VOCAB + 6)
    model.save_pretrained(tmp_path / "again")
    again = open_folder(tmp_path / "again")
    assert again.config.vocab_size == VOCAB + 6
    with torch.no_grad():
        # float64 rounding: the output layer has more rows.
        close(again(tokens(2, 7)).logits[..., :VOCAB], plain(tokens(2, 7)).logits, 1e-12)


def test_rope_is_reported_and_set_by_transformers_names(exported: Exports, tmp_path: Path) -> None:
    """config.json contains both spellings; the model uses an edited one, or one set on the
    configuration.
    """
    given = exported("stretched")
    config = json_object(given.folder / "config.json")
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 12,
        "beta_fast": 2.0,
        "beta_slow": 0.25,
    }
    assert (config["rope_theta"], config["rope_scaling"]) == (10000.0, scaling)
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **scaling}
    linear = RopeScaling("linear", 2.0)
    edits: list[dict[str, Any]] = [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 7.0},
    ]
    edits += [{"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}]
    read = [FemLMConfig(**{**config, **edit}).model() for edit in edits]
    assert [(model.rope_base, model.rope_scaling) for model in read] == [
        (10000, linear),
        (7, given.config.rope_scaling),
        (10000, linear),
    ]
    loaded = FemLMConfig(**config)
    loaded.rope_scaling = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    assert (
        loaded.model()
        == FemLMConfig(**loaded.to_dict()).model()
        == replace(loaded.model(), rope_scaling=linear)
    )
    turned = replace(given.config, rope_scaling=RopeScaling("abf", 5.0))
    report = FemLMConfig(architecture=asdict(turned))
    assert report.model() == FemLMConfig(**report.to_dict()).model() == turned
    unturned = FemLMConfig(architecture=asdict(small("cem"))).to_dict()
    assert unturned.get("rope_parameters") is None and unturned.get("rope_theta") is None
