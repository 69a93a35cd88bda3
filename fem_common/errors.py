"""The errors that a person sees as one line, and the exit code of each. Standard library alone.

One rule tells a wrong path from a file system that fails, for every command: `MISTAKES`.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from fem_common.exits import Exit

# What the operating system says of a wrong path, or of another's. All else (no space, a stale handle, an I/O error) is the file system's.
MISTAKES = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room, whoever's limit it is


class CommandError(Exception):
    """What ends a command with one line and ``code``."""

    code: ClassVar[Exit]


class UserError(CommandError):
    """A mistake that its maker can mend: the message says what is wrong, where, and the nearest fix."""

    code = Exit.WRONG_INPUT


class ConfigError(UserError, ValueError):
    """A mistake in a run's configuration: where, which key, which value, what would do. White space in the message becomes one space."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class InUse(UserError):
    """Another process has the folder: the same command may do later."""

    code = Exit.IN_USE


class Fault(CommandError):
    """A failure with nothing wrong in the input: the same command may do later."""

    code = Exit.FAULT


class StorageError(Fault):
    """A file system that fails. No OSError, which a reader would take for a damaged file. White space becomes one space."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def reason(error: OSError) -> str:
    """``PATH: reason``, without Python's error number; the reason alone where the error names no path; of a full disk also what to do."""
    said = error.strerror or str(error) or type(error).__name__
    if error.errno in FULL:  # the file's name is often a temporary one
        folder = f"{Path(error.filename).parent}: " if isinstance(error.filename, str) else ""
        return f"{folder}{said}; make room and give the same command again"
    return f"{error.filename}: {said}" if error.filename else said


def told(error: OSError, before: str = "", after: str = "") -> ConfigError | StorageError:
    """What to raise for an OSError, its `reason` between two texts: a wrong path is the user's mistake, all else is the file system."""
    text = f"{before}{reason(error)}{after}"
    return ConfigError(text) if isinstance(error, MISTAKES) else StorageError(text)


@contextmanager
def files_told() -> Iterator[None]:
    """An OSError that leaves the block is raised as what it is told as.

    Raises:
        ConfigError: a path is wrong.
        StorageError: a file system failed.
    """
    try:
        yield
    except OSError as error:
        raise told(error) from None


def end(program: str, error: CommandError | OSError) -> Exit:
    """Print ``PROGRAM: error: ...`` on stderr and return the exit code.

    Of a reader that has gone (``| head``) nothing is said, and stdout leads nowhere from then on.
    """
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.READER_GONE
    if isinstance(error, OSError):
        error = told(error)
    for line in str(error).splitlines() or [""]:  # one, or one for each mistake of several
        print(f"{program}: error: {line}", file=sys.stderr, flush=True)
    return error.code
