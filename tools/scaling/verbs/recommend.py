"""``recommend``: write the run that a study's laws recommend for a compute budget as a
configuration of `python -m pretrain`. The module does not import torch.

    recommend STUDY.yaml --flops 1e21 [--variant NAME] [--extrapolate] [--out FILE] [--results
    FOLDER]

By default the variant has the lowest predicted loss. Comments in the file contain the predicted
loss, its interval, and the ratio of the budget to the study's largest run. Beyond 100 times the
largest run, --extrapolate is required.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fem_common.config import plain
from fem_common.errors import ConfigError, convert_os_errors
from fem_common.text import did_you_mean
from pretrain.config import RunConfig
from tools.scaling.laws import Estimate
from tools.scaling.planned_runs import (
    Model,
    Planner,
    nearest_sizes,
    non_embedding_parameters,
    rule_words,
    short,
    total_parameters,
)
from tools.scaling.results import Optimum, StudyFit, VariantFit, load_fit, optimal, predict_loss
from tools.scaling.study import Size, Study, add_study, study_of

# Multiple of the largest measured compute beyond which a prediction has a warning.
FAR = 10.0
# Multiple beyond which a prediction needs --extrapolate; docs/decisions.md contains the reasons.
FARTHEST = 100.0


@dataclass(frozen=True)
class Recommendation:
    """A recommended run, and the laws' predictions for it.

    ``rate_from`` is the origin of the learning rate in words; ``measured`` the FLOPs of the study's
    largest fitted run.
    """

    config: RunConfig
    model: Model
    variant: str
    optimum: Optimum
    steps: int
    tokens: int
    loss: Estimate
    rate_from: str
    measured: float  # FLOPs of the largest run that was fitted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_study(parser)
    parser.add_argument("--flops", type=float, required=True, metavar="C", help="training FLOPs")
    parser.add_argument(
        "--variant",
        metavar="NAME",
        help="variant of the study (default: the one with the lowest predicted loss)",
    )
    parser.add_argument(
        "--extrapolate",
        action="store_true",
        help=f"allow more than {FARTHEST:g} times the FLOPs of the study's largest run",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file of the configuration (default: print it)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Print or write the recommended run and return 0. Raises ConfigError, StorageError."""
    study = study_of(arguments)
    if not 0 < arguments.flops < math.inf:
        raise ConfigError(f"--flops {arguments.flops:g}: must be more than 0")
    fit = load_fit(study.fit_json)
    found = recommend(study, fit, arguments.flops, arguments.variant, arguments.extrapolate)
    for line in warnings(study, found):
        print(f"tools.scaling: warning: {line}", file=sys.stderr)
    text = as_yaml(study, fit, found)
    if arguments.out is None:
        print(text, end="")
        return 0
    with convert_os_errors():
        arguments.out.write_text(text, encoding="utf-8")
    print(
        f"{arguments.out}: {summary(found)}; show its plan: python -m pretrain {arguments.out}"
        " --plan"
    )
    return 0


def recommend(
    study: Study, fit: StudyFit, flops: float, variant: str | None, extrapolate: bool
) -> Recommendation:
    """Return the run for a compute budget: the shape of the study's rule nearest to the optimal N,
    integer steps, the law's learning rate.

    Raises ConfigError (the variant does not exist or has no law, the budget is too far beyond the
    runs, or the resulting run is invalid).
    """
    measured = _measured(study, fit)
    if flops > FARTHEST * measured and not extrapolate:
        most = float(f"{FARTHEST * measured:.3g}")
        raise ConfigError(
            f"--flops {flops:g}: {flops / measured:,.0f} times the FLOPs of the study's largest"
            f" run, {measured:.3g}; its laws are used up to {FARTHEST:g} times, {short(most)}, and"
            " beyond only with --extrapolate"
        )
    name = _chosen(study, fit, flops, variant)
    planner, laws = Planner(study), fit.variants[name]
    optimum = optimal(laws, flops)
    count = total_parameters if fit.parameters == "total" else non_embedding_parameters
    example = planner.model(name, (study.sizes or study.budgets[0].sizes)[0]).config.model
    sizes = nearest_sizes(study.shape, example, optimum.n.value, count)
    model = planner.model(name, Size(width=sizes.width))
    batch = model.config.train.global_batch_size * model.config.data.seq_length
    steps = round(flops / (model.flops_per_token * batch))
    least = study.least_steps
    if steps < least:
        enough = float(f"{1.01 * least * batch * model.flops_per_token:.2g}")
        raise ConfigError(
            f"--flops {flops:g}: {name} at width {sizes.width} would train {steps} steps of {batch}"
            f" tokens, but a run needs at least {least}; the smallest sufficient value: --flops"
            f" {short(enough)}"
        )
    rate, rate_from = _rate(laws, model, count(model.config.model))
    words = (
        *model.words,
        *planner.words(model, steps, rate),
        f"train.seed={study.seeds[0]}",
        f"name={study.name}-{name}-{short(flops)}",
    )
    run = f"the run for {flops:g} FLOPs"
    config = planner.read(run, words)
    planner.prepared(run, words)
    tokens, loss = steps * batch, optimum.loss
    if laws.parametric is not None:
        loss = predict_loss(laws, count(model.config.model), tokens)
    return Recommendation(config, model, name, optimum, steps, tokens, loss, rate_from, measured)


def warnings(study: Study, found: Recommendation) -> Iterator[str]:
    """Yield one line for each reason that makes the recommendation uncertain."""
    factor = found.optimum.flops / found.measured
    if factor > FAR:
        yield (
            f"{found.optimum.flops:g} FLOPs is {factor:,.0f} times the FLOPs of the study's largest"
            f" run, {found.measured:.3g}: a far extrapolation"
        )
    facts = found.model.facts
    if facts is not None and found.tokens > study.max_epochs * facts.tokens["train"]:
        epochs = found.tokens / facts.tokens["train"]
        yield (
            f"it reads its training data {epochs:,.1f} times (max_epochs = {study.max_epochs:g}),"
            " but the laws do not account for repetition"
        )


def summary(found: Recommendation) -> str:
    """Return a short description of the run."""
    sizes = found.model.sizes
    return (
        f"{found.variant}, {sizes.layers} layers of {sizes.width}, {found.model.parameters:,}"
        f" parameters, {found.tokens:,} tokens, predicted loss {found.loss.text('.4f')}"
    )


def as_yaml(study: Study, fit: StudyFit, found: Recommendation) -> str:
    """Return the run's YAML: the settings that differ from the defaults, after comments on their
    origin.
    """
    comments = "".join(f"# {line}\n" for line in _comments(study, fit, found))
    values = _differences(plain(found.config), plain(RunConfig()))
    return comments + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def _comments(study: Study, fit: StudyFit, found: Recommendation) -> Iterator[str]:
    optimum, model = found.optimum, found.model
    level = f"{fit.interval:.0%} interval"
    yield (
        f"Recommended for {optimum.flops:g} training FLOPs by `python -m tools.scaling recommend"
        f" {study.path}`: {summary(found)}."
    )
    yield (
        f"Predicted held-out loss: {found.loss.text('.4f')} nats per token ({level}), by the"
        f" {optimum.method} fit of {found.variant}."
    )
    n, d = (one.text(".3g") for one in (optimum.n, optimum.d))
    yield (
        f"Optimal N ({fit.parameters}): {n}; D: {d}. The shape is the nearest one of the study's"
        " rule:"
    )
    yield f"  {rule_words(study.shape)}."
    batch, flops = found.tokens // found.steps, found.tokens * model.flops_per_token
    yield (
        f"{found.steps:,} steps of {batch:,} tokens, the batch size of the study: {flops:.4g}"
        " FLOPs."
    )
    yield f"Learning rate: {found.rate_from}."
    factor = optimum.flops / found.measured
    yield (
        f"The largest run of the study had {found.measured:.3g} FLOPs: this is {factor:.3g} times"
        f" as much. Fit: {study.fit_json}."
    )
    for other, its in _optima(study, fit, optimum.flops).items():
        if other != found.variant:
            yield f"  for comparison, {other} at its optimum: {its.loss.text('.4f')}"
    for line in warnings(study, found):
        yield f"WARNING: {line}."
    yield "All other settings have their defaults (docs/configuration.md)."


def _chosen(study: Study, fit: StudyFit, flops: float, variant: str | None) -> str:
    """Return the requested variant, or the one with the lowest predicted loss. Raises
    ConfigError.
    """
    if variant is not None:
        if variant not in study.variants:
            raise ConfigError(
                f"--variant {variant}: {study.path} has no such variant;"
                f" {did_you_mean(variant, list(study.variants))}"
            )
        if variant not in fit.variants:
            raise ConfigError(
                f"--variant {variant}: {study.fit_json} has no fit of this variant; run it, then"
                " collect and fit again"
            )
        return variant
    optima = _optima(study, fit, flops)
    if not optima:
        fitted = [fit.variants[name].notes for name in study.variants if name in fit.variants]
        notes = "; ".join(itertools.chain.from_iterable(fitted))
        raise ConfigError(
            f"{study.fit_json}: no variant of {study.path} has a law that gives an"
            f" optimum{f': {notes}' if notes else ''}"
        )
    return min(optima, key=lambda name: optima[name].loss.value)


def _optima(study: Study, fit: StudyFit, flops: float) -> dict[str, Optimum]:
    """Return the best run for ``flops`` of each variant of the study that has a law."""
    found = {}
    for name in study.variants:
        with suppress(ConfigError, KeyError):  # skip variants without a law or a fit
            found[name] = optimal(fit.variants[name], flops)
    return found


def _rate(laws: VariantFit, model: Model, parameters: int) -> tuple[float, str]:
    """Return the learning rate and text on its origin.

    The rate is from the study's law of the best rate, or else that of the model's configuration.
    """
    fitted = laws.learning_rate
    if fitted is not None:
        for law, size in ((fitted.by_parameters, parameters), (fitted.by_width, model.sizes.width)):
            if law is not None:
                rate = float(f"{float(law.at(size)):.3g}")
                return rate, f"{rate:g}, the study's law of the best rate against {law.x}"
    rate, why = model.config.optimizer.lr, "the study has no law for it"
    if model.config.model.parametrization == "mup":
        why = "with muP it is the same for all widths"
    return rate, f"{rate:g}, as in the runs of the study ({why})"


def _measured(study: Study, fit: StudyFit) -> float:
    """Return the FLOPs of the largest fitted run, else the largest budget. Raises ConfigError if
    neither is known.
    """
    flops = list[float]()
    for laws in fit.variants.values():
        flops += [residual.flops for residual in laws.residuals]
        if laws.isoflop:
            flops += [parabola.budget for parabola in laws.isoflop.parabolas]
    flops = flops or [budget.flops for budget in study.budgets]
    if not flops:
        raise ConfigError(
            f"{study.fit_json}: it contains no FLOPs of runs; write it again: python -m"
            f" tools.scaling fit {study.path}"
        )
    return max(flops)


def _differences(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the nested values that differ from ``defaults``."""
    changed = {}
    for key, value in values.items():
        default = defaults.get(key)
        if value != default:
            changed[key] = value
            if isinstance(value, dict) and isinstance(default, dict):
                changed[key] = _differences(value, default)
    return changed
