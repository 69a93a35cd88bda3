"""Checkpoints of split optimizers: each rank writes and reads its part, and any layout and engine
reads the others' bits.
"""

from __future__ import annotations

import random
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from pretrain.config import load_run
from pretrain.engines.sharding import boxes
from pretrain.plan.run_plan import make_plan
from pretrain.validate import prepare
from tests.pretrain.conftest import DEMO, data_of
from tests.pretrain.jobs import (
    CP2,
    PP2,
    SP,
    TP2,
    Job,
    deepspeed,
    engine_of,
    micro_batches,
    run_jobs,
)
from tests.ranks import answer

ROOT = Path(__file__).resolve().parents[2]


def test_boxes_are_the_range() -> None:
    """Boxes are in order, without gaps, contiguous and within the limit; without a limit at most 2n
    - 1 for n dimensions.
    """
    dice = random.Random(0)
    for _ in range(300):
        shape = tuple(dice.randint(1, 6) for _ in range(dice.randint(0, 4)))
        full = torch.arange(torch.Size(shape).numel()).view(shape)
        start, end = sorted(dice.choices(range(full.numel() + 1), k=2))
        for largest in (full.numel(), dice.randint(1, 7)):
            found = list(boxes(shape, start, end, largest))
            cut = []
            for offset, size in found:
                ends = [begin + length for begin, length in zip(offset, size, strict=True)]
                cut.append(full[tuple(map(slice, offset, ends))])
            assert [number for box in cut for number in box.flatten().tolist()] == list(
                range(start, end)
            )
            assert all(box.numel() == 1 + int(box.max()) - int(box.min()) <= largest for box in cut)
            assert largest < full.numel() or len(found) <= max(1, 2 * len(shape) - 1)


# --- at any layout --------------------------------------------------------------------------------

MODEL = [
    "model.mixer=fem_linear",
    "model.hidden_size=8",
    "model.num_layers=2",
    "model.num_attention_heads=2",
    "model.ffn_hidden_size=24",
    "model.tie_embeddings=true",
    "data.seq_length=32",
    "train.steps=12",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.precision=bf16",
    "optimizer.warmup_steps=3",
]
LAYOUTS: dict[str, list[str]] = {  # each layout reads the checkpoint of the previous one
    "DP2": [],
    "TP2 + SP": TP2 + SP,
    "PP2": PP2,
    **{f"ZeRO-{stage}": deepspeed(stage) for stage in (1, 2, 3)},
    "CP2": CP2,
    "CP2, ZeRO-2": CP2 + deepspeed(2),
    "ZeRO-1, TP2": TP2 + deepspeed(1),
    "DP2 again": [],
}
FEW = ["TP2 + SP", "PP2", "ZeRO-3", "CP2, ZeRO-2", "DP2 again"]


def everything(step: Path) -> dict[str, torch.Tensor]:
    """Return all full tensors of a checkpoint as read by torch, without random states."""
    reader = FileSystemReader(step)
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in stored.items()
        if not name.startswith("rng.")
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.parametrize(
    "layouts", [FEW, pytest.param([*LAYOUTS], marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_each_layout_takes_over_the_last_one_s_bits_and_older_checkpoints_are_read(
    tiny_data: Path, tmp_path: Path, layouts: list[str]
) -> None:
    """From an old checkpoint with full tensors, written at DP2, through every layout: weights and
    state never change.
    """
    with tarfile.open(ROOT / "tests/fixtures/older_checkpoint.tar.xz") as older:
        older.extractall(tmp_path / "older", filter="data")
    jobs, last = [], str(tmp_path / "older/step_00000002")
    for number, name in enumerate(layouts):
        run_dir = f"run_dir={tmp_path / str(number)}"
        jobs.append(Job(name, [*MODEL, *data_of(tiny_data), run_dir, *LAYOUTS[name]], 0, 0, last))
        last = str(tmp_path / str(number) / "checkpoints/step_00000002")
    answer(2, run_jobs, jobs, str(tmp_path / "cache"), output=tmp_path / "out")
    wanted = everything(tmp_path / "older/step_00000002")
    moments = [tensor for name, tensor in wanted.items() if "exp_avg." in name]
    assert len(wanted) == 4 * len(moments) and all(tensor.count_nonzero() for tensor in moments)
    for number, name in enumerate(layouts):
        found = everything(tmp_path / str(number) / "checkpoints/step_00000002")
        assert found.keys() == wanted.keys(), name
        assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == [], name


# --- at scale -------------------------------------------------------------------------------------


def _extra_peak(work: Callable[[], object]) -> int:
    """Return the additional peak memory of this process during the work, in bytes."""

    def kilobytes(name: str) -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kilobytes("VmRSS:")
    work()
    return (kilobytes("VmHWM:") - before) * 1024


def _bytes_moved(way: str) -> int:
    """Return the bytes that this process and its ended children read ("rchar") or wrote
    ("wchar").
    """
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters[way])


def save_and_load(overrides: list[str], folder: str, source: str) -> dict[str, float]:
    """Measure a run's asynchronous save and a load from ``source``; figures of memory are those of
    the worst rank.
    """
    from pretrain.checkpoint.folder import TENSORS, Progress, find
    from pretrain.checkpoint.manager import Checkpoints
    from pretrain.collectives import sum_over_ranks

    with engine_of(overrides) as engine:
        checkpoints = Checkpoints(Path(folder), engine.config, lambda text: None)
        engine.train_step(micro_batches(8), 4)
        ours = [tensor for model in engine.models for tensor in model.parameters()]
        ours += [tensor for held in engine.split.held() for tensor in held.tensors.values()]
        before = [tensor.detach().clone() for tensor in ours]
        clock = time.monotonic()
        report: dict[str, float] = {}
        opened: list[str] = []
        sys.addaudithook(
            lambda event, given: opened.append(str(given[0])) if event == "open" else None
        )

        def save() -> None:
            opened.clear()
            written = _bytes_moved("wchar")
            checkpoints.save(engine, Progress(1, 4, 100), {"data": ""})
            report["stall"] = time.monotonic() - clock
            files = sum(name.endswith(TENSORS) for name in opened)
            report["written"], report["files"] = sum_over_ranks(
                [_bytes_moved("wchar") - written, files]
            )
            with torch.no_grad():
                for tensor in ours:
                    tensor.fill_(7)  # while the files are written
            checkpoints.complete(blocking=True)

        peak = _extra_peak(save)
        report["save"] = time.monotonic() - clock
        read, clock = _bytes_moved("rchar"), time.monotonic()
        checkpoints.load(engine, find(Path(source) / "step_00000001"))
        report |= {
            "load": time.monotonic() - clock,
            "read": sum_over_ranks([_bytes_moved("rchar") - read])[0],
        }
        (report["different"],) = sum_over_ranks(
            [sum(not torch.equal(a, b) for a, b in zip(ours, before, strict=True))]
        )
        peaks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(peaks, peak)
        parameters = sum(
            model_tensor.numel() for model in engine.models for model_tensor in model.parameters()
        )
        checkpoints.close()
        return {**report, "parameters": parameters, "peak": max(peaks)}


SIZES = {512: (15e6, 17e6), 1024: (60e6, 70e6)}  # hidden size -> limits of the number of parameters


@pytest.mark.parametrize(
    ("ranks", "writers", "hidden"),
    [
        pytest.param(*sizes, marks=pytest.mark.slow)
        for sizes in ((2, 2, 512), (2, 2, 1024), (4, 4, 1024), (4, 2, 1024))
    ],
)
def test_a_save_takes_little_memory_next_to_a_rank_s_own_part_and_a_load_reads_each_byte_once(
    tiny_data: Path, tmp_path: Path, ranks: int, writers: int, hidden: int
) -> None:
    """16 or 64 million parameters, 16 bytes each in fp32: weights and state. The rank copies none
    of them for an asynchronous save, and may change all while the files are written. The forked
    writer keeps the old pages, which is the memory that a plan counts.
    """
    overrides = [
        f"run_dir={tmp_path}",
        *(
            "model.mixer=transformer",
            f"model.hidden_size={hidden}",
            "model.num_attention_heads=8",
            f"model.ffn_hidden_size={hidden * 11 // 4}",
        ),
        *(
            "model.num_layers=5",
            "data.seq_length=8",
            *data_of(tiny_data, "train"),
        ),
        *(
            "train.micro_batch_size=2",
            "train.global_batch_size=8",
            "optimizer.warmup_steps=0",
            "checkpoint.async_save=true",
        ),
    ]
    source = str(tmp_path / f"by {writers}")
    for world in dict.fromkeys((writers, ranks)):
        folder = str(tmp_path / f"by {world}")
        found = answer(
            world, save_and_load, overrides, folder, source, output=tmp_path / "out", patience=300
        )
    print({name: round(value, 2) for name, value in found.items()})
    size = sum(
        file.stat().st_size for file in (tmp_path / f"by {writers}" / "step_00000001").iterdir()
    )
    least, most = SIZES[hidden]
    assert least < found["parameters"] < most and (found["different"] == 0 or ranks != writers)
    planned = make_plan(
        prepare(load_run(DEMO, overrides), ranks).config, ranks, cuda=False
    ).save_memory
    assert planned == 16 * int(found["parameters"]) // ranks
    assert found["peak"] < 16e6  # allocations of the libraries during the save
    assert size <= found["read"] <= 1.2 * size
    # No tensor is written or hashed before training continues: common.pt and pipes are small.
    assert found["files"] == 0 and found["written"] < 1e6 < size / 100
