"""What every engine is built from: process groups, the model's layout, optimizer groups and learning rates; and which engine it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from fem_megatron.megatron import model as fem_model
from fem_megatron.megatron import platform
from pretrain.config import RunConfig
from pretrain.data.datasets import Batch
from pretrain.engines import Engine
from pretrain.schedule import Schedule


def initialize_model_parallel(config: RunConfig) -> None:
    """Megatron's process groups and random states for the run's layout; after the default group exists."""
    layout = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        distributed_timeout_minutes=layout.collective_timeout_minutes,
    )
    torch.manual_seed(config.train.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed)


def destroy_model_parallel() -> None:
    """Megatron's process groups, taken away with their threads: gloo has some fifty for a layout, which wake a hundred times a second.

    Megatron's own function forgets most of the groups, and torch keeps them until the default group goes.
    """
    groups = [group for group in parallel_state._global_process_group_list or [] if group is not None]
    parallel_state.destroy_model_parallel()
    for group in groups:
        with suppress(ValueError):  # Megatron has destroyed three of them
            torch.distributed.destroy_process_group(group)


def make_engine(config: RunConfig, schedule: Schedule, say: Callable[[str], None] = lambda text: None) -> Engine:
    """The engine that ``engine.name`` names, its weights fresh. What it has to tell goes to ``say``.

    Raises:
        ValueError: a width does not divide (see ``ModelConfig.blocks``).
        ConfigError: DeepSpeed does not take its settings.
    """
    if config.engine.name == "deepspeed":  # not installed everywhere
        from pretrain.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(config, schedule, say)
    from pretrain.engines.megatron import MegatronEngine

    return MegatronEngine(config, schedule)


def model_layout(config: RunConfig) -> fem_model.Layout:
    """The part of the run's configuration that shapes the built model."""
    return fem_model.Layout(
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.parallel.virtual_pipeline_model_parallel_size,
        sequence_parallel=config.parallel.sequence_parallel,
        params_dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        recompute=config.train.recompute == "full",
    )


def optimizer_settings(config: RunConfig) -> MegatronOptimizerConfig:
    """AdamW as Megatron's optimizers and its parameter groups want it told."""
    ours, bf16 = config.optimizer, config.train.precision == "bf16"
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=ours.lr,
        min_lr=ours.min_lr,
        weight_decay=ours.weight_decay,
        adam_beta1=ours.beta1,
        adam_beta2=ours.beta2,
        adam_eps=ours.eps,
        clip_grad=ours.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )


class LearningRates:
    """The schedule over an optimizer's groups, each with its own peak and floor."""

    def __init__(self, config: RunConfig, schedule: Schedule, optimizer: Any) -> None:
        ours = config.optimizer
        self.optimizer = optimizer
        self.scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=ours.lr,
            min_lr=ours.min_lr,
            lr_warmup_steps=schedule.warmup_samples,
            lr_decay_steps=schedule.total_samples,
            lr_decay_style="WSD" if ours.schedule == "wsd" else ours.schedule,
            wsd_decay_steps=schedule.decay_samples,
            lr_wsd_decay_style="linear",
            start_wd=ours.weight_decay,
            end_wd=ours.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def set(self, samples: int) -> float:
        """Give every group its rate after ``samples`` sequences; returns the schedule's own: muP's groups have others beside it."""
        self.scheduler.num_steps = samples
        self.scheduler.step(0)
        return max(group["lr"] for group in self.optimizer.param_groups if group["lr_mult"] == 1.0)


def summed_loss(losses: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the losses over the tokens that count, their number)."""
    mask = batch["loss_mask"]
    return (losses.float() * mask).sum(), mask.sum()


def mean_loss(reports: Iterable[torch.Tensor]) -> float:
    """Mean over the tokens of all ranks, the same on each, from this rank's reports ``[sum, tokens]``; the pipeline's last stage has them.

    Its tensor-parallel ranks know the same loss: one of them speaks.
    """
    total = torch.zeros(2, dtype=torch.float64, device=platform.device())
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for report in reports:
            total += report.double()
    torch.distributed.all_reduce(total)
    return (total[0] / total[1]).item()
