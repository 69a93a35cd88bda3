"""Small models of every mixer with perturbed weights, as checkpoints and as exported folders, for
the tests of tools.hf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Words
from tokenizers import models, pre_tokenizers
from torch import Tensor

from fem_megatron import catalogue
from fem_megatron.config import ModelConfig
from fem_megatron.mixers.attention.shape import AttentionConfig
from fem_megatron.rope import RopeScaling
from pretrain.plan.run_plan import model_weights
from tools.hf.configuration_fem import FemLMConfig
from tools.hf.export import export as export_weights
from tools.hf.folder import json_object
from tools.hf.modeling_fem import FemLMForCausalLM
from tools.hf.tokenizer import Tokenizer
from tools.hf.weight_conversion import hf_name

VOCAB = 50
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 32,
}
# Besides the plain mixers: mixers that vary by layer, the MLP of another family, loops, and
# switches that change the state or the weights.
COMBINED: dict[str, dict[str, Any]] = {
    "hybrid": {"mixer": "fem_softmax", "pattern": ("fem_softmax", "fem_gla")},
    "cem_mlp_grouped": {
        "mixer": "transformer",
        "mlp": "cem",
        "num_query_groups": 2,
        "recurrence": 2,
    },
    "cem_attention": {"mixer": "cem", "mlp": "swiglu"},
    "switched": {
        "pattern": ("transformer", "fem_softmax"),
        "qk_norm": True,
        "attention": AttentionConfig(head_dim=6, qkv_bias=True, sliding_window=5),
        "rope_scaling": RopeScaling("llama3", original_length=40),
    },
    "rotated": {
        "mixer": "transformer",
        "rope_base": 500_000,
        "rope_scaling": RopeScaling("llama3", 4.0, 16),
    },
    "stretched": {
        "pattern": ("fem_softmax", "mha2nd1st"),
        "rope_scaling": RopeScaling("yarn", 4.0, 12, beta_fast=2.0, beta_slow=0.25),
    },
    "stretched_llama": {
        "mixer": "transformer",
        "rope_scaling": RopeScaling("yarn", 4.0, 12, beta_fast=2.0, beta_slow=0.25),
    },
}
# Layers of the package fla run only on a GPU.
MIXERS = tuple(name for name in catalogue.MIXERS if not name.startswith("fla."))
NAMES = [*MIXERS, *COMBINED]
PADDED = (3, 8, 5)
# Options for adapters on a model card.
LORA = re.compile(r"`LoraConfig\((.*)\)`")
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
# Options of ``generate`` for no cache and for each of the two caches.
CACHES: tuple[dict[str, Any], ...] = (
    {},
    {"use_cache": False},
    {"cache_implementation": "static"},
)


def slow_but(*quick: str) -> list[Any]:
    """Return NAMES as parameters of a test, marked slow unless they are in ``quick``."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def pairs(names: Iterable[str], *modes: Any, quick: tuple[str, ...] = ()) -> list[Any]:
    """Return (name, mode) for every name with every mode, as parameters of a test.

    A pair is marked slow unless it has the first mode and a name in ``quick``.
    """
    made = []
    for name in names:
        for mode in modes:
            marks = [] if name in quick and mode == modes[0] else [pytest.mark.slow]
            made.append(pytest.param(name, mode, marks=marks))
    return made


def small(name: str = "fem_softmax", **changes: Any) -> ModelConfig:
    """Return a model with two layers of 32 channels."""
    return ModelConfig(**(SIZES | {"mixer": name} | changes))


def config_of(name: str) -> ModelConfig:
    """Return the model for a name of NAMES; those without an MLP are recurrent."""
    changes = dict(COMBINED.get(name, {}))
    recurrence = 2 if name in catalogue.MIXERS and catalogue.MIXERS[name].mlp == "none" else 1
    return small(
        changes.pop("mixer", name),
        **{"tie_embeddings": len(name) % 2 == 0, "recurrence": recurrence, **changes},
    )


def random_state(
    model: ModelConfig, dtype: torch.dtype = torch.float32, scale: float = 0.2
) -> dict[str, Tensor]:
    """Return weights far from their initialisation, so that no part of the model is near the
    identity or zero.
    """
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, weight in model_weights(model).items():
        start = weight.init if isinstance(weight.init, int | float) else 0.0
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        state[name] = (start + scale * noise).to(dtype)
    return state


def here(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a name's model as this repository's FemLMForCausalLM, without a folder."""
    config = replace(config_of(name), **changes)
    model: Any = FemLMForCausalLM(FemLMConfig(config.__dict__)).eval()
    model.to(dtype)
    state = {hf_name(key): weight for key, weight in random_state(config, dtype=dtype).items()}
    for key, parameter in model.named_parameters():
        parameter.data.copy_(state[key][: len(parameter)])
    return model


def trained_logits(
    model: ModelConfig, state: dict[str, Tensor], ids: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the training code's logits [b, t, vocabulary] in float64.

    Megatron-core's process groups must exist.
    """
    from fem_megatron.megatron.model import Layout, build

    (chunk,) = build(model, Layout(params_dtype=dtype), ids.shape[1], seed=0)
    cast = {name: tensor.to(dtype) for name, tensor in state.items()}
    answer = chunk.load_state_dict(cast, strict=False)
    assert not answer.unexpected_keys
    for key in answer.missing_keys:
        assert key.endswith("_extra_state") or key == "output_layer.weight", key
    with torch.no_grad():
        logits: Tensor = chunk(ids, torch.arange(ids.shape[1]).expand_as(ids), None)
    return logits[..., : model.vocab_size].double()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Return random tokens from the full vocabulary."""
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def padded_batch() -> tuple[Tensor, Tensor]:
    """Return ids and mask of three rows with PADDED tokens, padded on the left."""
    ids = tokens(len(PADDED), max(PADDED))
    mask = torch.zeros(len(PADDED), max(PADDED), dtype=torch.long)
    for row, length in enumerate(PADDED):
        mask[row, max(PADDED) - length :] = 1
    return ids, mask


class Held:
    """Tensors in memory, with the interface that export requires."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state
        self.shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in state.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors with these names."""
        return {name: self.state[name] for name in names}


def export(
    model: ModelConfig,
    out: Path,
    state: dict[str, Tensor] | None = None,
    tokenizer: Path | None = None,
    **changes: Any,
) -> Path:
    """Write the model's folder with random weights (default) and the tokenizer of a folder."""
    state = state or random_state(model)
    options: dict[str, Any] = {
        "tokenizer": Tokenizer.load(tokenizer, model) if tokenizer else None,
        "card": {},
        "mtp": model.mtp_depth > 0,
    }
    export_weights(
        Held(state), model, out, **(options | {"dtype": next(iter(state.values())).dtype} | changes)
    )
    return out


def close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Check equality within ``tolerance`` times the largest value, at least one."""
    assert got.shape == wanted.shape and got.isfinite().all()
    assert (got - wanted).abs().max().item() <= tolerance * max(1.0, wanted.abs().max().item())


@dataclass
class Exported:
    """Model for a name: its configuration, its weights (float32), its folder, and that folder
    loaded.
    """

    config: ModelConfig
    state: dict[str, Tensor]
    folder: Path
    model: Any


Exports = Callable[[str], Exported]
"""Type of the fixture ``exported``."""


def write_tokenizer(folder: Path, entries: int) -> Path:
    """Write a tokenizer of complete words, <eod>, w0, w1, .."""
    from transformers import PreTrainedTokenizerFast

    names = ["<eod>", *(f"w{i}" for i in range(entries - 1))]
    tokenizer = Words(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<eod>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eod>").save_pretrained(folder)
    settings = json_object(folder / "tokenizer_config.json")
    settings.pop("model_input_names", None)
    # The class that data_prep writes; transformers 4 does not know the class that version 5 writes.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
