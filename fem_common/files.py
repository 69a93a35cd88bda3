"""Files that are whole or absent: temporary name, fsync, rename; locks; hashes. Standard library alone."""

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

from fem_common.errors import ConfigError, InUse, files_told, told

ABANDONED_SECONDS = 24 * 3600


def expand_home(text: str) -> str:
    """A path with a leading ``~`` or ``~user`` expanded, as a shell does; any other text, such as a URL, as it is.

    Raises ConfigError where there is no such user, or where the working directory has a file or folder of that name.
    """
    name = text.partition("/")[0]
    if not name.startswith("~"):
        return text
    if os.path.lexists(name):
        raise ConfigError(
            f"{text} may be below the home directory or {name} in the working directory: write ./{text}, or the whole path"
        )
    if (path := os.path.expanduser(text)) == text:
        raise ConfigError(
            f"{text}: there is no user {name[1:]!r}; write ./{text} for a name that begins with ~"
        )
    return path


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_lines(path: Path) -> list[str]:
    """The lines of a text file in UTF-8, without a byte order mark; only LF and CRLF end a line.

    ``str.splitlines`` would also split at U+2028, U+0085, form feeds and more, which occur within a prompt or a JSON string.

    Raises:
        ConfigError: the file is missing or not UTF-8. StorageError: the file system failed.
    """
    try:
        with files_told():
            text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def json_bytes(value: Any) -> bytes:
    """A JSON value as people read it, UTF-8; a lone surrogate (names that are not UTF-8 have them) as its JSON escape."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk. Its folder is not synced."""
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


def write_whole(path: Path, content: bytes | str, *, synced: bool = True) -> None:
    """Write a file under a temporary name, wait until it is on the disk, give it its name: it is there whole or not at all.

    Without ``synced`` a reader still sees the old file or the new one, but a machine that loses power may lose both.
    Raises OSError, which names ``path``; nothing is left behind then.
    """
    unfinished, raw = (
        temporary(path),
        content.encode("utf-8") if isinstance(content, str) else content,
    )
    try:
        write_synced(unfinished, raw) if synced else unfinished.write_bytes(raw)
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    if synced:
        sync_folder(path.parent)


def append_json_line(path: Path, value: Any) -> None:
    """Append ``value`` to a file of JSON lines, on a line of its own.

    What a full disk or a power loss left of an earlier line is ended first: that line is damaged, this one is not. Lines of several
    writers stay whole. JSON has no numbers that are not finite: those become null. Raises OSError.
    """
    line = json.dumps(_finite(value), allow_nan=False).encode() + b"\n"
    with path.open("ab+", buffering=0) as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            line = b"\n" + line
        while line:
            line = line[file.write(line) :]


def _finite(value: Any) -> Any:
    """The value, null in place of each number in it that is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_folder(path: Path) -> None:
    """Create a folder and its parents. Raises ConfigError, StorageError where that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise told(error, f"cannot create the folder {path} (", ")") from None


def temporary(path: Path) -> Path:
    """A name beside ``path`` that says whose it is (host, process namespace, process): `remove_leftovers` knows it."""
    return path.with_name(f".{path.name}~{socket.gethostname()}~{_namespace()}~{os.getpid()}")


def _namespace() -> int:
    """Two containers of one host may use the same process numbers; Linux numbers their namespaces."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def remove_leftovers(folder: Path, process: int | None = None) -> None:
    """Remove what dead processes of this host left in a folder under a `temporary` name, and what others left a day ago.

    ``process``: remove what this one process of this host, known to be dead, left, and no more.
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
            continue  # its owner, or another process that tidies up, was faster


def _alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError, OverflowError):
        return True
    return True


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, whether it is there or not."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(
    path: Path, busy: str = "", *, shared: bool = False, wait: bool = False
) -> Iterator[bool]:
    """A lock on the file ``path``, which is created and stays (NFS locks no folders); it ends with the block or the process.

    Gives whether it is held: False on a file system without locks, where the work goes on. ``shared``: with all that share it.

    Raises:
        InUse: others hold it, with the words ``busy``. ConfigError, StorageError: the file cannot be opened.
    """
    descriptor, owner = _opened(path), os.getpid()
    try:
        try:
            fcntl.flock(
                descriptor,
                (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB),
            )
            held = True
        except BlockingIOError:
            raise InUse(busy or f"another process has {path.parent}: wait for it") from None
        except OSError:
            held = False
        yield held
    finally:
        if (
            os.getpid() == owner
        ):  # what was forked meanwhile has the descriptor as well, and may end later
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        try:
            return os.open(
                path, os.O_RDONLY
            )  # another user's, or on a file system that is read only
        except OSError:
            raise told(error, f"cannot write in {path.parent} (", ")") from None
