"""Compared engines (variants), the run that each of them trains, and the launch of its ranks.

This module imports no engine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fem_common.errors import UserError, reason
from fem_common.files import write_whole
from fem_common.ports import server_port
from fem_common.text import duration
from pretrain.config import EngineConfig, RunConfig
from tools.bench.runner import MODELS, VOCABULARY, model_file

if TYPE_CHECKING:
    from pretrain.plan.memory import StageMemory
    from pretrain.plan.run_plan import Plan

ROOT = Path(__file__).resolve().parents[3]
TAIL = 15  # lines of a failed command's output that are shown
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
SETTLING = 1  # untimed steps after the warm-up, in which the allocator reaches a steady state


@dataclass(frozen=True)
class Job:
    """Training of one variant on ``ranks`` processes.

    variant: key of VARIANTS.
    size: key of SIZES ("cpu" or "gpu"), which contains the model and the batch.
    warmup: number of steps during which memory is measured.
    steps: number of timed steps after the warm-up.
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
        "model": {"mixer": "transformer", **size["model"]} if job.model is None else size["model"],
        "data": size["data"],
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
    if not any(text.startswith("train.global_batch_size=") for text in job.overrides):
        micro_batches = job.ranks * (
            MICRO_BATCHES if job.model is not None and job.size == "gpu" else 1
        )
        config = replace(
            config,
            train=replace(
                config.train, global_batch_size=micro_batches * config.train.micro_batch_size
            ),
        )
    config = replace(
        config, engine=replace(VARIANTS[job.variant], deepspeed=config.engine.deepspeed)
    )
    config = replace(
        config, model=replace(config.model, vocab_size=config.model.vocab_size or VOCABULARY)
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


def lacks(job: Job) -> str | None:
    """Return the reason why the job's variant cannot run on this machine, or None.

    The check starts no process; DeepSpeed's ops are checked later by the ranks.
    """
    needed = [("yaml", "PyYAML"), ("megatron", "megatron-core")]
    if VARIANTS[job.variant].name == "deepspeed":
        needed.append(("deepspeed", "DeepSpeed"))
    for module, package in needed:
        if find_spec(module) is None:
            return f"{package} is not installed"
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


SET_BY_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
ENDING = 60.0  # seconds in which torchrun must end its ranks; it gives them 30
POLL = 0.5  # seconds between reads of the ranks' answers
# torchrun's own lines in a log: messages about its ranks, and its final traceback.
WARNING = re.compile(r"[EW]\d{4} ")
TORCHRUN = re.compile(
    r'Traceback .*\n(?:  File "<frozen runpy>".*\n)*  File ".*distributed/run\.py"'
)

Answer = dict[str, Any]
Say = Callable[[str], None]
Partial = Callable[[list[Answer]], None]


class CannotRun(Exception):
    """Error raised if a job fails; the message is the reason in one line."""


def launch(
    job: Job,
    *,
    say: Say = lambda line: None,
    partial: Partial = lambda answers: None,
    logs: Path | None = None,
) -> list[Answer]:
    """Start the job's ranks (`tools.bench.engines.rank`) and return their answers, by rank.

    The progress callback is called with a line when the engine is built and after every step, and
    with the end of the ranks' log after a failure.

    partial: called with the answers so far after every timed step.
    logs: folder for the ranks' log, MODEL-VARIANT.log, which is written unless all steps were
        completed.

    At the job's limit the ranks are ended, and the answers so far are returned if they contain a
    timed step (`is_partial`).

    Raises:
        CannotRun: a rank failed or ended, or the limit was reached before the first timed step.
    """
    with tempfile.TemporaryDirectory(prefix="bench-engines-") as name:
        folder = Path(name)
        log = folder / "log"
        (folder / "job.json").write_text(json.dumps(job.as_json()), encoding="utf-8")
        torchrun = [
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={job.ranks}",
            f"--master-port={server_port()}",
        ]
        command = [
            sys.executable,
            "-W",
            "ignore",
            *torchrun,
            "-m",
            "tools.bench.engines.rank",
            str(folder),
        ]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
            try:
                late = not _watch(process, job, folder, say, partial)
            # Ctrl-C or SIGTERM: report before the ranks are ended, since the sender may not wait.
            except BaseException:
                say(f"{job.variant} was stopped{_keep(job, log, logs, say)}")
                raise
            finally:
                _end(process)
        try:
            answers = _answers(job, folder, log, late=late)
        except CannotRun as error:
            raise CannotRun(f"{error}{_keep(job, log, logs, say)}") from None
        if is_partial(job, answers):
            taken = f"{len(answers[0]['seconds'])} of {job.steps} timed steps"
            say(
                f"{job.variant}: ended after {job.limit} s with {taken}{_keep(job, log, logs, say)}"
            )
        return answers


def is_partial(job: Job, answers: Sequence[Answer]) -> bool:
    """Return True if fewer steps were timed than the job requires."""
    return len(answers[0]["seconds"]) < job.steps


def _watch(
    process: subprocess.Popen[bytes], job: Job, folder: Path, say: Say, partial: Partial
) -> bool:
    """Report the progress of rank 0 until the process ends.

    Return False if the limit is reached first.
    """
    until, reported, ended, late = time.monotonic() + job.limit, 0, False, False
    while not (ended or late):
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, min(POLL, until - time.monotonic())))
        ended, late = process.poll() is not None, time.monotonic() >= until
        lines = _lines(job, _found(folder).get(0, {}))
        for line in lines[reported:]:
            say(f"{job.variant}: {line}")
        if len(lines) > reported and (answers := so_far(job, folder)):
            partial(answers)
        reported = len(lines)
    return ended


def _lines(job: Job, answer: Answer) -> list[str]:
    """Return the progress of a rank as lines: one for the built engine, and one per step."""
    lines = [f"engine built in {answer['building']:.1f} s"] if "building" in answer else []
    before, tokens = job.warmup + SETTLING, plan_of(job, cuda=False).schedule.step_tokens
    for number, seconds in enumerate([*answer.get("untimed", ()), *answer.get("seconds", ())], 1):
        which = f"step {number} of {before + job.steps}{'' if number > before else ' (not timed)'}"
        rest = duration((before + job.steps - number) * seconds)
        lines.append(
            f"{which}: {seconds:.3f} s, {tokens / seconds:,.0f} tokens/s, about {rest} to go"
        )
    return lines


def _environment() -> dict[str, str]:
    given = {key: value for key, value in os.environ.items() if key not in SET_BY_LAUNCHERS}
    given.setdefault("OMP_NUM_THREADS", "1")
    given["PYTHONPATH"] = str(ROOT)
    return given


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its ranks with SIGTERM, or with SIGKILL after ENDING seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _keep(job: Job, log: Path, logs: Path | None, say: Say) -> str:
    """Report the last lines of the log and copy the log to the folder ``logs``.

    Return the end of an error message: the path of the copy, or the reason why it could not be
    written. It is empty if ``logs`` is None.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    own = [line for line in TORCHRUN.split(text)[0].splitlines() if not WARNING.match(line)]
    for line in own[-TAIL:]:
        say(f"  | {line}")
    if logs is None:
        return ""
    path = logs / f"{Path(job.model or job.size).stem}-{job.variant}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        return f"; the log is lost: {reason(error)}"
    return f"; log: {path}"


def _found(folder: Path) -> dict[int, Answer]:
    """Return rank -> current answer, ordered by the time at which the answers were last written."""
    files = sorted(folder.glob("answer*.json"), key=lambda path: path.stat().st_mtime_ns)
    return {
        int(path.stem.removeprefix("answer")): json.loads(path.read_text(encoding="utf-8"))
        for path in files
    }


def so_far(job: Job, folder: Path) -> list[Answer]:
    """Return the ranks' answers, cut to the timed steps that all ranks have completed.

    Return an empty list if a rank has not completed any timed step.
    """
    found = _found(folder)
    taken = min((len(answer.get("seconds", ())) for answer in found.values()), default=0)
    if len(found) < job.ranks or not taken:
        return []
    return [{**found[rank], "seconds": found[rank]["seconds"][:taken]} for rank in range(job.ranks)]


def _answers(job: Job, folder: Path, log: Path, *, late: bool = False) -> list[Answer]:
    """Return the ranks' answers after their processes have ended. Raises CannotRun.

    late: the time limit ended the ranks. The answers are then cut to the completed steps, and
    failures
        are ignored since ending the ranks causes them.
    """
    found, answers = _found(folder), so_far(job, folder)
    if late and not answers:
        before = len(found.get(0, {}).get("untimed", ()))
        raise CannotRun(
            f"no timed step within {job.limit} s, and {before} of the {job.warmup + SETTLING} "
            "steps before them"
        )
    # The first failed rank reports the reason; later ranks only report that the first one ended.
    gap = next((answer["gap"] for answer in found.values() if "gap" in answer), None)
    if gap is not None and not late:
        raise CannotRun(gap)
    if late or (answers and not is_partial(job, answers)):
        return answers
    lines = [
        line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    said = [line for line in lines if "exitcode" in line or "Signal" in line or "Error" in line]
    raise CannotRun(f"a rank ended without an answer: {(said or lines or ['no output'])[-1][:300]}")
