"""data_prep: what a data folder says of itself: a unit's entry, and manifest.json, the last file written and the first one read.

Records and their strict reading; no file of tokens is opened here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_prep.encode.splits import SPLITS
from data_prep.sources.rows import BadRow, Drop
from data_prep.store.document_ids import IdsEntry
from data_prep.store.layout import MANIFEST, PLAN, SHARDS
from data_prep.store.records import read
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
    """One .bin/.idx pair; ``tokens`` counts EOD, ``text_bytes`` is the UTF-8 size of the documents written.

    ``ids``: the file of the documents' ids; None in older data, and where the text is its own id.
    """

    documents: int
    tokens: int
    text_bytes: int
    bin_sha256: str
    idx_sha256: str
    bin_bytes: int
    idx_bytes: int
    ids: IdsEntry | None = field(default=None, kw_only=True)

    @property
    def sizes(self) -> dict[str, int]:
        """Its files' endings -> bytes."""
        return {"bin": self.bin_bytes, "idx": self.idx_bytes} | (
            {"ids": self.ids.bytes} if self.ids else {}
        )

    def as_json(self) -> dict[str, Any]:
        """The entry as files hold it: without ``ids`` where there are none."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name != "ids" or value is not None
        }


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
        value["dropped"] = {
            str(reason): self.dropped[reason] for reason in Drop if self.dropped.get(reason)
        }
        value["bad"] = [
            {"place": row.place, "reason": str(row.reason), "message": row.message}
            for row in self.bad
        ]
        value["splits"] = {
            name: self.splits[name].as_json() for name in SPLITS if name in self.splits
        }
        return value

    @staticmethod
    def from_json(raw: Any) -> UnitEntry:
        """The reverse. Raises ValueError that says what is wrong with it."""
        entry: UnitEntry = read(UnitEntry, raw)
        _check_names(entry.dropped, entry.splits)
        if entry.rows != entry.documents + sum(entry.dropped.values()):
            raise ValueError(
                f"{entry.rows} rows are not {entry.documents} documents and {sum(entry.dropped.values())} drops"
            )
        listed = Counter(row.reason for row in entry.bad)
        if len(entry.bad) > PLACES_KEPT or any(
            number > entry.dropped.get(reason, 0) for reason, number in listed.items()
        ):
            raise ValueError("more bad rows are listed than were dropped")
        return entry


@dataclass(frozen=True)
class Input:
    """One input: as in the plan, but for its rows, which are those that were read."""

    path: str
    kind: str
    bytes: int
    rows: int
    fingerprint: str


@dataclass(frozen=True)
class Source:
    """Where the data came from. ``settings`` as in the plan; ``encoder``: the encoders that ran; ``fingerprint``: the plan's."""

    files: list[Input]
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
        return {
            "format": FORMAT,
            **asdict(self),
            "splits": {name: entry.as_json() for name, entry in self.splits.items()},
        }

    @staticmethod
    def from_json(raw: Any) -> Manifest:
        """The reverse. Raises ValueError that says what is wrong with it."""
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError("not of this format")
        manifest: Manifest = read(
            Manifest, {name: value for name, value in raw.items() if name != "format"}
        )
        _check_names(manifest.source.dropped, manifest.splits)
        return manifest


def read_entry(path: Path) -> UnitEntry:
    """A unit's entry, OUT/shards/00007.json. Raises UserError where it is damaged, OSError where it is not there."""
    try:
        return UnitEntry.from_json(json.loads(path.read_bytes()))
    except (ValueError, RecursionError) as error:
        again = f"remove it and do the unit again with: python -m data_prep run --out {path.parent.parent}"
        raise UserError(f"{path} is damaged ({error}); {again}") from None


def read_manifest(folder: Path) -> Manifest:
    """Read DIR/manifest.json. Raises UserError where it is absent, damaged or of another format."""
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / PLAN).is_file() or (folder / SHARDS).is_dir():
            raise UserError(
                f"no {MANIFEST} in {folder}: it is not complete; go on with: python -m data_prep run --out {folder}"
            )
        raise UserError(f"no {MANIFEST} in {folder}; write it with: python -m data_prep run")
    try:
        raw = json.loads(path.read_bytes())
        if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
            raise UserError(
                f"{path} has format {raw['format']!r}; this data_prep reads format {FORMAT}: make the data again with its run"
            )
        return Manifest.from_json(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({error}); remove it and go on with: python -m data_prep run --out {folder}"
        ) from None


def size_fault(folder: Path, manifest: Manifest) -> str | None:
    """The first file of a merged pair that is missing or of another size; None where all are there."""
    for name, entry in manifest.splits.items():
        for kind, size in entry.sizes.items():
            file = folder / f"{name}.{kind}"
            if not file.is_file() or file.stat().st_size != size:
                return f"{file} is not the {size} bytes that {MANIFEST} says"
    return None


def _check_names(dropped: Iterable[str], splits: Iterable[str]) -> None:
    """Raises ValueError for a reason or a split that there is not."""
    for reason in dropped:
        Drop(reason)
    for name in splits:
        if name not in SPLITS:
            raise ValueError(f"{name!r} is none of {', '.join(SPLITS)}")
