"""Tests of the benchmark of engines: its results from runs, and its refusals, not speed.
`test_bench` runs it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fem_common.errors import ConfigError
from fem_megatron.megatron import platform
from tests.test_house import ROOT
from tools.bench.engines import __main__ as bench
from tools.bench.engines import runs
from tools.bench.engines.figures import Figures, as_json, of, table, time_ratio
from tools.bench.engines.runs import CannotRun, Round, launch
from tools.bench.engines.variants import (
    BASELINE,
    VARIANTS,
    Job,
    configuration,
    lacks,
    plan_of,
    planned,
)
from tools.layout.step import mfu

TINY = [
    *(
        "model.hidden_size=32",
        "model.num_layers=1",
        "model.num_attention_heads=2",
        "model.ffn_hidden_size=64",
        "model.vocab_size=128",
    ),
    *("data.seq_length=16", "train.micro_batch_size=1"),
]
JOB = Job(BASELINE, ranks=2, precision="fp32", size="cpu", warmup=2, steps=3)


def measured(*seconds: float, peak: int = 100) -> Round:
    return Round(seconds, peak, None, 6.5)


def test_variants_differ_in_the_engine_alone_and_what_cannot_run_reports_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = {name: configuration(replace(JOB, variant=name)) for name in VARIANTS}
    assert all(
        replace(run, engine=runs[BASELINE].engine) == runs[BASELINE] for run in runs.values()
    )
    assert len({run.engine for run in runs.values()}) == len(VARIANTS) == 7
    assert runs["stage3-offload"].engine.offload_parameters
    assert runs[BASELINE].parallel.use_distributed_optimizer
    assert runs[BASELINE].train.global_batch_size == 4
    memory = planned(JOB, cuda=False)
    # The parameters take most of the memory.
    assert 30e6 < memory.parameters < 60e6 and memory.activations < memory.total / 10
    assert all(
        name == "stage0" or lacks(Job(name, 1, "bf16", "gpu", 2, 2)) is None for name in VARIANTS
    )  # the variants of the GPU suite
    assert "only train.precision=fp32" in str(
        lacks(replace(JOB, variant="stage0", precision="bf16"))
    )
    monkeypatch.setattr(
        "tools.bench.engines.variants.find_spec",
        lambda name: None if name == "deepspeed" else find_spec(name),
    )
    assert lacks(replace(JOB, variant="stage1")) == "DeepSpeed is not installed"
    assert lacks(JOB) is None


def test_rounds_take_turns_and_continue_without_what_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started, fails = list[str](), {"stage1"}

    def launched(job: Job, **_: Any) -> Round:
        started.append(job.variant)
        if job.variant in fails:
            raise CannotRun("out of memory")
        return measured(*[1.0] * job.steps)

    monkeypatch.setattr(bench, "launch", launched)
    run = bench.Bench(JOB, ("megatron", "stage1", "stage3"), 2, cuda=False)
    run.run()
    assert started == ["megatron", "stage1", "stage3", "megatron", "stage3"]
    assert run.figures()["stage1"] == "out of memory"
    assert "stage1 cannot run: out of memory" in capsys.readouterr().err
    fails.add("megatron")
    assert bench.main(["--variants", "stage1"]) == 1
    assert (
        "megatron, the baseline of all ratios, cannot run: out of memory" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "tokens", "batch"), [("fem_sm_1.3b", 4096, 2), ("transformer_340m", 4096, 4)]
)
def test_a_model_by_name_trains_as_its_run_does(name: str, tokens: int, batch: int) -> None:
    job = Job(BASELINE, 1, "bf16", "gpu", 2, 2, model=name)
    assert Job.from_json(job.as_json()) == job
    run = configuration(job)
    assert (run.data.seq_length, run.train.micro_batch_size, run.train.global_batch_size) == (
        tokens,
        batch,
        4 * batch,
    )
    assert (
        run.model
        == configuration(replace(job, model=str(ROOT / f"configs/model/{name}.yaml"))).model
    )
    assert configuration(replace(job, ranks=2)).train.global_batch_size == 8 * batch
    own = configuration(
        replace(
            job, overrides=("model.num_layers=2", "data.seq_length=64", "train.micro_batch_size=1")
        )
    )
    assert (own.model.num_layers, own.data.seq_length, own.train.global_batch_size) == (2, 64, 4)
    assert own.model.hidden_size == run.model.hidden_size
    small = configuration(replace(job, size="cpu", precision="fp32"))
    assert (small.data.seq_length, small.train.micro_batch_size, small.train.global_batch_size) == (
        256,
        2,
        2,
    )


def test_a_model_without_a_run_or_a_vocabulary(tmp_path: Path) -> None:
    """Its sizes are those of the benchmark's model, and its vocabulary is given."""
    # By default the vocabulary of its data.
    assert configuration(replace(JOB, model="fem_sm_demo")).model.vocab_size == 32000
    (tmp_path / "own.yaml").write_text(
        "{mixer: transformer, hidden_size: 32, num_layers: 1, num_attention_heads: 2, vocab_size:"
        " 128}"
    )
    own = configuration(replace(JOB, model=str(tmp_path / "own.yaml")))
    assert (own.model.hidden_size, own.model.vocab_size, own.data.seq_length) == (32, 128, 64)
    for name, message in (
        ("fem_sm_1.3c", "configs/model has no fem_sm_1.3c; did you mean fem_sm_1.3b?"),
        ("a/own.yaml", "no file a/own"),
    ):
        with pytest.raises(ConfigError, match=message):
            configuration(replace(JOB, model=name))


# Replaces the ranks: rank 0 writes a step of each of the given seconds.
RANKS = """#!{python} -IS
import json, os, pathlib, sys, time
folder = next(pathlib.Path(word[8:]) for word in sys.argv if word.startswith("run_dir="))
folder.mkdir(exist_ok=True)
os.write(1, b"the last words of rank %s\\n" % os.environb[b"RANK"])
(folder / ("printed_" + os.environ["RANK"])).touch()
while len(list(folder.glob("printed_*"))) < 2:  # a rank may start late
    time.sleep(0.005)
for number, seconds in enumerate({seconds}, 1):
    if seconds == "fail" and os.environ["RANK"] == "1":
        sys.exit(1)
    if seconds in ("fail", "hang"):
        time.sleep(600)
    row = dict(step=number, loss=6.5, grad_norm=1.0, skipped=seconds == "skip")
    row |= dict(step_seconds=seconds, peak_memory_bytes=1000)
    if os.environ["RANK"] == "0":
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + chr(10))
"""
LOG = Path("logs") / "cpu-megatron.log"


@pytest.fixture
def launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Round | str, list[str]]]:
    """Return the results of `launch` with these ranks, or the error, and the output. ``ends``: the
    limit is reached at a line with this word.
    """
    monkeypatch.chdir(tmp_path)
    clock = [0.0]
    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: time.sleep(0.01))
    monkeypatch.setattr(runs, "time", fake)
    monkeypatch.setattr(runs, "libraries_bytes", lambda engine: 900)

    def called(
        *seconds: float | str, ends: str = "never", **given: Any
    ) -> tuple[Round | str, list[str]]:
        script, output = tmp_path / "ranks", list[str]()
        script.write_text(RANKS.format(python=sys.executable, seconds=list(seconds)))
        script.chmod(0o755)

        def log(line: str) -> None:
            output.append(line)
            clock[0] += 1000.0 * (ends in line)

        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(script))
            try:
                return launch(JOB, log=log, logs=LOG.parent, **given), output
            except CannotRun as error:
                return str(error), output

    return called


def test_every_step_is_reported_and_nothing_is_left_behind(launched: Callable[..., Any]) -> None:
    seen = list[int]()
    found, output = launched(
        2.0, 2.0, 0.5, 0.25, 0.125, partial=lambda found: seen.append(len(found.seconds))
    )
    assert found == Round((0.5, 0.25, 0.125), 100, None, 6.5) and not LOG.parent.exists()
    assert seen == sorted(seen) and seen[-1] == 3
    assert output == [
        "megatron: step 1 of 5 (not timed): 2.000 s, 128 tokens/s, about 8s to go",
        "megatron: step 2 of 5 (not timed): 2.000 s, 128 tokens/s, about 6s to go",
        "megatron: step 3 of 5: 0.500 s, 512 tokens/s, about 1s to go",
        "megatron: step 4 of 5: 0.250 s, 1,024 tokens/s, about 0s to go",
        "megatron: step 5 of 5: 0.125 s, 2,048 tokens/s, about 0s to go",
    ]


def test_steps_before_the_limit_count_and_the_log_is_kept(launched: Callable[..., Any]) -> None:
    found, output = launched(2.0, 2.0, 0.5, "hang", ends="step 3 of 5")
    assert found.seconds == (0.5,) and of(JOB, [found], cuda=False).partial
    assert output[-3:] == [
        "  | the last words of rank 0",
        "  | the last words of rank 1",
        f"megatron: ended after 900 s with 1 of 3 timed steps; log: {LOG}",
    ]
    assert LOG.read_text() == "the last words of rank 0\nthe last words of rank 1\n"
    error, _ = launched(2.0, "hang", ends="step 1 of 5")
    assert error == f"no timed step within 900 s, and 1 of the 2 steps before them; log: {LOG}"


def test_ranks_that_fail_or_are_stopped_leave_their_log(launched: Callable[..., Any]) -> None:
    error, _ = launched(2.0, 2.0, 0.5, "fail")
    first = "rank 1 ended with exit code 1: the last words of rank 1"
    assert error == f"{first}; log: {LOG}" and LOG.is_file()
    error, _ = launched(2.0, 2.0, "skip", "hang")
    assert error == f"a step was skipped: loss 6.5, gradient norm 1.0; log: {LOG}"
    LOG.unlink()

    def stop(found: Round) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launched(2.0, 2.0, 0.5, "hang", partial=stop)
    assert LOG.is_file()


def test_the_json_has_every_timed_step_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, stopped = tmp_path / "out.json", 0
    rounds = {"megatron": [3, 3], "stage1": [2], "stage3": [3, stopped]}

    def rows() -> dict[str, Any]:
        return {
            row["variant"]: (len(row["rounds"]), row["partial"])
            for row in json.loads(out.read_text())["rows"]
        }

    def launched(job: Job, *, partial: Callable[[Round], None], **_: Any) -> Round:
        partial(measured(1.0))
        assert rows()[job.variant][1]
        steps = rounds[job.variant].pop(0)
        if steps == stopped:
            raise KeyboardInterrupt
        return measured(*[1.0] * steps)

    monkeypatch.setattr(bench, "launch", launched)
    with pytest.raises(KeyboardInterrupt):
        bench.Bench(JOB, tuple(rounds), 2, cuda=False, out=out).run()
    # stage1 reached the limit in its first round and is not started again; stage3 was stopped in
    # its second round.
    assert rows() == {"megatron": (2, False), "stage1": (1, True), "stage3": (2, True)}


def test_mfu_is_that_of_the_plan_and_none_without_a_data_sheet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = [measured(2.0, 2.0, 2.0)]
    found = of(JOB, rounds, cuda=False)
    assert found.mfu is None
    assert found.flops_per_token == plan_of(JOB, cuda=False).train_flops
    assert not found.partial
    monkeypatch.setattr(platform, "device_name", lambda: "NVIDIA H100 80GB HBM3")
    share = of(JOB, rounds, cuda=False).mfu
    # The same product in a different order.
    assert share == pytest.approx(mfu(plan_of(JOB, cuda=False), 2.0, "H100"), rel=1e-12)
    row = as_json("megatron", replace(found, peak_flops=1e12), None)
    assert row["mfu"] == found.tokens / 2.0 * found.flops_per_token / 1e12


def test_figures_are_medians_and_ratios_those_of_one_round() -> None:
    base = of(JOB, [measured(2, 3, 7), measured(4, 6, 8, peak=300)], cuda=False)
    assert (base.steps, base.step, base.peaks, base.hosts) == ((3, 6), 4.5, (200,), None)
    assert base.tokens == 4 * 64 and base.planned == planned(JOB, cuda=False).total
    other = replace(base, steps=(4.5, 12.0), peaks=(50, 40))
    ratio = time_ratio(other, base)
    assert (ratio.median, ratio.least, ratio.most) == (1.75, 1.5, 2.0)
    row = as_json("stage3", other, base)
    assert (row["step_ratio"], row["step_ratio_range"], row["peak_ratio"]) == (
        1.75,
        [1.5, 2.0],
        0.25,
    )


def test_a_table_has_every_variant() -> None:
    base = Figures((1.0,), (2**30,), (2**20,), 2**30, 0, 4096, 6.5)
    late = replace(
        base, steps=(2.0,), peaks=(2**29,), flops_per_token=1e9, peak_flops=5.12e12, partial=True
    )
    lines = table({"megatron": base, "stage0": "fp32 alone", "stage3": late}).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "host, MiB" in lines[0]
    assert "cannot run" in lines[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2][:8] == ["megatron", "1.000", "1.00", "", "4,096", "", "1,024", "1.00"]
    assert (cells[3][0], cells[3][-1]) == ("stage0", "fp32 alone")
    assert cells[4][:8] == [
        "stage3 (partial)",
        "2.000",
        "2.00",
        "",
        "2,048",
        "40.0%",
        "512",
        "0.50",
    ]
    assert as_json("stage0", "fp32 alone", base) == {"variant": "stage0", "cannot": "fp32 alone"}
