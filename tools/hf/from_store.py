"""A checkpoint's weights -> the transformers model that its export would be; held once, and one tensor more while they come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedTokenizerBase

from fem_megatron.config import ModelConfig
from pretrain.checkpoint_reader import Found, Weights

from .export import check_shapes, hf_config
from .modeling_fem import FemLMForCausalLM
from .recipes import VOCABULARY, Recipes, to_fem
from .stock import stock_config, to_stock, why_not_stock
from .tokenizer import special_ids


def checkpoint_model(
    found: Found,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Any:
    """The model of a checkpoint on ``device`` in eval mode, special tokens as its export would have them; dtype None: as stored.

    Raises:
        ConfigError: the folder is damaged. ExportError: its tensors are not those of its configuration.
    """
    weights, inherited = Weights(found.path), found.inherited
    check_shapes(weights.shapes, config)
    kept = dtype or weights.dtypes[VOCABULARY[0]]
    stock = why_not_stock(config) is None
    tokens = special_ids(tokenizer, inherited.special_ids)
    if stock:
        built: Any = stock_config(config, dtype=kept, max_position_embeddings=inherited.context_length, **tokens)
        maker: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(built)]
    else:
        built, maker = hf_config(config, kept, tokens, inherited.context_length), FemLMForCausalLM
    state = made(weights, to_stock(config) if stock else to_fem(config), kept, device)
    model, told = maker.from_pretrained(None, config=built, state_dict=state, output_loading_info=True, local_files_only=True)
    assert not (told["missing_keys"] or told["unexpected_keys"] or told["mismatched_keys"]), told  # check_state has seen to it
    return model.to(device).eval()


def made(source: Weights, recipes: Recipes, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Every recipe's tensor; neighbours that are made of the same tensors have them read once."""
    at_hand: dict[str, Tensor] = {}
    targets = {}
    for name, recipe in recipes.items():
        if at_hand.keys() != set(recipe.sources):
            at_hand.clear()  # before the next are read
            at_hand = source.read(recipe.sources)
        tensor = recipe.make([at_hand[part] for part in recipe.sources]).to(device=device, dtype=dtype)
        # Of a part a copy, so that the whole can go.
        targets[name] = tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor.contiguous()
    return targets
