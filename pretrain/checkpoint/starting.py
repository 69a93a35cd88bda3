"""Decide at which step and from which checkpoint an attempt starts.

The candidates are the run's own newest good checkpoint, the weights of another checkpoint, and new
weights. All ranks must call these functions together.
"""

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
from pretrain.checkpoint.manager import WEIGHTS_ALONE, Checkpoints
from pretrain.checkpoint.resume import FREE, Change, changes, check, check_model
from pretrain.collectives import from_rank_0
from pretrain.config import RunConfig
from pretrain.data.facts import Contents, DataFacts
from pretrain.data.order import longest_order, passes_drawn
from pretrain.data.store_cache import identity
from pretrain.run_directory import FORK, RUN_ID, mirror_of, read_fork
from pretrain.schedule import Schedule
from pretrain.spikes import carried_over
from pretrain.training_stages import Part, drawn_by, facts_of

# Settings that a fork may change although a resume may not.
_FORKS_OWN = re.compile(r"data\.|train\.seed$|model\.rope_scaling\.")
# Settings that decide an order of samples, besides its data.
_ORDER = re.compile(r"data\.(train\..*weight|seq_length|packing)$|train\.seed$")
# Settings that may change while a lost run directory is restored from its mirror.
_SAME_RUN = re.compile(r"parallel\.|train\.(steps|tokens)$|data\..*\.prefix$")


@dataclass(frozen=True)
class Start:
    """A position in the run, and the checkpoint from which training continues at that position.

    found: the checkpoint, None to start with new weights. own: True if it is a checkpoint of this
    run. forked: True if it is the checkpoint at which a fork begins. changed: configuration keys
    that differ from the checkpoint's.
    """

    progress: Progress
    found: Found | None = None
    own: bool = False  # its optimizer and random states are read too
    forked: bool = False  # its optimizer and random states are read too
    # Configuration changes since the checkpoint was written.
    changed: list[Change] = field(default_factory=list)


def find_start(
    parts: Sequence[Part], facts: DataFacts, contents: Contents, checkpoints: Checkpoints
) -> tuple[Start, Part]:
    """Return the start of an attempt and the stage to which it belongs.

    Call it again after `Checkpoints.pass_over` to get the next candidate.

    facts, contents: facts about, and identities of, the data of all stages.

    Raises:
        ConfigError: the configuration does not fit the checkpoint.
        StorageError: checkpoints exist, and none is good.
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
    """Run the block's checks; additionally check a fetched checkpoint, and delete a refused one.

    A fetched checkpoint may belong to another run. It is refused if the block raises an error or if
    a setting differs that cannot change within a run. For a local checkpoint only the block runs.

    Raises:
        ConfigError: the block's own error, or the checkpoint belongs to another run.
    """
    fetched, mirror = own.path.parent == checkpoints.fetching, mirror_of(config)
    try:
        yield
        if not fetched:
            return
        # A fetched run id belongs to a run with this run directory.
        recorded = from_rank_0(lambda: (checkpoints.fetching / RUN_ID).is_file())
        others = []
        for change in changed:
            fixed = change.rule != FREE and not _SAME_RUN.match(change.key)
            if fixed or (change.key == "run_dir" and not recorded):
                others.append(str(change))
        if others:
            raise ConfigError(f"{own.path} is of a run with other settings: {', '.join(others)}")
    except ConfigError as error:
        if not fetched:
            raise
        message = str(error).replace(f"checkpoint {own.path}", own.path.name)
        message = message.replace(str(own.path), own.path.name)
        what, _, fix = message.partition("; ")
        way = ""
        if not fix:  # the message proposes no fix yet
            run_dir = own.path.parent.parent
            way = (
                ", or, if it is this run, take it over: python -m tools.checkpoint fetch "
                f"{run_dir} {mirror}"
            )
        from_rank_0(lambda: shutil.rmtree(checkpoints.fetching))
        raise ConfigError(
            f"checkpoint.mirror = {mirror}: {what}; restore them, or set another location{way}"
        ) from None


def contents_of(parts: Sequence[Part], part: Part, contents: Contents) -> Contents:
    """Return the contents of the data of the stages up to and including ``part``."""
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
    """Return the hash of everything that determines the samples of the stages up to ``part``."""
    held = {
        source.prefix: source.idx_sha256 for source in contents.sources if source.split == "train"
    }
    prefixes = {source.prefix for each in parts for source in each.config.data.train}
    return drawn_by(
        parts[: part.number + 1], {prefix: held[identity(prefix)] for prefix in prefixes}
    )


def _check_stages(own: Found, parts: Sequence[Part], part: Part, contents: Contents) -> None:
    """Raise ConfigError if a stage up to the checkpoint's stage has changed.

    These stages determined the samples that the checkpoint was trained on.
    """
    same = own.progress.stage < len(parts) and own.progress.drawn == _drawn(parts, part, contents)
    if same and (not part.name or part.resumed(own.progress) == own.progress):
        return
    raise ConfigError(
        f"checkpoint {own.path} is in stage {own.progress.stage} of a run in which the stages up "
        "to it had other lengths, batches or data; restore them (later stages may change), or "
        "start a new run (another run_dir) with --fork and stages=[]"
    )


def fork_start(config: RunConfig, facts: DataFacts, contents: Contents, run_dir: Path) -> Start:
    """Return the start of a run that continues from another run's checkpoint.

    If data, seed and packing are those of the parent, the fork continues the parent's order of
    samples. Otherwise a new order begins.

    Raises:
        ConfigError: the checkpoint does not exist, the configuration does not fit it, or no steps
            are left.
    """
    found = from_rank_0(lambda: _parent(config, run_dir))
    if found.manifest.get("contents") == WEIGHTS_ALONE:
        raise ConfigError(
            f"checkpoint.fork = {found.path} contains only weights: start from them with "
            f"checkpoint.load={found.path}"
        )
    changed = changes(found.manifest["config"], config)
    check(found.path, [change for change in changed if not _FORKS_OWN.match(change.key)], config)
    parent = found.progress
    before = found.manifest["config"]["data"]["seq_length"]
    length = config.data.seq_length
    progress = replace(parent.begun(before, length), stage=0, drawn="", rewound=())
    consumed, schedule = progress.consumed_samples, Schedule.of(config, progress.batch_changes)
    if schedule.steps <= parent.step:
        raise ConfigError(
            f"train.{'steps' if config.train.tokens is None else 'tokens'} ends the run at step "
            f"{schedule.steps}, and checkpoint.fork = {found.path} is at step {parent.step}: steps "
            "and tokens include the parent's; increase them"
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
    """Return the checkpoint at which a fork begins.

    Later attempts of the fork use the same checkpoint as the first, even if the parent has newer
    ones.
    """
    record, fork = read_fork(run_dir), config.checkpoint.fork
    assert fork is not None
    if record and str(Path(fork).resolve()) not in (record["parent"], record["checkpoint"]):
        record = None  # written for another parent, before the run had checkpoints
    found = find(Path(record["checkpoint"] if record else fork))
    if record and sha256(found.path / MANIFEST) != record["manifest_sha256"]:
        raise ConfigError(
            f"{found.path} is not the checkpoint that {run_dir} began at ({FORK} has another "
            "hash): choose another run_dir"
        )
    return found


def _check_is_wanted(config: RunConfig, own: Found) -> None:
    """Raise ConfigError if the run must not resume from its checkpoint.

    This is the case if ``checkpoint.resume`` is none, or if the checkpoint has only weights.
    """
    if config.checkpoint.resume == "none":
        raise ConfigError(
            f"checkpoint.resume = none, but {own.path} exists; set checkpoint.resume=auto to "
            "continue, or another run_dir to start a new run"
        )
    if own.manifest.get("contents") == WEIGHTS_ALONE:
        raise ConfigError(
            f"{own.path} contains only weights, no optimizer state to resume from: start from them "
            f"with checkpoint.load={own.path} in another run_dir"
        )


def _trained_on(found: Found, contents: Contents) -> bool:
    """Return True if the checkpoint was trained on the present training data.

    An older manifest has one key for training and validation data together. This key is then
    compared instead.
    """
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
    """Raise ConfigError if data, a setting or the length of the run prevents a resume."""
    if not _trained_on(found, contents):
        older = (
            ""
            if "training_data" in found.manifest
            else " (or data.valid, which its older manifest does not distinguish)"
        )
        raise ConfigError(
            f"checkpoint {found.path} was trained on other data than data.train names now{older}; "
            "restore the data, or start a new run (another run_dir) from its weights with "
            f"checkpoint.load={found.path}"
        )
    check(found.path, changed, config)
    _check_order(found, schedule.total_samples - found.progress.order_begin, config, facts)


def _check_order(found: Found, samples: int, config: RunConfig, facts: DataFacts) -> None:
    """Raise ConfigError unless the checkpoint's order can be extended to ``samples`` samples."""
    drawn = found.progress.order_samples
    longest = longest_order(config, facts, drawn, samples)
    if samples > longest:
        passes_before = passes_drawn(config, facts, drawn)
        passes_now = passes_drawn(config, facts, samples)
        compared = zip(config.data.train, passes_before, passes_now, strict=True)
        reshuffled = [source.prefix for source, before, now in compared if before != now]
        prefix = reshuffled[0] if reshuffled else config.data.train[0].prefix
        raise ConfigError(
            f"the run is now {samples} samples long, but its data order was drawn for {drawn}: "
            f"beyond {longest} samples {prefix} would be reshuffled, and samples already seen "
            f"would repeat; keep the run within {longest} samples, or start a new run from "
            f"checkpoint.load={found.path}"
        )
