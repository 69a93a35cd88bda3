"""Analytic model of a training step: the seconds of one layout by category.

Every constant is in machines.yaml.

The slowest pipeline stage is the last, which contains the output layer. A step consists of its
micro-batches, the pipeline bubble, the part of the data-parallel collectives that no pass hides,
and the optimizer update. Collectives of tensor parallelism overlap with no computation. Neither do
the collectives of context parallelism (`pretrain.plan.context_parallel`), except the exchange of
keys and values in a ring, which overlaps with attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fem_common.errors import ConfigError
from fem_megatron.catalogue import describe, mixer_names
from pretrain.config import RunConfig
from pretrain.plan.context_parallel import split_bytes
from pretrain.plan.devices import peak_tflops
from pretrain.plan.run_plan import Plan, computed_again

NODE = 8  # GPUs of a node


@dataclass(frozen=True)
class Machine:
    """Device and fabric between nodes, with the constants of machines.yaml.

    device: constants of the device.
    fabric: bytes/s of the fabric.
    rest: complete contents of machines.yaml.
    """

    name: str
    device: dict[str, Any]
    fabric: float
    rest: dict[str, Any]

    @classmethod
    def of(cls, device: str, fabric: str) -> Machine:
        """Return the machine with the device and the fabric of these names in machines.yaml."""
        found = machines()
        return cls(device, found["devices"][device], float(found["fabrics"][fabric]), found)


def machines() -> dict[str, Any]:
    """Return the contents of machines.yaml."""
    read: dict[str, Any] = yaml.safe_load(
        Path(__file__).with_name("machines.yaml").read_text(encoding="utf-8")
    )
    return read


def check(config: RunConfig) -> None:
    """Raise ConfigError if machines.yaml has no memory traffic for a mixer of the run."""
    known = machines()["traffic"]
    if unknown := next((name for name in mixer_names(config.model) if name not in known), None):
        raise ConfigError(
            f"model.mixer = {unknown}: machines.yaml has no memory traffic of its layers; "
            f"known are {', '.join(known)}"
        )


def assumed(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each assumption about this run that machines.yaml does not contain."""
    own = {describe(name).mlp for name in mixer_names(config.model)}
    if config.model.mlp and own != {config.model.mlp}:
        yield f"model.mlp = {config.model.mlp} moves as much as the mixers' own MLPs"
    if config.train.precision != "bf16":
        yield f"train.precision = {config.train.precision} is as fast as bf16"
    if config.optimizer.name == "muon":
        yield "optimizer.name = muon takes as long as AdamW: its own products are not counted"
    if config.train.offload_activations or config.engine.offload_optimizer:
        yield "copies to the host and back, and updates on the host, take no time"
    if config.data.documents == "separate":
        yield "data.documents = separate: each sequence is one document"
    if config.stages:
        yield f"stages: each has data.seq_length = {config.data.seq_length}"


def seconds(plan: Plan, machine: Machine) -> dict[str, float]:
    """Return category -> seconds of one step; the sum is the time of the step."""
    config, layout, micro = plan.config, plan.config.parallel, plan.micro_batches
    tensor = layout.tensor_model_parallel_size
    stages = layout.pipeline_model_parallel_size
    chunks = layout.virtual_pipeline_model_parallel_size
    tokens = config.train.micro_batch_size * config.data.seq_length // layout.context_parallel_size
    passes = {name: tokens * each for name, each in _per_token(plan, machine).items()}
    between = _tensor_parallel(plan, machine, tokens)
    cut = _context_parallel(plan, machine, passes["attention"])
    gaps = _launches(plan, machine) * float(machine.rest["gap"])
    one = sum(passes.values()) + between + cut + gaps
    bubble = (stages - 1) / (chunks or 1) * one
    sent = (
        2
        * micro
        * 2
        * (chunks or 1)
        * tokens
        * config.model.stream_size
        / (tensor if layout.sequence_parallel else 1)
        / machine.fabric
    )
    hops = 2 * (micro + stages) * float(machine.rest["latency"]["fabric"])
    return {
        **{name: micro * each for name, each in passes.items()},
        "gaps": micro * gaps,
        "tensor parallel": micro * between,
        "context parallel": micro * cut,
        "bubble": bubble,
        "stages": (1 - float(machine.rest["overlap"])) * sent + hops if stages > 1 else 0.0,
        "data parallel": _data_parallel(plan, machine, one),
        "optimizer": float(machine.rest["optimizer_bytes"]) * max(s.parameters for s in plan.memory)
        / (1 if zero_stage(plan) == 0 else replicas(plan)) / float(machine.device["bandwidth"]),
    }  # fmt: skip


def replicas(plan: Plan) -> int:
    """Return the number of ranks that contain the same weights.

    Gradients are summed over these ranks, and the optimizer state is divided among them.
    """
    return plan.data_parallel * plan.config.parallel.context_parallel_size


def zero_stage(plan: Plan) -> int | None:
    """Return DeepSpeed's ZeRO stage, or None for Megatron's distributed optimizer."""
    return plan.config.engine.zero_stage if plan.config.engine.name == "deepspeed" else None


def mfu(plan: Plan, step: float, device: str) -> float:
    """Return the MFU: the model's FLOPs in a step divided by the devices' peak FLOPs in that time.

    step: seconds of a step.
    """
    peak = peak_tflops(device)
    assert peak is not None
    return plan.train_flops * plan.schedule.step_tokens / (step * peak * 1e12 * plan.world_size)


def _per_token(plan: Plan, machine: Machine) -> dict[str, float]:
    """Return category -> seconds per token of a rank in the last pipeline stage.

    The seconds include forward, backward and recomputation.
    """
    config, device = plan.config, machine.device
    layout = config.parallel
    tensor, stages = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    flops = dict(plan.forward_flops)
    twice = computed_again(config, plan.forward_flops)
    again = _again(plan, machine)
    head = flops.pop("output layer")
    attention = flops.pop("attention", 0.0)
    attention_twice = twice.pop("attention", 0.0)
    width = config.model.hidden_size / tensor
    rate = float(device["products"]) * width / (width + float(device["half_width"]))
    wide = (
        float(device["products"])
        * config.model.hidden_size
        / (config.model.hidden_size + float(device["half_width"]))
    )
    forward, backward = (float(each) for each in device["attention"])
    sequence = tensor if layout.sequence_parallel else 1
    moved = 0.0
    known: dict[str, Any] = machine.rest["traffic"]
    for name in mixer_names(config.model):
        kib = known[name][0] * config.model.recurrence
        # A third of a layer's traffic, norms and residual stream, is split only by sequence
        # parallelism.
        moved += (
            kib
            * 1024
            * config.model.hidden_size
            / 2048
            * (2 / (3 * tensor) + 1 / (3 * sequence))
            * (1 + again / 3)
        )
    logits = 5 * 4 * config.model.padded_vocab_size() / tensor
    return {
        "products": (
            (3 * sum(flops.values()) + sum(twice.values())) / (stages * tensor * rate)
            + 3 * head / (tensor * wide)
        ),
        "attention": (
            ((attention + attention_twice) / forward + 2.5 * attention / backward)
            / (stages * tensor)
        ),
        "pointwise": (moved / stages + logits) / float(device["bandwidth"]),
    }


def _launches(plan: Plan, machine: Machine) -> float:
    """Return the number of kernels that a rank launches for a micro-batch."""
    known: dict[str, Any] = machine.rest["traffic"]
    layers = (
        sum(known[name][1] for name in mixer_names(plan.config.model))
        * plan.config.model.recurrence
    )
    return (
        float(layers)
        * (1 + 0.4 * _again(plan, machine))
        / plan.config.parallel.pipeline_model_parallel_size
    )


def _again(plan: Plan, machine: Machine) -> float:
    """Return the share (0 to 1) of a layer's forward kernels that are recomputed.

    Matrix products do not count.
    """
    return float(machine.rest["again"][plan.config.train.recompute])


def _tensor_parallel(plan: Plan, machine: Machine, tokens: int) -> float:
    """Return the seconds of a micro-batch's all-reduces over the tensor-parallel ranks.

    Each layer has two all-reduces of the hidden states per pass.
    """
    layout = plan.config.parallel
    tensor = layout.tensor_model_parallel_size
    if tensor == 1:
        return 0.0
    layers = (
        plan.config.model.num_layers
        * plan.config.model.recurrence
        / layout.pipeline_model_parallel_size
    )
    # Sequence parallelism gathers each product's input again for its weight's gradient: half an
    # all-reduce, twice per layer; with selective recomputation also an MLP's input.
    again = {"none": 0.0, "selective": 0.5 * layout.sequence_parallel, "full": 2.0}[
        plan.config.train.recompute
    ]
    sums = layers * (4 + layout.sequence_parallel + again)
    way = (
        2
        * (tensor - 1)
        / tensor
        * 2
        * tokens
        * plan.config.model.hidden_size
        / float(machine.device["nvlink"])
    )
    return sums * (way + float(machine.rest["latency"]["nvlink"]))


def _context_parallel(plan: Plan, machine: Machine, attention: float) -> float:
    """Return the seconds of a micro-batch's context-parallel exchanges that are not hidden.

    attention: seconds of the attention in a micro-batch, which hides part of the exchanges.
    """
    layout = plan.config.parallel
    tensor, size = layout.tensor_model_parallel_size, layout.context_parallel_size
    if size == 1:
        return 0.0
    sent, beside = (
        split_bytes(plan.config, plan.data_parallel, cuda=plan.cuda, beside=only)
        / plan.micro_batches
        for only in (False, True)
    )
    near = max(1, NODE // tensor)  # ranks of the group within a node
    nvlink = float(machine.device["nvlink"])
    speed = nvlink
    latency = float(machine.rest["latency"]["nvlink"])
    calls = 4 + 2 * (plan.config.train.recompute == "full")
    if size > near:  # each rank uses its own link; a ring is as fast as its slowest link
        speed = min(nvlink, machine.fabric * (1.0 if beside else (size - 1) / (size - near)))
        latency = float(machine.rest["latency"]["fabric"])
    layers = (
        plan.config.model.num_layers
        * plan.config.model.recurrence
        / layout.pipeline_model_parallel_size
    )
    waited = (sent - beside) / speed + layers * latency * (calls + size * bool(beside))
    return waited + max(0.0, beside / speed - float(machine.rest["overlap"]) * attention)


def _data_parallel(plan: Plan, machine: Machine, one: float) -> float:
    """Return the seconds of gradient reduction and weight gathering that the passes do not hide.

    one: seconds of the forward and backward pass of one micro-batch.

    Megatron's distributed optimizer and DeepSpeed's stage 1 reduce and gather once per step; the
    ranks of stage 1 wait for the weights. Stage 2 reduces in each micro-batch. Stage 3 also reduces
    in each micro-batch, and gathers in each of its two passes. Stages 0 to 2 reduce by all-reduce
    (DeepSpeed's default).
    """
    size = replicas(plan)
    zero = zero_stage(plan)
    layout = plan.config.parallel.settled(plan.config.engine, cuda=True)
    if size == 1:
        return 0.0
    beside = max(1, NODE // layout.tensor_model_parallel_size)  # ranks of the group within a node
    # NCCL's ring leaves a node once, so it can use all the node's links to the fabric.
    speed = (
        min(float(machine.device["nvlink"]), machine.fabric * beside)
        if size > beside
        else float(machine.device["nvlink"])
    )
    share = (size - 1) / size * max(stage.parameters for stage in plan.memory) / speed
    hidden = (float(machine.rest["overlap"]) if layout.overlap_grad_reduce else 0.0) * one
    reduced, gathered = 4 * share, (2 if plan.config.train.precision == "bf16" else 4) * share
    if zero is None:
        return max(0.0, reduced - hidden * 2 / 3) + max(0.0, gathered - hidden / 3)
    if zero == 3:
        return plan.micro_batches * (
            max(0.0, gathered - hidden / 3) + max(0.0, gathered + reduced - hidden * 2 / 3)
        )
    return (plan.micro_batches if zero == 2 else 1) * max(0.0, 2 * reduced - hidden * 2 / 3) + (
        gathered if zero else 0.0
    )
