"""data_prep: what its errors have besides ``fem_common.errors``. Knows nothing of what went wrong."""

from __future__ import annotations

import errno
from pathlib import Path

from fem_common.errors import UserError as UserError

# Want of memory in errors of another type: by zstd, lz4, C++, zlib, the dynamic linker and Python's threads.
_MEMORY = ("not enough memory", "allocation_failed", "bad_alloc", "Error -4 ", "failed to map segment", "can't start new thread")


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP, whose ``number`` it has: the end is the same as that of Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def is_want_of_memory(error: BaseException) -> bool:
    """Whether that is what an error means, of whatever type."""
    named = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return named or any(words in str(error) for words in _MEMORY)


def one_line(error: BaseException) -> str:
    """First line of an error's message, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def existing_folder(path: Path, what: str) -> Path:
    """``path`` if it is a folder. Raises UserError that names ``what`` it should have been."""
    if not path.exists():
        raise UserError(f"no such folder: {path} ({what})")
    if not path.is_dir():
        raise UserError(f"{path} is a file, where a folder is needed ({what})")
    return path


def raise_if_memory(error: Exception) -> None:
    """Raises MemoryError where that is what a library's error means."""
    if is_want_of_memory(error):
        raise MemoryError(one_line(error)) from None
