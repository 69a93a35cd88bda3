"""data_prep: index caches that pretrain built, against the data that is there now. Reads complete.json of each, knows nothing of samples.

FOLDER/KEY/complete.json, written last: {"format": 1, "sources": [{"split", "prefix", "idx_sha256", "bin"}],
"files": {name: {"bytes", "sha256"}}}; ``bin`` is the .bin's SHA-256 or its sample (samples.sample_digest).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from data_prep.store.manifest import Manifest
from fem_common.files import sha256

COMPLETE = "complete.json"
FORMAT = 1


def cache_faults(caches: Path, folder: Path, manifest: Manifest, advance: Callable[[int], None]) -> Iterator[str]:
    """The faults of every cache below ``caches`` that was built from this folder's data. One that is unfinished is none."""
    for file in sorted(caches.glob(f"*/{COMPLETE}")):
        again = f"the cache {file.parent}: remove it and build it again with: python -m data_prep index RUN.yaml"
        try:
            yield from (f"{fault}; {again}" for fault in _faults(file, folder, manifest, advance))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{file} is damaged ({type(error).__name__}: {error}); {again}"


def _faults(file: Path, folder: Path, manifest: Manifest, advance: Callable[[int], None]) -> Iterator[str]:
    raw = json.loads(file.read_bytes())
    if raw["format"] != FORMAT:
        raise ValueError(f"format {raw['format']!r}")
    sources, files = raw["sources"], raw["files"]
    ours = [source for source in sources if Path(source["prefix"]).parent.resolve() == folder.resolve()]
    if not ours:
        return
    for source in ours:
        entry = manifest.splits.get(Path(source["prefix"]).name)
        if entry is None:
            yield f"{file} is stale: built from {source['prefix']}, which the data no longer has"
        elif source["bin"] not in (entry.bin_sha256, entry.bin_sample) or source["idx_sha256"] != entry.idx_sha256:
            yield f"{file} is stale: built from other contents of {source['prefix']} than are there now"
    for name, said in files.items():
        path = file.parent / name
        if not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != said["bytes"]:
            yield f"{path}: {path.stat().st_size} bytes, {COMPLETE} says {said['bytes']}"
        elif sha256(path) != said["sha256"]:
            yield f"{path}: content differs from {COMPLETE}'s hash"
        else:
            advance(said["bytes"])


def cache_bytes(caches: Path) -> int:
    """Bytes of all files of the caches, for the progress line."""
    return sum(path.stat().st_size for path in caches.glob("*/*") if path.is_file()) if caches.is_dir() else 0
