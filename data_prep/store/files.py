"""data_prep: files that are whole or absent: temporary name, fsync, rename. Nothing here knows what is in a file."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from fem_common.errors import InUse, reason, told

UNFINISHED = ".unfinished"
LOCK = ".lock"
ABANDONED_SECONDS = 24 * 3600


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def json_bytes(value: Any) -> bytes:
    """A JSON value as people read it, UTF-8; a lone surrogate (names that are not UTF-8 have them) as its JSON escape."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


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
    """Create a folder and its parents. Raises UserError, StorageError where that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise told(error, f"cannot create the folder {path} (", ")") from None


def temporary(path: Path) -> Path:
    """A name beside ``path`` that says whose it is (host, process namespace, process): ``remove_leftovers`` knows it."""
    return path.with_name(f".{path.name}~{socket.gethostname()}~{_namespace()}~{os.getpid()}")


def _namespace() -> int:
    """Two containers of one host may use the same process numbers; Linux numbers their namespaces."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def remove_leftovers(folder: Path) -> None:
    """Remove what dead processes of this host left in a folder under a ``temporary`` name, and what others left a day ago."""
    here = [socket.gethostname(), str(_namespace())]
    for path in folder.glob(".*~*~*~*"):
        *owner, process = path.name.split("~")[-3:]
        try:
            if (not _alive(process)) if owner == here else (time.time() - path.stat().st_mtime > ABANDONED_SECONDS):
                _remove(path)
        except FileNotFoundError:
            continue  # its owner, or another process that tidies up, was faster


def remove_own_leftovers(folder: Path, process: int) -> None:
    """Remove what one process of this host, known to be dead, left in a folder under a ``temporary`` name."""
    for path in folder.glob(f".*~{socket.gethostname()}~{_namespace()}~{process}"):
        _remove(path)


def _alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError, OverflowError):
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, wait until it is on the disk, give it its name: it is there whole or not at all."""
    unfinished = temporary(path)
    try:
        write_synced(unfinished, content)
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    sync_folder(path.parent)


class Lock:
    """A folder, created where it is missing, that one process alone may write in; or, ``shared``, any number of them that all share it.

    The lock is on a file in it, ``.lock``, that stays: NFS locks no folders, and files to those alone who may write them. It ends with the
    process. Raises InUse when others hold it. A file system without locks is told of, and the work goes on: ``held`` is False.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        self.folder, self.shared, self.held = folder, shared, False

    def __enter__(self) -> Lock:
        make_folder(self.folder)
        self._lock = _open_lock(self.folder / LOCK)
        try:
            fcntl.flock(self._lock, (fcntl.LOCK_SH if self.shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            self.held = True
        except BlockingIOError:
            os.close(self._lock)
            raise InUse(f"another data_prep process is writing {self.folder}; wait for it or choose another --out") from None
        except OSError as error:
            if not self.shared:
                print(f"data_prep: {self.folder} cannot be locked ({reason(error)}); start no second run on it", file=sys.stderr)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._lock)
        self.held = False


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        try:
            return os.open(path, os.O_RDONLY)  # another user's, or on a file system that is read only
        except OSError:
            raise told(error, f"cannot write in {path.parent} (", ")") from None


class Staging:
    """A folder's new content, gathered in a folder of its own in ``OUT/.unfinished`` and moved to its final names at the end.

    ``.unfinished`` beside final names and no seal: a publication was cut short there, and those names are ours to replace.
    One process may stage in a folder at a time; where locks do not work, several do each other no harm. Raises InUse when another
    stages; UserError, StorageError when the folder cannot be written.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = temporary(out / UNFINISHED / "staged")
        self._lock = Lock(out)

    def __enter__(self) -> Staging:
        self._lock.__enter__()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._lock.held:
                for left in self.path.parent.iterdir():
                    if left != self.path:
                        _remove(left)
            else:
                remove_leftovers(self.path.parent)
        except OSError as error:
            self._lock.__exit__(None, None, None)
            raise told(error, f"cannot write in {self.out} (", ")") from None
        return self

    def publish(self, names: Iterable[str], *, seal: str, stale: Iterable[str] = ()) -> None:
        """Remove the old ``seal`` and the ``stale`` names, then move the staged ``names`` to their final names, and the new seal last.

        A seal of the same content stays: it vouches for the new names as well. Raises InUse, and changes nothing, where a staged file
        is gone.
        """
        names = list(names)
        for name in (*names, seal):
            if not (self.path / name).is_file():
                raise InUse(f"{self.path / name} is gone: another process works on {self.out}; give the command again after it")
        if not _same_content(self.path / seal, self.out / seal):
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
        with suppress(OSError):
            self.path.parent.rmdir()  # another's is in it where locks do not work
        self._lock.__exit__(kind, error, trace)


def _same_content(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()
