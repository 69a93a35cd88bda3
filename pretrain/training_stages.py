"""Stages of a run: consecutive trainings in one run directory with different settings.

Each stage has its own data, lengths and learning rates. It begins at the last checkpoint of the
previous stage. Its reading position in a source follows the tokens that earlier stages read from
that source. The module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fem_common.errors import ConfigError
from fem_common.files import sha256_json
from fem_common.text import gib, si
from pretrain.checkpoint.folder import Progress
from pretrain.config import RunConfig, Stage
from pretrain.data.distinct import check_distinct
from pretrain.data.document_ends import check_document_ends
from pretrain.data.facts import DataFacts, check_data
from pretrain.schedule import Schedule

if TYPE_CHECKING:
    from pretrain.plan.run_plan import Plan

_RATES = ("lr", "min_lr", "schedule", "warmup_steps", "decay_steps")


@dataclass(frozen=True)
class Part:
    """One stage in the form of a separate run; for a run without stages, the entire run.

    config: the run's configuration with the settings of the stage; ``stages`` contains the stages
    up to this one, and train.steps is the length of this stage. number, name: index and name of the
    stage, 0 and "" without stages. begin_step, begin_tokens: steps and tokens of all earlier
    stages. run: steps and tokens of all stages together. own_rates: True if the stage has its own
    learning-rate schedule.
    """

    config: RunConfig
    number: int = 0
    name: str = ""
    begin_step: int = 0
    begin_tokens: int = 0
    run: tuple[int, int] = (0, 0)
    own_rates: bool = True
    # Schedules of the first and the last stage; their steps are the units of the run's warm-up and
    # decay.
    first: Schedule | None = None
    last: Schedule | None = None

    @cached_property
    def own(self) -> Schedule:
        """Schedule of the stage as a separate run, which begins at step 0."""
        return Schedule.of(replace(self.config, stages=()))

    @property
    def samples(self) -> int:
        """Number of sequences of the stage, counted in the stage's sequence length."""
        return self.own.total_samples

    @property
    def end_step(self) -> int:
        """Last step of the stage, counted from the start of the run."""
        return self.begin_step + self.own.steps

    def schedule(self, progress: Progress | None) -> Schedule:
        """Return the schedule of the run during this stage.

        progress: any progress within the stage; None at the start of the run.
        """
        if not self.name:
            return Schedule.of(self.config, progress.batch_changes if progress else ())
        own, (steps, tokens) = self.own, self.run
        begin = progress.begin_samples if progress else 0
        made = replace(
            own,
            steps=self.end_step,
            begin_step=self.begin_step,
            begin_samples=begin,
            run_steps=steps,
            run_tokens=tokens,
        )
        if self.own_rates:
            return replace(made, rate_samples=begin, rate_end=begin + own.rate_end)
        assert self.first is not None and self.last is not None
        length = own.sample_tokens
        warmup = math.ceil(self.first.warmup_samples * self.first.sample_tokens / length)
        decay = math.ceil(self.last.decay_samples * self.last.sample_tokens / length)
        return replace(
            made, warmup_samples=warmup, decay_samples=decay, rate_end=math.ceil(tokens / length)
        )

    def resumed(self, progress: Progress) -> Progress:
        """Return a checkpoint's progress, with a change of the batch size recorded in it.

        If the configuration's batch size is that of the checkpoint, the progress is unchanged.
        """
        if self.schedule(progress).samples_at(progress.step) == progress.consumed_samples:
            return progress
        changes = dict(progress.batch_changes) | {progress.step: progress.consumed_samples}
        return replace(progress, batch_changes=tuple(changes.items()))

    def entered(self, progress: Progress, length: int, drawn: str) -> Progress:
        """Return the progress at the start of the stage.

        progress: progress at the end of the previous stage. length: tokens per sequence of the
        previous stage. drawn: hash of what decides the stage's samples (`drawn_by`).
        """
        begun = progress.begun(length, self.config.data.seq_length)
        order: dict[str, Any] = {
            "order_begin": begun.consumed_samples,
            "order_samples": self.samples,
            "passed_over": 0,
        }
        return replace(begun, stage=self.number, drawn=drawn, **order)

    def needs(self) -> dict[str, int]:
        """Return the number of tokens that the stage reserves in each training source.

        A blend reserves a few extra samples per source.
        """
        sources, length = self.config.data.train, self.config.data.seq_length
        full = sum(source.weight for source in sources)
        more = len(sources) if len(sources) > 1 else 0
        return {
            source.prefix: (math.ceil(self.samples * source.weight / full) + more) * length + 1
            for source in sources
        }


def parts_of(config: RunConfig) -> list[Part]:
    """Return the run's stages, each in the form of a separate run.

    A run without stages gives a list with one part, the run itself.
    """
    if not config.stages:
        return [Part(config)]
    parts = list[Part]()
    step = 0
    tokens = 0
    for number, stage in enumerate(config.stages):
        part = Part(
            _config_of(config, number, stage),
            number,
            stage.name,
            step,
            tokens,
            own_rates=_own_rates(stage),
        )
        step, tokens = part.end_step, tokens + part.own.steps * part.own.step_tokens
        parts.append(part)

    def full_schedule(part: Part) -> Schedule:
        """Return the schedule of the full run in steps of this stage."""
        train = replace(part.config.train, steps=step)
        return Schedule.of(replace(part.config, stages=(), optimizer=config.optimizer, train=train))

    first, last = full_schedule(parts[0]), full_schedule(parts[-1])
    return [replace(part, run=(step, tokens), first=first, last=last) for part in parts]


def facts_of(part: Part, facts: DataFacts) -> DataFacts:
    """Return the facts about the stage's own data.

    The training sources have the order of the stage's blend.
    """
    if not part.name:
        return facts
    train = {source.prefix: source for source in facts.sources if source.split == "train"}
    own = [
        replace(train[source.prefix], key=f"stages.{part.number}: {source.prefix}")
        for source in part.config.data.train
    ]
    return replace(
        facts, sources=(*own, *(source for source in facts.sources if source.split != "train"))
    )


def check_stages(config: RunConfig) -> Iterator[str]:
    """Yield an error text for each mistake in the list of stages."""
    for key in ("steps", "tokens"):
        if (value := getattr(config.train, key)) is not None:
            yield (
                f"train.{key} = {value}, but stages determine the length of the run; set "
                f"train.{key}=null"
            )
    if config.checkpoint.fork is not None:
        yield (
            f"checkpoint.fork = {config.checkpoint.fork} and stages are both given: a fork cannot "
            "have stages; set stages=[]"
        )
    if config.optimizer.from_step:
        yield (
            f"optimizer.from_step = {config.optimizer.from_step} applies only to a fork; use "
            "stages.N.schedule to give a stage its own schedule"
        )
    for number, stage in enumerate(config.stages):
        if (stage.steps is None) == (stage.tokens is None):
            state = "neither is given" if stage.steps is None else "both are given"
            yield (
                f"stages.{number}.steps and stages.{number}.tokens set the length of "
                f"{stage.name}, and {state}: give one"
            )
        if stage.name in [other.name for other in config.stages[:number]]:
            yield (
                f"stages.{number}.name = {stage.name} is also the name of an earlier stage; "
                "choose another"
            )


def render_stages(plans: Sequence[tuple[Part, Plan]]) -> str:
    """Return one line per stage with its settings and plan, after a line with the totals."""
    first, last = plans[0][0], plans[-1][0]
    _, run_tokens = first.run
    lines = [f"stages: {last.end_step:,} steps, {run_tokens:,} tokens"]
    for part, plan in plans:
        data = part.config.data
        optimizer = part.config.optimizer
        schedule = part.own
        tokens = schedule.steps * schedule.step_tokens
        full = sum(source.weight for source in data.train)
        blend = ", ".join(f"{source.weight / full:.0%} {source.prefix}" for source in data.train)
        rates = (
            f"{optimizer.schedule} {optimizer.lr:g} to {optimizer.min_lr:g}"
            if part.own_rates
            else "the run's schedule"
        )
        lines.append(
            f"  {part.name}: steps {part.begin_step + 1:,} to {part.end_step:,}, {tokens:,} "
            f"tokens, batches of {schedule.batch_samples} x {schedule.sample_tokens}, {rates}, "
            f"documents {data.documents}, {si(tokens * plan.train_flops)}FLOP, peak "
            f"{gib(plan.peak_memory)}; {blend}"
        )
    return "\n".join(lines)


def check_stages_data(config: RunConfig) -> DataFacts:
    """Check the data of every stage and return the facts of all sources.

    The checks are `check_data`, `check_distinct` and `check_document_ends`.

    Raises:
        ConfigError, StorageError: see the checks. Errors in the data of a stage name the stage.
    """
    stage_facts = list[DataFacts]()
    for part in parts_of(config):
        with _of_stage(part):
            stage_facts.append(check_data(part.config))
            check_distinct(stage_facts[-1].sources)
            check_document_ends(part.config, stage_facts[-1])
            if (stage_facts[0].vocab_size, stage_facts[0].eod_id) != (
                stage_facts[-1].vocab_size,
                stage_facts[-1].eod_id,
            ):
                raise ConfigError(
                    "data: the tokenizer differs from the first stage's; all sources of a run "
                    "need the same one"
                )
    sources = {
        (source.split, source.prefix): source
        for facts in reversed(stage_facts)
        for source in reversed(facts.sources)
    }
    made = replace(stage_facts[0], sources=tuple(reversed(sources.values())))
    check_distinct(made.sources)  # detects copies in different stages
    return made


@contextmanager
def _of_stage(part: Part) -> Iterator[None]:
    """Add the name of the stage to a ConfigError raised in the block."""
    try:
        yield
    except ConfigError as error:
        if not part.name:
            raise
        raise ConfigError(f"stages.{part.number} ({part.name}): {error}") from None


def drawn_by(parts: Sequence[Part], contents: Mapping[str, str]) -> str:
    """Return a hash of everything that determines the samples of the last stage in ``parts``.

    parts: the run's stages from the first on. contents: hash of the content of each source, by its
    prefix. The hash is empty for a run without stages.
    """
    if not parts[-1].name:
        return ""
    needs = [
        {contents[prefix]: tokens for prefix, tokens in part.needs().items()} for part in parts
    ]
    last = parts[-1].config
    identity = [needs, last.train.seed, last.data.packing, parts[-1].begin_step]
    return sha256_json(identity, sort_keys=False)[:32]


def _own_rates(stage: Stage) -> bool:
    return any(getattr(stage, key) is not None for key in _RATES)


def _config_of(config: RunConfig, number: int, stage: Stage) -> RunConfig:
    def given(*keys: str) -> dict[str, Any]:
        return {key: getattr(stage, key) for key in keys if getattr(stage, key) is not None}

    data = replace(
        config.data, train=stage.data or config.data.train, **given("seq_length", "documents")
    )
    sizes = given("micro_batch_size", "global_batch_size")
    train = replace(config.train, steps=stage.steps, tokens=stage.tokens, **sizes)
    optimizer = config.optimizer
    if _own_rates(stage):
        unset = dict.fromkeys(("warmup_tokens", "warmup_fraction", "decay_tokens", "decay_steps"))
        optimizer = replace(
            optimizer, **{**unset, "warmup_steps": 0, "from_step": 0, **given(*_RATES)}
        )
    made = replace(config, data=data, train=train, optimizer=optimizer, stages=())
    steps = Schedule.of(
        replace(made, optimizer=replace(optimizer, warmup_fraction=None, from_step=0))
    ).steps
    return replace(
        made, train=replace(train, steps=steps, tokens=None), stages=config.stages[: number + 1]
    )
