"""Correspondence of our Transformer with transformers' Llama, Mistral, Qwen2 and Qwen3:
configurations and weights in both directions.

The conversion is exact; models that one side cannot represent exactly are refused. Names of the
tensors (checkpoint, then transformers), where layer = decoder.layers.N and theirs = model.layers.N:

    embedding.word_embeddings.weight   model.embed_tokens.weight
    layer.mixer.norm.weight            theirs.input_layernorm.weight
    layer.mixer.in_proj.*              theirs.self_attn.{q,k,v}_proj.*
    layer.mixer.{q,k}_norm.weight      theirs.self_attn.{q,k}_norm.weight (Qwen3)
    layer.mixer.out_proj               theirs.self_attn.o_proj
    layer.mlp.norm.weight              theirs.post_attention_layernorm.weight
    layer.mlp.gate_up                  theirs.mlp.{gate,up}_proj.weight, concatenated
    layer.mlp.down                     theirs.mlp.down_proj
    decoder.final_layernorm.weight     model.norm.weight
    output_layer.weight                lm_head.weight, absent if tied

in_proj is packed by groups of heads that share one key and value: for each group, the rows of its
queries, then of k, then of v. RoPE pairs the same channels on both sides, so no row moves within a
head.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from fem_common.config import build, plain
from fem_common.errors import ConfigError
from fem_common.text import one_line
from fem_megatron.catalogue import mixer_names
from fem_megatron.config import ModelConfig
from fem_megatron.mixers.attention.shape import AttentionConfig, AttentionShape

from .configuration_fem import named_rope, read_rope
from .tokenizer import SPECIAL_IDS
from .weight_conversion import Conversion, Conversions, Converted, Tensors, from_fem, to_fem

FAMILIES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
ARCHITECTURES = {family: f"{family.capitalize()}ForCausalLM" for family in FAMILIES}
QWEN = ("qwen2", "qwen3")  # families in which layer_types sets the layers that use the window
QKV = ("q", "k", "v")
GATE_UP = ".mlp.gate_up"

# Keys of config.json that, if set, change the computation of the class.
FOREIGN = (
    "quantization_config num_local_experts num_experts n_routed_experts attn_logit_softcapping"
    " final_logit_softcapping use_qk_norm qk_norm qk_layernorm mlp_bias partial_rotary_factor"
    " logit_scale embedding_multiplier residual_multiplier attention_multiplier"
).split()


class StockError(ValueError):
    """Error for a model without an exact counterpart; the message is one line."""


def why_not_stock(model: ModelConfig) -> str | None:
    """Return the reason why transformers has no class for the model, or None if it has one."""
    others = [name for name in mixer_names(model) if name != "transformer"]
    if others:
        return f"the mixer {others[0]} is not the plain Transformer"
    if model.mlp not in (None, "swiglu"):
        return f"model.mlp={model.mlp} is not SwiGLU, the MLP of a plain Transformer"
    if model.recurrence != 1:
        return f"model.recurrence={model.recurrence} applies every block more than once"
    if model.mtp_depth:
        return f"model.mtp_depth={model.mtp_depth} adds modules of multi-token prediction"
    if not model.causal:
        return "model.causal=false: the model is not causal"
    if not model.rope:
        return "model.rope=false: the model has no rotary position embedding"
    if model.qk_norm and model.attention.qkv_bias:
        return (
            "model.qk_norm and model.attention.qkv_bias: Qwen3, the class with norms of q and k,"
            " would also have a bias on o_proj"
        )
    if AttentionShape.of(model).scale is None:
        return None
    return (
        f"model.mup.base_head_size={model.mup.base_head_size} gives the scores a scale other than 1"
        " / sqrt(d)"
    )


def stock_config(
    model: ModelConfig, *, dtype: torch.dtype | None = None, **settings: Any
) -> PretrainedConfig:
    """Return the configuration of transformers' class for ``model``.

    The class is Qwen3 with qk_norm, Qwen2 with biases, Mistral with a window, else Llama.

    dtype: None: the default of the class. settings: special tokens, which are None by default, and
    max_position_embeddings, the context length of the training, for information.

    Raises StockError if no class matches.
    """
    reason = why_not_stock(model)
    if reason is not None:
        raise StockError(f"transformers has no class for this model: {reason}")
    shape, family = AttentionShape.of(model), _family(model)
    optional: dict[str, Any] = {} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}
    if family != "qwen2" or shape.head * shape.heads != model.hidden_size:
        optional["head_dim"] = shape.head
    if family == "mistral":
        optional["sliding_window"] = shape.window
    elif family in QWEN:
        optional |= {
            "use_sliding_window": shape.window is not None,
            "sliding_window": shape.window,
            "max_window_layers": 0,
        }
    build: Any = FAMILIES[family]
    config: PretrainedConfig = build(
        architectures=[ARCHITECTURES[family]],
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        hidden_act="silu",
        initializer_range=model.init_std,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        rope_parameters=named_rope(model),
        **(dict.fromkeys(SPECIAL_IDS) | optional | settings),
    )
    return config


def exported(source: Tensors, model: ModelConfig) -> Converted:
    """Return a checkpoint's tensors with the names and shapes that its export has."""
    return Converted(source, to_stock(model) if why_not_stock(model) is None else to_fem(model))


def to_stock(model: ModelConfig) -> Conversions:
    """Return name in transformers' class -> conversion from a checkpoint.

    Rows that pad the vocabulary are dropped.
    """
    conversions: Conversions = {}
    attention = AttentionShape.of(model)
    for name, conversion in to_fem(model).items():
        place, _, leaf = name.rpartition(".mixer.in_proj.")
        if place:
            for index, part in enumerate(QKV):
                rows = (attention.heads if part == "q" else attention.groups) * attention.head
                conversions[f"{place}.self_attn.{part}_proj.{leaf}"] = Conversion(
                    conversion.sources,
                    (rows, *conversion.shape[1:]),
                    _unpacking(attention, index),
                )
        elif name.endswith(GATE_UP):
            for index, part in enumerate(("gate", "up")):
                conversions[f"{name.removesuffix('gate_up')}{part}_proj.weight"] = Conversion(
                    conversion.sources, conversion.shape[1:], _element(index)
                )
        else:
            conversions[_stock_name(name)] = conversion
    return conversions


def from_stock(model: ModelConfig) -> Conversions:
    """Return name in the checkpoint -> conversion from a stock folder.

    This is the exact inverse of ``to_stock``; rows that pad the vocabulary are zero.
    """
    conversions: Conversions = {}
    for name, conversion in from_fem(model).items():
        (theirs,), shape = conversion.sources, conversion.shape
        place, _, leaf = theirs.rpartition(".mixer.in_proj.")
        if place:
            sources = tuple(f"{place}.self_attn.{part}_proj.{leaf}" for part in QKV)
            conversions[name] = Conversion(sources, shape, _packing(AttentionShape.of(model)))
        elif theirs.endswith(GATE_UP):
            stem = theirs.removesuffix("gate_up")
            sources = (f"{stem}gate_proj.weight", f"{stem}up_proj.weight")
            conversions[name] = Conversion(sources, shape, torch.stack)
        else:
            conversions[name] = replace(conversion, sources=(_stock_name(theirs),))
    return conversions


def read_stock(config: dict[str, Any]) -> Any:
    """Return the content of a config.json as a configuration object of transformers.

    Missing keys have the defaults of the class.

    Raises:
        StockError: the model is of another family, or has settings that the class does not
        implement.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise StockError(
            f"config.json: model_type is {family!r}; a Transformer can be started from"
            f" {', '.join(FAMILIES)}"
        )
    _refuse_foreign(config, family)
    try:
        return FAMILIES[family].from_dict(deepcopy(config))
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ZeroDivisionError,
    ) as error:
        raise StockError(
            f"config.json is not one of {FAMILIES[family].__name__}: {one_line(error, 120)}"
        ) from None


def model_of(config: dict[str, Any]) -> ModelConfig:
    """Return the ModelConfig of the model that a stock config.json describes.

    Our Transformer then computes exactly what transformers' class computes. Missing keys have the
    defaults of the class in the installed transformers. The vocabulary is not padded.

    Raises:
        StockError: another family, or a setting that our Transformer does not support.
    """
    stock = read_stock(config)
    family = stock.model_type
    if stock.hidden_act not in ("silu", "swish"):
        raise StockError(
            f"config.json: hidden_act is {stock.hidden_act!r}; only silu (SwiGLU) is supported"
        )
    heads, groups = stock.num_attention_heads, stock.num_key_value_heads
    head = getattr(stock, "head_dim", None) or stock.hidden_size // heads
    model = ModelConfig(
        mixer="transformer",
        qk_norm=family == "qwen3",
        hidden_size=stock.hidden_size,
        num_layers=stock.num_hidden_layers,
        num_attention_heads=heads,
        num_query_groups=None if groups == heads else groups,
        ffn_hidden_size=stock.intermediate_size,
        vocab_size=stock.vocab_size,
        tie_embeddings=bool(stock.tie_word_embeddings),
        **_rope_of(stock),
        norm_eps=stock.rms_norm_eps,
        init_std=stock.initializer_range,
        attention=AttentionConfig(
            head_dim=None if head * heads == stock.hidden_size else head,
            qkv_bias=family == "qwen2",
            sliding_window=_window_of(stock, family),
        ),
    )
    try:
        model = build(ModelConfig, plain(model), "config.json")  # checks the ranges of the fields
        model.blocks()
    except ConfigError as error:
        raise StockError(str(error)) from None
    except ValueError as error:
        raise StockError(f"config.json: {error}") from None
    return model


# --- configurations -------------------------------------------------------------------------------


def _family(model: ModelConfig) -> str:
    if model.qk_norm or model.attention.qkv_bias:
        return "qwen3" if model.qk_norm else "qwen2"
    # Only LlamaConfig requires that the number of heads divides the width. Mistral without a window
    # computes the same.
    if model.attention.sliding_window is not None:
        return "mistral"
    return "mistral" if model.hidden_size % model.num_attention_heads else "llama"


def _rope_of(stock: Any) -> dict[str, Any]:
    """Return the RoPE fields of a ModelConfig from a configuration object of transformers."""
    try:
        return read_rope(stock.rope_parameters, stock.max_position_embeddings)
    except ValueError as error:
        raise StockError(f"config.json: {error}") from None


def _window_of(stock: Any, family: str) -> int | None:
    window: int | None = None if family == "llama" else stock.sliding_window
    kinds = set(getattr(stock, "layer_types", None) or [])
    if len(kinds) > 1:
        raise StockError(
            f"config.json: layer_types mixes {' and '.join(sorted(kinds))}; only models with the"
            " same window in all layers are supported"
        )
    if kinds - {"full_attention", "sliding_attention"}:
        raise StockError(f"config.json: layer_types has {kinds.pop()}, which is not supported")
    if family in QWEN:
        return window if kinds == {"sliding_attention"} else None
    if kinds and kinds != {"full_attention" if window is None else "sliding_attention"}:
        raise StockError(
            f"config.json: layer_types is {kinds.pop()}, and sliding_window is {window}: they"
            " contradict each other"
        )
    return window


def _refuse_foreign(config: dict[str, Any], family: str) -> None:
    """Raise StockError for settings that the class of this family or our Transformer does not
    compute exactly.
    """
    architectures = config.get("architectures") or [ARCHITECTURES[family]]
    if ARCHITECTURES[family] not in architectures:
        raise StockError(
            f"config.json: architectures is {architectures[0]}; a Transformer can be started from"
            f" {ARCHITECTURES[family]}"
        )
    if "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        raise StockError(
            "config.json: auto_map refers to code of the model, which may differ from the class of"
            " transformers"
        )
    if family != "qwen2" and config.get("attention_bias"):
        raise StockError(
            "config.json: attention_bias also adds a bias to o_proj; only q, k and v can have one"
        )
    for key in FOREIGN:
        value = config.get(key)
        if value and (value is True or value != 1):
            raise StockError(
                f"config.json: {key} is {one_line(value, 120)}, which is not supported"
            )


# --- tensors --------------------------------------------------------------------------------------


def _stock_name(name: str) -> str:
    """Return transformers' name of a tensor that an export with our code calls ``name``.

    Tensors that are repacked are not included.
    """
    for ours, theirs in (
        (".mixer.norm.", ".input_layernorm."),
        (".mixer.out_proj.", ".self_attn.o_proj."),
        (".mixer.q_norm.", ".self_attn.q_norm."),
        (".mixer.k_norm.", ".self_attn.k_norm."),
        (".mlp.norm.", ".post_attention_layernorm."),
        (".mlp.down.", ".mlp.down_proj."),
    ):
        name = name.replace(ours, theirs)
    return name


def grouped(packed: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts q, k and v of in_proj [rows, ...] as views.

    They have the shapes [groups, heads of a group, d, ...] and [groups, 1, d, ...].
    """
    each = shape.heads // shape.groups
    q, k, v = packed.unflatten(0, (shape.groups, each + 2, shape.head)).split((each, 1, 1), dim=1)
    return q, k, v


def _unpacking(shape: AttentionShape, index: int) -> Callable[[list[Tensor]], Tensor]:
    """Return the function that extracts part ``index`` of (q, k, v) from in_proj."""
    return lambda tensors: grouped(tensors[0], shape)[index].flatten(0, 2)


def _element(index: int) -> Callable[[list[Tensor]], Tensor]:
    """Return the function that extracts element ``index`` of a tensor's first dimension."""
    return lambda tensors: tensors[0][index]


def _packing(shape: AttentionShape) -> Callable[[list[Tensor]], Tensor]:
    """Return the function that packs the list [q, k, v] of weights or biases into in_proj."""
    return lambda tensors: torch.cat(
        [t.unflatten(0, (shape.groups, -1, shape.head)) for t in tensors], dim=1
    ).flatten(0, 2)
