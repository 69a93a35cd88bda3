"""Rename optimizer state between the names of Megatron's distributed and its plain optimizer.

Both store the same fp32 tensors in the same files, NAME being the name of a weight:

    distributed (and DeepSpeed)          plain
    optimizer.state.param.NAME           optimizer.state.fp32_param.NAME;
                                         in fp32 training NAME itself
    optimizer.state.exp_avg.NAME         the same
    optimizer.state.exp_avg_sq.NAME      the same

common.pt contains the parameter groups:

    distributed   optimizer.optimizer.param_groups, each with ``step``
    plain         optimizer.optimizer.{param_groups, state.common_step};
                  in fp32 training optimizer.{param_groups, state.common_step}

``.metadata`` maps each name to a byte range of a file, so tensors can be renamed without being
read.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fem_common.errors import ConfigError
from pretrain.checkpoint.reader import NOT_WEIGHTS
from pretrain.engines.sharding import MOMENTS, SHARDING

STATE = "optimizer.state."
DISTRIBUTED, PLAIN = f"{STATE}param.", f"{STATE}fp32_param."


def has_moments(metadata: Metadata) -> bool:
    """Return True if the checkpoint contains the moments of the optimizer.

    The plain optimizer has none before its first step.
    """
    return any(name.startswith(f"{STATE}{MOMENTS[0]}.") for name in metadata.state_dict_metadata)


def renamed(
    metadata: Metadata, common: dict[str, Any], *, plain: bool
) -> tuple[Metadata, dict[str, Any]]:
    """Return ``.metadata`` and ``common.pt`` with the names of the other optimizer.

    The files of tensors remain valid. plain: rename from the distributed to the plain optimizer;
    False: the reverse.

    Raises:
        ConfigError: the state was not written by one of Megatron's optimizers.
    """
    outer = common["optimizer"]
    inner = outer if "param_groups" in outer else outer["optimizer"]
    muon = any(group.get("muon") for group in inner["param_groups"])
    sources = _sources(metadata, plain=plain, muon=muon)
    places = defaultdict(list)
    for index, place in metadata.storage_data.items():
        places[index.fqn].append((index, place))
    storage = {}
    for name, source in sources.items():
        for index, place in places[source]:
            storage[replace(index, fqn=name)] = place
    stored = metadata.state_dict_metadata
    moved = replace(
        metadata,
        state_dict_metadata={name: stored[source] for name, source in sources.items()},
        storage_data=storage,
        planner_data=None,
    )
    mixed = any(name.startswith(PLAIN) for name in (sources if plain else stored))
    convert = _plain if plain else _distributed
    try:
        optimizer = convert(outer, mixed=mixed)
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"common.pt lacks the parameter groups and step of Megatron's optimizers ({error!r})"
        ) from None
    return moved, {**common, "optimizer": optimizer}


def _sources(metadata: Metadata, *, plain: bool, muon: bool) -> dict[str, str]:
    """Return name in the converted checkpoint -> name of the same tensor in the source.

    muon: the optimizer is Muon, whose weights may lack the second moment.
    """
    stored = metadata.state_dict_metadata
    sources = {name: name for name in stored if not name.startswith((DISTRIBUTED, PLAIN))}
    here, there = (DISTRIBUTED, PLAIN) if plain else (PLAIN, DISTRIBUTED)
    for weight in [name for name in stored if not name.startswith(NOT_WEIGHTS)]:
        full = _is_fp32(metadata, weight)  # an fp32 weight is its own main weight
        main = weight if full and here + weight not in stored else here + weight
        moments = [f"{STATE}{moment}.{weight}" for moment in MOMENTS]
        for name in (main, *moments):
            optional = muon and name.startswith(f"{STATE}{MOMENTS[1]}.")
            if not optional and not _is_fp32(metadata, name):
                raise ConfigError(
                    f"the optimizer state is not Megatron's fp32 state: {name} is"
                    f" {'not fp32' if name in stored else 'missing'}"
                )
        if not (plain and full):
            sources[there + weight] = main
    return sources


def _is_fp32(metadata: Metadata, name: str) -> bool:
    stored = metadata.state_dict_metadata.get(name)
    return isinstance(stored, TensorStorageMetadata) and stored.properties.dtype == torch.float32


def _plain(optimizer: dict[str, Any], *, mixed: bool) -> dict[str, Any]:
    groups = optimizer["optimizer"]["param_groups"]
    without_step = []
    for group in groups:
        without_step.append({key: value for key, value in group.items() if key != "step"})
    inner = {
        "state": {"common_step": torch.tensor(float(groups[0]["step"]))},
        "param_groups": without_step,
    }
    return {"optimizer": inner} if mixed else inner


def _distributed(optimizer: dict[str, Any], *, mixed: bool) -> dict[str, Any]:
    inner = optimizer["optimizer"] if mixed else optimizer
    step = float(inner["state"]["common_step"])
    return {
        "optimizer": {"param_groups": [{**group, "step": step} for group in inner["param_groups"]]},
        "param_state_sharding_type": SHARDING["distrib_optim_sharding_type"],
    }
