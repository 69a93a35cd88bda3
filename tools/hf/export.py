"""Checkpoint -> a folder that stock transformers loads with ``trust_remote_code=True``.

The parameters' names, one to one; no tensor is reshaped, and only the rows that pad the vocabulary are left out (see ``hf_name``):

    embedding.word_embeddings.weight                      model.embed_tokens.weight
    decoder.layers.N.input_layernorm.weight               model.layers.N.input_layernorm.weight
    decoder.layers.N.self_attention.in_proj.weight        model.layers.N.self_attn.in_proj.weight
    decoder.layers.N.self_attention.out_proj.weight       model.layers.N.self_attn.out_proj.weight
    decoder.layers.N.self_attention.beta                  model.layers.N.self_attn.beta
    decoder.layers.N.self_attention.tdc.norm.weight       model.layers.N.self_attn.tdc.norm.weight
    decoder.layers.N.self_attention.tdc.in_proj.weight    model.layers.N.self_attn.tdc.in_proj.weight
    decoder.layers.N.self_attention.tdc.state_norm.weight model.layers.N.self_attn.tdc.state_norm.weight
    decoder.layers.N.self_attention.tdc.out_proj.weight   model.layers.N.self_attn.tdc.out_proj.weight
    decoder.layers.N.pre_mlp_layernorm.weight             model.layers.N.post_attention_layernorm.weight
    decoder.layers.N.mlp.linear_fc1.weight                model.layers.N.mlp.gate_up_proj.weight
    decoder.layers.N.mlp.linear_fc2.weight                model.layers.N.mlp.down_proj.weight
    decoder.final_layernorm.weight                        model.norm.weight
    output_layer.weight                                   lm_head.weight
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from fem_megatron.config import ModelConfig

from .configuration_fem import FemLMConfig
from .model_card import model_card

CODE_FILES = ("configuration_fem.py", "modeling_fem.py")
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
    (".self_attention.", ".self_attn."),
    (".pre_mlp_layernorm.", ".post_attention_layernorm."),
    (".mlp.linear_fc1.", ".mlp.gate_up_proj."),
    (".mlp.linear_fc2.", ".mlp.down_proj."),
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
    weights = {hf_name(name): _exported(name, tensor, model, dtype) for name, tensor in state.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        save_torch_state_dict(weights, folder, max_shard_size=max_shard_size, metadata={"format": "pt"})
        _write_config(config, folder)
        _generation_config(config).save_pretrained(folder)
        for name in CODE_FILES:
            shutil.copyfile(Path(__file__).with_name(name), folder / name)
        if tokenizer is not None:
            tokenizer.copy_to(folder)
        mode = (folder / "config.json").stat().st_mode
        for file in folder.glob("*.safetensors"):
            file.chmod(mode)  # safetensors lets the owner alone read what it writes
        parameters = sum(weight.numel() for weight in weights.values())
        (folder / "README.md").write_text(model_card(config, parameters, card, tokenizer is not None), encoding="utf-8")
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
        name = name.replace(ours, theirs)
    return name


def check_state(state: dict[str, torch.Tensor], model: ModelConfig) -> None:
    """Raises ExportError unless ``state`` holds the tensors that ``model`` has, no others, in their shapes."""
    if model.vocab_size is None:
        raise ExportError("model.vocab_size is not known: the checkpoint's configuration must hold it")
    shapes = parameter_shapes(model)
    for complaint, names in (("lacks", shapes.keys() - state.keys()), ("holds, besides the model's,", state.keys() - shapes.keys())):
        if names:
            first = min(names)
            raise ExportError(f"the checkpoint {complaint} {first}" + (f" and {len(names) - 1} more tensors" if len(names) > 1 else ""))
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise ExportError(f"{name} has shape {tuple(state[name].shape)} in the checkpoint, {shape} by its configuration")


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the full model, under the training code's names."""
    mixer, hidden, ffn = model.mixer_shape(), model.hidden_size, model.ffn_size
    packed, vocabulary = mixer.heads * mixer.head_width, model.padded_vocab_size()
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attention.in_proj.weight": (packed, hidden),
        "self_attention.out_proj.weight": (hidden, mixer.value_size),
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.linear_fc1.weight": (2 * ffn, hidden),
        "mlp.linear_fc2.weight": (hidden, ffn),
    }
    if mixer.temperature:
        block["self_attention.beta"] = (mixer.value_size,)
    if mixer.conditioner:
        block["self_attention.tdc.norm.weight"] = (hidden,)
        block["self_attention.tdc.in_proj.weight"] = (3 * mixer.conditioner, hidden)
        block["self_attention.tdc.state_norm.weight"] = (mixer.conditioner,)
        block["self_attention.tdc.out_proj.weight"] = (packed, mixer.conditioner)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocabulary, hidden)}
    for layer in range(model.num_layers):
        shapes.update({f"decoder.layers.{layer}.{name}": shape for name, shape in block.items()})
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    if not model.tie_embeddings:
        shapes["output_layer.weight"] = (vocabulary, hidden)
    return shapes


def hf_config(model: ModelConfig, dtype: torch.dtype, tokenizer: _Tokenizer | None = None, seq_length: int | None = None) -> FemLMConfig:
    """The exported configuration of ``model``."""
    mixer = model.mixer_shape()
    optional: dict[str, Any] = {} if tokenizer is None else dict(tokenizer.special_ids())
    if seq_length is not None:
        optional["max_position_embeddings"] = seq_length
    assert model.vocab_size is not None
    return FemLMConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=mixer.heads,
        qk_head_dim=mixer.qk_head,
        value_head_dim=mixer.value_head,
        conditioner_size=mixer.conditioner,
        free_energy=mixer.free_energy,
        learned_temperature=mixer.temperature,
        gate=mixer.gate,
        rope=model.rope,
        rope_base=float(model.rope_base),
        norm_eps=model.norm_eps,
        initializer_range=model.init_std,
        attention_backend=model.attention_backend,
        tie_word_embeddings=model.tie_embeddings,
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
