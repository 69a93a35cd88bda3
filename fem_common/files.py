"""File helpers: atomic writes (temporary name, fsync, rename), locks, hashes and JSON lines.

The module uses only the standard library.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError, InUse, convert_os_errors, from_os_error

# Age from which temporary files of other hosts are removed.
ABANDONED_SECONDS = 24 * 3600


def expand_home(text: str) -> str:
    """Expand a leading ``~`` or ``~user`` as a shell does.

    Any other text, including URLs, is returned unchanged. Raises ConfigError if the user does not
    exist, or if the working directory has a file or folder with that name.
    """
    name = text.partition("/")[0]
    if not name.startswith("~"):
        return text
    if os.path.lexists(name):
        raise ConfigError(
            f"{text} can mean the home directory or {name} in the working directory: write "
            f"./{text}, or the full path"
        )
    if (path := os.path.expanduser(text)) == text:
        raise ConfigError(
            f"{text}: there is no user {name[1:]!r}; write ./{text} for a name that begins with ~"
        )
    return path


def start_of(path: str | Path) -> str:
    """Return words that name the folder where a relative path starts, or "" for another path."""
    if os.path.isabs(path) or "://" in str(path):
        return ""
    return f"relative paths start at the current folder, {os.getcwd()}; "


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: Any, *, sort_keys: bool = True) -> str:
    """Return the SHA-256 of a JSON value in hexadecimal.

    sort_keys: False makes the hash depend on the order of the keys.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=sort_keys).encode()).hexdigest()


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 text file, without line ends.

    A byte order mark at the start is removed. Only LF and CRLF end a line: ``str.splitlines`` would
    also split at U+2028, U+0085, form feeds and others, which occur within prompts and JSON
    strings.

    Raises:
        ConfigError: the path is wrong, or the file is not UTF-8.
        StorageError: the file system failed.
    """
    try:
        with convert_os_errors():
            text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def json_bytes(value: Any) -> bytes:
    """Return ``value`` as indented JSON text, encoded in UTF-8.

    Lone surrogates, which occur in names that are not UTF-8, are written as JSON escapes.
    """
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Add the file name ``path`` to an OSError of the block that has none, as those of writes."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # otherwise the name would replace the text
            error.filename = error.filename or str(path)
        raise


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk. The folder is not synced."""
    with named_errors(path), path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_file(path: Path) -> None:
    """Wait until a file that was written and closed is on the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Wait until new, renamed and removed file names of a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | str, *, synced: bool = True) -> None:
    """Write a file atomically: write a temporary file, sync it, and rename it.

    If ``synced`` is False, the file is not synced: readers still see either the old or the new
    content, but a power failure may lose both. Raises OSError with ``path`` as its file name; the
    temporary file is removed in that case.
    """
    unfinished = temporary(path)
    raw = content.encode("utf-8") if isinstance(content, str) else content
    try:
        write_synced(unfinished, raw) if synced else unfinished.write_bytes(raw)
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    if synced:
        sync_folder(path.parent)


def append_json_line(path: Path, value: Any) -> None:
    """Append ``value`` as one line to a JSON lines file.

    If the file ends with an incomplete line (after a full disk or a power failure), a line break is
    added first, so that only the earlier line is damaged. Lines of several concurrent writers are
    not mixed. Numbers that are not finite become null, because JSON cannot represent them. Raises
    OSError.
    """
    line = json.dumps(_finite(value), allow_nan=False).encode() + b"\n"
    with named_errors(path), path.open("ab+", buffering=0) as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[file.write(line) :]


def _finite(value: Any) -> Any:
    """Return a copy of a JSON value in which None replaces every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_folder(path: Path) -> None:
    """Create a folder and its parents. Raises ConfigError or StorageError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_os_error(error, f"cannot create the folder {path} (", ")") from None


def temporary(path: Path) -> Path:
    """Return the temporary name, in the same folder, under which ``path`` is written first.

    The name contains the host name, the PID namespace and the process id of the writing process, so
    that `remove_leftovers` can find files of dead processes.
    """
    return path.with_name(f".{path.name}~{socket.gethostname()}~{_namespace()}~{os.getpid()}")


def _namespace() -> int:
    """Return the inode of this process's PID namespace, or 0 if it is unknown.

    Processes of two containers on one host can have the same process id; the namespace
    distinguishes them.
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def remove_leftovers(folder: Path, process: int | None = None) -> None:
    """Remove the `temporary` files in a folder whose owners no longer run.

    Files of this host and PID namespace are removed if their process is dead. Files of other hosts
    and namespaces are removed if they are older than a day.

    process: id of a dead process of this host; only its files are removed.
    """
    here = [socket.gethostname(), str(_namespace())]
    for path in folder.glob(".*~*~*~*"):
        *owner, number = path.name.split("~")[-3:]
        try:
            if process is not None:
                gone = owner == here and number == str(process)
            else:
                gone = (
                    not _alive(number)
                    if owner == here
                    else time.time() - path.stat().st_mtime > ABANDONED_SECONDS
                )
            if gone:
                remove(path)
        except FileNotFoundError:
            continue  # removed by its owner or by another process meanwhile


def _alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError, OverflowError):
        return True
    return True


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content. A missing path is not an error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(
    path: Path, busy: str = "", *, shared: bool = False, wait: bool = False
) -> Iterator[bool]:
    """Lock the file ``path`` during the block.

    The file is created if necessary and is not removed. A lock file is used because NFS cannot lock
    folders. Yields True if the lock is held, and False on a file system without locks, where the
    block runs without a lock. The lock ends with the block or the process.

    shared: take a shared lock instead of an exclusive one.
    wait: wait for the lock instead of raising InUse.

    Raises:
        InUse: another process holds the lock (message ``busy``).
        ConfigError, StorageError: the file cannot be opened.
    """
    descriptor, owner = _opened(path), os.getpid()
    try:
        try:
            operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            if not wait:
                operation |= fcntl.LOCK_NB
            fcntl.flock(descriptor, operation)
            held = True
        except BlockingIOError:
            raise InUse(busy or f"another process uses {path.parent}: wait for it") from None
        except OSError:
            held = False
        yield held
    finally:
        # A process that was forked meanwhile also has the descriptor and may end later.
        if os.getpid() == owner:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        try:
            # The file belongs to another user or is on a read-only file system.
            return os.open(path, os.O_RDONLY)
        except OSError:
            raise from_os_error(error, f"cannot write in {path.parent} (", ")") from None
