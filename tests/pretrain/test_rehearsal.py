"""Tests of the rehearsal against real runs on gloo ranks: the same recorder observes both, on meta
tensors and on real ones.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import re
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fem_common.costs import Memory
from fem_common.errors import ConfigError
from fem_common.exits import Exit
from fem_megatron.catalogue import MIXERS
from fem_megatron.megatron import platform, upstream
from launch.job.rehearsal import fullest
from pretrain.__main__ import main
from pretrain.config import RunConfig, load_run
from pretrain.plan import fp8
from pretrain.plan.memory import layer_activations
from pretrain.rehearsal import steps
from pretrain.rehearsal.record import BACKWARD, Collective, Recorder, StepTrace
from pretrain.rehearsal.steps import Rank, recorded_steps, rehearse
from pretrain.validate import prepare
from tests.pretrain.conftest import DEMO, SMALL
from tests.pretrain.jobs import CP2, OVERLAP, PP2, SP, TP2, deepspeed, micro_batches
from tests.pretrain.test_deepspeed import BF16, OFFLOADED, SPLIT
from tests.pretrain.test_parity import AGAIN, GATHER, IN_CHUNKS, PAIR, TIED
from tests.ranks import answer

BASE = [
    *SMALL,
    "model.vocab_size=512",
    "train.precision=fp32",
    "data.train.0.prefix=none",
    "data.valid=[]",
    "data.test=[]",
]
PLAIN = ["model.mixer=transformer", TIED]
Cases = dict[str, tuple[int, list[str]]]
QUICK: Cases = {
    "TP2 + SP": (2, [*TP2, *SP, *PLAIN]),
    "PP2": (2, [*PP2, *PLAIN, "model.mtp_depth=1"]),
    "DP2, overlapped": (2, [*OVERLAP, "model.mixer=cem"]),
    "CP2": (2, [*CP2, TIED]),
    **{f"DP2, ZeRO-{stage}": (2, [*deepspeed(stage), *PLAIN]) for stage in (2, 3)},
    "TP2 + SP, fp8": (2, [*TP2, *SP, *PLAIN, "model.hidden_size=64", "train.fp8=delayed"]),
}
SLOW: Cases = {
    "DP2, ZeRO-1": (2, [*deepspeed(1), *PLAIN]),
    "TP2 + SP, in chunks": (2, [*TP2, *SP, *PLAIN, *IN_CHUNKS]),
    "TP2 + SP, recompute": (2, [*TP2, *SP, *AGAIN, TIED]),
    "PP2 interleaved": (
        2,
        [
            *PP2,
            *PAIR,
            "parallel.virtual_pipeline_model_parallel_size=2",
            "train.global_batch_size=8",
        ],
    ),
    "DP2, plain": (2, [*PLAIN, "parallel.use_distributed_optimizer=false"]),
    "CP2, all_gather": (2, [*CP2, *GATHER, *AGAIN, TIED]),
    "DP2, Muon": (2, [*PLAIN, "optimizer.name=muon"]),
    "DP2, ZeRO-0": (2, [*deepspeed(0), *PLAIN]),
    "DP2, ZeRO-2, overlapped": (
        2,
        [*deepspeed(2), "parallel.overlap_grad_reduce=true", "train.global_batch_size=8", TIED],
    ),
    "DP2, ZeRO-3, all split": (
        2,
        [*SPLIT, "engine.deepspeed.max_live_parameters=30000", "train.global_batch_size=8", TIED],
    ),
    "CP2, ZeRO-1": (2, [*CP2, *deepspeed(1), TIED]),
    **{f"DP2, ZeRO-{stage}, bf16": (2, [*deepspeed(stage), BF16, TIED]) for stage in (1, 2, 3)},
    **{
        f"TP2 x DP2 + SP, ZeRO-{stage}": (4, [*TP2, *SP, *deepspeed(stage), BF16, TIED])
        for stage in (1, 3)
    },
    "TP2 x PP2 + SP": (4, [*TP2, *PP2, *SP, "model.mixer=fem_gla", "train.precision=bf16"]),
}
SIX = {
    "TP2 + SP": [*TP2, *SP],
    "PP2": PP2,
    "CP2": CP2,
    "DP2, overlapped": OVERLAP,
    **{f"DP2, ZeRO-{stage}": deepspeed(stage) for stage in (1, 3)},
}
OURS = [name for name in MIXERS if not name.startswith("fla.")]
EVERY: Cases = {
    f"{layout}, {name}": (2, [*more, f"model.mixer={name}"])
    for layout, more in SIX.items()
    for name in OURS
}
# Reads of a training step on a GPU that make the host wait. This one transfers loss, norm, stop
# signals and memory: one all-reduce, before the update.
STEADY = {"pretrain/engines/building.py summed_over_ranks tolist"}
ON_A_GPU = [
    *BASE,
    "model.hidden_size=256",
    "data.seq_length=128",
    "train.precision=bf16",
    "train.global_batch_size=16",
]
GLA = "model.mixer=fem_gla"  # on a GPU, a device number also decides the form of its reads
LAYOUTS: Cases = {
    "DP2": (2, PLAIN),
    "TP2 x PP4 + SP, recompute": (
        16,
        [
            *TP2,
            *SP,
            *AGAIN,
            "parallel.pipeline_model_parallel_size=4",
            "model.num_layers=4",
            GLA,
            TIED,
        ],
    ),
    "DP2, fp8": (2, [*PLAIN, "train.fp8=delayed"]),
    **{
        f"DP4, ZeRO-{stage}": (
            4,
            [*deepspeed(stage), *OVERLAP[:1], *PLAIN, "train.global_batch_size=32"],
        )
        for stage in (1, 2, 3)
    },
}
# DeepSpeed's optimizers check whether the norm is finite, each in a different way.
ASKED = {
    "deepspeed/runtime/utils.py is_invalid_grad_norm __bool__",
    "pretrain/engines/building.py summed_over_ranks tolist",
}
ZERO = {
    "DP4, ZeRO-1": ASKED | {"deepspeed/runtime/utils.py clip_tensors_by_global_norm __bool__"},
    "DP4, ZeRO-2": ASKED | {"deepspeed/runtime/zero/stage_1_and_2.py has_overflow item"},
    "DP4, ZeRO-3": ASKED,
}
Recorded = tuple[list[Collective], Memory]
# Its stream is twice as wide, and so is the storage of views that other tensors keep alive.
MOVING = "yuriiformer"
# The backward pass of mha2nd holds the most memory by far.
PLANNED = [*(name for name in MIXERS if name not in ("fla.*", "mha2nd", MOVING)), "mha2nd"]
LIKE = {
    "demo": [
        "model=fem_sm_demo",
        "data.seq_length=512",
        "train.micro_batch_size=8",
        "model.vocab_size=4096",
    ],
    "340m": [
        "model=transformer_340m",
        "data.seq_length=512",
        "train.micro_batch_size=4",
        "model.vocab_size=4096",
    ],
}
WAYS: Cases = {
    "plain": (1, []),
    "TP2 + SP": (2, [*TP2, *SP]),
    "PP2": (2, PP2),
    "CP2": (2, CP2),
    "full": (1, AGAIN),
    "selective": (1, ["train.recompute=selective"]),
    "fp32": (1, ["train.precision=fp32"]),
}


def config_of(world: int, overrides: list[str], base: list[str] = BASE) -> RunConfig:
    return prepare(
        load_run(DEMO, [*base, *overrides, f"parallel.world_size={world}"]), None, plan_only=True
    ).config


def recorded(rank: Rank) -> Recorded:
    return rank.trace.collectives, rank.peak.memory


def rehearsed(cases: Cases) -> dict[str, list[Recorded]]:
    """Return case -> records of the first rank of each pipeline stage."""
    upstream.import_megatron()
    found = {}
    for name, (world, overrides) in cases.items():
        rehearsal = rehearse(config_of(world, overrides), world, "cpu")
        found[name] = [recorded(rank) for rank in rehearsal.ranks]
    return found


def real(cases: Cases) -> dict[str, Recorded]:
    """Return case -> records of this rank."""
    from pretrain.engines.building import destroy_model_parallel, initialize_model_parallel
    from pretrain.run import make_engine
    from pretrain.schedule import Schedule

    upstream.import_megatron()
    platform.initialize_distributed()
    found = {}
    for name, (world, overrides) in cases.items():
        config = config_of(world, overrides)
        with Recorder(StepTrace(), torch.device("cpu")) as recorder:
            initialize_model_parallel(config)
            schedule = Schedule.of(config)
            length = config.data.seq_length // config.parallel.context_parallel_size
            engine = make_engine(config, schedule)
            found[name] = recorded(
                recorded_steps(
                    engine,
                    recorder,
                    micro_batches(length, depth=config.model.mtp_depth),
                    schedule,
                    world,
                )
            )
            engine.close()
            destroy_model_parallel()
    return found


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(QUICK, id="quick"),
        *(
            pytest.param(each, id=name, marks=pytest.mark.slow)
            for name, each in (("all", SLOW), ("every mixer", EVERY))
        ),
    ],
)
def test_collectives_and_memory_are_those_of_real_ranks(tmp_path: Path, cases: Cases) -> None:
    """Collectives are equal call by call; weights, gradients and optimizer to the byte; the peak up
    to one hidden state (of 75), because gloo keeps sent data until it is waited for.
    """
    on_paper = answer(1, rehearsed, cases, output=tmp_path / "paper", patience=600)
    for world in {world for world, _ in cases.values()}:
        here = {name: case for name, case in cases.items() if case[0] == world}
        answer(world, real, here, output=tmp_path / f"ranks{world}", patience=600)
        ranks = [
            pickle.loads(Path(f"{tmp_path}/ranks{world}.{rank}.answer").read_bytes())
            for rank in range(world)
        ]
        for name in here:
            for stage, (collectives, memory) in enumerate(on_paper[name]):
                sent, held = ranks[stage * world // len(on_paper[name])][name]
                assert collectives == sent and any(len(each.group) > 1 for each in sent), name
                assert replace(memory, activations=0, workspace=0) == replace(
                    held, activations=0, workspace=0
                ), name
                assert memory.total == pytest.approx(held.total, rel=0.02), name


def on_a_gpu(picture: Path) -> dict[str, Any]:
    """Return, for layouts on a simulated GPU: host reads per rank, (forward, backward) FLOPs, those
    in 8 bits, a plan, and printed text.

    Also the gradients of ZeRO-1, planned and rehearsed.
    """
    upstream.import_megatron()
    found = {
        name: rehearse(config_of(*case, ON_A_GPU), case[0], "h100")
        for name, case in LAYOUTS.items()
    }
    flops = {}
    reads = {}
    for name, each in found.items():
        first = each.ranks[0].trace
        flops[name] = (first.flops(backward=False), first.flops(backward=True))
        reads[name] = [
            {re.sub(r":\d+", "", read) for read in rank.trace.reads} for rank in each.ranks
        ]
    eight = found["DP2, fp8"].ranks[0].trace
    eight.launches = [each for each in eight.launches if each.name == "_scaled_mm"]
    zero = found["DP4, ZeRO-1"]
    words = ["--rehearse", "--gpus", "2", "--device", "h200", "--json", "--picture", str(picture)]
    with redirect_stdout(io.StringIO()) as output:
        assert main([DEMO, *ON_A_GPU, *PLAIN, *words]) == 0
    return {
        "reads": reads,
        "flops": flops,
        "eight": [eight.flops(backward=backward) for backward in (False, True)],
        "plan": found["DP2"].plan,
        "gradients": (zero.plan.memory[0].gradients, zero.ranks[0].peak.memory.gradients),
        "printed": json.loads(output.getvalue()),
    }


@pytest.mark.slow
def test_a_step_on_a_gpu_waits_for_the_host_twice_and_multiplies_what_is_planned(
    tmp_path: Path,
) -> None:
    found = answer(1, on_a_gpu, tmp_path / "picture.png", output=tmp_path / "said")
    plan = found["plan"]
    flops = found["flops"]
    printed = found["printed"]
    steady = {"DP2": [STEADY], "TP2 x PP4 + SP, recompute": [STEADY] * 3, "DP2, fp8": [STEADY]}
    assert found["reads"] == {**steady, **{name: [reads] for name, reads in ZERO.items()}}
    assert {flops[name] for name in ZERO} == {flops["DP2"]}  # all of the same model
    (forward, backward) = flops["DP2"]
    tokens = plan.schedule.step_tokens // plan.data_parallel
    assert forward == tokens * sum(plan.forward_flops.values())
    # Twice the forward pass; the attention scores are multiplied once more.
    assert backward == 2 * forward + tokens * plan.forward_flops["attention"] / 2
    eight = tokens * fp8.forward_flops(plan.config.model)
    assert found["eight"] == [eight, 2 * eight]
    # DeepSpeed rounds the sizes up so that each rank of a group has an equal part.
    planned, held = found["gradients"]
    assert planned == pytest.approx(held, rel=1e-3)
    (rank,) = printed["ranks"]
    # The form that the launcher reads.
    assert fullest(printed) == {"rank": 0, "bytes": rank["peak"]["bytes"], "excess": None}
    assert rank["planned"]["weights"] == rank["peak"]["weights"]
    # Each pass reads the weights, and the update writes them.
    assert rank["moved"] > 3 * rank["planned"]["weights"]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def sized(size: str, *more: str, world: int = 1) -> RunConfig:
    steps = ["train.global_batch_size=32", "train.precision=bf16", "model.tie_embeddings=false"]
    return config_of(world, [*LIKE[size], *steps, *more], BASE[-3:])


def planned_and_kept(world: int, more: list[str]) -> dict[str, tuple[float, float]]:
    """Return size and mixer -> bytes per token that its layer saves, from two models with a layer
    of each; and the peaks of the full models.
    """
    upstream.import_megatron()
    found = {}
    for size, names in itertools.product(LIKE, (PLANNED, [MOVING])):
        pattern = [
            f"model.pattern=[{','.join(names)}]",
            f"model.num_layers={len(names)}",
            "model.num_query_groups=2",
            *more,
        ]
        config = sized(size, *pattern, "train.global_batch_size=16", world=world)
        rehearsal = rehearse(config, world, "h100")
        (rank,), plan = rehearsal.ranks, rehearsal.plan
        turn = min(
            each.born for each in rank.held if each.phase == BACKWARD and each.born > rank.begin
        )
        kept = [each for each in rank.held if rank.begin < each.born < turn <= (each.gone or turn)]
        peaks = float(plan.peak_memory), float(rank.peak.bytes)
        found[f"{size}, the peak of {len(names)}"] = peaks
        for number, (name, block) in enumerate(zip(names, config.model.blocks(), strict=True), 1):
            own = sum(each.bytes for each in kept if each.part == f"layer {number}")
            planned = sum(layer_activations(plan, block).values())
            found[f"{size}, {name}"] = planned, own / plan.micro_batch_tokens
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "TP2 + SP", "selective"])
def test_what_layers_keep_on_a_gpu_is_planned_within_fifteen_percent(
    tmp_path: Path, way: str
) -> None:
    found = answer(1, planned_and_kept, *WAYS[way], output=tmp_path / "said", patience=300)
    # mha2nd keeps less than mha2nd1st, which has the same class; the solves of its systems
    # determine the peak.
    off = {
        name: (planned, kept)
        for name, (planned, kept) in found.items()
        if abs(planned / kept - 1) > 0.15 and "mha2nd" not in name[-6:]
    }
    assert len(found) == len(LIKE) * (len(PLANNED) + 3) and not off
    # The table of attention is exact to the byte except for the numbers of the norms per token (8
    # of 6,000); a repeated key or a gathered input would be 5% or more.
    assert all(
        planned == pytest.approx(kept, rel=2e-3)
        for name, (planned, kept) in found.items()
        if "transformer" in name
    )


def planned_and_rehearsed(mixer: str) -> dict[str, tuple[int, int]]:
    """Return size, layout and stage -> planned and rehearsed peak of a rank."""
    upstream.import_megatron()
    found = {}
    for size, (way, (world, more)) in itertools.product(LIKE, WAYS.items()):
        recorded = rehearse(
            sized(size, *more, f"model.mixer={mixer}", "model.num_layers=8", world=world),
            world,
            "h100",
        )
        for rank in recorded.ranks:
            found[f"{size}, {way}, {rank.stage}"] = (
                recorded.plan.memory[rank.stage].total,
                rank.peak.bytes,
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mixer", PLANNED)
def test_peaks_on_a_gpu_are_planned_within_fifteen_percent(tmp_path: Path, mixer: str) -> None:
    found = answer(1, planned_and_rehearsed, mixer, output=tmp_path / "said", patience=600)
    assert not {name: pair for name, pair in found.items() if abs(pair[0] / pair[1] - 1) > 0.15}


def test_what_cannot_be_rehearsed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([DEMO, *BASE, *PLAIN, "--rehearse", *OFFLOADED]) == Exit.WRONG_INPUT
    assert "engine.offload_optimizer = true cannot be rehearsed" in capsys.readouterr().err
    assert (
        main([DEMO, *BASE, *PLAIN, "--rehearse", *deepspeed(2), "optimizer.name=muon"])
        == Exit.WRONG_INPUT
    )
    assert "optimizer.name = muon cannot be rehearsed" in capsys.readouterr().err
    assert main([DEMO, *BASE, "--gpus", "2"]) == Exit.WRONG_INPUT
    assert "--gpus requires --rehearse" in capsys.readouterr().err


def test_of_stages_the_one_that_needs_most_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[RunConfig]()

    def stop(config: RunConfig, *_: object) -> None:
        seen.append(config)
        raise ConfigError("seen")

    monkeypatch.setattr(steps, "rehearse", stop)
    stages = ["stages.0.seq_length=64", "train.steps=null", "--rehearse", "--gpus", "1"]
    assert (
        main([DEMO.replace("demo.yaml", "demo_stages.yaml"), *BASE, *PLAIN, *stages])
        == Exit.WRONG_INPUT
    )
    assert [(config.data.seq_length, config.train.steps, config.stages) for config in seen] == [
        (64, 60, ())
    ]
