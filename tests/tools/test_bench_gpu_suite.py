"""The GPU suite without a GPU: its plan, its processes on tiny tasks, what it makes of their answers. Nothing here looks at speed."""

from __future__ import annotations

import json
import subprocess
import sys
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

GPU = "NVIDIA H100"
MACHINE: dict[str, Any] = {"date": "2026-01-01", "device": GPU, "python": "3", "torch": "2", "toolkit": None, "threads": 1, "packages": {}}


def task(kind: str, **arguments: Any) -> Task:
    return Task(kind, kind, arguments, 1, 1)


def timed(seconds: float) -> dict[str, Any]:
    passes = {name: {"seconds": part * seconds, "spread": 0.01, "calls": 10} for name, part in (("forward", 1 / 3), ("both", 1.0))}
    return {**passes, "flops": [3e11, 1e12], "bytes": [3e8, 1e9]}


def test_the_most_important_comes_first_and_all_can_be_said_in_json() -> None:
    planned, cannot = tasks(PARTS, (), None)
    assert cannot == {} and [task.rank for task in planned] == sorted(task.rank for task in planned)
    assert len({task.name for task in planned}) == len(planned)
    assert all(json.loads(json.dumps(task.arguments)) == task.arguments for task in planned)
    assert {task.kind for task in planned} == set(worker.DOES)
    alone = [task.name for task in planned if not task.together]
    first = {"fem_attention, auto, 4096", "fem_attention, auto, 8192", "1.3B Transformer", "1.3B FEM-SM, C L T G"}
    assert alone[0] == "roofs" and all(alone.index(name) < 44 for name in first)
    assert "16384" in alone[-2] or "recomputing" in alone[-1]
    assert alone.index("1.3B Transformer") < alone.index("1.3B FEM-SM, C L T G")
    assert {task.kind for task in planned if task.together} <= {"correctness", "compile"}  # what is timed runs alone


def test_parts_and_operations_can_be_chosen_and_what_a_machine_cannot_run_is_named() -> None:
    assert {task.kind for task in tasks(("models",), (), None)[0]} == {"roofs", "model"}
    assert [task.arguments["variant"] for task in tasks(("engines",), (), None)[0]] == list(VARIANTS)
    chosen = tasks(("ops",), ("time_decay_scan",), None)[0]
    assert {task.arguments.get("workload", "time_decay_scan") for task in chosen} == {"time_decay_scan"}
    checks = [task.arguments for task in tasks(("correctness",), ("time_decay_scan",), None)[0]]
    assert {(each["op"], each["dtype"]) for each in checks} == {("time_decay_scan", "bfloat16"), ("time_decay_scan", "float32")}
    planned, cannot = tasks(PARTS, (), torch.device("cpu"))
    assert cannot["attention: SDPA cudnn"] == "no GPU" and not any("SDPA" in task.name for task in planned)
    assert cannot["engine stage0"].startswith("engine.zero_stage = 0 is for train.precision=fp32 alone")


# --- what a worker does -----------------------------------------------------------------------------------------------------------

SIZE = asdict(Size(1, 16, 2, 16, 8))


def asked(kind: str, **arguments: Any) -> tuple[dict[str, Any], bool]:
    return worker.answer(json.dumps({"kind": kind, "arguments": arguments}))


def test_a_worker_does_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(SCALES["table 5"].model, num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=64)
    monkeypatch.setitem(SCALES, "table 5", replace(SCALES["table 5"], model=tiny, tokens=8))
    kinds: dict[str, dict[str, Any]] = {
        "correctness": {"op": "time_decay_scan", "case": "normal", "implementation": "reference", "dtype": "float32", "small": True},
        "compile": {"workload": "time_decay_scan", "implementation": "auto", "lengths": [16], "tokens": 16},
        "roofs": {"matmul": 32, "copy": 64},
        "op": {"workload": "fem_attention", "implementation": "auto", "size": SIZE, "budget": 0.0},
        "baseline": {"baseline": "attention: torch's choice", "size": SIZE, "budget": 0.0},
        "model": {"scale": "table 5", "variant": "FEM-SM, C L T G", "batch": 2, "recompute": False, "budget": 0.0},
        "engine": Job("megatron", 1, "bf16", "gpu", 2, 2).as_json(),
    }
    said = {"rank": 0, "seconds": [1.0, 3.0], "peak_bytes": 7, "host_bytes": 5, "loss": 6.0}
    monkeypatch.setattr(worker, "launch", lambda job: [said])  # test_bench.py starts real ranks
    assert kinds.keys() == worker.DOES.keys()
    found = {kind: asked(kind, **arguments) for kind, arguments in kinds.items()}
    assert all(sane for _, sane in found.values())
    results = {kind: json.loads(json.dumps(answer))["result"] for kind, (answer, _) in found.items()}
    assert all(finding["good"] for finding in results["correctness"])
    assert set(results["roofs"]) == {"matmul_flops", "copy_bytes"}
    pairs = 2 * 16 * 17 / 2
    assert results["op"]["flops"] == [2 * pairs * 32, 7 * pairs * 32]
    assert results["engine"]["steps"] == [2.0] and results["engine"]["peaks"] == [7]
    assert results["model"]["batch"] == 2 and results["model"]["tokens"] == 16
    Results([Outcome(task(kind, **kinds[kind]), results[kind]) for kind in kinds], "cpu")  # takes them


def test_what_a_machine_says_no_to_is_a_gap_and_a_large_model_is_tried_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked("baseline", baseline="attention: SDPA cudnn", size=SIZE) == ({"gap": "ValueError: no GPU"}, True)
    assert asked("op", workload="none", implementation="auto", size=SIZE) == ({"gap": "KeyError: 'none'"}, True)
    tries: list[tuple[int, bool]] = []

    def full(variant: str, scale: Any, dtype: torch.dtype, budget: float, *, recompute: bool) -> Any:
        tries.append((scale.batch, recompute))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(worker, "train_step", full)
    model = {"scale": "1.3B", "variant": "Transformer", "batch": 4, "recompute": False}
    assert asked("model", **model) == ({"gap": "out of memory"}, True) and tries == [(4, False), (2, False), (2, True)]


def test_processes_answer_and_outlive_a_mistake_a_hang_and_a_lost_gpu(tmp_path: Path) -> None:
    small, own = task("roofs", matmul=16, copy=16), Worker(tmp_path / "log")
    try:
        outcomes, left_out = work([small, task("op", workload="none"), small], [own], Clock(5), lambda outcome, left, seconds: None)
        assert left_out == [] and [outcome.task.kind for outcome in outcomes] == ["roofs", "op", "roofs"]
        assert str(outcomes[1].gap).startswith("KeyError") and outcomes[0].result["matmul_flops"] > 0 and outcomes[2].gap is None
        first = own.process
        # One that hangs is ended, and what comes after has a new process.
        assert own.ask(task("roofs", matmul=4096, copy=16), 0.05) == {"gap": "no answer within 0 s"}
        assert "result" in own.ask(small, 300.0) and own.process is not first
        own.close()
        program = "import sys, json; sys.stdin.readline(); print(json.dumps({'gap': 'illegal address', 'lost': True}), flush=True)"
        pipe = subprocess.PIPE
        own.process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True)
        assert own.ask(small, 300.0)["gap"].startswith("illegal address (the GPU was lost") and own.process is None
    finally:
        own.close()


def test_what_does_not_fit_into_the_time_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], list[tuple[str, int, float]]()

    def ask(self: Worker, task: Task, limit: float) -> dict[str, Any]:
        now[0] += 13.0
        return {"result": task.name}

    monkeypatch.setattr(Worker, "ask", ask)
    planned = [Task("op", str(number), {}, 0, 5) for number in range(10)]
    clock = Clock(1, lambda: now[0])
    outcomes, left_out = work(planned, [Worker(tmp_path)], clock, lambda o, left, s: told.append((o.task.name, left, s)))
    # The first was guessed at 5 s and took 13, so from then on 13 are reckoned with.
    assert [outcome.task.name for outcome in outcomes] == ["0", "1", "2", "3"]
    assert [task.name for task in left_out] == ["4", "5", "6", "7", "8", "9"] and told[0] == ("0", 9, 47.0)


# --- results and report -----------------------------------------------------------------------------------------------------------


def measured() -> list[Outcome]:
    """Both sides of every target, as workers would answer."""
    found = [Outcome(task("roofs"), {"matmul_flops": 8e14, "copy_bytes": 4e12})]
    for tokens, ours in ((4096, 2.2e-3), (8192, 4.4e-3)):
        size = WORKLOADS["fem_attention"].size(tokens, plan.TOKENS_A_CALL)
        for how, part in (("auto", 1), ("cudnn", 1), ("flash", 2)):
            asked_for = task("op", workload="fem_attention", implementation=how, size=asdict(size))
            found.append(Outcome(asked_for, timed(part * ours)))
        for engine, seconds in (("cudnn", tokens / 4096 * 2e-3), ("flash", tokens / 4096 * 5e-3)):
            asked_for = task("baseline", baseline=f"attention: SDPA {engine}", size=asdict(size.wider(2)))
            found.append(Outcome(asked_for, timed(seconds)))
    models = (("1.3B", "Transformer", 0.1), ("1.3B", "FEM-SM, C L T G", 0.12), ("1.3B, documents", "FEM-SM, C L T G", 0.09))
    for scale, variant, seconds in models:
        cost = {"step": timed(seconds)["both"], "tokens": 8192, "flops": 0.5 * 989e12 * 0.1, "peak_bytes": 3e10, "batch": 2}
        found.append(Outcome(task("model", scale=scale, variant=variant, batch=2, recompute=False), {**cost, "recompute": False}))
    return found


def checked(error: float) -> Outcome:
    found = [{"case": "normal", "result": "d q", "error": error, "bound": 1e-5, "good": error <= 1e-5}]
    return Outcome(task("correctness", op="fem_attention", case="normal", implementation="cudnn", dtype="float32"), found)


def test_targets_compare_the_same_engine_and_the_table_is_what_the_operation_reads(tmp_path: Path) -> None:
    """Ours is fastest on cuDNN, so cuDNN's standard attention is the other side: 2.2 / 2.0 and 4.4 / 4.0."""
    results = Results(measured(), GPU)
    wanted = [(1.1, True), (1.1, False), (1.2, False), (None, None), (None, None), (0.5, True), (0.5 / 1.2, False)]
    assert [target.met for target in results.targets()] == [met for _, met in wanted]
    assert [target.value for target in results.targets()] == [value and pytest.approx(value) for value, _ in wanted]
    table.write(GPU, results.engine_table(), tmp_path / "table.json")
    (first, second) = table.read(tmp_path / "table.json")[GPU]
    assert (first.dk, first.dv, first.tokens, second.tokens) == (128, 64, 4096, 8192)
    assert dict(first.microseconds) == {"cudnn": 2200.0, "flash": 4400.0}


def test_files_say_what_was_found_and_what_is_missing(tmp_path: Path) -> None:
    missing = Outcome(Task("op", "aft_read, auto, 1024", {}, 1, 1), gap="out of memory")
    results = Results([*measured(), checked(2e-6), missing], GPU)
    suite.write(tmp_path, results, MACHINE, {"attention: flash-attn 3": "not installed"}, [task("ssm_read")], 300.0)
    page, content = (tmp_path / "gpu_suite.md").read_text(), json.loads((tmp_path / "gpu_suite.json").read_text())
    for text in (
        *("bf16 matrix product 800 TFLOP/s; copy 4,000 GB/s", "| fem_attention | 16 x 128/64", "2.0e-06", "in bounds"),
        *("- attention: flash-attn 3 cannot run here: not installed", "- aft_read, auto, 1024: out of memory"),
        *("- left out for want of time (1): ssm_read", "| 1.3B FEM-SM, C L T G "),
    ):
        assert text in page
    (packed,) = ([cell.strip() for cell in line.split("|")] for line in page.splitlines() if "| 1.3B, documents FEM-SM" in line)
    assert packed[2] == "2 x 4096" and packed[5:7] == ["", "0.75"]  # no Transformer's; 0.09 over 0.12
    assert "1.10" in short(results) and not results.wrong and not results.failed
    assert content["targets"][0]["value"] == pytest.approx(1.1) and len(content["outcomes"]) == len(results.outcomes)
    assert {path.name for path in tmp_path.iterdir()} == {"gpu_suite.json", "gpu_suite.md", "gpu_suite.png"}
    suite.write(tmp_path / "empty", Results([], "cpu"), MACHINE, {}, [], 0.0)


def test_a_result_out_of_bounds_is_found_and_a_case_that_ends_in_an_error_has_failed() -> None:
    for error in (1.0, float("inf"), float("nan")):
        results = Results([checked(error)], GPU)
        assert len(results.wrong) == 1 and "1 OUT OF BOUNDS" in report(results, MACHINE, {}, [], 1.0)
    good = ["ValueError: x: implementation 'triton' cannot run: float64; use auto", "out of memory"]  # not for that implementation
    bad = ["RuntimeError: misaligned address", "ValueError: a shape", "no answer within 120 s"]
    results = Results([Outcome(task("correctness"), gap=gap) for gap in good + bad], GPU)
    assert [outcome.gap for outcome in results.failed] == bad


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
