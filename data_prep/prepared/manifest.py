"""Records of unit entries and of manifest.json, and their strict parsing.

manifest.json is the last file written to a data folder and the first one read. This module opens
no files of tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_prep.aliases import Json
from data_prep.encode.splits import SPLITS
from data_prep.prepared.document_ids import IdsEntry
from data_prep.prepared.layout import MANIFEST, PLAN, SHARDS, do_again
from data_prep.prepared.loss_mask import MaskEntry
from data_prep.prepared.records import read
from data_prep.sources.rows import BadRow, Drop, by_reason
from fem_common.config import plain
from fem_common.errors import UserError

FORMAT = 2
PLACES_KEPT = 100


@dataclass(frozen=True)
class TokenizerEntry:
    """Record of the tokenizer that was copied to the data folder.

    ``sha256`` is the hash of tokenizer.json.
    """

    path: str
    vocab_size: int
    eod_id: int
    sha256: str


@dataclass(frozen=True)
class SplitEntry:
    """Record of one .bin/.idx pair.

    tokens: number of ids including EOD.
    text_bytes: UTF-8 size of the documents written.
    ids: record of the file of the documents' ids. It is None in older data, and if the text column
    is also the id column.
    mask: record of the mask of the loss, only of conversations.
    """

    documents: int
    tokens: int
    text_bytes: int
    bin_sha256: str
    idx_sha256: str
    bin_bytes: int
    idx_bytes: int
    ids: IdsEntry | None = field(default=None, kw_only=True)
    mask: MaskEntry | None = field(default=None, kw_only=True)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes in bytes of the pair's files, by file ending."""
        others = {"ids": self.ids, "mask": self.mask}
        return {"bin": self.bin_bytes, "idx": self.idx_bytes} | {
            kind: entry.bytes for kind, entry in others.items() if entry
        }

    def as_json(self) -> Json:
        """Return the entry as a dictionary for JSON. ``ids`` and ``mask`` are omitted if None."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in ("ids", "mask") or value is not None
        }


@dataclass(frozen=True)
class MergedEntry(SplitEntry):
    """Record of a merged .bin/.idx pair.

    ``bin_sample`` is the indexed.sample_digest of the .bin file. It reveals in milliseconds that
    the file was replaced by one of the same size.
    """

    bin_sample: str


@dataclass(frozen=True)
class UnitEntry:
    """Record of a finished unit: OUT/shards/00007.json, later one line of units.jsonl.

    plan: fingerprint of the plan.
    rows: rows read; equal to the documents of all splits plus the dropped rows.
    bad: first bad rows, at most PLACES_KEPT.
    splits: records of the splits that contain documents of the unit.

    The record does not depend on time, machine or process.
    """

    unit: int
    plan: str
    rows: int
    dropped: dict[str, int]
    bad: tuple[BadRow, ...]
    splits: dict[str, SplitEntry]
    encoder: str

    @property
    def documents(self) -> int:
        """Number of documents written to all splits."""
        return sum(split.documents for split in self.splits.values())

    def as_json(self) -> Json:
        """Return the entry as a dictionary for JSON, with drops and splits in a fixed order."""
        splits = {name: self.splits[name].as_json() for name in SPLITS if name in self.splits}
        value: Json = plain(self)
        return value | {"dropped": by_reason(self.dropped), "splits": splits}

    @staticmethod
    def from_json(raw: Any) -> UnitEntry:
        """Parse an entry from ``as_json``. Raises ValueError with a description of the fault."""
        entry: UnitEntry = read(UnitEntry, raw)
        _check_names(entry.dropped, entry.splits)
        if entry.rows != entry.documents + sum(entry.dropped.values()):
            raise ValueError(
                f"{entry.rows} rows are not {entry.documents} documents and "
                f"{sum(entry.dropped.values())} drops"
            )
        listed = Counter(row.reason for row in entry.bad)
        if len(entry.bad) > PLACES_KEPT or any(
            number > entry.dropped.get(reason, 0) for reason, number in listed.items()
        ):
            raise ValueError("more bad rows are listed than were dropped")
        return entry


@dataclass(frozen=True)
class Input:
    """Record of an input file, as in the plan, except that ``rows`` is the number of rows read."""

    path: str
    kind: str
    bytes: int
    rows: int
    fingerprint: str


@dataclass(frozen=True)
class Source:
    """Record of the inputs, settings and encoders from which the data was made.

    settings: settings of the plan.
    encoder: names of the encoders that were used.
    fingerprint: fingerprint of the plan.
    """

    files: list[Input]
    rows: int
    dropped: dict[str, int]
    settings: Json
    encoder: str
    fingerprint: str


@dataclass(frozen=True)
class UnitsEntry:
    """Record of units.jsonl: file name, number of lines and SHA-256."""

    file: str
    count: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json, which describes a complete data folder.

    It contains no times: the same plan, encoded by the same encoder, gives the same manifest.
    """

    tokenizer: TokenizerEntry
    dtype: str
    splits: dict[str, MergedEntry]
    source: Source
    units: UnitsEntry

    def as_json(self) -> Json:
        """Return the content of manifest.json as a dictionary."""
        return {
            "format": FORMAT,
            **asdict(self),
            "splits": {name: entry.as_json() for name, entry in self.splits.items()},
        }

    @staticmethod
    def from_json(raw: Any) -> Manifest:
        """Parse a manifest that ``as_json`` wrote. Raises ValueError with a description of the
        fault.
        """
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError("not of this format")
        manifest: Manifest = read(
            Manifest, {name: value for name, value in raw.items() if name != "format"}
        )
        _check_names(manifest.source.dropped, manifest.splits)
        return manifest


def read_entry(path: Path) -> UnitEntry:
    """Read a unit's entry from ``path``, for example OUT/shards/00007.json.

    Raises UserError if it is damaged, and OSError if it does not exist.
    """
    try:
        return UnitEntry.from_json(json.loads(path.read_bytes()))
    except (ValueError, RecursionError) as error:
        again = do_again(path.parent.parent)
        raise UserError(f"{path} is damaged ({error}); {again}") from None


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json in ``folder`` and return it.

    Raises UserError if it is absent, damaged or of another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / PLAN).is_file() or (folder / SHARDS).is_dir():
            raise UserError(
                f"no {MANIFEST} in {folder}: it is not complete; continue with: python -m "
                f"data_prep run --out {folder}"
            )
        raise UserError(f"no {MANIFEST} in {folder}; write it with: python -m data_prep run")
    try:
        raw = json.loads(path.read_bytes())
        if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
            raise UserError(
                f"{path} has format {raw['format']!r}; this data_prep reads format {FORMAT}: "
                "make the data again with its run"
            )
        return Manifest.from_json(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({error}); remove it and continue with: python -m data_prep "
            f"run --out {folder}"
        ) from None


def size_fault(folder: Path, manifest: Manifest) -> str | None:
    """Return the error text for the first file of a merged pair with a wrong size, or None.

    A missing file also counts as a fault.
    """
    for name, entry in manifest.splits.items():
        for kind, size in entry.sizes.items():
            file = folder / f"{name}.{kind}"
            if not file.is_file() or file.stat().st_size != size:
                return f"{file} is not the {size} bytes that {MANIFEST} says"
    return None


def _check_names(dropped: Iterable[str], splits: Iterable[str]) -> None:
    """Raise ValueError if a reason in ``dropped`` or a name in ``splits`` is unknown."""
    for reason in dropped:
        Drop(reason)
    for name in splits:
        if name not in SPLITS:
            raise ValueError(f"{name!r} is none of {', '.join(SPLITS)}")
