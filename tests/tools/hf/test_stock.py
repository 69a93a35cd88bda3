"""Our Transformer and transformers' Llama, Mistral, Qwen2 and Qwen3 as one model: equal logits,
weights that convert back bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.attention.shape import AttentionConfig
from fem_megatron.rope import Rope, RopeScaling
from fem_megatron.update import frequencies
from tests.tools.hf.checkpoints import STOCK_SIZES
from tests.tools.hf.small import VOCAB, Held, random_state, small, tokens, trained_logits
from tests.tools.refusals import Refused
from tools.hf.folder import json_object
from tools.hf.stock import StockError, exported, from_stock, model_of, stock_config
from tools.hf.weight_conversion import VOCABULARY, Converted

LENGTH = 40
BASE = small("transformer", make_vocab_size_divisible_by=64)
GROUPED = replace(BASE, num_query_groups=2)
LLAMA3 = RopeScaling("llama3", original_length=32)
ALL = AttentionConfig(qkv_bias=True, sliding_window=7, head_dim=12)
UNBIASED = replace(ALL, qkv_bias=False)
CASES = {
    "llama": (BASE, "Llama"),
    "grouped, tied": (
        replace(GROUPED, tie_embeddings=True, norm_eps=1e-5, rope_base=500000, init_std=0.03),
        "Llama",
    ),
    "one group": (replace(BASE, num_query_groups=1), "Llama"),
    "wide heads": (replace(BASE, attention=AttentionConfig(head_dim=16)), "Llama"),
    "linear": (replace(BASE, rope_scaling=RopeScaling("linear", 2.0)), "Llama"),
    "llama3": (replace(BASE, rope_scaling=LLAMA3), "Llama"),
    "yarn": (
        replace(BASE, rope_scaling=RopeScaling("yarn", 4.0, 10, beta_fast=2.0, beta_slow=0.25)),
        "Llama",
    ),
    "yarn, its factor": (
        replace(BASE, rope_scaling=RopeScaling("yarn", 4.0, 4096, attention_factor=1.3)),
        "Llama",
    ),
    "window": (replace(GROUPED, attention=AttentionConfig(sliding_window=7)), "Mistral"),
    # LlamaConfig refuses a number of heads that does not divide the width.
    "odd heads": (
        replace(BASE, hidden_size=36, num_attention_heads=8, attention=AttentionConfig(head_dim=6)),
        "Mistral",
    ),
    "biases": (replace(GROUPED, attention=AttentionConfig(qkv_bias=True)), "Qwen2"),
    "biases and all": (replace(GROUPED, attention=ALL, rope_scaling=LLAMA3), "Qwen2"),
    "normed": (replace(GROUPED, qk_norm=True, norm_eps=1e-3, tie_embeddings=True), "Qwen3"),
    "normed and all": (
        replace(
            GROUPED, qk_norm=True, attention=UNBIASED, rope_scaling=RopeScaling("yarn", 8.0, 16)
        ),
        "Qwen3",
    ),
}
# float32: the same operations in a different order, 1e-7 each. bfloat16: 8 bits per number;
# transformers also rounds the normalised x before it multiplies it by the weight.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


pytestmark = pytest.mark.usefixtures("one_process")


def stock_logits(
    config: PretrainedConfig,
    weights: dict[str, Tensor],
    ids: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    answer = stock.load_state_dict(weights, strict=False)
    assert not answer.unexpected_keys
    assert set(answer.missing_keys) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    stock.tie_weights()
    with torch.no_grad():
        return stock.to(dtype).eval()(ids).logits.double()


@pytest.mark.parametrize("name", CASES)
def test_it_is_transformers_own(name: str, tmp_path: Path) -> None:
    """Logits are equal; weights convert back bit for bit; the configuration survives a file."""
    model, family = CASES[name]
    # Every number is different, so that an exchange of two rows is detected.
    state = random_state(model, scale=0.15)
    ids = tokens(2, LENGTH)
    there = dict(exported(Held(state), model).items())
    for dtype, tolerance in TOLERANCES.items():
        wanted = trained_logits(model, state, ids, dtype)
        got = stock_logits(stock_config(model), there, ids, dtype)
        assert (got - wanted).norm() <= tolerance * wanted.norm()

    back = dict(Converted(Held(there), from_stock(model)).items())
    assert back.keys() == state.keys()
    for key, tensor in state.items():
        kept = VOCAB if key in VOCABULARY else len(tensor)
        assert torch.equal(back[key][:kept], tensor[:kept]) and not back[key][kept:].any(), key

    stock_config(
        model, dtype=torch.bfloat16, max_position_embeddings=64, eos_token_id=3
    ).save_pretrained(tmp_path)
    written = json_object(tmp_path / "config.json")
    assert (written["dtype"], written["max_position_embeddings"], written["eos_token_id"]) == (
        "bfloat16",
        64,
        3,
    )
    assert written["architectures"] == [f"{family}ForCausalLM"]
    assert written.get("bos_token_id") is None
    assert "auto_map" not in written
    assert model_of(written) == replace(
        model, make_vocab_size_divisible_by=ModelConfig().make_vocab_size_divisible_by
    )
    assert model_of(AutoConfig.from_pretrained(tmp_path).to_dict()) == model_of(written)


THEIRS = {
    "llama": LlamaConfig(
        **STOCK_SIZES,
        head_dim=6,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    ),
    "mistral": MistralConfig(**STOCK_SIZES, sliding_window=9, tie_word_embeddings=True),
    "mistral, no window": MistralConfig(**STOCK_SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**STOCK_SIZES),
    "qwen2, window": Qwen2Config(
        **STOCK_SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=0
    ),
    "qwen2, window of no layer": Qwen2Config(
        **STOCK_SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=2
    ),
    "qwen3": Qwen3Config(**STOCK_SIZES, head_dim=12),
    "qwen3, window": Qwen3Config(
        **STOCK_SIZES,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=0,
        tie_word_embeddings=True,
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_a_model_of_transformers_own_is_continued(name: str) -> None:
    """Weights as initialised by transformers, including biases, in the training code."""
    config = THEIRS[name]
    torch.manual_seed(2)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in stock.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    model = model_of(config.to_dict())
    weights = stock.state_dict()
    ids = tokens(2, LENGTH)
    wanted = stock_logits(config, weights, ids)
    state = dict(Converted(Held(weights), from_stock(model)).items())
    assert (trained_logits(model, state, ids) - wanted).norm() <= 2e-6 * wanted.norm()


OLD_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    **STOCK_SIZES,
    "max_position_embeddings": 96,
}
LLAMA_31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
READ_31 = RopeScaling("llama3", 8.0, 8192)
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("given", "base", "scaling"),
    [
        ({}, 10000, RopeScaling()),
        ({"rope_theta": 500000.0, "rope_scaling": None}, 500000, RopeScaling()),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000, RopeScaling("linear", 2.0)),
        (
            {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA_31}},
            500000,
            READ_31,
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA_31}},
            500000,
            READ_31,
        ),
        # Values that yarn may leave out: the length is that of the file, the factor follows from
        # mscale.
        ({"rope_scaling": YARN}, 10000, RopeScaling("yarn", 4.0, 96)),
        (
            {
                "rope_scaling": YARN
                | {"original_max_position_embeddings": 32, "mscale": 2.0, "mscale_all_dim": 1.0}
            },
            10000,
            RopeScaling(
                "yarn",
                4.0,
                32,
                attention_factor=(0.2 * math.log(4.0) + 1) / (0.1 * math.log(4.0) + 1),
            ),
        ),
    ],
)
def test_both_spellings_of_rope_are_read(
    given: dict[str, Any], base: int, scaling: RopeScaling
) -> None:
    """Files of transformers 4 contain rope_theta and rope_scaling, newer ones rope_parameters."""
    model = model_of({**OLD_LLAMA, **given})
    assert (model.rope_base, model.rope_scaling) == (base, scaling)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_frequencies_of_a_real_size_are_transformers_own(kind: str) -> None:
    """Llama 3.1's: heads of 128, base 500000; low, high and medium frequencies."""
    model = replace(
        BASE,
        hidden_size=4096,
        num_attention_heads=32,
        rope_base=500000,
        rope_scaling=RopeScaling(kind, 8.0),
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[kind](
        stock_config(model, max_position_embeddings=131072), torch.device("cpu")
    )
    plain = 1.0 / (500000 ** (torch.arange(0, 128, 2) / 128))
    rope = Rope.of(model)
    assert rope is not None
    assert rope.factor == pytest.approx(factor, rel=1e-15)
    assert (factor > 1) == (kind == "yarn")
    got = frequencies(rope, 128)
    # A few times the resolution of float32.
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0.0)
    changed = (got / plain - 1).abs() > 1e-6
    if kind == "linear":
        assert changed.all()
    else:
        assert 0 < int(changed.sum()) < len(got)


FOREIGN: list[dict[str, Any]] = [
    {"model_type": "gpt2"},
    {"model_type": None},
    {"architectures": ["LlamaForSequenceClassification"]},
    {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        }
    },
    {"rope_theta": 10000.5},
    {"partial_rotary_factor": 0.5},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"hidden_act": "gelu"},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"num_local_experts": 8},
    {"attn_logit_softcapping": 50.0},
    {"use_qk_norm": True},
    {"num_key_value_heads": 3},
    {"head_dim": 5},
    {"num_attention_heads": 0},
    {"initializer_range": 0.0},
    {
        "model_type": "qwen2",
        "architectures": None,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    {"model_type": "qwen3", "architectures": None, "attention_bias": True},
    {"model_type": "mistral", "architectures": None, "layer_types": ["full_attention"] * 2},
]


def test_what_is_not_exactly_it_is_refused_in_one_line(raised: Refused) -> None:
    for given in FOREIGN:
        raised(model_of, {**OLD_LLAMA, **given}, error=StockError)


def test_what_transformers_has_no_class_for_is_reported(raised: Refused) -> None:
    changes: list[dict[str, Any]] = [
        {"mixer": "fem_softmax"},
        {"pattern": ("transformer", "fem_gla")},
        {"mlp": "cem"},
        {"mlp": "none"},
    ]
    changes += [{"qk_norm": True, "attention": AttentionConfig(qkv_bias=True)}]
    for change in [*changes, {"recurrence": 2}, {"causal": False}, {"rope": False}]:
        raised(stock_config, replace(BASE, **change), error=StockError)
