"""Checkpoints with given weights, and stock folders with random ones, for the tests of import and
of round trips.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from fem_megatron.config import ModelConfig
from pretrain.checkpoint.folder import Progress, find
from pretrain.checkpoint.reader import Weights
from pretrain.checkpoint.writer import save_weights
from pretrain.config import DataConfig, RunConfig
from tests.tools.hf.small import random_state
from tools.hf.__main__ import main
from tools.hf.folder import json_object

STOCK_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
STOCK: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"rope_theta": 500000.0}),
    "llama tied": (LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": (MistralConfig, {"sliding_window": 5}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 12}),
}


def save(
    model: ModelConfig,
    out: Path,
    state: dict[str, Tensor] | None = None,
    *,
    step: int = 12,
    data: DataConfig | None = None,
) -> Path:
    """Write a checkpoint with only weights, random by default."""
    state = random_state(model) if state is None else state
    config = replace(RunConfig(), name="small", model=model, data=data or DataConfig())
    progress = Progress(step, 96, 960)
    save_weights(out, state.items(), config, progress, "data-key", heldout_loss=2.5)
    return out


def weights(path: Path) -> dict[str, Tensor]:
    """Return the full weights of a checkpoint."""
    found = Weights(find(path).path)
    return found.read(found.shapes)


def hf(*arguments: str | Path) -> int:
    """Run ``python -m tools.hf`` in this process."""
    return main([str(argument) for argument in arguments])


def stock_folder(
    name: str, out: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB", **changes: Any
) -> Path:
    """Write a folder by transformers itself, with random norms. shard: the size of a file of
    weights.
    """
    kind, options = STOCK[name]
    torch.manual_seed(3)
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(kind(**(STOCK_SIZES | options | changes))).to(dtype)
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        assert parameter.std() > 0, key
    model.save_pretrained(out, max_shard_size=shard)
    return out


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change a folder's weights by ``change`` and write them into one file."""
    held = tensors(folder)
    change(held)
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Check equal names, dtypes and bits."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


Spoil = Callable[[Path], object]
"""Damage to a folder, for tests of what a damaged folder leads to."""


def settings(**values: Any) -> Spoil:
    """Set keys of config.json."""
    return lambda folder: changed(folder / "config.json", **values)


def held(change: Callable[[dict[str, Tensor]], Any]) -> Spoil:
    """Change the weights by ``change``."""
    return lambda folder: rewrite(folder, change)


def changed(path: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps(json_object(path) | values))
