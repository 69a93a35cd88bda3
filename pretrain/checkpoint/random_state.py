"""Random states in a checkpoint, stored as tensors, so that reading them executes no code.

A GPU run has other states than a CPU run: in addition the device's own generator (``cuda``), and
states of 16 instead of 5,056 bytes in Megatron's tracker. The manifest records the kind of device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from fem_megatron.megatron import platform
from pretrain.checkpoint.folder import Found, Log
from pretrain.checkpoint.manifest import RNG_DEVICE
from pretrain.checkpoint.reader import read_metadata
from pretrain.collectives import from_rank_0
from pretrain.config import ParallelConfig, RunConfig

Read = Callable[[dict[str, Any]], dict[str, Any]]
_PREFIX, _TRACKER = "rng.", "tracker."


def rng_tensors(layout: ParallelConfig) -> dict[str, ShardedTensor]:
    """Return this rank's random states as sharded uint8 tensors.

    Each (pipeline, tensor) rank has its own slot in every tensor.
    """
    state = platform.rng_state()
    flat: dict[str, torch.Tensor] = {key: state[key] for key in ("torch", "cuda") if key in state}
    flat |= {f"{_TRACKER}{name}": value for name, value in state["tracker"].items()}
    pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    offsets = (
        (0, pipeline_rank, layout.pipeline_model_parallel_size),
        (1, tensor_rank, layout.tensor_model_parallel_size),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)

    def sharded(name: str, value: torch.Tensor) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(
            f"{_PREFIX}{name}", value.clone(), *offsets, replica_id=replica, prepend_axis_num=2
        )

    return {name: sharded(name, value) for name, value in flat.items()}


def kind_of(tensors: Mapping[str, object]) -> str:
    """Return the kind of device, ``cuda`` or ``cpu``, to which these random states belong.

    tensors: random states by their names.
    """
    return "cuda" if "cuda" in tensors else "cpu"


def restore_rng(read: Read, found: Found, config: RunConfig, log: Log) -> None:
    """Set this rank's random states to those in a checkpoint of the same layout.

    If the checkpoint was written on another kind of device, the states are seeded from
    ``train.seed``, as at the start of a run, and rank 0 reports it. All ranks must call it
    together.

    Args:
        read: reads the tensors of a state dictionary from the checkpoint.

    Raises:
        ConfigError, StorageError: the checkpoint cannot be read.
    """
    wanted = rng_tensors(config.parallel)
    written, here = _written_on(found), kind_of(wanted)
    if written != here:
        platform.seed_rng(config.train.seed)
        log(
            f"random states are seeded from train.seed: {found.path} was written on {written}, "
            f"this run is on {here}"
        )
        return
    flat: dict[str, torch.Tensor] = read({"rng": wanted})["rng"]
    state: dict[str, Any] = {"tracker": {}}
    for name, value in flat.items():
        of_tracker = name.startswith(_TRACKER)
        (state["tracker"] if of_tracker else state)[name.removeprefix(_TRACKER)] = value
    platform.set_rng_state(state)


def _written_on(found: Found) -> str:
    """Return the kind of device, ``cuda`` or ``cpu``, on which a checkpoint was written.

    If the manifest is too old to record it, the names of the stored random states decide.
    """
    if RNG_DEVICE in found.manifest:
        return str(found.manifest[RNG_DEVICE])

    def stored() -> str:
        names = read_metadata(found.path / ".metadata").state_dict_metadata
        return kind_of(
            {name.removeprefix(_PREFIX): None for name in names if name.startswith(_PREFIX)}
        )

    return from_rank_0(stored)
