"""Tasks of the suite and their order, the most important first. This module runs none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from shutil import which
from typing import Any

import torch

from fem_megatron.catalogue import MIXERS
from fem_megatron.megatron import platform
from kernels.check import WITHOUT_GRADIENTS, suites
from tools.bench.engines import variants as engines
from tools.bench.speed import implementations, lacks
from tools.bench.whole_model import (
    BASELINE,
    MODELS,
    PACKED,
    ROWS,
    SCALES,
    SINGLE,
    TABLES,
    VARIANTS,
)
from tools.bench.workloads import BASELINES, WORKLOADS, Size

# Parts in the order in which they begin, each with its share of the time. Parts that are not timed
# run at the same time and have one share. Time that a part does not use is left to the next one.
TOGETHER = ("correctness", "trainer", "features", "sanitizer")
SHARES: Mapping[str, float] = {
    "throughput": 0.24,
    "ops": 0.14,
    "models": 0.09,
    "trace": 0.07,
    "engines": 0.06,
}
PARTS = (*TOGETHER, *SHARES)
TOGETHER_SHARE = 0.40

LENGTHS = (1024, 2048, 4096, 8192, 16384)
TOKENS_A_CALL = 16384
TYPES = ("bfloat16", "float32")
FIRST = "fem_attention"
OURS = ("triton", "decode")
TOOLS = ("memcheck", "racecheck")  # tools of compute-sanitizer
ENGINE_LIMIT = 100  # seconds
DRY_OPS = ("aft_read", "free_energy")
TINY = asdict(Size(1, 16, 2, 16, 8))
THROUGHPUT = ("fem_sm_1.3b", "transformer_1.3b", "fem_sm_340m", "transformer_340m")  # configs/model
TINY_MODEL = (
    "hidden_size=64",
    "ffn_hidden_size=128",
    "num_layers=1",
    "num_attention_heads=2",
    "vocab_size=128",
)
TINY_JOB = (
    *(f"model.{each}" for each in TINY_MODEL),
    "data.seq_length=32",
    "train.micro_batch_size=1",
    "train.global_batch_size=1",
)
# Settings that no other task covers; each trains three steps. Every mixer follows.
SETTINGS = (
    "train.cuda_graphs=true",
    "train.fp8=tensorwise",
    "train.recompute=selective",
    "train.offload_activations=true",
    "data.documents=separate",
    "optimizer.name=muon",
)
# Kind of a task -> arguments of a dry run.
SMALLER: Mapping[str, dict[str, Any]] = {
    "correctness": {"small": True},
    "sanitize": {"small": True},
    "op": {"size": TINY, "budget": 0.0},
    "baseline": {"size": TINY, "budget": 0.0},
    "compile": {"lengths": [16], "tokens": 16},
    "model": {"tiny": True, "batch": 2, "budget": 0.0},
    "train": {"tiny": True},
}
DRY_FEATURES = ("data.documents=separate", "model.mixer=fem_gla")


@dataclass(frozen=True)
class Task:
    """One measurement or check, in the form that is sent to a worker.

    kind: selects the worker's function; ``arguments`` are its arguments, plain JSON.
    name: unique name, under which the outcome is recorded.
    rank: tasks with lower ranks run first.
    seconds: estimate, used until a task of the same kind was measured.
    part: part of the suite that contains the task, for example "ops".
    unit: tasks of one unit run in their order on one worker.
    together: True if the task is not timed, so that other tasks may run at the same time.
    tool: tool of compute-sanitizer under which the worker runs.
    """

    kind: str
    name: str
    arguments: dict[str, Any]
    rank: float
    seconds: float
    part: str = ""
    unit: str = ""
    together: bool = False
    tool: str = ""


@dataclass(frozen=True)
class Phase:
    """Tasks that are started until ``until`` seconds after the suite's start.

    together: several tasks run at the same time; otherwise they run one after the other.
    """

    tasks: list[Task]
    until: float
    together: bool = False


def phases(planned: Iterable[Task], seconds: float) -> list[Phase]:
    """Distribute the tasks to phases, and the time of the suite to the phases.

    seconds: time of the suite. Every phase gets a fixed share; the share of a phase without tasks
        is distributed to the other phases.
    """
    planned = list(planned)
    groups = [(TOGETHER_SHARE, [task for task in planned if task.together])]
    alone = [task for task in planned if not task.together]
    for part, share in SHARES.items():
        groups.append((share, [task for task in alone if task.part == part]))
    groups = [(share, tasks) for share, tasks in groups if tasks]
    full = sum(share for share, _ in groups)
    used = 0.0
    found = []
    for share, tasks in groups:
        used += share / full
        found.append(Phase(tasks, min(1.0, used) * seconds, together=tasks[0].together))
    return found


def tasks(
    parts: tuple[str, ...], ops: tuple[str, ...], device: torch.device | None, *, dry: bool = False
) -> tuple[list[Task], dict[str, str]]:
    """Return (all tasks in their order, name -> reason for each side that ``device`` cannot run).

    A side is an implementation or a baseline.

    parts: parts of the suite.
    ops: names of the operations; empty selects all.
    device: None assumes a machine that can run everything.
    dry: only a few tasks of each kind, at small sizes.
    """
    made: list[Task] = []
    makers = {
        "correctness": lambda: _correctness(ops),
        "trainer": _trainer,
        "features": _features,
        "sanitizer": lambda: _sanitizer(ops),
        "throughput": lambda: _throughput(dry=dry),
        "ops": lambda: _operations(ops),
        "models": _models,
        "engines": lambda: _engines(dry=dry),
        "trace": _trace,
    }
    for part in parts:
        made += [replace(task, part=part) for task in makers[part]()]
    if "ops" in parts or "models" in parts:
        part = "ops" if "ops" in parts else "models"
        made.append(Task("roofs", "roofs", {"matmul": 64, "copy": 64} if dry else {}, 0, 8, part))
    kept, gaps = [], {}
    for task in sorted(made, key=lambda task: task.rank):
        reason = None if device is None else _cannot(task, device)
        if reason is None:
            kept.append(task)
        else:
            gaps[_what(task)] = reason
    if dry:
        kept = list(_few(kept, ops or DRY_OPS))
    return kept, gaps


def _cannot(task: Task, device: torch.device) -> str | None:
    if task.kind == "baseline":
        return BASELINES[task.arguments["baseline"]].lacks(device)
    if task.kind == "engine":
        return engines.lacks(engines.Job.from_json(task.arguments)) or _too_large(task, device)
    if task.kind == "train":
        return _lacks_trainer(task)
    if task.kind == "sanitize" and device.type != "cuda":
        return "no GPU"
    if task.kind == "sanitize" and which("compute-sanitizer") is None:
        return "compute-sanitizer is not installed"
    implementation = task.arguments.get("implementation", "auto")
    return None if implementation == "auto" else lacks(_op_of(task), implementation, device)


def _lacks_trainer(task: Task) -> str | None:
    settings, missing = task.arguments["settings"], None
    if "train.cuda_graphs=true" in settings:
        missing = platform.lacks_graphs()
    elif any(setting.startswith("train.fp8=") for setting in settings):
        missing = platform.lacks_fp8()
    needed = f"it needs {missing}" if missing else None
    return engines.lacks_package() or needed


def _too_large(task: Task, device: torch.device) -> str | None:
    """Return the reason if the planned memory of a task's model exceeds the GPU's, else None."""
    if task.part != "throughput" or device.type != "cuda":
        return None
    planned = engines.planned(engines.Job.from_json(task.arguments), cuda=True).total
    there = platform.device_memory_bytes()
    if planned < there:
        return None
    return (
        f"its plan needs {planned / 2**30:.1f} GiB of GPU memory, and there are {there / 2**30:.1f}"
    )


def _op_of(task: Task) -> str:
    if "op" in task.arguments:
        return str(task.arguments["op"])
    return WORKLOADS[task.arguments["workload"]].op


def _what(task: Task) -> str:
    """Return the name under which a task that cannot run is reported.

    It does not contain the size or the case, since the task cannot run at any of them.
    """
    if task.kind == "baseline":
        return str(task.arguments["baseline"])
    if task.kind in ("engine", "train"):
        return task.name
    if task.kind == "sanitize":
        return f"sanitizer: {task.tool}"
    return f"{_op_of(task)}: {task.arguments['implementation']}"


def _few(planned: list[Task], ops: tuple[str, ...]) -> Iterator[Task]:
    """Yield a few of the planned tasks, at small sizes, for a dry run: each kind at least once."""
    seen = set[str]()
    for task in planned:
        key, wanted = task.kind, True
        if task.kind in ("correctness", "sanitize"):
            key, wanted = task.name, task.arguments["op"] in ops and _of_first_case(task)
        elif task.kind == "model":
            key = task.arguments["variant"]
            wanted = key in (BASELINE, "FEM-SM, C L T G")
        elif task.part == "throughput":
            key, wanted = task.name, not task.name.endswith("340m")
        elif task.kind == "train":
            key = task.name
            wanted = task.part != "features" or task.arguments["settings"][0] in DRY_FEATURES
        if wanted and key not in seen:
            seen.add(key)
            arguments = {**task.arguments, **SMALLER.get(task.kind, {})}
            yield replace(task, arguments=arguments, seconds=min(task.seconds, 8.0))


def _of_first_case(task: Task) -> bool:
    """Return True if a check is of the first case of its operation."""
    first_case = next(iter(suites()[task.arguments["op"]].cases))
    return bool(task.arguments["case"] == first_case)


def _correctness(ops: tuple[str, ...]) -> Iterator[Task]:
    """Yield a check of every case of every operation, for each implementation and both dtypes.

    This project's kernels and the first case of each operation come first.

    The tasks of one case form a unit, so that its float64 results are computed once.
    Implementations that run only on request (fla's approximations) are left out, since they are
    less precise than the cases require.
    """
    for op, suite in suites().items():
        if ops and op not in ops:
            continue
        for number, case in enumerate(suite.cases):
            for implementation in implementations(op, automatic=True):
                later = 0 if implementation in OURS or number == 0 else 1
                for dtype in TYPES:
                    arguments = {
                        "op": op,
                        "case": case,
                        "implementation": implementation,
                        "dtype": dtype,
                    }
                    name = f"{op}, {case}, {implementation}, {dtype}"
                    unit = f"{op}, {case}, {dtype}, {later}"
                    yield Task(
                        "correctness",
                        name,
                        arguments,
                        later + number / 100,
                        3,
                        unit=unit,
                        together=True,
                    )


def _trainer() -> Iterator[Task]:
    """Yield runs of the trainer whose losses must agree with each other (see `trainer`)."""
    fp32 = ["train.precision=fp32", "checkpoint.interval=4", "checkpoint.keep=[4]"]
    bf16 = ["train.precision=bf16", "checkpoint.interval=10", "checkpoint.keep=[10]"]
    runs = (
        ("fp32 on the CPU", "fp32", {"run": "cpu", "steps": 8, "settings": fp32, "cpu": True}),
        # Sums in another order differ by 1e-6 per step, which Adam amplifies. A wrong computation
        # differs by 1e-2 or more.
        (
            "fp32, the CPU's losses",
            "fp32",
            {"run": "fp32", "steps": 8, "settings": fp32, "against": "cpu", "bound": 1e-4},
        ),
        (
            "the CPU's checkpoint, continued",
            "fp32",
            {
                "run": "continued",
                "steps": 8,
                "settings": fp32,
                "begin": ["cpu", 4],
                "against": "cpu",
                "bound": 1e-4,
            },
        ),
        ("bf16, 20 steps", "bf16", {"run": "bf16", "steps": 20, "settings": bf16, "learns": True}),
        # Bitwise equal, except for library kernels that sum in any order. Their differences are
        # rounding in bfloat16, and small in a loss.
        (
            "bf16, resumed at step 10",
            "bf16",
            {
                "run": "resumed",
                "steps": 20,
                "settings": bf16,
                "begin": ["bf16", 10],
                "against": "bf16",
                "bound": 1e-3,
            },
        ),
    )
    for number, (name, unit, arguments) in enumerate(runs):
        yield Task(
            "train",
            f"trainer: {name}",
            arguments,
            -1 + number / 100,
            20,
            unit=f"trainer {unit}",
            together=True,
        )


def _features() -> Iterator[Task]:
    """Yield runs of three steps, one for each mixer and each setting that no other task covers."""
    mixers = [
        f"model.mixer={name}"
        for name, mixer in MIXERS.items()
        if mixer.package is None or find_spec(mixer.package)
    ]
    for number, setting in enumerate((*SETTINGS, *mixers)):
        run = "".join(letter if letter.isalnum() else "_" for letter in setting)
        arguments = {"run": run, "steps": 3, "settings": [setting, "train.precision=bf16"]}
        yield Task(
            "train", f"three steps: {setting}", arguments, 0.03 + number / 1000, 20, together=True
        )


def _sanitizer(ops: tuple[str, ...]) -> Iterator[Task]:
    """Yield a check of each operation's first case, small, under each tool of compute-sanitizer.

    Only this project's kernels are checked. Each tool has only one worker, since a worker starts
    slowly under a tool.
    """
    for tool in TOOLS:
        for task in _correctness(ops):
            if task.arguments["implementation"] in OURS and _of_first_case(task):
                arguments = {**task.arguments, "small": True}
                yield Task(
                    "sanitize", f"{tool}: {task.name}", arguments, 0.02, 5, together=True, tool=tool
                )


def _throughput(*, dry: bool) -> Iterator[Task]:
    """Yield runs of the Megatron engine on random tokens: tokens/s, MFU, and peak memory."""
    for number, name in enumerate(THROUGHPUT):
        job = engines.Job(
            "megatron",
            ranks=1,
            precision="bf16",
            size="gpu",
            warmup=2,
            steps=5,
            limit=ENGINE_LIMIT,
            model=name,
        )
        yield Task(
            "engine",
            f"throughput of {name}",
            (_tiny(job) if dry else job).as_json(),
            number,
            45 if "1.3b" in name else 30,
        )


def _tiny(job: engines.Job) -> engines.Job:
    return replace(job, precision="fp32", size="cpu", warmup=2, steps=2, overrides=TINY_JOB)


def _operations(ops: tuple[str, ...]) -> Iterator[Task]:
    """Yield the timing of every operation and of its baselines at every length.

    Tasks that compile the kernels come with them; they run before the timings, several at a time.
    """
    baselines: dict[str, Task] = {}
    for name, workload in WORKLOADS.items():
        if ops and workload.op not in ops:
            continue
        for implementation in sides(workload.op):
            requested = {"workload": name, "implementation": implementation}
            if implementation != "reference":
                yield Task(
                    "compile", f"compile {name}, {implementation}", requested, 0.5, 8, together=True
                )
            for tokens in LENGTHS:
                rank = _rank(name, implementation, tokens)
                size = workload.size(tokens, TOKENS_A_CALL)
                yield Task(
                    "op",
                    f"{name}, {implementation}, {tokens}",
                    {**requested, "size": asdict(size)},
                    rank,
                    1.2,
                )
        for tokens in LENGTHS:
            size = workload.size(tokens, TOKENS_A_CALL)
            for baseline, sized in workload.baselines.items():
                task = _baseline(baseline, sized(size), _rank(name, "auto", tokens))
                known = baselines.get(task.name)
                if known is None or task.rank < known.rank:  # operations may share a baseline
                    baselines[task.name] = task
    yield from baselines.values()


def sides(op: str) -> tuple[str, ...]:
    """Return the implementations of an operation that are timed.

    These are "auto", "reference", and each faster implementation if the operation has several.
    """
    faster = [name for name in implementations(op) if name not in ("reference", *WITHOUT_GRADIENTS)]
    return ("auto", *(faster if len(faster) > 1 else ()), "reference")


def _baseline(name: str, size: Size, rank: float) -> Task:
    label = (
        f"{name}, {size.heads} heads of {size.key} and {size.value}, {size.batch} x {size.tokens}"
    )
    return Task("baseline", label, {"baseline": name, "size": asdict(size)}, rank, 1.2)


def _rank(workload: str, implementation: str, tokens: int) -> float:
    """Return the rank that orders the timings of operations; lower ranks run first.

    Timings for performance targets are first, then every operation at 4096 tokens, then the other
    lengths. The reference implementations, which are slow, are last.
    """
    if implementation == "reference":
        return 7 if tokens <= 4096 else 8 + tokens / 1e5
    if (workload, tokens) in ((FIRST, 4096), (FIRST, 8192), ("FEM-GLA's read", 4096)):
        return 1
    return 4 if tokens == 4096 else 5


def _models() -> Iterator[Task]:
    """Yield the training step of every complete model, the Transformer of each size first."""
    urgent = {"Transformer", "FEM-SM, C L T G"}
    linear = {"GLA", "FEM-GLA, C L T G"}
    for scale, sizes in SCALES.items():
        large = scale in ("1.3B", "340M")
        for variant in MODELS if scale in (*TABLES, *SINGLE) else VARIANTS:
            few = urgent | linear if scale in PACKED else {BASELINE, "CEM"}
            if not large and scale not in (*TABLES, *SINGLE) and variant not in few:
                continue
            rank = 6.0 if scale == "table 7" or not scale.startswith("table") else 9.5
            if variant in ROWS:
                rank = 9.6
            if large and scale == "1.3B" and variant in urgent:
                rank = 2.0
            elif large and variant in urgent | linear:
                rank = 3.0
            if variant == BASELINE:
                rank -= 0.1
            arguments = {"scale": scale, "variant": variant, "batch": sizes.batch}
            yield Task(
                "model",
                f"{scale} {variant}",
                {**arguments, "recompute": False},
                rank,
                15 if large else 6,
            )
            if large and variant in urgent:
                yield Task(
                    "model",
                    f"{scale} {variant}, recomputing",
                    {**arguments, "recompute": True},
                    9,
                    15,
                )


def _engines(*, dry: bool) -> Iterator[Task]:
    """Yield a run of every engine and ZeRO stage on one rank.

    With one rank the optimizer's state is not divided, so the runs measure the cost of DeepSpeed
    itself and of its offload.
    """
    for number, variant in enumerate(engines.VARIANTS):
        job = engines.Job(
            variant, ranks=1, precision="bf16", size="gpu", warmup=3, steps=8, limit=ENGINE_LIMIT
        )
        yield Task(
            "engine",
            f"engine {variant}",
            (_tiny(job) if dry else job).as_json(),
            8.9 + number / 1000,
            40,
        )


def _trace() -> Iterator[Task]:
    """Yield one step of a 340M FEM with fewer layers under torch's profiler, run by the trainer."""
    wide = "hidden_size=1024 num_attention_heads=16 ffn_hidden_size=2816 num_layers=6".split()
    sizes = ["data.seq_length=4096", "train.micro_batch_size=2", "train.global_batch_size=2"]
    settings = [
        *(f"model.{each}" for each in wide),
        *sizes,
        "log.profile.steps=[4]",
        "train.precision=bf16",
    ]
    yield Task(
        "train",
        "trace of a step",
        {"run": "trace", "steps": 4, "settings": settings, "trace": True},
        0,
        30,
    )
