"""data_prep: what a data folder says of itself: a unit's entry, and manifest.json, the last file written and the first one read.

Records and their strict reading; no file of tokens is opened here.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from data_prep.encode.splits import SPLITS
from data_prep.sources.rows import BadRow, Drop
from data_prep.store.layout import MANIFEST, PLAN, SHARDS
from data_prep.store.records import a_list, an_object, count, only, record, text
from fem_common.errors import UserError

FORMAT = 2
PLACES_KEPT = 100


@dataclass(frozen=True)
class TokenizerEntry:
    """The tokenizer's copy in the data folder; ``sha256`` is that of tokenizer.json."""

    path: str
    vocab_size: int
    eod_id: int
    sha256: str


@dataclass(frozen=True)
class SplitEntry:
    """One .bin/.idx pair; ``tokens`` counts EOD, ``text_bytes`` is the UTF-8 size of the documents written."""

    documents: int
    tokens: int
    text_bytes: int
    bin_sha256: str
    idx_sha256: str
    bin_bytes: int
    idx_bytes: int


@dataclass(frozen=True)
class MergedEntry(SplitEntry):
    """A merged pair; ``bin_sample`` (samples.sample_digest) tells another .bin of the same size in milliseconds."""

    bin_sample: str


@dataclass(frozen=True)
class UnitEntry:
    """What one unit wrote: OUT/shards/00007.json, later a line of units.jsonl.

    ``plan``: the plan's fingerprint. rows == documents of all splits + drops. ``bad``: the first places of bad rows, at most PLACES_KEPT.
    ``splits`` holds those with documents. Nothing in it tells the time, the machine or the process.
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
        """Documents written to all splits."""
        return sum(split.documents for split in self.splits.values())

    def as_json(self) -> dict[str, Any]:
        """The entry as its file holds it; drops and splits in their own fixed order."""
        value = asdict(self)
        value["dropped"] = {str(reason): self.dropped[reason] for reason in Drop if self.dropped.get(reason)}
        value["bad"] = [{"place": row.place, "reason": str(row.reason), "message": row.message} for row in self.bad]
        value["splits"] = {name: value["splits"][name] for name in SPLITS if name in self.splits}
        return value

    @staticmethod
    def from_json(raw: Any) -> UnitEntry:
        """The reverse. Raises ValueError that says what is wrong with it."""
        bad = [record(BadRow, row, place=count, reason=Drop, message=text) for row in a_list(only(raw, UnitEntry, "bad"))]
        entry: UnitEntry = record(
            UnitEntry,
            raw,
            unit=count,
            plan=text,
            rows=count,
            dropped=_drops,
            bad=lambda _: tuple(bad),
            splits=lambda value: _splits(value, SplitEntry),
            encoder=text,
        )
        if entry.rows != entry.documents + sum(entry.dropped.values()):
            raise ValueError(f"{entry.rows} rows are not {entry.documents} documents and {sum(entry.dropped.values())} drops")
        if len(bad) > PLACES_KEPT or any(count > entry.dropped.get(reason, 0) for reason, count in Counter(b.reason for b in bad).items()):
            raise ValueError("more bad rows are listed than were dropped")
        return entry


@dataclass(frozen=True)
class Source:
    """Where the data came from. ``files``: path, kind, bytes, rows and fingerprint of each input; ``settings`` as in the plan;
    ``encoder``: the encoders that ran; ``fingerprint``: the plan's."""

    files: list[dict[str, Any]]
    rows: int
    dropped: dict[str, int]
    settings: dict[str, Any]
    encoder: str
    fingerprint: str


@dataclass(frozen=True)
class UnitsEntry:
    """The file of the units' entries: its name, lines and SHA-256."""

    file: str
    count: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A data folder that is complete. It names no time: the same plan, encoded by the same encoder, gives the same manifest."""

    tokenizer: TokenizerEntry
    dtype: str
    splits: dict[str, MergedEntry]
    source: Source
    units: UnitsEntry

    def as_json(self) -> dict[str, Any]:
        """The manifest as manifest.json holds it."""
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_json(raw: Any) -> Manifest:
        """The reverse. Raises ValueError that says what is wrong with it."""
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError("not of this format")
        manifest: Manifest = record(
            Manifest,
            {name: value for name, value in raw.items() if name != "format"},
            tokenizer=lambda value: record(TokenizerEntry, value, path=text, vocab_size=count, eod_id=count, sha256=text),
            dtype=text,
            splits=lambda value: _splits(value, MergedEntry),
            source=_source,
            units=lambda value: record(UnitsEntry, value, file=text, count=count, sha256=text),
        )
        return manifest


def read_entry(path: Path) -> UnitEntry:
    """A unit's entry, OUT/shards/00007.json. Raises UserError where it is damaged, OSError where it is not there."""
    try:
        return UnitEntry.from_json(json.loads(path.read_bytes()))
    except ValueError as error:
        again = f"remove it and do the unit again with: python -m data_prep run --out {path.parent.parent}"
        raise UserError(f"{path} is damaged ({error}); {again}") from None


def read_manifest(folder: Path) -> Manifest:
    """Read DIR/manifest.json. Raises UserError where it is absent, damaged or of another format."""
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / PLAN).is_file() or (folder / SHARDS).is_dir():
            raise UserError(f"no {MANIFEST} in {folder}: it is not complete; go on with: python -m data_prep run --out {folder}")
        raise UserError(f"no {MANIFEST} in {folder}; write it with: python -m data_prep run")
    try:
        raw = json.loads(path.read_bytes())
        if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
            raise UserError(f"{path} has format {raw['format']!r}; this data_prep reads format {FORMAT}: make the data again with its run")
        return Manifest.from_json(raw)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove it and go on with: python -m data_prep run --out {folder}") from None


def _drops(value: Any) -> dict[str, int]:
    return {str(Drop(reason)): count(number) for reason, number in an_object(value).items()}


def _splits(value: Any, cls: type[Any]) -> dict[str, Any]:
    readers = {field.name: text if field.name.endswith(("sha256", "sample")) else count for field in fields(cls)}
    for name in an_object(value):
        if name not in SPLITS:
            raise ValueError(f"{name!r} is none of {', '.join(SPLITS)}")
    return {name: record(cls, entry, **readers) for name, entry in value.items()}


def _file(value: Any) -> dict[str, Any]:
    readers = {"path": text, "kind": text, "bytes": count, "rows": count, "fingerprint": text}
    if an_object(value).keys() != readers.keys():
        raise ValueError(f"not {', '.join(readers)}")
    return {name: reader(value[name]) for name, reader in readers.items()}


def _source(value: Any) -> Source:
    source: Source = record(
        Source,
        value,
        files=lambda files: [_file(file) for file in a_list(files)],
        rows=count,
        dropped=_drops,
        settings=lambda settings: dict(an_object(settings)),
        encoder=text,
        fingerprint=text,
    )
    return source
