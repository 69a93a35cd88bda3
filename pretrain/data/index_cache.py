"""Folders with index files on disk, one folder for each order of samples.

A folder is either complete or absent. This module handles only files; Megatron writes their
contents. ``ROOT/<key>/`` contains Megatron's index files and ``complete.json``, which records the
sources, and the sizes and hashes of the index files. A folder is built under a temporary name and
renamed when it is complete, so that two jobs may build the same one at once. The module does not
import torch.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fem_common.errors import CommandError, StorageError, from_os_error
from fem_common.files import locked, remove, sha256, sync_file, sync_folder, write_synced
from pretrain.config import RunConfig
from pretrain.data.facts import Contents

COMPLETE = "complete.json"
FORMAT = 1
NOT_THERE = "not there"
_LOCK = "lock"
_DAMAGED = "-damaged"
_ABANDONED_SECONDS = 3600.0


@dataclass(frozen=True)
class IndexCache:
    """The folder with the index files of one order of samples.

    identity: JSON values of everything except the data that determines the order.
    """

    root: Path
    contents: Contents
    identity: tuple[Any, ...]

    @property
    def folder(self) -> Path:
        """The path of the folder when it is complete: ROOT/<key>."""
        key = json.dumps(
            [
                FORMAT,
                self.contents.key,
                [source.prefix for source in self.contents.sources],
                *self.identity,
            ]
        )
        return self.root / hashlib.sha256(key.encode()).hexdigest()[:32]

    def fault(self) -> str | None:
        """Return an error text if the folder is missing or cannot be used, or None.

        Sizes of files are compared, hashes are not.
        """
        complete = self.folder / COMPLETE
        try:
            raw = json.loads(complete.read_bytes())
            if raw["format"] != FORMAT:
                return f"{COMPLETE} has format {raw['format']!r}"
            sizes = {name: entry["bytes"] for name, entry in raw["files"].items()}
        except FileNotFoundError:
            return f"{COMPLETE} is missing" if self.folder.exists() else NOT_THERE
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{COMPLETE} cannot be read ({type(error).__name__})"
        for name, size in sizes.items():
            try:
                # Read once, because another process may be replacing the folder.
                found = (self.folder / name).stat().st_size
            except (FileNotFoundError, NotADirectoryError, ValueError):
                # ValueError: the name is invalid as a file name.
                return f"{name} is missing"
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
        return None

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Yield a private folder in which the index is built.

        Its remains are deleted at the end. Folders that killed processes left are deleted at the
        start.

        Raises:
            ConfigError: the location is invalid or not writable, for this code or for the code of
                the block.
            StorageError: the file system failed.
        """
        folder = self.root / f".building-{self.folder.name}-{secrets.token_hex(4)}"
        try:
            with _writing(self.root):
                self.root.mkdir(parents=True, exist_ok=True)
                for left in self.root.glob(".building-*"):
                    if left.name.endswith(_DAMAGED) or _is_abandoned(left):
                        remove(left)
                folder.mkdir()
                with locked(folder / _LOCK):
                    yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, built: Path) -> None:
        """Write ``complete.json`` into a folder with all index files, and give it its final name.

        If a complete folder of this name exists, that folder remains.

        Raises:
            ConfigError: the location is invalid or not writable.
            StorageError: the file system failed.
        """
        with _writing(self.root):
            self._seal(built)
            # Without the lock two processes that both found damage could delete each other's
            # complete folder.
            with locked(self.root / ".lock", wait=True):
                self._rename(built)

    def _rename(self, built: Path) -> None:
        if self.fault() is None:
            return
        # Renamed first: other processes would see a folder that is deleted in place as incomplete.
        aside = self.root / f"{built.name}{_DAMAGED}"
        if self.folder.exists():
            self.folder.rename(aside)
        (built / _LOCK).unlink(missing_ok=True)
        built.rename(self.folder)
        sync_folder(self.root)
        remove(aside)

    def _seal(self, built: Path) -> None:
        names = sorted(path.name for path in built.iterdir() if path.name not in (_LOCK, COMPLETE))
        for name in names:
            sync_file(built / name)
        files = {
            name: {"bytes": (built / name).stat().st_size, "sha256": sha256(built / name)}
            for name in names
        }
        record = {
            "format": FORMAT,
            "sources": [
                {name: value for name, value in asdict(source).items() if value}
                for source in self.contents.sources
            ],
            "files": files,
        }
        write_synced(built / COMPLETE, (json.dumps(record, indent=1) + "\n").encode())
        sync_folder(built)


def samples_of_splits(config: RunConfig, train_samples: int) -> list[int]:
    """Return the number of samples in the order of training, validation and test data."""
    return [
        train_samples,
        config.train.eval_batches * config.train.global_batch_size if config.data.valid else 0,
        0,
    ]


def index_cache(
    config: RunConfig,
    contents: Contents,
    train_samples: int,
    default_cache: Path,
    megatron: str,
    needs: Sequence[Mapping[str, int]] = (),
) -> IndexCache:
    """Return the cache of this configuration's order of ``train_samples`` samples.

    megatron: the version of megatron-core, which generates the order. needs: one mapping from
    source to tokens for each stage up to the present one; empty without stages.
    """
    data = config.data
    weights = [[source.weight for source in split] for split in (data.train, data.valid)]
    samples = samples_of_splits(config, train_samples)
    identity: list[Any] = [samples, weights, data.seq_length, config.train.seed, megatron]
    # Defaults are omitted, since the keys of older caches lack them.
    if data.packing != "stream":
        identity.append(data.packing)
    if needs:
        identity.append([[need.get(source.prefix, 0) for source in data.train] for need in needs])
    root = Path(data.index_cache) if data.index_cache else default_cache
    return IndexCache(root, contents, tuple(identity))


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Turn errors of the file system in the block into one-line errors.

    An error without a file name, such as numpy's, names the folder ``root``. This includes file
    system errors that Megatron wraps in its own exceptions.
    """
    try:
        yield
    except StorageError:
        raise  # already one line
    except Exception as error:
        refusal = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(refusal, OSError):
            raise
        text = refusal.strerror or str(refusal)
        raise from_os_error(
            OSError(refusal.errno, text, refusal.filename or str(root)),
            "the index cache cannot be written: ",
            "; data.index_cache=FOLDER sets another location",
        ) from None


def _is_abandoned(folder: Path) -> bool:
    """Return True if no process builds in the folder: it is old and its lock is free or missing.

    On a file system without locks the result is True only if the lock file is missing.
    """
    lock = folder / _LOCK
    with suppress(OSError, CommandError):
        if time.time() - folder.stat().st_mtime < _ABANDONED_SECONDS:
            return False
        if not lock.exists():
            return True
        with locked(lock) as held:
            return held
    return False
