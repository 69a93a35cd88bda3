"""Stock transformers' ``generate`` with exported folders: every mixer, every strategy and cache, padding; and what is around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.hf.small import NAMES, PADDED, Exported, close, export, here, padded_batch, small, tokens, write_tokenizer
from tools.hf.configuration_fem import FemLMConfig
from tools.hf.modeling_fem import FemCache, FemLMForCausalLM, FemStaticCache

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
# Beams are drawn, reordered, and two of each row's three returned.
BEAMS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": True, "num_beams": 3, "num_return_sequences": 2, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    return here("hybrid", torch.float64)


def generate(model: Any, ids: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(0)
    found: Tensor = model.generate(ids, **options)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_with_and_without_cache(exported: Callable[[str], Exported], name: str) -> None:
    """A left-padded batch: the same tokens with each cache as with none, the prompt at once or in pieces."""
    given, (ids, mask) = exported(name).model, padded_batch()
    drawn, greedy = (generate(given, ids, attention_mask=mask, **strategy) for strategy in (BEAMS, GREEDY))
    assert drawn.shape == (6, 12) and not torch.equal(drawn[::2], greedy[:, :12])
    for other in ({"use_cache": False}, {"cache_implementation": "static"}):
        assert torch.equal(drawn, generate(given, ids, attention_mask=mask, **BEAMS, **other)), other
    pieces: dict[str, Any] = {"prefill_chunk_size": 3}
    for other in ({"use_cache": False}, pieces, pieces | {"cache_implementation": "static"}):
        assert torch.equal(greedy, generate(given, ids, attention_mask=mask, **GREEDY, **other)), other


@pytest.mark.parametrize("name", NAMES)
def test_left_padding_changes_nothing(exported: Callable[[str], Exported], name: str) -> None:
    given, (ids, mask), new = exported(name).model, padded_batch(), tokens(3, 4, seed=2)
    longer = torch.cat((mask, torch.ones_like(new)), dim=1)
    with torch.no_grad():
        batch = given(ids, attention_mask=mask, use_cache=True)
        after = given(new, attention_mask=longer, past_key_values=batch.past_key_values)
        for row, length in enumerate(PADDED):
            alone = given(torch.cat((ids[row, 8 - length :], new[row]))[None], use_cache=False).logits[0]
            # Rounding of float32.
            close(torch.cat((batch.logits[row, 8 - length :], after.logits[row])), alone, 1e-5)


def test_penalties_groups_and_constraints(model: Any) -> None:
    """What else transformers has for the next token sees the same scores with a cache and without."""
    ids, mask = padded_batch()
    for options in (
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": True, "top_k": 7, "top_p": 0.8, "temperature": 1.7, "num_return_sequences": 3},
        {"num_beams": 3, "length_penalty": 0.5, "early_stopping": True, "eos_token_id": 7},
    ):
        settings = GREEDY | options
        cached = generate(model, ids, attention_mask=mask, **settings)
        assert torch.equal(cached, generate(model, ids, attention_mask=mask, use_cache=False, **settings)), options


def test_what_generate_returns(model: Any) -> None:
    ids, mask = padded_batch()
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}
    found = model.generate(ids, attention_mask=mask, **GREEDY, **asked)
    assert isinstance(found.past_key_values, FemCache) and found.past_key_values.get_seq_length() == 12
    assert len(found.scores) == len(found.logits) == len(found.hidden_states) == 5 and found.attentions is None
    assert [len(states) for states in found.hidden_states] == [3] * 5 and found.hidden_states[1][0].shape == (3, 1, 32)
    assert torch.equal(torch.stack([scores.argmax(-1) for scores in found.scores], dim=1), found.sequences[:, 8:])
    with pytest.raises(ValueError, match="output_attentions: .* has no attention maps to show"):
        model.generate(ids, attention_mask=mask, **GREEDY, return_dict_in_generate=True, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions: "):
        model(ids, output_attentions=True)


def test_a_conversation_in_one_cache(model: Any) -> None:
    """A returned cache goes on where it stood: turn after turn, the user's tokens between, as if all had been one text."""
    first, second = tokens(2, 5), tokens(2, 3, seed=2)
    for cache in (model.new_cache(), model.new_cache(40), FemCache(model.config), FemStaticCache(model.config, 18)):
        said = model.generate(first, past_key_values=cache, **GREEDY)
        text = torch.cat((said, second), dim=1)
        answer = model.generate(text, past_key_values=cache, **GREEDY)
        assert torch.equal(answer, model.generate(text, use_cache=False, **GREEDY))
        assert cache.get_seq_length() == 5 + 5 + 3 + 5 - 1
        cache.reset()
        assert cache.get_seq_length() == 0 and torch.equal(said, model.generate(first, past_key_values=cache, **GREEDY))
    with pytest.raises(ValueError, match="room for 12 tokens, and 13 are asked for"):
        model.generate(text, past_key_values=model.new_cache(12), max_new_tokens=2)


def test_one_prompt_many_answers(model: Any) -> None:
    """A prompt that is read once: its cache's rows are repeated for a batch of continuations."""
    prompt, rest = tokens(1, 7), tokens(3, 2, seed=2)
    for cache in (model.new_cache(), model.new_cache(20)):
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            cache.batch_repeat_interleave(3)
            cache.batch_select_indices(torch.tensor([2, 0, 1]))
            after = model(rest, past_key_values=cache).logits
            whole = model(torch.cat((prompt.expand(3, -1), rest), dim=1), use_cache=False).logits
        # float64 rounding.
        close(after, whole[:, 7:], 1e-10)


def test_prompts_as_embeddings(model: Any) -> None:
    ids, mask = padded_batch()
    prompt = model.get_input_embeddings()(ids).detach()
    for other in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 2}):
        found = model.generate(inputs_embeds=prompt, attention_mask=mask, **GREEDY, **other)
        assert torch.equal(found, model.generate(ids, attention_mask=mask, **GREEDY, **other)[:, 8:])


def test_refused_ways_of_generating(model: Any) -> None:
    """In one line: what a state cannot do, other caches, a cache for nothing."""
    from transformers import DynamicCache, StaticCache

    ids = tokens(1, 4)
    for options, message in (
        ({"assistant_model": model}, "assisted generation|cannot go back to an earlier step"),
        ({"prompt_lookup_num_tokens": 2}, "assisted generation|cannot go back to an earlier step"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized': this model has 'dynamic'"),
        ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded': this model has 'dynamic'"),
        ({"cache_implementation": "static", "past_key_values": model.new_cache()}, "give one of them"),
        ({"past_key_values": DynamicCache()}, "is a DynamicCache; this model needs its own"),
        ({"past_key_values": StaticCache(model.config, max_cache_len=9)}, "is a StaticCache; this model needs its own"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            model.generate(ids, **GREEDY, **options)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="max_cache_len=0: at least 1"):
        model.new_cache(0)
    long = FemLMForCausalLM(FemLMConfig(small("mha2nd").__dict__))
    with pytest.raises(ValueError, match="max_cache_len=5000, but this model's mixer takes 512 tokens at most"):
        long.new_cache(5000)


def test_the_cache() -> None:
    cache: Any = FemCache(FemLMConfig(small().__dict__))
    assert len(cache) == 2 and cache.get_seq_length() == 0 and not cache.is_croppable and not cache.is_compileable
    layer = cache.layers[0]
    layer.state, layer.tokens = {"a": torch.tensor([[1.0], [2.0]]), "b": torch.arange(12.0).view(2, 2, 3)}, 5
    assert cache.get_seq_length() == 5 and cache.get_mask_sizes(3, 0) == (8, 0) and cache.nbytes() == 14 * 4
    cache.reorder_cache(torch.tensor([1, 1]))
    assert layer.state["a"].flatten().tolist() == [2.0, 2.0]
    cache.batch_repeat_interleave(2)
    assert layer.state["a"].shape == (4, 1) and layer.state["b"].shape == (4, 2, 3)
    cache.batch_select_indices(torch.tensor([0]))
    assert layer.state["b"].flatten().tolist() == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    cache.crop(0)
    for wrong in (lambda: cache.crop(-1), lambda: layer.offload(), lambda: layer.update(None, None)):
        with pytest.raises(ValueError, match="this model's"):
            wrong()
    cache.reset()
    assert not layer.state and cache.get_seq_length() == 0


# ---------------------------------------------------------------- around generate


def test_a_pipeline(tmp_path: Path, open_folder: Callable[..., Any]) -> None:
    """transformers' own command of a few words, on prompts of several lengths at once."""
    from transformers import pipeline

    folder = export(small("fem_gla"), tmp_path / "model", tokenizer_dir=write_tokenizer(tmp_path / "tokenizer", 50))
    model = open_folder(folder)
    made: Any = pipeline("text-generation", model=model, tokenizer=str(folder))
    made.tokenizer.pad_token_id = model.config.eos_token_id
    asked = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}
    alone = [made(prompt, **asked)[0]["generated_text"] for prompt in ("w1 w2 w3", "w4")]
    assert alone[0] and [answer[0]["generated_text"] for answer in made(["w1 w2 w3", "w4"], batch_size=2, **asked)] == alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_type_and_a_device_map(tmp_path: Path, open_folder: Callable[..., Any], dtype: torch.dtype) -> None:
    folder = export(small("hyperset", recurrence=2), tmp_path / "model")
    whole, mapped = open_folder(folder, dtype=dtype), open_folder(folder, dtype=dtype, device_map="cpu")
    assert {parameter.dtype for parameter in mapped.parameters()} == {dtype} and mapped.device.type == "cpu"
    ids, mask = padded_batch()
    found = mapped.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(found, whole.generate(ids, attention_mask=mask, **GREEDY))
    assert open_folder(folder).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_fine_tuning_by_low_rank_adapters(name: str) -> None:
    """On every linear module that peft finds: a step lowers the loss, no adapter is without effect, and merged they are the same model."""
    from peft import LoraConfig, get_peft_model

    ids = tokens(2, 9)
    settings = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    tuned: Any = get_peft_model(here(name, torch.float64), settings)
    adapters = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    losses = []
    for _ in range(2):
        tuned.zero_grad()
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        assert len(adapters) >= 8 and all(parameter.grad is not None and parameter.grad.any() for parameter in adapters)
        with torch.no_grad():
            for parameter in adapters:
                parameter -= 1e-5 * parameter.grad
        losses.append(loss.item())
    assert losses[1] < losses[0]
    with torch.no_grad():
        before = tuned(ids).logits
        # float64 rounding: W x + B A x, or (W + B A) x.
        close(tuned.merge_and_unload()(ids).logits, before, 1e-9)


def test_a_trainer_takes_a_step(model: Any, tmp_path: Path) -> None:
    """transformers' own loop, with gradient checkpointing; what it saves loads again."""
    from transformers import Trainer, TrainingArguments

    tuned = here("fem_gla")
    rows = [{"input_ids": row, "labels": row} for row in tokens(4, 9)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        report_to=[],
        gradient_checkpointing=True,
        use_cpu=True,
    )
    before = tuned.lm_head.weight.detach().clone()
    trainer = Trainer(tuned, arguments, train_dataset=rows)
    assert trainer.train().training_loss > 0 and not torch.equal(tuned.lm_head.weight, before)
    tuned.save_pretrained(tmp_path / "saved")
    again = FemLMForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens(1, 5)).logits, tuned.eval()(tokens(1, 5)).logits)
