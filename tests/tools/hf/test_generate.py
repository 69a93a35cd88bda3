"""Stock transformers' ``generate`` with exported folders: every mixer, every strategy and cache, padding; and what is around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.hf.small import NAMES, PADDED, Exported, close, here, padded_batch, small, tokens
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


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("fem_softmax", "cem", "mamba2") else pytest.mark.slow) for name in NAMES]
)
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
