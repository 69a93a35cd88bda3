"""Where an attempt starts: at the run's own newest good checkpoint, at the weights of another, or anew; collective."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from fem_common.errors import ConfigError
from pretrain.checkpoint.folder import Found, Progress, find
from pretrain.checkpoint.resume import Change, changes, check, check_model
from pretrain.checkpoint.store import WEIGHTS_ALONE, Checkpoints
from pretrain.config import RunConfig
from pretrain.data.facts import Contents, DataFacts
from pretrain.ranks import from_rank_0
from pretrain.schedule import Schedule


@dataclass(frozen=True)
class Start:
    """A position, and the checkpoint to read for it (None: anew)."""

    progress: Progress
    found: Found | None = None
    own: bool = False  # of this run: its optimizer and random states are read too
    changed: list[Change] = field(default_factory=list)  # in the configuration since


def find_start(config: RunConfig, facts: DataFacts, contents: Contents, checkpoints: Checkpoints) -> Start:
    """The start of an attempt; asked again after `Checkpoints.pass_over`, the next one.

    Raises:
        ConfigError: the configuration does not fit the checkpoint. StorageError: there are checkpoints, and none is good.
    """
    schedule, own = Schedule.of(config), checkpoints.newest()
    if own is not None:
        _check_is_wanted(config, own)
        changed = changes(own.manifest["config"], config)
        _check_resumable(own, changed, config, facts, contents, schedule)
        order = max(own.progress.order_samples, schedule.total_samples)
        return Start(replace(own.progress, order_samples=order), own, True, changed)
    load = config.checkpoint.load
    found = from_rank_0(lambda: find(Path(load))) if load else None
    if found is not None:
        check_model(found.path, found.manifest["config"], config)
    return Start(Progress(0, 0, schedule.total_samples), found)


def _check_is_wanted(config: RunConfig, own: Found) -> None:
    if config.checkpoint.resume == "none":
        raise ConfigError(
            f"checkpoint.resume = none, but {own.path} exists; set checkpoint.resume=auto to continue, or another run_dir to start anew"
        )
    if own.manifest.get("contents") == WEIGHTS_ALONE:
        raise ConfigError(
            f"{own.path} holds weights alone, no optimizer's state to resume from: start from them with checkpoint.load={own.path} in "
            "another run_dir"
        )


def _check_resumable(
    found: Found, changed: list[Change], config: RunConfig, facts: DataFacts, contents: Contents, schedule: Schedule
) -> None:
    if found.manifest["data"] != contents.key:
        raise ConfigError(
            f"checkpoint {found.path} was trained on other data than data.train and data.valid name now; restore the data, or start a new "
            f"run (another run_dir) from its weights with checkpoint.load={found.path}"
        )
    check(found.path, changed, config)
    drawn = found.progress.order_samples
    if schedule.total_samples <= drawn or config.data.packing == "best_fit":  # of which every pass has its own order
        return
    room = {source.prefix: source.tokens for source in facts.sources if source.split == "train"}
    weights = {source.prefix: source.weight for source in config.data.train}
    for prefix, tokens in room.items():
        if schedule.total_samples * schedule.sample_tokens * weights[prefix] / sum(weights.values()) > tokens:
            raise ConfigError(
                f"the run is now {schedule.total_samples} samples long, but its data order was drawn for {drawn} and "
                f"{prefix} would be read more than once: samples already seen would come again out of order; keep the run within "
                f"{drawn} samples, or start a new run from checkpoint.load={found.path}"
            )
