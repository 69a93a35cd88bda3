"""Which parameters learn at which rate and decay by how much, as their weights' specs say: groups for Megatron-core's optimizer."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from fem_megatron.config import ModelConfig
from fem_megatron.mup import decay_factor, lr_factor
from fem_megatron.shape import Weight

Overrides = dict[ParamKey, ParamGroupOverride]


def group_overrides(model: ModelConfig, parameters: list[torch.nn.Parameter], settings: MegatronOptimizerConfig) -> Overrides:
    """What departs from the settings, a group of parameters each: what is not decayed, and muP's rates.

    The scheduler reads a group's max_lr and min_lr and its wd_mult; a checkpoint knows a group by its wd_mult and lr_mult. All ranks must
    name the same groups, which Megatron sees to: one that holds none of a group's parameters has it empty.
    """
    undecayed = ParamPredicate("not decayed", lambda parameter: not parameter.spec.decayed)
    overrides: Overrides = {ParamKey(predicate=undecayed): ParamGroupOverride(wd_mult=0.0)}
    for exponent, weight in {parameter.spec.scaling.lr: parameter.spec for parameter in parameters}.items():  # type: ignore[attr-defined]
        factor = lr_factor(model, weight)
        if factor == 1.0:
            continue
        rate = {"lr_mult": factor, "max_lr": settings.lr * factor, "min_lr": settings.min_lr * factor}
        overrides[_key("rate", exponent, decayed=False)] = ParamGroupOverride(**rate)
        overrides[_key("decay", exponent, decayed=True)] = ParamGroupOverride(wd_mult=decay_factor(model, weight))
    return overrides


def _key(what: str, exponent: float, *, decayed: bool) -> ParamKey:
    return ParamKey(predicate=ParamPredicate(f"{what} of m^{exponent:g}", partial(_matches, exponent, decayed)))


def _matches(exponent: float, decayed: bool, parameter: torch.nn.Parameter) -> bool:
    """Whether the parameter learns by this power of m; ``decayed``: and is decayed."""
    spec: Weight = parameter.spec  # type: ignore[attr-defined]
    return spec.scaling.lr == exponent and (spec.decayed or not decayed)
