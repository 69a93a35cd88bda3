"""The rehearsal against real runs on gloo ranks: the same recorder sees both, on tensors without numbers and on real ones."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fem_megatron.megatron import paper, platform
from pretrain.config import RunConfig, load_run
from pretrain.rehearsal.record import Collective, Recorder, StepTrace
from pretrain.rehearsal.steps import HOLDERS, Rank, rehearse, rehearse_rank, recorded_steps
from pretrain.validate import prepare
from tests.pretrain.conftest import DEMO, SMALL
from tests.pretrain.jobs import micro_batches
from tests.pretrain.test_parity import AGAIN, OVERLAP, PAIR, PP2, SP, TIED, TP2
from tests.ranks import answer

BASE = [*SMALL, "model.vocab_size=512", "data.seq_length=64", "train.precision=fp32", "train.global_batch_size=8"]
CASES: dict[str, tuple[int, list[str]]] = {
    "TP2 + SP, recompute": (2, [*TP2, *SP, *AGAIN, TIED]),
    "PP2 interleaved": (2, [*PP2, *PAIR, "parallel.virtual_pipeline_model_parallel_size=2", TIED]),
    "DP2, overlapped": (2, [*OVERLAP, "model.mixer=cem"]),
    "DP2, plain": (2, ["model.mixer=transformer", "parallel.use_distributed_optimizer=false"]),
    "TP2 x PP2 + SP": (4, [*TP2, *PP2, *SP, "model.mixer=fem_gla", "train.precision=bf16"]),
}
STEADY = {
    "megatron/core/optimizer/clip_grads.py get_grad_norm_fp32 item": "decides about the update, and by how much",
    "pretrain/engines/building.py mean_loss tolist": "loss, stop signals, memory: one all-reduce",
}
Told = tuple[list[Collective], dict[str, int]]


def config_of(world: int, overrides: list[str]) -> RunConfig:
    given = [*BASE, "data.train.0.prefix=none", "data.valid=[]", "data.test=[]", *overrides, f"parallel.world_size={world}"]
    return prepare(load_run(DEMO, given), None, plan_only=True).config


def told(rank: Rank) -> Told:
    return rank.collectives, rank.peak.by_holder()


def rehearsed(cases: dict[str, tuple[int, list[str]]]) -> dict[str, list[Told]]:
    """Case -> of the first rank of each pipeline stage."""
    platform.import_megatron()
    return {name: [told(rank) for rank in rehearse(config_of(*case), case[0], "cpu").ranks] for name, case in cases.items()}


def real(cases: dict[str, tuple[int, list[str]]]) -> dict[str, Told]:
    """Case -> of this rank."""
    from pretrain.engines.building import destroy_model_parallel, initialize_model_parallel
    from pretrain.run import make_engine
    from pretrain.schedule import Schedule

    platform.import_megatron()
    platform.initialize_distributed()
    found = {}
    for name, (world, overrides) in cases.items():
        config = config_of(world, overrides)
        with Recorder(StepTrace(), torch.device("cpu")) as recorder:
            initialize_model_parallel(config)
            schedule = Schedule.of(config)
            engine = make_engine(config, schedule)
            found[name] = told(recorded_steps(engine, recorder, micro_batches(config.data.seq_length), schedule, world))
            engine.close()
            destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Told, Told]]]:
    """Case -> (rehearsed, real) of the first rank of each pipeline stage."""
    folder = tmp_path_factory.mktemp("rehearsal")
    on_paper = answer(1, rehearsed, CASES, output=folder / "paper")
    found: dict[str, list[tuple[Told, Told]]] = {}
    for world in (2, 4):
        cases = {name: case for name, case in CASES.items() if case[0] == world}
        answer(world, real, cases, output=folder / f"ranks{world}")
        ranks = [pickle.loads(Path(f"{folder}/ranks{world}.{rank}.answer").read_bytes()) for rank in range(world)]
        for name in cases:
            stages = on_paper[name]
            found[name] = [(stage, ranks[number * world // len(stages)][name]) for number, stage in enumerate(stages)]
    return found


@pytest.mark.parametrize("case", CASES)
def test_collectives_are_those_of_a_real_run_call_by_call(both: dict[str, list[tuple[Told, Told]]], case: str) -> None:
    for on_paper, really in both[case]:
        assert on_paper[0] == really[0]
        assert any(len(each.group) > 1 for each in really[0])


@pytest.mark.parametrize("case", CASES)
def test_memory_is_that_of_a_real_run(both: dict[str, list[tuple[Told, Told]]], case: str) -> None:
    for on_paper, really in both[case]:
        print({name: (on_paper[1][name], really[1][name]) for name in HOLDERS})
        assert {name: on_paper[1][name] for name in HOLDERS[:3]} == {name: really[1][name] for name in HOLDERS[:3]}
        assert sum(on_paper[1].values()) == pytest.approx(sum(really[1].values()), rel=0.1)
