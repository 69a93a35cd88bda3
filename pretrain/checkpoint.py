"""Checkpoints: written beside, synced, renamed, named in ``latest`` last; verified before they are read; readable at any layout.

The tensors are megatron.core.dist_checkpointing's ``torch_dist`` format. What the trainer itself must remember is in ``manifest.json``,
with every file's size and the hashes of the files that are pickles. Reading executes nothing: tensors carry no code, ``common.pt`` is read
by torch with ``weights_only``, and ``.metadata``, which the format stores as a pickle, is first checked against its recorded hash and then
against a list of the few classes it may name (``pretrain.checkpoint_reader``).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.validation import StrictHandling

from fem_common.errors import StorageError, reason
from fem_megatron import platform
from pretrain.checkpoint_reader import (
    MANIFEST,
    Found,
    Inherited,
    Progress,
    Say,
    damage,
    find,
    load_full_model_state,
    newest_first,
    newest_good,
    read_metadata,
    sha256,
)
from pretrain.config import RunConfig
from pretrain.engines import Engine
from pretrain.loader import to_dict
from pretrain.ranks import from_rank_0

__all__ = [
    "MANIFEST",
    "PICKLES",
    "WEIGHTS_ALONE",
    "Checkpoints",
    "Found",
    "Inherited",
    "Progress",
    "damage",
    "find",
    "load_full_model_state",
    "manifest_of",
    "newest_good",
    "publish_step",
]

PICKLES = (".metadata", "common.pt")
WEIGHTS_ALONE = "weights"  # manifest["contents"] of a checkpoint without optimizer and random state; a run's own has no such key


def _newest_before_bad_steps(folder: Path) -> Path | None:
    """The newest undamaged checkpoint whose last step was finite."""
    for path in newest_first(folder):
        if damage(path) is None and not Found(path, json.loads((path / MANIFEST).read_text())).progress.bad_steps_in_a_row:
            return path
    return None


class Checkpoints:
    """The checkpoints of one run. Every method is collective over all ranks."""

    def __init__(self, folder: Path, config: RunConfig, say: Say) -> None:
        self.folder, self.config, self.say = folder, config, say
        self.inherited = Inherited(config.data.seq_length)
        self.last: Path | None = None  # the newest that is known to be complete
        self.in_use: set[Path] = set()  # what something else reads stays, however many newer ones there are
        self.queue = AsyncCallsQueue()
        self.rank = torch.distributed.get_rank()

    def newest(self) -> Found | None:
        """The newest good checkpoint, as rank 0 sees it."""
        found = from_rank_0(lambda: newest_good(self.folder, self.say))
        self.last = found.path if found else None
        return found

    def newest_before_bad_steps(self) -> Path | None:
        """The newest good checkpoint that was not written amid steps that are not finite; no later one deletes it."""
        return from_rank_0(lambda: _newest_before_bad_steps(self.folder))

    def save(self, engine: Engine, progress: Progress, content_key: str) -> None:
        """Write ``step_NNNNNNNN``; with async_save the files appear under their final name when a later call completes them.

        Raises:
            StorageError: the file system does not take it; told by rank 0, on all ranks.
        """
        self.complete(blocking=True)
        final = self.folder / f"step_{progress.step:08d}"
        if from_rank_0(lambda: final.exists() and damage(final) is None):
            self.last = final
            return
        started = time.monotonic()
        temporary = self.folder / f".writing_{final.name}"

        def make_room() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)
            temporary.mkdir(parents=True)

        from_rank_0(lambda: _written(final, make_room))
        state = {**engine.sharded_state(), "rng": _rng_tensors(self.config)}
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy("torch_dist"), parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        request = write_tensors(_without_objects(state), temporary, strategy, asynchronous=self.config.checkpoint.async_save)
        manifest = manifest_of(self.config, progress, content_key, self.inherited)

        def publish() -> None:
            keep = self.config.checkpoint.keep_last
            from_rank_0(lambda: _written(final, lambda: publish_step(temporary, final, manifest, keep, self.in_use)))
            if self.rank == 0:
                self.say(f"checkpoint {final} ({time.monotonic() - started:.1f} s)")
            self.last = final

        if request is None:
            torch.distributed.barrier()
            publish()
        else:
            request.add_finalize_fn(publish)
            self.queue.schedule_async_request(request)

    def complete(self, *, blocking: bool) -> None:
        """Publish asynchronous saves that have finished; ``blocking``: wait for all of them."""
        self.queue.maybe_finalize_async_calls(blocking=blocking)

    def close(self) -> None:
        """Wait for everything and stop the writer."""
        self.complete(blocking=True)
        self.queue.close()

    def load(self, engine: Engine, found: Found, *, model_only: bool = False) -> None:
        """Read ``found`` into the engine and the random states, resharding to this run's layout.

        That it fits this run's configuration is for `pretrain.resume` to say.
        """
        longest = max(found.inherited.context_length, self.config.data.seq_length)
        self.inherited = replace(found.inherited, context_length=longest)
        read_metadata(found.path / ".metadata")  # Megatron's reader below builds whatever the pickle names

        def read(state: dict[str, Any]) -> dict[str, Any]:
            return dist_checkpointing.load(_without_objects(state), str(found.path), strict=StrictHandling.RAISE_UNEXPECTED)

        engine.restore(read, model_only=model_only)
        if found.manifest["layout"] == _layout(self.config) and not model_only:
            _restore_rng(read({"rng": _rng_tensors(self.config)})["rng"])


def _written(final: Path, write: Callable[[], None]) -> None:
    """Runs ``write``; whatever the file system refuses is its failure: the run has written beside it before."""
    try:
        write()
    except OSError as error:
        raise StorageError(f"checkpoint {final} cannot be written: {reason(error)}") from None


def write_tensors(state: dict[str, Any], folder: Path, strategy: Any, *, asynchronous: bool = False) -> AsyncRequest | None:
    """Megatron's ``dist_checkpointing.save``: of what it returns, the asynchronous one has to be scheduled."""
    platform.report_writes(asynchronous=asynchronous)
    return dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=asynchronous)


def manifest_of(config: RunConfig, progress: Progress, content_key: str, inherited: Inherited | None = None) -> dict[str, Any]:
    """What a checkpoint's manifest says before its files are there (see ``publish_step``); inherited None: this run's own alone."""
    return {
        "format": 1,
        "progress": asdict(progress),
        "data": content_key,
        "inherited": asdict(inherited or Inherited(config.data.seq_length)),
        "layout": _layout(config),
        "config": to_dict(config),
    }


def publish_step(temporary: Path, final: Path, manifest: dict[str, Any], keep_last: int | None, in_use: Collection[Path] = ()) -> None:
    """Manifest last, everything synced, one rename; then ``latest``; then older checkpoints go, beyond ``keep_last`` (None: none goes).

    Those ``in_use`` stay.

    Amid steps that are not finite the newest from before them stays, however many are written: it may be the last that is any good.
    """
    names = sorted(p.name for p in temporary.iterdir() if p.is_file())
    manifest["files"] = {name: (temporary / name).stat().st_size for name in names}
    manifest["sha256"] = {name: sha256(temporary / name) for name in names if name in PICKLES}
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for name in [*names, MANIFEST]:
        _sync(temporary / name)
    _sync(temporary)
    os.rename(temporary, final)
    _sync(final.parent)
    latest = final.parent / "latest"
    latest.with_suffix(".new").write_text(final.name + "\n")
    _sync(latest.with_suffix(".new"))
    os.rename(latest.with_suffix(".new"), latest)
    spared = _newest_before_bad_steps(final.parent) if manifest["progress"]["bad_steps_in_a_row"] else None
    for old in [] if keep_last is None else newest_first(final.parent)[keep_last:]:
        if old != spared and old not in in_use:
            shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _layout(config: RunConfig) -> dict[str, Any]:
    layout = {key: value for key, value in to_dict(config.parallel).items() if key != "collective_timeout_minutes"}
    return {**layout, "world_size": torch.distributed.get_world_size()}


def _rng_tensors(config: RunConfig) -> dict[str, ShardedTensor]:
    """The random states as tensors (no pickles), one slot a (pipeline, tensor) rank."""
    state = platform.rng_state()
    flat = {"torch": state["torch"], **({"cuda": state["cuda"]} if "cuda" in state else {})}
    flat |= {f"tracker.{name}": value for name, value in state["tracker"].items()}
    offsets = (
        (0, parallel_state.get_pipeline_model_parallel_rank(), config.parallel.pipeline_model_parallel_size),
        (1, parallel_state.get_tensor_model_parallel_rank(), config.parallel.tensor_model_parallel_size),
    )
    return {
        name: ShardedTensor.from_rank_offsets(
            f"rng.{name}", value.clone(), *offsets, replica_id=parallel_state.get_data_parallel_rank(), prepend_axis_num=2
        )
        for name, value in flat.items()
    }


def _restore_rng(flat: dict[str, torch.Tensor]) -> None:
    tracker = {name.removeprefix("tracker."): value for name, value in flat.items() if name.startswith("tracker.")}
    platform.set_rng_state({**{name: flat[name] for name in ("torch", "cuda") if name in flat}, "tracker": tracker})


def _without_objects(state: Any) -> Any:
    """Drop Megatron's empty ``_extra_state`` objects, which would be stored as pickles among the tensors."""
    if isinstance(state, dict):
        return {key: _without_objects(value) for key, value in state.items() if not isinstance(value, ShardedObject)}
    return state
