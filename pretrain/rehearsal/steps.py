"""Rehearse steps: set up each kind of rank, run a few steps and report the last one."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state

from fem_common.costs import (
    ACTIVATIONS,
    CONTENTS,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    WORKSPACE,
    Memory,
)
from fem_common.errors import ConfigError
from fem_common.text import gib
from fem_megatron.megatron import model as fem_model
from fem_megatron.meta import fake_machine
from fem_megatron.meta.trace import META
from pretrain.config import RunConfig
from pretrain.data.datasets import FIELDS
from pretrain.engines.building import destroy_model_parallel, initialize_model_parallel
from pretrain.plan.devices import memory_gib
from pretrain.plan.run_plan import Plan, make_plan
from pretrain.rehearsal import zero
from pretrain.rehearsal.record import (
    FORWARD,
    REDUCTION,
    SETUP,
    UPDATE,
    Held,
    Recorder,
    StepTrace,
)
from pretrain.schedule import Schedule
from pretrain.signals import STOP


@dataclass(frozen=True)
class Peak:
    """Peak memory of a rank.

    phase, part: phase of the step and part of the model at the peak. held: the memory of all
    tensors that are allocated at the peak.
    """

    bytes: int
    phase: str
    part: str
    held: list[Held]

    @property
    def memory(self) -> Memory:
        """The bytes by content."""
        found = dict.fromkeys(CONTENTS, 0)
        for each in self.held:
            found[content(each)] += each.bytes
        return Memory(**found)


@dataclass(frozen=True)
class Rank:
    """Recording of the last rehearsed step of one rank.

    begin, end: first and last tick of the step. trace: kernels, collectives and host reads of the
    step. groups: ranks -> name of each process group. seconds: duration of the rehearsal.
    """

    stage: int
    rank: int
    begin: int
    end: int
    held: list[Held]
    trace: StepTrace
    groups: dict[tuple[int, ...], str]
    seconds: float = 0.0

    def changes(self) -> list[tuple[int, Held, int]]:
        """Return (tick, memory, change in bytes) of each creation and each release, in order."""
        made = [(each.born, each, each.bytes) for each in self.held]
        freed = [(each.gone, each, -each.bytes) for each in self.held if each.gone is not None]
        return sorted([*made, *freed], key=itemgetter(0))

    @cached_property
    def peak(self) -> Peak:
        """Peak memory within the step."""
        now = best = at = 0
        last = self.held[0]
        for tick, each, change in self.changes():
            now += change
            if self.begin <= tick < self.end and now > best:
                best = now
                at = tick
                last = each
        held = [
            each for each in self.held if each.born <= at and (each.gone is None or each.gone > at)
        ]
        return Peak(best, last.phase, last.part, held)


def content(held: Held) -> str:
    """Return the content, one of fem_common.costs.CONTENTS, of a tensor's memory.

    Tensors of the forward pass whose content is unknown are activations; those of the backward
    pass, of the update and of the set-up are workspace.
    """
    # DeepSpeed gathers weights during the forward pass.
    kept = held.phase == FORWARD and not held.place.startswith("deepspeed/")
    return held.content or (ACTIVATIONS if kept else WORKSPACE)


@dataclass(frozen=True)
class Rehearsal:
    """Results of the rehearsal of a run on one device: the plan, and each rehearsed rank."""

    device: str
    plan: Plan
    ranks: list[Rank]

    @property
    def excess(self) -> str | None:
        """Error text if the rank with the highest peak needs more memory than the device has.

        The value is None if the memory suffices or the memory of the device is unknown.
        """
        memory_limit = memory_gib(self.device)
        most = max(self.ranks, key=lambda rank: rank.peak.bytes)
        if memory_limit is None or most.peak.bytes <= memory_limit * 2**30:
            return None
        return (
            f"{self.device} has {memory_limit} GiB of memory, and rank {most.rank} needs "
            f"{gib(most.peak.bytes)}: lower train.micro_batch_size, set train.recompute=full or "
            "train.loss_chunk, or split the model further (parallel.*)"
        )


def rehearse(config: RunConfig, world_size: int, device: str) -> Rehearsal:
    """Rehearse the first, middle and last pipeline stage on a simulated device, one after another.

    device: h100, h200 or cpu. All stages run in this process. Raises ConfigError for offloading,
    and if DeepSpeed is selected but not installed.
    """
    if config.train.offload_activations:
        raise ConfigError(
            "train.offload_activations = true cannot be rehearsed, because a rehearsal covers "
            "only the device's memory; set it to false"
        )
    if config.engine.name == "deepspeed":
        zero.prepare(config)
    plan = make_plan(config, world_size, cuda=device != "cpu")
    stages = config.parallel.pipeline_model_parallel_size
    where = fake_machine.CPU if device == "cpu" else fake_machine.FAKE_GPU
    kinds = sorted({0, stages // 2, stages - 1}) if stages > 2 else range(stages)
    ranks = [rehearse_rank(config, world_size, where, stage) for stage in kinds]
    return Rehearsal(device, plan, ranks)


def rehearse_rank(config: RunConfig, world_size: int, device: torch.device, stage: int) -> Rank:
    """Rehearse the first rank of a pipeline stage and return the record of the last step."""
    began = time.monotonic()
    # The number replaces values read from tensors, among others the squared norm of the gradient.
    trace = StepTrace(number=(1 + 2 * config.optimizer.clip_grad) ** 2)
    recorder = Recorder(trace)
    # Megatron's order of ranks: tp, cp, dp, pp.
    rank = stage * (world_size // config.parallel.pipeline_model_parallel_size)
    with (
        fake_machine.machine(device, rank, world_size, trace, recorder.fused),
        recorder,
        _engine_on_fake_machine(config),
    ):
        initialize_model_parallel(config)
        schedule = Schedule.of(config)
        with _built_without_numbers():
            from pretrain.run import make_engine

            engine = make_engine(config, schedule, draw=False)
        try:
            record = recorded_steps(engine, recorder, micro_batches(config), schedule, world_size)
        finally:
            engine.close()
            destroy_model_parallel()
    return replace(record, stage=stage, rank=rank, seconds=time.monotonic() - began)


def recorded_steps(
    engine: Any, recorder: Recorder, batches: Iterator[Any], schedule: Schedule, world_size: int
) -> Rank:
    """Run a few steps of an engine and return the record of the last one.

    The engine may belong to a rehearsal or to a real run.
    """
    trace, deepspeed = recorder.trace, engine.config.engine.name == "deepspeed"
    _name_parts(engine, trace)
    if deepspeed:
        zero.follow(engine, recorder)
    else:
        _follow(engine, recorder)
    peaks = [0.0] * world_size
    begin = 0
    # ZeRO-3 records the order of the modules in its first micro-batch, and compares it between the
    # ranks in the second.
    last_step = 3 if deepspeed and engine.config.engine.zero_stage == 3 else 2
    for step in range(1, last_step + 1):
        gc.collect()
        begin = recorder.tick
        trace.restart()
        trace.stage = FORWARD
        engine.train_step(
            batches, schedule.samples_at(step), extra=lambda: [*(0.0 for _ in STOP), *peaks]
        )
        trace.stage = SETUP
    end = recorder.tick
    if deepspeed:
        zero.set_holders(engine, recorder)
    else:
        _set_holders(engine, recorder)
    return Rank(
        stage=0,
        rank=torch.distributed.get_rank(),
        begin=begin,
        end=end,
        held=recorder.held,
        trace=trace,
        groups=_groups(),
    )


def _follow(engine: Any, recorder: Recorder) -> None:
    """Make Megatron's schedule set the phase of the trace.

    The phase is the reduction while gradients are reduced, and the update afterwards.
    """
    trace, reduce = recorder.trace, engine.settings.finalize_model_grads_func

    def reduced(*args: Any, **kwargs: Any) -> None:
        trace.stage = REDUCTION
        reduce(*args, **kwargs)
        trace.stage = UPDATE

    engine.settings.finalize_model_grads_func = reduced


def _set_holders(engine: Any, recorder: Recorder) -> None:
    """Set the holders of the tensors that Megatron allocates once."""
    recorder.known([list(model.parameters()) for model in engine.models], WEIGHTS)
    buffers = [
        buffer
        for chunk in engine.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    recorder.known([getattr(buffer, "param_data", None) for buffer in buffers], WEIGHTS)
    recorder.known([buffer.grad_data for buffer in buffers], GRADIENTS)
    for inner in engine.optimizer.chained_optimizers:
        recorder.known([dict(state) for state in inner.optimizer.state.values()], OPTIMIZER)
        recorder.known([group["params"] for group in inner.optimizer.param_groups], OPTIMIZER)


def _groups() -> dict[tuple[int, ...], str]:
    """Return ranks -> name of each process group of this rank.

    The names are the abbreviations that the configuration uses.
    """
    named = {
        "TP x DP": parallel_state.get_amax_reduction_group(with_context_parallel=True),
        "all ranks": torch.distributed.group.WORLD,
        "tied embeddings": parallel_state.get_embedding_group(check_initialized=False),
        "PP": parallel_state.get_pipeline_model_parallel_group(),
        "DP": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "CP": parallel_state.get_context_parallel_group(),
        "TP": parallel_state.get_tensor_model_parallel_group(),
    }
    member = {
        name: group
        for name, group in named.items()
        if group is not None and group != torch.distributed.GroupMember.NON_GROUP_MEMBER
    }
    return {
        tuple(torch.distributed.get_process_group_ranks(group)): name
        for name, group in member.items()
    }


def micro_batches(config: RunConfig) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches of meta tensors, with the fields of `pretrain.data.datasets.batches`."""
    shape = (
        config.train.micro_batch_size,
        config.data.seq_length // config.parallel.context_parallel_size,
    )
    depth = config.model.mtp_depth
    fields = dict.fromkeys(FIELDS, 1) | (
        {"labels_ahead": depth, "mask_ahead": depth} if depth else {}
    )
    while True:
        yield {
            key: torch.empty(
                (rows * shape[0], shape[1]),
                dtype=torch.float32 if "mask" in key else torch.int64,
                device=META,
            )
            for key, rows in fields.items()
        }


def _name_parts(engine: Any, trace: StepTrace) -> None:
    """Register hooks that set the trace's part of the model.

    A part is a layer with its number, the embedding, the final norm or the output layer.
    """
    for model in engine.models:
        parts = {f"layer {layer.layer_number}": layer for layer in model.decoder.layers}
        others = {
            "embedding": "embedding",
            "final norm": "decoder.final_layernorm",
            "output layer": "output_layer",
        }
        for number, module in enumerate(getattr(model, "mtp_modules", ())):
            parts[f"MTP {number + 1}"] = module
        known = dict(model.named_modules())
        parts |= {name: known[module] for name, module in others.items() if module in known}
        for name, module in parts.items():
            module.register_forward_pre_hook(lambda *_, name=name: setattr(trace, "part", name))
            module.register_forward_hook(lambda *_: setattr(trace, "part", "loss"))


def _engine_on_fake_machine(config: RunConfig) -> AbstractContextManager[None]:
    return zero.on_fake_machine() if config.engine.name == "deepspeed" else nullcontext()


@contextmanager
def _built_without_numbers() -> Iterator[None]:
    """Build models directly with meta tensors during the block.

    They are otherwise built on the host and then moved.
    """
    build = fem_model.build

    def built(*args: Any, **named: Any) -> Any:
        with META:
            return build(*args, **named)

    with mock.patch.object(fem_model, "build", built):
        yield
