"""DeepSpeed's ZeRO over a Megatron-core model.

Supported are stages 0 to 3, offload, tensor and sequence parallelism, but not pipelines. DeepSpeed
owns gradients, their reduction, clipping and the update. Megatron or this code owns the rest: the
model and its tensor parallelism, the groups of parameters, the learning rate, and the checkpoint,
which has the Megatron engine's format (``zero_state``).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import _get_param_groups

from fem_common.errors import ConfigError
from fem_megatron.block import PredictionModule
from fem_megatron.megatron import platform, upstream
from fem_megatron.update import Update
from pretrain.config import RunConfig
from pretrain.data.datasets import Batch
from pretrain.engines.building import (
    LearningRates,
    build_models,
    delayed_scales,
    forward,
    group_overrides,
    optimizer_settings,
    poisoned,
    summed_loss,
    summed_over_ranks,
    weights_dtype,
)
from pretrain.engines.deepspeed_ops import prepare_environment
from pretrain.engines.deepspeed_settings import deepspeed_config
from pretrain.engines.engine import (
    AroundUpdate,
    ExtraNumbers,
    StepResult,
    StepTimes,
    Unwanted,
    unobserved,
)
from pretrain.engines.muon import Muon
from pretrain.engines.sharding import Read, data_parallel_group, places
from pretrain.engines.zero_state import ZeroState
from pretrain.schedule import Schedule


class MegatronGroups:
    """Megatron's process groups with the interface of DeepSpeed's "model parallel unit".

    Its ZeRO group is the data-parallel one.
    """

    get_tensor_model_parallel_group = get_model_parallel_group = staticmethod(
        parallel_state.get_tensor_model_parallel_group
    )
    get_tensor_model_parallel_world_size = get_model_parallel_world_size = staticmethod(
        parallel_state.get_tensor_model_parallel_world_size
    )
    get_tensor_model_parallel_rank = get_model_parallel_rank = staticmethod(
        parallel_state.get_tensor_model_parallel_rank
    )

    # The group over which gradients are averaged and ZeRO shards.
    get_data_parallel_group = staticmethod(data_parallel_group)

    @staticmethod
    def get_data_parallel_world_size() -> int:
        """Return the size of the data-parallel group."""
        return data_parallel_group().size()

    @staticmethod
    def get_data_parallel_rank() -> int:
        """Return this process's rank in the data-parallel group."""
        return data_parallel_group().rank()


class DeepSpeedEngine:
    """The run's model trained by DeepSpeed. See :class:`pretrain.engines.Engine`."""

    def __init__(
        self,
        config: RunConfig,
        schedule: Schedule,
        log: Callable[[str], None] = lambda text: None,
        *,
        draw: bool = True,
    ) -> None:
        prepare_environment()
        import deepspeed

        self.config = config
        self.around_update: AroundUpdate = unobserved
        self.data_parallel = data_parallel_group().size()
        replicas = parallel_state.get_data_parallel_world_size()
        self.micro_batches = config.train.global_batch_size // (
            config.train.micro_batch_size * replicas
        )
        (self.model,) = build_models(config, draw=draw)
        self.scales = delayed_scales(config, [self.model])
        if config.parallel.sequence_parallel:
            _sum_over_sequence_slices(self.model)
        weights = places(self.model)
        numel = sum(parameter.numel() for parameter in self.model.parameters())
        settings, notes = deepspeed_config(
            config, replicas, parameters=numel, cuda=platform.has_cuda()
        )
        for line in notes:
            log(line)
        if not deepspeed.comm.is_initialized():
            # DeepSpeed's shared-memory collectives for CPUs serve inference. They would be compiled
            # at this point, and their ranks wait by spinning.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            deepspeed.init_distributed()
        self.alone = "LOCAL_RANK" not in os.environ
        # DeepSpeed reads the variable at initialization and in steps.
        os.environ.setdefault("LOCAL_RANK", "0")
        self.linear = torch.nn.functional.linear
        try:
            self.engine = _initialized(deepspeed, self.model, self._optimizer(), settings)
        except ConfigError:
            self._leave_environment()
            raise
        if config.engine.zero_stage == 3:
            _gather_full_updates(self.model)
        self.state = ZeroState(self.engine, weights)
        self.state.connect(config.model)
        self.rates = LearningRates(config, schedule, self.engine.optimizer)
        self.norm, self.unwanted = math.nan, False  # results of `_skips` for the last step
        self.judge: Callable[[float], bool] | None = None  # decision by this step's norm
        if config.engine.zero_stage == 0:
            self.engine.clip_fp32_gradients = self._clip
        elif config.train.on_spike != "none":
            _ask_before_update(self.engine.optimizer, self._skips)

    @property
    def models(self) -> list[GPTModel]:
        """This rank's model without wrappers."""
        return [self.model]

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

        A non-finite loss or gradient on any rank skips the update on every rank. ``unwanted`` needs
        ``train.on_spike``: it is called within DeepSpeed's step, between the gradient's norm and
        the update.
        """
        lr = self.rates.set(samples_after)
        depth = self.config.model.mtp_depth
        step = list(itertools.islice(batches, self.micro_batches))
        scale = self._loss_scale(step)
        if self.scales:
            self.scales.begin(scale / self.micro_batches)
        reports = []
        times = None
        known = None
        self.norm = math.nan
        self.unwanted = False
        self.judge = None
        for number, batch in enumerate(step):
            started = None
            if timed and number == 0 and self.config.engine.zero_stage < 3:
                started = platform.Moment()
            total, report = self._forward(batch)
            times = self._times(started) if started is not None else times
            reports.append(report)
            self.engine.backward(poisoned(total) * scale)
            if unwanted and number == self.micro_batches - 1:
                known = summed_over_ranks(reports, extra(), modules=depth)
                self.judge = partial(unwanted, known.loss)
            with self._updates_looked_at():
                self.engine.step()
        if known:
            loss, grad_norm, sums, mtp = known
            grad_norm = math.nan if math.isnan(grad_norm) else self.norm
        else:
            squares = self._grad_norm() ** 2 if torch.distributed.get_rank() == 0 else 0.0
            loss, grad_norm, sums, mtp = summed_over_ranks(reports, extra(), squares, depth)
        skipped = self.unwanted or not math.isfinite(grad_norm)
        if self.scales and not skipped:
            self.scales.advance()
        return StepResult(loss, grad_norm, lr, skipped=skipped, times=times, extra=sums, mtp=mtp)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], global_batches: int) -> float:
        """Return the mean loss in nats per token over ``global_batches`` global batches."""
        self.engine.eval()
        reports = [
            self._forward(batch)[1]
            for batch in itertools.islice(batches, global_batches * self.micro_batches)
        ]
        self.engine.train()
        return summed_over_ranks(reports).loss

    def sharded_state(self) -> dict[str, Any]:
        """Return model and optimizer as sharded tensors, in the format of the Megatron engine."""
        return self.state.saved()

    def restore(self, read: Read, *, model_only: bool = False) -> None:
        """Load weights and optimizer from a checkpoint of either engine, at any layout."""
        self.state.restore(read, model_only=model_only)

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the model and from torch."""
        self.engine.destroy()
        if self.config.engine.zero_stage == 3:
            _forget(self.model)
            # ZeRO-3 replaces it for the rest of the process. The other one rounds differently.
            upstream.restore_linear(self.linear)
        self._leave_environment()

    def _leave_environment(self) -> None:
        """Remove the environment variable LOCAL_RANK if this engine has set it.

        Other libraries in this process would conclude from the variable that a launcher runs them.
        """
        if self.alone:
            os.environ.pop("LOCAL_RANK", None)

    def _optimizer(self) -> torch.optim.Optimizer:
        """Return AdamW or Muon over Megatron's own groups of parameters."""
        settings = optimizer_settings(self.config)
        overrides = group_overrides(self.config, self.model.parameters(), settings)
        groups = _get_param_groups([self.model], settings, overrides)
        groups = [group for group in groups if group["params"]]
        for group in groups:
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        ours = self.config.optimizer
        if ours.name == "muon":
            return Muon(groups, ours, weights_dtype(self.config))
        arguments: dict[str, Any] = {
            "lr": ours.lr,
            "betas": (ours.beta1, ours.beta2),
            "eps": ours.eps,
            "weight_decay": ours.weight_decay,
        }
        if self.config.engine.offload_optimizer:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(groups, adamw_mode=True, **arguments)
        return torch.optim.AdamW(groups, fused=True, **arguments)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (training loss, report) of a micro-batch, see `summed_loss`."""
        weight = self.config.model.mtp_loss_weight
        total, _, report = summed_loss(forward(self.engine, batch), batch, weight)
        return total, report

    def _loss_scale(self, step: list[Batch]) -> torch.Tensor:
        """Return the factor for a micro-batch's summed loss that gives a step's mean over tokens.

        DeepSpeed additionally divides by the numbers of micro-batches and data-parallel ranks; the
        factor includes both.
        """
        tokens = torch.stack([batch["loss_mask"].sum() for batch in step]).sum().double()
        torch.distributed.all_reduce(tokens, group=data_parallel_group())
        return (self.data_parallel * self.micro_batches / tokens).float()

    def _grad_norm(self) -> torch.Tensor | float:
        """Return the gradient's norm in float64, NaN if DeepSpeed found an overflow.

        In float64, the square of the norm and the root of this square are exact.
        """
        if self.config.engine.zero_stage == 0:
            return self.norm
        if self.engine.optimizer.overflow:
            return math.nan
        norm = self.engine.get_global_grad_norm()
        return norm.double() if isinstance(norm, torch.Tensor) else float(norm)

    @contextmanager
    def _updates_looked_at(self) -> Iterator[None]:
        """Enter ``around_update`` around each step of the inner optimizer during the block.

        DeepSpeed has already clipped the gradients when the inner optimizer steps.
        """
        if self.around_update is unobserved:
            yield
            return
        adam: Any = self.state.adam
        step = adam.step

        def looked_at(*given: Any, **named: Any) -> Any:
            with self.around_update(partial(self.state.updating, self._clipped())):
                return step(*given, **named)

        adam.step = looked_at
        try:
            yield
        finally:
            del adam.step

    def _clipped(self) -> float:
        """Return the factor by which DeepSpeed has multiplied this step's gradients."""
        limit = self.engine.gradient_clipping()
        norm = (
            self.norm
            if self.config.engine.zero_stage == 0
            else float(self.engine.optimizer._global_grad_norm)
        )
        return min(1.0, limit / (norm + 1e-6)) if limit else 1.0

    def _clip(self) -> None:
        """Clip the gradients in stage 0 and record their norm.

        DeepSpeed's own clipping does not return the norm. If the step must be skipped, the
        gradients are set to zero.
        """
        from deepspeed.runtime.utils import clip_grad_norm_

        limit = self.engine.gradient_clipping()
        norm = clip_grad_norm_(
            parameters=self.model.parameters(), max_norm=limit, mpu=self.engine.mpu
        )
        if self._skips(float(norm)):
            self.engine.zero_grad()

    def _skips(self, norm: float) -> bool:
        """Record the gradient norm of the step and return True if the step must not update.

        DeepSpeed reports a non-finite norm as -1.
        """
        self.norm = norm if norm >= 0 else math.nan
        finite = math.isfinite(self.norm)
        self.unwanted = bool(finite and self.judge and self.judge(norm))
        return self.unwanted or not finite

    @staticmethod
    def _times(started: platform.Moment) -> StepTimes:
        """Return the seconds since ``started``, and the seconds of a barrier with the other ranks.

        Call it after the first forward pass, because later in the step the ranks synchronize in
        many reductions.
        """
        ready = platform.Moment()
        torch.distributed.barrier()
        return StepTimes(
            busy=started.seconds_until(ready), waiting=ready.seconds_until(platform.Moment())
        )


def _initialized(
    deepspeed: Any, model: GPTModel, adam: torch.optim.Optimizer, settings: dict[str, Any]
) -> Any:
    """Return DeepSpeed's engine for a model and the optimizer ``adam``.

    Raises ConfigError if DeepSpeed refuses the settings.
    """
    split = [
        parameter
        for parameter in model.parameters()
        if getattr(parameter, "tensor_model_parallel", False)
    ]
    # DeepSpeed's gradient norm counts parameters without the mark once, on the first tensor-
    # parallel rank.
    assert split or MegatronGroups.get_tensor_model_parallel_world_size() == 1
    try:
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=adam,
            mpu=MegatronGroups(),
            config=settings,
            dist_init_required=False,
        )
    except (ValueError, AssertionError) as error:
        # includes pydantic errors for a key or value that DeepSpeed refuses
        raise ConfigError(
            f"engine.deepspeed: DeepSpeed refuses: {' '.join(str(error).split())}"
        ) from None
    return engine


def _ask_before_update(optimizer: Any, skips: Callable[[float], bool]) -> None:
    """Make a ZeRO optimizer call ``skips`` with the gradient's norm before every step.

    If the result is True, the norm is replaced by infinity, so that DeepSpeed skips the step. Each
    of the three kinds of ZeRO optimizer computes the norm in another function. At that time all
    ranks have the norm over all groups.
    """
    from deepspeed.runtime.utils import combine_grad_norm_groups, get_global_norm_of_tensors

    if hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
        norm = optimizer.scaled_global_norm

        def judged_norm(*given: Any, **named: Any) -> torch.Tensor:
            found: torch.Tensor = norm(*given, **named)
            return torch.full_like(found, math.inf) if skips(float(found)) else found

        optimizer.scaled_global_norm = judged_norm
    elif hasattr(optimizer, "_get_norm_groups"):  # stage 3
        groups = optimizer._get_norm_groups

        def judged_groups() -> list[Any]:
            found: list[Any] = groups()
            full = combine_grad_norm_groups(found)
            return [torch.full_like(full, math.inf)] if skips(float(full)) else found

        optimizer._get_norm_groups = judged_groups
    else:
        # Stage 1 in bf16 does not return its norm before it clips, so the norm is computed twice.
        gradients = optimizer.get_grads_for_norm

        def judged_gradients(for_clipping: bool = False) -> Any:
            found = gradients(for_clipping)
            if for_clipping:
                return found
            full = get_global_norm_of_tensors(
                found[0], mpu=optimizer.mpu, norm_type=optimizer.norm_type
            )
            if not skips(float(full)):
                return found
            return [torch.full_like(found[0][0], math.inf)], {}

        optimizer.get_grads_for_norm = judged_gradients


def _forget(model: GPTModel) -> None:
    """Remove the model from ZeRO-3's process-wide module stack and cache.

    Both would keep the model in memory after its engine is closed.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module is not model]
    to_release: Any = (
        PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    )
    to_release.__closure__[0].cell_contents.cache_clear()


def _gather_full_updates(model: GPTModel) -> None:
    """Register with ZeRO-3 the weights that a mixer or an MLP reads from its submodules.

    ZeRO-3 gathers a module's own parameters only around the module's own call. An update reads the
    weights of its submodules without calling them, or later than its own call. In the backward
    pass, gathering is triggered only by tensors that a module returned, and CEM's preconditioner
    returns a function.
    """
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    for update in model.modules():
        if isinstance(update, Update | PredictionModule):
            own = {id(parameter) for parameter in update.parameters(recurse=False)}
            for parameter in update.parameters():
                if id(parameter) not in own:
                    register_external_parameter(update, parameter)


def _sum_over_sequence_slices(model: GPTModel) -> None:
    """Sum the gradients of weights that process sequence slices over the tensor-parallel ranks.

    These weights are mostly norms. Under sequence parallelism each rank has only the gradient of
    its slice. Megatron sums the gradients after the backward pass. By then DeepSpeed has already
    sharded and reduced them, so this function sums each gradient when it is computed.
    """
    group = parallel_state.get_tensor_model_parallel_group()

    def sum_(gradient: torch.Tensor) -> torch.Tensor:
        full = gradient.float()
        full = full.clone() if full is gradient else full
        torch.distributed.all_reduce(full, group=group)
        return full.to(gradient.dtype)

    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(sum_)
