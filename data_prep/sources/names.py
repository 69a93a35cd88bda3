"""Kinds of input files by their names, and the message about files that are not read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import PurePath

from fem_common.text import counted, first_few

KINDS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
PACKINGS = {".gz": ".gz", ".zst": ".zst", ".zstd": ".zst"}
# Descriptions of a dataset in the folder of its data. The library `datasets` ignores them too.
DESCRIPTIONS = frozenset(
    {"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
)
SHOWN = 5


def kind_by_name(name: str) -> str | None:
    """Return the kind of a file by its suffix, or None for an unknown suffix.

    The kinds are parquet, arrow, jsonl, jsonl.gz and jsonl.zst. Case is ignored.
    """
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes]
    packing = PACKINGS.get(suffixes[-1], "") if suffixes else ""
    if packing:
        suffixes.pop()
    kind = KINDS.get(suffixes[-1]) if suffixes else None
    return (
        None if kind is None or (packing and kind in ("parquet", "arrow")) else f"{kind}{packing}"
    )


def is_data(path: str) -> bool:
    """Return True if a file with this path below a folder is an input.

    Hidden names and dataset descriptions are not inputs.
    """
    parts = PurePath(path).parts
    return (
        kind_by_name(path) is not None
        and parts[-1].lower() not in DESCRIPTIONS
        and not any(part.startswith(".") for part in parts)
    )


def report_left_out(given: str, paths: Sequence[str], reason: str = "") -> None:
    """Print one line to stderr about the files ``paths`` of the input ``given`` that are not read.

    Hidden names are listed last.
    """
    if paths:
        named = sorted(paths, key=lambda path: (path.startswith("."), path))
        print(
            f"data_prep: {given}: {counted(len(named), 'name')} left out{reason}: "
            f"{first_few(named, SHOWN)}",
            file=sys.stderr,
        )
