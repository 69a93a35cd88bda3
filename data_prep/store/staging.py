"""data_prep: who may write in a data folder, and how new content gets its final names there. Nothing here knows what is in a file."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType

from fem_common.errors import InUse, UserError, told
from fem_common.files import locked, make_folder, remove, remove_leftovers, sync_folder, temporary

UNFINISHED = ".unfinished"
LOCK = ".lock"


class Lock:
    """A folder, created where it is missing, that one process alone may write in; or, ``shared``, any number of them that all share it.

    Raises InUse when others hold it. A file system without locks is told of, and the work goes on: ``held`` is False.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        self.folder, self.shared, self.held = folder, shared, False

    def __enter__(self) -> Lock:
        make_folder(self.folder)
        busy = f"another data_prep process is writing {self.folder}; wait for it or choose another --out"
        self._lock: AbstractContextManager[bool] = locked(self.folder / LOCK, busy, shared=self.shared)
        self.held = self._lock.__enter__()
        if not (self.held or self.shared):
            print(f"data_prep: {self.folder} cannot be locked; start no second run on it", file=sys.stderr)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.__exit__(kind, error, trace)
        self.held = False


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
                        remove(left)
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


def existing_folder(path: Path, what: str) -> Path:
    """``path`` if it is a folder. Raises UserError that names ``what`` it should have been."""
    if not path.exists():
        raise UserError(f"no such folder: {path} ({what})")
    if not path.is_dir():
        raise UserError(f"{path} is a file, where a folder is needed ({what})")
    return path
