"""data_prep: files that are whole or absent: temporary name, fsync, rename. Nothing here knows what is in a file."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from data_prep.errors import UserError, describe_os_error

UNFINISHED = ".unfinished"
CHUNK_BYTES = 1 << 20


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def json_bytes(value: Any) -> bytes:
    """A JSON value as people read it, UTF-8."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_file(path: Path) -> None:
    """Wait until a file that was written and closed is on the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its parents. Raises UserError where that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {path} ({describe_os_error(error)})") from None


class Staging:
    """A folder's new content, gathered under ``OUT/.unfinished`` and moved to its final names at the end.

    ``.unfinished`` beside final names and no seal: a publication was cut short there, and those names are ours to replace.
    One process may stage in a folder at a time. Raises UserError when another does, or when the folder cannot be written.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out / UNFINISHED

    def __enter__(self) -> Staging:
        make_folder(self.out)
        self._lock = os.open(self.out, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UserError(f"another data_prep process is writing {self.out}; wait for it or choose another --out") from None
        except OSError as error:
            print(f"data_prep: {self.out} cannot be locked ({describe_os_error(error)}); start no second run on it", file=sys.stderr)
        try:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir()
        except OSError as error:
            os.close(self._lock)
            raise UserError(f"cannot write in {self.out} ({describe_os_error(error)})") from None
        return self

    def publish(self, names: Iterable[str], *, seal: str, stale: Iterable[str] = ()) -> None:
        """Remove the old ``seal`` and the ``stale`` names, then move the staged ``names`` to their final names, and the new seal last."""
        (self.out / seal).unlink(missing_ok=True)
        for name in stale:
            (self.out / name).unlink(missing_ok=True)
        for name in names:
            final = self.out / name
            final.parent.mkdir(exist_ok=True)
            os.replace(self.path / name, final)
            sync_folder(final.parent)
        os.replace(self.path / seal, self.out / seal)
        sync_folder(self.out)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
