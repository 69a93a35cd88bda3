"""Computation of the diagnostics of every layer from a checkpoint and data.

It runs in one process, for checkpoints of any parallel layout. fem_megatron.diagnostics defines the
quantities.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.prepared.indexed import FormatError, read_index
from fem_common.errors import ConfigError
from fem_common.files import start_of
from fem_megatron.config import ModelConfig
from pretrain.checkpoint.folder import find


@dataclass(frozen=True)
class Found:
    """Diagnostics of a model, and the title of their picture.

    values: name of a quantity (``layer_03/mixer/step_norm``) -> number.
    title: describes the model, step and data.
    """

    values: dict[str, float]
    title: str


@contextmanager
def megatron_model(
    checkpoint: Path, length: int
) -> Iterator[tuple[Any, ModelConfig, dict[str, Any]]]:
    """Load the complete model of a checkpoint in one process, in eval mode.

    length: sequence length of the inputs.

    Yields (the model chunk, its configuration, the checkpoint's manifest).

    Raises:
        ConfigError: the checkpoint cannot be read, or lacks weights of the model.
    """
    import torch

    from fem_megatron.megatron.platform import initialize_distributed
    from fem_megatron.megatron.upstream import import_megatron

    import_megatron()
    from megatron.core import parallel_state, tensor_parallel

    from fem_megatron.megatron import model as fem_model
    from pretrain.checkpoint.reader import load_full_model_state
    from pretrain.engines.building import destroy_model_parallel

    state, model, manifest = load_full_model_state(checkpoint)
    if not torch.distributed.is_initialized():
        initialize_distributed()
    parallel_state.initialize_model_parallel()
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        (chunk,) = fem_model.build(model, fem_model.Layout(), length, seed=0)
        answer = chunk.load_state_dict(state, strict=False)
        missing = {name for name in answer.missing_keys if not name.endswith("_extra_state")}
        if answer.unexpected_keys or missing - (
            {"output_layer.weight"} if model.tie_embeddings else set()
        ):
            raise ConfigError(
                f"checkpoint {checkpoint} lacks {sorted(missing)} of its model, and contains the "
                f"unexpected weights {answer.unexpected_keys}"
            )
        chunk.eval()
        with torch.no_grad():
            yield chunk, model, manifest
    finally:
        destroy_model_parallel()


def diagnose(checkpoint: Path, data: Path | None, tokens: int) -> Found:
    """Return the diagnostics of the model in fp32 for the first ``tokens`` tokens of ``data``.

    data: path of a .bin/.idx pair without ending; None uses the run's validation or training data.

    Raises:
        ConfigError: the checkpoint or the data cannot be read, or ``tokens`` is less than 2.
    """
    if tokens < 2:
        raise ConfigError(f"--tokens {tokens}: must be at least 2")
    found = find(checkpoint)
    prefix = data or data_of_run(found.manifest["config"]["data"])
    ids = first_tokens(prefix, tokens)
    import torch

    from fem_megatron.megatron.platform import device
    from fem_megatron.megatron.upstream import import_megatron

    import_megatron()
    from fem_megatron.diagnostics import observing
    from pretrain.report.observer import blocks_of

    with megatron_model(checkpoint, len(ids)) as (chunk, model, manifest):
        wrong = ids[(ids < 0) | (ids >= (model.vocab_size or 0))]
        if len(wrong):
            known = f"the token {wrong.max()}, but the model's vocabulary is {model.vocab_size}"
            raise ConfigError(f"{prefix} has {known}: name other data with --data PREFIX")
        row = torch.from_numpy(ids)[None].to(device())
        with observing(blocks_of([chunk]), len(ids)) as values:
            chunk(row, torch.arange(len(ids), device=row.device)[None], None)
    name, step = manifest["config"]["name"], manifest["progress"]["step"]
    return Found(values, f"{name}, step {step}, {len(ids)} tokens of {prefix.name}")


def data_of_run(section: dict[str, Any]) -> Path:
    """Return the prefix of the first validation source, or else of the first training source.

    section: the ``data`` section of a run's complete configuration.
    """
    return Path([*section["valid"], *section["train"]][0]["prefix"])


def first_tokens(prefix: Path, count: int) -> np.ndarray:
    """Return the first ``count`` token ids (int64) of a .bin/.idx pair, across documents.

    The result is shorter if the pair has fewer tokens.

    Raises:
        ConfigError: the pair does not exist, is not in Megatron's format, or has fewer than 2
        tokens.
    """
    try:
        kind = read_index(prefix.with_name(prefix.name + ".idx")).dtype
        ids = np.fromfile(prefix.with_name(prefix.name + ".bin"), dtype=kind, count=count)
    except (OSError, FormatError) as error:
        raise ConfigError(
            f"the data {prefix} cannot be read ({error}): {start_of(prefix)}name a .bin/.idx pair "
            "with --data PREFIX"
        ) from error
    if len(ids) < 2:
        raise ConfigError(
            f"the data {prefix} has {len(ids)} tokens: name other data with --data PREFIX"
        )
    return ids.astype(np.int64)
