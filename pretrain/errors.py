"""The exceptions that a user sees as one line: a mistake of theirs, or a file system that fails. Standard library alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MISTAKES = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)  # a wrong path, or another's


class ConfigError(ValueError):
    """A mistake in a run's configuration, told in one line: where, which key, which value, what would do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class StorageError(OSError):
    """A file system that fails where nothing is wrong with the input, told in one line: the same command may do later."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def reason(error: OSError) -> str:
    """``PATH: reason``, without Python's error number; the reason alone where the error names no path."""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


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
