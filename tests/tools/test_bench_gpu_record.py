"""Tests of the GPU suite's record after kills and resumes, and of its page. No GPU; speed is not
checked.
"""

from __future__ import annotations

import json
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

from kernels.fem_attention import table
from tests.ranks import PATIENCE
from tests.test_house import ROOT
from tests.tools.test_bench_gpu_suite import GPU, task
from tools.bench.engines.figures import Figures
from tools.bench.gpu_suite import __main__ as suite
from tools.bench.gpu_suite import plan
from tools.bench.gpu_suite.plan import Task, tasks
from tools.bench.gpu_suite.report import report, short
from tools.bench.gpu_suite.results import FILE, OUT_OF_MEMORY, Outcome, Record, Results
from tools.bench.workloads import WORKLOADS

MACHINE: dict[str, Any] = {
    "date": "2026-01-01",
    "device": GPU,
    "python": "3",
    "torch": "2",
    "toolkit": None,
    "threads": 1,
    "packages": {},
}
SESSION: dict[str, Any] = {
    "machine": MACHINE,
    "minutes": 8,
    "dry": False,
    "planned": [],
    "cannot": {},
}


def timed(seconds: float) -> dict[str, Any]:
    passes = {
        name: {"seconds": part * seconds, "spread": 0.01, "calls": 10}
        for name, part in (("forward", 1 / 3), ("both", 1.0))
    }
    return {**passes, "flops": [3e11, 1e12], "bytes": [3e8, 1e9]}


# --- the record -----------------------------------------------------------------------------------

FEW = "--dry --only correctness --ops aft_read free_energy --minutes 5 --workers 1".split()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tools.bench.gpu_suite", *arguments]


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect temporary files of a killed suite to the test's folder."""
    (tmp_path.parent / f"{tmp_path.name}-work").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path.parent / f"{tmp_path.name}-work"))


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
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


def test_a_record_cut_anywhere_gives_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every prefix of the file is a record, except for an incomplete last line; a kill leaves such
    a prefix.
    """
    full = Record(tmp_path / "whole")
    full.folder.mkdir()
    planned, _ = tasks(("correctness",), ("aft_read",), None)
    full.begin({**SESSION, "planned": [each.name for each in planned]})
    for outcome in [*(checked(1e-6, each) for each in planned), *measured()]:
        full.add(outcome)
    content, draw = (full.folder / FILE).read_bytes(), random.Random(0)
    begin = content.index(b"\n") + 1
    for cut in [begin, *(draw.randrange(begin, len(content)) for _ in range(10)), len(content)]:
        (tmp_path / FILE).write_bytes(content[:cut])
        record = Record.read(tmp_path)
        assert len(record.outcomes) == content[:cut].count(b"\n") - 1
        assert record.damaged == (content[cut - 1 : cut] != b"\n")
        page = report(record, Results(record.outcomes.values(), GPU))
        assert page.startswith("# GPU benchmarks")
        assert ("cannot be read" in page) == bool(record.damaged)
    assert suite.main(["--report", str(tmp_path)]) == 0
    assert (tmp_path / suite.PAGE).read_text() == page
    capsys.readouterr()


@pytest.mark.slow
def test_the_whole_suite_killed_at_ten_moments_ends_with_every_outcome(tmp_path: Path) -> None:
    """The tasks are small but complete, including the trainer's runs. The times of the kills are
    random, and no process remains.
    """
    requested, draw = ["--dry", "--minutes", "20"], random.Random(time.time_ns())
    for number in range(10):
        with started(*requested, "--resume" if number else "--out", str(tmp_path)) as process:
            until(lambda: process.poll() is not None or (tmp_path / FILE).exists())
            time.sleep(draw.uniform(0.0, 20.0))
            process.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM]))
            process.wait()
        subprocess.run(
            command("--report", str(tmp_path)), cwd=ROOT, check=True, capture_output=True
        )
    done = subprocess.run(
        command(*requested, "--resume", str(tmp_path)), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = Record.read(tmp_path)
    assert record.left_out == []
    assert all(
        outcome.gap is None for outcome in record.outcomes.values() if outcome.task.kind != "engine"
    )
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    checks = [
        line["task"]["name"]
        for line in lines
        if "task" in line and line["task"]["kind"] == "correctness" and line["gap"] is None
    ]
    assert len(checks) == len(set(checks)) > 0  # no settled task is performed again


def test_resuming_performs_what_is_missing_then_what_failed_and_a_chain_of_runs_wholly(
    tmp_path: Path,
) -> None:
    planned, _ = tasks(("correctness", "trainer"), ("aft_read",), None)
    checks = [task for task in planned if task.kind == "correctness"]
    runs = [task for task in planned if task.kind == "train"]
    record = Record(tmp_path)
    record.begin(SESSION)
    record.add(checked(1.0, checks[0]))
    record.add(Outcome(checks[1], gap="no answer within 120 s"))
    record.add(checked(1e-7, checks[2]))
    record.add(
        Outcome(
            checks[3], gap="ValueError: x: implementation 'triton' cannot run: float64; use auto"
        )
    )
    for run in runs[:4]:
        record.add(Outcome(run, {"good": True, "losses": {}}))
    todo = Record.read(tmp_path).missing(planned)
    of_bf16 = [task for task in runs if task.unit == "trainer bf16"]
    assert todo == [*of_bf16, *checks[4:], *checks[:2]] or todo[-2:] == checks[:2]
    # The second run continues the first.
    assert [task for task in todo if task.kind == "train"] == of_bf16 and len(of_bf16) == 2


def test_a_new_run_keeps_an_older_record_and_a_wrong_folder_or_device_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record(tmp_path)
    record.begin(SESSION)
    monkeypatch.setattr(suite, "_work", lambda *given: None)
    assert suite.main([*FEW, "--resume", str(tmp_path)]) == 2
    assert f"is of {GPU}, this machine has CPU" in capsys.readouterr().err
    assert suite.main([*FEW, "--resume", str(tmp_path / "none")]) == 2
    assert "has no outcomes.jsonl" in capsys.readouterr().err
    assert suite.main([*FEW, "--out", str(tmp_path)]) == 0
    assert "is now outcomes.jsonl.1" in capsys.readouterr().err
    assert Record.read(tmp_path).sessions[0]["dry"] and (tmp_path / f"{FILE}.1").exists()
    assert suite.main([each for each in FEW if each != "--dry"] + ["--resume", str(tmp_path)]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


# --- results and report ---------------------------------------------------------------------------


def measured() -> list[Outcome]:
    """Return outcomes for both sides of every target, as workers would send them."""
    found = [Outcome(task("roofs"), {"matmul_flops": 8e14, "copy_bytes": 4e12})]
    for tokens, ours in ((4096, 2.2e-3), (8192, 4.4e-3)):
        size = WORKLOADS["fem_attention"].size(tokens, plan.TOKENS_A_CALL)
        for how, part in (("auto", 1), ("cudnn", 1), ("flash", 2)):
            requested = task(
                "op",
                f"{how}, {tokens}",
                workload="fem_attention",
                implementation=how,
                size=asdict(size),
            )
            found.append(Outcome(requested, timed(part * ours)))
        for engine, seconds in (("cudnn", tokens / 4096 * 2e-3), ("flash", tokens / 4096 * 5e-3)):
            baseline = f"attention: SDPA {engine}"
            requested = task(
                "baseline", f"{baseline}, {tokens}", baseline=baseline, size=asdict(size.wider(2))
            )
            found.append(Outcome(requested, timed(seconds)))
    models = (
        ("1.3B", "Transformer", 0.1),
        ("1.3B", "FEM-SM, C L T G", 0.12),
        ("1.3B, documents", "FEM-SM, C L T G", 0.09),
    )
    for scale, variant, seconds in models:
        cost = {
            "step": timed(seconds)["both"],
            "tokens": 8192,
            "flops": 0.5 * 989e12 * 0.1,
            "peak_bytes": 3e10,
            "parameters": 1,
            "batch": 2,
        }
        requested = task(
            "model", f"{scale} {variant}", scale=scale, variant=variant, batch=2, recompute=False
        )
        found.append(Outcome(requested, {**cost, "recompute": False}))
    # FEM has other FLOPs.
    for name, mfu, seconds in (("transformer_1.3b", 0.42, 1.0), ("fem_sm_1.3b", 0.4, 1.05)):
        figures = Figures(
            (seconds,),
            (7,),
            (5,),
            8,
            0,
            1000,
            6.0,
            flops_per_token=seconds * mfu * 1e9,
            peak_flops=1e12,
        )
        found.append(
            Outcome(
                replace(task("engine", f"throughput of {name}", model=name), part="throughput"),
                asdict(figures),
            )
        )
    return found


def checked(error: float, of: Task | None = None) -> Outcome:
    found = [
        {"case": "normal", "result": "d q", "error": error, "bound": 1e-5, "good": error <= 1e-5}
    ]
    if of is None:
        of = task(
            "correctness",
            op="fem_attention",
            case="normal",
            implementation="cudnn",
            dtype="float32",
        )
    return Outcome(of, found)


def test_targets_compare_the_same_engine_and_the_table_is_what_the_operation_reads(
    tmp_path: Path,
) -> None:
    """Ours is fastest with cuDNN, so cuDNN's standard attention is the other side: 2.2 / 2.0 and
    4.4 / 4.0.
    """
    results = Results(measured(), GPU)
    trainer = [(1.05, True), (0.42, True), (0.4, False)]
    wanted = [
        (1.1, True),
        (1.1, False),
        (1.2, False),
        (None, None),
        (None, None),
        *trainer,
        (0.5, True),
        (0.5 / 1.2, False),
    ]
    assert [target.met for target in results.targets()] == [met for _, met in wanted]
    assert [target.value for target in results.targets()] == [
        value and pytest.approx(value) for value, _ in wanted
    ]
    table.write(GPU, results.engine_table(), tmp_path / "table.json")
    (first, second) = table.read(tmp_path / "table.json")[GPU]
    assert (first.dk, first.dv, first.tokens, second.tokens) == (128, 64, 4096, 8192)
    assert dict(first.microseconds) == {"cudnn": 2200.0, "flash": 4400.0}


def test_the_report_names_what_was_found_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record(tmp_path)
    cannot = {"attention: flash-attn 3": "not installed"}
    record.begin({**SESSION, "planned": ["aft_read, auto, 1024", "ssm_read"], "cannot": cannot})
    run = {"good": False, "losses": {}, "worst": 0.02, "bound": 1e-4, "equal": False}
    missing = Outcome(task("op", "aft_read, auto, 1024"), gap=OUT_OF_MEMORY)
    for outcome in (
        *measured(),
        checked(2e-6),
        missing,
        Outcome(task("train", "trainer: resumed"), run),
    ):
        record.add(outcome)
    assert suite.main(["--report", str(tmp_path), "--json", str(tmp_path / "all.json")]) == 1
    printed, page = capsys.readouterr().out, (tmp_path / suite.PAGE).read_text()
    for text in (
        *(
            "bf16 matrix product 800 TFLOP/s; copy 4,000 GB/s",
            "| fem_attention | 16 x 128/64",
            "2.0e-06",
            "in bounds",
        ),
        *(
            "- attention: flash-attn 3 cannot run here: not installed",
            "- aft_read, auto, 1024: out of memory",
        ),
        *(
            "without an outcome, for lack of time or because the suite was ended (1): ssm_read",
            "| 1.3B FEM-SM, C L T G ",
        ),
        "| WRONG | difference 2.0e-02, bound 1e-04 |",
    ):
        assert text in page
    (line,) = (line for line in page.splitlines() if "| 1.3B, documents FEM-SM" in line)
    packed = [cell.strip() for cell in line.split("|")]
    # The table has no value for the Transformer; 0.75 is 0.09 over 0.12.
    assert packed[2] == "2 x 4096" and packed[5:7] == ["", "0.75"]
    assert "1.10" in printed
    assert "OUT OF BOUNDS: trainer: resumed" in printed
    assert "FAILED" not in printed
    content = json.loads((tmp_path / "all.json").read_text())
    assert content["targets"][0]["value"] == pytest.approx(1.1)
    assert len(content["outcomes"]) == len(record.outcomes)
    assert {path.name for path in tmp_path.iterdir()} == {
        "all.json",
        FILE,
        suite.PAGE,
        suite.PICTURE,
        suite.TABLE,
    }
    assert list(table.read(tmp_path / suite.TABLE)) == [GPU]


def test_a_result_out_of_bounds_is_found_and_a_case_that_ends_in_an_error_has_failed(
    tmp_path: Path,
) -> None:
    for error in (1.0, float("inf"), float("nan")):
        record = Record(tmp_path / str(error))
        record.folder.mkdir()
        record.begin(SESSION)
        record.add(checked(error))
        results = Results(Record.read(record.folder).outcomes.values(), GPU)  # JSON has no infinity
        assert len(results.wrong) == 1
        assert "1 OUT OF BOUNDS" in report(record, results)
        assert "not met" in short(Results(measured(), GPU))
    # These gaps are no failures: the implementation cannot run the case.
    good = ["ValueError: x: implementation 'triton' cannot run: float64; use auto", OUT_OF_MEMORY]
    bad = ["RuntimeError: misaligned address", "ValueError: a shape", "no answer within 120 s"]
    results = Results([Outcome(task("correctness"), gap=gap) for gap in good + bad], GPU)
    assert [outcome.gap for outcome in results.failed] == bad
