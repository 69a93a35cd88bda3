"""The GPU suite without a GPU: its plan, its processes on tiny tasks, its record after a kill, its report. No speed is judged."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.check import expect, suites
from kernels.fem_attention import table
from tests.ranks import PATIENCE
from tests.test_house import ROOT
from tools.bench.engines.figures import Figures
from tools.bench.engines.variants import VARIANTS, Job
from tools.bench.gpu_suite import __main__ as suite
from tools.bench.gpu_suite import plan, trainer, worker
from tools.bench.gpu_suite.plan import PARTS, Phase, Task, phases, tasks
from tools.bench.gpu_suite.pool import LOST, Clock, Work, Worker
from tools.bench.gpu_suite.report import report, short
from tools.bench.gpu_suite.results import FILE, OUT_OF_MEMORY, Outcome, Record, Results
from tools.bench.workloads import WORKLOADS, Size

GPU = "NVIDIA H100"
MACHINE: dict[str, Any] = {"date": "2026-01-01", "device": GPU, "python": "3", "torch": "2", "toolkit": None, "threads": 1, "packages": {}}
SESSION: dict[str, Any] = {"machine": MACHINE, "minutes": 8, "dry": False, "planned": [], "cannot": {}}


def task(kind: str, name: str = "", **arguments: Any) -> Task:
    return Task(kind, name or kind, arguments, 1, 1)


def timed(seconds: float) -> dict[str, Any]:
    passes = {name: {"seconds": part * seconds, "spread": 0.01, "calls": 10} for name, part in (("forward", 1 / 3), ("both", 1.0))}
    return {**passes, "flops": [3e11, 1e12], "bytes": [3e8, 1e9]}


# --- the plan ---------------------------------------------------------------------------------------------------------------------


def test_the_most_important_comes_first_and_all_can_be_said_in_json() -> None:
    planned, cannot = tasks(PARTS, (), None)
    assert cannot == {} and [task.rank for task in planned] == sorted(task.rank for task in planned)
    assert len({task.name for task in planned}) == len(planned)
    assert all(json.loads(json.dumps(asdict(task))) == asdict(task) for task in planned)
    assert {task.kind for task in planned} == {*worker.DOES, "train", "engine"}
    alone = [task.name for phase in phases(planned, 480) for task in phase.tasks if not phase.together]
    first = {"fem_attention, auto, 4096", "fem_attention, auto, 8192", "throughput of fem_sm_1.3b", "throughput of transformer_1.3b"}
    assert alone[0] == "throughput of fem_sm_1.3b" and all(alone.index(name) < 44 for name in first)
    assert alone.index("roofs") < alone.index("fem_attention, auto, 4096") < alone.index("1.3B Transformer")
    # All cases of our kernels, and the first ones of others' code, come before the rest; what is timed runs alone.
    checks = [task for task in planned if task.kind == "correctness"]
    begins = {(op, next(iter(cases.cases))) for op, cases in suites().items()}
    urgent = [t.arguments["implementation"] in plan.OURS or (t.arguments["op"], t.arguments["case"]) in begins for t in checks]
    assert urgent == sorted(urgent, reverse=True) and 0 < sum(urgent) < len(urgent)
    assert {task.kind for task in planned if task.together} == {"correctness", "compile", "train", "sanitize"}


def test_each_phase_has_its_share_and_what_an_absent_one_leaves_goes_to_the_others() -> None:
    whole = phases(tasks(PARTS, (), None)[0], 480)
    assert [phase.together for phase in whole] == [True] + [False] * len(plan.SHARES)
    ends = [phase.until for phase in whole]
    assert ends == sorted(ends) and ends[0] == pytest.approx(0.4 * 480) and ends[-1] == pytest.approx(480)
    (alone,) = phases(tasks(("correctness",), (), None)[0], 480)
    assert alone.until == 480
    mixed = phases(tasks(("ops", "trace"), ("aft_read",), None)[0], 100)
    assert [phase.until for phase in mixed] == pytest.approx([100 * 0.4 / 0.61, 100 * 0.54 / 0.61, 100])


def test_parts_and_operations_can_be_chosen_and_what_a_machine_cannot_run_is_named() -> None:
    assert {task.kind for task in tasks(("models",), (), None)[0]} == {"roofs", "model"}
    assert [task.arguments["variant"] for task in tasks(("engines",), (), None)[0]] == list(VARIANTS)
    chosen = tasks(("ops",), ("time_decay_scan",), None)[0]
    assert {task.arguments.get("workload", "time_decay_scan") for task in chosen} == {"time_decay_scan"}
    for op in ("time_decay_scan", "free_energy"):  # the latter is timed under another's name
        suite.parse(["--only", "correctness", "--ops", op])
        checks = [task.arguments for task in tasks(("correctness",), (op,), None)[0]]
        assert {(each["op"], each["dtype"]) for each in checks} == {(op, "bfloat16"), (op, "float32")}
    planned, cannot = tasks(PARTS, (), torch.device("cpu"))
    assert cannot["attention: SDPA cudnn"] == "no GPU" and not any("SDPA" in task.name for task in planned)
    assert cannot["engine stage0"].startswith("engine.zero_stage = 0 is for train.precision=fp32 alone")
    assert cannot["sanitizer: memcheck"] == "no GPU"
    assert cannot["three steps: train.cuda_graphs=true"] == "it needs a GPU, and this machine has none"


# --- what a worker does -----------------------------------------------------------------------------------------------------------

SIZE = asdict(Size(1, 16, 2, 16, 8))


def asked(kind: str, **arguments: Any) -> tuple[dict[str, Any], bool]:
    return worker.answer(json.dumps({"kind": kind, "arguments": arguments}))


def test_a_worker_does_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    check = {"op": "time_decay_scan", "case": "normal", "implementation": "reference", "dtype": "float32", "small": True}
    kinds: dict[str, dict[str, Any]] = {
        "correctness": check,
        "sanitize": check,
        "compile": {"workload": "time_decay_scan", "implementation": "auto", "lengths": [16], "tokens": 16},
        "roofs": {"matmul": 32, "copy": 64},
        "op": {"workload": "fem_attention", "implementation": "auto", "size": SIZE, "budget": 0.0},
        "baseline": {"baseline": "attention: torch's choice", "size": SIZE, "budget": 0.0},
        "model": {"scale": "table 5", "variant": "FEM-SM, C L T G", "batch": 2, "recompute": False, "budget": 0.0, "tiny": True},
        "engine": Job("megatron", 1, "bf16", "gpu", 2, 2).as_json(),
    }
    said = {"rank": 0, "seconds": [1.0, 3.0], "peak_bytes": 7, "host_bytes": 5, "loss": 6.0}
    jobs, drawn = list[Job](), list[str]()

    def launched(job: Job, *, say: Any) -> list[dict[str, Any]]:  # test_bench_engines.py starts real ranks
        jobs.append(job)
        return [said]

    def expected(suite: Any, case: str, *given: Any, **named: Any) -> Any:
        drawn.append(case)
        return expect(suite, case, *given, **named)

    monkeypatch.setattr(worker, "launch", launched)
    monkeypatch.setattr(worker, "expect", expected)
    found = {kind: asked(kind, **arguments) for kind, arguments in kinds.items()}
    assert all(sane for _, sane in found.values())
    results = {kind: json.loads(json.dumps(answer))["result"] for kind, (answer, _) in found.items()}
    assert all(finding["good"] for finding in results["correctness"]) and drawn == ["normal"]  # one float64 truth for both
    assert set(results["roofs"]) == {"matmul_flops", "copy_bytes"}
    pairs = 2 * 16 * 17 / 2
    assert results["op"]["flops"] == [2 * pairs * 32, 7 * pairs * 32]
    assert results["engine"]["steps"] == [2.0] and results["engine"]["peaks"] == [7]
    assert jobs[0].limit == 590  # so that it ends its ranks before this process is ended
    assert results["model"]["batch"] == 2 and results["model"]["tokens"] == 16
    results["sanitize"] = {"checked": results["sanitize"], "reported": []}
    Results([Outcome(task(kind, **kinds[kind]), results[kind]) for kind in kinds], "cpu")  # takes them


def test_what_a_machine_refuses_is_a_gap_and_a_large_model_is_tried_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked("baseline", baseline="attention: SDPA cudnn", size=SIZE) == ({"gap": "ValueError: no GPU"}, True)
    assert asked("op", workload="none", implementation="auto", size=SIZE) == ({"gap": "KeyError: 'none'"}, True)
    tries: list[tuple[int, bool]] = []

    def full(variant: str, scale: Any, dtype: torch.dtype, budget: float, *, recompute: bool) -> Any:
        tries.append((scale.batch, recompute))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(worker, "train_step", full)
    model = {"scale": "1.3B", "variant": "Transformer", "batch": 4, "recompute": False}
    assert asked("model", **model) == ({"gap": OUT_OF_MEMORY}, True) and tries == [(4, False), (2, False), (2, True)]


def test_a_process_that_has_lost_the_gpu_computes_nothing_on_the_cpu() -> None:
    line = json.dumps({"kind": "roofs", "arguments": {"matmul": 16, "copy": 16}, "device": GPU})
    assert worker.answer(line) == ({"gap": f"the device of this process is cpu, not {GPU}", "lost": True}, False)


def test_runs_of_the_trainer_are_compared_step_by_step() -> None:
    others = {step: {"loss": 2.0} for step in range(1, 9)}
    arguments = {"begin": ["cpu", 4], "bound": 1e-4}
    same = trainer._compare({step: 2.0 if step > 4 else 9.0 for step in others}, others, arguments)  # the first four are the other's own
    assert same == {"worst": 0.0, "bound": 1e-4, "equal": True, "good": True}
    off = trainer._compare({step: 2.0 + 0.001 * (step == 8) for step in others}, others, arguments)
    assert off["worst"] == pytest.approx(5e-4) and not off["equal"] and not off["good"]


# --- processes --------------------------------------------------------------------------------------------------------------------


def performed(planned: list[Task], workers: list[Worker], clock: Clock) -> tuple[list[Outcome], list[Task]]:
    outcomes = list[Outcome]()
    left_out = Work(Phase(planned, clock.budget), clock, lambda outcome, left, seconds: outcomes.append(outcome)).run(workers)
    return outcomes, left_out


def test_processes_answer_and_outlive_a_mistake_a_hang_and_a_lost_gpu(tmp_path: Path) -> None:
    small, own = task("roofs", matmul=16, copy=16), Worker(tmp_path / "log")
    try:
        outcomes, left_out = performed([small, task("op", workload="none"), replace(small, name="last")], [own], Clock(5))
        assert left_out == [] and [outcome.task.kind for outcome in outcomes] == ["roofs", "op", "roofs"]
        assert str(outcomes[1].gap).startswith("KeyError") and outcomes[0].result["matmul_flops"] > 0 and outcomes[2].gap is None
        first = own.process
        # One that hangs is ended, and what comes after has a new process.
        assert own.ask(task("roofs", matmul=4096, copy=16), 0.05) == {"gap": "no answer within 0 s"}
        assert "result" in own.ask(small, PATIENCE) and own.process is not first
        own.close()
        program = "import sys, json; sys.stdin.readline(); print(json.dumps({'gap': 'illegal address', 'lost': True}), flush=True)"
        pipe = subprocess.PIPE
        own.process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        assert own.ask(small, PATIENCE) == {"gap": "illegal address", "lost": True} and own.process is None
    finally:
        own.close()


def answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Worker, Task], dict[str, Any]], seconds: float = 13.0) -> Clock:
    """Workers that give these answers, each after so much of the clock's time."""
    now = [0.0]

    def ask(self: Worker, task: Task, limit: float) -> dict[str, Any]:
        now[0] += seconds
        return answer(self, task)

    monkeypatch.setattr(Worker, "ask", ask)
    return Clock(1, lambda: now[0])


def test_what_does_not_fit_into_the_time_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = answering(monkeypatch, lambda worker, task: {"result": task.name})
    planned = [Task("op", str(number), {}, 0, 5) for number in range(10)]
    outcomes, left_out = performed(planned, [Worker(tmp_path)], clock)
    # The first was guessed at 5 s and took 13, so from then on 13 are reckoned with.
    assert [outcome.task.name for outcome in outcomes] == ["0", "1", "2", "3"]
    assert [task.name for task in left_out] == ["4", "5", "6", "7", "8", "9"]
    assert clock.limit(planned[0], 60) == 8.0  # never past the end of all


def test_what_lacks_memory_beside_others_is_tried_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = list[str]()

    def answer(worker: Worker, task: Task) -> dict[str, Any]:
        asked_for.append(task.name)
        full = task.name == "1" and asked_for.count("1") == 1
        return {"gap": OUT_OF_MEMORY} if full else {"result": 0}

    clock = answering(monkeypatch, answer, 0.1)
    planned = [Task("op", str(number), {}, 0, 1) for number in range(4)]
    outcomes, left_out = performed(planned, [Worker(tmp_path), Worker(tmp_path)], clock)
    assert left_out == [] and asked_for.count("1") == 2 and outcomes[-1].task.name == "1"
    assert all(outcome.gap is None for outcome in outcomes) and len(outcomes) == 4


def test_a_gpu_that_is_gone_ends_the_work_and_what_was_measured_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = answering(monkeypatch, lambda worker, task: {"result": 0} if task.name == "0" else {"gap": "no device", "lost": True}, 0.1)
    outcomes, left_out = performed([Task("op", str(number), {}, 0, 1) for number in range(20)], [Worker(tmp_path)], clock)
    assert len(outcomes) == 1 + LOST and len(left_out) == 19 - LOST


def test_each_tool_of_the_sanitizer_has_a_worker_whose_reports_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for compute-sanitizer that reports a hazard for every second line that its program reads."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        "#!/bin/sh\nwhile [ $# -gt 0 ]; do [ $1 = --log-file ] && log=$2; shift; done; n=0\n"
        "while read line; do n=$((n + 1)); [ $((n % 2)) = 0 ] && echo '========= Invalid __global__ read of size 4' >> $log\n"
        'echo \'{"result": [{"case": "c", "result": "d q", "error": 0.0, "bound": 1.0, "good": true}]}\'; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    planned = [task for task in tasks(("sanitizer",), ("aft_read",), None)[0] if task.tool == "memcheck"]
    own, other = Worker(tmp_path / "log", tool="memcheck"), Worker(tmp_path / "log")
    try:
        outcomes, left_out = performed(planned, [other, own], Clock(5))
    finally:
        own.close()
    assert left_out == [] and other.process is None  # the tool's tasks are for its worker alone
    assert [outcome.wrong for outcome in outcomes] == [n % 2 == 1 for n in range(len(planned))] and len(planned) >= 2
    assert outcomes[1].result["reported"] == ["Invalid __global__ read of size 4"]


# --- the record -------------------------------------------------------------------------------------------------------------------

FEW = ["--dry", "--only", "correctness", "--ops", "aft_read", "free_energy", "--minutes", "5", "--workers", "1"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tools.bench.gpu_suite", *arguments]


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed suite leaves is not left in the machine's folder."""
    (tmp_path.parent / f"{tmp_path.name}-work").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path.parent / f"{tmp_path.name}-work"))


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_suite_keeps_its_outcomes_and_the_next_performs_the_rest(tmp_path: Path) -> None:
    with started(*FEW, "--out", str(tmp_path)) as first:
        until(lambda: len(Record.read(tmp_path).outcomes) > 0)
        first.kill()
        first.wait()
    before = Record.read(tmp_path)
    assert len(before.outcomes) > 0 and all(outcome.settled for outcome in before.outcomes.values())
    done = subprocess.run(command(*FEW[:-2], "--resume", str(tmp_path)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = Record.read(tmp_path)
    assert len(after.sessions) == 2 and after.left_out == [] and len(after.outcomes) == 4
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    names = [line["task"]["name"] for line in lines if "task" in line]
    assert set(names[len(before.outcomes) :]).isdisjoint(before.outcomes)  # nothing twice
    assert "in bounds" in (tmp_path / suite.PAGE).read_text()


def test_a_record_cut_anywhere_gives_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a kill can leave it: every prefix of the file is a record, but for a last line that is not whole."""
    whole = Record(tmp_path / "whole")
    whole.folder.mkdir()
    planned, _ = tasks(("correctness",), ("aft_read",), None)
    whole.begin({**SESSION, "planned": [task.name for task in planned]})
    for outcome in [*(checked(1e-6, replace(task, seconds=1)) for task in planned), *measured()]:
        whole.add(outcome)
    content, draw = (whole.folder / FILE).read_bytes(), random.Random(0)
    begin = content.index(b"\n") + 1
    for cut in [begin, *(draw.randrange(begin, len(content)) for _ in range(10)), len(content)]:
        (tmp_path / FILE).write_bytes(content[:cut])
        record = Record.read(tmp_path)
        assert len(record.outcomes) == content[:cut].count(b"\n") - 1 and record.damaged == (content[cut - 1 : cut] != b"\n")
        page = report(record, Results(record.outcomes.values(), GPU))
        assert page.startswith("# GPU benchmarks") and ("cannot be read" in page) == bool(record.damaged)
    assert suite.main(["--report", str(tmp_path)]) == 0 and (tmp_path / suite.PAGE).read_text() == page
    capsys.readouterr()


@pytest.mark.slow
def test_the_whole_suite_killed_at_ten_moments_ends_with_every_outcome(tmp_path: Path) -> None:
    """What is asked for is small but whole: the trainer's runs, too. The moments are random, and no process is left."""
    asked_for, draw = ["--dry", "--minutes", "20"], random.Random(time.time_ns())
    for number in range(10):
        with started(*asked_for, "--resume" if number else "--out", str(tmp_path)) as process:
            until(lambda: process.poll() is not None or (tmp_path / FILE).exists())
            time.sleep(draw.uniform(0.0, 20.0))
            process.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM]))
            process.wait()
        subprocess.run(command("--report", str(tmp_path)), cwd=ROOT, check=True, capture_output=True)
    done = subprocess.run(command(*asked_for, "--resume", str(tmp_path)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = Record.read(tmp_path)
    assert record.left_out == [] and all(outcome.gap is None for outcome in record.outcomes.values() if outcome.task.kind != "engine")


def test_resuming_performs_what_is_missing_then_what_failed_and_a_chain_of_runs_wholly(tmp_path: Path) -> None:
    planned, _ = tasks(("correctness", "trainer"), ("aft_read",), None)
    checks, runs = ([task for task in planned if task.kind == kind] for kind in ("correctness", "train"))
    record = Record(tmp_path)
    record.begin(SESSION)
    record.add(checked(1.0, checks[0]))
    record.add(Outcome(checks[1], gap="no answer within 120 s"))
    record.add(checked(1e-7, checks[2]))
    record.add(Outcome(checks[3], gap="ValueError: x: implementation 'triton' cannot run: float64; use auto"))
    for run in runs[:4]:
        record.add(Outcome(run, {"good": True, "losses": {}}))
    todo = Record.read(tmp_path).missing(planned)
    of_bf16 = [task for task in runs if task.unit == "trainer bf16"]
    assert todo == [*of_bf16, *checks[4:], *checks[:2]] or todo[-2:] == checks[:2]
    assert [task for task in todo if task.kind == "train"] == of_bf16 and len(of_bf16) == 2  # the second continues the first


def test_a_new_run_keeps_an_older_record_and_a_wrong_folder_or_device_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record(tmp_path)
    record.begin(SESSION)
    monkeypatch.setattr(suite, "_work", lambda *given: None)
    assert suite.main([*FEW, "--resume", str(tmp_path)]) == 2
    assert f"is of {GPU}, this machine has CPU" in capsys.readouterr().err
    assert suite.main([*FEW, "--resume", str(tmp_path / "none")]) == 2 and "has no outcomes.jsonl" in capsys.readouterr().err
    assert suite.main([*FEW, "--out", str(tmp_path)]) == 0
    assert "is now outcomes.jsonl.1" in capsys.readouterr().err
    assert Record.read(tmp_path).sessions[0]["dry"] and (tmp_path / f"{FILE}.1").exists()
    assert suite.main([each for each in FEW if each != "--dry"] + ["--resume", str(tmp_path)]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


# --- results and report -----------------------------------------------------------------------------------------------------------


def measured() -> list[Outcome]:
    """Both sides of every target, as workers would answer."""
    found = [Outcome(task("roofs"), {"matmul_flops": 8e14, "copy_bytes": 4e12})]
    for tokens, ours in ((4096, 2.2e-3), (8192, 4.4e-3)):
        size = WORKLOADS["fem_attention"].size(tokens, plan.TOKENS_A_CALL)
        for how, part in (("auto", 1), ("cudnn", 1), ("flash", 2)):
            asked_for = task("op", f"{how}, {tokens}", workload="fem_attention", implementation=how, size=asdict(size))
            found.append(Outcome(asked_for, timed(part * ours)))
        for engine, seconds in (("cudnn", tokens / 4096 * 2e-3), ("flash", tokens / 4096 * 5e-3)):
            baseline = f"attention: SDPA {engine}"
            asked_for = task("baseline", f"{baseline}, {tokens}", baseline=baseline, size=asdict(size.wider(2)))
            found.append(Outcome(asked_for, timed(seconds)))
    models = (("1.3B", "Transformer", 0.1), ("1.3B", "FEM-SM, C L T G", 0.12), ("1.3B, documents", "FEM-SM, C L T G", 0.09))
    for scale, variant, seconds in models:
        cost = {"step": timed(seconds)["both"], "tokens": 8192, "flops": 0.5 * 989e12 * 0.1, "peak_bytes": 3e10, "batch": 2}
        asked_for = task("model", f"{scale} {variant}", scale=scale, variant=variant, batch=2, recompute=False)
        found.append(Outcome(asked_for, {**cost, "recompute": False}))
    for name, mfu, seconds in (("transformer_1.3b", 0.42, 1.0), ("fem_sm_1.3b", 0.4, 1.05)):  # FEM's FLOPs are others
        figures = Figures((seconds,), (7,), (5,), 8, 0, 1000, 6.0, flops_per_token=seconds * mfu * 1e9, peak_flops=1e12)
        found.append(Outcome(replace(task("engine", f"throughput of {name}", model=name), part="throughput"), asdict(figures)))
    return found


def checked(error: float, of: Task | None = None) -> Outcome:
    found = [{"case": "normal", "result": "d q", "error": error, "bound": 1e-5, "good": error <= 1e-5}]
    return Outcome(of or task("correctness", op="fem_attention", case="normal", implementation="cudnn", dtype="float32"), found)


def test_targets_compare_the_same_engine_and_the_table_is_what_the_operation_reads(tmp_path: Path) -> None:
    """Ours is fastest on cuDNN, so cuDNN's standard attention is the other side: 2.2 / 2.0 and 4.4 / 4.0."""
    results = Results(measured(), GPU)
    trainer = [(1.05, True), (0.42, True), (0.4, False)]
    wanted = [(1.1, True), (1.1, False), (1.2, False), (None, None), (None, None), *trainer, (0.5, True), (0.5 / 1.2, False)]
    assert [target.met for target in results.targets()] == [met for _, met in wanted]
    assert [target.value for target in results.targets()] == [value and pytest.approx(value) for value, _ in wanted]
    table.write(GPU, results.engine_table(), tmp_path / "table.json")
    (first, second) = table.read(tmp_path / "table.json")[GPU]
    assert (first.dk, first.dv, first.tokens, second.tokens) == (128, 64, 4096, 8192)
    assert dict(first.microseconds) == {"cudnn": 2200.0, "flash": 4400.0}


def test_the_report_names_what_was_found_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(tmp_path)
    cannot = {"attention: flash-attn 3": "not installed"}
    record.begin({**SESSION, "planned": ["aft_read, auto, 1024", "ssm_read"], "cannot": cannot})
    run = {"good": False, "losses": {}, "worst": 0.02, "bound": 1e-4, "equal": False}
    missing = Outcome(task("op", "aft_read, auto, 1024"), gap=OUT_OF_MEMORY)
    for outcome in (*measured(), checked(2e-6), missing, Outcome(task("train", "trainer: resumed"), run)):
        record.add(outcome)
    assert suite.main(["--report", str(tmp_path), "--json", str(tmp_path / "all.json")]) == 1
    printed, page = capsys.readouterr().out, (tmp_path / suite.PAGE).read_text()
    for text in (
        *("bf16 matrix product 800 TFLOP/s; copy 4,000 GB/s", "| fem_attention | 16 x 128/64", "2.0e-06", "in bounds"),
        *("- attention: flash-attn 3 cannot run here: not installed", "- aft_read, auto, 1024: out of memory"),
        *("without an outcome, for want of time or because the suite was ended (1): ssm_read", "| 1.3B FEM-SM, C L T G "),
        "| WRONG | 2.0e-02 apart, bound 1e-04 |",
    ):
        assert text in page
    (packed,) = ([cell.strip() for cell in line.split("|")] for line in page.splitlines() if "| 1.3B, documents FEM-SM" in line)
    assert packed[2] == "2 x 4096" and packed[5:7] == ["", "0.75"]  # no Transformer's; 0.09 over 0.12
    assert "1.10" in printed and "OUT OF BOUNDS: trainer: resumed" in printed and "FAILED" not in printed
    content = json.loads((tmp_path / "all.json").read_text())
    assert content["targets"][0]["value"] == pytest.approx(1.1) and len(content["outcomes"]) == len(record.outcomes)
    assert {path.name for path in tmp_path.iterdir()} == {"all.json", FILE, suite.PAGE, suite.PICTURE, suite.TABLE}
    assert list(table.read(tmp_path / suite.TABLE)) == [GPU]


def test_a_result_out_of_bounds_is_found_and_a_case_that_ends_in_an_error_has_failed(tmp_path: Path) -> None:
    for error in (1.0, float("inf"), float("nan")):
        record = Record(tmp_path / str(error))
        record.folder.mkdir()
        record.begin(SESSION)
        record.add(checked(error))
        results = Results(Record.read(record.folder).outcomes.values(), GPU)  # JSON has no infinity
        assert len(results.wrong) == 1 and "1 OUT OF BOUNDS" in report(record, results) and "not met" in short(Results(measured(), GPU))
    good = ["ValueError: x: implementation 'triton' cannot run: float64; use auto", OUT_OF_MEMORY]  # not for that implementation
    bad = ["RuntimeError: misaligned address", "ValueError: a shape", "no answer within 120 s"]
    results = Results([Outcome(task("correctness"), gap=gap) for gap in good + bad], GPU)
    assert [outcome.gap for outcome in results.failed] == bad


def test_the_checks_need_torch_alone(tmp_path: Path) -> None:
    """In a process where what the project asks for besides torch and numpy cannot be imported."""
    absent = "megatron yaml transformers matplotlib pyarrow tensorboard wandb psutil tokenizers huggingface_hub".split()
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "from tools.bench.gpu_suite.__main__ import main\n"
        "import tools.bench.gpu_suite.worker\n"
        f"sys.exit(main(['--dry', '--only', 'ops,models,trainer', '--minutes', '0.001', '--out', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = Record.read(tmp_path)
    assert "fem_attention, auto, 4096" in record.left_out and set(record.cannot.values()) >= {"PyYAML is not installed", "no GPU"}
