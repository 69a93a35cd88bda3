"""Tests of the bytes that layers move, counted without a GPU: equal to manual counts, and no more
than a layer needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from fem_common.config import load
from fem_megatron.catalogue import MIXERS
from fem_megatron.config import ModelConfig
from fem_megatron.meta.trace import ATTENTION, POINTWISE, PRODUCT, Trace, run_on_fake_gpu
from fem_megatron.parallel import OneProcess
from kernels import machine
from kernels.conditioner_features import conditioner_features
from kernels.implementations import Op
from tests.test_house import ROOT
from tools.bench.traffic import __main__ as command
from tools.bench.traffic import tables
from tools.bench.traffic.paper import ROOFS, layer_trace, step_of

TOKENS, WIDTH = 256, 64
LARGE = load(ModelConfig, ROOT / "configs" / "model" / "transformer_1.3b.yaml")
PAPER_MIXERS = [
    name for name, mixer in MIXERS.items() if mixer.package is None and name != "mha2nd"
]


def traced(
    forward: Callable[[Tensor], Tensor], *shape: int, dtype: torch.dtype = torch.bfloat16
) -> Trace:
    def make(_: OneProcess) -> tuple[Callable[[], Tensor], list[Tensor]]:
        x = torch.empty(shape, dtype=dtype, requires_grad=True)
        return lambda: forward(x), []

    return run_on_fake_gpu(make)


def layer(name: str, model: ModelConfig = LARGE, tokens: int = TOKENS) -> Trace:
    model = replace(model, mixer=name)
    return layer_trace(model.blocks()[0], model.stream_size, tokens, 1)


def counted(trace: Trace, *, backward: bool) -> dict[str, float]:
    """Return passes over [TOKENS, WIDTH] in bfloat16, by kernel."""
    names = {each.name for each in trace.passes(backward)}
    once = 2 * TOKENS * WIDTH
    return {name: trace.traffic(backward=backward, of=name) / once for name in names}


def test_operations_of_torch_are_counted_as_often_as_they_pass_over_memory() -> None:
    trace = traced(lambda x: (x * x.sigmoid()).view(-1).float(), TOKENS, WIDTH)
    # x and its sigmoid are read, each with a result written; the view is free; float32 is twice as
    # wide. Backward: two products, and their sum.
    assert counted(trace, backward=False) == {"sigmoid": 2, "mul": 3, "_to_copy": 3}
    assert counted(trace, backward=True) == {
        "_to_copy": 3,
        "mul": 6,
        "sigmoid_backward": 3,
        "add": 3,
    }
    assert trace.activations == 2 * 2 * TOKENS * WIDTH


def test_a_slice_of_a_packed_tensor_costs_its_gradient_the_whole_width() -> None:
    trace = traced(lambda x: x[:, : WIDTH // 2].relu() + x[:, WIDTH // 2 :], TOKENS, WIDTH)
    assert counted(trace, backward=True) == {
        "threshold_backward": 1.5,
        "slice_backward": 2,
        "fill": 2,
        "add": 3,
    }
    halves = traced(lambda x: torch.add(*x.split(WIDTH // 2, dim=1)), TOKENS, WIDTH)
    # The gradient of one half equals that of the other.
    assert counted(halves, backward=True) == {"cat": 1.5}


def test_a_launch_of_a_triton_kernel_moves_what_it_is_given_once() -> None:
    weight = torch.empty(WIDTH, device="meta", requires_grad=True)
    state = torch.empty(TOKENS, WIDTH, device="meta", requires_grad=True)
    trace = traced(lambda x: conditioner_features(x, state, weight, 1e-5), TOKENS, WIDTH)
    assert trace.chosen == {"conditioner_features": "triton"}
    (launch,) = (each for each in trace.launches if not each.backward)
    numbers = 2 * TOKENS  # numbers per row that are kept: a scale of r, and two of LayerNorm
    assert launch.kind == POINTWISE and launch.name == "conditioner_features: forward_kernel"
    assert launch.bytes == pytest.approx(
        TOKENS * WIDTH * (2 + 4 + 2) + 4 * WIDTH, abs=4 * 3 * numbers
    )


def test_choices_are_an_h100s_and_all_is_as_before_afterwards() -> None:
    own = KernelInterface.__getitem__, Op.choose, "fla" in sys.modules
    trace = layer("fem_softmax")
    ours = dict.fromkeys(
        ("residual_norm", "time_decay_scan", "conditioner_features", "fem_projection"), "triton"
    )
    assert trace.chosen == {"fem_attention": "cudnn", **ours}
    # An installed flash-attn is not used.
    for turning, op in (("transformer", "fem_projection"), ("differential", "rotary")):
        trace = layer(turning)
        assert trace.chosen[op] == "triton"
        assert [
            launch.backward for launch in trace.launches if launch.name.startswith(f"{op}: ")
        ] == [False, True]
    assert layer("gated_deltanet").chosen == {"gated_delta_rule": "fla", "residual_norm": "triton"}
    assert (KernelInterface.__getitem__, Op.choose, "fla" in sys.modules) == own
    assert machine.architecture(machine.FAKE_GPU) == 90 and machine.device() != machine.FAKE_GPU


@pytest.mark.parametrize("name", ["transformer", "fem_softmax", "differential"])
def test_matrix_products_are_those_of_the_plan(name: str) -> None:
    """The plan's own count gives the same number by another method, up to rounding. In the backward
    pass a GEMM counts as two, attention as 2.5.

    FEM's phi is computed inside a kernel; its gradients are GEMMs.
    """
    trace = layer(name)
    tokens = float(TOKENS)
    block = replace(LARGE, mixer=name).blocks()[0]
    inside = block.mixer.map_flops.get("tdc.out_proj.weight", 0.0) * tokens
    planned = sum(block.flops(TOKENS).values()) * tokens - inside
    flops = {(kind, backward): 0.0 for kind in (PRODUCT, ATTENTION) for backward in (False, True)}
    for launch in trace.launches:
        if launch.flops:
            flops[launch.kind, launch.backward] += launch.flops
    assert flops[PRODUCT, False] + flops[ATTENTION, False] == pytest.approx(planned, rel=1e-12)
    assert flops[PRODUCT, True] == 2 * (flops[PRODUCT, False] + inside)
    assert flops[ATTENTION, True] == 2.5 * flops[ATTENTION, False]


@pytest.mark.parametrize("name", PAPER_MIXERS)
def test_no_gradient_of_a_slice_is_filled_up_with_zeros(name: str) -> None:
    """For tensors as wide as the stream; `split` and `unbind` concatenate the parts once. No weight
    is as large at this number of tokens.
    """
    tokens = 8192
    trace = layer(name, tokens=tokens)
    filled = [
        launch
        for launch in trace.launches
        if launch.name.endswith(("slice_backward", "select_backward"))
    ]
    wide = [launch for launch in filled if launch.bytes >= 2 * tokens * LARGE.hidden_size]
    assert wide == []
    # CUDA graphs can capture it: the host waits for no number, and no size depends on one, because
    # these tensors have no values.
    assert trace.reads == []


# Limit as a multiple of the Transformer's bytes, now 1.169; of the bytes of pointwise operations,
# 1.217: the gradient of the conditioner's product is written and read.
MOST = 1.172
READ = (
    "fem_attention: range",
    "fem_attention: constants",
    "fem_attention: stream",
    "fem_attention: epilogue",
)


def test_the_fem_block_stays_fused() -> None:
    """The bytes of FEM-SM's layer, without the prep and epilogue of its read, compared with the
    Transformer's layer.
    """
    ours, theirs = (layer(name, tokens=4096) for name in ("fem_softmax", "transformer"))
    own = sum(ours.traffic(POINTWISE, of=name) for name in READ)
    assert 0.05 < own / theirs.traffic(POINTWISE) < 0.2
    assert (ours.traffic() - own) / theirs.traffic() <= MOST
    assert (ours.traffic(POINTWISE) - own) / theirs.traffic(POINTWISE) <= 1.22


STEPS = {
    "fem_softmax": 1.071,
    "fem_gla": 1.0,
    "fem_linear": 1.0,
    "hyperset": 1.09,
    "yuriiformer": 1.13,
    "mha2nd1st": 1.39,
    "cem": 1.83,
}
"""Mixer -> limit of its modelled step on an H100, relative to the Transformer's."""


@cache
def seconds(name: str) -> float:
    """Return the modelled time of a step at the 1.3B widths."""
    return step_of(name, replace(LARGE, mixer=name), 4096, 2).time(ROOFS[0]).total


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_at_most(name: str) -> None:
    assert seconds(name) / seconds("transformer") <= STEPS[name]


def test_a_step_is_its_parts_and_more_on_a_slower_memory() -> None:
    step = step_of("one", replace(LARGE, num_layers=2, vocab_size=512), 4096, 1)
    assert [part.count for part in step.layers] == [2]
    h100, h200 = (step.time(roof).seconds for roof in ROOFS)
    assert h100["pointwise"] / h200["pointwise"] == pytest.approx(4.8 / 3.35)
    assert h100["attention"] == h200["attention"] > 0 and h100["tiles"] == 0
    assert step.time(ROOFS[0]).total == pytest.approx(sum(h100.values()))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "traffic.json"
    sizes = ["--tokens", "128", "--batch", "1", "--kernels", "--json", str(out)]
    assert command.main(["--model", "fem_sm_demo", "--against", "transformer_demo", *sizes]) == 0
    found, output = json.loads(out.read_text()), capsys.readouterr().out
    assert [each["name"] for each in found["models"]] == ["fem_sm_demo", "transformer_demo"]
    assert set(found["ratio"]) == {roof.name for roof in ROOFS}
    assert "fem_attention: stream_kernel" in output
    total = sum(found["models"][0]["forward"][kind] for kind in (POINTWISE, PRODUCT, ATTENTION))
    assert total == pytest.approx(
        sum(each["bytes"] for each in found["models"][0]["kernels"] if each["pass"] == "forward")
    )


@pytest.mark.parametrize(
    "words", [["--model", "fem_sm_1.3"], ["--against", "transformer_1.3b"], ["--tokens", "0"]]
)
def test_a_mistake_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_the_page_is_what_is_counted_now() -> None:
    assert command.PAGE.read_text(encoding="utf-8") == tables.page(), (
        "python -m tools.bench.traffic --write"
    )
