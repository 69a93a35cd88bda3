"""Choose the directories for the Triton and Inductor caches of a rank: a local folder per node.

Uses only the standard library. Triton's own default is in the home directory. When several nodes
write one cache over NFS, they get "Stale file handle" errors. The ranks of a node share a folder,
as do a job's attempts: both caches support concurrent processes on a local file system.

    TMP/launch_caches_UID/            writable only by this user (mode 0700), because files in
                                      it are loaded as code
    TMP/launch_caches_UID/NODE_JOB/   triton and inductor, created by the libraries at the
                                      first compilation

JOB is a hash of the path of the job's code, which all tasks, attempts and submissions of a job
share. Without Slurm it is "local": all runs share one folder, so that they do not compile again.

A folder is removed if no rank was started with it for `UNUSED_DAYS`. A process that still uses it
compiles again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

UNUSED_DAYS = 30
# A variable, other variables that place the same cache, the name of its folder.
_CACHES = (
    ("TRITON_CACHE_DIR", ("TRITON_HOME",), "triton"),
    ("TORCHINDUCTOR_CACHE_DIR", (), "inductor"),
)


def variables(
    environ: Mapping[str, str], node: str, code: Path
) -> tuple[dict[str, str], str | None]:
    """Return (environment variables that set the cache folders, error text or None).

    Variables that the environment already sets are left out. If this node has no safe folder, the
    variables are empty and the text gives the reason. Never raise OSError.

    node: name of this node. code: folder of the job's code.
    """
    wanted = {
        name: folder
        for name, others, folder in _CACHES
        if not any(other in environ for other in (name, *others))
    }
    if not wanted:
        return {}, None
    try:
        parent = _parent()
        if fault := _fault(parent):
            return {}, fault
        job = (
            hashlib.sha256(os.fsencode(code)).hexdigest()[:16]
            if environ.get("SLURM_JOB_ID")
            else "local"
        )
        place = parent / f"{node}_{job}"
        with contextlib.suppress(FileNotFoundError):  # no code was compiled yet
            os.utime(place)
        if (environ.get("LOCAL_RANK") or "0") == "0":
            _remove_unused(parent)
    except OSError as error:
        return {}, f"{error.filename or 'temporary directory'}: {error.strerror or error}"
    return {name: str(place / folder) for name, folder in wanted.items()}, None


def _parent() -> Path:
    """Return this user's folder for caches, created if missing.

    Raises:
        OSError: the folder cannot be created.
    """
    temporary = tempfile.gettempdir()
    # Without a writable temporary directory, Python falls back to the working directory, which is
    # usually not on a local file system.
    if temporary == os.getcwd() and temporary != "/tmp":
        raise OSError(f"only the working directory can be written: {temporary}")
    parent = Path(temporary) / f"launch_caches_{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    return parent


def _fault(parent: Path) -> str | None:
    """Return the reason why compiled code must not be loaded from a folder, or None if it is safe.

    Raises:
        OSError: the folder cannot be inspected.
    """
    seen, above = parent.lstat(), parent.parent.stat()
    if not stat.S_ISDIR(seen.st_mode):
        return f"{parent} is not a directory"
    if seen.st_uid != os.geteuid():
        return f"{parent} belongs to another user"
    if seen.st_mode & 0o022:
        return f"{parent} can be written by other users; remove it"
    if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
        return f"{parent.parent} lets other users replace what is in it (no sticky bit)"
    if os.statvfs(parent).f_flag & os.ST_NOEXEC:
        return f"{parent} is on a file system that is mounted noexec"
    return None


def _remove_unused(parent: Path) -> None:
    """Remove the cache folders in ``parent`` that no rank has used for `UNUSED_DAYS`.

    A folder counts as used when a rank is started with it.
    """
    for folder in parent.iterdir():
        with contextlib.suppress(OSError):  # another rank may remove it at the same time
            if folder.lstat().st_mtime < time.time() - UNUSED_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)
