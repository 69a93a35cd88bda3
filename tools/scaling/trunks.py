"""Trunks: of runs that differ only in length the longest is trained completely, the others as forks
of it from the start of their decay. The module does not import torch.

With WSD and a warm-up in steps, a run does not depend on its length before its decay begins: until
then it equals the longer run bit for bit (`pretrain --fork`; Hägele et al. 2024, arXiv 2405.18392).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from fem_common.errors import ConfigError
from pretrain.config import RunConfig
from pretrain.data.facts import DataFacts
from pretrain.data.order import passes_drawn
from pretrain.schedule import Schedule

if TYPE_CHECKING:
    from tools.scaling.planned_runs import PlannedRun, Planner


def forked(planner: Planner, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs in their order; runs with the same beginning as a longer one become forks of
    it.

    Raises ConfigError (a schedule is not wsd, data is read more than once, pretrain refuses a
    fork).
    """
    same: dict[tuple[Any, ...], list[PlannedRun]] = {}
    made: dict[str, PlannedRun] = {}
    decays = {run.name: _decay_begins(planner, run) for run in runs}
    for run in runs:
        same.setdefault((run.variant, run.size, run.learning_rate, run.seed), []).append(run)
    for group in same.values():
        *shorter, trunk = sorted(group, key=attrgetter("steps"))
        forks = [run for run in shorter if decays[run.name] > 0]
        if forks:
            made[trunk.name] = _kept(planner, trunk, [decays[run.name] for run in forks])
            made |= {run.name: _fork(planner, run, trunk, decays[run.name]) for run in forks}
    return [made.get(run.name, run) for run in runs]


def begins_at(fork: str | None) -> tuple[str, int]:
    """Return (run name, step) of the checkpoint at path ``fork``, a value of checkpoint.fork.

    Returns ("", 0) for None, and (``fork``, 0) if the path is not a run's checkpoint.
    """
    found = re.search(r"([^/]+)/checkpoints/step_(\d+)/?$", fork or "")
    return (found[1], int(found[2])) if found else (fork or "", 0)


def _kept(planner: Planner, trunk: PlannedRun, begins: Sequence[int]) -> PlannedRun:
    """Return a trunk whose settings keep the checkpoints at the steps at which its forks begin."""
    config, facts = _prepared(planner, trunk)
    _check_order(planner, trunk, config, facts)
    return replace(
        trunk,
        settings=(
            *trunk.settings,
            f"checkpoint.keep={json.dumps(sorted({*config.checkpoint.keep, *begins}))}",
        ),
    )


def _fork(planner: Planner, run: PlannedRun, trunk: PlannedRun, begin: int) -> PlannedRun:
    place = f"{planner.study.directory}/{trunk.name}/checkpoints/step_{begin:08d}"
    settings = (*run.settings, f"checkpoint.fork={json.dumps(place, ensure_ascii=False)}")
    made = replace(
        run,
        settings=settings,
        trunk=trunk.name,
        begin_step=begin,
        hours=run.hours and run.hours * (1 - begin / run.steps),
    )
    _prepared(planner, made)
    return made


def _prepared(planner: Planner, run: PlannedRun) -> tuple[RunConfig, DataFacts | None]:
    return planner.prepared(f"run {run.name}", planner.read(f"run {run.name}", run.settings))


def _decay_begins(planner: Planner, run: PlannedRun) -> int:
    """Return the step after which a run decays. Raises ConfigError if its schedule has none."""
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
    if facts is None or config.data.packing == "best_fit":
        return
    total = sum(source.weight for source in config.data.train)
    room = [source.tokens for source in facts.sources if source.split == "train"]
    passes = passes_drawn(config, facts, Schedule.of(config).total_samples)
    for source, tokens, drawn in zip(config.data.train, room, passes, strict=True):
        if drawn != (1, False):
            times = trunk.tokens * source.weight / total / tokens
            raise ConfigError(
                f"{planner.study.path}: trunks: run {trunk.name} reads {source.prefix} {times:.2f}"
                " times, in an order that depends on its length, so it does not begin with the"
                " same data as shorter runs; prepare more data, shorten it, or set trunks: false"
            )
