"""What is compared: the engines' variants, the run that each of them trains, and how its ranks are started. No engine is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fem_common.ports import server_port
from pretrain.config import EngineConfig, RunConfig
from tools.bench.data_prep.processes import ROOT

if TYPE_CHECKING:
    from pretrain.plan.memory import StageMemory

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

    Raises ConfigError (an override is wrong, or the variant's engine cannot do this run).
    """
    from fem_common.errors import ConfigError
    from pretrain.config import run_of  # PyYAML: the GPU suite plans without it
    from pretrain.validate import validate

    size = SIZES[job.size]
    values = {
        "model": {"mixer": "transformer", **size["model"]},
        "data": size["data"],
        "train": {**size["train"], "steps": job.warmup + job.steps, "precision": job.precision},
        "optimizer": {"schedule": "constant", "warmup_steps": 0},
    }
    config = run_of(values, Path("tools.bench.engines"), job.overrides)
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
    from pretrain.plan.run_plan import make_plan

    memory = make_plan(configuration(job), job.ranks, cuda=cuda).memory
    return max(memory, key=lambda stage: stage.total)


def step_tokens(job: Job) -> int:
    """Tokens of one step over all ranks."""
    config = configuration(job)
    return config.train.global_batch_size * config.data.seq_length


SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENDING = 60.0  # seconds that torchrun has for ending its ranks; it gives them 30

Answer = dict[str, Any]


class CannotRun(Exception):
    """A job that came to nothing: why, in one line."""


def launch(job: Job) -> list[Answer]:
    """The ranks' answers (`tools.bench.engines.rank`), of fresh processes.

    Raises CannotRun (a rank failed, ended, or took longer than the job's limit).
    """
    with tempfile.TemporaryDirectory(prefix="bench-engines-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job.as_json()), encoding="utf-8")
        log = folder / "log"
        with log.open("wb") as stream:
            torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={job.ranks}", f"--master-port={server_port()}"]
            command = [sys.executable, "-W", "ignore", *torchrun, "-m", "tools.bench.engines.rank", str(folder)]
            process = subprocess.Popen(
                command, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
            )
            try:
                process.wait(job.limit)
            except subprocess.TimeoutExpired:
                raise CannotRun(f"no answer within {job.limit} s") from None
            finally:
                _end(process)
        return _answers(job, folder, log)


def _environment() -> dict[str, str]:
    given = {key: value for key, value in os.environ.items() if key not in SET_BY_LAUNCHERS}
    given.setdefault("OMP_NUM_THREADS", "1")
    given["PYTHONPATH"] = str(ROOT)
    return given


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks when it is asked to, not when it is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(job: Job, folder: Path, log: Path) -> list[Answer]:
    # The first to fail has the reason; the others say that it is gone.
    files = sorted(folder.glob("answer*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    gap = next((answer["gap"] for answer in found if "gap" in answer), None)
    if gap is not None:
        raise CannotRun(gap)
    if len(found) < job.ranks:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        said = [line for line in lines if "exitcode" in line or "Signal" in line or "Error" in line]
        raise CannotRun(f"a rank ended without an answer: {(said or lines or ['it said nothing'])[-1][:300]}")
    return sorted(found, key=lambda answer: int(answer["rank"]))
