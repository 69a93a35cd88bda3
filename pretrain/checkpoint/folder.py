"""Checkpoints as folders on disk.

This module publishes a written folder as a checkpoint, finds the newest good one, compares the
hashes in its manifest, and deletes old ones. It does not import torch;
`pretrain.checkpoint.reader` reads the tensors.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from fem_common.errors import MISTAKES, ConfigError
from fem_common.files import named_errors, sha256, sync_file, sync_folder, write_atomically
from pretrain.checkpoint.manifest import NewerVersion, fault

MANIFEST = "manifest.json"
HASHES = "xxh3"  # manifest[HASHES]: file -> XXH3-128 of its bytes, computed while it is written
# File -> offset of a tensor's archive -> XXH3-64 of the tensor's bytes; older checkpoints have
# none.
PARTS = "parts.json"
TENSORS = ".distcp"  # suffix of tensor files, which contain their own checksums
MIRROR_STATE = "mirror.json"  # in a run directory: the state of its mirror
WRITING = ".writing_"  # prefix of the names of folders that are being written
_STEP = re.compile(r"step_(\d{8,})$")
_BLOCK = 8 * 2**20
Log = Callable[[str], None]


@dataclass(frozen=True)
class Progress:
    """State of the trainer, without tensors, at a step.

    Positions are counted in samples, so that the layout or batch size may change.

    recent: state of the spike detector (``pretrain.spikes``). rewound: () or the step of the last
    spike after which training rewound, and the number of rewinds near that step. batch_changes: one
    (step, samples) pair for each change of the batch size, fork and stage, for `Schedule.of`: the
    step after which it happened and the samples consumed until then.

    If a fork has other data, another sequence length or another batch size, its samples are counted
    in the new length from its first step on.
    """

    step: int
    consumed_samples: int
    order_samples: int  # number of samples in the training order
    skipped_steps: int = 0
    bad_steps_in_a_row: int = 0
    recent: tuple[float, ...] = ()
    rewound: tuple[int, ...] = ()
    # Number of samples of the order that were passed over after spikes.
    passed_over: int = 0
    begin_step: int = 0  # first step of the run: the step of a fork's parent
    begin_samples: int = 0  # samples consumed before begin_step
    order_begin: int = 0  # samples consumed before the first sample of the order
    stage: int = 0  # index from 0
    drawn: str = ""  # hash of everything that decides the stage's samples; empty without stages
    batch_changes: tuple[tuple[int, int], ...] = ()

    def begun(self, before: int, length: int) -> Progress:
        """Return the progress with which a fork or stage begins at this position.

        Samples of ``before`` tokens are converted to samples of ``length`` tokens, rounded up.
        """

        def converted(samples: int) -> int:
            return -(-samples * before // length)

        consumed = converted(self.consumed_samples)
        earlier = ((step, converted(samples)) for step, samples in self.batch_changes)
        changes = (*earlier, (self.step, consumed))
        return replace(
            self,
            consumed_samples=consumed,
            begin_step=self.step,
            begin_samples=consumed,
            batch_changes=changes,
        )


@dataclass(frozen=True)
class Inherited:
    """Facts about the weights that every checkpoint inherits from its predecessor.

    Training does not use them. ``checkpoint.load`` inherits them too.

    context_length: longest sequence that the weights were trained on, in tokens. special_ids:
    bos_token_id, eos_token_id (one or several) and pad_token_id, if the weights were imported from
    a Hugging Face folder that names them. foreign: True for another project's model that this code
    has not trained.
    """

    context_length: int
    special_ids: dict[str, int | list[int]] = field(default_factory=dict)
    foreign: bool = False


@dataclass(frozen=True)
class Found:
    """A verified checkpoint on disk."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def at(cls, path: Path) -> Found:
        """Return the good checkpoint in a step's folder."""
        return cls(path, json.loads((path / MANIFEST).read_text()))

    @property
    def progress(self) -> Progress:
        """The trainer's state that the manifest records."""
        raw = self.manifest["progress"]
        # An older manifest records only this one change.
        begin = [(raw["begin_step"], raw["begin_samples"])] if raw.get("begin_step") else []
        raw = raw | {
            "batch_changes": tuple(
                (step, samples) for step, samples in raw.get("batch_changes", begin)
            )
        }
        return Progress(**raw | {key: tuple(raw.get(key, ())) for key in ("recent", "rewound")})

    @property
    def inherited(self) -> Inherited:
        """The inherited facts that the manifest records.

        An older manifest has none; context_length is then the sequence length of its configuration.
        """
        return Inherited(
            **{
                "context_length": self.manifest["config"]["data"]["seq_length"],
                **self.manifest.get("inherited", {}),
            }
        )


def damage(path: Path) -> str | None:
    """Return a description of the damage to a checkpoint folder, or None if it is good.

    The manifest (see `manifest.fault`), the sizes of all files and the hashes of the pickles are
    checked. The result is a `NewerVersion` if a newer version of this code wrote the checkpoint.

    Raises:
        OSError: a file system failed, so that the result is unknown.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (*MISTAKES, ValueError, RecursionError) as error:
        return (
            f"{MANIFEST} is missing"
            if isinstance(error, FileNotFoundError)
            else f"{MANIFEST} cannot be read ({type(error).__name__})"
        )
    named = _STEP.search(path.name)
    if wrong := fault(manifest, Progress, Inherited, int(named[1]) if named else None):
        return type(wrong)(f"{MANIFEST} {wrong}")
    try:
        there = {file.name for file in path.iterdir()}
        for name, size in manifest["files"].items():
            if name not in there or not (path / name).is_file():
                return f"{name} is missing"
            if (found := (path / name).stat().st_size) != size:
                return f"{name} has {found} bytes instead of {size}"
        for name, expected in manifest["sha256"].items():
            if sha256(path / name) != expected:
                return f"{name} does not match the hash recorded when it was saved"
    except FileNotFoundError:  # its run is deleting it
        return f"{name} is missing"
    return None


class _NamedFile(io.FileIO):
    """File whose errors of writing contain its name."""

    def write(self, content: Any) -> int:
        """Write bytes. Raises OSError with the name of the file."""
        with named_errors(Path(os.fsdecode(self.name))):
            return super().write(content)


class HashedFile(io.BufferedWriter):
    """File that is hashed while it is written sequentially.

    If its ``with`` block ends without an error, the XXH3-128 of the file and the XXH3-64 of each of
    its tensors are written to a second file in the same folder.
    """

    def __init__(self, path: str | Path, mode: str = "wb") -> None:
        super().__init__(_NamedFile(path, mode))
        self._path = Path(path)
        self._hash = xxhash.xxh3_128()
        self._parts = list[str]()

    def write(self, content: Any) -> int:
        """Write all bytes of ``content``, update the hash, and return the number of bytes."""
        self._hash.update(content)
        return super().write(content)

    def mark(self, begin: int, content: Any) -> None:
        """Record that a tensor with the bytes ``content`` was written at offset ``begin``."""
        self._parts.append(f"{begin} {xxhash.xxh3_64_hexdigest(content)}")

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        super().__exit__(kind, *rest)
        if kind is None:
            hash_file_of(self._path).write_text("\n".join((self._hash.hexdigest(), *self._parts)))


def hash_file_of(path: Path) -> Path:
    """Return the path of the file with hashes that a `HashedFile` at ``path`` writes.

    For checkpoints, `publish_step` moves the hashes into the manifest and deletes the file.
    """
    return path.with_name(f"{path.name}.{HASHES}")


def hash_of(path: Path, advance: Callable[[int], object] = lambda count: None) -> str:
    """Return the XXH3-128 of a file in hexadecimal.

    ``advance`` is called with the number of bytes of each block read.
    """
    hashed = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            hashed.update(block)
            advance(len(block))
    found: str = hashed.hexdigest()
    return found


def damaged_files(path: Path, advance: Callable[[int], object]) -> Iterator[tuple[str, str]]:
    """Yield (file name, error text) for each file that does not match its recorded hash.

    path: folder of a good checkpoint, whose manifest contains the hashes. ``advance`` is called
    with the number of bytes read.
    """
    for name, expected in hashes_of(path).items():
        if hash_of(path / name, advance) != expected:
            yield name, f"{name} does not match the hash taken while it was written"


def hash_mismatches(folder: Path, advance: Callable[[int], object]) -> Iterator[str]:
    """Yield an error text for each file of a folder that does not match its separate hash file.

    The weights of an export have separate hash files. ``advance`` is called with the number of
    bytes read.

    Raises:
        OSError: a file system failed, or a hashed file is missing.
    """
    for sums in sorted(folder.glob(f"*.{HASHES}")):
        if hash_of(sums.with_suffix(""), advance) != sums.read_text():
            yield f"{sums.stem} does not match the hash taken while it was written"


def hashes_of(path: Path) -> dict[str, str]:
    """Return file name -> XXH3-128 from a good checkpoint's manifest.

    Older manifests have hashes for some files or for none.
    """
    hashes: dict[str, str] = Found.at(path).manifest.get(HASHES, {})
    return hashes


def parts_of(path: Path) -> dict[str, dict[str, str]]:
    """Return file name -> offset -> hash of a good checkpoint's tensors (see PARTS).

    The result is an empty dictionary for an older checkpoint.
    """
    with suppress(FileNotFoundError):
        parts: dict[str, dict[str, str]] = json.loads((path / PARTS).read_text())
        return parts
    return {}


def find(path: Path) -> Found:
    """Return the checkpoint at ``path``, which is a step's folder or a run directory.

    For a run directory, return its newest good checkpoint.

    Raises:
        ConfigError: no checkpoint exists, or the given step's folder is damaged.
        OSError: a file system failed.
    """
    if _STEP.search(path.name):
        wrong = flaw(path)
        if wrong:
            raise ConfigError(f"checkpoint {path}: {wrong}")
        return Found.at(path)
    damaged: dict[Path, str] = {}
    for folder in (path / "checkpoints", path):
        found = newest_good(folder, damaged)
        if found:
            return found
    if damaged:
        step, wrong = next(iter(damaged.items()))
        raise ConfigError(f"{path} has no good checkpoint: checkpoint {step} is damaged ({wrong})")
    raise ConfigError(
        f"{path} has no checkpoint; expected a folder step_NNNNNNNN or a run directory with "
        "checkpoints"
    )


def newest_good(
    folder: Path, damaged: dict[Path, str], log: Log = lambda text: None
) -> Found | None:
    """Return the newest undamaged checkpoint in ``folder``, or None if it has none.

    Sizes and hashes decide if a checkpoint is damaged.

    damaged: checkpoint -> error text of those to pass over. Further damaged ones are added and
    reported.

    Raises:
        ConfigError: a newer version of this code wrote the newest one. Training from an older one
            would overwrite it.
        OSError: a file system failed.
    """
    for path in newest_first(folder):
        if path in damaged:
            continue
        wrong = flaw(path)
        if wrong is None:
            return Found.at(path)
        damaged[path] = wrong
        log(f"checkpoint {path} is damaged ({wrong}); passing over it")
    return None


def flaw(path: Path) -> str | None:
    """Return a description of the damage to a checkpoint folder, or None (see `damage`).

    Raises ConfigError if a newer version of this code wrote the checkpoint.
    """
    return refuse_newer(path, damage(path))


def refuse_newer(path: object, wrong: str | None) -> str | None:
    """Return ``wrong``, the result of `damage` for ``path``.

    Raises ConfigError if it is a `NewerVersion`.
    """
    if isinstance(wrong, NewerVersion):
        raise ConfigError(
            f"checkpoint {path} was written by a newer version of this code ({wrong}): use that "
            "version, or move the checkpoint to another folder to continue from an older one"
        )
    return wrong


def newest_first(folder: Path) -> list[Path]:
    """Return the step folders in ``folder``, good or not, newest first."""
    return sorted((path for path in folder.glob("step_*") if _STEP.search(path.name)), reverse=True)


def rewind(step: Path) -> Found | None:
    """Return the checkpoint in a step's folder after deleting all later checkpoints.

    Training will write the later ones again. If the checkpoint of the step is missing or damaged,
    return None and delete none.
    """
    if damage(step) is not None:
        return None
    for later in newest_first(step.parent):
        if later.name > step.name:
            _remove(later)
    write_atomically(step.parent / "latest", step.name + "\n")
    return Found.at(step)


def newest_before_bad_steps(folder: Path) -> Path | None:
    """Return the folder of the newest undamaged checkpoint whose last step was finite, or None."""
    for path in newest_first(folder):
        if damage(path) is None and not Found.at(path).progress.bad_steps_in_a_row:
            return path
    return None


def publish_step(
    temporary: Path,
    final: Path,
    manifest: dict[str, Any],
    keep_last: int | None,
    in_use: Collection[Path] = (),
) -> None:
    """Publish a written folder as a checkpoint, and delete the oldest checkpoints.

    Only the newest ``keep_last`` remain (None: all). Checkpoints ``in_use`` also remain. Damaged
    ones are renamed, never deleted.

    The manifest is written last, and all files are synced. One rename then publishes the folder,
    and the file ``latest`` names it.

    During a series of non-finite steps, the newest checkpoint from before the series remains
    regardless of ``keep_last``, because it may be the last usable one.
    """
    hashes = {path.stem: path for path in temporary.glob(f"*.{HASHES}")}
    taken, parts = dict[str, str](), dict[str, dict[str, str]]()
    for name, path in hashes.items():
        taken[name], *marks = path.read_text().splitlines()
        parts[name] = dict(mark.split() for mark in marks)
        path.unlink()
    if parts:
        (temporary / PARTS).write_text(json.dumps(parts, indent=1))
    names = sorted(p.name for p in temporary.iterdir() if p.is_file())
    small = {name: hash_of(temporary / name) for name in names if not name.endswith(TENSORS)}
    # Hashes that the manifest has already, of linked files.
    known = {name: value for name, value in manifest.get(HASHES, {}).items() if name in names}
    manifest[HASHES] = {**known, **taken, **small}
    manifest["files"] = {name: (temporary / name).stat().st_size for name in names}
    manifest["sha256"] = {
        name: sha256(temporary / name) for name in names if not name.endswith(TENSORS)
    }
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1, allow_nan=False))
    for name in [*names, MANIFEST]:
        sync_file(temporary / name)
    sync_folder(temporary)
    os.rename(temporary, final)
    sync_folder(final.parent)
    write_atomically(final.parent / "latest", final.name + "\n")
    spared = (
        newest_before_bad_steps(final.parent)
        if manifest["progress"]["bad_steps_in_a_row"]
        else None
    )
    if keep_last is None:
        return
    for old in newest_first(final.parent)[keep_last:]:
        if old == spared or old in in_use:
            continue
        wrong = damage(old)
        if wrong is None:
            _remove(old)
        elif not isinstance(wrong, NewerVersion):
            set_aside(old)


def _remove(step: Path) -> None:
    """Rename a checkpoint to a temporary name and delete it.

    Because of the new name, no search mistakes an incomplete deletion for a damaged checkpoint. A
    later sweep deletes the remaining files.
    """
    with suppress(OSError):
        leaving = step.rename(step.with_name(f"{WRITING}{step.name}"))
        for _ in range(2):  # the second pass deletes what the first failed on
            shutil.rmtree(leaving, ignore_errors=True)


def set_aside(step: Path) -> Path:
    """Rename a damaged checkpoint so that no search finds it, and return the new path.

    The user decides what can be recovered from it.
    """
    path = step.with_name(f"damaged_{step.name}")
    count = 1
    while path.exists():
        count += 1
        path = step.with_name(f"damaged_{step.name}.{count}")
    return step.rename(path)
