"""Compared engines (variants), and the run that each of them trains.

This module imports no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fem_common.errors import UserError
from pretrain.config import EngineConfig, RunConfig
from tools.bench.runner import MODELS, VOCABULARY, model_file

if TYPE_CHECKING:
    from pretrain.plan.memory import StageMemory
    from pretrain.plan.run_plan import Plan

BASELINE = "megatron"
VARIANTS: Mapping[str, EngineConfig] = {
    BASELINE: EngineConfig("megatron"),
    **{f"stage{stage}": EngineConfig("deepspeed", stage) for stage in (0, 1, 2, 3)},
    "stage1-offload": EngineConfig("deepspeed", 1, offload_optimizer=True),
    "stage3-offload": EngineConfig("deepspeed", 3, offload_optimizer=True, offload_parameters=True),
}
# Models whose memory is mostly parameters, not activations: 45M parameters for a CPU, 374M for a
# GPU.
SIZES: Mapping[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "model": {
            "mixer": "transformer",
            "hidden_size": 640,
            "num_layers": 8,
            "num_attention_heads": 10,
            "ffn_hidden_size": 1728,
            "vocab_size": 4096,
        },
        "data": {"seq_length": 64},
        "train": {"micro_batch_size": 2},
    },
    "gpu": {
        "model": {
            "mixer": "transformer",
            "hidden_size": 1024,
            "num_layers": 24,
            "num_attention_heads": 16,
            "ffn_hidden_size": 2816,
            "vocab_size": 32000,
        },
        "data": {"seq_length": 2048},
        "train": {"micro_batch_size": 2},
    },
}
MICRO_BATCHES = 4  # micro-batches per step and GPU, for a job with a named model
# Maximum sequence length and micro-batch size on a CPU, for a job with a named model.
CPU_TOKENS, CPU_BATCH = 256, 2


@dataclass(frozen=True)
class Job:
    """Training of one variant on ``ranks`` processes.

    variant: key of VARIANTS.
    size: key of SIZES ("cpu" or "gpu"), which contains the model and the batch.
    warmup: number of steps before the timed ones.
    steps: number of timed steps.
    model: replaces the model of ``size``; a name in configs/model or the path of a YAML file.
    overrides: ``section.key=value`` settings, applied to the model and the run.
    limit: seconds after which the ranks are ended.
    """

    variant: str
    ranks: int
    precision: str
    size: str
    warmup: int
    steps: int
    overrides: tuple[str, ...] = ()
    limit: int = 900
    model: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return {**asdict(self), "overrides": list(self.overrides)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """Restore a job from JSON values."""
        return cls(**{**values, "overrides": tuple(values["overrides"])})


@cache
def configuration(job: Job) -> RunConfig:
    """Return the validated configuration of a job.

    A step is one micro-batch per rank, or MICRO_BATCHES micro-batches for a job with ``model`` on
    GPUs, unless the overrides set a global batch size. A model without a vocabulary size gets
    VOCABULARY.

    Raises ConfigError (the model is unknown, an override is wrong, or the variant's engine does not
    support this run).
    """
    from fem_common.errors import ConfigError
    from pretrain.config import run_of  # needs PyYAML; the GPU suite plans without it
    from pretrain.validate import validate

    size = SIZES[job.size] if job.model is None else _size_of(model_file(job.model), job.size)
    values = {
        **size,
        "train": {**size["train"], "steps": job.warmup + job.steps, "precision": job.precision},
        "optimizer": {"schedule": "constant", "warmup_steps": 0},
    }
    # The path is that of a file in configs/run, so that names of parts are resolved.
    config = run_of(values, MODELS.with_name("run") / "tools.bench.engines", job.overrides)
    if replace(config.engine, deepspeed=EngineConfig().deepspeed) != EngineConfig():
        raise ConfigError(
            "engine: name, zero_stage and offload are set by the variants: use --variants; "
            "only engine.deepspeed.* can be overridden"
        )
    train = config.train
    if not any(text.startswith("train.global_batch_size=") for text in job.overrides):
        of_rank = MICRO_BATCHES if job.model is not None and job.size == "gpu" else 1
        train = replace(train, global_batch_size=job.ranks * of_rank * train.micro_batch_size)
    config = replace(
        config,
        train=train,
        engine=replace(VARIANTS[job.variant], deepspeed=config.engine.deepspeed),
        model=replace(config.model, vocab_size=config.model.vocab_size or VOCABULARY),
    )
    validate(config, job.ranks)
    return config


@cache
def _size_of(model: Path, device: str) -> dict[str, Any]:
    """Return an entry in the format of SIZES for a model's YAML file.

    Sequence length and micro-batch are those of the first run in configs/run that trains the model,
    and on a CPU at most CPU_TOKENS and CPU_BATCH. If no run trains the model, those of
    SIZES[device] are used.
    """
    from fem_common.config import read_values
    from pretrain.config import load_run

    runs = sorted(MODELS.with_name("run").glob("*.yaml")) if model.parent == MODELS else []
    run = next(
        (load_run(path) for path in runs if read_values(path).get("model") == model.stem), None
    )
    if run is None:
        return {**SIZES[device], "model": str(model)}
    tokens, batch = run.data.seq_length, run.train.micro_batch_size
    if device == "cpu":
        tokens, batch = min(tokens, CPU_TOKENS), min(batch, CPU_BATCH)
    return {
        "model": str(model),
        "data": {"seq_length": tokens},
        "train": {"micro_batch_size": batch},
    }


def lacks_package(*more: tuple[str, str]) -> str | None:
    """Return the reason if a package that the trainer needs is not installed, else None.

    more: (module, package) of further packages.
    """
    for module, package in (("yaml", "PyYAML"), ("megatron", "megatron-core"), *more):
        if find_spec(module) is None:
            return f"{package} is not installed"
    return None


def lacks(job: Job) -> str | None:
    """Return the reason why the job's variant cannot run on this machine, or None.

    The check starts no process; DeepSpeed's ops are checked later by the ranks.
    """
    deepspeed = VARIANTS[job.variant].name == "deepspeed"
    missing = lacks_package(*([("deepspeed", "DeepSpeed")] if deepspeed else ()))
    if missing:
        return missing
    try:
        configuration(job)
    except UserError as error:
        return str(error)
    return None


@cache
def plan_of(job: Job, *, cuda: bool) -> Plan:
    """Return the plan of the job's run, as ``--plan`` prints it.

    The job's configuration must be valid.
    """
    from pretrain.plan.run_plan import make_plan

    return make_plan(configuration(job), job.ranks, cuda=cuda)


def planned(job: Job, *, cuda: bool) -> StageMemory:
    """Return the planned memory of the rank that needs most, without starting the run."""
    return max(plan_of(job, cuda=cuda).memory, key=lambda stage: stage.total)
