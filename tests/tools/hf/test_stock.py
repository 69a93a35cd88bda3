"""Our Transformer and transformers' Llama, Mistral and Qwen2 as one model: the same logits, and weights that come back to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.attention.shape import AttentionConfig, AttentionShape
from fem_megatron.update import scaled
from pretrain.plan.run_plan import parameter_shapes
from tests.one_process import megatron_of_one_process
from tools.hf.recipes import VOCABULARY, Recipes
from tools.hf.stock import StockError, from_stock, model_of, stock_config, to_stock, why_not_stock

VOCAB, LENGTH = 50, 40
BASE = ModelConfig(
    mixer="transformer",
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    ffn_hidden_size=48,
    vocab_size=VOCAB,
    make_vocab_size_divisible_by=64,
)
LLAMA3 = AttentionConfig(
    rope_scaling="llama3", rope_factor=8.0, rope_low_freq_factor=1.0, rope_high_freq_factor=4.0, rope_original_length=32
)
CASES = {
    "llama": (BASE, "LlamaForCausalLM"),
    "grouped, tied": (
        replace(BASE, num_query_groups=2, tie_embeddings=True, norm_eps=1e-5, rope_base=500000, init_std=0.03),
        "LlamaForCausalLM",
    ),
    "one group": (replace(BASE, num_query_groups=1), "LlamaForCausalLM"),
    "wide heads": (replace(BASE, attention=AttentionConfig(head_dim=16)), "LlamaForCausalLM"),
    "linear": (replace(BASE, attention=AttentionConfig(rope_scaling="linear", rope_factor=2.0)), "LlamaForCausalLM"),
    "llama3": (replace(BASE, attention=LLAMA3), "LlamaForCausalLM"),
    "window": (replace(BASE, num_query_groups=2, attention=AttentionConfig(sliding_window=7)), "MistralForCausalLM"),
    # LlamaConfig refuses heads that do not divide the width.
    "odd heads": (replace(BASE, hidden_size=36, num_attention_heads=8, attention=AttentionConfig(head_dim=6)), "MistralForCausalLM"),
    "biases": (replace(BASE, num_query_groups=2, attention=AttentionConfig(qkv_bias=True)), "Qwen2ForCausalLM"),
    "biases and all": (
        replace(BASE, num_query_groups=2, attention=replace(LLAMA3, qkv_bias=True, sliding_window=7, head_dim=12)),
        "Qwen2ForCausalLM",
    ),
}
EVERY_CASE = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with megatron_of_one_process():
        yield


def cook(recipes: Recipes, source: dict[str, Tensor]) -> dict[str, Tensor]:
    made = {name: recipe.make([source[key] for key in recipe.sources]) for name, recipe in recipes.items()}
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {name: recipe.shape for name, recipe in recipes.items()}
    return made


def random_state(model: ModelConfig) -> dict[str, Tensor]:
    """Every number another, so that no two rows can change places unseen."""
    generator = torch.Generator().manual_seed(0)
    return {name: 0.15 * torch.randn(shape, generator=generator) + ("norm" in name) for name, shape in parameter_shapes(model).items()}


def trained_logits(model: ModelConfig, state: dict[str, Tensor], ids: Tensor, dtype: torch.dtype) -> Tensor:
    """What the training code computes, float64 [b, t, VOCAB]."""
    from fem_megatron.megatron.model import Layout, build

    (chunk,) = build(model, Layout(params_dtype=dtype), ids.shape[1], seed=0)
    answer = chunk.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()}, strict=False)
    assert not answer.unexpected_keys and all(key.endswith("_extra_state") or key == "output_layer.weight" for key in answer.missing_keys)
    with torch.no_grad():
        return chunk(ids, torch.arange(ids.shape[1]).expand_as(ids), None)[..., : model.vocab_size].double()


def stock_logits(config: PretrainedConfig, weights: dict[str, Tensor], ids: Tensor, dtype: torch.dtype) -> Tensor:
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    answer = stock.load_state_dict(weights, strict=False)
    assert not answer.unexpected_keys and set(answer.missing_keys) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    stock.tie_weights()
    with torch.no_grad():
        return stock.to(dtype).eval()(ids).logits.double()


def tokens(vocabulary: int = VOCAB) -> Tensor:
    return torch.randint(vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(1))


# float32: the same operations in another order, 1e-7 each. bfloat16:
# 8 bits a number; transformers also rounds the normalised x before its weight.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@EVERY_CASE
def test_logits_are_transformers_own(name: str, dtype: torch.dtype) -> None:
    model, _ = CASES[name]
    state, ids = random_state(model), tokens()
    wanted = trained_logits(model, state, ids, dtype)
    got = stock_logits(stock_config(model), cook(to_stock(model), state), ids, dtype)
    assert (got - wanted).norm() <= TOLERANCES[dtype] * wanted.norm()


@EVERY_CASE
def test_weights_come_back_to_the_bit(name: str) -> None:
    model, _ = CASES[name]
    state = random_state(model)
    there = cook(to_stock(model), state)
    back = cook(from_stock(model), there)
    assert back.keys() == state.keys()
    for key, tensor in state.items():
        kept = VOCAB if key in VOCABULARY else len(tensor)
        assert torch.equal(back[key][:kept], tensor[:kept]) and not back[key][kept:].any(), key
    again = cook(to_stock(model), back)
    assert there.keys() == again.keys() and all(torch.equal(there[key], again[key]) for key in there)


@EVERY_CASE
def test_configurations_come_back(name: str, tmp_path: Any) -> None:
    """Through a file, as transformers writes and reads it."""
    model, architecture = CASES[name]
    stock_config(model, dtype=torch.bfloat16, max_position_embeddings=64, eos_token_id=3).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["dtype"], written["max_position_embeddings"], written["eos_token_id"]) == ("bfloat16", 64, 3)
    assert written["architectures"] == [architecture] and written.get("bos_token_id") is None and "auto_map" not in written
    assert model_of(written) == replace(model, make_vocab_size_divisible_by=ModelConfig().make_vocab_size_divisible_by)
    assert model_of(AutoConfig.from_pretrained(tmp_path).to_dict()) == model_of(written)


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, head_dim=6, rms_norm_eps=1e-4, rope_parameters={"rope_type": "default", "rope_theta": 300.0}),
        MistralConfig(**SMALL, sliding_window=9, tie_word_embeddings=True),
        MistralConfig(**SMALL, sliding_window=None),
        Qwen2Config(**SMALL),
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=0),
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=2),
    ],
    ids=lambda config: f"{config.model_type} {config.sliding_window if hasattr(config, 'sliding_window') else ''}",
)
def test_a_model_of_transformers_own_is_continued(config: PretrainedConfig) -> None:
    """Weights as transformers draws them, biases too, into the training code."""
    torch.manual_seed(2)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in stock.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    model = model_of(config.to_dict())
    weights, ids = stock.state_dict(), tokens()
    got = trained_logits(model, cook(from_stock(model), weights), ids, torch.float32)
    wanted = stock_logits(config, weights, ids, torch.float32)
    assert (got - wanted).norm() <= TOLERANCES[torch.float32] * wanted.norm()


OLD_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL, "max_position_embeddings": 96}
LLAMA_31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("given", "base", "attention"),
    [
        ({}, 10000, AttentionConfig()),
        ({"rope_theta": 500000.0, "rope_scaling": None}, 500000, AttentionConfig()),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000, AttentionConfig(rope_scaling="linear", rope_factor=2.0)),
        (
            {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA_31}},
            500000,
            AttentionConfig(rope_scaling="llama3", rope_factor=8.0, rope_original_length=8192),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA_31}},
            500000,
            AttentionConfig(rope_scaling="llama3", rope_factor=8.0, rope_original_length=8192),
        ),
    ],
)
def test_both_spellings_of_rope_are_read(given: dict[str, Any], base: int, attention: AttentionConfig) -> None:
    """rope_theta beside rope_scaling, as files of transformers 4 have it, and rope_parameters."""
    model = model_of({**OLD_LLAMA, **given})
    assert (model.rope_base, model.attention) == (base, attention)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_frequencies_of_a_real_size_are_transformers_own(kind: str) -> None:
    """Llama 3.1's: heads of 128, base 500000; its slow, its fast and its medium waves."""
    attention = AttentionConfig(rope_scaling=kind, rope_factor=8.0)
    model = replace(BASE, hidden_size=4096, num_attention_heads=32, rope_base=500000, attention=attention)
    wanted, factor = ROPE_INIT_FUNCTIONS[kind](stock_config(model, max_position_embeddings=131072), torch.device("cpu"))
    plain = 1.0 / (500000 ** (torch.arange(0, 128, 2) / 128))
    shape = model.blocks()[0].mixer
    assert factor == 1.0 and isinstance(shape, AttentionShape) and shape.scaling is not None
    got = scaled(plain, shape.scaling)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0.0)  # float32's resolution, several times
    changed = (got / plain - 1).abs() > 1e-6
    assert changed.all() if kind == "linear" else 0 < int(changed.sum()) < len(got)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": None}, "model_type is None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}}, "rope_type is 'yarn'"),
        ({"rope_theta": 10000.5}, "rope_theta is 10000.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"num_key_value_heads": 3}, "num_query_groups=3"),
        ({"head_dim": 5}, "even rotary dimension"),
        ({"model_type": "qwen2", "architectures": None, "use_sliding_window": True, "max_window_layers": 1}, "layer_types mixes"),
        ({"model_type": "mistral", "architectures": None, "layer_types": ["full_attention"] * 2}, "layer_types"),
    ],
)
def test_what_is_not_exactly_it_is_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(StockError) as error:
        model_of({**OLD_LLAMA, **given})
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer": "fem_softmax"}, "fem_softmax"),
        ({"pattern": ("transformer", "fem_gla")}, "fem_gla"),
        ({"mlp": "cem"}, "model.mlp=cem"),
        ({"mlp": "none"}, "model.mlp=none"),
        ({"recurrence": 2}, "model.recurrence=2"),
        ({"causal": False}, "model.causal"),
        ({"rope": False}, "model.rope"),
    ],
)
def test_what_transformers_has_no_class_for_is_said(changes: dict[str, Any], message: str) -> None:
    model = replace(BASE, **changes)
    reason = why_not_stock(model)
    assert reason is not None and message in reason
    with pytest.raises(StockError, match="no class of transformers' own"):
        stock_config(model)
