"""Tests of runs with stages: what each reads, where it starts, and kills without effect. Real
trainings of a second, real indices.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pretrain import run as run_module
from pretrain.checkpoint.folder import find
from pretrain.config import load_run
from pretrain.data import datasets
from pretrain.data.stage_documents import stage_documents
from pretrain.training_stages import parts_of
from tests.pretrain.conftest import DEMO, QUIET, Command, back_to, steps_of
from tests.pretrain.test_checkpoints import check_kills
from tests.ranks import finished, losses
from tests.wording import Wording

STAGES = (
    "stages=[{name: ramp, steps: 3, seq_length: 16, global_batch_size: 2}, {name: main, steps: 4}, "
    "{name: decay, tokens: 380, documents: separate, lr: 1e-3, min_lr: 0, schedule: linear}]"
)
STAGED = (
    "train.steps=null",
    STAGES,
    "checkpoint.interval=2",
    "checkpoint.keep_last=9",
    *QUIET,
)


def test_no_document_comes_again_before_all_have_come() -> None:
    """Counts the documents that stages take from 50, through two and a half passes."""
    lengths = np.random.RandomState(0).randint(0, 40, 50)
    full = int(lengths.sum())
    needs = [full // 3, full // 5, 0, full, full]
    taken = [stage_documents(lengths, needs[: n + 1], seed=7) for n in range(len(needs))]
    for need, documents in zip(needs, taken, strict=True):
        tokens = lengths[documents]
        assert tokens.sum() >= need > tokens.sum() - tokens[-1:].sum() or need == 0 == len(
            documents
        )
    order = np.concatenate(taken)
    for epoch in range(len(order) // 50 + 1):
        counts = Counter(order[epoch * 50 : (epoch + 1) * 50].tolist())
        assert max(counts.values()) == 1
    assert not np.array_equal(order[:50], order[50:100])
    assert not np.array_equal(order[:50], np.arange(50))


def test_a_stage_is_the_run_with_its_own_settings_and_the_schedule_of_the_whole() -> None:
    sizes = [
        "data.seq_length=32",
        "train.global_batch_size=4",
        "optimizer.warmup_steps=8",
        "optimizer.warmup_fraction=null",
    ]
    parts = parts_of(load_run(DEMO, [*STAGED, *sizes]))
    assert [(part.name, part.begin_step, part.end_step, part.begin_tokens) for part in parts] == [
        ("ramp", 0, 3, 0), ("main", 3, 7, 3 * 32), ("decay", 7, 10, 3 * 32 + 4 * 128)
    ]  # fmt: skip
    ramp, main, decay = (part.schedule(None) for part in parts)
    # The warm-up is eight steps of the first stage: 256 tokens, counted in the sequences of each
    # stage. The decay ends at the end of the entire run, after 992 tokens.
    assert (ramp.warmup_samples, ramp.rate_end, main.warmup_samples, main.rate_end) == (
        16,
        62,
        8,
        31,
    )
    assert (
        decay.warmup_samples,
        decay.rate_end,
        decay.steps,
        decay.last_step,
        decay.total_tokens,
    ) == (0, 12, 10, 10, 992)


# Checkpoints from this step on are deleted: those after a boundary, those within a stage, or all.
# The other cases cost as much, so they are slow tests.
@pytest.mark.parametrize(
    "first_gone",
    [(8, 5), pytest.param((9, 4, 1), marks=pytest.mark.slow)],
    ids=["8 and 5", "9, 4 and 1"],
)
def test_three_stages_go_over_their_boundaries_and_through_kills_bit_for_bit(
    pretrain: Command,
    tmp_path: Path,
    first_gone: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills within each stage and at each boundary: files newer than a step are removed, and the
    same command runs again.
    """
    monkeypatch.setattr(datasets, "ANNOUNCED_SAMPLES", 0)
    pretrain(*STAGED, "--index")
    assert pretrain.out.count(" samples of training and ") == 3
    assert "building it" in pretrain.out
    assert "building it" not in pretrain(*STAGED)
    run = pretrain.run_dir
    wanted, curve = losses(run), {record["step"]: record for record in steps_of(run)}
    assert list(curve) == list(range(1, 11))
    read = [
        np.load(file)
        for file in (run / "index_cache").glob("*/*StageGPTDataset-train-document_index.npy")
    ]
    # No two stages read the same document.
    assert len(read) == 3 and len(np.unique(np.concatenate(read))) == sum(map(len, read))
    assert [curve[step]["consumed_tokens"] for step in (3, 7, 10)] == [96, 96 + 512, 992]
    assert curve[10]["lr"] == 0.0 and curve[8]["lr"] == pytest.approx(1e-3 * 2 / 3)
    for gone in first_gone:
        kept = tmp_path / f"kept_{gone}"
        shutil.copytree(run, kept)
        back_to(kept, gone - 1)
        pretrain(*STAGED, f"run_dir={kept}")
        assert losses(kept) == wanted, gone
    assert find(run).progress.stage == 2
    assert "is complete at step 10" in pretrain(*STAGED)


def test_ranks_share_out_the_documents_that_each_stage_reads(
    pretrain: Command, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At DP 1, 2 and 4 every sample of a stage is read once, from the (source, document) pairs that
    the plan assigns to it.
    """
    built = list[datasets.Datasets]()

    def noted(*given: Any, **settings: Any) -> datasets.Datasets:
        built.append(datasets.build_datasets(*given, **settings))
        return built[-1]

    monkeypatch.setattr(run_module, "build_datasets", noted)
    blend = (
        f"data: [{{prefix: {tiny_data / 'train'}, weight: 3}}, {{prefix: {tiny_data / 'valid'}}}]"
    )
    staged = [
        STAGES.replace("steps: 4}", f"steps: 4, {blend}}}") if text == STAGES else text
        for text in STAGED
    ]
    pretrain(*staged, "--index")
    parts = parts_of(load_run(DEMO, [*pretrain.settings, *staged]))
    seen = Counter[tuple[str, int]]()
    for part, made in zip(parts, built, strict=True):
        for source in getattr(made.train, "datasets", [made.train]):
            needs = [each.needs().get(source.dataset_path, 0) for each in parts[: part.number + 1]]
            documents = stage_documents(
                source.dataset.sequence_lengths, needs, part.config.train.seed
            )
            assert sorted(source.document_index) == sorted(documents)
            seen.update((source.dataset_path, int(document)) for document in documents)
        wanted = Counter(made.train[n]["tokens"].numpy().tobytes() for n in range(part.samples))
        for size in (1, 2, 4):
            found = Counter[bytes]()
            for rank in range(size):
                place = {
                    "get_data_parallel_rank": rank,
                    "get_data_parallel_world_size": size,
                    "get_context_parallel_world_size": 1,
                }
                report = {name: lambda number=number: number for name, number in place.items()}
                monkeypatch.setattr(datasets, "parallel_state", SimpleNamespace(**report))
                batches = datasets.batches(made.train, 0, 1, torch.device("cpu"))
                mine = islice(batches, len(range(rank, part.samples, size)))
                found.update(batch["tokens"][0].numpy().tobytes() for batch in mine)
            assert found == wanted, (part.name, size)
    assert len({source for source, _ in seen}) == 2 and max(seen.values()) == 1, (
        "no source has come to its end"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], ["engine.name=deepspeed", "engine.zero_stage=3"]], ids=["megatron", "ZeRO-3"]
)
def test_stages_are_those_of_one_process_where_ranks_share_each_sequence(
    pretrain: Command, settings: list[str], tmp_path: Path, more: list[str]
) -> None:
    """Each stage splits sequences of its own length, with separate documents in the last one."""
    cut = tmp_path / "cut"
    finished(
        2,
        [DEMO, *settings[1:], *STAGED, *more, f"run_dir={cut}", "parallel.context_parallel_size=2"],
        tmp_path / "out",
    )
    pretrain(*STAGED)
    wanted = losses(pretrain.run_dir)
    # fp32 sums in a different order: losses differ by 6e-8, norms by 5e-8.
    assert len(wanted) == 10
    assert losses(cut) == {step: pytest.approx(pair, rel=1e-6) for step, pair in wanted.items()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_over_three_stages_with_muon_change_no_bit(
    settings: list[str], tmp_path: Path
) -> None:
    """SIGKILL to both ranks at random steps and at both boundaries, with a guard whose moments pass
    the boundaries too.
    """
    stages = (
        STAGES.replace("steps: 3", "steps: 12")
        .replace("steps: 4", "steps: 16")
        .replace("tokens: 380", "steps: 12")
    )
    more = [
        "train.micro_batch_size=1",
        "optimizer.name=muon",
        "train.on_spike=skip",
        "train.spike_window=4",
        "checkpoint.interval=3",
    ]
    more += ["train.spike_deviations=2"]
    base = [DEMO, *settings[1:], *(stages if text == STAGES else text for text in STAGED), *more]
    inner = random.sample([*range(2, 12), *range(13, 28), *range(29, 40)], 18)
    check_kills(base, tmp_path, sorted([12, 28, *inner]))
    assert list(losses(tmp_path / "whole")) == list(range(1, 41))


def test_stages_that_cannot_be(pretrain: Command, wording: Wording) -> None:
    for wrong in (
        ["stages=[{name: one, steps: 3}]"],
        ["train.steps=null", "stages=[{name: one}]"],
        ["train.steps=null", "stages=[{name: one, steps: 3}, {name: one, steps: 3}]"],
        [
            "train.steps=null",
            "stages=[{name: one, steps: 3}, {name: two, steps: 3, global_batch_size: 3}]",
        ],
        ["train.steps=null", "stages=[{name: one, steps: 3, schedule: linear, warmup_steps: 3}]"],
        ["train.steps=null", "stages=[{name: one, steps: 4}]", "optimizer.warmup_steps=9"],
    ):
        pretrain(*wrong, code=2)
        wording(pretrain.err)
    base = (
        *STAGED[:1],
        "optimizer.warmup_steps=1",
        "checkpoint.interval=1",
        "checkpoint.keep_last=9",
    )
    pretrain(*base, "stages=[{name: one, tokens: 256}, {name: two, steps: 2}]")
    pretrain(*base, "stages=[{name: one, steps: 3}, {name: two, steps: 2}]", code=2)
    wording(pretrain.err)
    back_to(pretrain.run_dir, 1)
    # Within the stage: the documents reserved for it are the same, but the remaining steps differ.
    pretrain(
        *base,
        "stages=[{name: one, tokens: 256, global_batch_size: 2}, {name: two, steps: 2}]",
        code=2,
    )
    wording(pretrain.err)
