"""Copy the code that a job runs (its snapshot), so that later changes do not affect the job.

The snapshot contains the packages' files at the time of submission. The packages are in the same
folder as the package ``launch``, in a checkout or among the installed packages. Uses only git and
the standard library.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fem_common.errors import UserError
from launch.job.job import launch_folder, read_json, write_json

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("data_prep", "fem_common", "fem_megatron", "kernels", "launch", "pretrain", "tools")
BESIDE = "configs"  # folder next to the packages of a checkout; some commands read it
SUFFIXES = tuple(".py .pyi .yaml .yml .json .toml .j2 .sh .cu .cuh .cpp .h".split())
LARGEST = 1 << 20  # bytes; larger files are not copied
LARGEST_DIFF = 16 << 20  # bytes; changes.diff is truncated to this size
REVISION = "REVISION.json"


@dataclass(frozen=True)
class Code:
    """Description of the code in a snapshot."""

    revision: str | None  # git revision of the checkout; None without a checkout
    dirty: bool | None  # True if the files differ from the revision
    files: int
    bytes: int
    # number of files that are not copied: too large, of another type, or a link out of the root
    left_out: int
    sha256: str  # over names and contents of all files

    @property
    def label(self) -> str:
        """First 12 digits of the git revision, or of the content's sha256 without a checkout."""
        if not self.revision:
            return f"sha256 {self.sha256[:12]}"
        return f"{self.revision[:12]}{' with changes' if self.dirty else ''}"


def code_folder(directory: Path) -> Path:
    """Return the folder of a job's snapshot."""
    return launch_folder(directory) / "code"


def read_code(directory: Path) -> Code | None:
    """Return the description of a job's snapshot, or None if it is missing or incomplete."""
    raw = read_json(launch_folder(directory) / "code.json")
    try:
        return Code(**raw) if raw and code_folder(directory).is_dir() else None
    except TypeError:
        return None


def take(directory: Path, root: Path = ROOT) -> Code:
    """Copy the packages' files below ``root`` into the job's folder, and return their description.

    The copy replaces an older snapshot, and its files are read-only. After an interruption, the
    folder contains the older snapshot or none, but never an incomplete one.

    Raises:
        UserError: ``root`` has none of the packages.
    """
    launch, target = launch_folder(directory), code_folder(directory)
    names, left_out = source_files(root)
    if not names:
        raise UserError(
            f"{root}: it has none of the packages {', '.join(ROOMS)}; run launch from the checkout "
            "or install it"
        )
    launch.mkdir(parents=True, exist_ok=True)
    fresh, old = launch / f".code.{os.getpid()}", launch / f".code.old.{os.getpid()}"
    digest, size = hashlib.sha256(), 0
    try:
        for name in names:
            content = (root / name).read_bytes()
            digest.update(os.fsencode(name) + f"\0{len(content)}\0".encode() + content)
            size += len(content)
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            (fresh / name).write_bytes(content)
            (fresh / name).chmod(0o444)
        revision, changes = _revision(root, names)
        code = Code(
            revision,
            bool(changes) if revision else None,
            len(names),
            size,
            left_out,
            digest.hexdigest(),
        )
        # if root is itself a snapshot, copy the revision that it records
        if revision is None and (installed := read_json(root / REVISION)):
            code = replace(code, revision=installed.get("revision"), dirty=installed.get("dirty"))
        (fresh / REVISION).write_text(json.dumps(asdict(code), indent=1) + "\n", encoding="utf-8")
        (launch / "code.json").unlink(missing_ok=True)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
    finally:
        for folder in (fresh, old):
            shutil.rmtree(folder, ignore_errors=True)
    diff = launch / "changes.diff"
    diff.write_bytes(changes[:LARGEST_DIFF]) if changes else diff.unlink(missing_ok=True)
    write_json(launch / "code.json", asdict(code))
    return code


def source_files(root: Path) -> tuple[list[str], int]:
    """Return (the packages' source files, number of files left out).

    The files are sorted, and relative to ``root``. In a git checkout, tracked files and untracked
    files that git does not ignore are considered. Elsewhere, all files are considered except caches
    and files in hidden folders.
    """
    names = _listed(root, "--cached", "--others", "--exclude-standard") or _walk(root)
    present = [name for name in names if (root / name).is_file()]  # git also lists deleted files
    ours = [name for name in present if _is_source(root, root / name)]
    return sorted(ours), len(present) - len(ours)


def _is_source(root: Path, path: Path) -> bool:
    """Return True if ``path`` has a source file's suffix, and at most LARGEST bytes.

    For a symbolic link, the target must also be inside ``root``.
    """
    if not path.name.endswith(SUFFIXES) or path.stat().st_size > LARGEST:
        return False
    return path.resolve().is_relative_to(root.resolve())


def _walk(root: Path) -> Iterable[str]:
    """Yield the packages' files outside a git checkout, without caches and hidden folders."""
    # Another project may have a folder of the same name, so check for known subfolders.
    excluded = (
        [BESIDE]
        if (root / BESIDE / "run").is_dir() and (root / BESIDE / "cluster").is_dir()
        else []
    )
    for excluded_path in (*ROOMS, *excluded):
        for folder, folders, files in os.walk(root / excluded_path):
            folders[:] = sorted(
                name for name in folders if name != "__pycache__" and not name.startswith(".")
            )
            yield from (
                os.path.relpath(os.path.join(folder, file), root)
                for file in files
                if not file.endswith(".pyc")
            )


def _listed(root: Path, *options: str) -> list[str]:
    """Return the packages' files that git lists with these options.

    Return an empty list outside a checkout.
    """
    listed = _git(root, "ls-files", "-z", *options, "--", *ROOMS, BESIDE) or b""
    return list(dict.fromkeys(os.fsdecode(name) for name in listed.split(b"\0") if name))


def _revision(root: Path, names: Iterable[str]) -> tuple[str | None, bytes]:
    """Return (git revision, diff of uncommitted changes) of a checkout at ``root``.

    The diff covers the packages' files and includes untracked files. Return (None, b"") if ``root``
    is not the top of a checkout.
    """
    revision = _git(root, "rev-parse", "HEAD")
    top = _git(root, "rev-parse", "--show-toplevel")
    if not revision or not top or Path(os.fsdecode(top.rstrip(b"\n"))).resolve() != root.resolve():
        return None, b""
    diff, tracked = ("diff", "--no-ext-diff", "--no-textconv"), set(_listed(root))
    changes = [_git(root, *diff, "--binary", "HEAD", "--", *ROOMS, BESIDE)]
    changes += [
        _git(root, *diff, "--no-index", "--", os.devnull, name)
        for name in names
        if name not in tracked
    ]
    return revision.decode().strip(), b"".join(filter(None, changes))


def _git(root: Path, *arguments: str) -> bytes | None:
    """Run git in the checkout that contains ``root`` and return its output.

    Return None if git fails, is not installed, or ``root`` is in no checkout.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(root), "-c", "core.quotePath=false", *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    compares = "--no-index" in arguments  # exit code 1 means that the files differ
    return done.stdout if done.returncode == 0 or (compares and done.returncode == 1) else None
