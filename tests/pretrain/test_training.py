"""Tests of the output of a run, and of its behaviour for non-finite numbers."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from fem_common.fem import command_line
from fem_common.progress import print_above
from fem_megatron.megatron import platform
from pretrain import trainer
from pretrain.__main__ import main
from pretrain.checkpoint.reader import load_full_model_state
from pretrain.config import load_run
from pretrain.data.datasets import Batch, batches
from pretrain.plan.run_plan import flops_per_token, make_plan
from pretrain.report.loggers import Console, logged_kernels
from pretrain.report.metrics import Meter, StepRecord
from pretrain.trainer import Trainer
from pretrain.validate import prepare
from tests.pretrain.conftest import DEMO, QUIET, ROOT, SMALL, Command, back_to, steps_of
from tests.pretrain.data_folder import write_pair
from tests.pretrain.jobs import engine_of, micro_batches
from tests.ranks import PATIENCE, answer, ended, losses, records


def test_run_directory_reports_all(pretrain: Command) -> None:
    pretrain("train.steps=4", "log.interval=2")
    folder = pretrain.run_dir
    again = load_run(folder / "config.yaml")
    assert again.train.steps == 4
    assert again.model.vocab_size == 512, (
        "the resolved configuration names the vocabulary that the data gave"
    )
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == metadata.version("torch")
    git = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    assert environment["git_revision"] == git.stdout.strip(), (
        "none of a checkout that git takes for another user's"
    )
    assert "-m pretrain" in (folder / "relaunch.sh").read_text()
    steps = steps_of(folder)
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert [record["consumed_tokens"] for record in steps] == [128, 256, 384, 512]
    assert all(
        record["tokens_per_second"] > 0
        and record["peak_memory_bytes"] > 2**20
        and record["mfu"] is None
        for record in steps
    )
    assert steps[2]["lr"] > steps[0]["lr"] > 0
    assert pretrain.out.partition("Next:\n")[2].splitlines() == [
        f"  {command_line('curves', folder)}",
        f"  {command_line('hf', 'export', folder, folder / 'hf')}",
    ]
    for step in (1, 2, 4):
        assert f"\nstep {step}/4  tokens " in pretrain.out
    assert "step 3/4" not in pretrain.out
    assert [record["step"] for record in records(folder) if "valid_loss" in record] == [4]
    line = next(text for text in pretrain.out.splitlines() if text.startswith("step 2/4"))
    for word in ("tokens 256", "loss", "lr", "grad norm", "tok/s", "peak", "ETA"):
        assert word in line
    assert ("TFLOP/s" in line) is platform.has_cuda()


def test_of_documents_read_separately_both_rates_are_reported(pretrain: Command) -> None:
    """Rates by the lengths of documents, as in the plan, and dense; a run with joined documents
    reports one.
    """
    separate = [
        "train.steps=2",
        "optimizer.warmup_steps=1",
        "log.interval=1",
        "log.device=H100",
        "data.documents=separate",
    ]
    pretrain(*separate)
    prepared = prepare(load_run(DEMO, [*pretrain.settings, *separate]), 1)
    plan = make_plan(prepared.config, 1, prepared.facts)
    assert plan.part_lengths is not None
    assert plan.train_flops < plan.dense_flops == flops_per_token(prepared.config)
    for record in steps_of(pretrain.run_dir):
        rate = record["tokens_per_second"]
        assert record["tflops_per_device"] == pytest.approx(
            rate * plan.train_flops / 1e12, rel=1e-12
        )
        assert record["dense_tflops_per_device"] == pytest.approx(
            rate * plan.dense_flops / 1e12, rel=1e-12
        )
        assert record["mfu"] * 989 == pytest.approx(record["tflops_per_device"], rel=1e-12)
        assert record["dense_mfu"] * 989 == pytest.approx(
            record["dense_tflops_per_device"], rel=1e-12
        )
    output = [line for line in pretrain.out.splitlines() if "dense" in line]
    assert len(output) == 3
    assert "by the documents' lengths" in output[0]
    assert all(line.count("(dense ") == 2 for line in output[1:])


def test_validation_reads_the_same_samples_each_time(pretrain: Command) -> None:
    """With a negligible learning rate, validations at different steps agree to fp32 rounding of the
    loss.
    """
    pretrain("optimizer.lr=1e-12", "optimizer.min_lr=0", "checkpoint.interval=0")
    first, second = (
        record["valid_loss"] for record in records(pretrain.run_dir) if "valid_loss" in record
    )
    assert first == pytest.approx(second, rel=1e-6)
    assert first == pytest.approx(math.log(512), rel=0.02), "a fresh model predicts about uniformly"


def test_an_id_outside_the_vocabulary_ends_a_run_in_one_line(
    pretrain: Command, tmp_path: Path
) -> None:
    """Cover validation data in this process, and training data while each of two ranks has half of
    the embedding.
    """
    write_pair(tmp_path / "good", [[7] * 400, [8] * 400])
    write_pair(tmp_path / "bad", [[7] * 40, [60_000] * 800])
    words = [
        f"run_dir={tmp_path / 'run'}",
        "data.test=[]",
        *SMALL,
        "model.vocab_size=500",
        "train.steps=4",
    ]
    good, bad = (f"[{{prefix: {tmp_path / name}}}]" for name in ("good", "bad"))
    wanted = (
        f"pretrain: error: {tmp_path / 'bad'} contains token id 60000, but model.vocab_size = 500 "
        "has ids 0 to 499; "
    )
    one_process = (f"data.train={good}", f"data.valid={bad}")
    assert pretrain.refused(*words, *one_process).startswith(wanted)
    tensor = [
        f"data.train={bad}",
        "data.valid=[]",
        "parallel.tensor_model_parallel_size=2",
        f"run_dir={tmp_path / 'two'}",
    ]
    codes, output = ended(2, [DEMO, *words, *tensor], tmp_path / "out")
    assert codes == [2, 2] and wanted in output[0] and "Traceback" not in "".join(output)


def test_the_next_step_s_first_batch_is_read_within_the_step_and_none_beyond_the_last(
    pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches per step, for a run and its resume. test_checkpoints.py tests that unused
    batches are not counted.
    """
    read = list[int]()
    counts = list[int]()
    step = Trainer._step

    def noted(*given: Any) -> Iterator[Batch]:
        for number, batch in enumerate(batches(*given)):
            read.append(number)
            yield batch

    def counted(trainer: Trainer, stream: Any) -> Any:
        report = step(trainer, stream)
        counts.append(len(read))
        return report

    monkeypatch.setattr(trainer, "batches", noted)
    monkeypatch.setattr(Trainer, "_step", counted)
    for steps in (4, 6):
        pretrain(f"train.steps={steps}", "train.eval_interval=0", "data.valid=[]")
    assert counts == [3, 5, 7, 8, 11, 12]


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"],
        [
            "engine.name=deepspeed",
            "engine.zero_stage=3",
            "engine.deepspeed.param_persistence_threshold=0",
        ],
    ],
    ids=["Megatron", "ZeRO-3"],
)
def test_a_run_that_is_over_holds_no_threads(pretrain: Command, layout: list[str]) -> None:
    """Every gloo process group has threads that wake 100 times per second; a run creates about
    fifty of them.
    """
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    pretrain("train.steps=4", "train.eval_interval=0", *layout)
    gc.collect()
    # A few of torch's own threads remain after the first run; the others end when the kernel has
    # handled their exit.
    end = time.monotonic() + PATIENCE
    while len(os.listdir("/proc/self/task")) >= before + 10:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("chunk", "fp8"), [(0, []), (7, []), (0, ["train.fp8=delayed", "model.hidden_size=64"])]
)
def test_a_step_that_is_not_finite_changes_nothing(
    settings: list[str], chunk: int, fp8: list[str]
) -> None:
    """With a poisoned micro-batch, no token to learn from, or a rejected step, weights and
    optimizer state keep every bit.
    """
    with engine_of([*settings, f"train.loss_chunk={chunk}", *fp8]) as engine:

        def state() -> list[torch.Tensor]:
            adam = engine.optimizer.chained_optimizers[0].optimizer
            moments = [value.clone() for entry in adam.state.values() for value in entry.values()]
            scales = [engine.scales.history.clone()] if engine.scales else []
            return (
                [weight.detach().clone() for weight in engine.models[0].parameters()]
                + moments
                + scales
            )

        assert not engine.train_step(micro_batches(32), 8).skipped
        before = state()
        poisoned = engine.train_step(micro_batches(32, math.nan), 16)
        assert poisoned.skipped and math.isnan(poisoned.loss)
        empty = engine.train_step(micro_batches(32, 0.0), 16)  # no token counts for the loss
        assert empty.skipped and math.isnan(empty.loss) and math.isnan(empty.grad_norm)
        seen: list[float] = []

        def unwanted(*numbers: float) -> bool:
            seen.extend(numbers)
            return True

        refused = engine.train_step(micro_batches(32), 16, unwanted=unwanted)
        assert refused.skipped
        assert [refused.loss, refused.grad_norm] == seen
        assert math.isfinite(sum(seen))
        assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        assert not engine.train_step(micro_batches(32), 24).skipped
        assert not all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("fp8", ["tensorwise", "delayed"])
def test_eight_bits_train_as_sixteen_do_and_leave_the_same_checkpoints(
    pretrain: Command, tmp_path: Path, fp8: str
) -> None:
    """Two attempts equal one bit for bit: no scale or the full history is stored. Checkpoints have
    the same weights and dtypes as without 8 bits.
    """
    wide = ["model.hidden_size=64", "train.precision=bf16", "train.steps=8", *QUIET]
    runs = {name: tmp_path / name for name in ("sixteen", "eight", "resumed")}
    for name, run_dir in runs.items():
        given = [
            f"run_dir={run_dir}",
            *wide,
            *([] if name == "sixteen" else [f"train.fp8={fp8}", "train.fp8_history=4"]),
        ]
        pretrain(*given)
        if name == "resumed":
            back_to(run_dir, 4)
            assert "at step 4" in pretrain(*given)
    report = {name: losses(run_dir) for name, run_dir in runs.items()}
    assert report["resumed"] == report["eight"]
    kept = {name: load_full_model_state(run_dir)[0] for name, run_dir in runs.items()}
    assert all(torch.equal(one, kept["resumed"][name]) for name, one in kept["eight"].items())
    shapes = [
        {name: (one.shape, one.dtype) for name, one in kept[each].items()}
        for each in ("sixteen", "eight")
    ]
    assert shapes[0] == shapes[1]
    # An operand has a relative error of at most 2^-4, of either sign, and a product sums 64 or more
    # of them: 4% of the norm of a product.
    for (loss, norm), (wanted, wanted_norm) in zip(
        report["eight"].values(), report["sixteen"].values(), strict=True
    ):
        assert loss == pytest.approx(wanted, rel=2e-3)
        assert norm == pytest.approx(wanted_norm, rel=0.05)


def test_a_wrong_choice_of_kernels_ends_in_one_line_and_code_2(
    pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEM_KERNELS", "time_decay_scan=fastest")
    output = pretrain.refused()
    assert output.startswith(
        "pretrain: error: FEM_KERNELS: time_decay_scan has no implementation 'fastest'; it has "
    )
    assert not pretrain.run_dir.exists()


def with_a_chosen_kernel(arguments: list[str]) -> int:
    """Train with an implementation that FEM_KERNELS selects."""
    os.environ["FEM_KERNELS"] = "fem_attention=reference"
    return main(arguments)


def test_a_run_states_which_kernels_run(settings: list[str], tmp_path: Path) -> None:
    """Run a separate process, because the message is printed once per process. Without a GPU it is
    printed only if the user chose a kernel.
    """
    words = [DEMO, *settings, "train.steps=4"]
    assert answer(1, with_a_chosen_kernel, words, output=tmp_path / "out") == 0
    assert "\nkernels: fem_attention: reference runs" in (tmp_path / "out.0").read_text()


def test_a_run_beyond_its_end_is_complete(pretrain: Command) -> None:
    """A run stopped at step 4 of 12 and restarted with 2 steps has no training and no validation
    left.
    """
    pretrain("train.steps=4", "train.eval_interval=0")
    file = pretrain.run_dir / "progress.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "state": "stopped"}))
    before = [record for record in records(pretrain.run_dir) if "valid_loss" in record]
    pretrain("train.steps=2", "optimizer.warmup_steps=1")
    assert "is complete at step 4" in pretrain.out and "valid_loss" not in pretrain.out
    assert [record for record in records(pretrain.run_dir) if "valid_loss" in record] == before


def test_the_eta_counts_the_pauses_left_and_no_step_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 2 s, a save of 60 s every 10 steps, a validation of 8 s every 5 and at the end: 100
    steps, 98 of them left at first.
    """
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    meter = Meter(step_tokens=1, flops_per_token=1, world_size=1, peak_tflops=None)
    etas, left = {}, {}
    for step in range(1, 101):
        now += 2.0
        save = 1 + sum(at % 10 == 0 for at in range(step, 100))
        validation = 1 + sum(at % 5 == 0 for at in range(step, 100))
        measured = meter.measure(100 - step, {"save": save, "validation": validation})
        assert measured["step_seconds"] == 2.0
        etas[step] = measured["eta_seconds"]
        left[step] = 2.0 * (100 - step) + 60.0 * save + 8.0 * validation
        for kind, seconds, due in (
            ("validation", 8.0, step % 5 == 0),
            ("save", 60.0, step % 10 == 0),
        ):
            if due:
                now += seconds
                meter.restart(kind)
    assert etas[1] == 198.0, "before the first one nobody knows how long it takes"
    assert {step: etas[step] for step in range(11, 101)} == pytest.approx(
        {step: left[step] for step in range(11, 101)}
    )


def test_what_the_kernels_log_is_reported_during_a_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Earlier trainings in this process do not write into later output. On a CPU the choices are
    reported only if the user changes them.
    """
    report: list[str] = []
    log = logging.getLogger("kernels.of_a_test")
    for chosen, name in (("", "a"), ("fem_attention=reference", "b")):
        monkeypatch.setenv("FEM_KERNELS", chosen)
        with logged_kernels(report.append):
            log.info(f"{name}: one runs")
            log.warning(f"{name}: unusual")
        log.warning("c: one runs")
    first = ["kernels: a: one runs"] if platform.has_cuda() else []
    assert report == [
        *first,
        "kernels: a: unusual",
        "kernels: b: one runs",
        "kernels: b: unusual",
    ]


def test_a_terminal_has_a_live_line_that_other_lines_do_not_break(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step, those at the interval and the last one are printed; every step is shown in
    the live line, which is removed before a line is printed.
    """

    class Screen(StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("fem_common.progress.TERMINAL_SECONDS", 0.0)
    console = Console(interval=4, total_steps=6)
    for step in range(1, 7):
        console.on_step(
            StepRecord(step, 64 * step, 5.0, 1e-3, 1.0, False, 0.1, 640.0, 0.01, None, 2**30, 9.0)
        )
        if step == 2:
            print_above("a message")
    console.on_end()
    text = screen.getvalue()
    printed = [line.rpartition("\r")[2] for line in text.split("\n")[:-1]]
    assert [line.split("  tokens")[0] for line in printed] == [
        "step 1/6",
        "a message",
        "step 4/6",
        "step 6/6",
    ]
    for step in range(1, 7):
        assert f"step {step}/6  loss 5.0000  640 tok/s  ETA 0:00:09" in text
    assert text.endswith("\r")  # the live line is removed at the end


def test_a_hopeless_run_gives_up_without_a_checkpoint(pretrain: Command) -> None:
    """A learning rate of 1e18 ruins the weights at the first step; later steps are skipped and
    counted until the run gives up.
    """
    ruined = ("optimizer.lr=1e18", "train.max_bad_steps=3", "optimizer.warmup_steps=0")
    output = pretrain.refused(*ruined, code=3)
    assert "not finite for 3 steps in a row (up to step 4)" in output
    assert (
        "no checkpoint is from before them: start again, with a lower optimizer.lr, or inspect the"
        " data from step 2 on: " in output
    )
    assert [record["skipped"] for record in steps_of(pretrain.run_dir)] == [False] + 3 * [True]
    assert not pretrain.checkpoints.exists()
