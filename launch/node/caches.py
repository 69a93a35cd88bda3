"""Where a rank's Triton and Inductor keep compiled kernels, unless somebody says otherwise: in a folder of the node's own.

Triton's default is the home directory. On NFS, nodes that write the same cache there get "Stale file handle" from one another's files. The
ranks of a node share a folder, and so do a job's attempts: both caches take concurrent processes on a local file system.

    TMP/launch_caches_UID/        this user's alone, mode 0700: whatever is in it is loaded as machine code
        NODE_JOB/triton, inductor made by the libraries at the first compilation

JOB is a hash of the folder with the job's code, which an array's tasks and all attempts and submissions of a job share. Without Slurm it is
"local", one folder for all runs: a new one for each run would cost a compilation for each.

A folder that no rank was started with for `UNUSED_DAYS` is removed; a process that still uses it compiles again. Standard library alone.
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
# A variable, others that decide where the same cache is, its folder's name.
_CACHES = (("TRITON_CACHE_DIR", ("TRITON_HOME",), "triton"), ("TORCHINDUCTOR_CACHE_DIR", (), "inductor"))


def variables(environ: Mapping[str, str], node: str, code: Path) -> tuple[dict[str, str], str | None]:
    """Variables for caches whose place nobody has set, and why there are none where this node has no fit folder. Never raises OSError."""
    wanted = {name: folder for name, others, folder in _CACHES if not any(other in environ for other in (name, *others))}
    if not wanted:
        return {}, None
    try:
        parent = _parent()
        if fault := _fault(parent):
            return {}, fault
        job = hashlib.sha256(os.fsencode(code)).hexdigest()[:16] if environ.get("SLURM_JOB_ID") else "local"
        place = parent / f"{node}_{job}"
        with contextlib.suppress(FileNotFoundError):  # nothing was compiled yet
            os.utime(place)
        if (environ.get("LOCAL_RANK") or "0") == "0":
            _remove_unused(parent)
    except OSError as error:
        return {}, f"{error.filename or 'temporary directory'}: {error.strerror or error}"
    return {name: str(place / folder) for name, folder in wanted.items()}, None


def _parent() -> Path:
    """This user's folder for caches, made where it is missing. Raises OSError."""
    temporary = tempfile.gettempdir()
    if temporary == os.getcwd() and temporary != "/tmp":  # Python's last resort, and no local file system as a rule
        raise OSError(f"none that can be written but the working directory, {temporary}")
    parent = Path(temporary) / f"launch_caches_{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    return parent


def _fault(parent: Path) -> str | None:
    """Why compiled code must not be, or cannot be, loaded from a folder. Raises OSError."""
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
    """Remove the folders that no rank was started with of late."""
    for folder in parent.iterdir():
        with contextlib.suppress(OSError):  # another rank was faster
            if folder.lstat().st_mtime < time.time() - UNUSED_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)
