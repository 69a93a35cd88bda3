"""Verb ``export``: write a checkpoint as a folder that transformers loads, with transformers' own
class if it matches exactly, else with our code.

The plain Transformer becomes LlamaForCausalLM (Qwen3 with qk_norm, Qwen2 with biases, Mistral with
a window), without any code; ``stock`` contains the table of names. All other models become
FemLMForCausalLM, the training code itself (see ``bundle``), with these parameter names:

    checkpoint                                 export
    embedding.word_embeddings.weight           model.embed_tokens.weight
    embedding.velocity.word_embeddings.weight  model.embed_velocities.weight
    decoder.layers.N.*                         model.layers.N.*
    decoder.final_layernorm.weight             model.norm.weight
    output_layer.weight                        lm_head.weight; absent if tied
    mtp_modules.N.*                            mtp_modules.N.*; dropped without --mtp

The names within a layer, mixer.* and mlp.*, are equal on both sides. No tensor is reshaped; only
the rows that pad the vocabulary are dropped (see ``weight_conversion``).

Weights are read one tensor at a time and written immediately (see ``folder``). The same source
gives the same bytes.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig

from fem_common.errors import ConfigError, from_os_error
from fem_common.fem import command_line, next_steps
from fem_common.files import start_of
from fem_common.progress import Progress
from fem_megatron.catalogue import mixer_names
from fem_megatron.config import ModelConfig
from pretrain.checkpoint.folder import Found
from pretrain.checkpoint.reader import Weights
from pretrain.data.facts import Manifest
from pretrain.plan.run_plan import parameter_shapes

from .bundle import LICENSE, bundle, license_text, packages
from .configuration_fem import FemLMConfig, named_rope, older_names
from .folder import byte_count, write_shards
from .model_card import (
    License,
    data_manifests,
    heldout_loss,
    model_card,
    run_config,
    training_card,
    training_record,
)
from .paths import CONFIG, TRAINING, check_export, refuse_occupied
from .stock import exported, stock_config, why_not_stock
from .tokenizer import (
    NAME_A_TOKENIZER,
    SPECIAL_IDS,
    Tokenizer,
    special_ids,
    tokenizers_of_checkpoint,
)
from .weight_conversion import VOCABULARY, Tensors, first_of

AUTO_MAP = {
    "AutoConfig": "configuration_fem.FemLMConfig",
    "AutoModel": "modeling_fem.FemLMModel",
    "AutoModelForCausalLM": "modeling_fem.FemLMForCausalLM",
}


def export(
    source: Tensors,
    model: ModelConfig,
    out: Path,
    *,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    card: Mapping[str, Any],
    training: Mapping[str, Any] | None = None,
    known_ids: Mapping[str, Any] | None = None,
    weights_license: License | None = None,
    overwrite: bool = False,
    mtp: bool = False,
    shard_bytes: int = 5 * 10**9,
    progress: Progress | None = None,
) -> None:
    """Write weights, configuration, code, tokenizer and model card to ``out``, atomically.

    source: full tensors with the training code's names. card: facts about the training (see
    ``model_card``); its ``seq_length`` also becomes the context length of the configuration.
    training: content of training.json, for programs. known_ids: special tokens that the tokenizer
    lacks (see ``special_ids``). weights_license: license in the model card; code has its own
    license. mtp: keep the modules of multi-token prediction. shard_bytes: maximum size of a file
    of weights.

    Raises:
        ConfigError: tensors are missing, unknown or of a wrong shape; ``out`` is not empty or
        cannot be written; the source is damaged. StorageError: the file system failed.
    """
    refuse_occupied(out, overwrite)
    check_shapes(source.shapes, model)
    model = kept(model, mtp)
    tokens = special_ids(tokenizer.tokenizer if tokenizer else None, known_ids or {})
    config = hf_config(model, dtype, tokens, card.get("seq_length"))
    code = bundle(model.blocks()) if isinstance(config, FemLMConfig) else {}
    weights = exported(source, model)
    with replacing(out) as folder:
        write_shards(
            weights, folder, dtype, shard_bytes, progress or Progress(None, "", quiet=True)
        )
        _write_json(folder / CONFIG, _config_values(config))
        # Greedy by default, as in the project's tools. No maximum length: with one, transformers
        # warns at every ``max_new_tokens``.
        ids = {name: getattr(config, name, None) for name in SPECIAL_IDS}
        GenerationConfig(**ids).save_pretrained(folder)
        for name, text in code.items():
            (folder / name).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.copy_to(folder, tokens["pad_token_id"], config.model_type)
        if any(folder.glob("*.py")):
            (folder / LICENSE).write_text(license_text(), encoding="utf-8")
        if training is not None:
            _write_json(folder / TRAINING, training)
        text = model_card(
            folder,
            model,
            config,
            sum(map(math.prod, weights.shapes.values())),
            card,
            packages(code) if code else None,
            weights_license,
        )
        (folder / "README.md").write_text(text, encoding="utf-8")


def kept(model: ModelConfig, mtp: bool) -> ModelConfig:
    """Return the model with or, without ``mtp``, without modules of multi-token prediction.

    Raises ConfigError if there are none to keep.
    """
    if mtp and not model.mtp_depth:
        raise ConfigError(
            "--mtp: the checkpoint has no modules of multi-token prediction (model.mtp_depth=0);"
            " leave --mtp out"
        )
    return model if mtp else replace(model, mtp_depth=0)


def check_shapes(held: Mapping[str, tuple[int, ...]], model: ModelConfig) -> None:
    """Raise ConfigError unless a checkpoint with tensors ``held`` (name -> shape) can be exported.

    The tensors must be exactly those of ``model``, and no layer may belong to another package.
    """
    if model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is unknown: it must be in the checkpoint's configuration"
        )
    for name, block in zip(mixer_names(model), model.blocks(), strict=True):
        if block.mixer.external:
            raise ConfigError(
                f"model.mixer={name} is a layer of another package, which cannot be exported: save"
                " the model with that package"
            )
    shapes = parameter_shapes(model)
    for complaint, names in (
        ("lacks", shapes.keys() - held.keys()),
        ("contains tensors that the model lacks:", held.keys() - shapes.keys()),
    ):
        if names:
            raise ConfigError(f"the checkpoint {complaint} {first_of(names)}")
    for name, shape in shapes.items():
        if held[name] != shape:
            raise ConfigError(
                f"{name} has shape {held[name]} in the checkpoint, but {shape} according to its"
                " configuration"
            )


def hf_config(
    model: ModelConfig,
    dtype: torch.dtype,
    tokens: Mapping[str, Any] | None = None,
    seq_length: int | None = None,
) -> PretrainedConfig:
    """Return the configuration of an export: of transformers' class if it has one, else of ours.

    tokens: the result of ``special_ids``. seq_length: context length of the training; None: the
    default of the class.
    """
    settings: dict[str, Any] = dict(tokens or {})
    if seq_length is not None:
        settings["max_position_embeddings"] = seq_length
    if why_not_stock(model) is None:
        return stock_config(model, dtype=dtype, **settings)
    return FemLMConfig(
        architecture=asdict(model),
        architectures=["FemLMForCausalLM"],
        auto_map=AUTO_MAP,
        dtype=str(dtype).removeprefix("torch."),
        **settings,
    )


def _config_values(config: PretrainedConfig) -> dict[str, Any]:
    """Return the content of config.json.

    It contains every field of FemLMConfig, and transformers' own fields that differ from their
    defaults.
    """
    changed = config.to_diff_dict()
    if not isinstance(config, FemLMConfig):
        return changed | older_names(config.rope_parameters)
    ours = inspect.signature(FemLMConfig.__init__).parameters
    values = {
        key: value for key, value in config.to_dict().items() if key in ours or key in changed
    }
    # Write the names of all supported versions of transformers.
    if "rope_parameters" in values or "rope_theta" in values:
        rope = named_rope(config.model())
        values |= {"rope_parameters": rope, **older_names(rope)}
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(
        json.dumps(values, indent=2, sort_keys=path.name == CONFIG) + "\n", encoding="utf-8"
    )


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Context manager: yield an empty temporary folder that replaces ``out`` if the block succeeds.

    If the block fails, the temporary folder is deleted and ``out`` is unchanged.

    Raises:
        ConfigError: the folder cannot be written.
        StorageError: the file system failed.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            folder, aside = Path(scratch) / "model", Path(scratch) / "replaced"
            folder.mkdir()
            yield folder
            if out.exists():
                os.rename(out, aside)
            try:
                os.rename(folder, out)
            except BaseException:
                if aside.exists():
                    os.rename(aside, out)
                raise
    except OSError as error:
        _, inside, name = str(error.filename).rpartition("/model/")
        if inside:  # name the file by its final path
            error.filename = str(out / name)
        raise from_os_error(error, f"{out} cannot be written: ") from None


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None,
    tokenizer: Path | None,
    license_id: str | None,
    max_shard_size: str,
    overwrite: bool,
    mtp: bool,
) -> None:
    """Export the checkpoint at ``checkpoint`` to the folder ``out``.

    checkpoint: the folder of a step, of any layout, or a run directory, whose newest checkpoint is
    exported. dtype, tokenizer: None: those of the checkpoint. license_id: license of the weights
    for the model card (see ``License.read``). max_shard_size: text such as ``5GB``. mtp: keep the
    modules of multi-token prediction.

    Raises:
        ConfigError: see ``export``; the tokenizer of the training is missing, or a different one is
        given; the checkpoint cannot be read. StorageError: the file system failed.
    """
    try:
        size = byte_count(max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size {error}") from None
    weights_license = None if license_id is None else License.read(license_id)
    found = check_export(checkpoint, out, overwrite)
    config, source = run_config(found.path, found.manifest), Weights(found.path)
    check_shapes(source.shapes, config.model)
    model = kept(config.model, mtp)
    manifests, notes = data_manifests(config)
    for note in notes:
        print(f"tools.hf: note: {note}", file=sys.stderr)
    used = _tokenizer(tokenizer, found, config.model, manifests)
    loss = heldout_loss(found.path, found.manifest)
    with Progress(None, "bytes", "tools.hf: export") as progress:
        export(
            source,
            config.model,
            out,
            tokenizer=used,
            dtype=source.dtypes[VOCABULARY[0]] if dtype is None else getattr(torch, dtype),
            card=training_card(config, found, loss, manifests),
            training=training_record(found.manifest, loss),
            known_ids=found.inherited.special_ids,
            weights_license=weights_license,
            overwrite=overwrite,
            mtp=mtp,
            shard_bytes=size,
            progress=progress,
        )
    trust = "" if why_not_stock(model) is None else ", trust_remote_code=True"
    print(f"wrote {out}: AutoModelForCausalLM.from_pretrained({str(out)!r}{trust}) loads it")
    compare = command_line("hf", "verify", out, checkpoint)
    talk = [command_line("generate", out, "Once upon a time")] if used else []
    print(next_steps(compare, *talk))


def _tokenizer(
    given: Path | None, found: Found, model: ModelConfig, manifests: dict[str, Manifest]
) -> Tokenizer | None:
    """Return the tokenizer to export; None, with a printed note, if the checkpoint records none.

    Raises ConfigError if it is missing or is not the tokenizer of the training data.
    """
    usual = tokenizers_of_checkpoint(found.path, found.manifest)
    folder = given or next((folder for folder in usual if folder.is_dir()), None)
    if folder is None and len(usual) > 1:
        raise ConfigError(
            f"the tokenizer of the training, {usual[-1]}, does not exist: "
            f"{start_of(usual[-1])}{NAME_A_TOKENIZER}"
        )
    if folder is None:
        print(
            "tools.hf: note: no tokenizer is recorded for the checkpoint, so none is exported; name"
            " one with --tokenizer DIR",
            file=sys.stderr,
        )
        return None
    tokenizer = Tokenizer.load(folder, model)
    for prefix, manifest in manifests.items():
        recorded = manifest.tokenizer["sha256"]
        if tokenizer.sha256 is not None and tokenizer.sha256 != recorded:
            raise ConfigError(
                f"the tokenizer in {folder} (sha256 {tokenizer.sha256[:12]}, {tokenizer.entries}"
                f" entries) is not the one that {prefix} was created with ({recorded[:12]},"
                f" {manifest.tokenizer['vocab_size']} entries), so it is not the model's tokenizer"
            )
    return tokenizer
