"""The verb ``export``: finds in a checkpoint what an export needs. Formats are ``export``'s business and ``pretrain``'s."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from fem_common.errors import ConfigError
from pretrain.checkpoint_reader import Weights, find
from pretrain.config import RunConfig
from pretrain.data_facts import Manifest

from .errors import ExportError
from .export import check_shapes, export, refuse_occupied
from .folder import CONFIG, is_folder
from .recipes import VOCABULARY
from .shards import byte_count, to_stderr
from .stock import why_not_stock
from .tokenizer import Tokenizer
from .training import data_manifests, heldout_loss, run_config, training_card, training_record


def export_checkpoint(
    checkpoint: Path, out: Path, *, dtype: str | None, tokenizer: Path | None, max_shard_size: str, overwrite: bool
) -> None:
    """Exports ``checkpoint`` (of any layout; a run directory: its newest) to ``out``; dtype and tokenizer default to the checkpoint's own.

    Raises:
        ExportError: see ``export``; the tokenizer that the training used is not found, or another one is given.
        ConfigError: the checkpoint cannot be read. StorageError: a file system failed.
    """
    size = _size(max_shard_size)
    _refuse(checkpoint, out, overwrite)
    found = find(checkpoint)
    _refuse_overlap(found.path, out)
    config, source = run_config(found.path, found.manifest), Weights(found.path)
    check_shapes(source.shapes, config.model)
    manifests, notes = data_manifests(config)
    for note in notes:
        print(f"tools.hf: note: {note}", file=sys.stderr)
    used = _tokenizer(tokenizer, found.path, config, manifests)
    loss = heldout_loss(found.path, found.manifest)
    export(
        source,
        config.model,
        out,
        tokenizer=used,
        dtype=source.dtypes[VOCABULARY[0]] if dtype is None else getattr(torch, dtype),
        card=training_card(config, found, loss, manifests),
        training=training_record(found.manifest, loss),
        known_ids=found.inherited.special_ids,
        overwrite=overwrite,
        shard_bytes=size,
        tell=to_stderr("tools.hf: export"),
    )
    trust = "" if why_not_stock(config.model) is None else ", trust_remote_code=True"
    print(f"wrote {out}: AutoModelForCausalLM.from_pretrained({str(out)!r}{trust}) loads it")


def tokenizer_folder(step: Path, data: dict[str, Any]) -> Path | None:
    """The tokenizer of a checkpoint: the one beside its steps (an import's), else the one that the ``data`` section names; None: none.

    Raises:
        ExportError: the folder named is not there.
    """
    beside = step.parent / "tokenizer"
    if beside.is_dir():
        return beside
    if data["tokenizer"] is None:
        return None
    folder = Path(data["tokenizer"])
    if not folder.is_dir():
        raise ExportError(f"the tokenizer of the training, {folder}, is not there: name its folder with --tokenizer DIR")
    return folder


def _size(text: str) -> int:
    try:
        return byte_count(text)
    except ValueError as error:
        raise ExportError(f"--max-shard-size {error}") from None


def _refuse(checkpoint: Path, out: Path, overwrite: bool) -> None:
    """Raises ExportError or ConfigError for what needs no look into the checkpoint."""
    refuse_occupied(out, overwrite)
    if not checkpoint.exists():
        raise ConfigError(f"there is no checkpoint {checkpoint}")
    if not checkpoint.is_dir():
        raise ConfigError(f"{checkpoint} is a file: a checkpoint is a folder step_NNNNNNNN, or a run directory that has some")
    if is_folder(checkpoint):
        raise ExportError(f"{checkpoint} is a Hugging Face folder already, so there is nothing to export: transformers loads it as it is")
    _refuse_overlap(checkpoint, out, inside=False)
    if out.exists() and any(out.iterdir()) and not (out / CONFIG).is_file():
        raise ExportError(f"{out} is no earlier export ({CONFIG} is missing), and nothing else is replaced: choose another folder")


def _refuse_overlap(checkpoint: Path, out: Path, *, inside: bool = True) -> None:
    """Raises ExportError where ``out`` would replace the checkpoint, or, ``inside``, lie in it."""
    place, target = checkpoint.resolve(), out.resolve()
    if place.is_relative_to(target) or (inside and target.is_relative_to(place)):
        relation = "is" if place == target else "holds" if place.is_relative_to(target) else "lies in"
        raise ExportError(f"OUT {out} {relation} the checkpoint {checkpoint}: choose a folder outside")


def _tokenizer(given: Path | None, step: Path, config: RunConfig, manifests: dict[str, Manifest]) -> Tokenizer | None:
    """The tokenizer to export. Raises ExportError where it is not the one that the training data were made with."""
    folder = given or tokenizer_folder(step, {"tokenizer": config.data.tokenizer})
    if folder is None:
        print("tools.hf: note: the checkpoint names no tokenizer, so none is exported; name one with --tokenizer DIR", file=sys.stderr)
        return None
    tokenizer = Tokenizer.load(folder, config.model)
    for prefix, manifest in manifests.items():
        recorded = manifest.tokenizer["sha256"]
        if tokenizer.sha256 is not None and tokenizer.sha256 != recorded:
            raise ExportError(
                f"the tokenizer in {folder} (sha256 {tokenizer.sha256[:12]}, {tokenizer.entries} entries) is not the one that {prefix} was "
                f"made with ({recorded[:12]}, {manifest.tokenizer['vocab_size']} entries): not the model's"
            )
    return tokenizer
