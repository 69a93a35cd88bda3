"""data_prep: what a data folder says of itself: a unit's entry, and manifest.json, the last file written and the first one read.

Records and their strict reading; no file of tokens is opened here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from data_prep.drops import BadRow, Drop
from data_prep.errors import UserError
from data_prep.layout import MANIFEST, PLAN, SHARDS, SPLITS

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
        bad = [_record(BadRow, row, place=_count, reason=Drop, message=_text) for row in _list(_only(raw, UnitEntry, "bad"))]
        entry: UnitEntry = _record(
            UnitEntry,
            raw,
            unit=_count,
            plan=_text,
            rows=_count,
            dropped=_drops,
            bad=lambda _: tuple(bad),
            splits=lambda value: _splits(value, SplitEntry),
            encoder=_text,
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
        manifest: Manifest = _record(
            Manifest,
            {name: value for name, value in raw.items() if name != "format"},
            tokenizer=lambda value: _record(TokenizerEntry, value, path=_text, vocab_size=_count, eod_id=_count, sha256=_text),
            dtype=_text,
            splits=lambda value: _splits(value, MergedEntry),
            source=_source,
            units=lambda value: _record(UnitsEntry, value, file=_text, count=_count, sha256=_text),
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


# --- strict reading: every field is there, nothing else is, each has its type --------------------------------------------------------


def _record(cls: type[Any], raw: Any, /, **readers: Callable[[Any], Any]) -> Any:
    values = {name: _only(raw, cls, name) for name in readers}
    read = {}
    for name, reader in readers.items():
        try:
            read[name] = reader(values[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return cls(**read)


def _only(raw: Any, cls: type[Any], name: str) -> Any:
    """The value of one field, after a look at all names."""
    if not isinstance(raw, dict):
        raise ValueError(f"{type(raw).__name__} where an object belongs")
    names = {field.name for field in fields(cls)}
    for kind, differing in (("lacks", names - raw.keys()), ("has an unknown", raw.keys() - names)):
        if differing:
            raise ValueError(f"{kind} {min(differing)!r}")
    return raw[name]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("not a list")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _drops(value: Any) -> dict[str, int]:
    return {str(Drop(reason)): _count(number) for reason, number in _object(value).items()}


def _splits(value: Any, cls: type[Any]) -> dict[str, Any]:
    readers = {field.name: _text if field.name.endswith(("sha256", "sample")) else _count for field in fields(cls)}
    for name in _object(value):
        if name not in SPLITS:
            raise ValueError(f"{name!r} is none of {', '.join(SPLITS)}")
    return {name: _record(cls, entry, **readers) for name, entry in value.items()}


def _file(value: Any) -> dict[str, Any]:
    readers = {"path": _text, "kind": _text, "bytes": _count, "rows": _count, "fingerprint": _text}
    if _object(value).keys() != readers.keys():
        raise ValueError(f"not {', '.join(readers)}")
    return {name: reader(value[name]) for name, reader in readers.items()}


def _source(value: Any) -> Source:
    source: Source = _record(
        Source,
        value,
        files=lambda files: [_file(file) for file in _list(files)],
        rows=_count,
        dropped=_drops,
        settings=lambda settings: dict(_object(settings)),
        encoder=_text,
        fingerprint=_text,
    )
    return source
