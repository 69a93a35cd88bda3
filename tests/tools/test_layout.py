"""Tests of tools.layout: its model of a step against published results and manual counts; the
configuration part that it writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from fem_common.config import ConfigErrors
from pretrain.config import RunConfig, load_run
from pretrain.plan.context_parallel import exchanged_bytes
from pretrain.plan.run_plan import flops_per_token, make_plan
from pretrain.validate import validate
from tools.bench.traffic.__main__ import PAGE
from tools.layout.__main__ import main
from tools.layout.search import AXES, layouts, ranked
from tools.layout.step import Machine, machines, mfu, step_time

ROOT = Path(__file__).parents[2]
RUN = "configs/run/transformer_1.3b_100bt.yaml"
MACHINE = Machine.of("h100", "ib-400")
H100 = 989e12
LLAMA3 = ("data.seq_length=8192", "model.num_query_groups=8", "train.recompute=full")
SPLIT = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
# Name -> GPUs, sizes, published tokens per second and GPU, or MFU. Sources: the pages of OLMo-core
# and torchtitan, Megatron-LM's README. The widths of the two Megatron models are assumed, and
# torchtitan's GPU was limited to 500 W.
PUBLISHED = {
    "OLMo-core 1B": (8, {"size": (2048, 16, 16, 8192, 100352), "micro": 4, "batch": 512}, 55_000),
    "OLMo-core 7B": (64, {"size": (4096, 32, 32, 11008, 100352), "micro": 1, "batch": 1024},
        10_000),
    "torchtitan 8B": (8, {"size": (4096, 32, 32, 14336, 128256), "micro": 1, "batch": 8,
        "more": LLAMA3}, 6_667),
    "Megatron 1.7B": (48, {"size": (2304, 24, 24, 9216, 50304), "micro": 4, "batch": 192}, 0.41),
    "Megatron 7.1B": (96, {"size": (4096, 32, 32, 16384, 50304), "micro": 2, "batch": 192,
        "more": SPLIT}, 0.47),
}  # fmt: skip


def config_of(
    gpus: int, size: tuple[int, ...], micro: int, batch: int, more: tuple[str, ...] = ()
) -> RunConfig:
    names = ("hidden_size", "num_layers", "num_attention_heads", "ffn_hidden_size", "vocab_size")
    sizes = [f"model.{name}={value}" for name, value in zip(names, size, strict=True)]
    batches = [
        f"train.micro_batch_size={micro}",
        f"train.global_batch_size={batch}",
        f"parallel.world_size={gpus}",
    ]
    return load_run(RUN, [*sizes, *batches, *more])


def page_of(name: str) -> list[str]:
    """Return the row of tools/README.md: its figures and the rank of the published layout."""
    (row,) = [
        line
        for line in (ROOT / "tools/README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| {name}, ")
    ]
    return [cell.strip() for cell in row.split("|")[2:-1]]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_modelled_mfu_is_within_fifteen_points_of_what_others_have_published(name: str) -> None:
    gpus, sizes, published = PUBLISHED[name]
    config = config_of(gpus, **sizes)  # type: ignore[arg-type]
    plan = make_plan(config, gpus)
    modelled = mfu(plan, step_time(plan, MACHINE).total, "h100")
    theirs = published if published < 1 else published * flops_per_token(config) / H100
    assert abs(modelled - theirs) < 0.15, f"{modelled:.3f}, published {theirs:.3f}"
    assert modelled > theirs  # the model leaves out inefficiencies specific to their code
    assert page_of(name)[:2] == [f"{theirs:.0%}", f"{modelled:.0%}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_layouts_of_others_are_ranked_as_the_page_states(name: str) -> None:
    gpus, sizes, _ = PUBLISHED[name]
    config = config_of(gpus, **sizes)  # type: ignore[arg-type]

    def what(config: RunConfig) -> tuple[object, ...]:
        layout, train = config.parallel, config.train
        cut = layout.pipeline_model_parallel_size, layout.context_parallel_size
        return (
            layout.tensor_model_parallel_size,
            layout.sequence_parallel,
            cut,
            train.micro_batch_size,
            train.recompute,
        )

    found, _ = ranked(config, gpus, MACHINE)
    place = [what(each.plan.config) for each in found].index(what(config)) + 1
    assert page_of(name)[2] == f"{place} of {len(found)}"


def test_the_traffic_is_the_page_s() -> None:
    """Pointwise KiB and launches of both passes."""
    page = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        row = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(row) == 11 and row[1].isdigit():
            page[row[0]] = (int(row[1]) + int(row[4]), int(row[3]) + int(row[6]))
    known = machines()["traffic"]
    assert known == {name: page[name] for name in known} and set(page) - set(known) == {"GLA"}


def test_a_step_by_hand() -> None:
    config = config_of(
        32,
        (2048, 8, 16, 8192, 32000),
        1,
        64,
        ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=4"),
    )
    found = step_time(make_plan(config, 32), MACHINE).seconds
    # DP 4: 16 micro-batches. Two layers per stage with four all-reduces each of 4096 x 2048 bf16,
    # of which each of the two ranks sends and receives the full size.
    assert found["tensor parallel"] == pytest.approx(16 * 2 * 4 * (2 * 4096 * 2048 / 360e9 + 10e-6))
    work = ("products", "attention", "pointwise", "gaps", "tensor parallel")
    assert found["bubble"] == pytest.approx(3 / 16 * sum(found[name] for name in work))
    deeper = replace(
        config, parallel=replace(config.parallel, virtual_pipeline_model_parallel_size=2)
    )
    halved = step_time(make_plan(deeper, 32), MACHINE).seconds
    assert halved["bubble"] == pytest.approx(found["bubble"] / 2)
    wide = make_plan(config_of(64, (2048, 8, 16, 8192, 32000), 1, 64), 64)  # over several nodes
    alike = step_time(wide, MACHINE).seconds
    slower = step_time(wide, replace(MACHINE, fabric=1e8)).seconds
    assert slower["data parallel"] > alike["data parallel"]
    assert slower["products"] == alike["products"]


SMALL = ("model.num_layers=4", "train.global_batch_size=8", "model.vocab_size=32000")
NEAR, FAR = MACHINE.latency["nvlink"], MACHINE.latency["fabric"]


def spent(gpus: int, *more: str, machine: Machine = MACHINE) -> Mapping[str, float]:
    config = config_of(gpus, (2048, 8, 16, 8192, 32000), 1, 64, more)
    validate(config, gpus)
    return step_time(make_plan(config, gpus), machine).seconds


def test_what_ranks_that_share_sequences_send_is_waited_for_but_for_a_ring_s_keys() -> None:
    sizes = ("parallel.context_parallel_size=4",)
    config, layers = config_of(32, (2048, 8, 16, 8192, 32000), 1, 64, sizes), 8
    # DP 8: 8 micro-batches, each with 1024 of 4096 tokens. q, k, v and the result, bf16, in both
    # directions: a rank keeps a quarter.
    sent = 8 * layers * 1024 * 2 * (4 * 2 * 2048 / 4) * 3
    assert sent == exchanged_bytes(make_plan(config, 32))
    exchanged = spent(32, *sizes)
    assert exchanged["context parallel"] == pytest.approx(sent / 360e9 + 8 * layers * 4 * NEAR)
    # A quarter of the tokens, four times as many micro-batches.
    assert exchanged["products"] == pytest.approx(spent(32)["products"])
    ring = (*sizes, "parallel.context_parallel_kind=ring")
    fast = replace(MACHINE, nvlink=1e12)
    # Keys and values three times in either direction, overlapped with attention; the fp32 gradients
    # of both four times, which no computation overlaps.
    keys = 8 * layers * 1024 * 2 * 2048 * 3 * 2 * 2
    gradients = 8 * layers * 1024 * 2 * 2048 * 4 * 4
    calls = 8 * layers * (4 + 4) * NEAR
    round_ = spent(32, *ring)
    assert spent(32, *ring, machine=fast)["context parallel"] == pytest.approx(
        gradients / 1e12 + calls
    )
    assert round_["context parallel"] == pytest.approx(
        (keys + gradients) / 360e9 + calls - 0.7 * round_["attention"]
    )
    # Sixteen ranks occupy two nodes: eight of the fifteen other ranks are in the other node.
    wide = config_of(32, (2048, 8, 16, 8192, 32000), 1, 64, ("parallel.context_parallel_size=16",))
    calls = 32 * layers * 4 * FAR
    sent = exchanged_bytes(make_plan(wide, 32))
    exchanged = spent(32, "parallel.context_parallel_size=16")
    assert exchanged["context parallel"] == pytest.approx(sent / 42.5e9 * 8 / 15 + calls)


def test_zero_s_stages_send_what_they_split() -> None:
    machine = replace(MACHINE, overlap=0.0)
    stages = [
        spent(32, "engine.name=deepspeed", f"engine.zero_stage={stage}", machine=machine)
        for stage in (1, 2, 3)
    ]
    plain = spent(32, machine=machine)
    parameters = make_plan(config_of(32, (2048, 8, 16, 8192, 32000), 1, 64), 32).total_parameters
    way = 31 / 32 * parameters / 340e9  # eight links of a node
    # Two micro-batches. Gradients in fp32, twice the traffic if all ranks get the sum; weights in
    # bf16, in stage 3 for both passes.
    ways = [2 * 4 + 2, 2 * 2 * 4 + 2, 2 * (4 + 2 * 2)]
    assert plain["data parallel"] == pytest.approx((4 + 2) * way)
    assert [each["data parallel"] for each in stages] == pytest.approx(
        [each * way for each in ways]
    )
    hidden = spent(
        32, "engine.name=deepspeed", "engine.zero_stage=3", "parallel.overlap_grad_reduce=true"
    )
    assert hidden["data parallel"] < stages[2]["data parallel"]


def test_what_is_computed_again_takes_its_time() -> None:
    none, some, full = (
        spent(32, f"train.recompute={kind}") for kind in ("none", "selective", "full")
    )
    flops = make_plan(config_of(32, (2048, 8, 16, 8192, 32000), 1, 64), 32).forward_flops
    assert some["attention"] == full["attention"] > none["attention"]
    again = flops["MLP"] / (flops["MLP"] + flops["mixer projections"])
    assert some["products"] - none["products"] == pytest.approx(
        again * (full["products"] - none["products"])
    )
    for name in ("pointwise", "gaps"):
        assert none[name] < some[name] < full[name]


DEEPSPEED = ("model.mixer=fem_gla", "engine.name=deepspeed")


@pytest.mark.parametrize(
    "more", [(), pytest.param(DEEPSPEED, marks=pytest.mark.slow)], ids=["megatron", "deepspeed"]
)
def test_the_layouts_are_those_that_the_trainer_takes(more: tuple[str, ...]) -> None:
    """All combinations of all axes, one by one: the trainer's own checks decide, not a list."""
    config = load_run(RUN, [*SMALL, *more])
    gpus = 8
    found = set()
    for values in product(*(axis.values(config, gpus) for axis in AXES)):
        made = config
        for axis, value in zip(AXES, values, strict=True):
            name = axis.key.partition(".")[2]
            made = replace(
                made, **{axis.section: replace(getattr(made, axis.section), **{name: value})}
            )
        made = replace(
            made,
            parallel=replace(
                made.parallel,
                world_size=gpus,
                sequence_parallel=made.parallel.tensor_model_parallel_size > 1,
            ),
        )
        try:
            validate(made, gpus)
        except ConfigErrors:
            continue
        found.add(values)
    ours = {tuple(axis.of(made) for axis in AXES) for made in layouts(config, gpus)}
    assert ours == found
    seen = {}
    for axis, values_of_axis in zip(AXES, zip(*ours, strict=True), strict=True):
        seen[axis.key.partition(".")[2]] = set(values_of_axis)
    assert seen["context_parallel_size"] == {1, 2, 4, 8}
    assert seen["recompute"] == {"none", "selective", "full"}
    assert (seen["zero_stage"], seen["pipeline_model_parallel_size"]) == (
        ({1, 2, 3}, {1}) if more else ({1}, {1, 2, 4})
    )


def test_the_best_is_written_as_a_part_that_a_run_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part, picture = tmp_path / "best.yaml", tmp_path / "best.png"
    small = ["model.num_layers=2", "train.global_batch_size=8", "model.vocab_size=32000"]
    assert main([RUN, *small, "--gpus", "4", "--out", str(part), "--picture", str(picture)]) == 0
    assert "modelled" in capsys.readouterr().out
    taken = load_run(RUN, [*small, f"parallel={part}"])
    assert taken.parallel.world_size == 4 and taken.parallel.overlap_grad_reduce
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([RUN, *small, "--gpus", "3"]) == 2
    assert "train.global_batch_size = 8 is not a multiple" in capsys.readouterr().err


def test_the_part_and_the_overrides_printed_with_it_are_the_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tmp_path / "best.yaml"
    small = [
        *SMALL,
        "data.seq_length=65536",
        "engine.name=deepspeed",
        "parallel.context_parallel_kind=ring",
    ]
    assert main([RUN, *small, "--gpus", "16", "--out", str(part)]) == 0
    output = capsys.readouterr().out
    extra = output.splitlines()[-1].partition("; with ")[2].split()
    assert f"# With {' '.join(extra)}." in part.read_text(encoding="utf-8")
    taken = load_run(RUN, [*small[:-1], f"parallel={part}", *extra])
    validate(taken, 16)
    best = output.splitlines()[2]
    assert f"CP{taken.parallel.context_parallel_size} ring" in best
    assert f"stage {taken.engine.zero_stage}" in best
    assert f"micro-batch {taken.train.micro_batch_size}" in best
    assert ("recompute" in best) == (taken.train.recompute != "none")


def test_what_nothing_is_known_of_is_refused_and_what_is_assumed_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([RUN, *SMALL, "model.mixer=fla.GatedLinearAttention", "--gpus", "4"]) == 2
    assert "model.mixer = fla.GatedLinearAttention" in capsys.readouterr().err
    assert main([RUN, *SMALL, "optimizer.name=muon", "data.documents=separate", "--gpus", "4"]) == 0
    output = capsys.readouterr().out
    assert output.count("assumed:") == 2 and "optimizer.name = muon" in output
