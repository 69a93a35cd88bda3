"""What is compared: the engines' variants, and the run that each of them trains. Nothing is measured here, and no engine is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.config import EngineConfig, RunConfig

if TYPE_CHECKING:
    from pretrain.memory import StageMemory

BASELINE = "megatron"
VARIANTS: Mapping[str, EngineConfig] = {
    BASELINE: EngineConfig("megatron"),
    **{f"stage{stage}": EngineConfig("deepspeed", stage) for stage in (0, 1, 2, 3)},
    "stage1-offload": EngineConfig("deepspeed", 1, offload_optimizer=True),
    "stage3-offload": EngineConfig("deepspeed", 3, offload_optimizer=True, offload_parameters=True),
}
# A model whose parameters, not its activations, make the memory: 45M on a CPU, 374M on a GPU.
SIZES: Mapping[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "model": {"hidden_size": 640, "num_layers": 8, "num_attention_heads": 10, "ffn_hidden_size": 1728, "vocab_size": 4096},
        "data": {"seq_length": 64},
        "train": {"micro_batch_size": 2},
    },
    "gpu": {
        "model": {"hidden_size": 1024, "num_layers": 24, "num_attention_heads": 16, "ffn_hidden_size": 2816, "vocab_size": 32000},
        "data": {"seq_length": 2048},
        "train": {"micro_batch_size": 2},
    },
}


@dataclass(frozen=True)
class Job:
    """One variant's training on ``ranks`` processes: ``warmup`` steps, whose memory is measured, then ``steps`` that are timed.

    size: of SIZES; overrides: section.key=value over it. limit: seconds after which its ranks are ended.
    """

    variant: str
    ranks: int
    precision: str
    size: str
    warmup: int
    steps: int
    overrides: tuple[str, ...] = ()
    limit: int = 900

    def as_json(self) -> dict[str, Any]:
        """The job as JSON has it."""
        return {**asdict(self), "overrides": list(self.overrides)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """The job again."""
        return cls(**{**values, "overrides": tuple(values["overrides"])})


def configuration(job: Job) -> RunConfig:
    """The run of a job, checked; a step is one micro-batch on every rank unless the overrides give a global batch.

    Raises:
        ConfigError: an override is wrong, or the variant's engine cannot do this run.
    """
    from fem_common.errors import ConfigError
    from pretrain.loader import load_values  # PyYAML: the GPU suite plans without it
    from pretrain.validate import validate

    size = SIZES[job.size]
    values = {
        "model": {"mixer": "transformer", **size["model"]},
        "data": size["data"],
        "train": {**size["train"], "steps": job.warmup + job.steps, "precision": job.precision},
        "optimizer": {"schedule": "constant", "warmup_steps": 0},
    }
    config = load_values(values, Path("tools.bench.engines"), job.overrides)
    if replace(config.engine, deepspeed=EngineConfig().deepspeed) != EngineConfig():
        raise ConfigError("engine: name, zero_stage and offload are the variants': choose by --variants; engine.deepspeed.* can be set")
    if not any(text.startswith("train.global_batch_size=") for text in job.overrides):
        config = replace(config, train=replace(config.train, global_batch_size=job.ranks * config.train.micro_batch_size))
    config = replace(config, engine=replace(VARIANTS[job.variant], deepspeed=config.engine.deepspeed))
    if config.model.vocab_size is None:
        raise ConfigError("model.vocab_size: there is no data to read it from; give a number")
    validate(config, job.ranks)
    return config


def lacks(job: Job) -> str | None:
    """Why the job's variant cannot run here, as far as that shows before it is started (its ranks look at DeepSpeed's ops), or None."""
    needed = [("yaml", "PyYAML"), ("megatron", "megatron-core")]
    if VARIANTS[job.variant].name == "deepspeed":
        needed.append(("deepspeed", "DeepSpeed"))
    for module, package in needed:
        if find_spec(module) is None:
            return f"{package} is not installed"
    from fem_common.errors import ConfigError

    try:
        configuration(job)
    except ConfigError as error:
        return str(error)
    return None


def planned(job: Job, *, cuda: bool) -> StageMemory:
    """What ``--plan`` says of the memory of a rank of the job, which the configuration must allow."""
    from pretrain.plan import make_plan

    memory = make_plan(configuration(job), job.ranks, cuda=cuda).memory
    return max(memory, key=lambda stage: stage.total)


def step_tokens(job: Job) -> int:
    """Tokens of one step over all ranks."""
    config = configuration(job)
    return config.train.global_batch_size * config.data.seq_length
