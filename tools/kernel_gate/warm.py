"""Triton cache for GPUs, made without a GPU, and an archive of it.

The cache contains each kernel under the key that the JIT on a GPU machine uses. The key covers the
kernel's source, the types and alignment of its arguments, the options, ptxas, and Triton's own
files. One of Triton's files is a library compiled for one version of Python, so `key_of` computes
Triton's part of the key for a machine with another version.

A cache's group files contain absolute paths, so an archive must be unpacked at a fixed path. The
archive contains machine code and metadata, which is all that a cache hit reads; the intermediate
representations, four fifths of a cache, are left out. The archive contains no launchers: Triton 3.6
compiles one in C for each signature, with the compiler and the Python of the GPU machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path, PurePath

from fem_common.errors import UserError
from fem_common.files import write_atomically
from tools.kernel_gate.gate import Build, Progress, in_processes, reason
from tools.kernel_gate.jit import compiled

Entry = tuple[str, str]  # a folder of the cache, and the error without one ("": no error)


def fill(
    builds: Sequence[Build], arch: int, folder: Path, key: str, progress: Progress
) -> list[Entry]:
    """Compile the builds into a cache at ``folder``, and keep its existing entries.

    Return (folder of the entry in the cache, error or "") for each build.

    key: Triton's part of the cache key; "" uses that of this process.
    """
    return in_processes(partial(_entries, arch=arch, folder=folder, key=key), builds, progress)


def _entries(builds: Sequence[Build], arch: int, folder: Path, key: str) -> list[Entry]:
    from triton import knobs
    from triton.runtime import cache

    knobs.cache.dir, knobs.compilation.store_binary_only = str(folder), True
    if key:
        cache.triton_key = lambda: key
    found = []
    for build in builds:
        try:
            made = compiled(build.function, build.arguments(), arch)
        except Exception as error:  # Triton's passes may raise anything; the rest continues
            found.append(("", reason(error)))
        else:
            found.append((Path(next(iter(made.metadata_group.values()))).parent.name, ""))
    return found


def key_of(installed: Path) -> str:
    """Return Triton's part of the cache key on a machine with the Triton in ``installed``.

    Raises UserError if its version differs from that of this process.
    """
    from triton.runtime.cache import triton_key

    library = Path("triton", "_C", "libtriton.so")
    found = next(
        (each.version for each in distributions(name="triton", path=[str(installed)])), None
    )
    if found is None or not (installed / library).is_file():
        options = f"--no-deps --only-binary :all: --python-version 3.12 --target {installed}"
        raise UserError(
            f"{installed} has no Triton: pip install {options} triton=={version('triton')}, of "
            "the Python there"
        )
    if found != version("triton"):
        raise UserError(
            f"{installed} has Triton {found}, and {version('triton')} compiles here: put that "
            "version on PYTHONPATH"
        )
    import triton

    own, other = (
        _digest(place / library) for place in (Path(triton.__file__).parents[1], installed)
    )
    return str(triton_key()).replace(own, other)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def pack(folder: Path, entries: Iterable[str], at: PurePath) -> Path:
    """Write an archive of cache entries, ``folder``.tgz, and return its path.

    folder: the cache.
    entries: folders of the entries in the cache.
    at: path at which the archive must be unpacked.
    """
    archive, content = folder.with_name(f"{folder.name}.tgz"), io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as packed:
        for entry in sorted(set(entries)):
            files = {
                path.name: path.read_bytes()
                for path in sorted((folder / entry).iterdir())
                if path.suffix in (".cubin", ".json")
            }
            group = next(name for name in files if name.startswith("__grp__"))
            children = {name: str(at / entry / name) for name in files if name != group}
            files[group] = json.dumps({"child_paths": children}).encode()
            for name, data in files.items():
                member = tarfile.TarInfo(f"{entry}/{name}")
                member.size = len(data)
                packed.addfile(member, io.BytesIO(data))
    write_atomically(archive, content.getvalue(), synced=False)
    return archive
