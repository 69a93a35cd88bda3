"""Locks on data folders, and atomic publication of new files in them.

New files are collected in a temporary subfolder and then moved to their final names. This module
does not depend on the content of the files.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fem_common.errors import InUse, UserError, from_os_error
from fem_common.files import locked, make_folder, remove, remove_leftovers, sync_folder, temporary

UNFINISHED = ".unfinished"
LOCK = ".lock"


@contextmanager
def lock(folder: Path, *, shared: bool = False) -> Iterator[bool]:
    """Lock a folder during the block, and create the folder if it is missing.

    The lock is exclusive, or ``shared`` with other processes that take a shared lock. Yields True
    if the lock is held, and False on a file system without locks; for an exclusive lock it then
    also prints a warning. Raises InUse if another process holds the lock.
    """
    make_folder(folder)
    busy = f"another data_prep process is writing {folder}; wait for it or choose another --out"
    with locked(folder / LOCK, busy, shared=shared) as held:
        if not (held or shared):
            print(
                f"data_prep: {folder} cannot be locked; do not start a second run on it",
                file=sys.stderr,
            )
        yield held


class Staging:
    """Context manager that collects new files of the folder OUT and publishes them together.

    The files are written to a subfolder of ``OUT/.unfinished``. `publish` moves them to their final
    names; the seal (for example manifest.json) is the file that is moved last. Files that were not
    published are removed at the end. If ``.unfinished`` exists together with final names but
    without a seal, a publication was interrupted and the final names may be replaced. One process
    can stage in a folder at a time; if locks do not work, several processes do not damage each
    other's files. Raises InUse if another process is staging, and UserError or StorageError if the
    folder cannot be written.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = temporary(out / UNFINISHED / "staged")

    def __enter__(self) -> Staging:
        with ExitStack() as stack:
            held = stack.enter_context(lock(self.out))
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.callback(self._remove)
                if held:
                    for left in self.path.parent.iterdir():
                        if left != self.path:
                            remove(left)
                else:
                    remove_leftovers(self.path.parent)
            except OSError as error:
                raise from_os_error(error, f"cannot write in {self.out} (", ")") from None
            self._stack = stack.pop_all()
        return self

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()  # without locks, it may contain another process's folder

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def publish(self, names: Iterable[str], *, seal: str, stale: Iterable[str] = ()) -> None:
        """Move the staged files ``names`` to their final names, and the file ``seal`` last.

        The old ``seal`` and the files ``stale`` are removed first. An old seal with the same
        content is not removed, because it is also valid for the new files. Raises InUse, without
        changes, if a staged file is missing.
        """
        names = list(names)
        for name in (*names, seal):
            if not (self.path / name).is_file():
                raise InUse(
                    f"{self.path / name} is gone: another process works on {self.out}; run "
                    "the command again after it ends"
                )
        old = self.out / seal
        if old.is_file() and old.read_bytes() != (self.path / seal).read_bytes():
            old.unlink(missing_ok=True)
        for name in stale:
            (self.out / name).unlink(missing_ok=True)
        sync_folder(self.out)  # after a crash, no old seal may be next to new files
        for name in names:
            final = self.out / name
            final.parent.mkdir(exist_ok=True)
            os.replace(self.path / name, final)
            sync_folder(final.parent)
        os.replace(self.path / seal, self.out / seal)
        sync_folder(self.out)


def existing_folder(path: Path, what: str = "a folder that python -m data_prep run wrote") -> Path:
    """Return ``path`` if it is a folder, else raise UserError.

    ``what`` describes the expected folder in the error message.
    """
    if not path.exists():
        raise UserError(f"no such folder: {path} ({what})")
    if not path.is_dir():
        raise UserError(f"{path} is a file, where a folder is needed ({what})")
    return path
