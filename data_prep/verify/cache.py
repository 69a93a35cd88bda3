"""Check that the index caches built by pretrain match the current data.

The sources of a cache are read from FOLDER/KEY/complete.json, which is written last:
{"format": 1, "sources": [{"split", "prefix", "idx_sha256", "bin"}],
"files": {name: {"bytes", "sha256"}}}. ``bin`` is the .bin's SHA-256 or its sample
(indexed.sample_digest).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.aliases import Advance, Json
from data_prep.prepared.manifest import Manifest
from data_prep.prepared.staging import existing_folder
from fem_common.files import sha256

COMPLETE = "complete.json"
FORMAT = 1
AGAIN = "remove it and build it again with: python -m data_prep index RUN.yaml"


@dataclass
class Caches:
    """Result of the check of index caches.

    ours: number of caches of this data folder.
    others: number of caches of other data.
    unfinished: number of caches without complete.json.
    faults: error texts.
    """

    ours: int = 0
    others: int = 0
    unfinished: int = 0
    faults: list[str] = field(default_factory=list)


def check_caches(caches: Path, folder: Path, manifest: Manifest, advance: Advance) -> Caches:
    """Check every cache in the folder ``caches`` and return the result.

    A cache is compared with the manifest if it was built from data in ``folder``. Raises UserError
    if ``caches`` does not exist.
    """
    existing_folder(caches, "index caches that pretrain or python -m data_prep index built")
    result = Caches()
    for cache in sorted(path for path in caches.iterdir() if path.is_dir()):
        file = cache / COMPLETE
        if not file.is_file():
            result.unfinished += 1
            continue
        try:
            sources, files = _read(file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            result.faults.append(
                f"{file} is damaged ({type(error).__name__}: {error}); the cache {cache}: {AGAIN}"
            )
            continue
        prefixes = [Path(source["prefix"]) for source in sources]
        ours = {
            prefix.name: source
            for prefix, source in zip(prefixes, sources, strict=True)
            if prefix.parent.resolve() == folder.resolve()
        }
        result.ours += bool(ours)
        result.others += not ours
        if ours:
            found = [*_stale(cache, ours, manifest), *_damaged(cache, files, advance)]
            result.faults += [f"{fault}; the cache {cache}: {AGAIN}" for fault in found]
    return result


def cache_bytes(caches: Path) -> int:
    """Return the total size of all files of the caches in bytes, for the progress line.

    A concurrent build may rename or remove a folder; missing files are ignored.
    """
    total = 0
    for folder, _, names in os.walk(caches):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _read(file: Path) -> tuple[list[dict[str, str]], dict[str, Json]]:
    raw = json.loads(file.read_bytes())
    if raw["format"] != FORMAT:
        raise ValueError(f"format {raw['format']!r}")
    sources = [
        {name: str(source[name]) for name in ("split", "prefix", "idx_sha256", "bin")}
        for source in raw["sources"]
    ]
    return sources, {
        str(name): {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
        for name, entry in raw["files"].items()
    }


def _stale(cache: Path, sources: dict[str, dict[str, str]], manifest: Manifest) -> Iterator[str]:
    for name, source in sources.items():
        entry = manifest.splits.get(name)
        if entry is None:
            yield (
                f"{cache / COMPLETE} is stale: built from {source['prefix']}, which the data no "
                "longer has"
            )
        elif source["idx_sha256"] != entry.idx_sha256 or source["bin"] not in (
            entry.bin_sha256,
            entry.bin_sample,
        ):
            yield (
                f"{cache / COMPLETE} is stale: built from another content of {source['prefix']} "
                "than the current one"
            )


def _damaged(cache: Path, files: dict[str, Json], advance: Advance) -> Iterator[str]:
    for name, recorded in files.items():
        path = cache / name
        if not path.is_file():
            yield f"{path} is missing"
            continue
        if path.stat().st_size != recorded["bytes"]:
            yield f"{path}: {path.stat().st_size} bytes, {COMPLETE} says {recorded['bytes']}"
        elif sha256(path) != recorded["sha256"]:
            yield f"{path}: content differs from {COMPLETE}'s hash"
        advance(path.stat().st_size)
