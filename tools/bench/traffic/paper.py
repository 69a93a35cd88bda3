"""Modelled training step: times from the counts of `fem_megatron.meta.trace` and a roofline model.

The times are modelled, not measured.

A kernel takes its bytes divided by the bandwidth, or its matrix products divided by their rate,
whichever is longer. The gap to the next kernel is added. A step consists of the layers, the
operations before and after them (the "ends"), and the trainer's own work on gradients and weights.
The step is one micro-batch of the Megatron engine on one GPU, in bfloat16 with fp32 gradients, main
weights and moments. `tools.bench.gpu_suite` times a smaller update: AdamW on bfloat16 weights, 14
bytes per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fem_common.costs import StepTime
from fem_megatron.block import Block
from fem_megatron.config import ModelConfig
from fem_megatron.meta.trace import (
    ATTENTION,
    KINDS,
    META,
    PRODUCT,
    TILES,
    WIDE,
    Trace,
    run_on_fake_gpu,
)
from fem_megatron.parallel import OneProcess
from fem_megatron.shape import BlockShape
from fem_megatron.state import Context
from pretrain.plan.run_plan import count_by_component
from tools.bench.whole_model import LanguageModel


@dataclass(frozen=True)
class Roof:
    """Rates that a GPU reaches.

    bandwidth: bytes/s of memory.
    products, wide: FLOP/s of matrix products in bfloat16 and float32.
    attention, tiles: (forward, backward) FLOP/s of attention and of Triton kernels with products.
    gap: seconds between two kernels.
    """

    name: str
    bandwidth: float
    products: float = 620e12
    wide: float = 50e12
    attention: tuple[float, float] = (518e12, 450e12)
    tiles: tuple[float, float] = (353e12, 250e12)
    gap: float = 2e-6


PASSES = ("forward", "backward")
ROOFS = (Roof("H100", 0.79 * 3.35e12), Roof("H200", 0.79 * 4.8e12))
OPTIMIZER_BYTES = {  # per parameter
    "zeroing the fp32 gradient": 4,
    "adding the bfloat16 one to it": 2 + 4 + 4,
    "dividing it by the step's tokens": 4 + 4,
    "its norm": 4,
    "fused AdamW (reads weight, gradient and two moments, writes all but the gradient)": 4 * 4
    + 3 * 4,
    "copying the weight to bfloat16": 4 + 2,
}
SOURCES = {
    "a kernel": "the bytes that it reads and writes, once, over the bandwidth, or its products "
    "over their rate, whichever is longer",
    "bandwidth": "3.35 TB/s (H100 SXM) and 4.8 TB/s (H200), data sheets; pointwise kernels are "
    "assumed to reach 79%",
    "GEMM": "620 TFLOP/s of the data sheets' 989 dense bfloat16, 50 of 67 in float32: assumed",
    "attention forward": "518 TFLOP/s: cuDNN, causal, head 128, 4k, FlashAttention-3's paper "
    "(H100)",
    "attention backward": "450 TFLOP/s: assumed, below cuDNN's 499 in that paper, which are "
    "without a mask; 2.5 times the forward's products",
    "our Triton kernels with products": "353 TFLOP/s forward: Triton's attention in the same "
    "paper; 250 backward: assumed",
    "delta rule": "flash-linear-attention's kernels, counted as one per pass, which is too few",
    "RoPE": "FEM's and the Transformer's within `fem_projection`, which splits the projection; "
    "others': one launch for queries and keys (`kernels.rotary`); flash-attn's is not used",
    "gap between kernels": "2 us: assumed",
    "optimizer": (
        f"{sum(OPTIMIZER_BYTES.values())} bytes a parameter: "
        + ", ".join(f"{size} for {what}" for what, size in OPTIMIZER_BYTES.items())
        + "; without the 16 of clipping, in steps whose norm is above optimizer.clip_grad"
    ),
}
# Matrix FLOPs of a backward pass that recomputes the forward pass, relative to the forward pass.
BACKWARD = 2.5


@dataclass(frozen=True)
class Part:
    """Layers of one kind, or the operations before and after the layers.

    count: number of these layers in the model.
    trace: recorded kernel launches of one layer.
    tiles: forward FLOPs of the Triton kernels that contain matrix products.
    """

    count: int
    trace: Trace
    tiles: float = 0.0

    def seconds(self, roof: Roof) -> dict[str, float]:
        """Return the seconds of all ``count`` layers by category."""
        spent = {**dict.fromkeys(KINDS, 0.0), "gaps": roof.gap * len(self.trace.launches)}
        for launch in self.trace.launches:
            rate = {
                PRODUCT: roof.products,
                WIDE: roof.wide,
                ATTENTION: roof.attention[launch.backward],
            }.get(launch.kind, 1.0)
            if launch.kind != TILES:
                spent[launch.kind] += max(launch.bytes / roof.bandwidth, launch.flops / rate)
        for backward, flops in ((False, self.tiles), (True, BACKWARD * self.tiles)):
            spent[TILES] += max(
                self.trace.traffic(TILES, backward=backward) / roof.bandwidth,
                flops / roof.tiles[backward],
            )
        return {name: self.count * time for name, time in spent.items()}


@dataclass(frozen=True)
class Step:
    """Modelled training step of a model with ``batch`` sequences of ``tokens`` tokens.

    layers: kinds of layers of the model.
    ends: operations before and after the layers.
    """

    name: str
    model: ModelConfig
    tokens: int
    batch: int
    layers: tuple[Part, ...]
    ends: Part
    parameters: int

    def time(self, roof: Roof) -> StepTime:
        """Return the time of the step by kinds of kernels, "gaps", "ends" and "optimizer"."""
        seconds: dict[str, float] = {}
        for part in self.layers:
            for name, time in part.seconds(roof).items():
                seconds[name] = seconds.get(name, 0.0) + time
        update = sum(OPTIMIZER_BYTES.values()) * self.parameters / roof.bandwidth
        ends = sum(self.ends.seconds(roof).values())
        return StepTime(seconds | {"ends": ends, "optimizer": update})

    @property
    def first(self) -> Trace:
        """Trace of the model's first layer."""
        return self.layers[0].trace

    def per_token(self, of: Callable[[Trace], float]) -> float:
        """Return the mean over all layers of ``of(trace)``, divided by the tokens of the step."""
        layers = sum(part.count for part in self.layers)
        total = sum(part.count * of(part.trace) for part in self.layers)
        return total / layers / (self.tokens * self.batch)

    def traffic(self, *kinds: str, backward: bool) -> float:
        """Return the bytes per token and layer that kernels of these kinds move in one pass."""
        return self.per_token(lambda trace: trace.traffic(*kinds, backward=backward))

    def activations(self) -> float:
        """Return the bytes per token and layer that are kept for the backward pass."""
        return self.per_token(lambda trace: trace.activations)

    def as_json(self) -> dict[str, Any]:
        """Return all numbers for the JSON; bytes are per token and layer."""
        found: dict[str, Any] = {
            "name": self.name,
            "mixer": self.model.mixer,
            "tokens": self.tokens,
            "batch": self.batch,
            "layers": sum(part.count for part in self.layers),
            "implementations": self.first.chosen,
            "host_reads": self.first.host_reads,
            "kept_bytes": self.activations(),
        }
        for backward, name in enumerate(PASSES):
            traffic = {kind: self.traffic(kind, backward=bool(backward)) for kind in KINDS}
            found[name] = traffic | {"launches": len(self.first.passes(bool(backward)))}
        found["kernels"] = [
            {
                "pass": PASSES[backward],
                "kernel": kernel,
                "kind": kind,
                "launches": launches,
                "bytes": traffic,
            }
            for (backward, kind, kernel), (launches, traffic) in kernels_of(self).items()
        ]
        found["milliseconds"] = {}
        for roof in ROOFS:
            seconds = self.time(roof).seconds
            found["milliseconds"][roof.name] = {name: 1e3 * time for name, time in seconds.items()}
        return found


def kernels_of(step: Step) -> dict[tuple[bool, str, str], tuple[int, float]]:
    """Return the kernels of the model's first layer.

    The result maps (backward, kind, kernel) to (launches, bytes per token). Forward kernels are
    first; within a pass, the kernels that move most bytes are first.
    """
    found: dict[tuple[bool, str, str], tuple[int, float]] = {}
    for launch in step.first.launches:
        key = (launch.backward, launch.kind, launch.name)
        launches, traffic = found.get(key, (0, 0.0))
        found[key] = launches + 1, traffic + launch.bytes / (step.tokens * step.batch)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], -item[1][1])))


def step_of(name: str, model: ModelConfig, tokens: int, batch: int) -> Step:
    """Return the modelled step of a model.

    name: label of the result.

    Raises ValueError if a mixer has no implementation without its package, and ImportError without
    Triton.
    """
    shapes = model.blocks()
    kinds = [shape for n, shape in enumerate(shapes) if shape not in shapes[:n]]
    layers = tuple(_layer(shape, shapes.count(shape), model, tokens, batch) for shape in kinds)
    parameters = sum(count_by_component(model).values())
    return Step(
        name,
        model,
        tokens,
        batch,
        layers,
        Part(1, run_on_fake_gpu(lambda parallel: _ends(model, parallel, tokens, batch))),
        parameters,
    )


Made = tuple[Callable[[], Tensor], Sequence[Tensor]]


def layer_trace(
    shape: BlockShape, hidden: int, tokens: int, batch: int, *, causal: bool = True
) -> Trace:
    """Return the trace of a block's forward and backward pass.

    The input is bfloat16 [tokens, batch, hidden].
    """

    def make(parallel: OneProcess) -> Made:
        block = Block(shape, parallel)
        x = torch.empty(tokens, batch, hidden, dtype=parallel.dtype, requires_grad=True)
        # The view makes x a non-leaf tensor. The gradient of a leaf would be copied, which does not
        # happen between layers.
        return lambda: block(x.view_as(x), Context(causal=causal)), list(block.parameters())

    return run_on_fake_gpu(make)


def _layer(shape: BlockShape, count: int, model: ModelConfig, tokens: int, batch: int) -> Part:
    trace = layer_trace(shape, model.stream_size, tokens, batch, causal=model.causal)
    # FLOPs that the plan counts and the trace does not are those of the Triton kernels, of which
    # small products within pointwise kernels take no time of their own.
    mixer = shape.mixer
    fused = shape.times("mixer") * sum(mixer.map_flops.get(name, 0.0) for name in mixer.fused_maps)
    planned = (sum(shape.flops(tokens).values()) - fused) * tokens * batch
    own = max(0.0, planned - trace.flops(backward=False))
    return Part(count, trace, own if trace.traffic(TILES) else 0.0)


def _ends(model: ModelConfig, parallel: OneProcess, tokens: int, batch: int) -> Made:
    full = LanguageModel(model, parallel.dtype, device=META, parallel=parallel)
    full.blocks = nn.ModuleList()
    words = torch.empty(batch, tokens, dtype=torch.int64)
    return lambda: full(words, words), list(full.parameters())
