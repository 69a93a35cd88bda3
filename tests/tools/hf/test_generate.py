"""Tests of stock transformers' ``generate`` with exported folders: every mixer, strategy and cache,
padding, and related tools.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedTokenizerFast,
    StaticCache,
    Trainer,
    TrainingArguments,
)

from tests.tools.hf.readers import write_reader
from tests.tools.hf.small import (
    CACHES,
    GREEDY,
    LORA,
    PADDED,
    Exports,
    close,
    here,
    padded_batch,
    slow_but,
    small,
    tokens,
)
from tests.tools.refusals import Refused
from tools.hf.configuration_fem import FemLMConfig
from tools.hf.modeling_fem import FemCache, FemLMForCausalLM, FemStaticCache

FIVE: dict[str, Any] = GREEDY | {"max_new_tokens": 5}
# Beam search with sampling: beams are reordered, and two of the three beams of each row are
# returned.
BEAMS: dict[str, Any] = {
    "max_new_tokens": 4,
    "do_sample": True,
    "num_beams": 3,
    "num_return_sequences": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return here("hybrid", torch.float64)


def generate(model: Any, ids: Tensor, **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(ids, **options)


# Every kind of cache: keys, windows of keys, states, both, caches of recurrent blocks,
# transformers' own.
KINDS = (
    "fem_softmax fem_gla fem_mamba cem mha2nd1st hyperset hybrid mamba2 gated_deltanet transformer"
).split()


@pytest.mark.parametrize("name", slow_but(*KINDS))
def test_every_strategy_with_and_without_cache(exported: Exports, name: str) -> None:
    """A left-padded batch gives equal tokens with each cache and without one, with the prompt at
    once or in chunks, and for a single row.
    """
    given = exported(name).model
    ids, mask = padded_batch()
    new = tokens(3, 4, seed=2)
    drawn = generate(given, ids, attention_mask=mask, **BEAMS)
    greedy = generate(given, ids, attention_mask=mask, **FIVE)
    assert drawn.shape == (6, 12) and not torch.equal(drawn[::2], greedy[:, :12])
    for other in CACHES[1:]:
        assert torch.equal(drawn, generate(given, ids, attention_mask=mask, **BEAMS, **other)), (
            other
        )
    pieces: dict[str, Any] = {"prefill_chunk_size": 3}
    for other in ({"use_cache": False}, pieces, pieces | {"cache_implementation": "static"}):
        assert torch.equal(greedy, generate(given, ids, attention_mask=mask, **FIVE, **other)), (
            other
        )
    with torch.no_grad():
        batch = given(ids, attention_mask=mask, use_cache=True)
        longer = torch.cat((mask, torch.ones_like(new)), dim=1)
        after = given(new, attention_mask=longer, past_key_values=batch.past_key_values)
        for row, length in enumerate(PADDED):
            text = torch.cat((ids[row, 8 - length :], new[row]))
            alone = given(text[None], use_cache=False).logits[0]
            in_batch = torch.cat((batch.logits[row, 8 - length :], after.logits[row]))
            close(in_batch, alone, 1e-5)  # float32 rounding


@pytest.mark.parametrize(
    "name", ["fem_softmax", "fem_gla", "cem", "hyperset", "hybrid", "transformer"]
)
def test_what_generate_returns_next_to_the_tokens(exported: Exports, name: str) -> None:
    """Scores, hidden states and the cache have the documented shapes, and equal values without a
    cache; Llama is the control.
    """
    given = exported(name).model
    ids, mask = padded_batch()
    new = 4
    rows = len(ids)
    report = ("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states")
    common: dict[str, Any] = dict.fromkeys(report, True) | {
        "attention_mask": mask,
        "max_new_tokens": new,
        "min_new_tokens": new,
        "pad_token_id": 0,
    }
    for beams, drawn in ((1, False), (1, True), (2, False)):
        found = [
            generate(given, ids, num_beams=beams, do_sample=drawn, use_cache=use, **common)
            for use in (True, False)
        ]
        for made, cached in zip(found, (True, False), strict=True):
            assert torch.equal(made.sequences[:, :8], ids)
            assert made.sequences.shape == (rows, 8 + new)
            assert len(made.scores) == len(made.logits) == len(made.hidden_states) == new
            assert all(
                step.shape == (rows * beams, given.config.vocab_size)
                for step in (*made.scores, *made.logits)
            )
            for step, states in enumerate(made.hidden_states):
                width = 1 if cached and step else 8 + (0 if cached else step)
                assert [tuple(state.shape) for state in states] == [(rows * beams, width, 32)] * 3
                # float32 rounding: one step of decoding, or all tokens at once.
                close(states[-1][:, -1], found[1].hidden_states[step][-1][:, -1], 1e-5)
                close(given.lm_head(states[-1][:, -1]), made.logits[step], 1e-5)
            assert (made.past_key_values is not None) == cached
            assert not cached or made.past_key_values.get_seq_length() == 8 + new - 1
            indices = made.beam_indices if beams > 1 else None
            gained = given.compute_transition_scores(
                made.sequences, made.scores, indices, normalize_logits=beams == 1
            )
            if beams > 1:  # the mean score of the tokens, because of length_penalty=1
                close(gained.sum(1) / new, made.sequences_scores, 1e-5)
            elif not drawn:
                assert torch.equal(
                    torch.stack(made.logits, dim=1).argmax(-1), made.sequences[:, 8:]
                )


def test_a_conversation_in_one_cache(model: Any) -> None:
    """A returned cache continues turn after turn, with the user's tokens in between, as if all had
    been one text.
    """
    first, second = tokens(2, 5), tokens(2, 3, seed=2)
    for cache in (
        model.new_cache(),
        model.new_cache(40),
        FemCache(model.config),
        FemStaticCache(model.config, 18),
    ):
        output = model.generate(first, past_key_values=cache, **FIVE)
        text = torch.cat((output, second), dim=1)
        answer = model.generate(text, past_key_values=cache, **FIVE)
        assert torch.equal(answer, model.generate(text, use_cache=False, **FIVE))
        assert cache.get_seq_length() == 5 + 5 + 3 + 5 - 1
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(output, model.generate(first, past_key_values=cache, **FIVE))


def test_prompts_as_embeddings(model: Any) -> None:
    ids, mask = padded_batch()
    prompt = model.get_input_embeddings()(ids).detach()
    for other in (*CACHES, {"num_beams": 2}):
        found = model.generate(inputs_embeds=prompt, attention_mask=mask, **FIVE, **other)
        assert torch.equal(found, model.generate(ids, attention_mask=mask, **FIVE, **other)[:, 8:])


def test_right_padding_is_none_of_the_text(model: Any) -> None:
    """With each cache, and without one as in transformers 4, positions are counted from the mask at
    every step.
    """
    ids, mask = padded_batch()
    mask = mask.flip(1)
    text, seen = ids, mask
    for _ in range(FIVE["max_new_tokens"]):
        positions = (seen.cumsum(1) - 1).masked_fill(seen == 0, 1)
        with torch.no_grad():
            new = (
                model(text, attention_mask=seen, position_ids=positions, use_cache=False)
                .logits[:, -1:]
                .argmax(-1)
            )
        text = torch.cat((text, new), dim=1)
        seen = torch.cat((seen, torch.ones_like(new)), dim=1)
    for other in CACHES:
        assert torch.equal(text, model.generate(ids, attention_mask=mask, **FIVE, **other)), other


def test_generation_stops_at_a_string(model: Any, tmp_path: Path) -> None:
    """transformers passes the tokenizer it needs for it through ``forward``; a misspelled argument
    is refused.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(write_reader(tmp_path, "regex", None))
    ids = tokens(1, 4)
    full = model.generate(ids, **FIVE)
    words = tokenizer.convert_ids_to_tokens(full[0, 4:])
    end = 4 + words.index(words[2]) + 1
    assert len(words[2]) == 1 and end < full.shape[1]
    for other in CACHES:
        assert torch.equal(
            model.generate(ids, stop_strings=[words[2]], tokenizer=tokenizer, **FIVE, **other),
            full[:, :end],
        ), other
    with pytest.raises(ValueError, match="not used by the model.*max_new_token'"):
        model.generate(ids, max_new_token=5)


def test_refused_ways_of_generating(model: Any, raised: Refused) -> None:
    """One line each: methods that a state does not support, other caches, a cache with zero or too
    many positions.
    """
    ids = tokens(1, 4)
    long = FemLMForCausalLM(FemLMConfig(small("mha2nd").__dict__))
    for options in (
        {"cache_implementation": "quantized"},
        {"cache_implementation": "static", "past_key_values": model.new_cache()},
        {"past_key_values": DynamicCache()},
        {"past_key_values": StaticCache(model.config, max_cache_len=9)},
        {"past_key_values": model.new_cache(2)},
    ):
        raised(model.generate, ids, error=ValueError, **FIVE | options)
    for ahead in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(
            ValueError, match="assisted generation|cannot return to an earlier step"
        ):
            model.generate(ids, **FIVE, **ahead)
    raised(model.new_cache, 0, error=ValueError)
    raised(long.new_cache, 5000, error=ValueError)
    raised(model.new_cache().__getitem__, 0, error=TypeError)
    raised(model.generate_batch, [[1, 2]], error=ValueError)
    raised(model.init_continuous_batching, error=ValueError)
    with pytest.raises(ValueError, match="continuous batching needs"):
        model.generate(ids, cache_implementation="paged")
    for method, given in (("crop", (-1,)), ("offload", ()), ("update", (None, None))):
        raised(getattr(model.new_cache().layers[0], method), *given, error=ValueError)


# --- uses of the model besides generate -----------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", slow_but("fem_softmax", "cem", "mamba2"))
def test_fine_tuning_by_low_rank_adapters(exported: Exports, name: str) -> None:
    """With the options of the model card: a step lowers the loss, every adapter has an effect, and
    merging does not change the model.
    """
    if name == "energy_transformer":
        pytest.skip("it has no torch.nn.Linear: every matrix is applied in both directions")
    ids, losses = tokens(2, 9), []
    model = here(name, torch.float64)
    snippet = LORA.search((exported(name).folder / "README.md").read_text())
    options = eval(f"dict({snippet[1]})") if snippet else {"target_modules": "all-linear"}
    if snippet:
        gated = hasattr(model.model.layers[0].mlp, "gate_up")
        assert ("target_parameters" in options) == gated
    settings = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    torch.manual_seed(0)  # draws the adapters
    tuned: Any = get_peft_model(model, settings)
    adapters = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    for _ in range(2):
        tuned.zero_grad()
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        assert len(adapters) >= 8
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in adapters)
        with torch.no_grad():  # a step so short that the loss decreases by 0.001 for any gradient
            square = sum(parameter.grad.square().sum() for parameter in adapters)
            for parameter in adapters:
                parameter -= 1e-3 / square * parameter.grad
        losses.append(loss.item())
    assert losses[1] < losses[0]
    with torch.no_grad():
        before = tuned(ids).logits
        # float64 rounding: W x + B A x, or (W + B A) x.
        close(tuned.merge_and_unload()(ids).logits, before, 1e-9)


def test_a_trainer_takes_a_step(tmp_path: Path) -> None:
    """transformers' own loop, with gradient checkpointing; its saved model loads again."""
    tuned = here("fem_gla")
    rows = [{"input_ids": row, "labels": row} for row in tokens(4, 9)]
    more: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "report_to": [],
        "use_cpu": True,
    }
    arguments = TrainingArguments(str(tmp_path), max_steps=1, gradient_checkpointing=True, **more)
    before = tuned.lm_head.weight.detach().clone()
    assert Trainer(tuned, arguments, train_dataset=rows).train().training_loss > 0
    assert not torch.equal(tuned.lm_head.weight, before)
    tuned.save_pretrained(tmp_path / "saved")
    again = FemLMForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens(1, 5)).logits, tuned.eval()(tokens(1, 5)).logits)


def test_the_trainer_smooths_the_labels_of_the_next_tokens(
    exported: Exports, tmp_path: Path
) -> None:
    """transformers shifts labels for known class names; it must do so for ours as for Llama, with
    and without adapters.
    """
    ids = tokens(2, 9)
    labels = ids.masked_fill(torch.arange(9) < 3, -100)
    adapters = LoraConfig(
        r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    arguments = TrainingArguments(
        str(tmp_path), label_smoothing_factor=0.2, report_to=[], use_cpu=True
    )
    torch.manual_seed(0)  # draws the adapters
    for given in (
        here("fem_gla"),
        get_peft_model(here("cem"), adapters),
        exported("transformer").model,
    ):
        with torch.no_grad():
            found: Any = Trainer(given, arguments).compute_loss(
                given, {"input_ids": ids, "labels": labels.clone()}
            )
            lost = -given(ids).logits[:, 2:-1].log_softmax(-1)
        wanted = 0.8 * lost.gather(2, ids[:, 3:, None]).mean() + 0.2 * lost.mean()
        # float32 rounding.
        assert found.item() == pytest.approx(wanted.item(), rel=1e-5), type(given)
