"""Verb ``import``: convert a Hugging Face folder, our export or a stock Transformer, to a
checkpoint of weights for ``checkpoint.load``.

    OUT/step_NNNNNNNN   checkpoint, usable at any layout; the step is that of training.json, else 0
    OUT/tokenizer       the folder's tokenizer, if it has one
    OUT/model.yaml      the model section, for model=OUT/model.yaml
    OUT/grafted.json    with another mixer: copied and new weights (see ``graft``)

If config.json and training.json describe different models, config.json is used, because it is the
file that transformers reads and that users edit. Peak memory: the weights once in their stored
dtype, plus the sources of one tensor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from fem_common.config import plain
from fem_common.errors import ConfigError, convert_os_errors
from fem_megatron.catalogue import mixer_names, unread
from fem_megatron.config import ModelConfig
from fem_megatron.megatron.upstream import import_megatron
from fem_megatron.mup import starts_from
from pretrain.checkpoint.folder import HASHES, Inherited, Progress, hash_mismatches
from pretrain.config import RunConfig, run_of
from pretrain.plan.run_plan import model_weights

from .configuration_fem import FemLMConfig
from .encoding import trained_here
from .export import replacing
from .folder import GENERATION, Folder, json_object, read_folder
from .graft import Graft, check_target, described, graft, table
from .open_model import quiet_transformers
from .paths import CONFIG, MODEL, PICKLES, TRAINING, check_import, has_tokenizer
from .stock import StockError, from_stock, model_of, read_stock, to_stock
from .tokenizer import SPECIAL_IDS, Tokenizer
from .weight_conversion import Converted, first_of, from_fem, to_fem

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORED.values()}
PROGRESS = ("step", "consumed_samples", "order_samples", "skipped_steps", "bad_steps_in_a_row")


@dataclass(frozen=True)
class Source:
    """Folder to import.

    model: the model of config.json. training: content of training.json; {} if absent.
    """

    folder: Folder
    model: ModelConfig
    training: dict[str, Any]

    @cached_property
    def weights(self) -> Converted:
        """Return the tensors of the checkpoint."""
        convert = from_fem if self.folder.ours else from_stock
        return Converted(self.folder, convert(self.model))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name in the folder -> required shape, for all tensors of the model."""
        convert = to_fem if self.folder.ours else to_stock
        return {name: conversion.shape for name, conversion in convert(self.model).items()}

    @cached_property
    def inherited(self) -> Inherited:
        """Return the context length and the special tokens that transformers reads from the folder;
        ids outside the vocabulary are ignored.
        """
        read_config = FemLMConfig.from_dict if self.folder.ours else read_stock
        read: Any = read_config(self.folder.config)
        path, entries = self.folder.path / GENERATION, range(self.model.vocab_size or 0)
        generation = json_object(path) if path.is_file() else {}
        kept = {
            name: getattr(read, name) if generation.get(name) is None else generation[name]
            for name in SPECIAL_IDS
        }
        known = {name: ids for name, ids in kept.items() if _all_in(ids, entries)}
        return Inherited(
            read.max_position_embeddings, known, foreign=not trained_here(self.training)
        )


def import_folder(
    hf_dir: Path,
    out: Path,
    *,
    mixer: str | None,
    dtype: str | None,
    settings: list[str],
    overwrite: bool,
) -> None:
    """Write the folder ``hf_dir`` as a checkpoint to ``out``, atomically, and print the result.

    Args:
        mixer: name of the mixer of the new model, which is initialised from the folder's weights
            (see ``graft``); None: the folder's own model.
        dtype: dtype of all weights; None: as stored.
        settings: ``section.key=value`` texts for the configuration in the checkpoint, including
            the model.
        overwrite: replace an earlier import in ``out``.

    Raises:
        ConfigError: the folder is invalid, incomplete or of an unsupported model; a setting is
        invalid; ``out`` is occupied.
    """
    import_megatron()
    check_import(hf_dir, out, overwrite)
    source = read_source(hf_dir)
    config, notes = run_config(source, out, mixer, dtype, settings)
    check_tensors(source)
    with convert_os_errors():
        for wrong in hash_mismatches(hf_dir, lambda count: None):
            name = wrong.split()[0]
            raise ConfigError(
                f"{hf_dir / name} is damaged ({wrong}); if the file was rewritten deliberately,"
                f" remove {name}.{HASHES}"
            )
    with quiet_transformers():
        tokenizer = None if config.data.tokenizer is None else Tokenizer.load(hf_dir, config.model)
    plan = graft(source.model, config.model) if mixer else None
    source = source if plan else replace(source, model=config.model)
    kept = _kept(source) if plan is None else Kept()
    # Megatron-core takes seconds to import: wrong arguments are reported before.
    from pretrain.checkpoint.writer import save_weights

    with replacing(out) as folder:
        if plan:
            weights = dict(_grafted(source, config, plan, dtype))
        else:
            weights = {name: _owned(weight, dtype) for name, weight in source.weights.items()}
        parameters = sum(weight.numel() for weight in weights.values())
        types = ", ".join(
            sorted({str(weight.dtype).removeprefix("torch.") for weight in weights.values()})
        )
        step = save_weights(
            folder,
            weights.items(),
            config,
            Progress(**kept.progress),
            kept.data,
            kept.heldout_loss,
            source.inherited,
        )
        if tokenizer is not None:
            (folder / "tokenizer").mkdir()
            tokenizer.copy_to(folder / "tokenizer")
        (folder / MODEL).write_text(model_yaml(config.model, hf_dir), encoding="utf-8")
        if plan:
            copied = described(plan)
            origin = {"from": str(hf_dir), "seed": config.train.seed, **copied}
            (folder / "grafted.json").write_text(
                json.dumps(origin, indent=1) + "\n", encoding="utf-8"
            )
    for line in notes:
        print(f"tools.hf: note: {line}", file=sys.stderr)
    for line in table(copied) if plan else []:
        print(line)
    print(
        f"wrote {out / step.name}: {'-'.join(dict.fromkeys(mixer_names(config.model)))},"
        f" {parameters:,} parameters, {types}"
    )
    print(f"start from it: python -m pretrain RUN.yaml model={out / MODEL} checkpoint.load={out}")


def read_source(path: Path) -> Source:
    """Return the folder at ``path`` as a Source; only headers of the weights are read.

    Raises:
        ConfigError: it is not a complete folder in safetensors of a supported model.
    """
    pickled = next((name for name in PICKLES if (path / name).is_file()), None)
    if pickled and not any(path.glob("*.safetensors")):
        fix = (
            "from transformers import AutoModelForCausalLM as M;"
            f" M.from_pretrained('{path}').save_pretrained('{path}-safetensors')"
        )
        raise ConfigError(
            f"{path}: {pickled} is a pickle, which this tool does not read; write safetensors"
            f' first: python -c "{fix}"'
        )
    folder = read_folder(path)
    training = folder.training()
    try:
        if folder.ours:
            model = FemLMConfig.from_dict(folder.config).model()
        else:
            model = _padded_as(model_of(folder.config), training)
        model.blocks()
    except StockError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path / CONFIG}: {error}; it may be of another version of this code"
        ) from None
    return Source(folder, model, training)


def run_config(
    source: Source, out: Path, mixer: str | None, dtype: str | None, settings: list[str]
) -> tuple[RunConfig, list[str]]:
    """Return the configuration for the checkpoint, and notes for the user.

    The configuration is that of training.json, or the defaults if that file is absent. Its model is
    the one of config.json, with ``mixer`` as its mixer unless None. Its tokenizer is OUT/tokenizer.
    Finally ``settings`` are applied.

    Raises:
        ConfigError: a key or a value is invalid; ``settings`` change the mixer without ``mixer``;
        the mixer does not fit the weights.
    """
    folder, model = source.folder, source.model
    notes = []
    values = dict(source.training.get("config") or _defaults(folder, dtype))
    changed = _differing(plain(model), values.get("model") or {})
    if changed:
        notes.append(f"{CONFIG} and {TRAINING} differ, and {CONFIG} is used: {'; '.join(changed)}")
    values["model"] = plain(replace(model, pattern=None, mlp=None) if mixer else model)
    values["data"] = {
        **values.get("data", {}),
        "tokenizer": str(out.absolute() / "tokenizer") if has_tokenizer(folder.path) else None,
    }
    if mixer:
        values["name"] = f"{values['name']}-{mixer}"
        settings = [f"model.mixer={mixer}", *settings]
    config = run_of(values, folder.path / (TRAINING if source.training else CONFIG), settings)
    others = ConfigError(
        "--set changes the weights of the model: use --mixer NAME for another mixer, and leave the"
        " other keys out"
    )
    try:
        if not mixer and mixer_names(config.model) != mixer_names(model):
            raise others  # before the notes about the keys of the folder
        for key in unread(config.model) if mixer else []:
            section, _, name = key.rpartition(".")
            ours: Any = getattr(config.model, section) if section else config.model
            theirs = getattr(model, section) if section else model
            value = getattr(ours, name)
            # The value is from the folder, not from ``settings``.
            if value == getattr(theirs, name):
                notes.append(f"{mixer} has no model.{key}; the folder's value {value} is not used")
                cleared: Any = replace(ours, **{name: getattr(type(ours)(), name)})
                if section:
                    full: dict[str, Any] = {section: cleared}
                    cleared = replace(config.model, **full)
                config = replace(config, model=cleared)
        config.model.blocks()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if mixer:
        check_target(model, config.model)
    elif model_weights(config.model) != model_weights(replace(model, **_padding(config.model))):
        raise others
    return config, notes


def check_tensors(source: Source) -> None:
    """Raise ConfigError unless the folder contains exactly the tensors that its config.json
    requires.

    Shapes must match, and all dtypes must be floating-point types.
    """
    folder, shapes = source.folder, source.shapes
    tensors, path = folder.tensors, folder.path
    head = "lm_head.weight"
    absent = sorted(shapes.keys() - tensors.keys())
    if absent:
        raise ConfigError(
            f"{path} lacks {first_of(absent)}, which its {CONFIG} requires: an incomplete model, or"
            " the weights of another one"
        )
    others = sorted(
        name
        for name in tensors.keys() - shapes.keys()
        if not name.endswith(".rotary_emb.inv_freq") and name != head
    )
    if others:
        raise ConfigError(
            f"{path} contains {first_of(others)}, which a model of its {CONFIG} lacks: weights of"
            " another architecture"
        )
    for name, shape in shapes.items():
        found = tensors[name]
        if found.dtype not in STORED:
            raise ConfigError(
                f"{found.file}: {name} is {found.dtype}; supported: {', '.join(STORED)}; quantised"
                " weights are not supported"
            )
        if found.shape != shape:
            raise ConfigError(
                f"{found.file}: {name} has shape {found.shape}, but {shape} according to {CONFIG}:"
                " they belong to different models"
            )
    twice = head in tensors.keys() - shapes.keys()
    if twice and not torch.equal(folder.get(head), folder.get("model.embed_tokens.weight")):
        raise ConfigError(
            f"{path}: {CONFIG} ties the output layer to the embedding, but {head} differs from it:"
            " set tie_word_embeddings"
        )


def model_yaml(model: ModelConfig, source: Path) -> str:
    """Return the text of model.yaml: the model section, for ``model=PATH`` on a command line."""
    text = yaml.safe_dump(plain(model), sort_keys=False, allow_unicode=True, width=120)
    return (
        f"# Model section of {source.resolve().name}, written by python -m tools.hf import.\n{text}"
    )


# --- configurations -------------------------------------------------------------------------------


def _padded_as(model: ModelConfig, training: dict[str, Any]) -> ModelConfig:
    """Return the model of a stock folder with settings of the run that exported it.

    config.json of a stock class does not contain settings such as the padding of the vocabulary;
    training.json does. If both describe the same model, that of training.json is returned.
    Otherwise only the padding is taken from training.json. Without one, ``model`` is returned
    unchanged.
    """
    trained = training.get("config", {}).get("model")
    if trained is None:
        return model
    try:
        known = replace(ModelConfig.from_dict(trained), mtp_depth=0)  # a stock class has no modules
    except TypeError:  # written by a newer version: only its padding is used
        known = replace(model, **{key: trained[key] for key in _padding(model) if key in trained})
    alike = [
        getattr(known, key) == getattr(model, key)
        for key in ("hidden_size", "vocab_size", "tie_embeddings", "causal", "norm_eps")
    ]
    if all(alike) and known.blocks() == model.blocks():
        return known
    return replace(model, **_padding(known))


def _padding(model: ModelConfig) -> dict[str, Any]:
    return {"make_vocab_size_divisible_by": model.make_vocab_size_divisible_by}


def _differing(model: dict[str, Any], trained: dict[str, Any], prefix: str = "model.") -> list[str]:
    """Return one text ``model.key is A, was B`` for each key whose value differs from ``trained``.

    Keys that ``trained``, which may be older, does not contain are ignored.
    """
    found = []
    for key in [key for key in model if key in trained]:
        if isinstance(model[key], dict) and isinstance(trained[key], dict):
            found += _differing(model[key], trained[key], f"{prefix}{key}.")
        elif model[key] != trained[key]:
            found.append(f"{prefix}{key} is {model[key]}, was {trained[key]}")
    return found


def _defaults(folder: Folder, dtype: str | None) -> dict[str, Any]:
    """Return run settings for a folder without training.json.

    They contain its name, its context length if known, and the precision of its weights.
    """
    stored = {stored.dtype for stored in folder.tensors.values()}
    bf16 = stored == {"BF16"} if dtype is None else dtype == "bfloat16"
    precision = "bf16" if bf16 else "fp32"
    length = folder.config.get("max_position_embeddings")
    defaults = {"seq_length": length} if isinstance(length, int) and length > 0 else {}
    return {"name": folder.path.resolve().name, "train": {"precision": precision}, "data": defaults}


def _all_in(ids: Any, entries: range) -> bool:
    """Return True if ``ids`` (one token id or a non-empty list) are in the range ``entries``."""
    tokens = ids if isinstance(ids, list) else [ids]
    return bool(tokens) and all(type(token) is int and token in entries for token in tokens)


@dataclass(frozen=True)
class Kept:
    """Progress, data and validation loss in an export; the defaults are of a new model."""

    progress: dict[str, Any] = field(
        default_factory=lambda: {"step": 0, "consumed_samples": 0, "order_samples": 0}
    )
    data: str = ""
    heldout_loss: float | None = None


def _kept(source: Source) -> Kept:
    """Return the progress, data and validation loss in training.json.

    Raises ConfigError if the file is damaged.
    """
    given = source.training
    progress, data = given.get("progress") or {}, given.get("data") or ""
    loss = given.get("heldout_loss")
    full = isinstance(progress, dict) and all(
        type(progress.get(key, 0)) is int and progress.get(key, 0) >= 0 for key in PROGRESS
    )
    if not (full and isinstance(data, str) and isinstance(loss, int | float | None)):
        path = source.folder.path / TRAINING
        raise ConfigError(
            f"{path} is damaged: its progress, data or heldout_loss has a wrong type; export again,"
            " or remove the file"
        )
    return Kept(
        Kept().progress | {key: progress[key] for key in PROGRESS if key in progress}, data, loss
    )


# --- weights --------------------------------------------------------------------------------------


def _grafted(
    source: Source, config: RunConfig, plan: Graft, dtype: str | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) of the target model of a graft.

    Each weight is initialised as in training and then receives its copied parts. dtype: None: that
    of the folder's embedding.
    """
    from fem_megatron.megatron.model import start

    model = config.model
    kind = STORED[source.folder.tensors["model.embed_tokens.weight"].dtype]
    for name, weight in model_weights(model).items():
        origin = plan.origins.get(name)
        if origin is None or origin.copied < weight.size:
            fresh = start(name, weight.shape, starts_from(model, weight), config.train.seed)
            fresh = fresh.to(DTYPES[dtype] if dtype else kind)
        else:
            fresh = torch.empty(weight.shape, dtype=kind)  # every element is overwritten
        if origin is not None:
            sources = list(source.weights.read(origin.sources).values())
            fresh = _owned(origin.fill(fresh, sources), dtype)
        yield name, fresh


def _owned(tensor: Tensor, dtype: str | None) -> Tensor:
    """Return the tensor, converted to ``dtype`` (None: unchanged), contiguous and in its own
    memory.

    The result is not a view of a memory-mapped file or of a larger tensor.
    """
    cast = tensor.to(DTYPES[dtype]) if dtype else tensor
    alone = cast.is_contiguous() and cast.untyped_storage().nbytes() == cast.nbytes
    if alone and cast is not tensor:
        return cast
    return cast.clone(memory_format=torch.contiguous_format)
