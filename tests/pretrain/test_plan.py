"""Tests of the plan's arithmetic against independent counts, and of its speed: no torch, no
processes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fem_common.text import gib
from fem_megatron.config import ModelConfig
from fem_megatron.mixers.fem.prior_shapes import SoftmaxShape
from fem_megatron.mixers.fem.shape import FemConfig, FemShape
from pretrain.config import RunConfig, load_run
from pretrain.data.facts import DataFacts, SourceFacts
from pretrain.data.part_lengths import PartLengths, shares_of
from pretrain.plan.context_parallel import split_kinds_of
from pretrain.plan.devices import DEVICE_PEAK_TFLOPS, memory_gib, peak_tflops
from pretrain.plan.memory import chunks_in_flight, layer_activations
from pretrain.plan.placement import Placement
from pretrain.plan.run_plan import (
    Plan,
    count_by_component,
    flops_per_token,
    forward_flops,
    make_plan,
    memory_excess,
    parameter_shapes,
    recomputed_flops,
    render,
    stage_parameters,
)
from pretrain.validate import prepare
from tests.pretrain.conftest import DEMO_SIZES, ROOT
from tests.pretrain.data_folder import write_folder
from tests.wording import Wording

CONFIGS = ROOT / "configs" / "run"
LARGE = "fem_sm_1.3b_100bt.yaml"
TP = "parallel.tensor_model_parallel_size"
PP = "parallel.pipeline_model_parallel_size"
VPP = "parallel.virtual_pipeline_model_parallel_size"


def run(name: str, *overrides: str) -> RunConfig:
    return load_run(CONFIGS / name, overrides)


def small(*overrides: str) -> RunConfig:
    return run("demo.yaml", *DEMO_SIZES, "model.vocab_size=6000", *overrides)


def activations(config: RunConfig) -> dict[str, float]:
    return layer_activations(placed(config), config.model.blocks()[0])


def placed(config: RunConfig, data_parallel: int = 1) -> Placement:
    return Placement(config=config, data_parallel=data_parallel, cuda=True)


def total(model: ModelConfig) -> int:
    return sum(count_by_component(model).values())


# --- parameters -----------------------------------------------------------------------------------


def test_parameters_of_a_transformer_and_of_a_fem_follow_the_equations() -> None:
    width, inner, rows, layers = 2048, 5632, 32000, 24
    # q, k, v, o; gate, up, down; two norms.
    layer = 4 * width * width + 3 * width * inner + 2 * width
    assert (
        total(run("transformer_1.3b_100bt.yaml").model) == layers * layer + width + 2 * rows * width
    )
    state, packed = width // 64, 2 * width + 3 * width // 2  # q, k of D; v, lambda, g of D/2
    # Two norms; W_a, W_f, W_r; W_out.
    conditioner = width + state + 3 * state * width + state * packed
    assert count_by_component(run(LARGE).model)["conditioner"] == layers * conditioner
    assert parameter_shapes(ModelConfig(vocab_size=1001, num_layers=1))[
        "embedding.word_embeddings.weight"
    ] == (
        1024,
        768,
    )  # padded


@pytest.mark.parametrize("name", ["fem_sm_1.3b_100bt.yaml", "fem_sm_340m_15bt.yaml"])
def test_a_fem_has_the_transformers_parameters_within_1_percent(name: str) -> None:
    model = run(name).model
    transformer = total(run(name.replace("fem_sm", "transformer")).model)
    assert abs(total(model) / transformer - 1) < 0.01  # as the paper says
    assert make_plan(run(name), 8).transformer_parameters == transformer
    # Without C, the budget equals that of the Transformer except for beta: one number per value
    # channel and layer.
    without = replace(model, fem=FemConfig(conditioner=False))
    assert total(without) == transformer + model.num_layers * model.hidden_size // 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "layout", [[f"{PP}=3"], [f"{TP}=2"], [f"{TP}=2", f"{PP}=2"], [f"{PP}=2", f"{VPP}=3"]]
)
def test_the_ranks_of_a_layout_hold_the_whole_model_and_what_is_replicated(
    layout: list[str], tied: bool
) -> None:
    config = small(f"model.tie_embeddings={str(tied).lower()}", *layout)
    tensor = config.parallel.tensor_model_parallel_size
    stages = config.parallel.pipeline_model_parallel_size
    shapes = parameter_shapes(config.model)
    vectors = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) == 1 and not name.endswith("beta")
    )
    copies = vectors * (tensor - 1)
    if tied and stages > 1:
        copies += math.prod(shapes["embedding.word_embeddings.weight"])
    assert tensor * sum(stage_parameters(config)) == total(config.model) + copies


# --- FLOPs ----------------------------------------------------------------------------------------


def test_attention_flops_are_the_sum_over_all_pairs_of_a_sequence() -> None:
    model = ModelConfig(vocab_size=100, num_layers=1, num_attention_heads=2, hidden_size=16)
    length = 9
    shape = FemShape.of(model, SoftmaxShape)
    pairs = sum(1 for query in range(length) for key in range(length) if key <= query)
    # Per head, a pair costs one product over d_k for its score, and one over [v | U], which is
    # twice d_v, for its read.
    full = pairs * shape.heads * (2 * shape.prior.slices()["k"] + 2 * (2 * shape.value_head))
    # float64 rounding.
    assert forward_flops(model, length)["attention"] * length == pytest.approx(full, rel=1e-12)


@pytest.mark.parametrize(("mixer", "width", "heads"), [("mamba2", 512, 12), ("cem", 66, 22)])
def test_a_plan_needs_no_transformer_of_the_same_heads(mixer: str, width: int, heads: int) -> None:
    config = small(
        f"model.mixer={mixer}", f"model.hidden_size={width}", f"model.num_attention_heads={heads}"
    )
    assert "a Transformer of this width has" in render(make_plan(config, 1))


def test_training_costs_three_forward_passes_and_recompute_one_more_of_the_layers() -> None:
    config = run(LARGE)
    forward = forward_flops(config.model, 4096)
    assert flops_per_token(config) == 3 * sum(forward.values()) and not recomputed_flops(
        config, forward
    )
    again = replace(config, train=replace(config.train, recompute="full"))
    # The MFU does not count recomputed operations.
    assert flops_per_token(again) == flops_per_token(config)
    assert (
        sum(recomputed_flops(again, forward).values())
        == sum(forward.values()) - forward["output layer"]
    )
    some = replace(config, train=replace(config.train, recompute="selective"))
    assert recomputed_flops(some, forward) == {part: forward[part] for part in ("attention", "MLP")}
    planned = make_plan(again, 8)
    assert planned.train_flops == flops_per_token(config)
    assert planned.hardware_flops == flops_per_token(config) + sum(
        recomputed_flops(again, forward).values()
    )
    # 2 FLOPs per matrix parameter, except for the embedding, which is only indexed, plus attention.
    weights = sum(
        math.prod(shape)
        for name, shape in parameter_shapes(config.model).items()
        if len(shape) >= 2 and "embed" not in name
    )
    assert sum(forward.values()) == 2 * weights + forward["attention"]


def parts_of(document: int, phase: int, length: int) -> list[int]:
    """Return the tokens in each part of a document that begins at token ``phase`` of a sequence of
    ``length``.
    """
    edges = [phase, *(edge for edge in range(length, phase + document, length)), phase + document]
    return [end - begin for begin, end in zip(edges, edges[1:], strict=False)]


@pytest.mark.parametrize(
    ("documents", "length", "phases"),
    [
        ([1, 2, 7, 8, 9, 16, 17, 40, 3], 8, range(8)),
        ([5, 5, 5], 8, range(8)),
        ([4, 12, 20, 40], 12, (0, 4, 8)),  # multiples of 4 begin at multiples of 4
        ([6, 12], 12, (0, 6)),
        ([12, 24, 12], 12, (0,)),
    ],
)
def test_documents_parts_are_those_of_every_place_where_they_may_begin(
    documents: list[int], length: int, phases: Sequence[int]
) -> None:
    held = np.zeros(length + 1)
    for document in documents:
        for phase in phases:
            for part in parts_of(document, phase, length):
                held[part] += part
    shares = shares_of(np.array(documents, np.int32), length)
    assert shares == pytest.approx(held / held.sum(), rel=1e-12)  # float64 rounding


def test_many_lengths_cost_what_a_few_of_them_show() -> None:
    """Linear costs agree up to rounding; costs that decrease with the length, such as costs once
    per document, to a millionth.
    """
    shares = shares_of(np.random.default_rng(1).geometric(1 / 9000, 500).astype(np.int32), 32768)
    part_lengths = PartLengths(shares, 9000.0, 500, 500)
    requested = list[int]()
    length = np.arange(1, 32769)

    def cost(document: int) -> dict[str, float]:
        requested.append(document)
        return {"linear": 3.0 * document + 5, "once": 1 / document, "constant": 7.0}

    found = part_lengths.mean_over(cost)
    assert len(requested) < 8192 and found["linear"] == pytest.approx(
        shares[1:] @ (3.0 * length + 5), rel=1e-12
    )
    assert found["constant"] == pytest.approx(7.0, rel=1e-12) and found["once"] == pytest.approx(
        shares[1:] @ (1 / length), rel=1e-6
    )


def by_documents(folder: Path, documents: list[list[int]], *words: str) -> Plan:
    """Return the plan of the demo on documents of these lengths, read separately."""
    write_folder(folder, documents=[[*document[:-1], 499] for document in documents])
    words = (
        f"data.train=[{{prefix: {folder / 'train'}}}]",
        "data.valid=[]",
        "data.test=[]",
        "data.seq_length=16",
        *words,
    )
    prepared = prepare(
        run("demo.yaml", "model.vocab_size=500", "data.documents=separate", *words),
        None,
        plan_only=True,
    )
    return make_plan(prepared.config, 1, prepared.facts)


def test_a_plan_counts_documents_by_their_lengths_and_states_both(
    tmp_path: Path, wording: Wording
) -> None:
    dense = make_plan(run("demo.yaml", "model.vocab_size=500", "data.seq_length=16"), 1)
    assert dense.part_lengths is None and dense.train_flops == dense.dense_flops
    full = by_documents(tmp_path / "whole", [[7] * 16] * 40)
    assert (
        full.forward_flops == dense.forward_flops
        and full.train_flops == full.dense_flops == dense.train_flops
    )
    short = by_documents(tmp_path / "short", [[7] * 4] * 100)
    assert short.dense_flops == dense.train_flops and short.memory == dense.memory
    # Documents of 4 tokens are never cut: a token sees 2.5 keys instead of 8.5, and all other costs
    # are unchanged.
    assert short.forward_flops["attention"] == pytest.approx(
        2.5 / 8.5 * dense.forward_flops["attention"], rel=1e-12
    )
    rest = {name: value for name, value in dense.forward_flops.items() if name != "attention"}
    assert {name: short.forward_flops[name] for name in rest} == pytest.approx(rest, rel=1e-12)
    assert by_documents(tmp_path / "cem", [[7] * 4] * 100, "model.mixer=cem").forward_flops[
        "preconditioner"
    ] == pytest.approx(
        forward_flops(replace(dense.config.model, mixer="cem"), 16)["preconditioner"], rel=1e-12
    )
    lines = [line for line in render(short).splitlines() if "document" in line]
    unreported = make_plan(
        run("demo.yaml", "model.vocab_size=500", "data.documents=separate", "data.seq_length=16"), 1
    )
    assert unreported.forward_flops == dense.forward_flops
    wording(
        "\n".join(
            [*lines, *(line for line in render(unreported).splitlines() if "document" in line)]
        )
    )
    assert "document" not in render(dense)
    assert "estimated" in render(short) and "estimated" not in render(dense)


def test_of_very_many_documents_a_part_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If documents exceed the limit, samples from all of the file represent them, and the plan
    reports it.
    """
    monkeypatch.setattr("pretrain.data.part_lengths._DOCUMENTS", 1 << 9)
    monkeypatch.setattr("pretrain.data.part_lengths._RUN", 1 << 3)
    lengths = np.random.default_rng(1).geometric(1 / 20, 2000)
    every = [[7] * int(length) for length in lengths]
    some = by_documents(tmp_path, every)
    assert some.part_lengths is not None and (
        some.part_lengths.read,
        some.part_lengths.documents,
    ) == (512, 2000)
    assert "(512 of 2,000 were read)" in render(some)
    monkeypatch.undo()
    full = by_documents(tmp_path, every)
    assert (
        full.part_lengths is not None
        and full.part_lengths.read == 2000
        and full.part_lengths.mean == pytest.approx(lengths.mean(), rel=1e-12)
    )
    # Three standard errors of the mean of 512 lengths, whose standard deviation equals their mean.
    assert some.part_lengths.mean == pytest.approx(full.part_lengths.mean, rel=3 / 512**0.5)


DEVICES: dict[str, tuple[float | None, int | None]] = {
    "NVIDIA H100 80GB HBM3": (989, 79),
    "NVIDIA H100 PCIe": (756, 79),
    "NVIDIA A100-SXM4-80GB": (312, 79),
    "NVIDIA A100-SXM4-40GB": (312, 39),
    "cpu": (None, None),
}


def test_a_device_is_found_by_its_name() -> None:
    assert {name: (peak_tflops(name), memory_gib(name)) for name in DEVICES} == DEVICES
    assert all(memory_gib(device) for device in DEVICE_PEAK_TFLOPS)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "distributed", "weights", "optimizer"),
    [
        ("bf16", True, 2, 12 / 4),
        ("bf16", False, 2, 12),
        ("fp32", True, 4, 8 / 4),
        ("fp32", False, 4, 8),
    ],
)
def test_static_memory_is_bytes_a_parameter(
    precision: str, distributed: bool, weights: int, optimizer: float
) -> None:
    overrides = [
        f"train.precision={precision}",
        f"parallel.use_distributed_optimizer={str(distributed).lower()}",
    ]
    config = small(*overrides)
    plan = make_plan(config, 4)
    (stage,) = plan.memory
    assert stage.parameters == plan.total_parameters
    assert (stage.weights, stage.gradients) == (weights * stage.parameters, 4 * stage.parameters)
    # The share of the last rank is rounded up.
    assert stage.optimizer == pytest.approx(optimizer * stage.parameters, abs=12)
    # The distributed optimizer stores its fp32 parameters in both precisions, the plain one only in
    # bf16.
    stored = {("bf16", True): 14, ("bf16", False): 14, ("fp32", True): 16, ("fp32", False): 12}[
        precision, distributed
    ]
    assert plan.checkpoint_bytes == stored * plan.total_parameters


def test_micro_batches_in_flight_are_those_of_the_schedules() -> None:
    config = small(f"{PP}=3")
    assert [chunks_in_flight(placed(config), stage) for stage in range(3)] == [3, 2, 1]
    # A step has only one micro-batch.
    assert [chunks_in_flight(placed(config, 4), stage) for stage in range(3)] == [1, 1, 1]
    interleaved = small(f"{PP}=2", f"{VPP}=3", "train.global_batch_size=32")
    # Warm-up: (PP - rank - 1) * 2 + (VPP - 1) * PP passes of a chunk, plus the current one.
    assert [chunks_in_flight(placed(interleaved), stage) for stage in range(2)] == [7, 5]


def test_parallelism_and_recompute_save_what_they_should() -> None:
    plain = run(LARGE)
    peak = make_plan(plain, 8).memory[0]
    recomputed = make_plan(run(LARGE, "train.recompute=full"), 8).memory[0]
    # Full recompute keeps one residual of 2048 bf16 numbers per layer and token, and the part of
    # the loss.
    assert recomputed.activations < peak.activations / 10
    # A recomputed layer needs memory unless the loss needs more.
    few_words = ("model.vocab_size=2048",)
    plain_small, remade_small = (
        make_plan(run(LARGE, *more, *few_words), 8).memory[0]
        for more in ((), ("train.recompute=full",))
    )
    assert remade_small.workspace > plain_small.workspace
    half = run(LARGE, f"{TP}=2")
    for term, bytes_per_token in activations(half).items():
        full = activations(plain)[term]
        assert full / 2 <= bytes_per_token <= full
    assert sum(
        activations(run(LARGE, f"{TP}=2", "parallel.sequence_parallel=true")).values()
    ) < sum(activations(half).values())


def test_a_plan_states_where_its_memory_does_not_fit() -> None:
    for name in (
        LARGE,
        "transformer_1.3b_100bt.yaml",
        "fem_sm_340m_15bt.yaml",
        "transformer_340m_15bt.yaml",
    ):
        # An H100 has 80 GB; a tenth remains for the CUDA context, NCCL and fragmentation.
        assert make_plan(run(name), 8).peak_memory < 0.9 * 80e9
    for device, micro, fits in (("H100", 1, True), ("H100", 16, False), ("null", 16, True)):
        text = render(
            make_plan(run(LARGE, f"log.device={device}", f"train.micro_batch_size={micro}"), 8)
        )
        assert ("DOES NOT FIT" in text) is not fits
        assert fits or ("has 79 GiB" in text and "train.recompute=full" in text)


# --- the entire plan ------------------------------------------------------------------------------


def test_the_text_states_what_was_requested(wording: Wording) -> None:
    plan = make_plan(run(LARGE), 8)
    assert 100e9 <= plan.tokens < 100e9 + plan.schedule.step_tokens == 100e9 + 128 * 4096
    source = SourceFacts(
        "train", "data.train.0.prefix", "x", 50_000_000_000, 1, "uint16", None, None
    )
    text = render(make_plan(run(LARGE), 8, DataFacts(32000, 2, None, (source,))))
    wording(text)
    assert len(max(text.splitlines(), key=len)) <= 120
    assert "interleaved, 3 chunks" in render(make_plan(small(f"{PP}=2", f"{VPP}=3"), 2))
    timed = make_plan(run(LARGE, "checkpoint.gb_per_second=5", "checkpoint.async_save=false"), 8)
    seconds = f"{timed.checkpoint_bytes / 5e9:.3g}"
    # Each rank has an eighth of 14 bytes per parameter; the page-locked blocks of a save on a GPU
    # are larger by up to 1/32.
    host = make_plan(run(LARGE), 8, cuda=False).save_memory
    assert host == 14 * timed.total_parameters // 8 and timed.save_memory == host + host // 32
    assert (
        f"  written in {seconds} s at 5 GB/s while training waits, from up to"
        f" {timed.save_memory / 2**30:.2f} GiB of" in render(timed)
    )


def test_each_switch_takes_exactly_its_own_parameters_away() -> None:
    def names(fem: FemConfig) -> set[str]:
        shapes = parameter_shapes(ModelConfig(vocab_size=100, num_layers=1, fem=fem))
        return {name.removeprefix("decoder.layers.0.mixer.") for name in shapes}

    everything = names(FemConfig())
    assert everything - names(FemConfig(conditioner=False)) == {
        "tdc.norm.weight",
        "tdc.in_proj.weight",
        "tdc.state_norm.weight",
        "tdc.out_proj.weight",
    }
    assert (
        everything - names(FemConfig(temperature=False))
        == {"beta"}
        == everything - names(FemConfig(free_energy=False))
    )
    assert everything == names(FemConfig(gate=False))
    untied, tied = (
        set(parameter_shapes(ModelConfig(vocab_size=100, num_layers=1, tie_embeddings=tie)))
        for tie in (False, True)
    )
    assert untied - tied == {"output_layer.weight"}


def test_budget_i_costs_what_the_transformer_costs_but_for_the_conditioner() -> None:
    model = run(LARGE).model
    fem, transformer = (
        forward_flops(each, 4096) for each in (model, run("transformer_1.3b_100bt.yaml").model)
    )
    conditioner = fem.pop("conditioner")
    assert fem == transformer
    assert conditioner == 2 * model.num_layers * (3 * 32 * 2048 + 32 * 3.5 * 2048)


@pytest.mark.parametrize(
    "words",
    [
        ["train.recompute=full"],
        ["parallel.pipeline_model_parallel_size=2"],
        ["engine.name=deepspeed"],
    ],
)
def test_offloaded_activations_move_to_the_host(words: list[str]) -> None:
    """The bytes are exact, except for those of a layer in its backward pass; on a CPU, whose memory
    is the host's, no byte moves.
    """
    for cuda in (True, False):
        kept, sent = (
            make_plan(small(*words, *more), 2, cuda=cuda)
            for more in ([], ["train.offload_activations=true"])
        )
        for before, after in zip(kept.memory, sent.memory, strict=True):
            assert before.activations == pytest.approx(
                after.activations + after.host - before.host, abs=1
            )
            assert before.workspace <= after.workspace and (after.host > before.host) == cuda
        assert ("activations on the host" in render(sent)) == cuda


def test_the_norms_of_tensors_take_a_copy_of_what_a_rank_updates() -> None:
    looked = ["log.diagnostics=[tensors]"]
    for words, updated in (
        ([], 1 / 2),
        (["parallel.use_distributed_optimizer=false"], 1),
        (["engine.name=deepspeed"], 1 / 2),
    ):
        plan, never = (
            make_plan(small(*words, *looked, *more), 2)
            for more in ([], ["log.diagnostics_interval=0"])
        )
        size = f"{gib(round(4 * plan.total_parameters * updated))} more"
        assert size in render(plan) and "log.diagnostics" not in render(never)
        assert plan.peak_memory >= never.peak_memory


# --- sequences over ranks -------------------------------------------------------------------------


def test_the_page_reports_what_ranks_send() -> None:
    """The table of docs/long_context.md: KiB per token and layer, both directions, by the formula
    that other tests compare with real collectives.
    """
    text = (ROOT / "docs" / "long_context.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if re.fullmatch(r"\|( [^|]+ \|)( [\d., ]*\|){4}", line)
    ]
    fields = [
        "data.seq_length=32768",
        "train.micro_batch_size=1",
        "train.recompute=none",
        "parallel.context_parallel_size=4",
    ]
    for names, *report in rows:
        for kind, cell in zip((None, "all_to_all", "all_gather", "ring"), report, strict=True):
            numbers = cell.split(", ") if cell else []
            for place, name in enumerate(re.findall(r"`(\w+)`", names)[: 2 if numbers else 0]):
                config = load_run(
                    CONFIGS / "transformer_1.3b_100bt.yaml",
                    [
                        f"model.mixer={name}",
                        *fields,
                        *([f"parallel.context_parallel_kind={kind}"] if kind else []),
                    ],
                )
                training = placed(config).training
                sent = (
                    config.model.blocks()[0]
                    .mixer.exchanged_bytes(training, split_kinds_of(config)[name])
                    .sent(training)
                    / 8192
                    / 1024
                )
                number = numbers[min(place, len(numbers) - 1)]
                assert f"{sent:.{len(number.partition('.')[2])}f}" == number, (name, kind)
    assert len(rows) == 12


def test_what_does_not_fit_reports_the_smallest_cut_that_does() -> None:
    """131,072 tokens: by separate plans, an eighth fits an H100 and a quarter does not."""
    fields = [
        "data.seq_length=131072",
        "train.micro_batch_size=1",
        "train.global_batch_size=64",
        "train.recompute=none",
        "log.device=h100",
    ]
    plans = [
        make_plan(load_run(CONFIGS / LARGE, [*fields, f"parallel.context_parallel_size={n}"]), 8)
        for n in (1, 4, 8)
    ]
    output = [memory_excess(plan) for plan in plans]
    assert (
        output[2] is None
        and output[0]
        and output[0].endswith("the smallest parallel.context_parallel_size that fits: 8")
    )
    assert output[1] and output[1].endswith("fits: 8")
