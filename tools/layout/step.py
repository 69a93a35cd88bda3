"""The model of a step: seconds by what they are spent on, of one layout. Every constant is machines.yaml's.

The pipeline's slowest stage is the last, with the output layer. A step is its micro-batches and the bubble, what of the collectives over
data-parallel ranks no pass hides, and the update. Tensor parallelism's collectives hide nothing, and nothing hides them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fem_megatron.catalogue import mixer_names
from pretrain.plan.devices import peak_tflops
from pretrain.plan.run_plan import Plan

NODE = 8  # GPUs


@dataclass(frozen=True)
class Machine:
    """A device and the fabric between nodes, as machines.yaml has them."""

    name: str
    device: dict[str, Any]
    fabric: float
    rest: dict[str, Any]

    @classmethod
    def of(cls, device: str, fabric: str) -> Machine:
        """By their names there."""
        found = machines()
        return cls(device, found["devices"][device], float(found["fabrics"][fabric]), found)


def machines() -> dict[str, Any]:
    """The file of constants."""
    read: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("machines.yaml").read_text(encoding="utf-8"))
    return read


def seconds(plan: Plan, machine: Machine) -> dict[str, float]:
    """Of one step, by what they are spent on; their sum is the step's."""
    config, layout, micro = plan.config, plan.config.parallel, plan.micro_batches
    tensor, stages, chunks = (
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.virtual_pipeline_model_parallel_size,
    )
    tokens = config.train.micro_batch_size * config.data.seq_length
    passes = {name: tokens * each for name, each in _per_token(plan, machine).items()}
    between = _tensor_parallel(plan, machine, tokens)
    gaps = _launches(plan, machine) * float(machine.rest["gap"])
    one = sum(passes.values()) + between + gaps
    bubble = (stages - 1) / (chunks or 1) * one
    sent = 2 * micro * 2 * (chunks or 1) * tokens * config.model.hidden_size / (tensor if layout.sequence_parallel else 1) / machine.fabric
    hops = 2 * (micro + stages) * float(machine.rest["latency"]["fabric"])
    return {
        **{name: micro * each for name, each in passes.items()},
        "gaps": micro * gaps,
        "tensor parallel": micro * between,
        "bubble": bubble,
        "stages": (1 - float(machine.rest["overlap"])) * sent + hops if stages > 1 else 0.0,
        "data parallel": _data_parallel(plan, machine, one),
        "optimizer": float(machine.rest["optimizer_bytes"]) * max(s.parameters for s in plan.memory) / plan.data_parallel
        / float(machine.device["bandwidth"]),
    }  # fmt: skip


def mfu(plan: Plan, step: float, device: str) -> float:
    """The model's FLOPs over what the devices could do in a step of so many seconds."""
    peak = peak_tflops(device)
    assert peak is not None
    return plan.train_flops * plan.schedule.step_tokens / (step * peak * 1e12 * plan.world_size)


def _per_token(plan: Plan, machine: Machine) -> dict[str, float]:
    """Seconds a token on a rank of the last stage, forward and backward, what is computed again too."""
    config, device = plan.config, machine.device
    layout = config.parallel
    tensor, stages = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    again = 1 if config.train.recompute == "full" else 0
    flops = dict(plan.forward_flops)
    head, attention = flops.pop("output layer"), flops.pop("attention", 0.0)
    width = config.model.hidden_size / tensor
    rate = float(device["products"]) * width / (width + float(device["half_width"]))
    wide = float(device["products"]) * config.model.hidden_size / (config.model.hidden_size + float(device["half_width"]))
    forward, backward = (float(each) for each in device["attention"])
    sequence = tensor if layout.sequence_parallel else 1
    moved = 0.0
    known: dict[str, Any] = machine.rest["traffic"]
    for name in mixer_names(config.model):
        kib = known.get(name, known["fem_softmax"])[0] * config.model.recurrence
        # Of a layer a third, norms and the residual stream, is split by sequence parallelism alone.
        moved += kib * 1024 * config.model.hidden_size / 2048 * (2 / (3 * tensor) + 1 / (3 * sequence)) * (1 + again / 3)
    logits = 5 * 4 * config.model.padded_vocab_size() / tensor
    return {
        "products": sum(flops.values()) * (3 + again) / (stages * tensor * rate) + 3 * head / (tensor * wide),
        "attention": attention * ((1 + again) / forward + 2.5 / backward) / (stages * tensor),
        "pointwise": (moved / stages + logits) / float(device["bandwidth"]),
    }


def _launches(plan: Plan, machine: Machine) -> float:
    """Kernels of a micro-batch on a rank."""
    known: dict[str, Any] = machine.rest["traffic"]
    layers = sum(known.get(name, known["fem_softmax"])[1] for name in mixer_names(plan.config.model)) * plan.config.model.recurrence
    return float(layers) * (1.4 if plan.config.train.recompute == "full" else 1.0) / plan.config.parallel.pipeline_model_parallel_size


def _tensor_parallel(plan: Plan, machine: Machine, tokens: int) -> float:
    """Seconds of a micro-batch's sums over tensor-parallel ranks: two a layer and pass, each an all-reduce's way of the hidden states."""
    layout = plan.config.parallel
    tensor = layout.tensor_model_parallel_size
    if tensor == 1:
        return 0.0
    layers = plan.config.model.num_layers * plan.config.model.recurrence / layout.pipeline_model_parallel_size
    # Sequence parallelism gathers each product's input once more for its weight's gradient: half an all-reduce's way, twice a layer.
    sums = layers * (4 + layout.sequence_parallel + 2 * (plan.config.train.recompute == "full"))
    way = 2 * (tensor - 1) / tensor * 2 * tokens * plan.config.model.hidden_size / float(machine.device["nvlink"])
    return sums * (way + float(machine.rest["latency"]["nvlink"]))


def _data_parallel(plan: Plan, machine: Machine, one: float) -> float:
    """Seconds of the gradients' reduction and the weights' gathering that a micro-batch's passes do not hide."""
    size = plan.data_parallel
    if size == 1:
        return 0.0
    layout = plan.config.parallel
    beside = max(1, NODE // layout.tensor_model_parallel_size)  # of the group, in a node
    # NCCL's ring crosses a node's border once: all the node's links to the fabric serve it.
    speed = min(float(machine.device["nvlink"]), machine.fabric * beside) if size > beside else float(machine.device["nvlink"])
    share = (size - 1) / size * max(stage.parameters for stage in plan.memory) / speed
    hidden = float(machine.rest["overlap"]) if layout.overlap_grad_reduce else 0.0
    return max(0.0, 4 * share - hidden * one * 2 / 3) + max(0.0, 2 * share - hidden * one / 3)
