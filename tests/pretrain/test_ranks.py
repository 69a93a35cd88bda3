"""Tests of several ranks: rank 0's result reaches all, the slowest is identified, a stopped one is
noticed; with real ranks and simulated times.
"""

from __future__ import annotations

import os
import random
import re
import signal
from datetime import timedelta
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch

from fem_common.errors import ConfigError, StorageError
from fem_common.exits import Exit
from fem_megatron.megatron import platform, upstream
from pretrain.collectives import from_rank_0
from pretrain.config import load_run
from pretrain.engines.building import initialize_distributed
from pretrain.report.progress_file import read_progress
from pretrain.report.stragglers import RankPosition, find_slowest, matmul_seconds
from tests.pretrain.conftest import DEMO, ROOT
from tests.pretrain.test_checkpoints import torchrun
from tests.ranks import PATIENCE, answer, losses, records, send, started, wait_until
from tests.wording import Wording

CASES = {
    "answered": "{'answer': 0}",
    "refused": "refused: data/train.idx is another file",
    "missing": "refused: {folder}/missing: No such file or directory",
    "circular": "failed: {folder}/circular: Too many levels of symbolic links",
    "input/output": "failed: Input/output error",
}


@pytest.mark.parametrize(("tensor", "context", "given", "found"), [
    (1, 1, None, None), (2, 1, None, "1"), (1, 2, None, "1"), (2, 1, "8", "8"),
])  # fmt: skip
def test_a_gpu_s_rank_connects_the_default_group_alone(
    monkeypatch: pytest.MonkeyPatch, tensor: int, context: int, given: str | None, found: str | None
) -> None:
    """Without a device_id, which would also connect each group of Megatron's; kernels are in order
    where collectives overlap with products.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv(name, given or "")  # monkeypatch undoes afterwards what the call sets
    if given is None:
        del os.environ[name]
    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    monkeypatch.setattr(upstream, "prepare", lambda: "nccl")
    called = mock.Mock()
    monkeypatch.setattr(torch.cuda, "set_device", called.device)
    monkeypatch.setattr(torch.distributed, "init_process_group", called.group)
    monkeypatch.setattr(torch.distributed, "barrier", called.barrier)
    sizes = [
        f"parallel.tensor_model_parallel_size={tensor}",
        f"parallel.context_parallel_size={context}",
    ]
    initialize_distributed(load_run(DEMO, [*sizes, "parallel.collective_timeout_minutes=7"]))
    device, group, barrier = called.mock_calls
    assert (device, barrier) == (mock.call.device(3), mock.call.barrier(device_ids=[3]))
    assert group == mock.call.group(**group.kwargs) and "device_id" not in group.kwargs
    assert group.kwargs["backend"] == "nccl"
    assert group.kwargs["timeout"] == timedelta(minutes=7)
    assert os.environ.get(name) == found


def ask_rank_0(folder: Path) -> None:
    """Print the outcome of every case, one line each, on each of two ranks."""
    platform.initialize_distributed()
    rank = torch.distributed.get_rank()

    def compute(case: str) -> dict[str, int]:
        assert rank == 0, "asked on another rank"
        if case == "refused":
            raise ConfigError("data/train.idx is another file")
        if case in ("missing", "circular"):
            (folder / case).open()
        if case == "input/output":
            Path("/proc/self/mem").read_bytes()
        return {"answer": rank}

    for case in CASES:
        try:
            print(from_rank_0(lambda: compute(case)))  # noqa: B023
        except ConfigError as error:
            print("refused:", error)
        except StorageError as error:
            print("failed:", error)
    torch.distributed.destroy_process_group()


def test_all_ranks_hear_the_same(tmp_path: Path) -> None:
    (tmp_path / "circular").symlink_to("circular")
    answer(2, ask_rank_0, tmp_path, output=tmp_path / "out")
    wanted = [line.replace("{folder}", str(tmp_path)) for line in CASES.values()]
    assert [(tmp_path / f"out.{rank}").read_text().splitlines() for rank in range(2)] == [
        wanted
    ] * 2


@pytest.mark.parametrize(
    ("config", "expected", "code"),
    [
        pytest.param(DEMO, "unknown key model.num_layer", Exit.WRONG_INPUT, id="wrong input"),
        # Opening succeeds, reading fails.
        pytest.param(
            "failing.yaml", "Input/output error", Exit.FAULT, id="fault", marks=pytest.mark.slow
        ),
    ],
)
def test_torchruns_last_lines_are_the_error(
    tmp_path: Path, config: str, expected: str, code: Exit
) -> None:
    (tmp_path / "failing.yaml").symlink_to("/proc/self/mem")
    file = ROOT / config if config == DEMO else tmp_path / config
    process = torchrun(2, str(file), "model.num_layer=3")
    output, _ = process.communicate(timeout=PATIENCE)
    # The exit code of torchrun itself, independent of those of the ranks.
    assert process.returncode == 1
    (cause,) = output.split("Root Cause")[1:]
    last = rf"exitcode  : {code} .*\n.*\n  traceback : \n  pretrain: error: .*{expected}.*\n=+\s*\Z"
    assert re.search(last, cause), cause
    assert "new message format" not in output


LAYOUTS = [
    (dp, tp, pp) for dp, tp, pp in product((1, 2, 3, 8), (1, 2, 8), (1, 4)) if dp * tp * pp > 1
]


def job(
    dp: int,
    tp: int,
    pp: int,
    dice: random.Random,
    slow: int,
    busy_factor: float,
    matmul_factor: float,
) -> tuple[list[RankPosition], ...]:
    """Simulate Megatron's order of ranks (TP fastest, PP slowest) with two ranks per node, stages
    of different times, and 2 % noise.
    """
    places = [
        RankPosition(f"node{(s * dp + r) * tp // 2}", r, s)
        for s in range(pp)
        for r in range(dp)
        for _ in range(tp)
    ]
    busy = [0.3 * (2 - place.stage / pp) * dice.uniform(1, 1.02) for place in places]
    busy = [
        time * (busy_factor if place.replica == places[slow].replica else 1)
        for time, place in zip(busy, places, strict=True)
    ]
    matmul = [1e-3 * dice.uniform(1, 1.02) for _ in places]
    matmul[slow] *= matmul_factor
    return places, busy, matmul  # type: ignore[return-value]


@pytest.mark.parametrize(("dp", "tp", "pp"), LAYOUTS)
def test_the_slowest_is_named_at_every_layout(dp: int, tp: int, pp: int) -> None:
    """A slow device is identified by its rank, slow data only by the replica, and a slow stage is
    not reported.
    """
    dice = random.Random(dp * 100 + tp * 10 + pp)
    for slow in dice.sample(range(dp * tp * pp), min(5, dp * tp * pp)):
        for busy_factor, matmul_factor in ((1.5, 1.5), (1.3, 1.0), (1.0, 1.0)):
            places, busy, matmul = job(dp, tp, pp, dice, slow, busy_factor, matmul_factor)
            found = find_slowest(places, busy, matmul, 1.2)  # type: ignore[arg-type]
            if dp > 1 or matmul_factor == busy_factor:
                assert found.ratio == pytest.approx(busy_factor, rel=0.03)
            if matmul_factor > 1:
                assert (found.rank, found.host, found.by) == (
                    slow,
                    places[slow].host,
                    "step" if dp > 1 else "matmul",
                )
                assert found.group == tuple(
                    r for r, place in enumerate(places) if place.replica == places[slow].replica
                )
            elif busy_factor > 1 and dp > 1:
                assert slow in found.group
                assert ("none of them is slow" in found.message(1.2)) == (tp * pp > 1)


def test_what_people_read(wording: Wording) -> None:
    places = [RankPosition("h100-07" if rank == 13 else "h100-01", rank, 0) for rank in range(64)]
    pairs = [RankPosition(f"n{rank // 4}", rank // 2 % 2, rank // 4) for rank in range(8)]
    alone = [RankPosition("a", 0, 0), RankPosition("b", 0, 0)]
    wording(
        find_slowest(places, [0.315] * 13 + [0.412] + [0.315] * 50, [1e-3] * 64, 1.2).message(1.2)
    )
    wording(
        find_slowest(
            pairs, [1.0, 1.0, 1.4, 1.4, 0.5, 0.5, 0.7, 0.7], [1.0] * 7 + [1.25], 1.2
        ).message(1.2)
    )
    wording(find_slowest(alone, [1.0, 1.0], [1e-3, 2e-3], 1.2).message(1.2))


def test_the_probe_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    assert 0 < matmul_seconds() < PATIENCE
    assert torch.equal(torch.get_rng_state(), before)


# Seconds. Twice this time per step is long compared with the fluctuations of a busy machine.
NAP = 0.5
QUIET = [
    "train.global_batch_size=8",
    "log.diagnostics_interval=0",
    "train.steps=6",
    "checkpoint.interval=4",
    "train.eval_interval=0",
]


def test_the_slow_rank_is_named_and_no_loss_changes_while_a_stopped_one_is_seen_and_continues(
    settings: list[str], tmp_path: Path
) -> None:
    """The same run twice: compared every second step with slow data on rank 1, and not compared
    with rank 1 stopped for some time.
    """
    compared, stopped = tmp_path / "compared", tmp_path / "stopped"
    slow = [DEMO, *settings, *QUIET, f"run_dir={compared}", "log.straggler_interval=2"]
    with started(2, slow, tmp_path / "slow", naps={1: NAP}) as ranks:
        for rank in ranks:
            rank.join(PATIENCE)
    output = (tmp_path / "slow.0").read_text()
    assert [rank.exitcode for rank in ranks] == [0, 0], output
    lines = records(compared, "ranks.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert ["hosts" in line for line in lines] == [True, False, False]
    # Two micro-batches per step, each after a nap; the other rank waits for both naps in the
    # reduction, unless it is delayed once itself.
    assert sorted(line["waiting_seconds"][0] for line in lines)[1] > 0.1
    for line in lines:
        assert line["seconds"][1] > 2 * NAP
        assert line["slowest"]["rank"] == 1
        assert line["slowest"]["ratio"] > 1.2
        assert line["slowest"]["by"] == "step"
    report = [line for line in records(compared) if "ranks/slowest" in line]
    assert [
        (line["step"], line["ranks/slowest"], line["ranks/slowest_ratio"] > 1.2) for line in report
    ] == [(s, 1, True) for s in (2, 4, 6)]
    assert f"step 2: slowest rank 1 on node {lines[0]['hosts'][1]}: " in output
    assert "times the median of 2 ranks (" in output

    alone = [DEMO, *settings, *QUIET, f"run_dir={stopped}", "log.straggler_interval=0"]
    with started(2, alone, tmp_path / "hung", held=(3, tmp_path / "go on")) as ranks:
        wait_until(lambda: len(losses(stopped)) == 3, ranks)
        send(ranks[1], signal.SIGSTOP)
        (tmp_path / "go on").touch()

        def stacks() -> str:
            send(ranks[0], signal.SIGUSR2)
            return (tmp_path / "hung.0").read_text()

        wait_until(lambda: "train_step" in stacks() and "distributed_c10d.py" in stacks(), ranks)
        assert len(losses(stopped)) == 3 and read_progress(stopped)["state"] == "running"  # type: ignore[index]
        send(ranks[1], signal.SIGCONT)
        for rank in ranks:
            rank.join(PATIENCE)
    assert [rank.exitcode for rank in ranks] == [0, 0], (tmp_path / "hung.0").read_text()
    assert read_progress(stopped)["state"] == "complete"  # type: ignore[index]
    assert not (stopped / "ranks.jsonl").exists()
    # The signal made the step after the hanging one traced, on the rank that received it.
    assert {trace.name.partition("_rank_")[2] for trace in (stopped / "profile").iterdir()} == {
        "00000.json.gz"
    }
    assert losses(stopped) == losses(compared) and len(losses(stopped)) == 6, "to the last bit"


@pytest.mark.slow
def test_a_rank_that_stays_away_fails_the_run(settings: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = [
        DEMO,
        *settings,
        *QUIET,
        f"run_dir={run_dir}",
        "train.steps=100000",
        "parallel.collective_timeout_minutes=0.1",
    ]
    with started(2, arguments, tmp_path / "away") as ranks:
        wait_until(lambda: len(losses(run_dir)) >= 2, ranks)
        send(ranks[1], signal.SIGSTOP)
        ranks[0].join(PATIENCE)
        assert ranks[0].exitcode == 1, (tmp_path / "away.0").read_text()
    report = read_progress(run_dir)
    assert report is not None
    assert report["state"] == "failed"
    assert report["step"] - max(losses(run_dir)) in (0, 1)
    assert "Timed out waiting" in report["message"] and "\n" not in report["message"]
