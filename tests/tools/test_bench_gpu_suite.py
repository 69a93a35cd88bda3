"""The GPU suite without a GPU: its plan, its processes on tiny tasks, what it makes of their answers. Nothing here looks at speed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.fem_attention import table
from tests.test_house import ROOT
from tools.bench.engines.variants import VARIANTS, Job
from tools.bench.gpu_suite import __main__ as suite
from tools.bench.gpu_suite import plan, worker
from tools.bench.gpu_suite.plan import PARTS, Task, tasks
from tools.bench.gpu_suite.pool import Clock, Outcome, Worker, work
from tools.bench.gpu_suite.report import report, short
from tools.bench.gpu_suite.results import Results
from tools.bench.whole_model import SCALES
from tools.bench.workloads import WORKLOADS, Size

CPU = torch.device("cpu")
MACHINE: dict[str, Any] = {
    "date": "2026-01-01",
    "device": "NVIDIA H100",
    "python": "3",
    "torch": "2",
    "toolkit": None,
    "threads": 1,
    "packages": {},
}


def op(workload: str, tokens: int, implementation: str = "auto", total: int = plan.TOKENS_A_CALL) -> Task:
    size = asdict(WORKLOADS[workload].size(tokens, total))
    return Task("op", f"{workload} {tokens}", {"workload": workload, "implementation": implementation, "size": size}, 1, 1)


def timed(seconds: float, flops: float = 1e12, traffic: float = 1e9) -> dict[str, Any]:
    def one(value: float) -> dict[str, Any]:
        return {"seconds": value, "spread": 0.01, "calls": 10}

    return {"forward": one(seconds / 3), "both": one(seconds), "flops": [flops / 3, flops], "bytes": [traffic / 3, traffic]}


# --- the plan ---------------------------------------------------------------------------------------------------------------------


def test_the_most_important_comes_first() -> None:
    planned, cannot = tasks(PARTS, (), None)
    assert cannot == {}
    assert [task.rank for task in planned] == sorted(task.rank for task in planned)
    assert len({task.name for task in planned}) == len(planned)
    alone = [task.name for task in planned if not task.together]
    assert alone[0] == "roofs"
    first = {"fem_attention, auto, 4096", "fem_attention, auto, 8192", "1.3B Transformer", "1.3B FEM-SM, C L T G"}
    assert all(alone.index(name) < 40 for name in first)
    assert alone.index("1.3B Transformer") < alone.index("1.3B FEM-SM, C L T G")
    assert "16384" in alone[-2] or "recomputing" in alone[-1]
    # Nothing that is timed runs beside something else.
    assert {task.kind for task in planned if task.together} <= {"correctness", "compile"}


def test_parts_and_operations_can_be_chosen() -> None:
    assert {task.kind for task in tasks(("models",), (), None)[0]} == {"roofs", "model"}
    assert [task.arguments["variant"] for task in tasks(("engines",), (), None)[0]] == list(VARIANTS)
    chosen = tasks(("ops",), ("time_decay_scan",), None)[0]
    assert {task.arguments.get("workload", "time_decay_scan") for task in chosen} == {"time_decay_scan"}
    checks = tasks(("correctness",), ("time_decay_scan",), None)[0]
    assert {task.arguments["op"] for task in checks} == {"time_decay_scan"}
    assert {task.arguments["dtype"] for task in checks} == {"bfloat16", "float32"}


def test_what_a_machine_cannot_run_is_named() -> None:
    planned, cannot = tasks(PARTS, (), CPU)
    assert cannot["attention: SDPA cudnn"] == "no GPU"
    assert cannot["engine stage0"].startswith("engine.zero_stage = 0 is for train.precision=fp32 alone")
    assert not any("SDPA" in task.name for task in planned)


def test_every_task_can_be_said_in_json() -> None:
    for task in tasks(PARTS, (), None)[0]:
        assert json.loads(json.dumps(task.arguments)) == task.arguments
        assert task.kind in worker.DOES


# --- what a worker does -----------------------------------------------------------------------------------------------------------


def test_a_worker_does_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(SCALES["table 5"].model, num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=64)
    monkeypatch.setitem(SCALES, "table 5", replace(SCALES["table 5"], model=tiny, tokens=8))
    size = asdict(Size(1, 16, 2, 16, 8))
    asked: dict[str, dict[str, Any]] = {
        "correctness": {"op": "time_decay_scan", "case": "normal", "implementation": "reference", "dtype": "float32", "small": True},
        "compile": {"workload": "time_decay_scan", "implementation": "auto", "lengths": [16], "tokens": 16},
        "roofs": {"matmul": 32, "copy": 64},
        "op": {"workload": "fem_attention", "implementation": "auto", "size": size, "budget": 0.0},
        "baseline": {"baseline": "attention: torch's choice", "size": size, "budget": 0.0},
        "model": {"scale": "table 5", "variant": "FEM-SM, C L T G", "batch": 2, "recompute": False, "budget": 0.0},
        "engine": Job("megatron", 1, "bf16", "gpu", 2, 2).as_json(),
    }
    said = {"rank": 0, "seconds": [1.0, 3.0], "peak_bytes": 7, "host_bytes": 5, "loss": 6.0}
    monkeypatch.setattr(worker, "launch", lambda job: [said])  # tests/tools/test_bench_engines.py starts real ranks
    assert asked.keys() == worker.DOES.keys()
    found = {kind: worker.answer(json.dumps({"kind": kind, "arguments": arguments})) for kind, arguments in asked.items()}
    assert all(sane for _, sane in found.values())
    results = {kind: json.loads(json.dumps(answer))["result"] for kind, (answer, _) in found.items()}
    assert all(finding["good"] for finding in results["correctness"])
    assert set(results["roofs"]) == {"matmul_flops", "copy_bytes"}
    pairs = 2 * 16 * 17 / 2
    assert results["op"]["flops"] == [2 * pairs * 32, 7 * pairs * 32]
    assert results["engine"]["steps"] == [2.0] and results["engine"]["peaks"] == [7]
    assert results["model"]["batch"] == 2 and results["model"]["tokens"] == 16
    for outcome in (Outcome(Task(kind, kind, asked[kind], 0, 1), results[kind]) for kind in asked):
        Results([outcome], "cpu")  # takes it


def test_what_a_machine_says_no_to_is_a_gap() -> None:
    size = asdict(Size(1, 16, 2, 16, 8))
    for kind, arguments, why in (
        ("baseline", {"baseline": "attention: SDPA cudnn", "size": size}, "ValueError: no GPU"),
        ("op", {"workload": "no such", "implementation": "auto", "size": size}, "KeyError: 'no such'"),
    ):
        assert worker.answer(json.dumps({"kind": kind, "arguments": arguments})) == ({"gap": why}, True)


def test_a_model_that_does_not_fit_is_tried_smaller_then_recomputing(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[tuple[int, bool]] = []

    def full(variant: str, scale: Any, dtype: torch.dtype, budget: float, *, recompute: bool) -> Any:
        tries.append((scale.batch, recompute))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(worker, "train_step", full)
    asked = {"scale": "1.3B", "variant": "Transformer", "batch": 4, "recompute": False}
    assert worker.answer(json.dumps({"kind": "model", "arguments": asked})) == ({"gap": "out of memory"}, True)
    assert tries == [(4, False), (2, False), (2, True)]


# --- the pool ---------------------------------------------------------------------------------------------------------------------


def silent(outcome: Outcome, left: int, seconds: float) -> None:
    """Tells nobody."""


def test_real_processes_answer_and_outlive_a_mistake(tmp_path: Path) -> None:
    done = [Task("roofs", "roofs", {"matmul": 16, "copy": 16}, 0, 1), Task("op", "none", {"workload": "none"}, 0, 1)]
    workers = [Worker(tmp_path / "log")]
    try:
        outcomes, left_out = work([*done, replace(done[0], name="again")], workers, Clock(5), silent)
        assert left_out == [] and [outcome.task.name for outcome in outcomes] == ["roofs", "none", "again"]
        assert outcomes[1].gap and outcomes[1].gap.startswith("KeyError")
        assert outcomes[0].result["matmul_flops"] > 0 and outcomes[2].gap is None
        first = workers[0].process
        # One that hangs is ended, and what comes after has a new process.
        assert workers[0].ask(Task("roofs", "slow", {"matmul": 2048, "copy": 16}, 0, 1), 0.05) == {"gap": "no answer within 0 s"}
        assert "result" in workers[0].ask(done[0], 60.0)
        assert workers[0].process is not first
    finally:
        workers[0].close()


class Scripted(Worker):
    """A worker that answers at once, and moves the clock."""

    def __init__(self, move: Callable[[float], None], seconds: float) -> None:
        self.move, self.seconds = move, seconds

    def ask(self, task: Task, limit: float) -> dict[str, Any]:
        self.move(self.seconds)
        return {"result": task.name}


def test_what_does_not_fit_into_the_time_is_left_out() -> None:
    now = [0.0]
    clock = Clock(1, lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    planned = [Task("op", str(number), {}, 0, 5) for number in range(10)]
    told: list[tuple[str, int, float]] = []
    outcomes, left_out = work(planned, [Scripted(move, 13.0)], clock, lambda o, left, s: told.append((o.task.name, left, s)))
    # The first was guessed at 5 s and took 13, so from then on 13 are reckoned with.
    assert [outcome.task.name for outcome in outcomes] == ["0", "1", "2", "3"]
    assert [task.name for task in left_out] == ["4", "5", "6", "7", "8", "9"]
    assert told[0] == ("0", 9, 47.0)


def test_a_process_that_lost_the_gpu_is_replaced(tmp_path: Path) -> None:
    lost = Worker(tmp_path / "log")
    program = "import sys, json; sys.stdin.readline(); print(json.dumps({'gap': 'illegal address', 'lost': True}), flush=True)"
    lost.errors = (tmp_path / "log").open("w")
    pipe = subprocess.PIPE
    lost.process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True)
    answer = lost.ask(Task("op", "x", {}, 0, 1), 60.0)
    assert answer["gap"].startswith("illegal address (the GPU was lost") and lost.process is None


# --- results and report -----------------------------------------------------------------------------------------------------------


def measured() -> list[Outcome]:
    """Both sides of every target, as workers would answer."""
    name, outcomes = "fem_attention", []
    for tokens, ours in ((4096, 2.2e-3), (8192, 4.4e-3)):
        size = WORKLOADS[name].size(tokens, plan.TOKENS_A_CALL)
        outcomes.append(Outcome(op(name, tokens), timed(ours)))
        outcomes.append(Outcome(op(name, tokens, "cudnn"), timed(ours)))
        outcomes.append(Outcome(op(name, tokens, "flash"), timed(2 * ours)))
        for engine, seconds in (("cudnn", tokens / 4096 * 2e-3), ("flash", tokens / 4096 * 5e-3)):
            asked: dict[str, Any] = {"baseline": f"attention: SDPA {engine}", "size": asdict(size.wider(2))}
            outcomes.append(Outcome(Task("baseline", engine, asked, 1, 1), timed(seconds)))
    for variant, seconds in (("Transformer", 0.1), ("FEM-SM, C L T G", 0.12)):
        asked = {"scale": "1.3B", "variant": variant, "batch": 2, "recompute": False}
        cost = {
            "step": timed(seconds)["both"],
            "tokens": 8192,
            "flops": 0.5 * 989e12 * 0.1,
            "peak_bytes": 3e10,
            "batch": 2,
            "recompute": False,
        }
        outcomes.append(Outcome(Task("model", variant, asked, 1, 1), cost))
    outcomes.append(Outcome(Task("roofs", "roofs", {}, 0, 1), {"matmul_flops": 8e14, "copy_bytes": 4e12}))
    return outcomes


def finding(error: float) -> Outcome:
    asked = {"op": "fem_attention", "case": "normal", "implementation": "cudnn", "dtype": "float32"}
    good = error <= 1e-5
    return Outcome(
        Task("correctness", "x", asked, 0, 1), [{"case": "normal", "result": "d q", "error": error, "bound": 1e-5, "good": good}]
    )


def test_targets_compare_the_same_engine() -> None:
    found = {target.what: target for target in Results(measured(), "NVIDIA H100").targets()}
    values: list[Any] = [(target.value, target.met) for target in found.values()]
    # Ours is fastest on cuDNN, so cuDNN's standard attention is the other side: 2.2 / 2.0 and 4.4 / 4.0.
    assert values[:3] == [(pytest.approx(1.1), True), (pytest.approx(1.1), False), (pytest.approx(1.2), False)]
    assert values[3:5] == [(None, None), (None, None)]
    assert values[5:] == [(pytest.approx(0.5), True), (pytest.approx(0.5 / 1.2), False)]


def test_a_report_says_what_was_found_and_what_is_missing() -> None:
    missing = Outcome(Task("op", "aft_read, auto, 1024", {}, 1, 1), gap="out of memory")
    results = Results([*measured(), finding(2e-6), missing], "NVIDIA H100")
    page = report(results, MACHINE, {"attention: flash-attn 3": "not installed"}, [op("ssm_read", 1024)], 300.0)
    for text in (
        "bf16 matrix product 800 TFLOP/s; copy 4,000 GB/s",
        "| fem_attention | 16 x 128/64",
        "2.0e-06",
        "in bounds",
        "- attention: flash-attn 3 cannot run here: not installed",
        "- aft_read, auto, 1024: out of memory",
        "- left out for want of time (1): ssm_read 1024",
        "| 1.3B FEM-SM, C L T G | 2 x 4096",
    ):
        assert text in page
    assert "1.10" in short(results) and not results.wrong and not results.failed


def test_the_engines_table_is_what_the_operation_reads(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table.write("NVIDIA H100", Results(measured(), "NVIDIA H100").engine_table(), path)
    (short_one, long_one) = table.read(path)["NVIDIA H100"]
    assert (short_one.dk, short_one.dv, short_one.tokens, long_one.tokens) == (128, 64, 4096, 8192)
    assert dict(short_one.microseconds) == {"cudnn": 2200.0, "flash": 4400.0}


@pytest.mark.parametrize("error", [1.0, float("inf"), float("nan")])
def test_a_result_out_of_bounds_is_found(error: float) -> None:
    results = Results([finding(error)], "NVIDIA H100")
    assert len(results.wrong) == 1 and "1 OUT OF BOUNDS" in report(results, MACHINE, {}, [], 1.0)


def test_a_case_that_ends_in_an_error_has_failed_unless_it_is_not_for_that_implementation() -> None:
    asked = Task("correctness", "x", {}, 0, 1)
    gaps = [
        "ValueError: x: implementation 'triton' cannot run: float64; use auto",
        "out of memory",
        "RuntimeError: misaligned address",
        "ValueError: a shape",
        "no answer within 120 s",
    ]
    results = Results([Outcome(asked, gap=gap) for gap in gaps], "NVIDIA H100")
    assert [outcome.gap for outcome in results.failed] == gaps[2:]


def test_files_of_a_run(tmp_path: Path) -> None:
    results = Results([*measured(), finding(1e-6)], "NVIDIA H100")
    suite.write(tmp_path, results, MACHINE, {}, [], 60.0)
    content = json.loads((tmp_path / "gpu_suite.json").read_text())
    assert content["targets"][0]["value"] == pytest.approx(1.1) and len(content["outcomes"]) == len(results.outcomes)
    assert {path.name for path in tmp_path.iterdir()} == {"gpu_suite.json", "gpu_suite.md", "gpu_suite.png"}
    suite.write(tmp_path / "empty", Results([], "cpu"), MACHINE, {}, [], 0.0)


# --- the command ------------------------------------------------------------------------------------------------------------------


def test_a_dry_run_needs_torch_alone() -> None:
    """In a process where what the project asks for besides torch and numpy cannot be imported."""
    absent = "megatron yaml transformers matplotlib pyarrow tensorboard wandb psutil tokenizers huggingface_hub".split()
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "from tools.bench.gpu_suite.__main__ import main\n"
        "import tools.bench.gpu_suite.worker\n"
        "sys.exit(main(['--dry', '--minutes', '3']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fem_attention, auto, 4096" in done.stdout and "would be left out of 3 minutes" in done.stdout
