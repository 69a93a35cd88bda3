"""The benchmark of engines: what it makes of its ranks' answers, what it says no to; not how fast they are. `test_bench` runs it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.bench.engines import __main__ as bench
from tools.bench.engines.figures import Figures, as_json, of, table, time_ratio
from tools.bench.engines.variants import BASELINE, VARIANTS, Answer, CannotRun, Job, _answers, configuration, lacks, planned

TINY = [
    *("model.hidden_size=32", "model.num_layers=1", "model.num_attention_heads=2", "model.ffn_hidden_size=64", "model.vocab_size=128"),
    *("data.seq_length=16", "train.micro_batch_size=1"),
]
JOB = Job(BASELINE, ranks=2, precision="fp32", size="cpu", warmup=2, steps=3)


def answer(rank: int, *seconds: float, peak: int = 100) -> Answer:
    return {"rank": rank, "seconds": list(seconds), "peak_bytes": peak, "host_bytes": None, "loss": 6.5, "threads": 1}


def test_variants_differ_in_the_engine_alone_and_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {name: configuration(replace(JOB, variant=name)) for name in VARIANTS}
    assert all(replace(run, engine=runs[BASELINE].engine) == runs[BASELINE] for run in runs.values())
    assert len({run.engine for run in runs.values()}) == len(VARIANTS) == 7
    assert runs["stage3-offload"].engine.offload_parameters and runs[BASELINE].parallel.use_distributed_optimizer
    assert runs[BASELINE].train.global_batch_size == 4
    memory = planned(JOB, cuda=False)
    assert 30e6 < memory.parameters < 60e6 and memory.activations < memory.total / 10  # parameters make the memory
    assert all(name == "stage0" or lacks(Job(name, 1, "bf16", "gpu", 2, 2)) is None for name in VARIANTS)  # the GPU suite's
    assert "fp32 alone" in str(lacks(replace(JOB, variant="stage0", precision="bf16")))
    monkeypatch.setattr("tools.bench.engines.variants.find_spec", lambda name: None if name == "deepspeed" else find_spec(name))
    assert lacks(replace(JOB, variant="stage1")) == "DeepSpeed is not installed" and lacks(JOB) is None


def test_rounds_take_turns_and_go_on_without_what_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started, fails = list[str](), {"stage1"}

    def launched(job: Job) -> list[Answer]:
        started.append(job.variant)
        if job.variant in fails:
            raise CannotRun("out of memory")
        return [answer(0, 1.0), answer(1, 1.0)]

    monkeypatch.setattr(bench, "launch", launched)
    run = bench.Bench(JOB, ("megatron", "stage1", "stage3"), 2, cuda=False)
    run.run()
    assert started == ["megatron", "stage1", "stage3", "megatron", "stage3"]
    assert run.figures()["stage1"] == "out of memory" and "stage1 cannot run: out of memory" in capsys.readouterr().err
    fails.add("megatron")
    assert bench.main(["--variants", "stage1"]) == 1
    assert "megatron, which the others are held against, cannot run: out of memory" in capsys.readouterr().err


def test_the_first_rank_to_fail_has_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("starting\nsome rank: exitcode: -9\n")
    with pytest.raises(CannotRun, match="without an answer: some rank: exitcode: -9"):
        _answers(JOB, tmp_path, log)
    for rank in (1, 0):
        (tmp_path / f"answer{rank}.json").write_text(json.dumps(answer(rank, 1.0)))
    assert [each["rank"] for each in _answers(JOB, tmp_path, log)] == [0, 1]
    for first, gap in ((1, "no such op"), (0, "a peer is gone")):
        for rank, said in ((first, gap), (1 - first, "another")):
            (tmp_path / f"answer{rank}.json").write_text(json.dumps({"gap": said}))
            os.utime(tmp_path / f"answer{rank}.json", (1 + (rank != first),) * 2)
        with pytest.raises(CannotRun, match=f"^{gap}$"):
            _answers(JOB, tmp_path, log)


def test_figures_are_the_slowest_ranks_and_ratios_of_one_round() -> None:
    # Steps end with their last rank: 2, 3, 4 and, the machine twice as slow, 4, 6, 8.
    base = of(JOB, [[answer(0, 1, 3, 4), answer(1, 2, 2, 4)], [answer(0, 4, 6, 8, peak=300), answer(1, 4, 6, 8)]], cuda=False)
    assert (base.steps, base.step, base.peaks, base.peak, base.hosts) == ((3.0, 6.0), 4.5, (200, 100), 200, None)
    assert base.tokens == 4 * 64 and base.planned == planned(JOB, cuda=False).total
    other = replace(base, steps=(4.5, 12.0), peaks=(50, 40))
    ratio = time_ratio(other, base)
    assert (ratio.median, ratio.least, ratio.most) == (1.75, 1.5, 2.0)
    row = as_json("stage3", other, base)
    assert (row["step_ratio"], row["step_ratio_range"], row["peak_ratio"]) == (1.75, [1.5, 2.0], 0.25)


def test_a_table_has_every_variant() -> None:
    base = Figures((1.0,), (2**30,), (2**20,), 2**30, 0, 4096, 6.5)
    lines = table({"megatron": base, "stage0": "fp32 alone", "stage3": replace(base, steps=(2.0,), peaks=(2**29,))}).splitlines()
    assert len({len(line) for line in lines}) == 1 and "host, MiB" in lines[0] and "cannot run" in lines[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2][:7] == ["megatron", "1.000", "1.00", "", "4,096", "1,024", "1.00"]
    assert (cells[3][0], cells[3][-1]) == ("stage0", "fp32 alone")
    assert cells[4][:7] == ["stage3", "2.000", "2.00", "", "2,048", "512", "0.50"]
    assert as_json("stage0", "fp32 alone", base) == {"variant": "stage0", "cannot": "fp32 alone"}
