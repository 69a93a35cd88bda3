"""data_prep: the one exception a user sees, as one line and exit code 2. Knows nothing of what went wrong."""

from __future__ import annotations

import errno
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """What is wrong, where, and the nearest fix, in one line."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: the end is the same as that of Ctrl-C."""


def one_line(error: BaseException) -> str:
    """First line of an error's message, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def describe_os_error(error: OSError) -> str:
    """An OSError as 'PATH: reason', without Python's error number; of a full disk, the folder and what to do."""
    reason = error.strerror or one_line(error)
    if error.errno in FULL:
        folder = f"{Path(error.filename).parent}: " if isinstance(error.filename, str) else ""
        return f"{folder}{reason}; make room and give the same command again: what is finished is kept"
    return f"{error.filename}: {reason}" if error.filename else reason


def existing_folder(path: Path, what: str) -> Path:
    """``path`` if it is a folder. Raises UserError that names ``what`` it should have been."""
    if not path.exists():
        raise UserError(f"no such folder: {path} ({what})")
    if not path.is_dir():
        raise UserError(f"{path} is a file, where a folder is needed ({what})")
    return path
