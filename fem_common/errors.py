"""Errors that are shown to the user as one line, with their exit codes.

For every command, `MISTAKES` decides whether an OSError is the user's mistake, for example a
wrong path, or a failure of the file system. The module uses only the standard library.
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

# Errors of the operating system for a wrong path or a missing permission. All other errors (no
# space, a stale handle, an I/O error) are faults of the file system.
MISTAKES = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)
FULL = (errno.ENOSPC, errno.EDQUOT)  # no space, or a limit on space


class CommandError(Exception):
    """Base class of errors that end a command with one line per mistake and the code ``code``."""

    code: ClassVar[Exit]


class UserError(CommandError):
    """Error that the user can correct; the message states what is wrong, where, and a fix."""

    code = Exit.WRONG_INPUT


class OneLine(Exception):
    """Base class of errors in whose message each run of white space becomes one space."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(OneLine, UserError, ValueError):
    """Error in a configuration or an input path: location, key, value and valid values."""


class InUse(UserError):
    """Error raised if another process uses the folder; the same command may succeed later."""

    code = Exit.IN_USE


class Fault(CommandError):
    """Failure although the input is correct; the same command may succeed later."""

    code = Exit.FAULT


class StorageError(OneLine, Fault):
    """Failure of a file system.

    It is not an OSError, because readers treat an OSError as a damaged file.
    """


def reason(error: OSError) -> str:
    """Return ``PATH: reason`` of an OSError, or only the reason if the error has no path.

    The text contains no error number. For a full disk it also contains what to do.
    """
    message = error.strerror or str(error) or type(error).__name__
    if error.errno == errno.EFBIG:
        file = f"{error.filename}: " if error.filename else ""
        return f"{file}{message}; raise the limit of a file's size, which ulimit -f prints"
    if error.errno in FULL:  # name the folder: the file is often a temporary one
        folder = f"{Path(error.filename).parent}: " if isinstance(error.filename, str) else ""
        return f"{folder}{message}; free some space and run the same command again"
    return f"{error.filename}: {message}" if error.filename else message


def from_os_error(error: OSError, before: str = "", after: str = "") -> ConfigError | StorageError:
    """Return the exception to raise for an OSError: ConfigError or StorageError.

    It is a ConfigError for a wrong path and a StorageError for every other failure. The message is
    the error's `reason` between the texts ``before`` and ``after``.
    """
    text = f"{before}{reason(error)}{after}"
    return ConfigError(text) if isinstance(error, MISTAKES) else StorageError(text)


@contextmanager
def convert_os_errors() -> Iterator[None]:
    """Convert every OSError that leaves the block to a ConfigError or a StorageError.

    Raises:
        ConfigError: a path is wrong.
        StorageError: a file system failed.
    """
    try:
        yield
    except OSError as error:
        raise from_os_error(error) from None


def end(program: str, error: CommandError | OSError) -> Exit:
    """Print ``PROGRAM: error: ...`` on stderr and return the exit code.

    For a broken pipe, for example after ``| head``, print nothing and redirect stdout to /dev/null.
    """
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.READER_GONE
    if isinstance(error, OSError):
        error = from_os_error(error)
    for line in str(error).splitlines() or [""]:  # one line per mistake
        print(f"{program}: error: {line}", file=sys.stderr, flush=True)
    return error.code
