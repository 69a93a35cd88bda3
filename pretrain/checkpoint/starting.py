"""Where an attempt starts: at the run's own newest good checkpoint, at the weights of another, or anew; collective."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fem_common.errors import ConfigError
from fem_common.files import sha256
from pretrain.checkpoint.folder import MANIFEST, Found, Progress, find
from pretrain.checkpoint.resume import FREE, Change, changes, check, check_model
from pretrain.checkpoint.store import WEIGHTS_ALONE, Checkpoints
from pretrain.config import RunConfig
from pretrain.data.facts import Contents, DataFacts
from pretrain.data.order import longest_order, passes_drawn
from pretrain.data.store_cache import identity
from pretrain.ranks import from_rank_0
from pretrain.run_directory import FORK, RUN_ID, mirror_of, read_fork
from pretrain.schedule import Schedule
from pretrain.spikes import carried_over
from pretrain.stages import Part, drawn_by, facts_of

_FORKS_OWN = re.compile(
    r"data\.|train\.seed$|model\.rope_scaling\."
)  # what a fork may change although a resume may not
_ORDER = re.compile(
    r"data\.(train\..*weight|seq_length|packing)$|train\.seed$"
)  # what decides an order of samples beside its data
_SAME_RUN = re.compile(
    r"parallel\.|train\.(steps|tokens)$|data\..*\.prefix$"
)  # what may change while a run directory is lost


@dataclass(frozen=True)
class Start:
    """A position, and the checkpoint to read for it (None: anew)."""

    progress: Progress
    found: Found | None = None
    own: bool = False  # of this run: its optimizer and random states are read too
    forked: bool = False  # of another run, and they are read as well
    changed: list[Change] = field(default_factory=list)  # in the configuration since


def find_start(
    parts: Sequence[Part], facts: DataFacts, contents: Contents, checkpoints: Checkpoints
) -> tuple[Start, Part]:
    """The start of an attempt, and the stage that it is in; asked again after `Checkpoints.pass_over`, the next one.

    facts, contents: of the data of all stages.

    Raises:
        ConfigError: the configuration does not fit the checkpoint. StorageError: there are checkpoints, and none is good.
    """
    own = checkpoints.newest()
    part = parts[min(own.progress.stage, len(parts) - 1) if own else 0]
    config = part.config
    if own is None and config.checkpoint.fork is not None:
        return fork_start(config, facts, contents, checkpoints.folder.parent), part
    progress = part.resumed(own.progress) if own else None
    schedule = part.schedule(progress)
    if own is not None and progress is not None:
        changed = changes(own.manifest["config"], config)
        with _judged(own, changed, config, checkpoints):
            _check_is_wanted(config, own)
            _check_stages(own, parts, part, contents)
            _check_resumable(
                own,
                changed,
                config,
                facts_of(part, facts),
                contents_of(parts, part, contents),
                schedule,
            )
        own = checkpoints.accept(own)
        if part.name and own.progress.step >= part.end_step and part is not parts[-1]:
            following = parts[part.number + 1]
            other_data = following.config.data.train != config.data.train
            recent = carried_over(own, following.config, other_data=other_data)
            entered = following.entered(
                own.progress, config.data.seq_length, _drawn(parts, following, contents)
            )
            return Start(replace(entered, recent=recent), own, True), following
        order = max(progress.order_samples, schedule.total_samples - progress.order_begin)
        progress = replace(progress, order_samples=order, recent=carried_over(own, config))
        return Start(progress, own, True, changed=changed), part
    load = config.checkpoint.load
    found = from_rank_0(lambda: find(Path(load))) if load else None
    if found is not None:
        check_model(found.path, found.manifest["config"], config)
    return Start(
        Progress(0, 0, schedule.total_samples, drawn=_drawn(parts, part, contents)), found
    ), part


@contextmanager
def _judged(
    own: Found, changed: Sequence[Change], config: RunConfig, checkpoints: Checkpoints
) -> Iterator[None]:
    """Check a checkpoint that may come from another run's mirror more strictly than the run's own; a refused one is removed.

    Raises:
        ConfigError: the block's own, or a setting differs that makes it another run.
    """
    fetched, mirror = own.path.parent == checkpoints.fetching, mirror_of(config)
    try:
        yield
        if not fetched:
            return
        recorded = from_rank_0(
            lambda: (checkpoints.fetching / RUN_ID).is_file()
        )  # with the same run directory as here
        others = [
            str(it)
            for it in changed
            if (it.rule != FREE and not _SAME_RUN.match(it.key))
            or (it.key == "run_dir" and not recorded)
        ]
        if others:
            raise ConfigError(f"{own.path} is of a run with other settings: {', '.join(others)}")
    except ConfigError as error:
        if not fetched:
            raise
        what, _, hard = (
            str(error)
            .replace(f"checkpoint {own.path}", own.path.name)
            .replace(str(own.path), own.path.name)
            .partition("; ")
        )
        way = (
            ""
            if hard
            else f", or, if it is this run, take it over: python -m tools.checkpoint fetch {own.path.parent.parent} {mirror}"
        )
        from_rank_0(lambda: shutil.rmtree(checkpoints.fetching))
        raise ConfigError(
            f"checkpoint.mirror = {mirror}: {what}; restore them, or name another place{way}"
        ) from None


def contents_of(parts: Sequence[Part], part: Part, contents: Contents) -> Contents:
    """What the data of the stages up to this one hold."""
    if not part.name:
        return contents
    used = {
        identity(source.prefix)
        for earlier in parts[: part.number + 1]
        for source in earlier.config.data.train
    }
    return Contents(
        tuple(
            source
            for source in contents.sources
            if source.split != "train" or source.prefix in used
        )
    )


def _drawn(parts: Sequence[Part], part: Part, contents: Contents) -> str:
    held = {
        source.prefix: source.idx_sha256 for source in contents.sources if source.split == "train"
    }
    prefixes = {source.prefix for each in parts for source in each.config.data.train}
    return drawn_by(
        parts[: part.number + 1], {prefix: held[identity(prefix)] for prefix in prefixes}
    )


def _check_stages(own: Found, parts: Sequence[Part], part: Part, contents: Contents) -> None:
    """Raises ConfigError where stages up to the checkpoint's own, which decide what it has read, are others now."""
    same = own.progress.stage < len(parts) and own.progress.drawn == _drawn(parts, part, contents)
    if same and (not part.name or part.resumed(own.progress) == own.progress):
        return
    raise ConfigError(
        f"checkpoint {own.path} is in stage {own.progress.stage} of a run whose stages up to it had other lengths, batches or data; "
        "restore them (later ones may change), or start a new run (another run_dir) with --fork and stages=[]"
    )


def fork_start(config: RunConfig, facts: DataFacts, contents: Contents, run_dir: Path) -> Start:
    """The start of a run that goes on from another's checkpoint: in its order of samples, or in one of its own where the data are others.

    Raises:
        ConfigError: there is no such checkpoint, the configuration does not fit it, or nothing is left to do.
    """
    found = from_rank_0(lambda: _parent(config, run_dir))
    if found.manifest.get("contents") == WEIGHTS_ALONE:
        raise ConfigError(
            f"checkpoint.fork = {found.path} holds weights alone: start from them with checkpoint.load={found.path}"
        )
    changed = changes(found.manifest["config"], config)
    check(found.path, [change for change in changed if not _FORKS_OWN.match(change.key)], config)
    parent, before, length = (
        found.progress,
        found.manifest["config"]["data"]["seq_length"],
        config.data.seq_length,
    )
    progress = replace(parent.begun(before, length), stage=0, drawn="", rewound=())
    consumed, schedule = progress.consumed_samples, Schedule.of(config, progress.batch_changes)
    if schedule.steps <= parent.step:
        raise ConfigError(
            f"train.{'steps' if config.train.tokens is None else 'tokens'} ends the run at step {schedule.steps}, and checkpoint.fork = "
            f"{found.path} is at step {parent.step}: steps and tokens count the parent's; give more"
        )
    if (
        _trained_on(found, contents)
        and not parent.drawn
        and not any(_ORDER.match(change.key) for change in changed)
    ):
        order = max(parent.order_samples, schedule.total_samples - parent.order_begin)
        _check_order(found, order, config, facts)
        progress = replace(progress, order_samples=order, recent=carried_over(found, config))
        return Start(progress, found, forked=True, changed=changed)
    progress = replace(
        progress,
        order_samples=schedule.total_samples - consumed,
        order_begin=consumed,
        passed_over=0,
        recent=(),
    )
    return Start(progress, found, forked=True, changed=changed)


def _parent(config: RunConfig, run_dir: Path) -> Found:
    """The checkpoint that a fork begins at: the one that an earlier attempt of it began at, whatever came after it."""
    record, fork = read_fork(run_dir), config.checkpoint.fork
    assert fork is not None
    if record and str(Path(fork).resolve()) not in (record["parent"], record["checkpoint"]):
        record = None  # of another parent, before anything came of it
    found = find(Path(record["checkpoint"] if record else fork))
    if record and sha256(found.path / MANIFEST) != record["manifest_sha256"]:
        raise ConfigError(
            f"{found.path} is not the checkpoint that {run_dir} began at ({FORK} has another hash): choose another run_dir"
        )
    return found


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


def _trained_on(found: Found, contents: Contents) -> bool:
    """Whether the training data are those of the checkpoint; an older manifest has one key of training and validation data together."""
    name = "training_data" if "training_data" in found.manifest else "data"
    return bool(found.manifest[name] == contents.keys[name])


def _check_resumable(
    found: Found,
    changed: list[Change],
    config: RunConfig,
    facts: DataFacts,
    contents: Contents,
    schedule: Schedule,
) -> None:
    if not _trained_on(found, contents):
        older = (
            ""
            if "training_data" in found.manifest
            else " (or data.valid, which its older manifest does not tell apart)"
        )
        raise ConfigError(
            f"checkpoint {found.path} was trained on other data than data.train names now{older}; restore the data, or start a new "
            f"run (another run_dir) from its weights with checkpoint.load={found.path}"
        )
    check(found.path, changed, config)
    _check_order(found, schedule.total_samples - found.progress.order_begin, config, facts)


def _check_order(found: Found, samples: int, config: RunConfig, facts: DataFacts) -> None:
    """Raises ConfigError where the checkpoint's order of samples has no such beginning of ``samples`` samples."""
    drawn = found.progress.order_samples
    longest = longest_order(config, facts, drawn, samples)
    if samples > longest:
        both = zip(
            config.data.train,
            *(passes_drawn(config, facts, each) for each in (drawn, samples)),
            strict=True,
        )
        prefix = next(
            (source.prefix for source, before, after in both if before != after),
            config.data.train[0].prefix,
        )
        raise ConfigError(
            f"the run is now {samples} samples long, but its data order was drawn for {drawn}: beyond {longest} samples {prefix} would be "
            f"shuffled anew, and samples already seen would come again; keep the run within {longest} samples, or start a new run from "
            f"checkpoint.load={found.path}"
        )
