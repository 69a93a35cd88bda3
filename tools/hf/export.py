"""Checkpoint -> a folder that stock transformers loads with ``trust_remote_code=True``.

The parameters' names, one to one; no tensor is reshaped, and only the rows that pad the vocabulary are left out (see ``hf_name``):

    embedding.word_embeddings.weight  model.embed_tokens.weight
    decoder.layers.N.*                model.layers.N.*           mixer.* and mlp.*, as the block's shape names them
    decoder.final_layernorm.weight    model.norm.weight
    output_layer.weight               lm_head.weight             absent where tied

The code beside them is the training's own (see ``bundle``).
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from fem_megatron.catalogue import mixer_names
from fem_megatron.config import ModelConfig
from pretrain.plan import parameter_shapes

from .bundle import bundle, packages
from .configuration_fem import FemLMConfig
from .model_card import model_card

AUTO_MAP = {
    "AutoConfig": "configuration_fem.FemLMConfig",
    "AutoModel": "modeling_fem.FemLMModel",
    "AutoModelForCausalLM": "modeling_fem.FemLMForCausalLM",
}
RENAMED = (
    ("embedding.word_embeddings.", "model.embed_tokens."),
    ("decoder.layers.", "model.layers."),
    ("decoder.final_layernorm.", "model.norm."),
    ("output_layer.", "lm_head."),
)
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class ExportError(ValueError):
    """What a user asked to export cannot be exported, or not there; one line."""


def export_state_dict(
    state: dict[str, torch.Tensor],
    model: ModelConfig,
    out: Path,
    *,
    tokenizer_dir: Path | None,
    dtype: torch.dtype,
    card: dict[str, Any],
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes weights, configuration, code, tokenizer and model card to ``out``, complete or not at all.

    ``state`` holds full tensors under the training code's names; ``card`` what is known of the training (see ``model_card``), of which
    ``seq_length`` also becomes the configuration's context length. Weights over ``max_shard_size`` are cut into several files.

    Raises:
        ExportError: tensors are missing, unknown or of a wrong shape; the tokenizer is not the model's; ``out`` is not empty.
    """
    out = Path(out)
    refuse_occupied(out, overwrite)
    check_state(state, model)
    tokenizer = None if tokenizer_dir is None else _Tokenizer.load(Path(tokenizer_dir), model)
    config = hf_config(model, dtype, tokenizer, card.get("seq_length"))
    code = bundle(model.blocks())
    weights = {hf_name(name): _exported(name, tensor, model, dtype) for name, tensor in state.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        save_torch_state_dict(weights, folder, max_shard_size=max_shard_size, metadata={"format": "pt"})
        _write_config(config, folder)
        _generation_config(config).save_pretrained(folder)
        for name, text in code.items():
            (folder / name).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.copy_to(folder)
        mode = (folder / "config.json").stat().st_mode
        for file in folder.glob("*.safetensors"):
            file.chmod(mode)  # safetensors lets the owner alone read what it writes
        parameters = sum(weight.numel() for weight in weights.values())
        text = model_card(config, model, parameters, card, has_tokenizer=tokenizer is not None, packages=packages(code))
        (folder / "README.md").write_text(text, encoding="utf-8")
        _move_into_place(folder, out, Path(scratch) / "replaced")


def refuse_occupied(out: Path, overwrite: bool) -> None:
    """Raises ExportError where ``out`` is a file, or a folder with something in it that may not be overwritten."""
    if out.exists() and not out.is_dir():
        raise ExportError(f"{out} is a file: the export is a folder")
    if out.exists() and not overwrite and any(out.iterdir()):
        raise ExportError(f"{out} is not empty: choose another folder, or replace it with --overwrite")


def hf_name(name: str) -> str:
    """A parameter's name in the exported folder (the table in this module's docstring)."""
    for ours, theirs in RENAMED:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def check_state(state: dict[str, torch.Tensor], model: ModelConfig) -> None:
    """Raises ExportError unless ``state`` holds the tensors that ``model`` has, no others, in their shapes, and their code is ours."""
    if model.vocab_size is None:
        raise ExportError("model.vocab_size is not known: the checkpoint's configuration must hold it")
    for name, block in zip(mixer_names(model), model.blocks(), strict=True):
        if block.mixer.external:
            raise ExportError(f"model.mixer={name} is another package's layer, which a folder cannot carry: save it with that package")
    shapes = parameter_shapes(model)
    for complaint, names in (("lacks", shapes.keys() - state.keys()), ("holds, besides the model's,", state.keys() - shapes.keys())):
        if names:
            first = min(names)
            raise ExportError(f"the checkpoint {complaint} {first}" + (f" and {len(names) - 1} more tensors" if len(names) > 1 else ""))
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise ExportError(f"{name} has shape {tuple(state[name].shape)} in the checkpoint, {shape} by its configuration")


def hf_config(model: ModelConfig, dtype: torch.dtype, tokenizer: _Tokenizer | None = None, seq_length: int | None = None) -> FemLMConfig:
    """The exported configuration of ``model``."""
    optional: dict[str, Any] = {} if tokenizer is None else dict(tokenizer.special_ids())
    if seq_length is not None:
        optional["max_position_embeddings"] = seq_length
    return FemLMConfig(
        architecture=asdict(model),
        architectures=["FemLMForCausalLM"],
        auto_map=AUTO_MAP,
        dtype=str(dtype).removeprefix("torch."),
        **optional,
    )


@dataclass(frozen=True)
class _Tokenizer:
    folder: Path
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, folder: Path, model: ModelConfig) -> _Tokenizer:
        if not (folder / "tokenizer_config.json").is_file():
            raise ExportError(f"{folder} is no tokenizer folder: tokenizer_config.json is missing")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ExportError(f"{folder} is no tokenizer folder: {str(error).splitlines()[0]}") from error
        entries = max(tokenizer.get_vocab().values()) + 1
        if model.vocab_size is None or entries > model.vocab_size:
            raise ExportError(
                f"the tokenizer in {folder} has {entries} entries, the model's vocabulary only {model.vocab_size}: not its tokenizer"
            )
        return cls(folder, tokenizer)

    def special_ids(self) -> dict[str, int | None]:
        eos = self.tokenizer.eos_token_id
        pad = self.tokenizer.pad_token_id
        return {"bos_token_id": self.tokenizer.bos_token_id, "eos_token_id": eos, "pad_token_id": eos if pad is None else pad}

    def copy_to(self, folder: Path) -> None:
        """The tokenizer's files as they are, told to return nothing that the model does not take."""
        for file in sorted(self.folder.iterdir()):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings.setdefault("model_input_names", ["input_ids", "attention_mask"])
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _exported(name: str, tensor: torch.Tensor, model: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    rows = tensor[: model.vocab_size] if name in VOCABULARY else tensor
    return rows.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()


def _write_config(config: FemLMConfig, folder: Path) -> None:
    """config.json with every field of ours, and of transformers' own those that are not at their defaults."""
    ours = inspect.signature(FemLMConfig.__init__).parameters
    changed = config.to_diff_dict()
    values = {key: value for key, value in config.to_dict().items() if key in ours or key in changed}
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _generation_config(config: FemLMConfig) -> GenerationConfig:
    return GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)


def _move_into_place(folder: Path, out: Path, aside: Path) -> None:
    """Renames ``folder`` to ``out``; what was there before goes ``aside`` first, and is deleted with the scratch folder."""
    if out.exists():
        os.rename(out, aside)
    os.rename(folder, out)
