"""Program of a worker process, which performs tasks.

It reads one JSON line for each task from stdin and answers with a JSON line: ``{"result": ...}`` or
``{"gap": reason}``.

The process ends after a fault of the GPU, since its later results could not be trusted. The suite
then starts another process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from fem_megatron.megatron import platform
from kernels.check import Expected, expect, judge, suites
from tools.bench.engines import figures
from tools.bench.engines.runs import launch
from tools.bench.engines.variants import Job
from tools.bench.gpu_suite.plan import LENGTHS, TOKENS_A_CALL
from tools.bench.gpu_suite.trainer import train
from tools.bench.runner import measure
from tools.bench.speed import time_baseline, time_workload
from tools.bench.whole_model import SCALES, train_step
from tools.bench.workloads import WORKLOADS, Draw, Size

SECONDS = 0.15  # time for measuring one number of an operation
MODEL_SECONDS = 2.0
MATMUL, COPY = 8192, 2**31  # width of the square matrix product; bytes that are copied
TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ENDING = 10.0  # seconds in which child processes must end

_expected: dict[tuple[Any, ...], Expected] = {}  # results of the last case only


def perform(kind: str, arguments: dict[str, Any], limit: float) -> Any:
    """Return the result of one task of `tools.bench.gpu_suite.plan`, as JSON values.

    limit: seconds that the task should take at most; the tasks that start processes enforce it.
    """
    if kind == "train":
        return train(arguments, limit)
    if kind == "engine":
        return _engine(arguments, limit)
    return DOES[kind](arguments)


def _correctness(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Check one implementation in one case and return errors and bounds of its results.

    The case's float64 results are cached for the next task of the same case.
    """
    suite, real = suites()[arguments["op"]], not arguments.get("small", False)
    key = arguments["op"], arguments["case"], arguments["dtype"], real
    if key not in _expected:
        _expected.clear()
        _expected[key] = expect(
            suite, arguments["case"], TYPES[arguments["dtype"]], platform.device(), real=real
        )
    findings = judge(suite, _expected[key], arguments["implementation"])
    return [{**asdict(finding), "good": finding.good} for finding in findings]


def _compile(arguments: dict[str, Any]) -> None:
    """Run an operation at every timed size, forward and backward, to fill Triton's cache."""
    workload = WORKLOADS[arguments["workload"]]
    for tokens in arguments.get("lengths", LENGTHS):
        size = workload.size(tokens, arguments.get("tokens", TOKENS_A_CALL))
        outputs = workload.call(
            workload.inputs(Draw(platform.device(), torch.bfloat16, 0), size),
            arguments["implementation"],
        )
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    platform.synchronize()


def _roofs(arguments: dict[str, Any]) -> dict[str, float]:
    """Return the FLOP/s of a bfloat16 matrix product of random numbers, and the bytes/s of a copy.

    The bytes of the copy are those read plus those written.
    """
    width = arguments.get("matmul", MATMUL)
    count = arguments.get("copy", COPY)
    device = platform.device()
    a, b = (torch.randn(width, width, device=device).to(torch.bfloat16) for _ in range(2))
    product = measure(lambda number: a @ b, 1.0)
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda number: target.copy_(source), 0.5)
    return {
        "matmul_flops": 2.0 * width**3 / product.seconds,
        "copy_bytes": 2.0 * count / copy.seconds,
    }


def _op(arguments: dict[str, Any]) -> dict[str, Any]:
    size, name = Size(**arguments["size"]), arguments["workload"]
    return asdict(
        time_workload(
            name,
            arguments["implementation"],
            size,
            torch.bfloat16,
            arguments.get("budget", SECONDS),
        )
    )


def _baseline(arguments: dict[str, Any]) -> dict[str, Any]:
    size = Size(**arguments["size"])
    return asdict(
        time_baseline(arguments["baseline"], size, torch.bfloat16, arguments.get("budget", SECONDS))
    )


def _model(arguments: dict[str, Any]) -> dict[str, Any]:
    """Time a complete model's training step and return its costs.

    If the batch does not fit in memory, half of the batch is tried, and then recomputation.
    """
    scale = replace(SCALES[arguments["scale"]], batch=arguments["batch"])
    recompute = arguments["recompute"]
    if arguments.get("tiny"):
        model = replace(
            scale.model,
            num_layers=1,
            hidden_size=32,
            num_attention_heads=2,
            ffn_hidden_size=None,
            vocab_size=64,
        )
        scale = replace(scale, model=model, tokens=8)
    tries = [
        (scale.batch, recompute),
        (max(1, scale.batch // 2), recompute),
        (max(1, scale.batch // 2), True),
    ]
    for number, (batch, again) in enumerate(tries):
        try:
            sized = replace(scale, batch=batch)
            cost = train_step(
                arguments["variant"],
                sized,
                scale.dtype,
                arguments.get("budget", MODEL_SECONDS),
                recompute=again,
            )
            return asdict(cost)
        except torch.OutOfMemoryError:
            if number == len(tries) - 1:
                raise
    raise AssertionError("unreachable")


def _engine(arguments: dict[str, Any], limit: float) -> dict[str, Any]:
    """Train with an engine in separate processes and return the figures of the run.

    If the time limit ends the run, only the completed steps count.
    """
    job = Job.from_json(arguments)
    job = replace(job, limit=max(1, min(job.limit, int(limit - ENDING))))
    measured = launch(job, log=lambda line: print(line, file=sys.stderr, flush=True))
    return asdict(figures.of(job, [measured], cuda=platform.has_cuda()))


DOES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "correctness": _correctness,
    "sanitize": _correctness,
    "compile": _compile,
    "roofs": _roofs,
    "op": _op,
    "baseline": _baseline,
    "model": _model,
}


def _device_name() -> str:
    try:
        return platform.device_name()
    except RuntimeError as error:
        return f"out of reach ({str(error).splitlines()[0]})"


def answer(line: str) -> tuple[dict[str, Any], bool]:
    """Return (answer to one input line, True if this process can continue)."""
    requested = json.loads(line)
    # A process that cannot reach the GPU would silently compute on the CPU.
    there = _device_name()
    if there != requested.get("device", there):
        return {
            "gap": f"the device of this process is {there}, not {requested['device']}",
            "lost": True,
            "gone": True,
        }, False
    found: dict[str, Any]
    try:
        found = {
            "result": perform(
                requested["kind"], requested["arguments"], requested.get("limit", 600.0)
            )
        }
    except torch.OutOfMemoryError:
        found = {"gap": "out of memory"}
    except Exception as error:
        # Any error of a kernel or library is recorded, so that the other tasks are still performed.
        found = {
            "gap": f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        }
    try:
        platform.synchronize()
        platform.reset_peak_memory()
    except RuntimeError as error:
        return {"gap": found.get("gap") or str(error).splitlines()[0], "lost": True}, False
    return found, True


def _end_with(parent: int) -> None:
    """Wait until the suite's process ``parent`` has ended, then end this process's group.

    The child processes get SIGTERM and time to stop before SIGKILL.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGTERM)
    time.sleep(ENDING)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Answer each input line until the input ends, and return the exit code.

    The output of libraries is redirected to stderr, so that it is not read as an answer.
    """
    # Ignore the group's SIGTERM; the child processes have the default handler.
    signal.signal(signal.SIGTERM, lambda *_: None)
    if os.getpgrp() == os.getpid():
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Answers use a separate descriptor, since the next line redirects stdout to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        found, sane = answer(line)
        print(json.dumps(found), file=answers, flush=True)
        if not sane:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
