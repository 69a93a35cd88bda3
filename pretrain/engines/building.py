"""Functions that all engines share.

They create process groups, derive the model's layout from the configuration, group parameters, set
learning rates, and compute the mean loss of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride

from fem_megatron.megatron import fp8, platform
from fem_megatron.megatron import model as fem_model
from fem_megatron.megatron.loss import masked_sum
from fem_megatron.mup import decay_factor, lr_factor
from fem_megatron.shape import Weight
from pretrain.config import RunConfig
from pretrain.data.datasets import Batch
from pretrain.schedule import Schedule

Overrides = dict[ParamKey, ParamGroupOverride]


def initialize_distributed(config: RunConfig) -> None:
    """Create the run's default process group; see `platform.initialize_distributed`."""
    layout = config.parallel
    split = layout.tensor_model_parallel_size > 1 or layout.context_parallel_size > 1
    platform.initialize_distributed(layout.collective_timeout_minutes, in_order=split)


def initialize_model_parallel(config: RunConfig) -> None:
    """Create Megatron's process groups and random states for the run's layout.

    Requires the default process group.
    """
    layout = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        distributed_timeout_minutes=layout.collective_timeout_minutes,
    )
    platform.seed_rng(config.train.seed)


def destroy_model_parallel() -> None:
    """Destroy Megatron's process groups with their threads.

    gloo has about fifty threads for a layout, each waking a hundred times per second. Megatron's
    own function drops most of the groups without destroying them, and torch keeps them until the
    default group is destroyed.
    """
    groups = [
        group for group in parallel_state._global_process_group_list or [] if group is not None
    ]
    parallel_state.destroy_model_parallel()
    for group in groups:
        with suppress(ValueError):  # Megatron has already destroyed three of them
            torch.distributed.destroy_process_group(group)


def model_layout(config: RunConfig) -> fem_model.Layout:
    """Return the part of the parallel layout on which the structure of the model depends."""
    layout, train = config.parallel, config.train
    # Separate documents need all tokens of a head on one rank.
    separate = config.data.documents == "separate"
    return fem_model.Layout(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        context_parallel_kind="all_to_all" if separate else layout.context_parallel_kind,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=weights_dtype(config),
        recompute=train.recompute,
        z_loss=train.z_loss,
        loss_chunk=train.loss_chunk,
        offload_activations=train.offload_activations,
        fp8=train.fp8,
        cuda_graphs=train.cuda_graphs,
    )


def weights_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype of the model's weights."""
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32


def build_models(config: RunConfig, *, draw: bool) -> list[GPTModel]:
    """Return this rank's model chunks. draw: initialize the weights; if False, they are NaN."""
    layout, length = model_layout(config), config.data.seq_length
    return fem_model.build(config.model, layout, length, config.train.seed, draw=draw)


def delayed_scales(config: RunConfig, models: list[GPTModel]) -> fp8.Delayed | None:
    """Return the scaling history of this rank's 8-bit maps, or None unless train.fp8 is delayed.

    The ranks of a pipeline stage share the history.
    """
    if config.train.fp8 != "delayed":
        return None
    maps = {}
    for model in models:
        for name, weight in model.named_parameters():
            global_name = fem_model.global_name(model, name)
            layers = global_name.startswith(("decoder.layers.", "mtp_modules."))
            if layers and weight.spec.eight_bit:
                maps[global_name] = weight
    group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
    return fp8.Delayed(
        maps, config.train.fp8_history, config.train.fp8_margin, group, platform.device()
    )


def optimizer_settings(config: RunConfig) -> MegatronOptimizerConfig:
    """Return the AdamW settings in the form that Megatron's optimizers require."""
    ours = config.optimizer
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=ours.lr,
        min_lr=ours.min_lr,
        weight_decay=ours.weight_decay,
        adam_beta1=ours.beta1,
        adam_beta2=ours.beta2,
        adam_eps=ours.eps,
        clip_grad=ours.clip_grad,
        bf16=config.train.precision == "bf16",
        params_dtype=weights_dtype(config),
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )


def fuse(optimizer: Any) -> None:
    """Make torch's AdamW fused: one pass over weights, gradients and moments, without temporaries.

    Without Transformer Engine and apex, Megatron builds AdamW with torch's default
    (optimizer/__init__.py:389, 0.16.1), which reads and writes about three times as much. The
    FusedAdam of those packages remains unchanged. The fused form reads each parameter's step count
    on the parameter's device, so a step count that was loaded to another device is moved.
    """
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
        return
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings["fused"] = True
    for parameter, state in optimizer.state.items():
        if "step" in state:
            state["step"] = state["step"].to(parameter.device)


# A checkpoint of the plain optimizer identifies a group by four keys. ``is_decoupled_lr`` is one of
# them, and this code has no other use for it.
MUON: Any = {"muon": True, "is_decoupled_lr": True}


def is_muons(parameter: torch.nn.Parameter) -> bool:
    """Return True if the parameter is one that Muon updates when it is the optimizer."""
    spec: Weight = parameter.spec  # type: ignore[attr-defined]
    return spec.orthogonal


def group_overrides(
    config: RunConfig, parameters: Iterable[torch.nn.Parameter], settings: MegatronOptimizerConfig
) -> Overrides:
    """Return the settings that differ per group of parameters.

    Three kinds of groups have their own settings: parameters without weight decay, parameters that
    Muon updates, and the remaining parameters whose learning rate muP scales.

    The scheduler reads a group's max_lr, min_lr and wd_mult; a checkpoint identifies a group by its
    wd_mult and lr_mult. All ranks must have the same groups. Megatron ensures this: a rank without
    parameters of a group has an empty group.
    """
    muon = config.optimizer.name == "muon"

    def key(what: str, matches: Callable[[Weight], bool]) -> ParamKey:
        return ParamKey(predicate=ParamPredicate(what, lambda parameter: matches(parameter.spec)))

    def scaled(exponent: float, only_decayed: bool, spec: Weight) -> bool:
        """Return True if muP scales the learning rate with m to the power ``exponent``.

        Parameters that Muon updates are excluded, and with ``only_decayed`` also those without
        weight decay.
        """
        return (
            spec.scaling.lr == exponent
            and (spec.decayed or not only_decayed)
            and not (muon and spec.orthogonal)
        )

    overrides: Overrides = {
        key("not decayed", lambda spec: not spec.decayed): ParamGroupOverride(wd_mult=0.0)
    }
    if muon:
        overrides[key("Muon's", lambda spec: spec.orthogonal)] = MUON
        parameters = [parameter for parameter in parameters if not is_muons(parameter)]
    specs: list[Weight] = [parameter.spec for parameter in parameters]  # type: ignore[attr-defined]
    for exponent, weight in {spec.scaling.lr: spec for spec in specs}.items():
        factor = lr_factor(config.model, weight)
        if factor == 1.0:
            continue
        rate = ParamGroupOverride(
            lr_mult=factor, max_lr=settings.lr * factor, min_lr=settings.min_lr * factor
        )
        decay = ParamGroupOverride(wd_mult=decay_factor(config.model, weight))
        overrides[key(f"rate of m^{exponent:g}", partial(scaled, exponent, False))] = rate
        overrides[key(f"decay of m^{exponent:g}", partial(scaled, exponent, True))] = decay
    return overrides


class LearningRates:
    """Learning-rate schedule of an optimizer's groups, each with its own peak and minimum."""

    def __init__(self, config: RunConfig, schedule: Schedule, optimizer: Any) -> None:
        ours = config.optimizer
        self.optimizer, self.schedule = optimizer, schedule
        self.scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=ours.lr,
            min_lr=ours.min_lr,
            lr_warmup_steps=schedule.warmup_samples,
            lr_decay_steps=schedule.rate_end - schedule.rate_samples,
            lr_decay_style="WSD" if ours.schedule == "wsd" else ours.schedule,
            wsd_decay_steps=schedule.decay_samples,
            lr_wsd_decay_style="linear",
            start_wd=ours.weight_decay,
            end_wd=ours.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def set(self, samples: int) -> float:
        """Set every group's learning rate after ``samples`` sequences.

        Return the rate of the schedule. The rates of muP's groups are multiples of this rate.
        """
        self.scheduler.num_steps = self.schedule.rate_position(samples)
        self.scheduler.step(0)
        return max(group["lr"] for group in self.optimizer.param_groups if group["lr_mult"] == 1.0)


def summed_loss(
    losses: torch.Tensor, batch: Batch, mtp_weight: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (training loss summed over the counted tokens, number of counted tokens, report).

    The report contains what `summed_over_ranks` takes, without gradients: [sum of the losses,
    tokens, sums of the losses of the modules of multi-token prediction].

    losses: [b, s], or already their sum (train.loss_chunk), or the sums [1 + modules]. A token
    counts if its loss_mask is 1. mtp_weight: weight of the mean loss of the modules.
    """
    tokens = batch["loss_mask"].sum()
    sums = losses if losses.ndim == 1 else masked_sum(losses, batch["loss_mask"]).view(1)
    main, ahead = sums[0], sums[1:]
    known = sums.detach()
    report = torch.cat((known[:1], tokens.to(known.dtype).view(1), known[1:]))
    return main + mtp_weight * ahead.mean() if len(ahead) else main, tokens, report


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Return the losses of a micro-batch in the form that `summed_loss` takes."""
    ahead = {"ahead": (batch["labels_ahead"], batch["mask_ahead"])} if "mask_ahead" in batch else {}
    losses: torch.Tensor = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=batch.get("context"),
        **ahead,
    )
    return losses


def poisoned(total: torch.Tensor) -> torch.Tensor:
    """Return the summed loss ``total``; if it is not finite, its gradients are NaN.

    The norm of the gradients over all ranks is then NaN too.
    """
    return total * torch.where(total.detach().isfinite(), 1.0, torch.nan)


class Summed(NamedTuple):
    """Results of a step, summed over the ranks.

    loss: mean loss over the counted tokens. grad_norm: norm of the gradient. numbers: sums of the
    additional numbers. mtp: loss of each module of multi-token prediction, divided by the same
    tokens.
    """

    loss: float
    grad_norm: float
    numbers: list[float]
    mtp: tuple[float, ...]


def summed_over_ranks(
    reports: Iterable[torch.Tensor],
    numbers: Iterable[float] = (),
    squares: torch.Tensor | float = 0.0,
    modules: int = 0,
) -> Summed:
    """Sum a step's results over the ranks.

    One all-reduce suffices, for which the host waits once. The results are equal on each rank. If
    no token counts, losses and norm are NaN, so that the step is skipped.

    reports: reports of this rank's micro-batches (`summed_loss`), present only on the last pipeline
    stage. Its tensor-parallel ranks have the same loss, so only the first contributes it. The mean
    is over the tokens of all ranks. The second argument: additional numbers to sum. squares: this
    rank's part of the gradient's squared norm. modules: number of the reports' further losses.
    """
    total = torch.zeros(2 + modules, dtype=torch.float64, device=platform.device())
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for report in reports:
            total += report.double()
    part = torch.as_tensor(squares, dtype=torch.float64, device=total.device).view(1)
    summed = torch.cat(
        [total, part, torch.tensor([*numbers], dtype=torch.float64, device=total.device)]
    )
    torch.distributed.all_reduce(summed)
    loss, tokens, *rest = summed.tolist()
    ahead, square, sums = rest[:modules], rest[modules], rest[modules + 1 :]
    if not tokens:
        return Summed(math.nan, math.nan, sums, (math.nan,) * modules)
    return Summed(loss / tokens, math.sqrt(square), sums, tuple(one / tokens for one in ahead))
