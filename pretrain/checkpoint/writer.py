"""A checkpoint of weights alone, written in one process from whole tensors: what ``checkpoint.load`` starts from, at any layout.

In the trainer's own format, by its own last steps (``publish_step``). No optimizer, no random state, no model is built.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

from fem_common.errors import files_told
from fem_megatron.megatron import platform
from pretrain.checkpoint.folder import WRITING, Inherited, Progress, publish_step
from pretrain.checkpoint.store import WEIGHTS_ALONE, manifest_of, write_tensors
from pretrain.config import RunConfig


def save_weights(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
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
    final = folder / f"step_{progress.step:08d}"
    temporary = folder / f"{WRITING}{final.name}"
    state = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in weights.items()}
    begun = not torch.distributed.is_initialized()
    if begun:
        platform.initialize_distributed()
    try:
        with files_told():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write_tensors(state, temporary, get_default_save_sharded_strategy("torch_dist")).execute_sync()
            told = {} if heldout_loss is None else {"heldout_loss": heldout_loss}
            manifest = {**manifest_of(config, progress, content_key, inherited), **told, "contents": WEIGHTS_ALONE}
            publish_step(temporary, final, manifest, keep_last=None)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        if begun:
            torch.distributed.destroy_process_group()
    return final
