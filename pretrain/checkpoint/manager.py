"""Write and read the checkpoints of a run; all ranks call these methods together.

A checkpoint is written under a temporary name, synced and renamed; the file ``latest`` then names
it. It is verified before it is read, and any layout can read it.

The tensors are in megatron.core.dist_checkpointing's ``torch_dist`` format. The trainer's own state
is in ``manifest.json``, with every file's size and the hashes of the files that are pickles.

Reading executes no code. Tensors contain none. torch reads ``common.pt`` with ``weights_only``. The
format stores ``.metadata`` as a pickle; its hash is checked first, and it may name only a few
classes (``pretrain.checkpoint.reader``).
"""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from fem_common.config import plain
from fem_common.errors import ConfigError, StorageError, reason
from fem_common.files import named_errors, remove_leftovers
from fem_megatron.megatron import upstream
from pretrain.checkpoint.folder import (
    WRITING,
    Found,
    Inherited,
    Log,
    Progress,
    damage,
    newest_before_bad_steps,
    newest_first,
    newest_good,
    publish_step,
    rewind,
    set_aside,
)
from pretrain.checkpoint.manifest import FORMAT, RNG_DEVICE, VERSIONS
from pretrain.checkpoint.mirroring import FETCHED, Mirroring, take_in
from pretrain.checkpoint.random_state import kind_of, restore_rng, rng_tensors
from pretrain.checkpoint.reader import CheckedReader, DamagedCheckpoint
from pretrain.checkpoint.tensors import TensorSave
from pretrain.collectives import from_rank_0
from pretrain.config import RunConfig
from pretrain.engines import Engine
from pretrain.engines.sharding import data_parallel_group
from pretrain.run_directory import mirror_of
from pretrain.spikes import rewinds_to

# manifest["contents"] of a checkpoint without optimizer and random state; checkpoints of a run have
# no such key.
WEIGHTS_ALONE = "weights"


class Checkpoints:
    """The checkpoints of one run. All ranks must call every method together."""

    def __init__(self, folder: Path, config: RunConfig, log: Log) -> None:
        self.folder = folder
        self.config = config
        self.log = log
        # Called with the message of a failed save if training continues.
        self.alert: Log = lambda text: None
        self.inherited = Inherited(config.data.seq_length)
        self.last: Path | None = None  # the newest complete checkpoint
        # Checkpoints that another reader uses, which are never deleted.
        self.in_use: set[Path] = set()
        self.damaged: dict[Path, str] = {}  # checkpoints passed over, and what is wrong with them
        # Checkpoints that were damaged and have been fetched from the mirror.
        self.fetched: set[Path] = set()
        # Steps of the newest complete checkpoint, and of the newest one begun.
        self.saved = self.begun = 0
        # The asynchronous save in progress, and the function that completes it.
        self.pending: tuple[TensorSave, Callable[[], None]] | None = None
        self.rank = torch.distributed.get_rank()
        self.run_id = ""  # see `pretrain.run_directory.identify`
        self.fetching = folder.parent / FETCHED
        url = mirror_of(config)
        self.mirror = (
            Mirroring(config.checkpoint, url, folder.parent, log)
            if url and self.rank == 0
            else None
        )

    def enter(self, config: RunConfig) -> None:
        """Use the configuration of another stage for all later saves and loads.

        No save may be in progress.
        """
        self.config = config

    def sweep(self) -> None:
        """Delete the incomplete files of killed attempts. The run directory must be claimed."""
        if self.rank == 0:
            for path in self.folder.glob(f"{WRITING}*"):
                shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(self.fetching, ignore_errors=True)
            remove_leftovers(self.folder)

    def fetch(self) -> None:
        """Fetch a newer checkpoint from the mirror, if it has one.

        Raises ConfigError, StorageError (see `Mirroring`).
        """
        if self.config.checkpoint.mirror:
            from_rank_0(lambda: self.mirror.fetch() if self.mirror else None)

    def accept(self, own: Found) -> Found:
        """Return ``own`` as a checkpoint in the run directory.

        A checkpoint fetched from the mirror is first moved into the run directory.
        """
        if own.path.parent != self.fetching:
            return own
        from_rank_0(lambda: take_in(self.folder.parent))
        self.last = self.folder / own.path.name
        self.damaged.pop(self.last, None)
        return replace(own, path=self.last)

    def newest(self) -> Found | None:
        """Return the newest good checkpoint, or None if no checkpoint exists.

        Rank 0 searches, and all ranks return its result.

        Raises:
            StorageError: checkpoints exist, but all are damaged. The run must not start from
                scratch and overwrite them.
        """
        found = from_rank_0(self._newest)
        self.last, self.saved = (found.path, found.progress.step) if found else (None, 0)
        return found

    def _newest(self) -> Found | None:
        found = newest_good(self.fetching, {}) or newest_good(self.folder, self.damaged, self.log)
        if found is None and self.damaged:
            path, wrong = next(iter(self.damaged.items()))
            raise StorageError(
                f"no checkpoint in {self.folder} is good ({path.name}: {wrong}), and the run does "
                "not start again over them; if the file system had a fault, the same command "
                "continues after it; otherwise start a new run in another run_dir, from other "
                f"weights with checkpoint.load, or move {self.folder} away to start again in this "
                "one"
            )
        return found

    def newest_before_bad_steps(self) -> Path | None:
        """Return the folder of the newest good checkpoint whose last step was finite, or None.

        Later saves do not delete this checkpoint while the steps are non-finite.
        """
        return from_rank_0(lambda: newest_before_bad_steps(self.folder))

    def save(
        self,
        engine: Engine,
        progress: Progress,
        content_keys: Mapping[str, str],
        *,
        needed: bool = True,
    ) -> None:
        """Write the checkpoint ``step_NNNNNNNN``.

        With async_save a later call completes the files and gives the folder its final name.

        needed: a failure must stop the run. If False, the failure is only reported until
        ``checkpoint.max_unsaved_steps`` is exceeded.

        Raises:
            StorageError: on all ranks, with rank 0's reason: the file system refuses the files, or
                the mirror is too far behind.
            ConfigError: the mirror belongs to another run (see `Mirroring.check`).
        """
        self.complete(blocking=True)
        self.begun = progress.step
        try:
            self._save(engine, progress, content_keys)
        except StorageError as error:
            self._go_on_without(error, needed=needed)
        if self.config.checkpoint.mirror:
            from_rank_0(lambda: self.mirror.check(progress.step) if self.mirror else None)

    def _save(self, engine: Engine, progress: Progress, content_keys: Mapping[str, str]) -> None:
        final = self.folder / f"step_{progress.step:08d}"
        if from_rank_0(lambda: final.exists() and damage(final) is None):
            self.last, self.saved = final, progress.step
            return
        started, temporary = time.monotonic(), final.with_name(f"{WRITING}{final.name}")

        def make_room() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            if final.exists():
                set_aside(final)
            temporary.mkdir(parents=True)

        with _written(final, temporary):
            from_rank_0(make_room)
            scales = {} if engine.scales is None else {"fp8": engine.scales.sharded_state()}
            rng = rng_tensors(self.config.parallel)
            state = {**engine.sharded_state(), **scales, "rng": rng}
            save = begin_save(_without_objects(state), temporary)
        manifest = {
            **manifest_of(self.config, progress, content_keys, self.inherited),
            "run": self.run_id,
            RNG_DEVICE: kind_of(rng),
        }

        def finish() -> None:
            with _written(final, temporary):
                save.finish()
                given = self.config.checkpoint
                named = (self.folder / f"step_{step:08d}" for step in given.keep)
                kept = {*self.in_use, *self._to_go_back_to(progress.step), *named}
                from_rank_0(lambda: publish_step(temporary, final, manifest, given.keep_last, kept))
            self.log(f"checkpoint {final} ({time.monotonic() - started:.1f} s)")
            self.last, self.saved = final, progress.step

        if self.config.checkpoint.async_save:
            save.start()
            self.pending = save, finish
        else:
            save.write()
            finish()

    def _to_go_back_to(self, step: int) -> set[Path]:
        """Return the checkpoints to which a spike at a step after ``step`` may rewind the run."""
        train, interval = self.config.train, self.config.checkpoint.interval
        if train.on_spike != "rewind":
            return set()
        first = f"step_{rewinds_to(step + 1, interval, train.spike_rewind):08d}"
        return {path for path in newest_first(self.folder) if path.name >= first}

    def rewind(self, engine: Engine, step: int) -> Found | None:
        """Go back to the checkpoint of a step: delete later checkpoints and restore the engine.

        Return None if the step has no good checkpoint.

        Raises:
            DamagedCheckpoint, StorageError: see `load`.
        """
        self.complete(blocking=True)
        found = from_rank_0(lambda: rewind(self.folder / f"step_{step:08d}"))
        if found is not None:
            self.load(engine, found)
            self.last, self.saved = found.path, step
        return found

    def _go_on_without(self, error: StorageError, *, needed: bool) -> None:
        """Report a failed save if training may continue, else raise ``error``.

        Training may continue if the save is not ``needed`` and at most
        ``checkpoint.max_unsaved_steps`` steps are unsaved. The incomplete files are already
        deleted.
        """
        limit, unsaved = self.config.checkpoint.max_unsaved_steps, self.begun - self.saved
        if needed or limit is None or unsaved > limit:
            raise error from None
        for report in (self.log, self.alert):
            report(
                f"{error}; training continues, {unsaved} steps are not saved "
                f"(checkpoint.max_unsaved_steps = {limit})"
            )

    def complete(self, *, blocking: bool, needed: bool = False) -> None:
        """Publish the asynchronous save, if there is one and it has finished.

        ``blocking``: wait for it. The exceptions are those of :meth:`save`.
        """
        if self.pending is None:
            return
        save, finish = self.pending
        if not blocking and not save.done():
            return
        self.pending = None
        try:
            finish()
        except StorageError as error:
            self._go_on_without(error, needed=needed)

    def close(self) -> None:
        """Wait for the asynchronous save, and publish it."""
        self.complete(blocking=True, needed=True)

    def load(self, engine: Engine, found: Found, *, model_only: bool = False) -> None:
        """Read ``found`` into the engine, resharded to this run's layout.

        The random states are restored too (see `restore_rng`). If ``found`` is in this run's
        directory, its later checkpoints, which are damaged, are renamed.
        `pretrain.checkpoint.resume` checks separately that the checkpoint fits this run's
        configuration.

        Raises:
            DamagedCheckpoint: on all ranks. Part of the engine may have been overwritten; reading
                another checkpoint completely repairs this.
            StorageError: a file system failed.
        """
        longest = max(found.inherited.context_length, self.config.data.seq_length)
        self.inherited = replace(found.inherited, context_length=longest, foreign=False)
        upstream.read_checkpoints_with(CheckedReader)
        # One data-parallel rank reads the data that several need and sends it to the others.
        strategy = FullyParallelLoadStrategyWrapper(_Loading(), data_parallel_group())

        def read(state: dict[str, Any]) -> dict[str, Any]:
            try:
                return dist_checkpointing.load(
                    _without_objects(state),
                    str(found.path),
                    strategy,
                    strict=StrictHandling.RAISE_UNEXPECTED,
                )
            except _ReadErrors as error:
                raise _read_failure(found.path, error) from None

        engine.restore(read, model_only=model_only)
        if engine.scales is not None:
            written = found.manifest["config"].get("train", {})
            kept = written.get("fp8") == "delayed" and not model_only
            engine.scales.restore(
                lambda asked: read({"fp8": asked})["fp8"], written["fp8_history"] if kept else None
            )
        if found.manifest.get("layout") == _layout(self.config) and not model_only:
            restore_rng(read, found, self.config, self.log)
        if not model_only:
            self._compare_versions(found)
        if found.path.parent == self.folder:
            from_rank_0(lambda: self._set_later_aside(found.path))

    def _compare_versions(self, found: Found) -> None:
        """Log one line if other versions of torch or Megatron-core wrote the checkpoint."""
        written = found.manifest.get(VERSIONS, {})
        other = [
            f"{name} {written[name]} (now {version})"
            for name, version in upstream.versions().items()
            if written.get(name, version) != version
        ]
        if other:
            self.log(
                f"checkpoint {found.path} was written with {', '.join(other)}: training continues, "
                "but the last bits of its results may differ"
            )

    def _set_later_aside(self, step: Path) -> None:
        """Rename the checkpoints of later steps, which are damaged. Only rank 0 calls it."""
        for path in newest_first(self.folder):
            if path.name > step.name:
                set_aside(path)

    def pass_over(self, found: Found, error: DamagedCheckpoint) -> None:
        """Exclude the damaged checkpoint ``found`` from the results of :meth:`newest`.

        If the mirror has a good copy, fetch the copy to its place instead.

        Raises:
            ConfigError, StorageError: see `Mirroring.fetch`.
        """
        self.damaged[found.path] = str(error).partition(" is damaged: ")[2]
        self.log(f"{error}; passing over it")
        if self.config.checkpoint.mirror and found.path not in self.fetched:
            self.fetched.add(found.path)
            if from_rank_0(lambda: self._fetch_again(found.path)):
                del self.damaged[found.path]

    def _fetch_again(self, path: Path) -> bool:
        """Fetch from the mirror and return True if its copy has replaced the damaged checkpoint."""
        assert self.mirror is not None
        before = path.stat().st_ino
        self.mirror.fetch(damaged=[path.name for path in self.damaged])
        return path.stat().st_ino != before


class _ReadErrors(Exception):
    """Errors of all ranks that failed to read, in the order of the ranks."""

    def __init__(self, errors: list[BaseException]) -> None:
        super().__init__(*errors)
        self.errors = errors


class _Loading(TorchDistLoadShardedStrategy):
    """Megatron's reader, whose failure on any rank is raised on all.

    Since 0.18 a rank does not learn of another's failure (strategies/torch.py:903, 0.18.0), and
    would wait for its tensors.
    """

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """Read the tensors; all ranks must call it together. Raises `_ReadErrors`."""
        state = None
        failed = list[BaseException]()
        try:
            state = super().load(*args, **kwargs)
        except CheckpointException as error:
            failed = [failure for _, (failure, _) in sorted(error.failures.items())]
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, failed)
        if errors := [error for rank in gathered for error in rank]:
            raise _ReadErrors(errors)
        return state


def _read_failure(step: Path, failed: _ReadErrors) -> BaseException:
    """Return the exception that all ranks raise after at least one rank failed to read."""
    for error in failed.errors:
        if isinstance(error, DamagedCheckpoint):
            return DamagedCheckpoint(f"checkpoint {step} is damaged: {error}")
        if isinstance(error, ConfigError):
            return error
        if isinstance(error, OSError):
            return StorageError(f"checkpoint {step} cannot be read: {reason(error)}")
    return failed


@contextmanager
def _written(final: Path, temporary: Path) -> Iterator[None]:
    """Turn every error of the block into a StorageError on all ranks.

    The run has written to this folder before, so an error is not a mistake in the input. Rank 0
    deletes the incomplete folder at once: on a full file system the run needs the space to report
    the error.
    """
    try:
        yield
    except (ConfigError, StorageError) as error:
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(f"checkpoint {final} cannot be written: {error}") from None


def begin_save(state: dict[str, Any], folder: Path) -> TensorSave:
    """Write the small files of a checkpoint and plan those of its tensors.

    All ranks must call it together. This does the steps of Megatron's ``dist_checkpointing.save``
    separately, so that one rank's failure reaches all ranks.

    Raises:
        ConfigError, StorageError: on all ranks, if the file system refuses a file.
    """
    tensors, common = save_preprocess(state)
    from_rank_0(lambda: write_small_files(folder, common))
    return TensorSave(folder, tensors, data_parallel_group())


def write_small_files(folder: Path, common: dict[str, Any]) -> None:
    """Write the state without tensors, and the name of the format. Raises OSError."""
    write_common(folder, common)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def write_common(folder: Path, common: dict[str, Any]) -> None:
    """Write ``common.pt``, the part of the state without tensors. Raises OSError.

    torch serializes into memory, because with a path it would replace the file system's error by
    an exception of another type.
    """
    full = io.BytesIO()
    torch.save(common, full)
    with named_errors(folder / "common.pt"):
        (folder / "common.pt").write_bytes(full.getbuffer())


def manifest_of(
    config: RunConfig,
    progress: Progress,
    keys: Mapping[str, str],
    inherited: Inherited | None = None,
) -> dict[str, Any]:
    """Return a checkpoint's manifest without its list of files, which ``publish_step`` adds.

    keys: identities of the data (`Contents.keys`). inherited: None if the weights come from this
    run alone.
    """
    return {
        "format": FORMAT,
        "progress": asdict(progress),
        **keys,
        "inherited": asdict(inherited or Inherited(config.data.seq_length)),
        "layout": _layout(config),
        "config": plain(config),
        VERSIONS: upstream.versions(),
    }


def _layout(config: RunConfig) -> dict[str, Any]:
    """Return the layout for a manifest: the parallel section with the actual world size."""
    layout = {
        key: value
        for key, value in plain(config.parallel).items()
        if key != "collective_timeout_minutes"
    }
    return {
        **layout,
        "world_size": torch.distributed.get_world_size()
        if torch.distributed.is_initialized()
        else 1,
    }


def _without_objects(state: Any) -> Any:
    """Return ``state`` without Megatron's empty ``_extra_state`` objects.

    They would be stored as pickles.
    """
    if isinstance(state, dict):
        return {
            key: _without_objects(value)
            for key, value in state.items()
            if not isinstance(value, ShardedObject)
        }
    return state
