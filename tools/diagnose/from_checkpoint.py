"""Checkpoint and data -> every layer's quantities, in one process, whatever layout the checkpoint was trained at. Draws nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.store.indexed import FormatError, read_index
from fem_common.errors import ConfigError
from fem_megatron.megatron.platform import device, import_megatron


@dataclass(frozen=True)
class Found:
    """Quantities by name (``layer_03/mixer/step_norm``), and what they are of."""

    values: dict[str, float]
    title: str


def diagnose(checkpoint: Path, data: Path | None, tokens: int) -> Found:
    """The quantities of the model in fp32, of the first ``tokens`` tokens of ``data`` (None: the run's validation or training data).

    Raises:
        ConfigError: the checkpoint or the data cannot be read, or too few tokens are asked for.
    """
    if tokens < 2:
        raise ConfigError(f"--tokens {tokens}: must be at least 2")
    import_megatron()
    from megatron.core import parallel_state, tensor_parallel

    from fem_megatron.diagnostics import observing
    from fem_megatron.megatron import model as fem_model
    from fem_megatron.megatron import platform
    from pretrain.checkpoint.reader import load_full_model_state
    from pretrain.engines.building import destroy_model_parallel
    from pretrain.report.observer import blocks_of

    state, model, manifest = load_full_model_state(checkpoint)
    prefix = data or data_of_run(manifest["config"]["data"])
    ids = first_tokens(prefix, tokens)
    if ids.max() >= (model.vocab_size or 0):
        raise ConfigError(f"{prefix} has the token {ids.max()}, but the model knows {model.vocab_size}: name other data with --data PREFIX")
    if not torch.distributed.is_initialized():
        platform.initialize_distributed()
    parallel_state.initialize_model_parallel()
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        (chunk,) = fem_model.build(model, fem_model.Layout(), len(ids), seed=0)
        wanted = {name for name in chunk.state_dict() if not name.endswith("_extra_state")} - set(state)
        if wanted - ({"output_layer.weight"} if model.tie_embeddings else set()):
            raise ConfigError(f"checkpoint {checkpoint} lacks weights of its model: {', '.join(sorted(wanted))}")
        chunk.load_state_dict(state, strict=False)
        chunk.eval()
        row = torch.from_numpy(ids)[None].to(device())
        with torch.no_grad(), observing(blocks_of([chunk]), len(ids)) as values:
            chunk(row, torch.arange(len(ids), device=row.device)[None], None)
    finally:
        destroy_model_parallel()
    name, step = manifest["config"]["name"], manifest["progress"]["step"]
    return Found(values, f"{name}, step {step}, {len(ids)} tokens of {prefix.name}")


def data_of_run(section: dict[str, Any]) -> Path:
    """The first validation source, else the first training source, of a run's resolved ``data`` section."""
    return Path([*section["valid"], *section["train"]][0]["prefix"])


def first_tokens(prefix: Path, count: int) -> np.ndarray:
    """The first ``count`` ids (int64) of a .bin/.idx pair, across documents, fewer where it has no more.

    Raises:
        ConfigError: the pair is not there, or is not Megatron's.
    """
    try:
        kind = read_index(prefix.with_name(prefix.name + ".idx")).dtype
        ids = np.fromfile(prefix.with_name(prefix.name + ".bin"), dtype=kind, count=count)
    except (OSError, FormatError) as error:
        raise ConfigError(f"the data {prefix} cannot be read ({error}): name a .bin/.idx pair with --data PREFIX") from error
    if len(ids) < 2:
        raise ConfigError(f"the data {prefix} has {len(ids)} tokens: name other data with --data PREFIX")
    return ids.astype(np.int64)
