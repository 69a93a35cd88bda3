"""Tests that the tools that compute a run's cost agree where they answer the same question
(docs/costs.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fem_common.costs import bytes_sent
from fem_megatron.config import ModelConfig
from fem_megatron.megatron import upstream
from fem_megatron.meta.trace import Launch
from pretrain.config import RunConfig, load_run
from pretrain.plan.context_parallel import exchanged_bytes
from pretrain.plan.memory import layer_activations
from pretrain.plan.run_plan import Plan, make_plan
from pretrain.rehearsal.record import FORWARD, Collective
from pretrain.rehearsal.steps import rehearse
from pretrain.validate import prepare
from tests.ranks import answer
from tools.bench.traffic.paper import ROOFS, step_of
from tools.layout.step import Machine, step_time, tensor_parallel_sums

MODELS = ("transformer", "fem_softmax", "fem_lrnn_decay")
LAYERS, WIDTH, TOKENS = 2, 256, 2 * 256  # tokens of a micro-batch
SIZES = [
    f"model.hidden_size={WIDTH}",
    f"model.num_layers={LAYERS}",
    "model.num_attention_heads=4",
    "model.vocab_size=512",
    "model.tie_embeddings=false",
    "data.train.0.prefix=none",
    "data.valid=[]",
    "data.test=[]",
    "data.seq_length=256",
    "train.micro_batch_size=2",
    "train.precision=bf16",
]


def config_of(mixer: str, ranks: int, *overrides: str) -> RunConfig:
    words = [*SIZES, f"model.mixer={mixer}", f"parallel.world_size={ranks}", *overrides]
    return prepare(load_run("configs/run/demo.yaml", words), None, plan_only=True).config


def launched(launches: list[Launch]) -> list[tuple[str, float, float]]:
    """Return the launches without the trainer's accumulation of gradients."""
    return [(each.name, each.bytes, each.flops) for each in launches if each.name != "add_"]


def times_in(own: list[Any], all_: list[Any]) -> int:
    """Return how often one list is a contiguous part of the other."""
    starts = range(len(all_) - len(own) + 1)
    return sum(all_[start : start + len(own)] == own for start in starts)


def phi_flops(model: ModelConfig) -> float:
    """Return the FLOPs per token of FEM's phi in one layer; 0 for other mixers."""
    return model.blocks()[0].mixer.map_flops.get("tdc.out_proj.weight", 0.0)


def one_rank(mixer: str) -> dict[str, Any]:
    """Return the answers about a step of one process: plan, rehearsal, traced layer."""
    upstream.import_megatron()
    config = config_of(mixer, 1, "train.global_batch_size=2")
    rehearsal = rehearse(config, 1, "h100")
    (rank,), plan = rehearsal.ranks, rehearsal.plan
    step = step_of(mixer, config.model, config.data.seq_length, config.train.micro_batch_size)
    kept = [each for each in rank.peak.held if each.phase == FORWARD and each.part == "layer 2"]
    return {
        "plan": plan,
        "memory": rank.peak.memory,
        "parameters": step.parameters,
        "rehearsed FLOPs": rank.trace.flops(backward=False),
        "traced FLOPs": sum(
            part.count * part.trace.flops(backward=False) for part in (*step.layers, step.ends)
        ),
        "tiles": sum(part.count * part.tiles for part in step.layers),
        "phi": LAYERS * TOKENS * phi_flops(config.model),
        "layers": [
            times_in(launched(step.first.passes(which)), launched(rank.trace.passes(which)))
            for which in (False, True)
        ],
        "activations": (sum(each.bytes for each in kept), step.first.activations),
    }


@pytest.mark.parametrize("mixer", MODELS)
def test_plan_rehearsal_and_trace_agree_on_one_rank(tmp_path: Path, mixer: str) -> None:
    found = answer(1, one_rank, mixer, output=tmp_path / "out")
    plan, memory = found["plan"], found["memory"]
    (stage,) = plan.memory
    assert plan.total_parameters == stage.parameters == found["parameters"]
    # Megatron pads the weights in its buffers: at most 128 elements at these sizes. Adam also keeps
    # one fp32 step number for each tensor of its groups, which are fewer than 64.
    padding = 128
    assert 0 <= memory.weights - stage.weights <= 2 * padding
    assert 0 <= memory.gradients - stage.gradients <= 4 * padding
    assert 0 <= memory.optimizer - stage.optimizer <= 4 * 64
    # Equal to the last FLOP. The plan also counts products within Triton kernels, which neither
    # sees: FEM's phi in the projection, and the reads of a scan, the kernels of kind `tiles`.
    planned = TOKENS * sum(plan.forward_flops.values())
    assert found["rehearsed FLOPs"] == found["traced FLOPs"]
    assert planned == found["rehearsed FLOPs"] + found["phi"] + found["tiles"]
    reads = TOKENS * plan.forward_flops["attention"]
    assert found["tiles"] == (reads if mixer == "fem_lrnn_decay" else 0)
    # A rehearsed step has each traced layer's launches, with equal bytes and FLOPs.
    assert found["layers"] == [LAYERS, LAYERS]
    # A rehearsal also counts scalars, which a trace of one layer does not: less than 128 bytes.
    rehearsed, traced = found["activations"]
    assert 0 <= rehearsed - traced < 128
    (block, _), *_ = plan.config.model.kinds
    estimate = TOKENS * sum(layer_activations(plan, block).values())
    # The plan's table, exact for attention; for other mixers its documented tolerance.
    assert estimate == pytest.approx(traced, rel=0 if mixer == "transformer" else 0.15)


SPLIT = {
    "TP2": ["parallel.tensor_model_parallel_size=2"],
    "TP2 + SP": ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
    "CP2": ["parallel.context_parallel_size=2"],
    "DP2": [],
}


def two_ranks(mixer: str) -> dict[str, tuple[Plan, list[Collective]]]:
    """Return layout -> plan, and the rehearsed collectives between two ranks."""
    upstream.import_megatron()
    found = {}
    for name, words in SPLIT.items():
        sequences = 4 if name == "DP2" else 2
        config = config_of(mixer, 2, f"train.global_batch_size={sequences}", *words)
        rehearsal = rehearse(config, 2, "h100")
        calls = rehearsal.ranks[0].trace.collectives
        found[name] = rehearsal.plan, [call for call in calls if len(call.group) > 1]
    return found


@pytest.mark.parametrize(
    "mixer", ["fem_softmax", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[::2])]
)
def test_plan_layout_and_rehearsal_agree_on_what_ranks_send(tmp_path: Path, mixer: str) -> None:
    found = answer(1, two_ranks, mixer, output=tmp_path / "out")
    for name, ends in (("TP2", 2.0), ("TP2 + SP", 2.5)):
        plan, calls = found[name]
        parts = 2 if "SP" in name else 1  # an all-reduce is a reduce-scatter and an all-gather
        states = [call for call in calls if call.bytes == 2 * TOKENS * WIDTH]
        # The model of a step leaves out the all-reduces of the embedding and of the output layer,
        # which gathers its input once more under sequence parallelism.
        assert len(states) / parts == tensor_parallel_sums(plan) + ends
        kinds = {"reduce-scatter", "all-gather"} if "SP" in name else {"all-reduce"}
        assert {call.kind for call in states} == kinds
        each = bytes_sent("all-reduce", 2 * TOKENS * WIDTH, 2)
        assert sum(call.sent for call in states) == each * len(states) / parts
    # Weights and gradients, up to the padding of the buffers; scalars are all-reduced.
    plan, calls = found["DP2"]
    parameters = plan.total_parameters
    for kind, element in (("reduce-scatter", 4), ("all-gather", 2)):
        sent = sum(call.sent for call in calls if call.kind == kind)
        assert 0 <= sent - bytes_sent(kind, element * parameters, 2) <= element * 128 / 2
    # Besides these two, which context-parallel ranks call as well, all bytes are planned.
    plan, others = found["CP2"]
    large = {call.sent for call in calls if call.kind in ("reduce-scatter", "all-gather")}
    exchanges = [call for call in others if call.kind != "all-reduce" and call.sent not in large]
    assert sum(call.sent for call in exchanges) == exchanged_bytes(plan)


@pytest.mark.parametrize("mixer", MODELS)
def test_layout_and_traffic_agree_on_the_time_of_a_step(mixer: str) -> None:
    """Two layers at the 1.3B widths, for which machines.yaml has its traffic."""
    words = [
        f"model.mixer={mixer}",
        f"model.num_layers={LAYERS}",
        "model.vocab_size=32000",
        "train.micro_batch_size=2",
        "train.global_batch_size=2",
    ]
    config = load_run("configs/run/transformer_1.3b_100bt.yaml", words)
    layout = step_time(make_plan(config, 1), Machine.of("h100", "ib-400")).seconds
    step = step_of(mixer, config.model, config.data.seq_length, config.train.micro_batch_size)
    traffic, ends = step.time(ROOFS[0]).seconds, step.ends.seconds(ROOFS[0])
    assert layout["gaps"] == pytest.approx(traffic["gaps"], rel=1e-12)
    if mixer != "fem_lrnn_decay":  # its scan is `tiles`, not a kernel of an attention engine
        assert layout["attention"] == pytest.approx(traffic["attention"], rel=1e-9)
    # The rate of a product of width 2048 is 619.6 TFLOP/s in one table and 620 in the other. In the
    # model of the traffic, memory bounds the narrow products of FEM's conditioner.
    products = traffic["GEMM"] + ends["GEMM"]
    tolerance = 0.001 if mixer == "transformer" else 0.015
    assert layout["products"] == pytest.approx(products, rel=tolerance)
    # Logits are read and written five times in fp32 by the trainer's fused loss; the page's KiB are
    # whole numbers, and the bandwidths are 2.65 and 2.6465 TB/s.
    logits = 5 * 4 * 32000 * 2 * 4096 / 2.65e12
    assert layout["pointwise"] - logits == pytest.approx(traffic["pointwise"], rel=0.005)
