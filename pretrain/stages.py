"""Stages: a run as runs one after another in one folder, each with its own data, lengths, batch and rates. Pure arithmetic, no torch.

A stage begins at the checkpoint in which the one before ended. What it reads of a source follows what earlier stages read of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pretrain.checkpoint.folder import Progress
from pretrain.config import RunConfig, Stage
from pretrain.data.facts import DataFacts
from pretrain.schedule import Schedule

_RATES = ("lr", "min_lr", "schedule", "warmup_steps", "decay_steps")


@dataclass(frozen=True)
class Part:
    """A stage as a run of its own, or a run that has none.

    config: of the run, its settings those of the stage, ``stages`` those up to it; train.steps are the stage's own. begin_step,
    begin_tokens: what the stages before it have done. run: the steps and tokens of all.
    """

    config: RunConfig
    number: int = 0
    name: str = ""
    begin_step: int = 0
    begin_tokens: int = 0
    run: tuple[int, int] = (0, 0)
    own_rates: bool = True
    first: Schedule | None = None  # of the first stage and of the last, whose steps warm-up and decay of the whole run are told in
    last: Schedule | None = None

    @cached_property
    def own(self) -> Schedule:
        """The schedule of the stage by itself."""
        return Schedule.of(replace(self.config, stages=()))

    @property
    def samples(self) -> int:
        """Sequences of the stage, of its own length."""
        return self.own.total_samples

    @property
    def end_step(self) -> int:
        """The run's step after which the stage is over."""
        return self.begin_step + self.own.steps

    def schedule(self, progress: Progress | None) -> Schedule:
        """Of the run while it is in this stage; ``progress``: somewhere in it (None: the run begins)."""
        if not self.name:
            return Schedule.of(self.config, progress.begin_step, progress.begin_samples) if progress else Schedule.of(self.config)
        own, (steps, tokens) = self.own, self.run
        begin = progress.begin_samples if progress else 0
        made = replace(own, steps=self.end_step, begin_step=self.begin_step, begin_samples=begin, run_steps=steps, run_tokens=tokens)
        if self.own_rates:
            return replace(made, rate_samples=begin)
        assert self.first is not None and self.last is not None
        length = own.sample_tokens
        warmup = math.ceil(self.first.warmup_samples * self.first.sample_tokens / length)
        decay = math.ceil(self.last.decay_samples * self.last.sample_tokens / length)
        return replace(made, warmup_samples=warmup, decay_samples=decay, rate_end=math.ceil(tokens / length))

    def entered(self, progress: Progress, length: int, drawn: str) -> Progress:
        """The start of the stage from the end of the one before, whose sequences had ``length`` tokens; ``drawn``: see `Progress`."""
        consumed = -(-progress.consumed_samples * length // self.config.data.seq_length)
        begin = {"begin_step": progress.step, "begin_samples": consumed, "order_begin": consumed}
        return replace(progress, consumed_samples=consumed, order_samples=self.samples, stage=self.number, drawn=drawn, **begin)

    def needs(self) -> dict[str, int]:
        """Source of training -> tokens that are set apart for the stage; of a blend a few samples more than its share."""
        sources, length = self.config.data.train, self.config.data.seq_length
        whole, more = sum(source.weight for source in sources), len(sources) if len(sources) > 1 else 0
        return {source.prefix: (math.ceil(self.samples * source.weight / whole) + more) * length + 1 for source in sources}


def parts_of(config: RunConfig) -> list[Part]:
    """The run's stages, each as a run of its own; without stages the run itself."""
    if not config.stages:
        return [Part(config)]
    parts, step, tokens = list[Part](), 0, 0
    for number, stage in enumerate(config.stages):
        part = Part(_config_of(config, number, stage), number, stage.name, step, tokens, own_rates=_own_rates(stage))
        step, tokens = part.end_step, tokens + part.own.steps * part.own.step_tokens
        parts.append(part)
    # In steps of these two: the schedule of the whole run, as it begins and as it ends.
    optimizer = config.optimizer
    first, last = (
        Schedule.of(replace(p.config, stages=(), optimizer=optimizer, train=replace(p.config.train, steps=step)))
        for p in (parts[0], parts[-1])
    )
    return [replace(part, run=(step, tokens), first=first, last=last) for part in parts]


def facts_of(part: Part, facts: DataFacts) -> DataFacts:
    """The facts of a stage's own data, in the order of its blend."""
    if not part.name:
        return facts
    train = {source.prefix: source for source in facts.sources if source.split == "train"}
    own = [replace(train[source.prefix], key=f"stages.{part.number}: {source.prefix}") for source in part.config.data.train]
    return replace(facts, sources=(*own, *(source for source in facts.sources if source.split != "train")))


def drawn_by(parts: Sequence[Part], contents: Mapping[str, str]) -> str:
    """A hash of all that decides what the last of these stages reads; ``contents``: source -> hash of what it holds. Empty: no stages."""
    if not parts[-1].name:
        return ""
    needs = [{contents[prefix]: tokens for prefix, tokens in part.needs().items()} for part in parts]
    last = parts[-1].config
    return hashlib.sha256(json.dumps([needs, last.train.seed, last.data.packing, parts[-1].begin_step]).encode()).hexdigest()[:32]


def _own_rates(stage: Stage) -> bool:
    return any(getattr(stage, key) is not None for key in _RATES)


def _config_of(config: RunConfig, number: int, stage: Stage) -> RunConfig:
    def given(*keys: str) -> dict[str, Any]:
        return {key: getattr(stage, key) for key in keys if getattr(stage, key) is not None}

    data = replace(config.data, train=stage.data or config.data.train, **given("seq_length", "documents"))
    sizes = given("micro_batch_size", "global_batch_size")
    train = replace(config.train, steps=stage.steps, tokens=stage.tokens, **sizes)
    optimizer = config.optimizer
    if _own_rates(stage):
        unsaid = dict.fromkeys(("warmup_tokens", "warmup_fraction", "decay_tokens", "decay_steps"))
        optimizer = replace(optimizer, **{**unsaid, "warmup_steps": 0, "from_step": 0, **given(*_RATES)})
    made = replace(config, data=data, train=train, optimizer=optimizer, stages=())
    steps = Schedule.of(replace(made, optimizer=replace(optimizer, warmup_fraction=None, from_step=0))).steps
    return replace(made, train=replace(train, steps=steps, tokens=None), stages=config.stages[: number + 1])
