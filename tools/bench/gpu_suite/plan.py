"""What the suite does and in which order: the most important first, so that the time that there is goes to it. Nothing runs here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernels.check import WITHOUT_GRADIENTS, suites
from tools.bench.engines import variants as engines
from tools.bench.speed import implementations, lacks
from tools.bench.whole_model import BASELINE, PACKED, SCALES, VARIANTS
from tools.bench.workloads import BASELINES, WORKLOADS, Size

PARTS = ("correctness", "ops", "models", "engines")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
TOKENS_A_CALL = 16384
TYPES = ("bfloat16", "float32")
FIRST = "fem_attention"
OURS = ("triton", "decode")
ENGINE_LIMIT = 100  # seconds; less than a worker has, which would leave the ranks behind


@dataclass(frozen=True)
class Task:
    """One thing that a worker is asked for, as JSON could say it. rank: the lower, the sooner; seconds: a guess, before any was seen.

    together: may run beside others on the GPU, since nothing in it is timed.
    """

    kind: str
    name: str
    arguments: dict[str, Any]
    rank: float
    seconds: float
    together: bool = False


def tasks(parts: tuple[str, ...], ops: tuple[str, ...], device: torch.device | None) -> tuple[list[Task], dict[str, str]]:
    """All tasks in their order, and what cannot run on ``device``: name -> why. None: a machine that can run everything (``--dry``)."""
    made: list[Task] = []
    if "correctness" in parts:
        made += _correctness(ops)
    if "ops" in parts:
        made += _operations(ops)
    if "models" in parts:
        made += _models()
    if "engines" in parts:
        made += _engines()
    if "ops" in parts or "models" in parts:
        made.append(Task("roofs", "roofs", {}, 0, 8))
    kept, gaps = [], {}
    for task in sorted(made, key=lambda task: task.rank):
        reason = None if device is None else _cannot(task, device)
        if reason is None:
            kept.append(task)
        else:
            gaps[_what(task)] = reason
    return kept, gaps


def _cannot(task: Task, device: torch.device) -> str | None:
    if task.kind == "baseline":
        return BASELINES[task.arguments["baseline"]].lacks(device)
    if task.kind == "engine":
        return engines.lacks(engines.Job.from_json(task.arguments))
    implementation = task.arguments.get("implementation", "auto")
    if implementation == "auto":
        return None
    op = task.arguments["op"] if task.kind == "correctness" else WORKLOADS[task.arguments["workload"]].op
    return lacks(op, implementation, device)


def _what(task: Task) -> str:
    """The side of a task, without its size or case: it cannot run at any of them."""
    if task.kind == "baseline":
        return str(task.arguments["baseline"])
    if task.kind == "engine":
        return task.name
    op = task.arguments["op"] if task.kind == "correctness" else WORKLOADS[task.arguments["workload"]].op
    return f"{op}: {task.arguments['implementation']}"


def _correctness(ops: tuple[str, ...]) -> Iterator[Task]:
    """Every case of every operation and implementation in both types: our kernels' first, and of each the first cases.

    What runs only where it is asked for (fla's approximations) promises less than the cases ask, and is timed alone.
    """
    for op, suite in suites().items():
        if ops and op not in ops:
            continue
        for number, case in enumerate(suite.cases):
            for implementation in implementations(op, automatic=True):
                later = 0 if implementation in OURS or number == 0 else 1
                for dtype in TYPES:
                    arguments = {"op": op, "case": case, "implementation": implementation, "dtype": dtype}
                    name = f"{op}, {case}, {implementation}, {dtype}"
                    yield Task("correctness", name, arguments, later + number / 100, 6 if number == 0 else 3, together=True)


def _operations(ops: tuple[str, ...]) -> Iterator[Task]:
    """Every operation and what it is held against, at every length; compiling comes before, many at a time."""
    baselines: dict[str, Task] = {}
    for name, workload in WORKLOADS.items():
        if ops and workload.op not in ops:
            continue
        for implementation in sides(workload.op):
            asked = {"workload": name, "implementation": implementation}
            if implementation != "reference":
                yield Task("compile", f"compile {name}, {implementation}", asked, 0.005, 8, together=True)
            for tokens in LENGTHS:
                rank = _rank(name, implementation, tokens)
                size = workload.size(tokens, TOKENS_A_CALL)
                yield Task("op", f"{name}, {implementation}, {tokens}", {**asked, "size": asdict(size)}, rank, 1.2)
        for tokens in LENGTHS:
            size = workload.size(tokens, TOKENS_A_CALL)
            for baseline, sized in workload.baselines.items():
                task = _baseline(baseline, sized(size), _rank(name, "auto", tokens))
                known = baselines.get(task.name)
                if known is None or task.rank < known.rank:  # several operations may be held against one
                    baselines[task.name] = task
    yield from baselines.values()


def sides(op: str) -> tuple[str, ...]:
    """What is timed of an operation: "auto", its definition, and where it has more than one faster form each of them by name."""
    faster = [name for name in implementations(op) if name not in ("reference", *WITHOUT_GRADIENTS)]
    return ("auto", *(faster if len(faster) > 1 else ()), "reference")


def _baseline(name: str, size: Size, rank: float) -> Task:
    label = f"{name}, {size.heads} heads of {size.key} and {size.value}, {size.batch} x {size.tokens}"
    return Task("baseline", label, {"baseline": name, "size": asdict(size)}, rank, 1.2)


def _rank(workload: str, implementation: str, tokens: int) -> float:
    """Targets first, then every operation at 4096, then the other lengths; the definitions, which are slow, last."""
    if implementation == "reference":
        return 7 if tokens <= 4096 else 8 + tokens / 1e5
    if (workload, tokens) in ((FIRST, 4096), (FIRST, 8192), ("FEM-GLA's read", 4096)):
        return 1
    return 4 if tokens == 4096 else 5


def _models() -> Iterator[Task]:
    """Every whole model; the Transformer of its size before it."""
    urgent = {"Transformer", "FEM-SM, C L T G"}
    linear = {"GLA", "FEM-GLA, C L T G"}
    for scale, sizes in SCALES.items():
        large = scale in ("1.3B", "340M")
        for variant in VARIANTS:
            few = urgent | linear if scale in PACKED else {BASELINE, "CEM"}
            if not large and scale != "table 5" and variant not in few:
                continue
            rank = 6.0
            if large:
                rank = 2 if scale == "1.3B" and variant in urgent else 3 if variant in urgent | linear else 6
            if variant == BASELINE:
                rank -= 0.1
            arguments = {"scale": scale, "variant": variant, "batch": sizes.batch}
            yield Task("model", f"{scale} {variant}", {**arguments, "recompute": False}, rank, 15 if large else 6)
            if large and variant in urgent:
                yield Task("model", f"{scale} {variant}, recomputing", {**arguments, "recompute": True}, 9, 15)


def _engines() -> Iterator[Task]:
    """Every engine and ZeRO stage on one rank: without peers to split over, what DeepSpeed itself and its offload cost."""
    for number, variant in enumerate(engines.VARIANTS):
        job = engines.Job(variant, ranks=1, precision="bf16", size="gpu", warmup=3, steps=8, limit=ENGINE_LIMIT)
        yield Task("engine", f"engine {variant}", job.as_json(), 8.9 + number / 1000, 40)
