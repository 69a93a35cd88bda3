"""Checkpoints: written beside, synced, renamed, named in ``latest`` last; verified before they are read; readable at any layout.

The tensors are megatron.core.dist_checkpointing's ``torch_dist`` format. What the trainer itself must remember is in ``manifest.json``,
with every file's size and the hashes of the files that are pickles. Reading executes nothing: tensors carry no code, ``common.pt`` is read
by torch with ``weights_only``, and ``.metadata``, which the format stores as a pickle, is first checked against its recorded hash and then
against a list of the few classes it may name.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.validation import StrictHandling

from fem_megatron import platform
from fem_megatron.config import ModelConfig
from pretrain.config import RunConfig
from pretrain.engines import Engine
from pretrain.errors import MISTAKES, ConfigError, StorageError, reason
from pretrain.loader import to_dict
from pretrain.ranks import from_rank_0

MANIFEST = "manifest.json"
PICKLES = (".metadata", "common.pt")
_STEP = re.compile(r"step_(\d{8,})$")
_METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",
)
_METADATA_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("megatron.core.dist_checkpointing.mapping", "ShardedObject"),
}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Progress:
    """What the trainer remembers besides tensors. Positions are in samples, so a layout or batch size may change."""

    step: int
    consumed_samples: int
    order_samples: int  # number of samples the training order was drawn for
    skipped_steps: int = 0
    bad_steps_in_a_row: int = 0


@dataclass(frozen=True)
class Found:
    """A verified checkpoint on disk."""

    path: Path
    manifest: dict[str, Any]

    @property
    def progress(self) -> Progress:
        """The trainer's memory."""
        return Progress(**self.manifest["progress"])


def identity(config: RunConfig) -> dict[str, Any]:
    """The fields that make weights and optimizer state of one run unusable in another."""
    model = to_dict(config.model)
    del model["attention_backend"]
    return {
        **{f"model.{key}": value for key, value in model.items()},
        "train.precision": config.train.precision,
        "parallel.use_distributed_optimizer": config.parallel.use_distributed_optimizer,
    }


def damage(path: Path) -> str | None:
    """What is wrong with the checkpoint folder, or None. Sizes of all files, hashes of the pickles.

    Raises:
        OSError: a file system fails, which says nothing about the checkpoint.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, hashes = manifest["files"], manifest["sha256"]
    except (*MISTAKES, ValueError, KeyError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    for name, expected in hashes.items():
        if _sha256(path / name) != expected:
            return f"{name} does not match the hash recorded when it was saved"
    return None


def find(path: Path) -> Found:
    """The checkpoint at ``path``: a step's folder, or a run directory, whose newest good one is taken.

    Raises:
        ConfigError: there is none, or the folder named is damaged.
        OSError: a file system fails.
    """
    if _STEP.search(path.name):
        wrong = damage(path)
        if wrong:
            raise ConfigError(f"checkpoint {path}: {wrong}")
        return Found(path, json.loads((path / MANIFEST).read_text()))
    for folder in (path / "checkpoints", path):
        found = newest_good(folder, lambda _: None)
        if found:
            return found
    raise ConfigError(f"{path}: no checkpoint there; expected a folder step_NNNNNNNN or a run directory that has some")


def newest_good(folder: Path, say: Say) -> Found | None:
    """The newest undamaged checkpoint in ``folder``; damaged ones are named through ``say`` and passed over.

    Raises:
        OSError: a file system fails.
    """
    for path in _newest_first(folder):
        wrong = damage(path)
        if wrong is None:
            return Found(path, json.loads((path / MANIFEST).read_text()))
        say(f"checkpoint {path} is damaged ({wrong}); passing over it")
    return None


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step_*") if _STEP.search(path.name)), reverse=True)


def _newest_before_bad_steps(folder: Path) -> Path | None:
    """The newest undamaged checkpoint whose last step was finite."""
    for path in _newest_first(folder):
        if damage(path) is None and not Found(path, json.loads((path / MANIFEST).read_text())).progress.bad_steps_in_a_row:
            return path
    return None


class Checkpoints:
    """The checkpoints of one run. Every method is collective over all ranks."""

    def __init__(self, folder: Path, config: RunConfig, say: Say) -> None:
        self.folder, self.config, self.say = folder, config, say
        self.last: Path | None = None  # the newest that is known to be complete
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
        state = {**engine.sharded_state(loading=False), "rng": _rng_tensors(self.config)}
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy("torch_dist"), parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        request = dist_checkpointing.save(
            _without_objects(state), str(temporary), strategy, async_sharded_save=self.config.checkpoint.async_save
        )
        manifest = {
            "format": 1,
            "progress": asdict(progress),
            "identity": identity(self.config),
            "data": content_key,
            "layout": _layout(self.config),
            "config": to_dict(self.config),
        }

        def publish() -> None:
            from_rank_0(lambda: _written(final, lambda: _publish(temporary, final, manifest, self.config.checkpoint.keep_last)))
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

        Raises:
            ConfigError: the checkpoint is of another model; every differing field is named.
        """
        check_identity(found, self.config, model_only=model_only)
        _check_metadata_pickle(found.path / ".metadata")
        state = engine.sharded_state(loading=True, model_only=model_only)
        same_layout = found.manifest["layout"] == _layout(self.config)
        if same_layout and not model_only:
            state["rng"] = _rng_tensors(self.config)
        state = dist_checkpointing.load(_without_objects(state), str(found.path), strict=StrictHandling.RAISE_UNEXPECTED)
        engine.load_sharded_state(state, model_only=model_only)
        if "rng" in state:
            _restore_rng(state["rng"])


def load_full_model_state(path: str | Path) -> tuple[dict[str, torch.Tensor], ModelConfig, dict[str, Any]]:
    """Whole (unsharded) weights by their names in the model, from a checkpoint of any layout, on the CPU, in one process.

    Returns the weights in their stored dtype, the model's configuration, and the checkpoint's manifest.

    Raises:
        ConfigError: there is no good checkpoint at ``path``.
    """
    found = find(Path(path))
    _check_metadata_pickle(found.path / ".metadata")
    if not torch.distributed.is_initialized():
        platform.initialize_distributed()
    wanted = {
        key: tensor.without_data()
        for key, tensor in dist_checkpointing.load_tensors_metadata(str(found.path)).items()
        if not key.startswith(("optimizer.", "rng."))
    }
    state = dist_checkpointing.load(wanted, str(found.path), validate_access_integrity=False)
    return {key: state[key] for key in wanted}, ModelConfig.from_dict(found.manifest["config"]["model"]), found.manifest


def check_identity(found: Found, config: RunConfig, *, model_only: bool = False) -> None:
    """Raises ConfigError where the checkpoint is of another model than the configuration's; every differing field is named."""
    ours, theirs = identity(config), found.manifest["identity"]
    keys = [key for key in sorted({*ours, *theirs}) if key.startswith("model.") or not model_only]
    differing = [f"{key} is {theirs.get(key)} there, {ours.get(key)} here" for key in keys if ours.get(key) != theirs.get(key)]
    if differing:
        raise ConfigError(f"checkpoint {found.path} is of another model: {'; '.join(differing)}")


def _written(final: Path, write: Callable[[], None]) -> None:
    """Runs ``write``; whatever the file system refuses is its failure: the run has written beside it before."""
    try:
        write()
    except OSError as error:
        raise StorageError(f"checkpoint {final} cannot be written: {reason(error)}") from None


def _publish(temporary: Path, final: Path, manifest: dict[str, Any], keep_last: int) -> None:
    """Manifest last, everything synced, one rename; then ``latest``; then older checkpoints go.

    Amid steps that are not finite the newest from before them stays, however many are written: it may be the last that is any good.
    """
    names = sorted(p.name for p in temporary.iterdir() if p.is_file())
    manifest["files"] = {name: (temporary / name).stat().st_size for name in names}
    manifest["sha256"] = {name: _sha256(temporary / name) for name in names if name in PICKLES}
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
    for old in _newest_first(final.parent)[keep_last:]:
        if old != spared:
            shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


class _MetadataUnpickler(pickle.Unpickler):
    """Builds nothing but what a torch_dist ``.metadata`` consists of."""

    def find_class(self, module: str, name: str) -> Any:
        found = (
            super().find_class(module, name)
            if "." not in name and module in {*_METADATA_MODULES, *(m for m, _ in _METADATA_NAMES)}
            else None
        )
        a_class_of_its_own = module in _METADATA_MODULES and isinstance(found, type) and found.__module__ == module
        if not (a_class_of_its_own or (module, name) in _METADATA_NAMES or (module == "torch" and isinstance(found, torch.dtype))):
            raise ConfigError(f".metadata names {module}.{name}, which no checkpoint of ours contains: not reading it")
        return found


def _check_metadata_pickle(path: Path) -> None:
    with path.open("rb") as file:
        _MetadataUnpickler(file).load()
