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

from fem_common.costs import StepTime, bytes_sent
from fem_common.errors import ConfigError
from fem_megatron.catalogue import describe, mixer_names
from pretrain.config import RunConfig
from pretrain.plan.context_parallel import exchanged_bytes
from pretrain.plan.devices import peak_tflops
from pretrain.plan.run_plan import Plan, recomputed_flops

NODE = 8  # GPUs of a node


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Device and fabric between nodes, with the constants of machines.yaml, which explains them.

    bandwidth, fabric, nvlink: bytes/s.
    products, attention: FLOP/s; of attention (forward, backward).
    latency: link, "nvlink" or "fabric" -> seconds.
    traffic: mixer -> (KiB of memory traffic, kernels) of a layer.
    """

    name: str
    bandwidth: float
    products: float
    half_width: float
    attention: tuple[float, float]
    nvlink: float
    fabric: float
    gap: float
    latency: dict[str, float]
    overlap: float
    again: dict[str, float]
    room: float
    optimizer_bytes: float
    traffic: dict[str, tuple[float, float]]

    @classmethod
    def of(cls, device: str, fabric: str) -> Machine:
        """Return the machine with the device and the fabric of these names in machines.yaml."""
        found = machines()
        devices, fabrics = found.pop("devices"), found.pop("fabrics")
        return cls(name=device, fabric=fabrics[fabric], **devices[device], **found)

    def rate(self, width: float) -> float:
        """Return the FLOP/s of products whose narrowest side is ``width``."""
        return self.products * width / (width + self.half_width)


def machines() -> dict[str, Any]:
    """Return the contents of machines.yaml, with all constants as float."""
    text = Path(__file__).with_name("machines.yaml").read_text(encoding="utf-8")
    read: dict[str, Any] = _as_floats(yaml.safe_load(text))
    return read


def _as_floats(value: Any) -> Any:
    """Return the value with its numbers as float; YAML reads 1e12 as text."""
    if isinstance(value, dict):
        return {name: _as_floats(each) for name, each in value.items()}
    if isinstance(value, list):
        return tuple(map(_as_floats, value))
    return float(value)


def check(config: RunConfig) -> None:
    """Raise ConfigError if machines.yaml has no memory traffic for a mixer of the run."""
    known = machines()["traffic"]
    unknown = [name for name in mixer_names(config.model) if name not in known]
    if unknown:
        raise ConfigError(
            f"model.mixer = {unknown[0]}: machines.yaml has no memory traffic of its layers; "
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


def step_time(plan: Plan, machine: Machine) -> StepTime:
    """Return the modelled time of one step."""
    config, layout = plan.config, plan.config.parallel
    micro = plan.micro_batches
    stages = _stages(plan)
    chunks = layout.virtual_pipeline_model_parallel_size or 1
    tokens = plan.micro_batch_tokens
    passes = {name: tokens * each for name, each in _per_token(plan, machine).items()}
    tensor = _tensor_parallel(plan, machine)
    context = _context_parallel(plan, machine, passes["attention"])
    gaps = _launches(plan, machine) * machine.gap
    one = sum(passes.values()) + tensor + context + gaps
    between_stages = 0.0
    if stages > 1:
        # bf16 hidden states, in both directions.
        stream = config.model.stream_size * (1 + config.model.mtp_depth)
        size = 2 * 2 * tokens * stream / plan.training.sequence_split
        hops = 2 * (micro + stages) * machine.latency["fabric"]
        between_stages = (1 - machine.overlap) * (micro * chunks * size / machine.fabric) + hops
    updated = max(stage.parameters for stage in plan.memory)
    update = machine.optimizer_bytes * updated / (1 if zero_stage(plan) == 0 else plan.replicas)
    return StepTime(
        {name: micro * each for name, each in passes.items()}
        | {
            "gaps": micro * gaps,
            "tensor parallel": micro * tensor,
            "context parallel": micro * context,
            "bubble": (stages - 1) / chunks * one,
            "stages": between_stages,
            "data parallel": _data_parallel(plan, machine, one),
            "optimizer": update / machine.bandwidth,
        }
    )


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


def _stages(plan: Plan) -> int:
    return plan.config.parallel.pipeline_model_parallel_size


def _depth(plan: Plan) -> float:
    """Return the number of layers on a rank of the last stage, with those of the MTP modules."""
    return plan.config.model.num_layers / _stages(plan) + plan.config.model.mtp_depth


def _layers(plan: Plan) -> float:
    """Return the number of layer applications on a rank of the last stage."""
    return _depth(plan) * plan.config.model.recurrence


def _per_token(plan: Plan, machine: Machine) -> dict[str, float]:
    """Return category -> seconds per token of a rank in the last pipeline stage.

    The seconds include forward, backward and recomputation.
    """
    model, tensor = plan.config.model, plan.training.tensor_parallel
    flops = dict(plan.forward_flops)
    twice = recomputed_flops(plan.config, plan.forward_flops)
    head = flops.pop("output layer")
    attention = flops.pop("attention", 0.0)
    attention_twice = twice.pop("attention", 0.0)
    forward, backward = machine.attention
    # The ranks that share the layers' work as the last stage has it.
    ranks = tensor * (model.num_layers + model.mtp_depth) / _depth(plan)
    # A third of a layer's traffic, norms and residual stream, is split only by sequence
    # parallelism.
    split = 2 / (3 * tensor) + 1 / (3 * plan.training.sequence_split)
    repeated = 1 + _again(plan, machine) / 3
    traffic = 0.0
    for name, _, count in model.mixers:
        size = machine.traffic[name][0] * model.recurrence * 1024 * model.hidden_size / 2048
        traffic += count * size * split * repeated * _depth(plan) / model.num_layers
    logits = (1 + model.mtp_depth) * 5 * 4 * model.padded_vocab_size() / tensor
    return {
        "products": (
            (3 * sum(flops.values()) + sum(twice.values()))
            / (ranks * machine.rate(model.hidden_size / tensor))
            + 3 * head / (tensor * machine.rate(model.hidden_size))
        ),
        "attention": ((attention + attention_twice) / forward + 2.5 * attention / backward) / ranks,
        "pointwise": (traffic + logits) / machine.bandwidth,
    }


def _launches(plan: Plan, machine: Machine) -> float:
    """Return the number of kernels that a rank launches for a micro-batch."""
    model = plan.config.model
    kernels = sum(n * machine.traffic[name][1] for name, _, n in model.mixers) * model.recurrence
    return kernels * (1 + 0.4 * _again(plan, machine)) * _depth(plan) / model.num_layers


def _again(plan: Plan, machine: Machine) -> float:
    """Return the share (0 to 1) of a layer's forward kernels that are recomputed.

    Matrix products do not count.
    """
    return machine.again[plan.config.train.recompute]


def tensor_parallel_sums(plan: Plan) -> float:
    """Return the number of all-reduces of hidden states over the tensor-parallel ranks.

    The count is for one micro-batch on one rank. Each layer has two all-reduces per pass. A
    reduce-scatter or an all-gather counts as half an all-reduce.
    """
    layout = plan.config.parallel
    # Sequence parallelism gathers each product's input again for its weight's gradient: half an
    # all-reduce, twice per layer; with selective recomputation also an MLP's input.
    again = {"none": 0.0, "selective": 0.5 * layout.sequence_parallel, "full": 2.0}
    return _layers(plan) * (4 + layout.sequence_parallel + again[plan.config.train.recompute])


def _tensor_parallel(plan: Plan, machine: Machine) -> float:
    """Return the seconds of a micro-batch's all-reduces over the tensor-parallel ranks."""
    tensor = plan.training.tensor_parallel
    if tensor == 1:
        return 0.0
    size = 2 * plan.micro_batch_tokens * plan.config.model.hidden_size
    each = bytes_sent("all-reduce", size, tensor) / machine.nvlink + machine.latency["nvlink"]
    return tensor_parallel_sums(plan) * each


def _context_parallel(plan: Plan, machine: Machine, attention: float) -> float:
    """Return the seconds of a micro-batch's context-parallel exchanges that are not hidden.

    attention: seconds of the attention in a micro-batch, which hides part of the exchanges.
    """
    size = plan.training.ranks
    if size == 1:
        return 0.0
    sent = exchanged_bytes(plan) / plan.micro_batches
    overlapped = exchanged_bytes(plan, overlapped=True) / plan.micro_batches
    near = max(1, NODE // plan.training.tensor_parallel)  # ranks of the group within a node
    speed, latency = machine.nvlink, machine.latency["nvlink"]
    calls = 6 if plan.config.train.recompute == "full" else 4
    if size > near:  # each rank uses its own link; a ring is as fast as its slowest link
        share = 1.0 if overlapped else (size - 1) / (size - near)
        speed, latency = min(speed, machine.fabric * share), machine.latency["fabric"]
    called = _layers(plan) * latency * (calls + size * bool(overlapped))
    waited = (sent - overlapped) / speed + called
    return waited + max(0.0, overlapped / speed - machine.overlap * attention)


def _data_parallel(plan: Plan, machine: Machine, one: float) -> float:
    """Return the seconds of gradient reduction and weight gathering that the passes do not hide.

    one: seconds of the forward and backward pass of one micro-batch.

    Megatron's distributed optimizer and DeepSpeed's stage 1 reduce and gather once per step; the
    ranks of stage 1 wait for the weights. Stage 2 reduces in each micro-batch. Stage 3 also reduces
    in each micro-batch, and gathers in each of its two passes. Stages 0 to 2 reduce by all-reduce
    (DeepSpeed's default).
    """
    size, zero = plan.replicas, zero_stage(plan)
    layout = plan.config.parallel.settled(plan.config.engine, cuda=True)
    if size == 1:
        return 0.0
    near = max(1, NODE // layout.tensor_model_parallel_size)  # ranks of the group within a node
    speed = machine.nvlink
    if size > near:
        # NCCL's ring leaves a node once, so it can use all the node's links to the fabric.
        speed = min(speed, machine.fabric * near)
    parameters = max(stage.parameters for stage in plan.memory)
    reduced = bytes_sent("reduce-scatter", 4 * parameters, size) / speed
    gathered = bytes_sent("all-gather", plan.element * parameters, size) / speed
    hidden = machine.overlap * one if layout.overlap_grad_reduce else 0.0
    forward, backward = hidden / 3, hidden * 2 / 3
    if zero is None:
        return max(0.0, reduced - backward) + max(0.0, gathered - forward)
    if zero == 3:
        each = max(0.0, gathered - forward) + max(0.0, gathered + reduced - backward)
        return plan.micro_batches * each
    times = plan.micro_batches if zero == 2 else 1
    return times * max(0.0, 2 * reduced - backward) + (gathered if zero else 0.0)
