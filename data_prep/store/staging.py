"""data_prep: who may write in a data folder, and how new content gets its final names there. Nothing here knows what is in a file."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fem_common.errors import InUse, UserError, told
from fem_common.files import locked, make_folder, remove, remove_leftovers, sync_folder, temporary

UNFINISHED = ".unfinished"
LOCK = ".lock"


@contextmanager
def lock(folder: Path, *, shared: bool = False) -> Iterator[bool]:
    """A folder, created where it is missing, that one process alone may write in; or, ``shared``, any number of them that all share it.

    Raises InUse when others hold it. A file system without locks is told of, and the work goes on: the answer is False.
    """
    make_folder(folder)
    busy = f"another data_prep process is writing {folder}; wait for it or choose another --out"
    with locked(folder / LOCK, busy, shared=shared) as held:
        if not (held or shared):
            print(
                f"data_prep: {folder} cannot be locked; start no second run on it", file=sys.stderr
            )
        yield held


class Staging:
    """A folder's new content, gathered in a folder of its own in ``OUT/.unfinished`` and moved to its final names at the end.

    ``.unfinished`` beside final names and no seal: a publication was cut short there, and those names are ours to replace.
    One process may stage in a folder at a time; where locks do not work, several do each other no harm. Raises InUse when another
    stages; UserError, StorageError when the folder cannot be written.
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
                raise told(error, f"cannot write in {self.out} (", ")") from None
            self._stack = stack.pop_all()
        return self

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()  # another's is in it where locks do not work

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def publish(self, names: Iterable[str], *, seal: str, stale: Iterable[str] = ()) -> None:
        """Remove the old ``seal`` and the ``stale`` names, then move the staged ``names`` to their final names, and the new seal last.

        A seal of the same content stays: it vouches for the new names as well. Raises InUse, and changes nothing, where a staged file
        is gone.
        """
        names = list(names)
        for name in (*names, seal):
            if not (self.path / name).is_file():
                raise InUse(
                    f"{self.path / name} is gone: another process works on {self.out}; give the command again after it"
                )
        old = self.out / seal
        if old.is_file() and old.read_bytes() != (self.path / seal).read_bytes():
            old.unlink(missing_ok=True)
        for name in stale:
            (self.out / name).unlink(missing_ok=True)
        for name in names:
            final = self.out / name
            final.parent.mkdir(exist_ok=True)
            os.replace(self.path / name, final)
            sync_folder(final.parent)
        os.replace(self.path / seal, self.out / seal)
        sync_folder(self.out)


def existing_folder(path: Path, what: str) -> Path:
    """``path`` if it is a folder. Raises UserError that names ``what`` it should have been."""
    if not path.exists():
        raise UserError(f"no such folder: {path} ({what})")
    if not path.is_dir():
        raise UserError(f"{path} is a file, where a folder is needed ({what})")
    return path
