"""A checkpoint of weights alone, written in one process from whole tensors: what ``checkpoint.load`` starts from, at any layout.

In the trainer's own format, by its own last steps (``publish_step``). No optimizer, no random state, no model is built; of the weights one
is in memory at a time, where they come one at a time.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fem_common.errors import files_told
from fem_megatron.megatron.platform import stored
from pretrain.checkpoint.folder import (
    TENSORS,
    WRITING,
    HashedFile,
    Inherited,
    Progress,
    publish_step,
)
from pretrain.checkpoint.store import WEIGHTS_ALONE, manifest_of, write_common
from pretrain.config import RunConfig

_FILE = f"__0_0{TENSORS}"  # rank 0's first


def save_weights(
    folder: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    config: RunConfig,
    progress: Progress,
    content_key: str,
    heldout_loss: float | None = None,
    inherited: Inherited | None = None,
) -> Path:
    """Writes ``folder/step_NNNNNNNN`` with whole weights by their names in the model; returns its path.

    config: of the run that the weights are of, its model section as the tensors are. content_key: of the data that they were trained on, ""
    where nobody knows. Nothing that is there is deleted.

    Raises:
        ConfigError: the folder cannot be written to. StorageError: a file system failed.
    """
    told = {} if heldout_loss is None else {"heldout_loss": heldout_loss}
    return write_weights(
        folder, weights, {**manifest_of(config, progress, {"data": content_key}, inherited), **told}
    )


def write_weights(
    folder: Path, weights: Iterable[tuple[str, torch.Tensor]], manifest: dict[str, Any]
) -> Path:
    """As `save_weights`, of a manifest that says all but what ``publish_step`` adds and that these are weights alone."""
    final = folder / f"step_{manifest['progress']['step']:08d}"
    temporary = folder / f"{WRITING}{final.name}"
    try:
        with files_told():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _write(temporary, weights)
            publish_step(temporary, final, {**manifest, "contents": WEIGHTS_ALONE}, keep_last=None)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _write(folder: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The files of torch's format: tensors one after another, each an archive of its own, and ``.metadata``, which says where."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    with HashedFile(folder / _FILE) as file:
        for name, weight in weights:
            start, begin = torch.Size([0] * weight.dim()), file.tell()
            whole = weight.detach().clone(
                memory_format=torch.contiguous_format
            )  # a view would bring its whole storage along
            torch.save(whole, file)
            file.mark(begin, stored(whole))
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=weight.dtype),
                weight.size(),
                [ChunkStorageMetadata(start, weight.size())],
            )
            places[MetadataIndex(name, start)] = _StorageInfo(_FILE, begin, file.tell() - begin)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, storage_data=places)))
    write_common(folder, {})
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
