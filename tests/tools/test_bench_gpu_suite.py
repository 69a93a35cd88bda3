"""Tests of the GPU suite without a GPU: its plan, its workers on tiny tasks, its processes and
their failures. Speed is not checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.check import expect, suites
from tests.ranks import PATIENCE
from tests.test_house import ROOT
from tools.bench.engines.runs import Round
from tools.bench.engines.variants import VARIANTS, Job
from tools.bench.gpu_suite import __main__ as suite
from tools.bench.gpu_suite import plan, trainer, worker
from tools.bench.gpu_suite.plan import PARTS, Phase, Task, phases, tasks
from tools.bench.gpu_suite.pool import GONE, Clock, Work, Worker
from tools.bench.gpu_suite.results import OUT_OF_MEMORY, Outcome, Record, Results
from tools.bench.workloads import Size

GPU = "NVIDIA H100"


def task(kind: str, name: str = "", **arguments: Any) -> Task:
    return Task(kind, name or kind, arguments, 1, 1)


# --- the plan -------------------------------------------------------------------------------------


def test_the_most_important_comes_first_and_all_can_be_reported_in_json() -> None:
    planned, cannot = tasks(PARTS, (), None)
    assert cannot == {} and [task.rank for task in planned] == sorted(task.rank for task in planned)
    assert len({task.name for task in planned}) == len(planned)
    assert all(json.loads(json.dumps(asdict(task))) == asdict(task) for task in planned)
    assert {task.kind for task in planned} == {*worker.DOES, "train", "engine"}
    alone = [
        task.name for phase in phases(planned, 480) for task in phase.tasks if not phase.together
    ]
    first = {
        "fem_attention, auto, 4096",
        "fem_attention, auto, 8192",
        "throughput of fem_sm_1.3b",
        "throughput of transformer_1.3b",
    }
    assert alone[0] == "throughput of fem_sm_1.3b" and all(alone.index(name) < 44 for name in first)
    assert (
        alone.index("roofs")
        < alone.index("fem_attention, auto, 4096")
        < alone.index("1.3B Transformer")
    )
    # All cases of the project's own kernels, and the first ones of foreign code, precede the other
    # tasks; timed tasks run alone.
    checks = [task for task in planned if task.kind == "correctness"]
    begins = {(op, next(iter(cases.cases))) for op, cases in suites().items()}
    urgent = [
        t.arguments["implementation"] in plan.OURS
        or (t.arguments["op"], t.arguments["case"]) in begins
        for t in checks
    ]
    assert urgent == sorted(urgent, reverse=True) and 0 < sum(urgent) < len(urgent)
    assert {task.kind for task in planned if task.together} == {
        "correctness",
        "compile",
        "train",
        "sanitize",
    }


def test_each_phase_has_its_share_and_what_an_absent_one_leaves_goes_to_the_others() -> None:
    full = phases(tasks(PARTS, (), None)[0], 480)
    assert [phase.together for phase in full] == [True] + [False] * len(plan.SHARES)
    ends = [phase.until for phase in full]
    assert ends == sorted(ends)
    assert ends[0] == pytest.approx(0.4 * 480)
    assert ends[-1] == pytest.approx(480)
    (alone,) = phases(tasks(("correctness",), (), None)[0], 480)
    assert alone.until == 480
    mixed = phases(tasks(("ops", "trace"), ("aft_read",), None)[0], 100)
    assert [phase.until for phase in mixed] == pytest.approx(
        [100 * 0.4 / 0.61, 100 * 0.54 / 0.61, 100]
    )


def test_parts_and_operations_can_be_chosen_and_what_a_machine_cannot_run_is_named() -> None:
    assert {task.kind for task in tasks(("models",), (), None)[0]} == {"roofs", "model"}
    assert [task.arguments["variant"] for task in tasks(("engines",), (), None)[0]] == list(
        VARIANTS
    )
    chosen = tasks(("ops",), ("time_decay_scan",), None)[0]
    assert {task.arguments.get("workload", "time_decay_scan") for task in chosen} == {
        "time_decay_scan"
    }
    for op in ("time_decay_scan", "free_energy"):  # free_energy is timed under another name
        suite.parse(["--only", "correctness", "--ops", op])
        checks = [task.arguments for task in tasks(("correctness",), (op,), None)[0]]
        assert {(each["op"], each["dtype"]) for each in checks} == {
            (op, "bfloat16"),
            (op, "float32"),
        }
    planned, cannot = tasks(PARTS, (), torch.device("cpu"))
    assert cannot["attention: SDPA cudnn"] == "no GPU"
    assert not any("SDPA" in task.name for task in planned)
    assert cannot["engine stage0"].startswith(
        "engine.zero_stage = 0 supports only train.precision=fp32"
    )
    assert cannot["sanitizer: memcheck"] == "no GPU"
    assert (
        cannot["three steps: train.cuda_graphs=true"] == "it needs a GPU, and this machine has none"
    )


# --- the work of a worker -------------------------------------------------------------------------

SIZE = asdict(Size(1, 16, 2, 16, 8))


def answer_of(kind: str, **arguments: Any) -> tuple[dict[str, Any], bool]:
    return worker.answer(json.dumps({"kind": kind, "arguments": arguments}))


def test_a_worker_does_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    check = {
        "op": "time_decay_scan",
        "case": "normal",
        "implementation": "reference",
        "dtype": "float32",
        "small": True,
    }
    kinds: dict[str, dict[str, Any]] = {
        "correctness": check,
        "sanitize": check,
        "compile": {
            "workload": "time_decay_scan",
            "implementation": "auto",
            "lengths": [16],
            "tokens": 16,
        },
        "roofs": {"matmul": 32, "copy": 64},
        "op": {"workload": "fem_attention", "implementation": "auto", "size": SIZE, "budget": 0.0},
        "baseline": {"baseline": "attention: torch's choice", "size": SIZE, "budget": 0.0},
        "model": {
            "scale": "table 7",
            "variant": "FEM-SM, C L T G",
            "batch": 2,
            "recompute": False,
            "budget": 0.0,
            "tiny": True,
        },
        "engine": Job("megatron", 1, "bf16", "gpu", 2, 2).as_json(),
    }
    jobs, drawn = list[Job](), list[str]()

    # test_bench_engines.py starts real ranks.
    def launched(job: Job, *, log: Any) -> Round:
        jobs.append(job)
        return Round((1.0, 3.0), 7, (5,), 6.0)

    def expected(suite: Any, case: str, *given: Any, **named: Any) -> Any:
        drawn.append(case)
        return expect(suite, case, *given, **named)

    monkeypatch.setattr(worker, "launch", launched)
    monkeypatch.setattr(worker, "expect", expected)
    found = {kind: answer_of(kind, **arguments) for kind, arguments in kinds.items()}
    assert all(sane for _, sane in found.values())
    results = {
        kind: json.loads(json.dumps(answer))["result"] for kind, (answer, _) in found.items()
    }
    # Both use the same float64 reference.
    assert all(finding["good"] for finding in results["correctness"]) and drawn == ["normal"]
    assert set(results["roofs"]) == {"matmul_flops", "copy_bytes"}
    pairs = 2 * 16 * 17 / 2
    assert results["op"]["flops"] == [2 * pairs * 32, 7 * pairs * 32]
    assert results["engine"]["steps"] == [2.0] and results["engine"]["peaks"] == [7]
    assert jobs[0].limit == 590  # the job ends its ranks before this process is ended
    assert results["model"]["batch"] == 2 and results["model"]["tokens"] == 16
    results["sanitize"] = {"checked": results["sanitize"], "reported": []}
    # Results accepts them.
    Results([Outcome(task(kind, **kinds[kind]), results[kind]) for kind in kinds], "cpu")


def test_what_a_machine_refuses_is_a_gap_and_a_large_model_is_tried_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert answer_of("baseline", baseline="attention: SDPA cudnn", size=SIZE) == (
        {"gap": "ValueError: no GPU"},
        True,
    )
    assert answer_of("op", workload="none", implementation="auto", size=SIZE) == (
        {"gap": "KeyError: 'none'"},
        True,
    )
    tries: list[tuple[int, bool]] = []

    def full(
        variant: str, scale: Any, dtype: torch.dtype, budget: float, *, recompute: bool
    ) -> Any:
        tries.append((scale.batch, recompute))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(worker, "train_step", full)
    model = {"scale": "1.3B", "variant": "Transformer", "batch": 4, "recompute": False}
    assert answer_of("model", **model) == ({"gap": OUT_OF_MEMORY}, True)
    assert tries == [(4, False), (2, False), (2, True)]


def test_a_process_that_has_lost_the_gpu_computes_nothing_on_the_cpu() -> None:
    line = json.dumps({"kind": "roofs", "arguments": {"matmul": 16, "copy": 16}, "device": GPU})
    assert worker.answer(line) == (
        {"gap": f"the device of this process is cpu, not {GPU}", "lost": True, "gone": True},
        False,
    )


def test_runs_of_the_trainer_are_compared_step_by_step() -> None:
    others = {step: {"loss": 2.0} for step in range(1, 9)}
    arguments = {"begin": ["cpu", 4], "bound": 1e-4}
    # The first four steps are those of the other run.
    same = trainer._compare({step: 2.0 if step > 4 else 9.0 for step in others}, others, arguments)
    assert same == {"worst": 0.0, "bound": 1e-4, "equal": True, "good": True}
    off = trainer._compare({step: 2.0 + 0.001 * (step == 8) for step in others}, others, arguments)
    assert off["worst"] == pytest.approx(5e-4) and not off["equal"] and not off["good"]


# --- processes ------------------------------------------------------------------------------------


def performed(
    planned: list[Task], workers: list[Worker], clock: Clock
) -> tuple[list[Outcome], list[Task]]:
    outcomes = list[Outcome]()
    left_out = Work(
        Phase(planned, clock.budget), clock, lambda outcome, left, seconds: outcomes.append(outcome)
    ).run(workers)
    return outcomes, left_out


def test_processes_answer_and_outlive_a_mistake_a_hang_and_a_lost_gpu(tmp_path: Path) -> None:
    small, own = task("roofs", matmul=16, copy=16), Worker(tmp_path / "log")
    try:
        outcomes, left_out = performed(
            [small, task("op", workload="none"), replace(small, name="last")], [own], Clock(5)
        )
        assert left_out == []
        assert [outcome.task.kind for outcome in outcomes] == ["roofs", "op", "roofs"]
        assert str(outcomes[1].gap).startswith("KeyError")
        assert outcomes[0].result["matmul_flops"] > 0
        assert outcomes[2].gap is None
        first = own.process
        # A hanging task is ended, and the next one gets a new process.
        assert own.ask(task("roofs", matmul=4096, copy=16), 0.05) == {"gap": "no answer within 0 s"}
        assert "result" in own.ask(small, PATIENCE) and own.process is not first
        own.close()
        program = (
            "import sys, json; sys.stdin.readline(); print(json.dumps({'gap': 'illegal address',"
            " 'lost': True}), flush=True)"
        )
        pipe = subprocess.PIPE
        own.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=pipe,
            stdout=pipe,
            text=True,
            start_new_session=True,
        )
        assert own.ask(small, PATIENCE) == {"gap": "illegal address", "lost": True}
        assert own.process is None
    finally:
        own.close()


def answering(
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[Worker, Task], dict[str, Any]],
    seconds: float = 13.0,
) -> Clock:
    """Replace workers by ones that return these results, each after ``seconds`` of the simulated
    clock.
    """
    now = [0.0]

    def ask(self: Worker, task: Task, limit: float) -> dict[str, Any]:
        now[0] += seconds
        return answer(self, task)

    monkeypatch.setattr(Worker, "ask", ask)
    return Clock(1, lambda: now[0])


def test_what_does_not_fit_into_the_time_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = answering(monkeypatch, lambda worker, task: {"result": task.name})
    planned = [Task("op", str(number), {}, 0, 5) for number in range(10)]
    outcomes, left_out = performed(planned, [Worker(tmp_path)], clock)
    # The first task was estimated at 5 s and took 13 s, so 13 s are assumed for the next ones.
    assert [outcome.task.name for outcome in outcomes] == ["0", "1", "2", "3"]
    assert [task.name for task in left_out] == ["4", "5", "6", "7", "8", "9"]
    assert clock.limit(planned[0], 60) == 8.0  # never after the end of all tasks


def test_what_lacks_memory_next_to_others_is_tried_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = list[str]()

    def answer(worker: Worker, task: Task) -> dict[str, Any]:
        requested.append(task.name)
        full = task.name == "1" and requested.count("1") == 1
        return {"gap": OUT_OF_MEMORY} if full else {"result": 0}

    clock = answering(monkeypatch, answer, 0.1)
    planned = [Task("op", str(number), {}, 0, 1) for number in range(4)]
    outcomes, left_out = performed(planned, [Worker(tmp_path), Worker(tmp_path)], clock)
    assert left_out == [] and requested.count("1") == 2 and outcomes[-1].task.name == "1"
    assert all(outcome.gap is None for outcome in outcomes) and len(outcomes) == 4


@pytest.mark.parametrize("gone", [True, False])
def test_a_gpu_that_is_gone_ends_the_work_and_kernels_that_break_it_do_not(
    gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured outcomes are kept. Each case of a kernel may break its worker; the next worker finds
    the GPU again.
    """
    if gone:
        lost = {"gap": "no device", "lost": True, "gone": True}
    else:
        lost = {"gap": "illegal address", "lost": True}
    clock = answering(
        monkeypatch, lambda worker, task: {"result": 0} if task.name == "0" else lost, 0.1
    )
    outcomes, left_out = performed(
        [Task("op", str(number), {}, 0, 1) for number in range(20)], [Worker(tmp_path)], clock
    )
    assert len(outcomes) == (1 + GONE if gone else 20) and len(outcomes) + len(left_out) == 20


def test_each_tool_of_the_sanitizer_has_a_worker_whose_reports_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement of compute-sanitizer that reports a hazard for every second line that its
    program reads.
    """
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        "#!/bin/sh\nwhile [ $# -gt 0 ]; do [ $1 = --log-file ] && log=$2; shift; done; n=0\nwhile"
        " read line; do n=$((n + 1)); [ $((n % 2)) = 0 ] && echo '========= Invalid __global__"
        ' read of size 4\' >> $log\necho \'{"result": [{"case": "c", "result": "d q", "error": 0.0,'
        ' "bound": 1.0, "good": true}]}\'; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    planned = [
        task for task in tasks(("sanitizer",), ("aft_read",), None)[0] if task.tool == "memcheck"
    ]
    own, other = Worker(tmp_path / "log", tool="memcheck"), Worker(tmp_path / "log")
    try:
        outcomes, left_out = performed(planned, [other, own], Clock(5))
    finally:
        own.close()
    assert left_out == [] and other.process is None  # the tasks of the tool run only in its worker
    assert [outcome.wrong for outcome in outcomes] == [n % 2 == 1 for n in range(len(planned))]
    assert len(planned) >= 2
    assert outcomes[1].result["reported"] == ["Invalid __global__ read of size 4"]


@pytest.mark.slow
def test_the_checks_need_torch_alone(tmp_path: Path) -> None:
    """Run in a process in which all requirements except torch and numpy cannot be imported."""
    absent = (
        "megatron yaml transformers matplotlib pyarrow tensorboard wandb psutil tokenizers"
        " huggingface_hub".split()
    )
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\nfrom"
        " tools.bench.gpu_suite.__main__ import main\nimport"
        " tools.bench.gpu_suite.worker\nsys.exit(main(['--dry', '--only', 'ops,models,trainer',"
        f" '--minutes', '0.001', '--out', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = Record.read(tmp_path)
    assert "fem_attention, auto, 4096" in record.left_out
    assert set(record.cannot.values()) >= {
        "PyYAML is not installed",
        "no GPU",
    }
