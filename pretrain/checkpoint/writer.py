"""Write a checkpoint that contains only weights, in one process, from full tensors.

A run can start from the checkpoint with ``checkpoint.load`` at any layout. The files have the
format of the trainer's checkpoints and are published by the same function (``publish_step``). No
optimizer state, random state or model is built. If ``weights`` is a generator, only one weight is
in memory at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fem_common.errors import convert_os_errors
from pretrain.checkpoint.folder import (
    TENSORS,
    WRITING,
    HashedFile,
    Inherited,
    Progress,
    publish_step,
)
from pretrain.checkpoint.manager import WEIGHTS_ALONE, manifest_of, write_small_files
from pretrain.checkpoint.tensors import Places, write_metadata, write_tensor
from pretrain.config import RunConfig

_FILE = f"__0_0{TENSORS}"  # name of rank 0's first file


def save_weights(
    folder: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    config: RunConfig,
    progress: Progress,
    content_key: str,
    heldout_loss: float | None = None,
    inherited: Inherited | None = None,
) -> Path:
    """Write ``folder/step_NNNNNNNN`` with full weights, and return its path.

    The weights have their names in the model. Existing checkpoints are never deleted.

    Args:
        config: the configuration of the run that the weights belong to; its model section fits the
            tensors.
        content_key: the key of the data that the weights were trained on, "" if unknown.

    Raises:
        ConfigError: the folder cannot be written to.
        StorageError: a file system failed.
    """
    extra = {} if heldout_loss is None else {"heldout_loss": heldout_loss}
    return write_weights(
        folder,
        weights,
        {**manifest_of(config, progress, {"data": content_key}, inherited), **extra},
    )


def write_weights(
    folder: Path, weights: Iterable[tuple[str, torch.Tensor]], manifest: dict[str, Any]
) -> Path:
    """Write weights as `save_weights` does, with a given manifest.

    This function adds the key ``contents``; ``publish_step`` adds the files and hashes.
    """
    final = folder / f"step_{manifest['progress']['step']:08d}"
    temporary = folder / f"{WRITING}{final.name}"
    try:
        with convert_os_errors():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _write(temporary, weights)
            publish_step(temporary, final, {**manifest, "contents": WEIGHTS_ALONE}, keep_last=None)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _write(folder: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write the files of the ``torch_dist`` format.

    They are one file that contains each tensor as a separate archive, and ``.metadata``, which
    locates the tensors.
    """
    tensors: dict[str, Any] = {}
    places: Places = {}
    with HashedFile(folder / _FILE) as file:
        for name, weight in weights:
            start = torch.Size([0] * weight.dim())
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=weight.dtype),
                weight.size(),
                [ChunkStorageMetadata(start, weight.size())],
            )
            places[MetadataIndex(name, start)] = write_tensor(file, weight)
    write_metadata(folder, Metadata(tensors), places)
    write_small_files(folder, {})
