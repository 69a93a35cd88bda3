"""Translate the run's configuration for DeepSpeed, and list the unsupported settings.

The typed keys override DeepSpeed's file (``engine.deepspeed.file``), and the run's other sections
override both. Every difference is logged. The module imports neither torch nor deepspeed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError, convert_os_errors
from fem_common.text import did_you_mean
from fem_megatron.catalogue import describe, mixer_names
from pretrain.config import RunConfig
from pretrain.plan.zero_memory import BUCKET

NO_CLIPPING = 1e30  # stage 0 computes a norm only if it clips
# Top-level keys that DeepSpeed reads and this engine passes on. DeepSpeed silently ignores unknown
# keys.
_TOP_LEVEL = (
    "activation_checkpointing aio bf16 comms_logger communication_data_type csv_monitor data_types "
    "dump_state flops_profiler fp16 gradient_accumulation_steps gradient_clipping "
    "gradient_predivide_factor memory_breakdown optimizer prescale_gradients scheduler "
    "seq_parallel_communication_data_type sparse_gradients steps_per_print tensorboard "
    "train_batch_size train_micro_batch_size_per_gpu wall_clock_breakdown wandb "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization"
).split()
# DeepSpeed's key -> this configuration's key that decides it.
_OURS = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "gradient_clipping": "optimizer.clip_grad",
    "optimizer": "the section optimizer",
    "scheduler": "optimizer.schedule",
    "activation_checkpointing": "train.recompute",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "data_types": "train.precision",
    "communication_data_type": "engine.deepspeed.communication_data_type",
    "zero_optimization.stage": "engine.zero_stage",
    "zero_optimization.offload_optimizer": "engine.offload_optimizer",
    "zero_optimization.offload_param": "engine.offload_parameters",
    "zero_optimization.overlap_comm": "parallel.overlap_grad_reduce",
}
_ZERO_NAMES = {  # this configuration's name -> DeepSpeed's, if they differ
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
}
_ZERO = (
    "reduce_bucket_size allgather_bucket_size reduce_scatter contiguous_gradients "
    "round_robin_gradients sub_group_size prefetch_bucket_size param_persistence_threshold "
    "model_persistence_threshold max_live_parameters max_reuse_distance"
).split()


def check_engine(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield an error text for each setting that the run's engine does not support.

    Each text names the nearest setting that works. Only the configuration is examined.

    Raises:
        ConfigError, StorageError: see `read_file`.
    """
    engine = config.engine
    layout = config.parallel
    muon = config.optimizer.name == "muon"
    external = next((name for name in mixer_names(config.model) if describe(name).package), None)
    if muon and external:
        yield (
            f"optimizer.name = muon: the weights of {external} belong to another package; set "
            "optimizer.name=adamw"
        )
    if engine.name == "megatron":
        for key in ("offload_optimizer", "offload_parameters"):
            if getattr(engine, key):
                yield (
                    f"engine.{key} = true needs engine.name=deepspeed; megatron keeps everything "
                    "on its device"
                )
        return
    stage, pipeline = engine.zero_stage, layout.pipeline_model_parallel_size
    if pipeline > 1:
        yield (
            f"parallel.pipeline_model_parallel_size = {pipeline}: engine.name = deepspeed has no "
            "pipeline; set parallel.pipeline_model_parallel_size=1 (engine.zero_stage=3 splits "
            "the parameters instead), or engine.name=megatron"
        )
    if stage == 0 and config.train.precision == "bf16":
        yield (
            "engine.zero_stage = 0 supports only train.precision=fp32; in bf16 set "
            "engine.zero_stage=1"
        )
    if stage == 0 and engine.offload_optimizer:
        yield "engine.offload_optimizer = true needs a split optimizer; set engine.zero_stage=1"
    if engine.offload_parameters and stage != 3:
        yield f"engine.offload_parameters = true needs engine.zero_stage=3, and it is {stage}"
    if engine.offload_parameters and not engine.offload_optimizer:
        yield (
            "engine.offload_parameters = true needs engine.offload_optimizer=true: the update runs "
            "where the parameters are"
        )
    if not layout.use_distributed_optimizer:
        yield (
            "parallel.use_distributed_optimizer = false is Megatron's plain optimizer; "
            "engine.name=deepspeed needs true"
        )
    if muon and stage == 3:
        yield (
            "optimizer.name = muon needs full parameters, which engine.zero_stage = 3 splits; set "
            "engine.zero_stage=2"
        )
    if muon and engine.offload_optimizer:
        yield (
            "optimizer.name = muon has no update on the CPU; set engine.offload_optimizer=false, "
            "or optimizer.name=adamw"
        )
    if external and stage == 3:
        yield (
            f"model.mixer: {external}'s own layers are untested with engine.zero_stage = 3; set "
            "engine.zero_stage=2"
        )
    if stage == 3 and config.train.offload_activations:
        yield (
            "train.offload_activations = true would keep gathered parameters, which "
            "engine.zero_stage = 3 frees; set engine.zero_stage=2"
        )
    read_file(config)


def read_file(config: RunConfig) -> dict[str, Any]:
    """Return the mapping in the file ``engine.deepspeed.file``; {} if no file is set.

    Raises:
        ConfigError: the file does not exist, is not JSON, or has a top-level key that this engine
            does not pass on.
        StorageError: a file system failed.
    """
    name = config.engine.deepspeed.file
    if name is None:
        return {}
    with convert_os_errors():
        text = Path(name).read_text(encoding="utf-8")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"engine.deepspeed.file = {name}: not valid JSON, line {error.lineno}: {error.msg}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"engine.deepspeed.file = {name}: expected a mapping")
    for key in values:
        if key not in _TOP_LEVEL:
            hint = did_you_mean(key, _TOP_LEVEL, "valid keys are")
            raise ConfigError(
                f"engine.deepspeed.file = {name}: {key} is not a key that is passed on to "
                f"DeepSpeed; {hint}"
            )
    return values


def deepspeed_config(
    config: RunConfig, data_parallel: int, *, parameters: int, cuda: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return DeepSpeed's configuration, and log lines about settings without effect.

    The lines are about keys of the user's file that the run overrides, and about settings that only
    Megatron uses.

    parameters: number of elements of one rank's model, the upper limit of a useful bucket size.
    """
    ours = _ours(config, data_parallel, parameters=parameters, cuda=cuda)
    theirs = read_file(config)
    notes = [
        f"engine.deepspeed.file: {key} = {_short(there)} is overridden by {_short(here)} from "
        f"{_OURS[key]}"
        for key, there, here in _differences(theirs, ours)
    ]
    if config.parallel.overlap_param_gather:
        notes.append(
            "parallel.overlap_param_gather has no effect: it is Megatron's, and DeepSpeed's stage "
            "decides when it gathers"
        )
    for key in ("optimizer", "scheduler", "activation_checkpointing"):
        theirs.pop(key, None)
    return _laid_over(theirs, ours), notes


def _ours(config: RunConfig, data_parallel: int, *, parameters: int, cuda: bool) -> dict[str, Any]:
    """Return the part of DeepSpeed's configuration that the run decides."""
    engine = config.engine
    train = config.train
    settings = config.engine.deepspeed
    bf16 = train.precision == "bf16"
    bucket = max(2, min(BUCKET, parameters + parameters % 2))
    zero: dict[str, Any] = {
        "stage": engine.zero_stage,
        "overlap_comm": bool(config.parallel.overlap_grad_reduce),
    }
    if settings.file is None or "zero_optimization" not in read_file(config):
        zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    zero |= {
        _ZERO_NAMES.get(key, key): value
        for key in _ZERO
        if (value := getattr(settings, key)) is not None
    }
    pinned = cuda if settings.pin_memory is None else settings.pin_memory
    if engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if engine.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    clip = config.optimizer.clip_grad
    return {
        "train_batch_size": train.global_batch_size
        # To DeepSpeed the context-parallel ranks have different data.
        * config.parallel.context_parallel_size,
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": train.global_batch_size
        // (train.micro_batch_size * data_parallel),
        "gradient_clipping": clip if clip > 0 or engine.zero_stage else NO_CLIPPING,
        "fp16": {"enabled": False},
        # check_grad_overflow: a step that is not finite on any rank is skipped on all.
        "bf16": {"enabled": bf16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": settings.communication_data_type or "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        **({"wall_clock_breakdown": True} if settings.wall_clock_breakdown else {}),
    }


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, the file's value, the run's value) for each key that the run overrides.

    theirs: the user's file. ours: the part that the run decides. The file's value "auto" leaves the
    decision to the run and is no difference.
    """
    found = []
    for key in _OURS:
        there, here = _at(theirs, key), _at(ours, key)
        if there is None or there == "auto":
            continue
        if isinstance(there, dict) and isinstance(here, dict):
            same = all(
                value == "auto" or here.get(name, value) == value for name, value in there.items()
            )
        else:
            same = there == here
        if not same:
            found.append((key, there, here))
    return found


def _at(values: dict[str, Any], key: str) -> Any:
    """Return the value at a dotted key, or None."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None  # type: ignore[assignment]
    return values


def _laid_over(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping ``under``, without values "auto", overridden recursively by ``over``."""
    merged = {key: value for key, value in under.items() if value != "auto"}
    for key, value in over.items():
        merged[key] = (
            _laid_over(merged[key], value)
            if isinstance(value, dict) and isinstance(merged.get(key), dict)
            else value
        )
    # Offload in the file has no effect unless the run sets it.
    if "stage" in over:
        for key in ("offload_optimizer", "offload_param"):
            if key not in over:
                merged.pop(key, None)
    return merged


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
