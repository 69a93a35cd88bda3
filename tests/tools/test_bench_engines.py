"""Tests of the benchmark of engines: its results from ranks, and its refusals, not speed.
`test_bench` runs it.
"""

from __future__ import annotations

import json
import os
import sys
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
from tools.bench.engines import variants
from tools.bench.engines.figures import Figures, as_json, of, table, time_ratio
from tools.bench.engines.variants import (
    BASELINE,
    SETTLING,
    VARIANTS,
    Answer,
    CannotRun,
    Job,
    _answers,
    configuration,
    lacks,
    launch,
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


def answer(rank: int, *seconds: float, peak: int = 100) -> Answer:
    own = {"rank": rank, "building": 1.0, "untimed": [2.0] * 3, "seconds": list(seconds)}
    return {**own, "peak_bytes": peak, "host_bytes": None, "loss": 6.5, "threads": 1}


def test_variants_differ_in_the_engine_alone_and_what_cannot_run_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = {name: configuration(replace(JOB, variant=name)) for name in VARIANTS}
    assert all(
        replace(run, engine=runs[BASELINE].engine) == runs[BASELINE] for run in runs.values()
    )
    assert len({run.engine for run in runs.values()}) == len(VARIANTS) == 7
    assert (
        runs["stage3-offload"].engine.offload_parameters
        and runs[BASELINE].parallel.use_distributed_optimizer
    )
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
    assert (
        lacks(replace(JOB, variant="stage1")) == "DeepSpeed is not installed" and lacks(JOB) is None
    )


def test_rounds_take_turns_and_go_on_without_what_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started, fails = list[str](), {"stage1"}

    def launched(job: Job, **_: Any) -> list[Answer]:
        started.append(job.variant)
        if job.variant in fails:
            raise CannotRun("out of memory")
        return [answer(0, *[1.0] * job.steps), answer(1, *[1.0] * job.steps)]

    monkeypatch.setattr(bench, "launch", launched)
    run = bench.Bench(JOB, ("megatron", "stage1", "stage3"), 2, cuda=False)
    run.run()
    assert started == ["megatron", "stage1", "stage3", "megatron", "stage3"]
    assert (
        run.figures()["stage1"] == "out of memory"
        and "stage1 cannot run: out of memory" in capsys.readouterr().err
    )
    fails.add("megatron")
    assert bench.main(["--variants", "stage1"]) == 1
    assert (
        "megatron, the baseline of all ratios, cannot run: out of memory" in capsys.readouterr().err
    )


def test_the_first_rank_to_fail_has_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("starting\nsome rank: exitcode: -9\n")
    with pytest.raises(CannotRun, match="without an answer: some rank: exitcode: -9"):
        _answers(JOB, tmp_path, log)
    for rank in (1, 0):
        (tmp_path / f"answer{rank}.json").write_text(json.dumps(answer(rank, 1.0, 1.0, 1.0)))
    assert [each["rank"] for each in _answers(JOB, tmp_path, log)] == [0, 1]
    for first, gap in ((1, "no such op"), (0, "a peer is gone")):
        for rank, said in ((first, gap), (1 - first, "another")):
            (tmp_path / f"answer{rank}.json").write_text(json.dumps({"gap": said}))
            os.utime(tmp_path / f"answer{rank}.json", (1 + (rank != first),) * 2)
        with pytest.raises(CannotRun, match=f"^{gap}$"):
            _answers(JOB, tmp_path, log)


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


# Replaces torchrun and its ranks. The last argument is the folder of the job; the ranks
# report the given seconds step by step.
RANKS = """#!{python} -IS
import json, os, pathlib, sys, time
folder, answer, rest = pathlib.Path(sys.argv[-1]), {answer}, {seconds}
print("E1127 torchrun's own", flush=True)
print("a rank's last words", flush=True)
for seconds in [None, *rest]:
    if seconds == "fail":
        sys.exit(1)
    if seconds == "hang":
        time.sleep(600)
    answer["seconds"] += [seconds] if seconds else []
    for rank in range(2):
        (folder / "new").write_text(json.dumps(answer | {{"rank": rank}}))
        os.replace(folder / "new", folder / f"answer{{rank}}.json")
"""
LOG = Path("logs") / "cpu-megatron.log"


@pytest.fixture
def launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[Answer] | str, list[str]]]:
    """Return the results of `launch` with these ranks, or the error, and the output. ``ends``: the
    limit is reached at a line with this word.
    """
    monkeypatch.chdir(tmp_path)
    clock = [0.0]
    monkeypatch.setattr(variants, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def called(
        *seconds: float | str, ends: str = "never", **given: Any
    ) -> tuple[list[Answer] | str, list[str]]:
        script, said = tmp_path / "ranks", list[str]()
        script.write_text(
            RANKS.format(python=sys.executable, answer=answer(0), seconds=list(seconds))
        )
        script.chmod(0o755)

        def say(line: str) -> None:
            said.append(line)
            clock[0] += 1000.0 * (ends in line)

        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(script))
            try:
                return launch(JOB, say=say, logs=LOG.parent, **given), said
            except CannotRun as error:
                return str(error), said

    return called


def test_every_step_is_reported_and_nothing_is_left_behind(launched: Callable[..., Any]) -> None:
    seen = list[int]()
    answers, said = launched(
        0.5, 0.25, 0.125, partial=lambda answers: seen.append(len(answers[0]["seconds"]))
    )
    assert [each["seconds"] for each in answers] == [
        [0.5, 0.25, 0.125]
    ] * 2 and not LOG.parent.exists()
    assert seen == sorted(seen) and seen[-1] == 3
    assert (
        said[0] == "megatron: engine built in 1.0 s"
        and len(said) == 1 + JOB.warmup + SETTLING + JOB.steps
    )
    assert said[1] == "megatron: step 1 of 6 (not timed): 2.000 s, 128 tokens/s, about 10s to go"
    assert said[-2:] == [
        f"megatron: step {n} of 6: {s} tokens/s, about 0s to go"
        for n, s in ((5, "0.250 s, 1,024"), (6, "0.125 s, 2,048"))
    ]


def test_steps_before_the_limit_count_and_the_log_is_kept(launched: Callable[..., Any]) -> None:
    answers, said = launched(0.5, "hang", ends="step 4 of 6")
    assert [each["seconds"] for each in answers] == [[0.5], [0.5]] and of(
        JOB, [answers], cuda=False
    ).partial
    assert said[-2:] == [
        "  | a rank's last words",
        f"megatron: ended after 900 s with 1 of 3 timed steps; log: {LOG}",
    ]
    assert "torchrun's own" in LOG.read_text()
    LOG.unlink()
    error, said = launched("hang", ends="engine built")
    assert (
        error == f"no timed step within 900 s, and 3 of the 3 steps before them; log: {LOG}"
        and "  | a rank's last words" in said
    )


def test_ranks_that_fail_or_are_stopped_leave_their_log(launched: Callable[..., Any]) -> None:
    error, _ = launched(0.5, "fail")
    assert (
        error == f"a rank ended without an answer: a rank's last words; log: {LOG}"
        and LOG.is_file()
    )
    LOG.unlink()

    def stop(answers: list[Answer]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launched(0.5, "hang", partial=stop)
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

    def launched(job: Job, *, partial: Callable[[list[Answer]], None], **_: Any) -> list[Answer]:
        partial([answer(0, 1.0), answer(1, 1.0)])
        assert rows()[job.variant][1]
        steps = rounds[job.variant].pop(0)
        if steps == stopped:
            raise KeyboardInterrupt
        return [answer(rank, *[1.0] * steps) for rank in range(2)]

    monkeypatch.setattr(bench, "launch", launched)
    with pytest.raises(KeyboardInterrupt):
        bench.Bench(JOB, tuple(rounds), 2, cuda=False, out=out).run()
    # stage1 reached the limit in its first round and is not started again; stage3 was stopped in
    # its second round.
    assert rows() == {"megatron": (2, False), "stage1": (1, True), "stage3": (2, True)}


def test_mfu_is_that_of_the_plan_and_none_without_a_data_sheet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = [[answer(0, 2.0, 2.0, 2.0), answer(1, 2.0, 2.0, 2.0)]]
    found = of(JOB, rounds, cuda=False)
    assert (
        found.mfu is None
        and found.flops_per_token == plan_of(JOB, cuda=False).train_flops
        and not found.partial
    )
    monkeypatch.setattr(platform, "device_name", lambda: "NVIDIA H100 80GB HBM3")
    share = of(JOB, rounds, cuda=False).mfu
    # The same product in a different order.
    assert share == pytest.approx(mfu(plan_of(JOB, cuda=False), 2.0, "H100"), rel=1e-12)
    row = as_json("megatron", replace(found, peak_flops=1e12), None)
    assert row["mfu"] == found.tokens / 2.0 * found.flops_per_token / 1e12


def test_figures_are_the_slowest_ranks_and_ratios_of_one_round() -> None:
    # A step ends with its last rank: 2, 3, 4, and 4, 6, 8 on a machine that is twice as slow.
    base = of(
        JOB,
        [
            [answer(0, 1, 3, 4), answer(1, 2, 2, 4)],
            [answer(0, 4, 6, 8, peak=300), answer(1, 4, 6, 8)],
        ],
        cuda=False,
    )
    assert (base.steps, base.step, base.peaks, base.peak, base.hosts) == (
        (3.0, 6.0),
        4.5,
        (200, 100),
        200,
        None,
    )
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
    assert (
        len({len(line) for line in lines}) == 1
        and "host, MiB" in lines[0]
        and "cannot run" in lines[0]
    )
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
