"""Tests of train.cuda_graphs on a CPU: layers that may be captured, memory that a replay
overwrites, and host reads in a capture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fem_common.errors import ConfigError
from fem_megatron.catalogue import MIXERS, block
from fem_megatron.config import ModelConfig
from fem_megatron.diagnostics import observing
from fem_megatron.megatron import platform, upstream
from fem_megatron.meta import fake_machine
from fem_megatron.meta.trace import OnFakeGpu, Trace
from fem_megatron.mixers.fem.shape import FemConfig
from fem_megatron.parallel import OneProcess
from fem_megatron.shape import located
from fem_megatron.state import Context
from pretrain.engines.building import destroy_model_parallel, initialize_model_parallel
from pretrain.rehearsal.steps import rehearse
from pretrain.run import make_engine
from pretrain.schedule import Schedule
from tests.pretrain.jobs import OVERLAP, SP, TP2, micro_batches
from tests.pretrain.test_rehearsal import ON_A_GPU, STEADY, config_of
from tests.ranks import answer

ON = "train.cuda_graphs=true"
OURS = [name for name in MIXERS if not name.startswith("fla.")]
CAPTURED = [name for name in OURS if block(ModelConfig(), name, 0).mixer.uncapturable() is None]
SOME = ["fem_softmax", "hyperset", "cem", "deltanet"]  # the other mixers run in the nightly tests


def pattern(names: list[str]) -> list[str]:
    return [
        f"model.pattern=[{','.join(names)}]",
        f"model.num_layers={len(names)}",
        "model.tie_embeddings=false",
    ]


@pytest.mark.parametrize("free_energy", [True, False])
@pytest.mark.parametrize("name", OURS)
def test_a_layer_whose_host_decides_in_each_call_is_refused(name: str, free_energy: bool) -> None:
    """A graph would fix one form of its read. Other refusals concern libraries, which a CPU does
    not show.
    """
    shape = block(ModelConfig(fem=FemConfig(free_energy=free_energy)), name, 0).mixer
    layer = located(shape.layer_class)(shape, OneProcess())
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    layer(torch.randn(8, 1, shape.stream), Context())
    decides = any(getattr(part, "ranges", None) for part in layer.modules())
    assert decides == ("form of its read" in (shape.uncapturable() or ""))


class Graph(torch.autograd.Function):
    """A replay: inputs are copied to the addresses of the capture, and outputs are overwritten by
    the next replay.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Tensor],
        static: tuple[tuple[Tensor, ...], Tensor, list[Tensor]],
        *given: Tensor,
    ) -> Tensor:
        inputs, out, _ = ctx.static = static
        for place, value in zip(inputs, given, strict=True):
            if place.data_ptr() != value.data_ptr():
                place.detach().copy_(value)
        with torch.enable_grad():
            ctx.made = run(*inputs)
        return out.copy_(ctx.made.detach()).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, _, gradients = ctx.static
        for place, value in zip(
            gradients, torch.autograd.grad(ctx.made, inputs, grads), strict=True
        ):
            place.copy_(value)
        return None, None, *(place.detach() for place in gradients)


def graphed(
    runs: Sequence[Callable[..., Tensor]], samples: Sequence[tuple[Tensor, ...]]
) -> list[Callable[..., Tensor]]:
    """Emulate ``torch.cuda.make_graphed_callables`` on a CPU: its memory, with the Python code run
    again for each replay.
    """

    def replay(run: Callable[..., Tensor], given: tuple[Tensor, ...]) -> Callable[..., Tensor]:
        out = run(*given)
        torch.autograd.grad(out, given, torch.ones_like(out))
        static = (
            given,
            torch.full_like(out, torch.nan),
            [torch.full_like(each, torch.nan) for each in given],
        )

        def call(*new: Tensor) -> Tensor:
            calls.append(run)
            made: Tensor = Graph.apply(run, static, *new)
            return made

        return call

    calls: list[Any] = graphed.calls  # type: ignore[attr-defined]
    return [replay(run, given) for run, given in zip(runs, samples, strict=True)]


def trained(settings: list[str]) -> tuple[list[Any], list[Tensor], list[int]]:
    """Run three steps of two micro-batches, an evaluation after the first, diagnostics in the last;
    return outputs, weights, replay counts.
    """
    graphed.calls, report, replays = list[Any](), list[Any](), list[int]()  # type: ignore[attr-defined]
    config = config_of(2, ["train.micro_batch_size=2", "train.global_batch_size=4", *settings])
    length = config.data.seq_length
    initialize_model_parallel(config)
    with (
        mock.patch.object(torch.cuda, "make_graphed_callables", graphed),
        mock.patch.object(platform, "lacks_graphs", return_value=None),
    ):
        engine = make_engine(config, Schedule.of(config))
        layers = {layer.layer_number: layer for layer in engine.models[0].decoder.layers}
        for step in range(3):
            with observing(layers if step == 2 else {}) as seen:
                result = engine.train_step(micro_batches(length), 4 * (step + 1))
            report.append((result.loss, result.grad_norm))
            replays.append(len(graphed.calls))  # type: ignore[attr-defined]
            if step == 0:
                report.append(engine.evaluate(micro_batches(length), 1))
    weights = [weight.detach().clone() for weight in engine.models[0].parameters()]
    engine.close()
    destroy_model_parallel()
    return [*report, seen], weights, replays


def compared(settings: list[str]) -> list[int]:
    upstream.import_megatron()
    platform.initialize_distributed()
    plain, on = trained(settings), trained([*settings, ON])
    assert on[0] == plain[0] and len(on[0][-1]) > 4
    assert (
        all(torch.equal(one, other) for one, other in zip(plain[1], on[1], strict=True))
        and not plain[2][-1]
    )
    return on[2]


EIGHT = ["model.hidden_size=64", "train.fp8=delayed"]


NIGHT = pytest.mark.slow


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (SOME, [*TP2, *SP]),
        (["fem_softmax", "transformer"], [*TP2, *EIGHT]),
        (SOME[:2], [*OVERLAP, "train.global_batch_size=8"]),
        pytest.param(CAPTURED, [*TP2, *SP], marks=NIGHT),
    ],
    ids=["TP2 + SP", "TP2, fp8", "DP2, overlapped", "all"],
)
def test_replays_train_as_the_layers_do_to_the_bit(
    names: list[str], settings: list[str], tmp_path: Path
) -> None:
    """Code that reads a replay's results after the next one, or accumulates a replay's gradients in
    place, would give other numbers.
    """
    replays = answer(2, compared, [*pattern(names), *settings], output=tmp_path / "said")
    # Replays exclude the steps of an evaluation and the observed steps.
    assert replays == [2 * len(names), 4 * len(names), 4 * len(names)]


def test_a_machine_without_a_gpu_is_reported() -> None:
    config = config_of(1, [ON])
    with pytest.raises(
        ConfigError,
        match=(
            "train.cuda_graphs = true needs a GPU, and this machine has none; set"
            " train.cuda_graphs=false"
        ),
    ):
        make_engine(config, Schedule.of(config))


def on_paper(names: list[str]) -> tuple[set[str], float]:
    upstream.import_megatron()
    report = rehearse(config_of(2, [*TP2, *SP, *pattern(names), ON], ON_A_GPU), 2, "h100")
    (rank,) = report.ranks
    reads = {re.sub(r":\d+", "", read) for read in rank.trace.reads}
    return reads, report.plan.memory[0].total / rank.peak.bytes


@pytest.mark.parametrize(
    "names", [pytest.param(SOME[:2], id="some"), pytest.param(CAPTURED, id="all", marks=NIGHT)]
)
def test_an_h100_would_capture_every_layer_in_the_memory_that_is_planned(
    names: list[str], tmp_path: Path
) -> None:
    """Simulated on meta tensors: no host read occurs in a capture, and memory agrees with the plan
    within the layers' own tolerance (15%).
    """
    reads, ratio = answer(1, on_paper, names, output=tmp_path / "said")
    assert reads == STEADY and ratio == pytest.approx(1, abs=0.15)


def test_a_host_read_within_a_capture_is_named() -> None:
    x = torch.empty(4, 4, device="meta", requires_grad=True)
    trace = Trace()
    with (
        OnFakeGpu(trace),
        pytest.raises(
            RuntimeError,
            match=r"cannot contain a host read: .*test_graphs.py:\d+ <lambda> __float__$",
        ),
    ):
        fake_machine.graphed(trace, [lambda t: t * float(t.sum())], [(x,)])
