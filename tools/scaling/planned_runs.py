"""Plan the runs of a study: their shapes, lengths, cost and settings.

Shapes follow the study's rule. Runs that cannot answer the study's question are refused.
Parameters and FLOPs are those of `pretrain --plan`; hours follow from the study's assumed
throughput. The module does not import torch.

Trunks: of runs that differ only in length, the longest is trained completely, and the others are
forked from it at the start of their decay. With WSD and a warm-up in steps, a run does not depend
on its length before its decay begins: until then it equals the longer run bit for bit (`pretrain
--fork`; Hägele et al. 2024, arXiv 2405.18392).
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from fem_common.errors import ConfigError
from fem_megatron.config import ModelConfig
from pretrain.config import RunConfig, load_run
from pretrain.data.facts import DataFacts
from pretrain.data.order import passes_drawn
from pretrain.plan.run_plan import count_by_component, flops_per_token
from pretrain.schedule import Schedule
from pretrain.validate import prepare
from tools.scaling.study import ShapeRule, Size, Study

WIDEST = 1 << 17
LARGEST_RATIO = math.e  # of a target to the parameters of the widest shape that replaces it
OUTSIDE = ("embedding", "output layer")
# Settings without warm-up and decay lengths, to check a configuration before its length is known.
_NO_LENGTHS = tuple(
    f"optimizer.{key}"
    for key in ("warmup_steps=0", "warmup_tokens=null", "decay_steps=null", "decay_tokens=null")
)
# Keys of the study that give lengths -> their letter in the name of a run.
_LENGTHS = {"budgets": "c", "tokens": "d", "tokens_per_parameter": "r"}
_UNITS = {
    "budgets": "FLOPs",
    "tokens": "tokens",
    "tokens_per_parameter": "tokens per parameter",
}
# Keys of a model, in the order of the fields of `Sizes`.
SHAPE = (
    "hidden_size",
    "num_layers",
    "num_attention_heads",
    "ffn_hidden_size",
)


@dataclass(frozen=True)
class Sizes:
    """Width, layers, heads and inner width of the MLP of a model."""

    width: int
    layers: int
    heads: int
    ffn: int

    @property
    def words(self) -> tuple[str, ...]:
        """Return the sizes as settings of a run."""
        return tuple(
            f"model.{key}={value}" for key, value in zip(SHAPE, astuple(self), strict=True)
        )

    def of(self, model: ModelConfig) -> ModelConfig:
        """Return the model with these sizes."""
        return replace(model, **dict(zip(SHAPE, astuple(self), strict=True)))


def rule_words(shape: ShapeRule) -> str:
    """Return the rule as text."""
    return (
        f"layers = max({shape.min_layers}, round(width / {shape.aspect_ratio:g})), heads = width /"
        f" {shape.head_size}, MLP = {shape.ffn_ratio:.4g} x width, rounded up to a multiple of"
        f" {shape.ffn_multiple}"
    )


def shaped(shape: ShapeRule, width: int, size: Size | None = None) -> Sizes:
    """Return the shape for a width by the rule, with explicit values of ``size``.

    Raises ConfigError (the rule's heads do not divide the width).
    """
    size = size or Size()
    if size.heads is None and width % shape.head_size:
        near = max(1, round(width / shape.head_size)) * shape.head_size
        raise ConfigError(
            f"width {width} is not a multiple of shape.head_size = {shape.head_size}; the nearest"
            f" one: {near}"
        )
    layers = max(shape.min_layers, math.floor(width / shape.aspect_ratio + 0.5))
    multiples = math.ceil(round(width * shape.ffn_ratio, 6) / shape.ffn_multiple)
    return Sizes(
        width=width,
        layers=size.layers or layers,
        heads=size.heads or width // shape.head_size,
        ffn=size.ffn or multiples * shape.ffn_multiple,
    )


def total_parameters(model: ModelConfig) -> int:
    """Return all parameters of the model; tied weights count once."""
    return sum(count_by_component(model).values())


def non_embedding_parameters(model: ModelConfig) -> int:
    """Return the parameters without the embedding and the output layer."""
    return sum(count for name, count in count_by_component(model).items() if name not in OUTSIDE)


def nearest_sizes(
    shape: ShapeRule,
    model: ModelConfig,
    target: float,
    count: Callable[[ModelConfig], int] = non_embedding_parameters,
) -> Sizes:
    """Return the shape of the rule whose number of parameters is nearest to ``target`` by ratio.

    ``count`` computes the number of parameters. Raises ConfigError (the widest shape is smaller
    than the target by more than `LARGEST_RATIO`).
    """
    heads = range(1, WIDEST // shape.head_size + 1)

    def parameters(number: int) -> int:
        return count(shaped(shape, number * shape.head_size).of(model))

    def away(number: int) -> float:
        return abs(math.log(parameters(number) / target))

    reached = bisect.bisect_left(heads, target, key=parameters)  # parameters grow with the width
    best = min(heads[max(0, reached - 1) : reached + 1], key=away)
    if reached == len(heads) and away(best) > math.log(LARGEST_RATIO):
        raise ConfigError(f"no width up to {WIDEST} has {target:g} parameters by the shape rule")
    return shaped(shape, best * shape.head_size)


@dataclass(frozen=True)
class PlannedRun:
    """A run of a study. FLOPs are training FLOPs; ``settings`` are all overrides of the study's
    base.
    """

    name: str
    variant: str
    size: str
    width: int
    layers: int
    heads: int
    seed: int
    learning_rate: float
    budget: float | None
    parameters: int
    non_embedding_parameters: int
    flops_per_token: float
    tokens: int
    batch_tokens: int
    steps: int
    flops: float
    epochs: float | None
    hours: float | None  # hours of the steps that this run trains itself
    settings: tuple[str, ...]
    trunk: str = ""  # run of which this one is a fork; empty: no fork
    begin_step: int = 0  # step of the trunk at which this run begins

    @property
    def own_flops(self) -> float:
        """FLOPs of the steps that this run trains itself."""
        return self.flops - self.begin_step * self.batch_tokens * self.flops_per_token


@dataclass(frozen=True)
class Model:
    """A variant at a size: its configuration with the vocabulary filled in, and its exact cost."""

    config: RunConfig
    words: tuple[str, ...]
    sizes: Sizes
    label: str
    parameters: int
    non_embedding: int
    flops_per_token: float
    facts: DataFacts | None


class _Length(NamedTuple):
    """Length of runs: for a compute budget, for given tokens, or for tokens per parameter of the
    baseline.
    """

    kind: str
    value: float
    sizes: tuple[Size, ...]


def short(value: float) -> str:
    """Format a number for a name: 3e12, 0.003."""
    return f"{value:g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def plan_study(study: Study) -> list[PlannedRun]:
    """Return every run, the cheapest lengths first.

    Raises ConfigError (a run is refused, with its name and the nearest fix, or two runs are equal),
    StorageError.
    """
    planner = Planner(study)
    runs = list(planner.runs())
    return forked(planner, runs) if study.trunks else runs


class Planner:
    """Planner of one study, which caches the model of each variant at each size."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.base = load_run(study.base)
        self.model = cache(self._model)
        self._run_names: dict[str, str] = {}  # settings without names -> the run that has them
        # Read each part alone, so that an error names its key.
        self.read("settings", study.settings)
        for variant, words in study.variants.items():
            self.read(f"variants.{variant}", (*study.settings, *words))

    def runs(self) -> Iterator[PlannedRun]:
        """Yield the runs in the order in which they start."""
        study = self.study
        for length in _lengths(study):
            for size in length.sizes:
                for variant in study.variants:
                    model = self.model(variant, size)
                    for rate in study.learning_rates or (model.config.optimizer.lr,):
                        for seed in study.seeds:
                            yield self._run(length, size, variant, rate, seed)

    def read(self, key: str, words: tuple[str, ...]) -> RunConfig:
        """Return the base with these settings; errors name the study's key. Raises ConfigError."""
        try:
            return load_run(self.study.base, words)
        except ConfigError as error:
            raise ConfigError(
                f"{self.study.path}: {key}: {str(error).removeprefix('command line: ')}"
            ) from None

    def prepared(self, key: str, words: tuple[str, ...]) -> tuple[RunConfig, DataFacts | None]:
        """Return the base with these settings, checked for the study's processes and completed from
        the data; errors name the study's key. Raises ConfigError.
        """
        config, processes = self.read(key, words), self.study.cluster.processes
        try:
            prepared = prepare(
                replace(config, parallel=replace(config.parallel, world_size=processes)),
                processes,
                plan_only=True,
            )
        except ConfigError as error:
            raise ConfigError(f"{self.study.path}: {key}: {error}") from None
        return prepared.config, prepared.facts

    def _model(self, variant: str, size: Size) -> Model:
        """Return a variant at a size. Raises ConfigError if the two do not fit."""
        study, where = self.study, f"variants.{variant} at {size.label}"
        try:
            sizes = self._sizes(size)
        except ConfigError as error:
            raise ConfigError(f"{study.path}: sizes: {error}") from None
        own = study.variants[variant]
        fixed = [
            word
            for word in sizes.words
            if word.partition("=")[0] not in {other.partition("=")[0] for other in own}
        ]
        words = (*study.settings, *own, *fixed)
        # The length depends on the run; one step is enough to check the shape.
        config, facts = self.prepared(
            where, (*words, "train.steps=1", "train.tokens=null", *_NO_LENGTHS)
        )
        return Model(
            config,
            words,
            sizes,
            _label(size, sizes),
            total_parameters(config.model),
            non_embedding_parameters(config.model),
            flops_per_token(config),
            facts,
        )

    def _sizes(self, size: Size) -> Sizes:
        if size.width is not None:
            return shaped(self.study.shape, size.width, size)
        assert size.parameters is not None
        words = (*self.study.settings, *self.study.variants[self.study.baseline])
        model = self.read("settings", words).model
        # Any vocabulary: only non-embedding parameters are counted.
        model = replace(model, vocab_size=model.vocab_size or 1)
        return nearest_sizes(self.study.shape, model, size.parameters)

    def _run(self, length: _Length, size: Size, variant: str, rate: float, seed: int) -> PlannedRun:
        model, cluster = self.model(variant, size), self.study.cluster
        label = _LENGTHS[length.kind] + short(length.value)
        batch = model.config.train.global_batch_size * model.config.data.seq_length
        requested = self._tokens(length, size, model)
        steps = max(1, round(requested / batch))
        tokens = steps * batch
        flops = tokens * model.flops_per_token
        per_hour = (cluster.tflops or 0.0) * 1e12 * cluster.processes * 3600
        run = PlannedRun(
            name=f"{variant}-{model.label}-{label}-lr{short(rate)}-s{seed}",
            variant=variant,
            size=model.label,
            width=model.sizes.width,
            layers=model.sizes.layers,
            heads=model.sizes.heads,
            seed=seed,
            learning_rate=rate,
            budget=length.value if length.kind == "budgets" else None,
            parameters=model.parameters,
            non_embedding_parameters=model.non_embedding,
            flops_per_token=model.flops_per_token,
            tokens=tokens,
            batch_tokens=batch,
            steps=steps,
            flops=flops,
            epochs=tokens / model.facts.tokens["train"] if model.facts is not None else None,
            hours=flops / per_hour if per_hour else None,
            settings=(*model.words, *self.words(model, steps, rate), f"train.seed={seed}"),
        )
        where = f"{self.study.path}: run {run.name}"
        self._check_length(run, where, length.kind, length.value / requested)
        self._check(run, where)
        return run

    def _tokens(self, length: _Length, size: Size, model: Model) -> float:
        if length.kind == "budgets":
            return length.value / model.flops_per_token
        if length.kind == "tokens":
            return length.value
        return length.value * self.model(self.study.baseline, size).parameters

    def words(self, model: Model, steps: int, rate: float) -> Iterator[str]:
        """Yield the settings of a run with ``steps`` steps at learning rate ``rate``.

        The minimum learning rate has the same ratio to the rate as in the base, unless a setting
        defines it.
        """
        study, base = self.study, self.base.optimizer
        yield f"train.steps={steps}"
        yield "train.tokens=null"
        yield f"optimizer.warmup_steps={study.warmup_of(steps)}"
        yield "optimizer.warmup_tokens=null"
        yield f"train.eval_interval={math.ceil(steps / study.validations)}"
        if rate != model.config.optimizer.lr:
            yield f"optimizer.lr={rate!r}"
        if not any(word.startswith("optimizer.min_lr=") for word in model.words):
            yield f"optimizer.min_lr={float(f'{base.min_lr / base.lr * rate:.6g}')!r}"

    def _check(self, run: PlannedRun, where: str) -> None:
        """Raise ConfigError if a run repeats its data too often, is refused by pretrain, or already
        exists.
        """
        if run.epochs is not None and run.epochs > self.study.max_epochs:
            most = self.study.max_epochs
            raise ConfigError(
                f"{where}: it reads its training data {run.epochs:.2f} times, more than max_epochs"
                f" = {most:g}; prepare more data, train only {run.tokens * most / run.epochs:.3g}"
                f" of its {run.tokens:.3g} tokens, or set max_epochs: {_up(run.epochs):g}"
            )
        config, _ = self.prepared(f"run {run.name}", run.settings)
        mirror = config.checkpoint.mirror
        if mirror and "{name}" not in mirror:
            raise ConfigError(
                f"{where}: checkpoint.mirror = {mirror} is the same for all runs; set it to"
                f" {mirror}/{{name}}"
            )
        settings = repr(replace(config, name="", run_dir=None))
        if settings in self._run_names:
            raise ConfigError(
                f"{where} has the same settings as {self._run_names[settings]}; "
                "leave one of them out"
            )
        if run.name in self._run_names.values():
            raise ConfigError(
                f"{where}: two runs have this name, because their numbers are equal after rounding"
                " to the digits of a name"
            )
        self._run_names[settings] = run.name

    def _check_length(self, run: PlannedRun, where: str, kind: str, per_token: float) -> None:
        """Raise ConfigError if a run is too short.

        per_token: value of the length, in the unit of its ``kind``, per training token.
        """
        study, least = self.study, self.study.least_steps
        if run.steps >= least and study.warmup_of(run.steps) < run.steps:
            return
        if study.warmup_steps is not None:
            warmup = f"warmup_steps = {study.warmup_steps}"
        else:
            warmup = f"warmup = {study.warmup:g}: {study.warmup * run.steps:.2g} steps"
        if run.steps < study.min_steps:
            problem = f"its {run.steps} steps are fewer than min_steps = {study.min_steps}"
        else:
            problem = f"its {run.steps} steps are too short for its warm-up ({warmup})"
        enough = _up(least * run.batch_tokens * per_token)
        raise ConfigError(
            f"{where}: {problem}; give at least {enough:g} {_UNITS[kind]}, or a smaller "
            "train.global_batch_size"
        )


def _lengths(study: Study) -> list[_Length]:
    lengths = [
        _Length("budgets", budget.flops, budget.sizes or study.sizes)
        for budget in sorted(study.budgets, key=attrgetter("flops"))
    ]
    for kind in ("tokens", "tokens_per_parameter"):
        lengths += [_Length(kind, value, study.sizes) for value in sorted(getattr(study, kind))]
    return lengths


def _label(size: Size, sizes: Sizes) -> str:
    """Return a size for a run's name, with heads and the MLP's width if the study sets them."""
    heads = "" if size.heads is None else f"-h{sizes.heads}"
    ffn = "" if size.ffn is None else f"-f{sizes.ffn}"
    return f"w{sizes.width}-l{sizes.layers}{heads}{ffn}"


def _up(value: float) -> float:
    """Round a positive number up to three significant digits."""
    scale = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / scale) * scale:.3g}")


# --- trunks ---------------------------------------------------------------------------------------


def forked(planner: Planner, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs in the same order; each run that begins like a longer one becomes its fork.

    Raises ConfigError (a schedule is not wsd, data is read more than once, pretrain refuses a
    fork).
    """
    same: dict[tuple[Any, ...], list[PlannedRun]] = {}
    made: dict[str, PlannedRun] = {}
    for run in runs:
        same.setdefault((run.variant, run.size, run.learning_rate, run.seed), []).append(run)
    decays = {run.name: _decay_begins(planner, run) for run in runs}
    for group in same.values():
        *shorter, trunk = sorted(group, key=attrgetter("steps"))
        begins = {run: decays[run.name] for run in shorter if decays[run.name] > 0}
        if begins:
            made[trunk.name] = _kept(planner, trunk, begins.values())
        for run, begin in begins.items():
            made[run.name] = _fork(planner, run, trunk, begin)
    return [made.get(run.name, run) for run in runs]


def begins_at(fork: str | None) -> tuple[str, int]:
    """Return (run name, step) of the checkpoint at path ``fork``, a value of checkpoint.fork.

    Return ("", 0) for None, and (``fork``, 0) if the path is not a run's checkpoint.
    """
    found = re.search(r"([^/]+)/checkpoints/step_(\d+)/?$", fork or "")
    return (found[1], int(found[2])) if found else (fork or "", 0)


def _kept(planner: Planner, trunk: PlannedRun, begins: Iterable[int]) -> PlannedRun:
    """Return a trunk whose settings keep the checkpoints at the steps at which its forks begin."""
    config, facts = planner.prepared(f"run {trunk.name}", trunk.settings)
    _check_order(planner, trunk, config, facts)
    keep = json.dumps(sorted({*config.checkpoint.keep, *begins}))
    return replace(trunk, settings=(*trunk.settings, f"checkpoint.keep={keep}"))


def _fork(planner: Planner, run: PlannedRun, trunk: PlannedRun, begin: int) -> PlannedRun:
    place = f"{planner.study.directory}/{trunk.name}/checkpoints/step_{begin:08d}"
    settings = (*run.settings, f"checkpoint.fork={json.dumps(place, ensure_ascii=False)}")
    planner.prepared(f"run {run.name}", settings)
    return replace(
        run,
        settings=settings,
        trunk=trunk.name,
        begin_step=begin,
        hours=run.hours and run.hours * (1 - begin / run.steps),
    )


def _decay_begins(planner: Planner, run: PlannedRun) -> int:
    """Return the step after which a run decays.

    Raises ConfigError if its schedule is not wsd, or the run is already a fork.
    """
    config = planner.read(f"run {run.name}", run.settings)
    if config.optimizer.schedule != "wsd":
        raise ConfigError(
            f"{planner.study.path}: trunks: run {run.name} has optimizer.schedule ="
            f" {config.optimizer.schedule}, in which every step depends on the length of the run;"
            " give settings: [optimizer.schedule=wsd]"
        )
    if config.checkpoint.fork is not None:
        raise ConfigError(
            f"{planner.study.path}: trunks: run {run.name} is already a fork (checkpoint.fork); set"
            " trunks: false"
        )
    schedule = Schedule.of(config)
    return schedule.steps - schedule.decay_samples // schedule.batch_samples


def _check_order(
    planner: Planner, trunk: PlannedRun, config: RunConfig, facts: DataFacts | None
) -> None:
    """Raise ConfigError if a trunk reads data more than once: the order then depends on its length,
    which differs from its forks'.
    """
    # The order of packed sequences does not depend on the length of the run.
    if facts is None or config.data.packing == "best_fit":
        return
    total = sum(source.weight for source in config.data.train)
    available = [source.tokens for source in facts.sources if source.split == "train"]
    passes = passes_drawn(config, facts, Schedule.of(config).total_samples)
    for source, tokens, drawn in zip(config.data.train, available, passes, strict=True):
        if drawn != (1, False):
            times = trunk.tokens * source.weight / total / tokens
            raise ConfigError(
                f"{planner.study.path}: trunks: run {trunk.name} reads {source.prefix} {times:.2f}"
                " times, in an order that depends on its length, so it does not begin with the"
                " same data as shorter runs; prepare more data, shorten it, or set trunks: false"
            )
