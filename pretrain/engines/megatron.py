"""Engine that uses Megatron-core's DDP, distributed optimizer and pipeline schedules.

It does not depend on the run directory or the loggers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import clip_grads, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from fem_megatron.megatron import platform, upstream
from pretrain.config import RunConfig
from pretrain.data.datasets import Batch
from pretrain.engines.building import (
    LearningRates,
    build_models,
    delayed_scales,
    forward,
    fuse,
    group_overrides,
    is_muons,
    optimizer_settings,
    poisoned,
    summed_loss,
    summed_over_ranks,
    weights_dtype,
)
from pretrain.engines.engine import (
    AroundUpdate,
    ExtraNumbers,
    StepResult,
    StepTimes,
    Unwanted,
    unobserved,
)
from pretrain.engines.muon import Muon, Part
from pretrain.engines.sharding import (
    Held,
    Read,
    data_parallel_group,
    only_here,
    optimizer_state,
    places,
    read_optimizer,
    sharding_metadata,
)
from pretrain.schedule import Schedule

_STATE = ("params", "step")  # keys of an optimizer's group that are not settings


class MegatronEngine:
    """The run's model under Megatron-core's DDP, optimizer and schedules.

    See :class:`pretrain.engines.Engine`.
    """

    def __init__(self, config: RunConfig, schedule: Schedule, *, draw: bool = True) -> None:
        self.config = config
        self.around_update: AroundUpdate = unobserved
        data_parallel = parallel_state.get_data_parallel_world_size()
        self.micro_batches = config.train.global_batch_size // (
            config.train.micro_batch_size * data_parallel
        )
        bare = build_models(config, draw=draw)
        self.settings = bare[0].config
        self.scales = delayed_scales(config, bare)
        self.chunks = [self._wrap(chunk, first=i == 0) for i, chunk in enumerate(bare)]
        self.optimizer = self._optimizer()
        self.split = (
            _SplitState(self.optimizer, self.models)
            if config.parallel.use_distributed_optimizer
            else None
        )
        self.rates = LearningRates(config, schedule, self.optimizer)
        # Beginning and end of the reduction in a timed step, else None.
        self.reduction: list[platform.Moment] | None = None
        self._connect_schedule()

    @property
    def models(self) -> list[GPTModel]:
        """This rank's model chunks without wrappers."""
        return [chunk.module for chunk in self.chunks]

    def train_step(
        self,
        batches: Iterator[Batch],
        samples_after: int,
        *,
        timed: bool = False,
        extra: ExtraNumbers = tuple,
        unwanted: Unwanted | None = None,
    ) -> StepResult:
        """Take one optimizer step.

        A non-finite loss or gradient on any rank skips the update on every rank.
        """
        started = platform.Moment() if timed else None
        self.reduction = [] if timed else None
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.scales:
            self.scales.begin()
        lr = self.rates.set(samples_after)
        reports = self._run(batches, self.micro_batches, forward_only=False)
        times = self._times(started)
        self.optimizer.prepare_grads()
        depth = self.config.model.mtp_depth
        loss, grad_norm, sums, mtp = summed_over_ranks(reports, extra(), self._squares(), depth)
        update = math.isfinite(grad_norm)  # the loss too (`poisoned`)
        if update and unwanted:
            update = not unwanted(loss, grad_norm)
        with self.around_update(self.split.parts if self.split else self._full_parts):
            if update:
                self._clip(grad_norm)
                self.optimizer.step_with_ready_grads()
        if update and self.scales:
            self.scales.advance()
        return StepResult(loss, grad_norm, lr, skipped=not update, times=times, extra=sums, mtp=mtp)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], global_batches: int) -> float:
        """Return the mean loss in nats per token over ``global_batches`` global batches."""
        for chunk in self.chunks:
            chunk.eval()
        loss = summed_over_ranks(
            self._run(batches, global_batches * self.micro_batches, forward_only=True)
        ).loss
        for chunk in self.chunks:
            chunk.train()
        return loss

    def sharded_state(self) -> dict[str, Any]:
        """Return sharded tensors named layer by layer, so that any layout can read them."""
        state = self._model_state()
        if self.split is None:
            return {
                **state,
                "optimizer": self.optimizer.sharded_state_dict(
                    _full_state(state), metadata=sharding_metadata()
                ),
            }
        return {**state, "optimizer": optimizer_state(self.split.held(), self.split.groups())}

    def restore(self, read: Read, *, model_only: bool = False) -> None:
        """Load the weights, then the optimizer.

        With ``model_only`` the optimizer's fp32 weights are copied from the model's weights.
        """
        requested = self._model_state()
        if not model_only and self.split is None:
            requested["optimizer"] = self.optimizer.sharded_state_dict(
                _full_state(requested), is_loading=True, metadata=sharding_metadata()
            )
        state = (
            read(requested)
            if model_only or self.split is None
            else read_optimizer(read, self.split.held(), requested)
        )
        for i, model in enumerate(self.models):
            model.load_state_dict(state[f"model{i}"], strict=True)
        if model_only:
            self.optimizer.reload_model_params()
        elif self.split:
            self.split.take_step(state["optimizer"]["optimizer"]["param_groups"][0]["step"])
        else:
            ours = [
                {key: value for key, value in group.items() if key not in _STATE}
                for group in self.optimizer.param_groups
            ]
            self.optimizer.load_state_dict(state["optimizer"])
            # The checkpoint's groups contain the rates, betas, epsilon and decay of the attempt
            # that wrote it.
            for group, settings in zip(self.optimizer.param_groups, ours, strict=True):
                group.update(settings)
            for each in self.optimizer.chained_optimizers:
                fuse(each.optimizer)

    def close(self) -> None:
        """Remove the reference to this engine from the model's configuration.

        DDP's hooks refer to the configuration from C++, so that the garbage collector does not find
        the reference cycle.
        """
        self.settings.finalize_model_grads_func = None

    @cached_property
    def _places(self) -> dict[torch.nn.Parameter, ShardedTensor]:
        return {
            parameter: place for model in self.models for parameter, place in places(model).items()
        }

    def _full_parts(self) -> Iterator[Held]:
        """Yield every parameter of this rank with its gradient and optimizer tensors.

        Use it only for the optimizer that is not split over the ranks.
        """
        (optimizer,) = self.optimizer.chained_optimizers
        for parameter, place in self._places.items():
            main = getattr(parameter, "main_param", parameter)
            yield Held.of(place, main, optimizer.optimizer.state[main], main.grad)

    def _model_state(self) -> dict[str, Any]:
        if self.config.parallel.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        return {
            f"model{i}": model.sharded_state_dict(metadata=sharding_metadata())
            for i, model in enumerate(self.models)
        }

    def _wrap(self, chunk: GPTModel, *, first: bool) -> DistributedDataParallel:
        layout = self.config.parallel
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=layout.overlap_grad_reduce,
            overlap_param_gather=layout.overlap_param_gather,
            use_distributed_optimizer=layout.use_distributed_optimizer,
        )
        # Megatron overlaps only within the first chunk: later ones finish while it still computes.
        wrapped = DistributedDataParallel(
            chunk.config, settings, chunk, disable_bucketing=not first
        )
        if layout.overlap_param_gather:
            _gather_full_layers(wrapped)
        return wrapped

    def _optimizer(self) -> Any:
        settings = optimizer_settings(self.config)
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        overrides = group_overrides(self.config, parameters, settings)
        made = get_megatron_optimizer(settings, self.chunks, overrides)
        if self.config.optimizer.name == "muon":
            (inner,) = made.chained_optimizers
            self._let_muon_update(inner, parameters)
        for each in made.chained_optimizers:
            fuse(each.optimizer)
        return made

    def _let_muon_update(self, optimizer: Any, parameters: list[torch.nn.Parameter]) -> None:
        """Replace AdamW by Muon.

        Muon updates the tensors that Megatron has created for this rank's part of each parameter.
        """
        groups, dtype = optimizer.optimizer.param_groups, weights_dtype(self.config)
        optimizer.optimizer = Muon(groups, self.config.optimizer, dtype)
        optimizer.init_state_fn = lambda muon, config=None: muon.prepare()
        numbers = {
            parameter: number for number, parameter in enumerate(parameters) if is_muons(parameter)
        }
        if not self.config.parallel.use_distributed_optimizer:
            parts = [
                Part(number, one, getattr(one, "main_param", one), 0, one.numel())
                for one, number in numbers.items()
            ]
            optimizer.optimizer.connect(self.config.model, parts, all_parts=[parts])
            return
        group = data_parallel_group()
        all_parts: list[list[Part]] = [[] for _ in range(group.size())]
        for rank, parameter, start, numel in _shares(optimizer, group.size()):
            if parameter in numbers:
                here = rank == group.rank()
                main = (
                    optimizer._get_main_param_and_optimizer_states(parameter)["param"]
                    if here
                    else parameter
                )
                all_parts[rank].append(Part(numbers[parameter], parameter, main, start, numel))
        for some in all_parts:
            some.sort(key=lambda part: part.number)
        optimizer.optimizer.connect(self.config.model, all_parts[group.rank()], all_parts=all_parts)

    def _connect_schedule(self) -> None:
        """Set the hooks that Megatron's pipeline schedules read from the model's configuration."""
        layout = self.config.parallel
        self.settings.grad_scale_func = None
        self.settings.finalize_model_grads_func = self._reduce
        if layout.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            self.settings.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
            if len(self.chunks) > 1:
                self.settings.grad_sync_func = [chunk.start_grad_sync for chunk in self.chunks]
        if layout.overlap_param_gather and len(self.chunks) > 1:
            self.settings.param_sync_func = [chunk.start_param_sync for chunk in self.chunks]
        self.forward_backward = get_forward_backward_func()

    def _reduce(
        self,
        model: list[Any],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> None:
        """Reduce the gradients with Megatron's function.

        In a timed step, record its beginning and end on the compute stream.
        """
        if self.reduction is not None:
            self.reduction.append(platform.Moment())
        finalize_model_grads(
            model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
        )
        if num_tokens is not None:
            _divide(model, num_tokens)
        if self.reduction is not None:
            self.reduction.append(platform.Moment())

    def _times(self, started: platform.Moment | None) -> StepTimes | None:
        if started is None or self.reduction is None:
            return None
        begun, done = self.reduction
        return StepTimes(busy=started.seconds_until(begun), waiting=begun.seconds_until(done))

    def _run(
        self, batches: Iterator[Batch], micro_batches: int, *, forward_only: bool
    ) -> list[torch.Tensor]:
        """Run all micro-batches of a step through the pipeline and return their reports.

        Only the last pipeline stage has reports (`summed_loss`).
        """
        streams: Any = batches
        if len(self.chunks) > 1:
            replay = _Replay(batches, len(self.chunks))
            streams = [replay.stream(i) for i in range(len(self.chunks))]
        reports = self.forward_backward(
            forward_step_func=partial(_forward_step, self.config.model.mtp_loss_weight),
            data_iterator=streams,
            model=self.chunks,
            num_microbatches=micro_batches,
            seq_length=self.config.data.seq_length,
            micro_batch_size=self.config.train.micro_batch_size,
            forward_only=forward_only,
        )
        return [report["loss"] for report in reports]

    def _squares(self) -> torch.Tensor | float:
        """Return this rank's part of the gradient's squared norm in float64.

        A gradient that several data-parallel ranks have completely counts once. Upstream's own norm
        (clip_grads.py:54, 0.16.1) needs a separate all-reduce in fp32, for which the host waits.
        """
        gradients = [
            one
            for optimizer in self.optimizer.chained_optimizers
            for one in upstream.gradients_for_norm(optimizer)
        ]
        if not gradients or (
            self.split is None and parallel_state.get_data_parallel_rank(with_context_parallel=True)
        ):
            return 0.0
        flag = torch.zeros(1, dtype=torch.int, device=gradients[0].device)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, flag, [gradients], False)
        return norm.double().square()

    def _clip(self, grad_norm: float) -> None:
        limit = self.config.optimizer.clip_grad
        for optimizer in self.optimizer.chained_optimizers:
            if limit > 0 and optimizer.get_parameters():
                clip_grads.clip_grad_by_total_norm_fp32(
                    optimizer.get_parameters(), max_norm=limit, total_norm=grad_norm
                )


def _gather_full_layers(chunk: DistributedDataParallel) -> None:
    """Make every layer wait for all its weights before its forward pass.

    Megatron waits only for the weights of each module that is called, but an update reads the
    weights of its submodules without calling them.
    """

    def wait(layer: torch.nn.Module, _: Any) -> None:
        for parameter in layer.parameters():
            if parameter.requires_grad:
                chunk.param_to_bucket_group[parameter].finish_param_sync()

    modules = [module.block for module in getattr(chunk.module, "mtp_modules", ())]
    for layer in (*chunk.module.decoder.layers, *modules):
        layer.register_forward_pre_hook(wait)


def _shares(optimizer: Any, replicas: int) -> Iterator[tuple[int, torch.nn.Parameter, int, int]]:
    """Yield (rank, parameter, start, numel) for each range that a data-parallel rank updates.

    The distributed optimizer gives each data-parallel rank an equal share of each bucket.
    """
    for buffer in optimizer.buffers:
        for bucket in buffer.buckets:
            share = bucket.grad_data.numel() // replicas
            for parameter in bucket.params_list:
                begin, end, _ = buffer.param_index_map[parameter]
                # The ranks whose shares contain the first and the last element.
                first, last = ((n - bucket.offset) // share for n in (begin, end - 1))
                for rank in range(first, last + 1):
                    low = max(begin, bucket.offset + rank * share)
                    high = min(end, bucket.offset + (rank + 1) * share)
                    yield rank, parameter, low - begin, high - low


class _SplitState:
    """State of Megatron's distributed optimizer, read in place on this rank.

    Megatron's own checkpoint functions gather the state (distrib_optimizer.py:1404, 0.16.1).
    """

    def __init__(self, optimizer: Any, models: list[GPTModel]) -> None:
        (self.optimizer,) = optimizer.chained_optimizers
        self.adam: torch.optim.Optimizer = self.optimizer.optimizer
        self.places = {
            parameter: only_here(place)
            for model in models
            for parameter, place in places(model).items()
        }

    def held(self) -> Iterator[Held]:
        """Return this rank's parts of the parameters with their optimizer tensors.

        Missing state of a new optimizer is initialized first.
        """
        self._prepare()
        return self._parts()

    def parts(self) -> Iterator[Held]:
        """Return the parts as `held` does, with their gradients.

        Missing state is not initialized: the parts of a new optimizer have no moments.
        """
        return self._parts(updating=True)

    def _parts(self, *, updating: bool = False) -> Iterator[Held]:
        for parameter, place in self.places.items():
            # The map contains only parameters of which this rank has a part.
            if parameter in self.optimizer.model_param_gbuf_map:
                state = self.optimizer._get_main_param_and_optimizer_states(parameter)
                elements = self.optimizer._get_model_param_range_map(parameter)["param"]
                main = state["param"]
                gradient = main.grad if updating else None
                yield Held.of(place, main, state, gradient, elements.start, len(elements))

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, each with its step count and without its parameters."""
        self._prepare()
        groups: list[dict[str, Any]] = self.optimizer.state_dict()["optimizer"]["param_groups"]
        return groups

    def take_step(self, step: float) -> None:
        """Set Adam's step count.

        torch's Adam has one per tensor; Transformer Engine's and apex's have one per group.
        """
        for group in self.adam.param_groups:
            if "step" in group:
                group["step"] = int(step)
            for parameter in group["params"]:
                if "step" in self.adam.state[parameter]:
                    self.adam.state[parameter]["step"].fill_(step)

    def _prepare(self) -> None:
        self.optimizer.init_state_fn(self.adam, self.optimizer.config)
        # AdamW is a subclass. Upstream does not create its step (optimizer/__init__.py:391).
        if isinstance(self.adam, torch.optim.Adam):
            for parameter, state in self.adam.state.items():
                state.setdefault(
                    "step", torch.zeros((), dtype=torch.float32, device=parameter.device)
                )


class _Replay:
    """One stream of micro-batches that several model chunks of a rank read independently."""

    def __init__(self, batches: Iterator[Batch], readers: int) -> None:
        self.batches = batches
        self.waiting: list[list[Batch]] = [[] for _ in range(readers)]

    def stream(self, reader: int) -> Iterator[Batch]:
        """Yield the micro-batches for one model chunk."""
        while True:
            if not self.waiting[reader]:
                batch = next(self.batches)
                for queue in self.waiting:
                    queue.append(batch)
            yield self.waiting[reader].pop(0)


def _full_state(state: dict[str, Any]) -> Any:
    """Return the model's weights from a state in the form that the plain optimizer requires."""
    return state["model0"] if len(state) == 1 else dict(state)


def _divide(model: list[Any], tokens: torch.Tensor) -> None:
    """Divide the gradients by the step's number of tokens, at least 1.

    tokens: this rank's number; the pipeline's last stage sends it to the other stages, and it is
    summed over the data-parallel ranks. Upstream (finalize_model_grads.py:495, 0.16.1) checks on
    the host if tokens exist, for which it waits in every step.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.broadcast(
        tokens, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=pipeline
    )
    torch.distributed.all_reduce(tokens, group=data_parallel_group())
    for chunk in model:
        chunk.scale_gradients(1.0 / tokens.clamp(min=1))


def _forward_step(
    mtp_weight: float, batches: Iterator[Batch], chunk: Any
) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    return forward(chunk, batch), partial(_loss, mtp_weight, batch)


def _loss(
    mtp_weight: float, batch: Batch, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the results of `summed_loss` for a micro-batch in the form that Megatron requires.

    Megatron divides gradients by the tokens of the entire step at any layout.
    """
    total, tokens, report = summed_loss(losses, batch, mtp_weight)
    return poisoned(total), tokens.to(torch.int), {"loss": report}
